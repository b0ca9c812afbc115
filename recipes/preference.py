"""Learn a preference (DPO) from pairs, many to an update, through micro-batches of a few pairs.

    python recipes/preference.py

A batch of pairs is an update. `accum.split` cuts it into micro-batches, so that memory is that of
a few pairs. The loss has two means: one over pairs (Rafailov et al. 2023, arXiv 2305.18290), and
one over the tokens of the chosen answers, which keeps them likely. The tokens of the whole batch
are counted before it is cut; a mean over those of a micro-batch would weigh short answers more.
Chosen is what the text goes on with, rejected the same characters in another order.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys

import torch
import torch.nn.functional as F
from corpus import START, hold_out, number_characters, read_documents
from model import LanguageModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accumplug import Accumulator

PROMPT, ANSWER = 24, 16  # characters; answers are of 1 to 16
BETA, KEEP = 0.5, 0.2  # how far from the reference; the share of the chosen answers' loss

Batch = list[Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, default=64, help="pairs in an update")
    parser.add_argument("--micro-batch", type=int, default=8, help="pairs in a forward pass")
    parser.add_argument("--pairs", type=int, default=2048, help="pairs to learn from")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    documents = read_documents(None)
    ids = number_characters(documents)
    train_texts, held_out_texts = hold_out(documents)
    loader = DataLoader(pairs(train_texts, ids, args.pairs), args.batch, shuffle=True)
    held_out = list(pairs(held_out_texts, ids, 256).tensors)

    policy = LanguageModel(len(ids) + 1, width=64)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    # With steps=None a window is what split is given: one batch, one update.
    accum = Accumulator(None, optimizer=optimizer, max_grad_norm=1.0)
    print(f"before: {preferred(policy, held_out):.0%} of the held-out texts are preferred")
    for epoch in range(args.epochs):
        for batch in accum.batches(loader):
            train(accum, policy, reference, batch, args.micro_batch)
        if accum.last is not None:
            print(f"epoch {epoch + 1}: loss {accum.last.loss:.4f}, {accum.updates} updates")
    print(f"after: {preferred(policy, held_out):.0%} of the held-out texts are preferred")
    return 0


def train(
    accum: Accumulator, policy: nn.Module, reference: nn.Module, batch: Batch, size: int
) -> None:
    """Train on one batch, in micro-batches of `size` pairs."""
    tokens = answer_tokens(batch[0])  # of the whole batch: the mean is over all of them
    tokens_per_pair = max(tokens, 1) / len(batch[0])
    for part in accum.split(batch, size):
        # The block's weight is its number of pairs, and its loss a sum over them.
        with accum(policy, weight=len(part[0])):
            loss = loss_sum(policy, reference, part, tokens_per_pair)
            accum.backward(loss, reduction="sum")


def loss_sum(
    policy: nn.Module, reference: nn.Module, batch: Batch, tokens_per_pair: float
) -> Tensor:
    """The loss of some pairs, times their number.

    Args:
        tokens_per_pair: of the window: turns a sum over tokens into a share of their mean.
    """
    chosen, rejected = (log_likelihood(policy, side) for side in batch)
    with torch.no_grad():
        before = [log_likelihood(reference, side) for side in batch]
    margins = (chosen - before[0]) - (rejected - before[1])
    return -F.logsigmoid(BETA * margins).sum() - KEEP * chosen.sum() / tokens_per_pair


def log_likelihood(model: nn.Module, texts: Tensor) -> Tensor:
    """Of the answer of each text, summed over its characters; 0 for an empty answer."""
    targets = texts[:, 1:]
    found = model(texts[:, :-1]).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return (found * answers(texts)[:, 1:]).sum(1)


def answers(texts: Tensor) -> Tensor:
    """Which characters belong to an answer: those behind the prompt that are no filling."""
    places = torch.arange(texts.shape[1], device=texts.device)
    return (places >= PROMPT) & (texts != START)


def answer_tokens(texts: Tensor) -> int:
    return int(answers(texts).sum())


def pairs(documents: list[str], ids: dict[str, int], count: int) -> TensorDataset:
    """Chosen and rejected texts: a prompt and an answer of uneven length, filled up."""
    generator, sides = random.Random(0), ([], [])
    long = [text for text in documents if len(text) > PROMPT + ANSWER]
    for _ in range(count):
        text, length = generator.choice(long), generator.randint(1, ANSWER)
        begin = generator.randrange(len(text) - PROMPT - ANSWER)
        prompt = text[begin : begin + PROMPT]
        answer = text[begin + PROMPT : begin + PROMPT + length]
        other = "".join(generator.sample(answer, length))
        for side, words in zip(sides, (answer, other), strict=True):
            numbers = [ids[character] for character in prompt + words]
            side.append(numbers + [START] * (ANSWER - length))
    return TensorDataset(*(torch.tensor(side) for side in sides))


@torch.no_grad()
def preferred(model: nn.Module, batch: Batch) -> float:
    """How often the chosen answer is more likely than the rejected one, where they differ."""
    differ = (batch[0] != batch[1]).any(1)
    chosen, rejected = (log_likelihood(model, side[differ]) for side in batch)
    return (chosen > rejected).float().mean().item()


if __name__ == "__main__":
    sys.exit(main())
