"""Checkpoints of fully_shard models inside of a window: each rank writes its own part."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accumplug import Accumulator, Checkpointer
from accumplug.storage.codec import encode
from accumplug.storage.commit import Destination, Job, write
from accumplug.storage.files import FileEntry
from accumplug.storage.layout import list_checkpoints, open_checkpoint, read_part

from .harness import Ranks
from .test_checkpoint import assert_same

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from training import adamw, momentum

STEPS = 3
EACH = {"every": 1, "keep": 99}
OPTIMIZERS = {"adamw": adamw, "momentum": momentum}


class Noisy(Dataset[Any]):
    """Samples with noise from the global generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return i / 20 + 0.1 * torch.randn(4), torch.tensor([i / 20])


class Plain(Dataset[Any]):
    """The same without noise: ten micro-batches for each of up to three ranks."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.arange(4) * 0.1 + (i % 7) / 7, torch.tensor([i / 20])


def tokens(item: tuple[Tensor, Tensor]) -> Tensor:
    """How many each sample has."""
    return 1.0 + (20 * item[1]).round() % 4


def weight_of(item: tuple[Tensor, Tensor]) -> float:
    """The tokens of a micro-batch."""
    return tokens(item).sum().item()


class Net(nn.Module):
    """Dropout, a buffer, weights that three ranks can't divide evenly, and one of a single row."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """One number a sample."""
        self.calls += 1
        result: Tensor = self.head(self.norm(self.second(self.drop(self.first(x).relu()))).tanh())
        return result


@dataclass(frozen=True)
class Setup:
    """How a run is built; the same on each side of a stop."""

    optimizer: str = "adamw"
    half: bool = False
    """Compute in bf16 and add up in fp32."""
    scaled: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    total: int | None = None
    """Micro-batches of a window on all ranks; then nothing is drawn that depends on the rank."""
    weigh: bool = False
    replicated: bool = False
    """All shards are on all ranks (HSDP)."""


@dataclass
class Told:
    """What a rank tells of its part of a run."""

    seen: list[Any]
    state: dict[str, Any]


