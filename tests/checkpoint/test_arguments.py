"""A Checkpointer's arguments: what is wrong is named, and nothing has been taken hold of."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accumplug import Accumulator, Checkpointer


def build(directory: Any, **options: Any) -> Checkpointer:
    model = nn.Linear(2, 1)
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    return Checkpointer(directory, accum, **({"model": model} | options))


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("evry", 5, "every"),
        ("every_second", 5, "every_seconds"),
        ("kep", 2, "keep"),
        ("signal", (signal.SIGTERM,), "signals"),
        ("modle", [nn.Linear(1, 1)], "model"),
        ("back_ground", True, "background"),
    ],
)
def test_a_mistyped_option_is_named_with_the_nearest_one(
    tmp_path: Path, name: str, value: Any, near: str
) -> None:
    """It would be taken for an object with a state."""
    with pytest.raises(TypeError, match=rf"^unknown option '{name}'; did you mean '{near}'\?$"):
        build(tmp_path, **{name: value})


def test_what_is_near_no_option_is_named_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="^tokenizer is neither an option nor an object with st"):
        build(tmp_path, tokenizer=5)


@pytest.mark.parametrize(
    "options",
    [
        {"every": "50"},
        {"every": 2.0},
        {"every": True},
        {"every_seconds": "60"},
        {"every_seconds": True},
        {"keep": 1.5},
        {"keep": None},
        {"signals": signal.SIGTERM},
        {"signals": ("SIGTERM",)},
        {"model": "model"},
        {"model": [5]},
    ],
    ids=str,
)
def test_a_wrong_type_is_a_type_error_that_names_the_option(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(options))} is .*; got"):
        build(tmp_path, **options)


def test_a_directory_and_an_accumulator_have_their_types(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="directory is a path; got 5"):
        build(5)
    with pytest.raises(TypeError, match="accum is an Accumulator; got Linear"):
        Checkpointer(tmp_path, nn.Linear(1, 1), model=nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is a number of micro-batches, at least 1; got 0"),
        ({"every_seconds": 0}, "every_seconds is a number of seconds above 0; got 0"),
        ({"every_seconds": float("nan")}, "above 0; got nan"),
        ({"keep": 0}, "keep is a number of checkpoints, at least 1; got 0"),
        ({"signals": (signal.SIGKILL,)}, "which no program can handle"),
        ({"model": None}, "give model="),
    ],
    ids=str,
)
def test_a_wrong_value_is_a_value_error(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **options)


def test_handlers_are_set_when_it_is_entered_or_at_the_first_block(tmp_path: Path) -> None:
    """Not by a constructor, which may fail after that and leave them there."""
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ValueError, match="give model="):
        build(tmp_path, model=None, signals=(signal.SIGUSR1,))
    checkpoint = build(tmp_path / "a", signals=(signal.SIGUSR1,))
    assert signal.getsignal(signal.SIGUSR1) is before
    with checkpoint:
        assert signal.getsignal(signal.SIGUSR1) is not before
    assert signal.getsignal(signal.SIGUSR1) is before
    checkpoint = build(tmp_path / "b", signals=(signal.SIGUSR1,))
    accum, model = checkpoint._accum, nn.Linear(2, 1)
    with accum(model):
        assert signal.getsignal(signal.SIGUSR1) is not before
        accum.backward(model(torch.ones(1, 2)).sum())
    os.kill(os.getpid(), signal.SIGUSR1)
    checkpoint.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_an_optimizer_that_can_not_be_saved_is_refused_at_construction(tmp_path: Path) -> None:
    """By its type: its first save would fail in mid-run."""
    model = nn.Linear(2, 1)
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    accum = Accumulator(2, optimizer=kind(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer keeps a part"):
        Checkpointer(tmp_path, accum, model=model)


class Quantized(torch.Tensor):
    """A tensor whose content only its own class can read, as in torchao's 8-bit AdamW."""


class EightBit(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["codes"] = torch.zeros_like(p).as_subclass(Quantized)


@pytest.mark.parametrize("every", [None, 1])
def test_a_state_that_can_not_be_saved_is_said_at_the_first_update(
    tmp_path: Path, every: int | None
) -> None:
    """With its path and type, by all ranks alike, and not by the first save in mid-run."""
    model = nn.Linear(2, 1)
    accum = Accumulator(2, optimizer=EightBit(model.parameters(), 0.1))
    checkpoint = Checkpointer(tmp_path, accum, model=model, every=every)
    with accum(model):
        accum.backward(model(torch.ones(1, 2)).sum())
    with (
        pytest.raises(
            ValueError, match=r"can't be saved: optimizer\[0\]\[0\]\.codes is a .*Quanti"
        ),
        accum(model),
    ):
        accum.backward(model(torch.ones(1, 2)).sum())
    checkpoint.close()


def test_a_loop_that_steps_hears_of_it_before_its_next_block(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    accum, optimizer = Accumulator(1), EightBit(model.parameters(), 0.1)
    checkpoint = Checkpointer(tmp_path, accum, model=model, optimizer=optimizer)
    with accum(model):
        accum.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"objects\.optimizer.*codes"), accum(model):
        pass
    checkpoint.close()
