"""A small transformer language model, and its loss on held-out text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Scores for the next character, from the characters so far.

    Pre-norm blocks, rotary positions (Su et al. 2021, arXiv 2104.09864), no dropout. It has no
    buffers, so DistributedDataParallel has nothing to broadcast in a forward.
    """

    def __init__(
        self, characters: int, *, width: int = 96, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, inputs: Tensor) -> Tensor:
        """Give logits (sequences x length x characters) for ids (sequences x length)."""
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_norm = nn.RMSNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        sequences, length, width = hidden.shape
        projected = self.queries_keys_values(self.attention_norm(hidden))
        by_head = projected.view(sequences, length, 3, self.heads, width // self.heads)
        queries, keys, values = by_head.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            rotate(queries), rotate(keys), values, is_causal=True
        )
        hidden = hidden + self.attended(attended.transpose(1, 2).flatten(2))
        return hidden + self.narrow(F.gelu(self.wide(self.feed_norm(hidden))))


def rotate(vectors: Tensor) -> Tensor:
    """Turn each pair of coordinates by an angle that grows with the position (the last but one
    dimension), so that a product of two depends on how far apart they are."""
    length, size = vectors.shape[-2:]
    turns = 10_000 ** (-torch.arange(0, size, 2, device=vectors.device) / size)
    angles = torch.arange(length, device=vectors.device)[:, None] * turns
    cosine, sine = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


@torch.no_grad()
def nats(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor, int]]) -> list[float]:
    """The summed loss of each batch. `math.fsum` over the ranks' lists is the same number on any
    number of ranks, bit for bit, if they deal out the same batches."""
    model.eval()
    device = next(model.parameters()).device
    return [
        F.cross_entropy(
            model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten(), reduction="sum"
        ).item()
        for inputs, targets, _ in batches
    ]
