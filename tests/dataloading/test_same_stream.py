"""What a resumed stream depends on is found or named, and another stream is recognised."""

from __future__ import annotations

import random
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from accumplug import Accumulator, Checkpointer
from accumplug.dataloading import reachable
from accumplug.errors import CheckpointError

ITEMS = 6
module_level = np.random.default_rng(0)
other_module = types.ModuleType("of_the_user")
other_module.rng = random.Random(0)  # type: ignore[attr-defined]

pytestmark = pytest.mark.filterwarnings(  # runs that an error has ended, in one process
    "ignore:.*has a Checkpointer in this process already"
)


class Noisy(Dataset[Tensor]):
    """Numbers with noise from `noise()`, by whatever way that draws it."""

    def __init__(self, noise: Any) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(self.noise())])


class Slots:
    __slots__ = ("__hidden", "rng")

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.__hidden = np.random.default_rng(1)

    def __call__(self) -> float:
        return float(self.rng.random() + self.__hidden.random())


class Transform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Dropout(), nn.Module()])
        self.inner[1].rng = torch.Generator().manual_seed(0)

    def forward(self) -> Tensor:
        return torch.rand((), generator=self.inner[1].rng)  # type: ignore[arg-type]


class InDict:
    def __init__(self, generators: Any) -> None:
        self.generators = {"noise": {"train": generators}}

    def __call__(self) -> float:
        return float(self.generators["noise"]["train"].random())


class OfTheClass:
    rng = random.Random(0)

    def __call__(self) -> float:
        return self.rng.random()


class FromTheModule:
    def __call__(self) -> float:
        return helper()


class ThroughAModule:
    def __call__(self) -> float:
        return float((lambda: other_module.rng.random())())


def helper() -> float:
    return float(module_level.random())


def closure() -> Callable[[], float]:
    rng = np.random.default_rng(0)
    return lambda: float(rng.random())


def default(rng: Any = random.Random(0)) -> float:  # noqa: B008
    return float(rng.random())


def one_for_each_of_many() -> Any:
    generators = [np.random.default_rng(i) for i in range(100)]
    turn = iter(range(10**9))
    return Turns(generators, turn)


class Turns:
    def __init__(self, generators: list[Any], turn: Any) -> None:
        self.generators, self.turn = generators, turn

    def __call__(self) -> float:
        return float(sum(generator.random() for generator in self.generators[90:]))


def collated(rng: Any) -> Callable[[Any], Any]:
    def collate(samples: Any) -> Any:
        return default_collate(samples) + rng.random()

    return collate


HIDING: dict[str, Callable[[], DataLoader[Any]]] = {
    "dict": lambda: DataLoader(Noisy(InDict(np.random.default_rng(0)))),
    "slots": lambda: DataLoader(Noisy(Slots())),
    "closure": lambda: DataLoader(Noisy(closure())),
    "default argument": lambda: DataLoader(Noisy(default)),
    "partial": lambda: DataLoader(Noisy(partial(np.random.default_rng(0).normal, 0.0, 1.0))),
    "bound method": lambda: DataLoader(Noisy(random.Random(0).random)),
    "module": lambda: DataLoader(Noisy(Transform())),
    "long list": lambda: DataLoader(Noisy(one_for_each_of_many())),
    "class attribute": lambda: DataLoader(Noisy(OfTheClass())),
    "global of a helper": lambda: DataLoader(Noisy(FromTheModule())),
    "global of another module": lambda: DataLoader(Noisy(ThroughAModule())),
    "collate_fn": lambda: DataLoader(
        Noisy(lambda: 0.0), collate_fn=collated(np.random.default_rng(0))
    ),
    "Philox": lambda: DataLoader(Noisy(np.random.Generator(np.random.Philox(2**63)).random)),
    "SFC64": lambda: DataLoader(Noisy(np.random.Generator(np.random.SFC64(3)).random)),
}