class Run:
    """One rank's part of a run."""

    def __init__(self, rank: int, setup: Setup, seed: int) -> None:
        warnings.filterwarnings("ignore", message="deferring the reduction")
        self.setup = setup
        torch.manual_seed(seed)
        self.model = Net()
        policy = MixedPrecisionPolicy()
        if setup.half:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = None
        if setup.replicated:
            shape = (dist.get_world_size(), 1)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("repeated", "sharded"))
        for module in (self.model.first, self.model.second, self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        torch.manual_seed(1000 * seed + rank)
        self.optimizer = OPTIMIZERS[setup.optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if setup.scaled else None
        self.accum = Accumulator(
            STEPS if setup.total is None else setup.total // dist.get_world_size(),
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            max_grad_norm=1.0,
            **setup.options,
        )
        self.sampler: Any = DistributedSampler(Noisy(), seed=seed)
        self.loader: Any = DataLoader(Noisy(), 2, sampler=self.sampler)
        if setup.total is not None:
            self.model.eval()
            self.sampler = DistributedSampler(Plain())
            self.loader = DataLoader(Plain(), 2, sampler=self.sampler)
        self.seen: list[Any] = []

    def train(self, signal_at: int | None = None) -> None:
        """Go on to the end. In micro-batch `signal_at` this rank gets a signal."""
        options = {"weigh": weight_of} if self.setup.weigh else {}
        for epoch in range(self.accum.epoch, 2):
            if getattr(self.accum.parts.state.observer, "interrupted", False):
                break
            self.sampler.set_epoch(epoch)
            for x, y in self.accum.batches(self.loader, **options):
                with self.accum(self.model, weight=weight_of((x, y))):
                    errors = (self.model(x).double() - y) ** 2
                    loss = (tokens((x, y)) * errors).sum() / weight_of((x, y))
                    self.accum.backward(loss)
                self.seen.append((x.clone(), loss.item()))
                if len(self.seen) == signal_at:
                    os.kill(os.getpid(), signal.SIGUSR1)

    def state(self) -> dict[str, Any]:
        """Everything that another process has to arrive at; shards as each rank has them."""
        accum, moments = self.accum, self.optimizer.state_dict()
        return {
            "model": {name: local(value) for name, value in self.model.state_dict().items()},
            "moments": {
                index: {name: local(value) for name, value in each.items()}
                for index, each in moments["state"].items()
            },
            "groups": moments["param_groups"],
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "counters": [accum.windows, accum.updates, accum.micro_batches, accum.epoch],
            "random": torch.get_rng_state(),
        }


def local(value: Any) -> Any:
    """A copy of this rank's part."""
    part = value.to_local() if hasattr(value, "to_local") else value
    return part.clone() if isinstance(part, Tensor) else part


def part(
    rank: int,
    setup: Setup,
    directory: Path | None,
    *,
    seed: int = 1,
    resume: bool = False,
    signal_at: tuple[int, int] = (-1, 0),
    **options: Any,
) -> Told:
    """Run on this rank; from the newest checkpoint on if `resume`.

    `signal_at`: a rank, and its micro-batch in which it gets a signal.
    """
    run = Run(rank, setup, seed)
    if directory is None:
        run.train()
        return Told(run.seen, run.state())
    with Checkpointer(
        directory, run.accum, model=run.model, loader=run.loader, **options
    ) as checkpoint:
        if resume:
            warnings.filterwarnings("ignore", message="passed over")
            assert checkpoint.resume() is not None
        run.train(signal_at[1] if signal_at[0] == rank else None)
    return Told(run.seen, run.state())


def go_on(ranks: Ranks, world: int, setup: Setup, checkpoint: Path, tmp_path: Path) -> list[Told]:
    """New ranks go on from `checkpoint`, as if it were the newest."""
    directory = tmp_path / f"after {checkpoint.name}"
    shutil.copytree(checkpoint, directory / checkpoint.name, copy_function=os.link)
    told: list[Told] = ranks.run(world, part, setup, directory, seed=55, resume=True)
    return told


SETUPS = {
    "last": Setup(),
    "every": Setup(options={"sync": "every"}),
    "last, momentum": Setup("momentum"),
    "every, momentum": Setup("momentum", options={"sync": "every"}),
    "last, half": Setup(half=True),
    "every, half": Setup(half=True, options={"sync": "every"}),
    "last, scaled": Setup(scaled=True),
    "every, replicated": Setup("momentum", replicated=True, options={"sync": "every"}),
}


CASES = [(name, world) for name in ("last", "every") for world in (1, 2, 3)]
CASES += [("last, momentum", 3), ("every, momentum", 3), ("last, half", 2), ("every, half", 2)]
CASES += [("last, scaled", 2), ("every, replicated", 2)]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_each_micro_batch_of_a_sharded_run_is_a_place_to_go_on_from(
    ranks: Ranks, name: str, world: int, tmp_path: Path
) -> None:
    """Shards of weights, moments and sums, the unsharded sums that each rank has while the
    reduction is deferred; and the run that saves is the one that doesn't."""
    setup = SETUPS[name]
    quiet = ranks.run(world, part, setup, None)
    saving = ranks.run(world, part, setup, tmp_path / "all", **EACH)
    assert_same(quiet, saving, "saving")
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) == len(quiet[0].seen) == {1: 20, 2: 10, 3: 8}[world]
    for checkpoint in saved if name in ("last", "every") and world > 1 else saved[1::4]:
        assert_same(quiet, go_on(ranks, world, setup, checkpoint, tmp_path), checkpoint.name)


def whole(rank: int, setup: Setup, directory: Path, resume: bool) -> dict[str, Tensor] | str:
    """Run to the end; the weights, put together, or why it can't be gone on."""
    run = Run(rank, setup, 1)
    with Checkpointer(
        directory, run.accum, model=run.model, loader=run.loader, **({} if resume else EACH)
    ) as checkpoint:
        if resume:
            try:
                assert checkpoint.resume() is not None
            except ValueError as error:
                return str(error)
        run.train()
    return {name: full(value) for name, value in run.model.state_dict().items() if name != "calls"}


def full(value: Any) -> Tensor:
    """The whole of a sharded tensor."""
    whole: Tensor = value.full_tensor()
    return whole


RESHARDED = {
    "last": Setup(total=6),
    "every": Setup("momentum", total=6, options={"sync": "every"}),
    "last, weigh": Setup("momentum", total=6, weigh=True),
    "replicated": Setup("momentum", total=6, replicated=True, options={"sync": "every"}),
}
"""AdamW stretches rounding (1e-16) a hundredfold, momentum does not."""


@pytest.mark.parametrize(
    ("name", "world", "count"),
    [
        ("last", 1, 12),
        ("last", 2, 6),
        ("last", 3, 4),
        ("every", 1, 6),
        ("every", 2, 6),
        ("last, weigh", 2, 6),
        ("replicated", 2, 6),
    ],
)
def test_another_number_of_ranks_goes_on(
    ranks: Ranks, name: str, world: int, count: int, tmp_path: Path
) -> None:
    """Weights, moments and sums are put together from the pieces of all old ranks; where the rest
    of the window can't be shared evenly it is said."""
    setup = RESHARDED[name]
    before = ranks.run(world, whole, setup, tmp_path / "all", False)
    saved = list_checkpoints(tmp_path / "all")
    assert len(saved) == 48 // world
    went_on = 0
    for other in {1, 2, 3} - {world} if name == "last" or world > 1 else {2}:
        for checkpoint in saved[6 // world - 1 : 12 // world - 1]:
            done = world * open_checkpoint(checkpoint).manifest.position["pending"]
            directory = tmp_path / f"{other}-{done}"
            shutil.copytree(checkpoint, directory / checkpoint.name, copy_function=os.link)
            for after in ranks.run(other, whole, setup, directory, True):
                if done % other:
                    assert f"start {world} rank" in after
                    assert f"number of ranks that divides {6 - done}" in after
                    continue
                went_on += 1
                assert isinstance(after, dict)
                for key, weight in after.items():
                    torch.testing.assert_close(weight, before[0][key], rtol=0, atol=1e-12)
    assert went_on == count


class Average:
    """A moving average of the weights, in shards."""

    def __init__(self, model: nn.Module) -> None:
        self.of = dict(model.named_parameters())
        self.values = {name: value.detach().clone() for name, value in self.of.items()}

    def update(self) -> None:
        """One step of it."""
        for name, value in self.values.items():
            value.lerp_(self.of[name].detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        """Sharded tensors."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        for name, value in state["values"].items():
            self.values[name].copy_(value)


def averaging(rank: int, directory: Path, resume: bool) -> list[Tensor]:
    """Run with an average, which is saved as an object of its own; the whole of it."""
    run = Run(rank, Setup("momentum", total=6), 1)
    average = Average(run.model)
    run.accum.on_update(average.update)
    with Checkpointer(
        directory, run.accum, model=run.model, loader=run.loader, average=average, **EACH
    ) as checkpoint:
        if resume:
            assert checkpoint.resume() is not None
        run.train()
    return [full(value) for value in average.values.values()]


def test_other_objects_may_have_shards(ranks: Ranks, tmp_path: Path) -> None:
    """An average of sharded weights is sharded, too; gone on from by as many ranks, and by more."""
    quiet = ranks.run(2, averaging, tmp_path / "all", False)
    checkpoint = list_checkpoints(tmp_path / "all")[5]
    for world in (2, 3):
        shutil.copytree(checkpoint, tmp_path / f"{world}" / checkpoint.name)
        for after in ranks.run(world, averaging, tmp_path / f"{world}", True):
            for ours, theirs in zip(after, quiet[0], strict=True):
                tolerance = 0 if world == 2 else 1e-12
                torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_weights_and_moments_are_linked_inside_of_a_window(ranks: Ranks, tmp_path: Path) -> None:
    """The pieces of all ranks."""
    ranks.run(2, part, SETUPS["every"], tmp_path, **EACH)
    first, second = list_checkpoints(tmp_path)[2:4]
    assert open_checkpoint(second).manifest.position["pending"] == 1
    for rank in (0, 1):
        for name in (f"model-{rank}.safetensors", f"optimizer-{rank}.safetensors"):
            assert (first / name).stat().st_ino == (second / name).stat().st_ino


def test_a_piece_that_is_damaged_is_passed_over_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """Else the ranks would go on from different checkpoints."""
    setup = SETUPS["last"]
    quiet = ranks.run(2, part, setup, None)
    ranks.run(2, part, setup, tmp_path, every=4)
    newest = list_checkpoints(tmp_path)[-1]
    file = newest / "model-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    rest = ranks.run(2, part, setup, tmp_path, seed=55, resume=True)
    assert [len(told.seen) for told in rest] == [6, 6]
    assert_same(quiet, rest, "from the older one")


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("signal_at", [(1, 2), (0, 4)])
def test_a_signal_to_one_rank_of_a_sharded_run(
    ranks: Ranks, sync: str, signal_at: tuple[int, int], tmp_path: Path
) -> None:
    """All ranks stop at one micro-batch within the window, and go on to the same bits."""
    setup = SETUPS[sync]
    quiet = ranks.run(3, part, setup, None)
    signals = (signal.SIGUSR1,)
    first = ranks.run(3, part, setup, tmp_path, signal_at=signal_at, signals=signals)
    (count,) = {len(told.seen) for told in first}
    assert signal_at[1] <= count <= signal_at[1] + STEPS
    rest = ranks.run(3, part, setup, tmp_path, seed=55, resume=True)
    assert [len(told.seen) for told in rest] == [8 - count] * 3
    assert_same(quiet, rest, "after the signal")


def test_what_is_unchanged_is_linked_from_where_it_is_or_written_again(tmp_path: Path) -> None:
    """A rank that is not rank 0 does not know which of its saves have become checkpoints."""
    place = Destination(tmp_path, "token")
    written: dict[str, FileEntry] = {}

    def save(number: int, value: float, same: bool) -> Path:
        part = {"model-0": encode({"x": torch.full((3,), value)})}
        job = Job({"update": 1, "micro_batch": number}, {} if same else part)
        path = write(place, replace(job, unchanged=part if same else {}), number, written)
        assert path is not None
        assert read_part(open_checkpoint(path), "model-0")["x"].tolist() == [value] * 3
        return path / "model-0.safetensors"

    first = save(1, 1.0, same=False)
    second = save(2, 1.0, same=True)
    assert os.path.samefile(first, second)
    lost = save(3, 2.0, same=False)
    shutil.rmtree(lost.parent)
    again = save(4, 2.0, same=True)
    assert not os.path.samefile(second, again)
    assert os.path.samefile(again, save(5, 2.0, same=True))


def flushed(rank: int, setup: Setup, directory: Path) -> dict[str, Tensor]:
    """Close the window of a checkpoint at once; the weights after that."""
    run = Run(rank, setup, 1)
    with Checkpointer(directory, run.accum, model=run.model, loader=run.loader) as checkpoint:
        assert checkpoint.resume() is not None
    assert run.accum.flush()
    return {name: full(value) for name, value in run.model.state_dict().items() if name != "calls"}


@pytest.mark.parametrize("name", ["last", "every"])
def test_a_window_that_was_dealt_to_more_ranks_can_be_closed_at_once(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """Where only one of them was handed a sum, too."""
    ranks.run(1, whole, RESHARDED[name], tmp_path / "all", False)
    checkpoint = list_checkpoints(tmp_path / "all")[7]
    assert open_checkpoint(checkpoint).manifest.position["pending"] == 2
    told = []
    for world in (1, 2):
        shutil.copytree(checkpoint, tmp_path / f"{world}" / checkpoint.name)
        told += ranks.run(world, flushed, RESHARDED[name], tmp_path / f"{world}")
    for after in told[1:]:
        for key, weight in after.items():
            torch.testing.assert_close(weight, told[0][key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["format_1", "format_2"])
def test_ranks_go_on_from_a_sharded_checkpoint_of_an_older_format(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """Shards, deferred gradients and random states that an earlier version wrote on two ranks."""
    setup = Setup(total=6)
    (tmp_path / "none").mkdir()
    expected = ranks.run(2, whole, setup, tmp_path / "none", False)[0]
    for world in (1, 2):
        saved = Path(__file__).parents[1] / "checkpoint" / name / "two_ranks"
        shutil.copytree(saved, tmp_path / f"{world}")
        for found in ranks.run(world, whole, setup, tmp_path / f"{world}", True):
            assert isinstance(found, dict)
            for key, weight in found.items():
                torch.testing.assert_close(weight, expected[key], rtol=0, atol=1e-9)
