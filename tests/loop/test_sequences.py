"""Any order of what a loop may do, against a plain reimplementation with one graph a window."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import data, mean_loss, network, relative
from torch.optim import SGD

from accumplug import Accumulator, TornWindowError

BATCHES = data([1, 2, 3, 1, 4, 2], seed=11)


@dataclass
class Plain:
    """What has to come out: micro-batches in a list, and autograd on their weighted mean."""

    steps: int
    nonfinite: str
    scale: float = 1024.0
    model: torch.nn.Module = field(default_factory=network)
    window: list = field(default_factory=list)
    planned: int = 0
    updates: int = 0
    skipped: int = 0
    micro_batches: int = 0

    def __post_init__(self):
        self.optimizer = SGD(self.model.parameters(), 0.05, momentum=0.5)

    def add(self, batch, weight, bad=False):
        if not self.window:
            self.planned = self.steps
        self.window.append((batch, weight, bad))
        self.micro_batches += 1
        if len(self.window) == self.planned:
            self.close()

    def close(self):
        used = [micro_batch for micro_batch in self.window if micro_batch[1]]
        if self.nonfinite == "skip_micro_batch":
            used = [micro_batch for micro_batch in used if not micro_batch[2]]
        self.window = []
        if not used or any(bad for _, _, bad in used):
            self.skipped += 1
            self.scale *= 0.5 if used else 1.0
            return
        members = [(batch, weight) for batch, weight, _ in used]
        total = sum(weight for _, weight in members)
        loss = sum(w * mean_loss(self.model, batch) for batch, w in members) / total
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        for p, g in zip(self.model.parameters(), grads, strict=True):
            p.grad = g
        self.optimizer.step()
        self.updates += 1


def as_given(weight, how):
    """A device weight for a micro-batch that has one; it keeps no more bits than the number."""
    if how == "tensor" and weight:
        return torch.tensor(weight, dtype=torch.float64)
    return weight


def micro_batch(accum, model, batch, weight, how, bad):
    loss = mean_loss(model, batch) * (float("nan") if bad else 1.0)
    with accum(model, weight=as_given(weight, how)) as m:
        if how == "sum" and weight:
            m.backward(loss * weight, reduction="sum")
        elif how == "terms" and weight:
            m.backward(loss * 0.5, retain_graph=True)
            m.backward(loss * 0.5)
        else:
            m.backward(loss)


def fails(accum, model, batch, when):
    with accum(model):
        loss = mean_loss(model, batch)
        if when == "after the backward":
            accum.backward(loss)
        raise MemoryError


micro_batches = st.tuples(
    st.just("micro-batch"),
    st.sampled_from([0, 1, 2, 3, 0.1, 700.0, 5000]),
    st.sampled_from(["mean", "sum", "tensor", "terms"]),
    st.sampled_from([False] * 9 + [True]),
)
others = st.one_of(
    st.sampled_from([("skip",), ("flush",), ("discard",), ("zero_grad",)]),
    st.tuples(st.just("fails"), st.sampled_from(["before the backward", "after the backward"])),
    st.tuples(st.just("steps"), st.integers(1, 4)),
)
actions = st.lists(st.one_of(micro_batches, micro_batches, micro_batches, others), max_size=30)


@settings(max_examples=150)
@given(
    st.integers(1, 4), actions, st.booleans(), st.sampled_from(["skip_window", "skip_micro_batch"])
)
def test_any_sequence_ends_in_the_weights_and_counts_of_the_plain_one(
    steps, actions, scaled, nonfinite
):
    """Weights, zeros, sums, nan, skips, flushes, failures and new steps in any order."""
    plain, model = Plain(steps, nonfinite), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    accum = Accumulator(
        steps,
        optimizer=SGD(model.parameters(), 0.05, momentum=0.5),
        scaler=scaler,
        nonfinite=nonfinite,
    )
    for place, (action, *details) in enumerate(actions):
        batch = BATCHES[place % len(BATCHES)]
        if action == "micro-batch":
            weight, how, bad = details
            one_term = how == "terms" and nonfinite == "skip_micro_batch"  # two are refused there
            micro_batch(accum, model, batch, weight, "mean" if one_term else how, bad)
            plain.add(batch, weight, bad)
        elif action == "skip":
            with accum(model) as micro:
                micro.skip()
            plain.add(batch, 0)
        elif action == "flush":
            accum.flush()
            if plain.window:
                plain.close()
        elif action == "discard":
            accum.discard()
            plain.window = []
        elif action == "zero_grad":
            if not accum.pending:
                model.zero_grad()
        elif action == "fails":
            with pytest.raises(MemoryError):
                fails(accum, model, batch, details[0])
            if details[0] == "after the backward":
                with pytest.raises(TornWindowError):
                    micro_batch(accum, model, batch, 1, "mean", False)
                accum.discard()
                plain.window = []
        elif action == "steps":
            accum.steps = plain.steps = details[0]
        assert accum.pending == len(plain.window)
        counts = (accum.updates, accum.skipped, accum.micro_batches)
        assert counts == (plain.updates, plain.skipped, plain.micro_batches)
        assert scaler is None or scaler.get_scale() == plain.scale
        # thirty updates, each rounded differently
        assert relative(list(model.parameters()), list(plain.model.parameters())) <= 1e-12