def start_anew() -> None:
    """What a new process does."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module_level.bit_generator.state = np.random.default_rng(0).bit_generator.state
    for generator in (other_module.rng, OfTheClass.rng, default.__defaults__[0]):  # type: ignore[attr-defined,index]
        generator.seed(0)


def run(
    loader: Any,
    directory: Path | None = None,
    until: int | None = None,
    passes: int = 2,
    **options: Any,
) -> list[Any]:
    """The items of a run that is resumed from `directory`, saved there after `until` of them."""
    model = nn.Linear(2, 1)
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    seen: list[Any] = []
    with ExitStack() as stack:
        checkpoint = None
        if directory is not None:
            checkpoint = Checkpointer(directory, accum, model=model, loader=loader, **options)
            stack.enter_context(checkpoint)
            checkpoint.resume()
        for _ in range(accum.epoch, passes):
            for item in accum.batches(loader):
                with accum(model):
                    accum.backward(model(item).sum())
                seen.append(item.tolist())
                if checkpoint is not None and len(seen) == until:
                    checkpoint.save()
                    return seen
    return seen


def stopped_and_resumed(
    loader: Callable[[], Any], directory: Path, stop: int, **options: Any
) -> list[Any]:
    start_anew()
    seen = run(loader(), directory, until=stop, **options)
    start_anew()
    return seen + run(loader(), directory, **options)


@pytest.mark.parametrize("stop", [3, ITEMS + 2])
@pytest.mark.parametrize("place", HIDING)
def test_a_generator_is_found_wherever_the_data_draw_from_it(
    place: str, stop: int, tmp_path: Path
) -> None:
    start_anew()
    expected = run(HIDING[place]())
    assert len({tuple(item[0]) for item in expected}) == 2 * ITEMS  # there is noise
    assert stopped_and_resumed(HIDING[place], tmp_path, stop) == expected


class Unreachable:
    """A random generator in the frame of a generator, into which nobody looks."""

    def __init__(self, rng: random.Random) -> None:
        self.draws = (rng.random() for _ in iter(int, 1))

    def __call__(self) -> float:
        return next(self.draws)


def test_a_generator_that_cannot_be_reached_can_be_named(tmp_path: Path) -> None:
    start_anew()
    expected = run(DataLoader(Noisy(Unreachable(random.Random(7)))))

    def part(until: int | None = None) -> list[Any]:
        start_anew()
        rng = random.Random(7)
        loader = DataLoader(Noisy(Unreachable(rng)))
        return run(loader, tmp_path, until, generators=[rng])

    assert part(until=3) + part() == expected


def test_a_generator_that_was_not_saved_is_an_error_that_shows_the_position(tmp_path: Path) -> None:
    def part(until: int | None = None, **options: Any) -> list[Any]:
        start_anew()
        return run(DataLoader(Noisy(Unreachable(random.Random(7)))), tmp_path, until, **options)

    part(until=3)
    with pytest.raises(CheckpointError, match=r"item 3 of this pass.*generators=\[\.\.\.\]"):
        part()
    with pytest.warns(UserWarning, match="item 3 of this pass"):
        warned = part(verify_data="warn")
    assert warned == part(verify_data=False)
    assert len(warned) == 2 * ITEMS - 3


def test_other_generators_than_those_that_were_named_are_refused(tmp_path: Path) -> None:
    loader = [torch.ones(2)] * ITEMS
    run(loader, tmp_path, 3, generators=[random.Random(0), np.random.default_rng(0)])
    with pytest.raises(ValueError, match="has 1 generators here and had 2"):
        run(loader, tmp_path, generators=[random.Random(0)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify_data": "yes"}, "verify_data is"),
        ({"generators": [3]}, "got a int"),
        ({"generators": [random.SystemRandom()]}, "got a SystemRandom"),
    ],
)
def test_wrong_options_are_refused_at_construction(
    options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        run([torch.ones(2)], tmp_path, **options)


class Counts(Sampler[int]):
    """Draws another order in each pass, from a number that only it knows."""

    def __init__(self) -> None:
        self.passes_so_far = 7

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        self.passes_so_far += 1
        generator = torch.Generator().manual_seed(self.passes_so_far)
        return iter(torch.randperm(ITEMS, generator=generator).tolist())


class CountsInAStream(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.round = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.round += 1
        yield from (torch.tensor([float(i), float(self.round)]) for i in range(ITEMS))


def numbers() -> Any:
    return [torch.tensor([float(i), 0.0]) for i in range(ITEMS)]


COUNTING: dict[str, Callable[[], Any]] = {
    "sampler": lambda: DataLoader(numbers(), sampler=Counts()),
    "stream": lambda: DataLoader(CountsInAStream()),
}


@pytest.mark.parametrize("stop", [3, ITEMS, ITEMS + 2, 2 * ITEMS + 1])
@pytest.mark.parametrize("kind", COUNTING)
def test_passes_are_counted_on_under_any_name(kind: str, stop: int, tmp_path: Path) -> None:
    expected = run(COUNTING[kind](), passes=3)
    assert expected[:ITEMS] != expected[ITEMS : 2 * ITEMS]
    seen = run(COUNTING[kind](), tmp_path, until=stop, passes=3)
    assert seen + run(COUNTING[kind](), tmp_path, passes=3) == expected


def test_integers_that_hold_still_are_not_taken_from_the_checkpoint(tmp_path: Path) -> None:
    """Such as the number of threads, which may be another one in each run."""

    class Threaded(CountsInAStream):
        threads = 0

    def loader(threads: int) -> Any:
        dataset = Threaded()
        dataset.threads = threads
        return DataLoader(dataset)

    run(loader(4), tmp_path, until=ITEMS + 2)
    resumed = loader(8)
    run(resumed, tmp_path)
    assert resumed.dataset.threads == 8


class TimeSeeded(IterableDataset[Tensor]):
    """A shuffle buffer that nobody can seed."""

    def __iter__(self) -> Iterator[Tensor]:
        order = random.Random(time.time_ns()).sample(range(64), 64)
        yield from (torch.tensor([float(i), 0.0]) for i in order)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffle_that_is_seeded_with_the_time_is_an_error_not_other_data(
    workers: int, tmp_path: Path
) -> None:
    loader = partial(DataLoader, TimeSeeded(), num_workers=workers)
    run(loader(), tmp_path, until=13)
    with pytest.raises(CheckpointError, match="item (8|9|10|11|12|13) of this pass"):
        run(loader(), tmp_path)


class Forgets:
    """A loader whose state_dict has its place in the file, and not what waits in its buffer."""

    def __init__(self, size: int = 8, seed: float = 3) -> None:
        self.size, self.seed = size, seed
        self.read = self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        rng, buffer = random.Random(self.seed + self.epoch), []
        while self.read < 64 or buffer:
            while len(buffer) < self.size and self.read < 64:
                buffer.append(self.read)
                self.read += 1
            yield torch.tensor([float(buffer.pop(rng.randrange(len(buffer)))), 0.0])
        self.read, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read, self.epoch = state["read"], state["epoch"]


class Draws(Forgets):
    """The same, shuffled by torch's own generator, which the loop's blocks may use as well."""

    def __iter__(self) -> Iterator[Tensor]:
        for item in super().__iter__():
            yield item + torch.rand(2)


@pytest.mark.parametrize("stops", [(1,), (13,), (62,), (64,), (70,), (13, 2, 40)], ids=str)
@pytest.mark.parametrize("size", [2, 8, 100])
@pytest.mark.parametrize("loader", [Forgets, Draws])
def test_a_loader_whose_state_forgets_its_buffer_is_replayed_from_the_start_of_its_pass(
    loader: Callable[..., Any], size: int, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """What it gives after load_state_dict is recognised as another stream, also in the second
    pass and after a second stop."""
    start_anew()
    expected = run(loader(size))
    start_anew()
    seen = []
    for stop in stops:
        seen += run(loader(size), tmp_path, until=stop)
        torch.manual_seed(100)
    assert len(expected) == 128
    assert seen + run(loader(size), tmp_path) == expected


def test_a_loader_that_forgets_more_than_a_replay_restores_is_an_error(tmp_path: Path) -> None:
    run(Forgets(seed=time.time()), tmp_path, until=13)
    with pytest.raises(CheckpointError, match="of this pass.*without the loader's buffer"):
        run(Forgets(seed=time.time()), tmp_path)


def test_data_that_were_changed_or_end_earlier_are_recognised(tmp_path: Path) -> None:
    run(numbers(), tmp_path, until=3)
    changed = numbers()
    changed[3] += 1
    with pytest.raises(CheckpointError, match="item 3 of this pass"):
        run(changed, tmp_path)
    with pytest.raises(CheckpointError, match="item 2 of this pass"):
        run(numbers()[:2], tmp_path)
    with pytest.raises(CheckpointError, match="item 3 of this pass"):
        run(numbers()[:3], tmp_path)
    assert len(run(numbers(), tmp_path, passes=1)) == ITEMS - 3


class Holder:
    def __init__(self) -> None:
        self.value = 0.0


def test_where_the_search_stops_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain data may be as long as they like."""
    monkeypatch.setattr(reachable, "ITEMS", 10)

    class Data(Noisy):
        def __init__(self, items: Any) -> None:
            super().__init__(lambda: 0.0)
            self.items = items

    plain = [{"path": f"{i}", "sizes": [1, 2], "image": torch.ones(1)} for i in range(99)]
    run(DataLoader(Data(plain)), tmp_path / "plain")
    with pytest.warns(UserWarning, match="dataset.items beyond its first 10 of 50"):
        run(DataLoader(Data([Holder() for _ in range(50)])), tmp_path / "objects")
    monkeypatch.setattr(reachable, "OBJECTS", 20)
    nested: Any = [[Holder() for _ in range(9)] for _ in range(9)]
    with pytest.warns(UserWarning, match="what comes after 20 objects, as dataset.items"):
        run(DataLoader(Data(nested)), tmp_path / "many")
