"""A run that is saved on some ranks and gone on from by another number of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from accumplug import Accumulator, Checkpointer
from accumplug.dataloading.resharding import spread, use_batches
from accumplug.storage.layout import list_checkpoints, open_checkpoint, read_part

from .harness import Ranks
from .reference import Gradients, errors, grads
from .test_accelerate import accelerated

SAMPLES = 26  # micro-batches of 2, windows of 6 of them: two full ones and a tail, on 1 to 3 ranks
TOTAL = 6


@dataclass(frozen=True)
class Setup:
    """How a run is built; the same on any number of ranks."""

    total: int = TOTAL
    """Micro-batches of a window on all ranks."""
    samples: int = SAMPLES
    weighted: bool = True
    """By tokens; else each micro-batch counts alike."""
    unread: bool = False
    """Weights are tensors that nobody reads."""
    weigh: bool = False
    size: int = 2
    """Samples in a micro-batch."""
    scaled: bool = False
    """By a GradScaler."""
    steps_itself: bool = False
    """The loop steps, not accum."""
    generator: bool = False
    """The loader has a generator of its own."""
    kind: str = ""
    """A loader of another kind."""
    buffers: bool = False
    """The model counts its forwards in a buffer."""
    accelerate: dict[str, Any] | None = None
    """How a loader is prepared, if it is."""
    sparse: bool = False
    """The model has an embedding with sparse gradients."""
    epochs: int = 2
    loader: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


class Tokens(Dataset[Any]):
    """Sample i with its number, its features, its target and how many tokens it has."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(samples, 2, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor, float]:
        return i, self.x[i], self.y[i], 1.0 + i % 5


class Net(nn.Module):
    """A head that only some samples use, and one that none does."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.calls = nn.Buffer(torch.zeros(())) if setup.buffers else None
        self.table = nn.Embedding(setup.samples, 3, sparse=True) if setup.sparse else None
        self.body = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        if self.calls is not None:
            self.calls += 1
        if self.table is not None:
            x = x + self.table(numbers)
        hidden = self.body(x).tanh()
        result: Tensor = self.heads[0](hidden)
        rare = numbers % 7 == 0
        if rare.any():
            result = result + rare[:, None] * self.heads[1](hidden)
        return result


def loss_of(model: nn.Module, batch: Any, weighted: bool) -> tuple[Tensor, float]:
    """The mean over the tokens of a micro-batch and how many; or that over its samples and 1."""
    numbers, x, y, tokens = batch
    losses = (model(x, numbers) - y).square().sum(1)
    if not weighted:
        return losses.mean(), 1.0
    return (losses * tokens).sum() / tokens.sum(), tokens.sum().item()


def optimizer_of(net: Net, setup: Setup) -> torch.optim.Optimizer:
    if setup.sparse:
        return torch.optim.SGD(net.parameters(), 1e-2)
    return torch.optim.AdamW(net.parameters(), 1e-2)


def dense(net: Net) -> Gradients:
    return [None if grad is None else grad.to_dense() for grad in grads(net)]


@dataclass
class Told:
    """What a rank tells, by pass: the samples of each micro-batch, the gradient of each update."""

    seen: list[list[list[int]]]
    gradients: list[list[Gradients]]
    micro_batches: int = 0
    epoch: int = 0


class Own:
    """A sampler of a kind that nobody knows."""

    def __init__(self, data: Tokens) -> None:
        self.size = len(data)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


SAMPLERS = {
    "a list": lambda data: [*range(0, 26, 2), *range(1, 26, 2)],
    "a subset": lambda data: SubsetRandomSampler(range(26)),
    "weights": lambda data: WeightedRandomSampler([1.0 + i for i in range(26)], 26),
    "with replacement": lambda data: RandomSampler(data, replacement=True),
    "an own one": Own,
}


def loader_of(rank: int, world: int, setup: Setup) -> tuple[Any, Any]:
    data, sampler = Tokens(setup.samples), None
    if setup.kind == "no loader":
        return list(DataLoader(data, setup.size)), None
    if world == 1 and setup.kind in SAMPLERS:
        return DataLoader(data, setup.size, sampler=SAMPLERS[setup.kind](data)), None
    if world > 1 and setup.kind != "plain" and setup.accelerate is None:
        sampler = DistributedSampler(data, world, rank, seed=3, **setup.sampler)
    shuffle = sampler is None and setup.sampler.get("shuffle", True)
    generator = torch.Generator().manual_seed(5) if setup.generator else None
    loader = DataLoader(
        data, setup.size, shuffle=shuffle, sampler=sampler, generator=generator, **setup.loader
    )
    return loader, sampler


class Wrapped:
    """What a progress bar does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@contextmanager
