"""preference.py and ppo.py in short, and their gradients against plain torch on a whole batch."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accumplug import Accumulator

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of the recipes, in fp64."""
    monkeypatch.syspath_prepend(str(RECIPES))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def run(name: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(RECIPES / f"{name}.py"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout


def off(model: nn.Module, start: nn.Module, loss: torch.Tensor) -> float:
    """How far an update by SGD of rate 1 is from the gradient of `loss` at `start`."""
    expected = torch.autograd.grad(loss, list(start.parameters()))
    pairs = zip(model.parameters(), start.parameters(), expected, strict=True)
    found = [((old - new).detach() - gradient, gradient) for new, old, gradient in pairs]
    error, size = (torch.cat([pair[i].flatten() for pair in found]).norm() for i in (0, 1))
    return float(error / size)


def accumulator(model: nn.Module) -> Accumulator:
    return Accumulator(None, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("size", [1, 4, 5, 20])
def test_preferences_have_the_gradient_of_the_whole_batch(recipes: None, size: int) -> None:
    """Of both means, over pairs and over tokens; 13 pairs of uneven answers, one of them empty."""
    import preference as recipe

    words = {chr(i): i - 96 for i in range(97, 123)}
    texts = ["".join(sorted(words)) * 4]
    batch = [side.clone() for side in recipe.pairs(texts, words, 13).tensors]
    for side in batch:
        side[3, recipe.PROMPT :] = recipe.START
    policy = recipe.LanguageModel(27, width=16)
    reference, start = recipe.LanguageModel(27, width=16), copy.deepcopy(policy)
    reference.requires_grad_(False)

    chosen, rejected = (recipe.log_likelihood(start, side) for side in batch)
    with torch.no_grad():
        before, other = (recipe.log_likelihood(reference, side) for side in batch)
    margins = recipe.BETA * (chosen - before - rejected + other)
    tokens = (batch[0][:, recipe.PROMPT :] != recipe.START).sum()
    loss = (1 + (-margins).exp()).log().mean() - recipe.KEEP * chosen.sum() / tokens

    accum = accumulator(policy)
    recipe.train(accum, policy, reference, batch, size)
    assert accum.updates == 1
    assert off(policy, start, loss) <= 1e-12
    assert accum.last is not None
    assert accum.last.loss == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_ppo_has_the_mean_over_the_tokens_of_a_mini_batch(recipes: None, size: int) -> None:
    """13 answers of uneven lengths; the first 4 and the last have no token."""
    import ppo as recipe

    words = {chr(i): i - 96 for i in range(97, 123)}
    policy = recipe.Policy(27, width=16)
    texts = recipe.prompts(["".join(sorted(words)) * 4], words, 13, 0)
    rollout = recipe.write(policy, texts, torch.tensor([1, 5, 9]))
    rollout.mask[:4] = rollout.mask[-1] = 0
    with torch.no_grad():  # as after some updates: some ratios are clipped
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    start = copy.deepcopy(policy)

    logits, values = start(rollout.texts)
    total, count = torch.zeros(()), 0
    for row, token in rollout.mask.nonzero().tolist():
        scores = logits[row, token].log_softmax(-1)
        now = scores[rollout.texts[row, recipe.PROMPT + token]]
        ratio = (now - rollout.log_probs[row, token]).exp()
        advantage = rollout.advantages[row, token]
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        missed = (values[row, token] - rollout.rewards[row]) ** 2
        total = total + 0.5 * missed - gain + 0.01 * (scores.exp() * scores).sum()
        count += 1

    accum = accumulator(policy)
    recipe.train(accum, policy, rollout, size)
    assert accum.updates == 1
    assert accum.last is not None
    assert accum.last.weight == count
    assert off(policy, start, total / count) <= 1e-12


def test_a_preference_is_learnt() -> None:
    """Held-out texts, after 12 updates."""
    printed = run("preference", "--pairs", "768", "--epochs", "1")
    before, after = (int(found) for found in re.findall(r"(\d+)% of the held-out", printed))
    assert after >= before + 15, printed


def test_rewards_grow() -> None:
    """8 rollouts of 128 answers."""
    printed = run("ppo", "--rollout", "128", "--mini-batch", "32", "--rollouts", "8")
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", printed)]
    assert rewards[-1] > 1.5 * rewards[0], printed
