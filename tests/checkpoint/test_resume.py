"""A run that stops at any micro-batch and is gone on from equals one that never stopped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from training import Run, Setup, Wrapped, difference, momentum

from accumplug import Accumulator, Checkpointer
from accumplug.storage.layout import list_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")

MICRO_BATCHES = 16


def only(checkpoint: Path, directory: Path) -> Path:
    """A directory in which `checkpoint` is the newest one, as if the run had been killed then."""
    shutil.copytree(checkpoint, directory / checkpoint.name, copy_function=os.link)
    return directory


def go_on_from_each(setup: Setup, tmp_path: Path, stops: Any = range(1, 17)) -> None:
    """Save at each micro-batch, then go on from each of `stops` with objects built anew."""
    quiet = Run(setup).train()
    saving = Run(setup)
    with saving.checkpoints(tmp_path / "all", every=1, keep=99):
        saving.train()
    assert difference(quiet.state(), saving.state()) is None
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) == MICRO_BATCHES == len(quiet.seen)
    for stop in stops:
        run = Run(setup, seed=1000 + stop)
        directory = only(saved[stop - 1], tmp_path / f"{stop}")
        with run.checkpoints(directory) as checkpoint:
            position = checkpoint.resume()
            assert position is not None
            assert position.micro_batch == stop
            run.train()
        assert difference(run.seen, quiet.seen[stop:], f"seen after {stop}") is None
        count = len(quiet.windows) - len(run.windows)
        assert difference(run.windows, quiet.windows[count:], f"log after {stop}") is None
        assert difference(run.state(), quiet.state(), f"end after {stop}") is None


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(optimizer=momentum, fp16=True),
        Setup(options={"tail": "carry"}),
        Setup(options={"tail": "drop"}, optimizer=momentum),
        Setup(weigh=True),
        Setup(fp16=True, noise=True),
    ],
    ids=["AdamW", "momentum and fp16", "carry", "drop", "weigh", "noise scale"],
)
def test_each_micro_batch_of_two_passes_is_a_place_to_go_on_from(
    setup: Setup, tmp_path: Path
) -> None:
    """Weights, moments, schedule, scaler, counters, losses, samples and random numbers are equal
    to the last bit, with dropout, BatchNorm, shuffling, noise in the data, a tail."""
    go_on_from_each(setup, tmp_path)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(loader="own generator"),
        Setup(loader="with replacement"),
        Setup(loader="iterable"),
        Setup(loader="list"),
        Setup(loader="with a state"),
        Setup(wrap=Wrapped),
    ],
    ids=["own generator", "with replacement", "iterable", "list", "with a state", "wrapped"],
)
def test_the_order_of_any_kind_of_loader_is_gone_on_with(setup: Setup, tmp_path: Path) -> None:
    """In the middle of a window, at the end of a pass, and in the second pass."""
    go_on_from_each(setup, tmp_path, stops=(2, 8, 13))


def test_workers_are_brought_to_the_place(tmp_path: Path) -> None:
    """Their random numbers go on where they were, as each item before was drawn again."""
    go_on_from_each(Setup(loader="two workers"), tmp_path, stops=(5, 8, 10))


def test_where_indices_are_not_found_in_an_iterator_items_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataLoader may have an `__iter__` of its own, and a later torch keep them elsewhere."""
    make = DataLoader._get_iterator

    def moved(loader: DataLoader[Any]) -> Any:
        iterator = make(loader)
        return (item for item in iterator)

    monkeypatch.setattr(DataLoader, "_get_iterator", moved)
    go_on_from_each(Setup(), tmp_path, stops=(2, 8, 13))


def test_several_resumes_in_a_row_change_nothing(tmp_path: Path) -> None:
    """Each of five processes runs three micro-batches and is killed in the next one's body."""
    setup = Setup()
    quiet = Run(setup).train()
    seen: list[Any] = []
    for seed in range(6):
        run = Run(setup, seed=1 if seed == 0 else 100 + seed)
        with run.checkpoints(tmp_path, every=1) as checkpoint:
            checkpoint.resume()
            run.train(until=3)
        seen += run.seen
    assert difference(seen, quiet.seen) is None
    assert difference(run.state(), quiet.state()) is None


def test_a_loop_that_brings_its_own_data_is_gone_on_from(tmp_path: Path) -> None:
    """Without loader= and accum.batches; its random numbers go on with the first block."""
    data = [(torch.full((3, 4), i / 10.0), torch.full((3, 1), i / 10.0)) for i in range(10)]
    quiet = Run(Setup())
    for x, y in data:
        quiet.block(x, y)
    expected = quiet.state()
    first = Run(Setup())
    with Checkpointer(tmp_path, first.accum, model=first.model, every=4):
        for x, y in data[:5]:
            first.block(x, y)
    rest = Run(Setup(), seed=9)
    with Checkpointer(tmp_path, rest.accum, model=rest.model) as checkpoint:
        checkpoint.resume()
        assert (rest.accum.micro_batches, rest.accum.pending) == (4, 1)
        for x, y in data[rest.accum.micro_batches :]:
            rest.block(x, y)
    assert difference(rest.seen, quiet.seen[4:]) is None
    assert difference(rest.state(), expected) is None


def test_a_resume_in_the_same_process_replaces_what_was_trained_since(tmp_path: Path) -> None:
    """Weights, gradients and moments, though the optimizer has moments of its own by then."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    accum = Accumulator(2, optimizer=optimizer)

    def train(count: int) -> None:
        for _ in range(count):
            with accum(model):
                accum.backward(model(torch.randn(4, 3)).square().mean())

    def state() -> list[torch.Tensor]:
        found = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        return [t.detach().clone() for t in (*found, *(p.grad for p in model.parameters()))]

    with Checkpointer(tmp_path, accum, model=model) as checkpoint:
        train(5)
        checkpoint.save()
        before = state()
        train(4)
        assert not any(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        checkpoint.resume()
        assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_window_whose_gradients_are_added_in_place_is_gone_on_from_exactly(
    tmp_path: Path, at: int, scaled: bool
) -> None:
    """By objects that are new, in fp16 with a scaler too; what was resumed is served as well."""

    def run(directory: Path | None, stop: int) -> tuple[list[torch.Tensor], Accumulator]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(800, 700), torch.nn.Linear(700, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
        accum = Accumulator(3, optimizer=optimizer, scaler=scaler, inplace=True)
        checkpoint = None if directory is None else Checkpointer(directory, accum, model=model)
        if checkpoint is not None:
            checkpoint.resume()
        for index in range(accum.micro_batches, stop):
            x = torch.randn(4, 800, generator=torch.Generator().manual_seed(index))
            with accum(model), torch.autocast("cpu", torch.float16, enabled=scaled):
                accum.backward(model(x).square().mean(), weight=index + 1)
        if checkpoint is not None:
            checkpoint.save()
            checkpoint.close()
        return [p.detach() for p in model.parameters()], accum

    expected, _ = run(None, 6)
    run(tmp_path, at)
    got, accum = run(tmp_path, 6)
    assert all(map(torch.equal, got, expected))
    assert accum.updates == 2
    assert accum.inplace_report().served == ("0",)