def prepared(rank: int, config: dict[str, Any]) -> Iterator[Accelerator]:
    """An Accelerator for models that don't use all of their parameters."""
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    with accelerated(
        rank, dataloader_config=DataLoaderConfiguration(**config), kwargs_handlers=handlers
    ) as accelerator:
        yield accelerator


def part(
    rank: int,
    world: int,
    setup: Setup,
    directory: Path | None,
    resume: bool = False,
    signal_at: tuple[int, int] | None = None,
    **options: Any,
) -> Told:
    """Run on this rank, from the newest checkpoint on if `resume`.

    `signal_at`: a rank, and its micro-batch in which it gets a signal.
    """
    torch.manual_seed(55 if resume else 1)
    loader, sampler = loader_of(rank, world, setup)
    net = Net(setup)
    model: nn.Module = net
    optimizer = optimizer_of(net, setup)
    with ExitStack() as stack:
        if setup.accelerate is not None:
            accelerator = stack.enter_context(prepared(rank, setup.accelerate))
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        elif world > 1:
            model = DistributedDataParallel(net, find_unused_parameters=True)
        stepper: dict[str, Any] = {} if setup.steps_itself else {"optimizer": optimizer}
        if setup.scaled:
            stepper["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0)
        accum = Accumulator(max(setup.total // world, 1), **stepper, **setup.options)
        told = Told([[] for _ in range(setup.epochs)], [[] for _ in range(setup.epochs)])
        accum.on_update(lambda: told.gradients[accum.epoch].append(dense(net)))
        options |= {"optimizer": optimizer} if setup.steps_itself else {}
        weigh = {"weigh": lambda batch: batch[3].sum().item()} if setup.weigh else {}
        named = None if setup.kind == "unnamed" else loader
        checkpoint = stack.enter_context(
            Checkpointer(directory, accum, model=model, loader=named, **options)
        )
        if resume:
            assert checkpoint.resume() is not None
        warnings.filterwarnings("ignore", message="without optimizer= or accelerator=")
        wrap = Wrapped if setup.kind == "wrapped" else lambda loader: loader
        for epoch in range(accum.epoch, setup.epochs):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for batch in accum.batches(wrap(loader), **weigh):
                with accum(model) as micro:
                    loss, weight = loss_of(model, batch, setup.weighted)
                    accum.backward(loss, torch.tensor(weight) if setup.unread else weight)
                if setup.steps_itself and micro.closes:
                    optimizer.step()
                    optimizer.zero_grad()
                told.seen[epoch].append(batch[0].tolist())
                if signal_at == (rank, sum(map(len, told.seen))):
                    os.kill(os.getpid(), signal.SIGUSR1)
            if checkpoint.interrupted:
                break
    told.micro_batches, told.epoch = accum.micro_batches, accum.epoch
    return told


def rests(rank: int, world: int, setup: Setup, directories: list[Path]) -> list[Told]:
    """Go on from what is in each of `directories`, to the end."""
    return [part(rank, world, setup, directory, resume=True) for directory in directories]


def only(checkpoint: Path, tmp_path: Path, name: str = "after") -> Path:
    """A directory in which `checkpoint` is the newest."""
    directory = tmp_path / f"{name} {checkpoint.name}"
    shutil.copytree(checkpoint, directory / checkpoint.name, copy_function=os.link)
    return directory


def samples(told: list[Told], epoch: int, until: int | None = None) -> Counter[int]:
    """How often each sample was seen by all ranks together."""
    return Counter(i for one in told for batch in one.seen[epoch][:until] for i in batch)


def in_plain_torch(quiet: list[Told], setup: Setup, steps: int) -> list[list[Gradients]]:
    """The gradients of each pass, from one big batch for each window of what `quiet` has seen."""
    net, data = Net(setup), Tokens(setup.samples)
    optimizer = optimizer_of(net, setup)
    found: list[list[Gradients]] = []
    for epoch in range(setup.epochs):
        found.append([])
        for start in range(0, len(quiet[0].seen[epoch]), steps):
            window = [b for one in quiet for b in one.seen[epoch][start : start + steps]]
            optimizer.zero_grad()
            big = [default_collate([data[i] for batch in window for i in batch])]
            if not setup.weighted:
                big = [default_collate([data[i] for i in batch]) for batch in window]
            terms = [loss_of(net, batch, setup.weighted) for batch in big]
            total = sum(weight for _, weight in terms)
            sum(loss * weight / total for loss, weight in terms).backward()
            found[-1].append(dense(net))
            optimizer.step()
    return found


def far(actual: Iterable[Gradients], expected: Iterable[Gradients]) -> float:
    """The largest error of any update; 0 if there is none on both sides."""
    actual, expected = list(actual), list(expected)
    return errors(actual, expected) if actual or expected else 0.0


@dataclass
class Quiet:
    """A run that went on, and what plain torch makes of its windows."""

    world: int
    setup: Setup
    told: list[Told]
    expected: list[list[Gradients]]
    saved: list[Path]


def run(ranks: Ranks, world: int, setup: Setup, tmp_path: Path) -> Quiet:
    """A run on `world` ranks that saves at each micro-batch."""
    directory = tmp_path / "all"
    told = ranks.run(world, part, world, setup, directory, every=1, keep=99, timeout=60)
    expected = told[0].gradients
    if "tail" not in setup.options:
        in_torch = in_plain_torch(told, setup, setup.total // world)
        assert far(chain(*expected), chain(*in_torch)) <= 1e-12
    return Quiet(world, setup, told, expected, list_checkpoints(directory))


def compare(quiet: Quiet, checkpoint: Path, rest: list[Told]) -> None:
    """The rest of a run that went on from `checkpoint` is that of the quiet one."""
    opened, setup = open_checkpoint(checkpoint), quiet.setup
    at, epoch = opened.manifest.position, opened.manifest.position["epoch"]
    before = at["update"] - sum(map(len, quiet.expected[:epoch]))
    for one in rest:
        error = far(one.gradients[epoch], quiet.expected[epoch][before:])
        assert error <= 1e-12, checkpoint.name
    assert samples(rest, epoch) <= samples(quiet.told, epoch)
    olds = [read_part(opened, f"rank-{r}")["accum"] for r in range(opened.manifest.world_size)]
    here = [[batch for passed in one.seen for batch in passed] for one in rest]
    positions = sum(old["position"] for old in olds)
    assert positions + sum(len(one.seen[epoch]) for one in rest) == items(quiet.told, epoch)
    counts = [old["micro_batches"] for old in olds]
    assert sum(one.micro_batches for one in rest) == sum(counts) + sum(map(len, here))
    for later in range(epoch + 1, setup.epochs):
        lost = setup.samples - len(samples(rest, later))
        assert lost <= (2 * len(rest) if "drop_last" in str(setup) else 0)


def items(told: list[Told], epoch: int) -> int:
    return sum(len(one.seen[epoch]) for one in told)


def go_on(
    ranks: Ranks, quiet: Quiet, world: int, tmp_path: Path, pick: slice = slice(None)
) -> None:
    """Go on with `quiet` on `world` ranks from each of its checkpoints, and compare."""
    saved = quiet.saved[pick]
    places = [only(checkpoint, tmp_path) for checkpoint in saved]
    told = ranks.run(world, rests, world, quiet.setup, places, timeout=60)
    for index, checkpoint in enumerate(saved):
        rest = [one[index] for one in told]
        compare(quiet, checkpoint, rest)
        at = open_checkpoint(checkpoint).manifest.position
        seen = samples(quiet.told, at["epoch"], at["position"]) + samples(rest, at["epoch"])
        assert seen == samples(quiet.told, at["epoch"]), checkpoint.name


@pytest.mark.parametrize("other", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_update_is_that_of_the_run_that_went_on(
    ranks: Ranks, world: int, other: int, tmp_path: Path
) -> None:
    """From each micro-batch on: plain loaders and DistributedSamplers, tails, parameters that are
    used now and then, tokens as weights, AdamW."""
    go_on(ranks, run(ranks, world, Setup(), tmp_path), other, tmp_path)


@pytest.mark.parametrize("worlds", [(2, 3, 1), (1, 2, 2), (3, 2, 3), (1, 3, 2)])
def test_ranks_may_change_again_in_the_same_pass(
    ranks: Ranks, worlds: tuple[int, int, int], tmp_path: Path
) -> None:
    """Also within the same window; and an ordinary resume after it."""
    quiet = run(ranks, worlds[0], Setup(epochs=1), tmp_path)
    for first in quiet.saved[::3]:
        directory = only(first, tmp_path)
        options = {"resume": True, "every": 1, "keep": 99, "timeout": 60}
        told = ranks.run(worlds[1], part, worlds[1], quiet.setup, directory, **options)
        compare(quiet, first, told)
        later = [path for path in list_checkpoints(directory) if path.name != first.name]
        assert len(later) >= len(told[-1].seen[0])
        places = [only(checkpoint, tmp_path, f"again {first.name}") for checkpoint in later]
        again = ranks.run(worlds[2], rests, worlds[2], quiet.setup, places, timeout=60)
        for index, checkpoint in enumerate(later):
            compare(quiet, checkpoint, [one[index] for one in again])


SETUPS = {
    "micro-batches count alike": Setup(weighted=False),
    "no shuffling": Setup(sampler={"shuffle": False}),
    "drop_last in the sampler": Setup(sampler={"drop_last": True}),
    "drop_last in the loader": Setup(loader={"drop_last": True}),
    "a generator of the loader's": Setup(generator=True),
    "an unnamed loader": Setup(kind="unnamed"),
    "a wrapped loader": Setup(kind="wrapped"),
    "weights that nobody reads": Setup(unread=True),
    "unread, weighed ahead": Setup(unread=True, weigh=True),
    "scaled": Setup(scaled=True),
    "dropped tail": Setup(options={"tail": "drop"}),
    "carried tail": Setup(options={"tail": "carry"}),
    "skipping": Setup(options={"nonfinite": "skip_micro_batch"}),
    "weighed ahead": Setup(weigh=True),
    "prepared": Setup(accelerate={"even_batches": False}),
    "prepared, even": Setup(accelerate={"even_batches": True}),
    "prepared, seedable": Setup(accelerate={"use_seedable_sampler": True}),
    "few micro-batches a rank": Setup(total=3),
    "few micro-batches, weighed ahead": Setup(total=3, weigh=True),
    "buffers": Setup(buffers=True),
}


@pytest.mark.parametrize("worlds", [(1, 3), (3, 2)])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_each_kind_of_run_goes_on_with_other_ranks(
    ranks: Ranks, setup: Setup, worlds: tuple[int, int], tmp_path: Path
) -> None:
    if any(setup.total % world for world in worlds):
        pytest.skip("the effective batch can't be kept")
    quiet = run(ranks, worlds[0], setup, tmp_path)
    go_on(ranks, quiet, worlds[1], tmp_path, slice(1, None, 3))


@pytest.mark.parametrize("signal_at", [(0, 1), (1, 1), (1, 2)])
def test_a_signal_in_the_window_that_was_shared_out(
    ranks: Ranks, signal_at: tuple[int, int], tmp_path: Path
) -> None:
    """Of which the ranks have parts of different size: all of them are saved at one place."""
    quiet = run(ranks, 1, Setup(epochs=1), tmp_path)
    directory = only(quiet.saved[0], tmp_path)
    options = {"resume": True, "signals": (signal.SIGUSR1,), "signal_at": signal_at}
    stopped = ranks.run(2, part, 2, quiet.setup, directory, timeout=60, **options)
    assert 0 < items(stopped, 0) < 12
    saved = list_checkpoints(directory)[-1]
    for world in (1, 3):
        compare(quiet, saved, ranks.run(world, part, world, quiet.setup, directory, resume=True))


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (3, 2), (2, 3)])
def test_sums_that_are_reduced_each_time_go_on_with_other_ranks(
    ranks: Ranks, worlds: tuple[int, int], tmp_path: Path
) -> None:
    """Each rank has the mean of all of them; where what is left can be shared evenly."""
    setup = Setup(total=12, options={"sync": "every"}, epochs=1, samples=36)
    quiet = run(ranks, worlds[0], setup, tmp_path)
    go_on(ranks, quiet, worlds[1], tmp_path, slice(worlds[1] - 1, None, worlds[1]))


@pytest.mark.parametrize("kind", ["a list", "a subset", "weights", "with replacement"])
def test_the_order_of_each_sampler_is_drawn_again(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """On other ranks, which don't have it themselves."""
    quiet = run(ranks, 1, Setup(kind=kind, epochs=1), tmp_path)
    go_on(ranks, quiet, 2, tmp_path, slice(1, None, 5))


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
def test_sparse_gradients_go_on_with_other_ranks(
    ranks: Ranks, worlds: tuple[int, int], tmp_path: Path
) -> None:
    quiet = run(ranks, worlds[0], Setup(sparse=True, samples=24), tmp_path)
    go_on(ranks, quiet, worlds[1], tmp_path, slice(0, 3))


@pytest.mark.parametrize("worlds", [(1, 3), (2, 3), (3, 2)])
def test_loops_that_step_go_on_with_other_ranks(
    ranks: Ranks, worlds: tuple[int, int], tmp_path: Path
) -> None:
    """Where each rank has a part in each window that is left."""
    quiet = run(ranks, worlds[0], Setup(steps_itself=True, samples=24), tmp_path)
    go_on(ranks, quiet, worlds[1], tmp_path, slice(0, 3 if worlds[0] == 1 else 1))


def test_ranks_fill_their_parts_of_a_window_in_the_same_round() -> None:
    """So that none closes a window that the others take into the next pass; then by turns."""
    assert spread("abcdefgh", [1, 2, 2]) == [["c", "f"], ["a", "d", "g"], ["b", "e", "h"]]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_handed_the_micro_batches_that_were_dealt(persistent: bool) -> None:
    """In one pass; in the next one the loader has its own again."""
    data = [torch.tensor(i) for i in range(8)]
    loader = DataLoader(data, 2, num_workers=2, persistent_workers=persistent)  # type: ignore[arg-type]
    with use_batches(loader, [[5, 1], [6], [0, 7]]):
        rest = iter(loader)
    assert [batch.tolist() for batch in rest] == [[5, 1], [6], [0, 7]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with use_batches(loader, [[3]]):
        rest = iter(loader)
    assert [batch.tolist() for batch in rest] == [[3]]


def refusal(rank: int, world: int, setup: Setup, directory: Path) -> str:
    """What is said where a run can't be gone on from."""
    try:
        part(rank, world, setup, directory, resume=True)
    except ValueError as error:
        return str(error)
    return ""


REFUSED = {
    "steps": (2, Setup(), 1, Setup(total=3), "steps is 3 here on 1 rank.*set steps=6"),
    "ranks": (2, Setup(total=4), 3, Setup(total=6), "start as many ranks as divide it .1, 2, 4."),
    "batch size": (2, Setup(), 1, Setup(size=3), "batch_size is 3 here.*set batch_size=2"),
    "data": (2, Setup(), 1, Setup(samples=30), "30 samples here, and 26 in the pass"),
    "list": (2, Setup(), 1, Setup(kind="no loader"), "is a list; give .* a torch DataLoader"),
    "lists": (1, Setup(kind="no loader"), 2, Setup(), "is a list.*Start 1 rank until the pass"),
    "sampler": (1, Setup(kind="an own one"), 2, Setup(), "the order of a Own.*Start 1 rank"),
    "each its own": (2, Setup(kind="plain"), 1, Setup(), "each of the 2 ranks went through"),
    "every": (1, Setup(), 2, Setup(options={"sync": "every"}), "2 ranks can't share the 5"),
    "steps itself": (
        1,
        Setup(steps_itself=True),
        2,
        Setup(steps_itself=True),
        "the last window of the pass gets 1 micro-batches.*give optimizer=",
    ),
    "carry": (
        1,
        Setup(options={"tail": "carry"}, samples=10),
        2,
        Setup(options={"tail": "carry"}, samples=10),
        "the last 1 micro-batches of the open window.*start at most 1",
    ),
}


@pytest.mark.parametrize(
    ("world", "setup", "other", "here", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_what_can_not_be_kept_is_said_with_what_to_change(
    ranks: Ranks,
    world: int,
    setup: Setup,
    other: int,
    here: Setup,
    message: str,
    tmp_path: Path,
) -> None:
    """On all ranks alike, before anything is trained."""
    ranks.run(world, part, world, setup, tmp_path / "all", every=1, keep=99, timeout=60)
    place = only(list_checkpoints(tmp_path / "all")[0], tmp_path)
    for said in ranks.run(other, refusal, other, here, place, timeout=60):
        assert re.search(message, said), said
