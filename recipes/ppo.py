"""Reinforcement learning of a text model (PPO): mini-batches of mini-batches, masks of tokens.

    python recipes/ppo.py

The policy writes answers to prompts, and each answer has a reward. A rollout of many answers is
gone through several times, in mini-batches; each mini-batch is an update (Schulman et al. 2017,
arXiv 1707.06347), and is cut by `accum.split` into micro-batches that fit in memory. The loss is
a mean over the answers' tokens in the whole mini-batch. An answer may end at once, so that a
micro-batch may have no token at all: its weight is 0 and it adds nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from corpus import START, number_characters, read_documents
from model import LanguageModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accumplug import Accumulator

PROMPT, ANSWER = 12, 12  # characters; an answer ends with START, or when it is full
CLIP, VALUE, ENTROPY = 0.2, 0.5, 0.01  # how far in an update; shares of the loss


class Rollout(NamedTuple):
    """Answers and what was known when they were written; rows, or rows x tokens of an answer."""

    texts: Tensor
    mask: Tensor
    """Which tokens the policy has chosen and is trained on."""
    log_probs: Tensor
    rewards: Tensor
    advantages: Tensor


class Policy(nn.Module):
    """A language model that also says which reward it expects at each place."""

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.body = LanguageModel(characters, width=width, layers=1)
        self.value = nn.Linear(characters, 1)

    def forward(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """For each token of the answers: logits, and the reward expected before it."""
        logits = self.body(texts[:, :-1])[:, PROMPT - 1 :]
        return logits, self.value(logits.detach())[..., 0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollout", type=int, default=256, help="answers that are written at once")
    parser.add_argument("--mini-batch", type=int, default=64, help="answers in an update")
    parser.add_argument("--micro-batch", type=int, default=8, help="answers in a forward pass")
    parser.add_argument("--epochs", type=int, default=2, help="times through a rollout")
    parser.add_argument("--rollouts", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    documents = read_documents(None)
    ids = number_characters(documents)
    wanted = torch.tensor([ids[character] for character in "aeiou"])
    policy = Policy(len(ids) + 1)
    optimizer = torch.optim.AdamW(policy.parameters(), 3e-3)
    # With steps=None a window is what split is given: one mini-batch, one update.
    accum = Accumulator(None, optimizer=optimizer, max_grad_norm=1.0)
    for number in range(args.rollouts):
        rollout = write(policy, prompts(documents, ids, args.rollout, number), wanted)
        for _ in range(args.epochs):
            loader = DataLoader(TensorDataset(*rollout), args.mini_batch, shuffle=True)
            for mini_batch in accum.batches(loader):
                train(accum, policy, Rollout(*mini_batch), args.micro_batch)
        reward, tokens = rollout.rewards.mean(), int(rollout.mask.sum())
        print(f"rollout {number + 1}: reward {reward:.3f}, {tokens} tokens")
    return 0


def train(accum: Accumulator, policy: nn.Module, mini_batch: Rollout, size: int) -> None:
    """One update, in micro-batches of `size` answers."""
    for part in accum.split(tuple(mini_batch), size):
        rollout = Rollout(*part)
        # The sum over the tokens of this part; accum divides by those of the whole window.
        with accum(policy, weight=int(rollout.mask.sum())):
            accum.backward(loss_sum(policy, rollout), reduction="sum")


def loss_sum(policy: nn.Module, rollout: Rollout) -> Tensor:
    """The loss of PPO, summed over the tokens of the answers."""
    logits, values = policy(rollout.texts)
    log_probs, entropy = chosen(logits, rollout.texts)
    ratio = (log_probs - rollout.log_probs).exp()
    advantages = rollout.advantages
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    missed = (values - rollout.rewards[:, None]) ** 2
    return ((VALUE * missed - gain - ENTROPY * entropy) * rollout.mask).sum()


def chosen(logits: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """The log probability of each token of the answers, and the entropy it was chosen with."""
    all_log_probs = F.log_softmax(logits, -1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return all_log_probs.gather(-1, texts[:, PROMPT:, None])[..., 0], entropy


@torch.no_grad()
def write(policy: Policy, texts: Tensor, wanted: Tensor) -> Rollout:
    """Answers to prompts; the reward is the share of an answer's places with a wanted letter."""
    for _ in range(ANSWER):
        probabilities = policy.body(texts)[:, -1].softmax(-1)
        texts = torch.cat([texts, torch.multinomial(probabilities, 1)], 1)
    answer = texts[:, PROMPT:]
    mask = ((answer == START).cumsum(1) == 0).float()  # an answer that ends at once has none
    rewards = (torch.isin(answer, wanted) * mask).sum(1) / ANSWER
    logits, values = policy(texts)
    advantages = rewards[:, None] - values
    inside = advantages[mask > 0]
    advantages = (advantages - inside.mean()) / inside.std().clamp(min=1e-6)
    return Rollout(texts, mask, chosen(logits, texts)[0], rewards, advantages)


def prompts(documents: list[str], ids: dict[str, int], count: int, seed: int) -> Tensor:
    """Pieces of the documents."""
    generator, rows = random.Random(seed), []
    for _ in range(count):
        text = generator.choice(documents)
        begin = generator.randrange(len(text) - PROMPT)
        rows.append([ids[character] for character in text[begin : begin + PROMPT]])
    return torch.tensor(rows)


if __name__ == "__main__":
    sys.exit(main())
