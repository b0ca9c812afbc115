"""Learn embeddings of text with in-batch negatives, a large batch through small micro-batches.

    python recipes/contrastive.py
    torchrun --nproc_per_node 2 recipes/contrastive.py

The two halves of a passage, its words at even and at odd places, belong together; all others of
the batch, on all ranks, are negatives. `accum.contrastive` has the loss and the gradient of the
whole batch with the memory of one micro-batch. The texts are those of Python's own help system.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import hold_out, read_documents
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accumplug import Accumulator

PASSAGE = 40  # words
PLACES = 8192  # for words; the same in every process


class Encoder(nn.Module):
    """Two halves to two directions: a mean over words, then a layer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(PLACES, width)
        self.layers = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 64))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        directions = [F.normalize(self.layers(self.words(t)), dim=1) for t in (one, other)]
        return directions[0], directions[1]


def loss(one: Tensor, other: Tensor) -> Tensor:
    """A mean over rows, in both directions: which of all passages is the right one?"""
    scores, right = one @ other.T / 0.07, torch.arange(len(one), device=one.device)
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, default=256, help="pairs in a batch of one rank")
    parser.add_argument("--micro-batch", type=int, default=32, help="pairs in a forward pass")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo")

    # The data: the same seed and so the same texts on all ranks.
    torch.manual_seed(0)
    train_texts, held_out_texts = hold_out(read_documents(None))
    train, held_out = pairs(train_texts), pairs(held_out_texts)
    sampler = DistributedSampler(train, drop_last=True) if world_size > 1 else None
    loader = DataLoader(train, args.batch, sampler is None, sampler, drop_last=True)

    # With steps=None a window is what contrastive is given: one batch, one update.
    encoder = Encoder()
    model = DistributedDataParallel(encoder) if world_size > 1 else encoder
    accum = Accumulator(None, optimizer=torch.optim.AdamW(encoder.parameters(), 3e-3))
    print_here = world_size == 1 or dist.get_rank() == 0
    if print_here:
        print(f"before: {found(encoder, held_out):.0%} of the held-out halves find each other")
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in accum.batches(loader):
            accum.contrastive(model, batch=batch, size=args.micro_batch, loss=loss)
        if print_here and accum.last is not None:
            print(f"epoch {epoch + 1}: loss {accum.last.loss:.4f}, {accum.updates} updates")
    if print_here:
        print(f"after: {found(encoder, held_out):.0%} of the held-out halves find each other")
    return 0


def pairs(texts: list[str]) -> TensorDataset:
    """The words at even and at odd places of each passage, as numbers."""
    passages = []
    for text in texts:
        words = [zlib.crc32(word.encode()) % PLACES for word in text.lower().split()]
        passages += [words[i : i + PASSAGE] for i in range(0, len(words) - PASSAGE + 1, PASSAGE)]
    rows = torch.tensor(passages)
    return TensorDataset(rows[:, 0::2], rows[:, 1::2])


@torch.no_grad()
def found(encoder: nn.Module, data: TensorDataset) -> float:
    """How many first halves are nearest to their own second half, of up to 256."""
    encoder.eval()
    one, other = encoder(*(side[:256] for side in data.tensors))
    encoder.train()
    return ((one @ other.T).argmax(1) == torch.arange(len(one))).float().mean().item()


if __name__ == "__main__":
    code = main()  # the model is gone when it returns, and must be before its process group
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
