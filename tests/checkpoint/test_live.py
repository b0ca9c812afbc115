"""A save reads weights and moments from where they are, and has those of its moment all the same:
whenever the step comes, whoever takes it, and whoever else writes into them."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from forks import fork
from slow_disk import SlowDisk
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from training import difference

from accumplug import Accumulator, Checkpointer
from accumplug.storage.codec import encode
from accumplug.storage.commit import Job
from accumplug.storage.layout import faults, list_checkpoints, open_checkpoint
from accumplug.storage.live import LiveTensors
from accumplug.storage.writer import Writer

STEPS = 3
PIECES = [0, 1, 7, 11]  # when the disk stops; there are 14 of weights alone


@dataclass
class Way:
    """Who takes the step."""

    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    by: str = "accum"
    scaler: bool = False
    inf: bool = False
    """The gradient overflows, so that the scaler skips the step."""


WAYS = {
    "accum": Way(),
    "the loop": Way(by="loop"),
    "Accelerate": Way(by="Accelerate"),
    "a scaler": Way(by="loop", scaler=True),
    "a scaler that skips": Way(by="loop", scaler=True, inf=True),
    "accum with a scaler that skips": Way(scaler=True, inf=True),
    "fused": Way(lambda p: torch.optim.AdamW(p, fused=True)),
    "foreach": Way(lambda p: torch.optim.AdamW(p, foreach=True), by="loop"),
    "momentum": Way(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "a closure": Way(lambda p: torch.optim.LBFGS(p, max_iter=2), by="closure"),
}


class Run:
    """A model with a buffer and a weight in another memory format, in a loop of that way."""

    def __init__(self, way: Way, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.way = way
        self.model: nn.Module = nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 1)
        )
        if way.by != "closure":  # LBFGS takes no other format
            self.model[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = way.optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if way.scaler else None
        options: dict[str, Any] = {}
        if way.by == "Accelerate":
            options["accelerator"] = Accelerator(cpu=True)
            self.model, self.optimizer = options["accelerator"].prepare(self.model, self.optimizer)
        elif way.by == "accum":
            options["optimizer"] = self.optimizer
        self.accum = Accumulator(STEPS, scaler=self.scaler, **options)

    def checkpointer(self, directory: Path, **options: Any) -> Checkpointer:
        if self.way.by in ("loop", "closure"):
            options["optimizer"] = self.optimizer
        return Checkpointer(directory, self.accum, model=self.model, **options)

    def train(self, micro_batches: int, factor: float = 1.0) -> None:
        for _ in range(micro_batches):
            x = torch.randn(2, 2, 3, 3)
            with self.accum(self.model) as micro:
                micro.backward(self.model(x).square().mean() * factor)
                if self.way.by == "Accelerate":
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            if micro.closes and self.way.by == "closure":
                self.optimizer.step(lambda: 0.0)
                self.optimizer.zero_grad()
            elif micro.closes and self.way.by == "loop":
                if self.scaler is None:
                    self.optimizer.step()
                else:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "sums": [p.grad for p in self.model.parameters()],
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "place": [self.accum.updates, self.accum.pending],
            }
        )


pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    ("pieces", "within"),
    [*((n, False) for n in PIECES), (0, True), (7, True)],
    ids=[*(f"after {n}" for n in PIECES), "within 0", "within 7"],
)
@pytest.mark.parametrize("pending", [0, 2])
def test_a_step_during_the_write_changes_nothing_of_what_is_saved(
    name: str, pieces: int, within: bool, pending: int, tmp_path: Path
) -> None:
    """And the save changes nothing of what is trained."""
    way = WAYS[name]
    run, alone = Run(way), Run(way)
    for each in (run, alone):
        torch.manual_seed(1)
        each.train(STEPS + pending)
    last = float("inf") if way.inf else 1.0
    disk = SlowDisk(pieces, within)
    with run.checkpointer(tmp_path) as checkpoint, disk.installed():
        saved = run.state()
        handle = checkpoint.save(wait=False)
        assert disk.stopped.wait(10)
        if within:
            threading.Timer(0.05, disk.go_on).start()
        torch.manual_seed(2)
        run.train(STEPS - pending, last)
        torch.manual_seed(2)
        alone.train(STEPS - pending, last)
        assert difference(run.state()["model"], saved["model"]) is not None
        disk.go_on()
        handle.result()
        assert difference(run.state(), alone.state()) is None
        resumed = Run(way, seed=9)
    with resumed.checkpointer(tmp_path) as checkpoint, SlowDisk(99).installed():
        checkpoint.resume()
    assert difference(resumed.state(), saved) is None


def test_only_what_is_not_written_is_copied(tmp_path: Path) -> None:
    """Nothing if the step comes late, all that is read from where it is if it comes at once."""
    copied = []
    for pieces in (0, 10, 20, 99):
        run, disk = Run(Way()), SlowDisk(pieces)
        with run.checkpointer(tmp_path / str(pieces)) as checkpoint, disk.installed():
            run.train(STEPS)
            handle = checkpoint.save(wait=False)
            live = checkpoint._snapshot._live
            if pieces == 99:
                handle.result()
            else:
                assert disk.stopped.wait(10)
            run.train(STEPS)
            copied.append(live.copied)
            disk.go_on()
    still = sum(
        t.nbytes
        for p in run.model.parameters()
        for t in (p, *run.optimizer.state[p].values())
        if t.numel() > 1 and t.is_contiguous()
    )
    assert copied[0] == still
    assert copied[0] > copied[1] > copied[2] > copied[3] == 0


def test_a_skipped_step_copies_nothing(tmp_path: Path) -> None:
    run, disk = Run(WAYS["a scaler that skips"]), SlowDisk(3)
    with run.checkpointer(tmp_path) as checkpoint, disk.installed():
        run.train(STEPS)
        handle = checkpoint.save(wait=False)
        assert disk.stopped.wait(10)
        run.train(STEPS, float("inf"))
        assert checkpoint._snapshot._live.copied == 0
        disk.go_on()
        handle.result()


def test_the_step_of_an_optimizer_of_other_parameters_copies_nothing(tmp_path: Path) -> None:
    run, disk = Run(Way()), SlowDisk(3)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    with run.checkpointer(tmp_path) as checkpoint, disk.installed():
        run.train(STEPS)
        handle = checkpoint.save(wait=False)
        assert disk.stopped.wait(10)
        torch.optim.SGD(other.parameters()).step()
        assert checkpoint._snapshot._live.copied == 0
        torch.optim.SGD(run.model.parameters()).step()
        assert checkpoint._snapshot._live.copied > 0
        disk.go_on()
        handle.result()


def by_counter(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(2)


def by_data(p: Tensor) -> None:
    p.data.mul_(2)


def by_numpy(p: Tensor) -> None:
    p.detach().numpy()[:] = 7


@pytest.mark.parametrize("write", [by_counter, by_data, by_numpy])
@pytest.mark.parametrize("moment", [False, True])
def test_a_write_by_anybody_else_gives_the_save_up_and_the_next_block_makes_it_anew(
    write: Callable[[Tensor], None], moment: bool, tmp_path: Path
) -> None:
    """With copies from then on, which the same write does not disturb."""
    run, disk = Run(Way()), SlowDisk(3)
    with run.checkpointer(tmp_path) as checkpoint:
        run.train(STEPS)
        path = checkpoint.save()
        run.train(STEPS)
        with disk.installed():
            handle = checkpoint.save(wait=False)
            assert disk.stopped.wait(10)
            parameter = run.model[4].weight
            write(run.optimizer.state[parameter]["exp_avg"] if moment else parameter)
            disk.go_on()
            while not handle.done():
                time.sleep(0.001)
        with pytest.warns(UserWarning, match="was written to while it was being saved"):
            run.train(1)
        with pytest.raises(RuntimeError, match="was written to while it was being saved"):
            handle.result()
        saved = run.state()
        assert checkpoint.wait() != path
        resumed = Run(Way(), seed=9)
    with resumed.checkpointer(tmp_path) as checkpoint:
        assert checkpoint.resume().path != path
    assert difference(resumed.state(), saved) is None


@pytest.mark.parametrize("waits", [False, True])
def test_close_right_after_a_save_was_given_up_makes_it_anew(waits: bool, tmp_path: Path) -> None:
    """Of the moment of the close; and nothing is raised."""
    run, disk = Run(Way()), SlowDisk(3)
    checkpoint = run.checkpointer(tmp_path)
    run.train(STEPS + 1)
    with disk.installed():
        handle = checkpoint.save(wait=False)
        assert disk.stopped.wait(10)
        by_numpy(run.model[4].weight)
        disk.go_on()
        if waits:
            while not handle.done():
                time.sleep(0.001)
    with pytest.warns(UserWarning, match="was written to while it was being saved"):
        checkpoint.close()
    assert len(list_checkpoints(tmp_path)) == 1
    saved, resumed = run.state(), Run(Way(), seed=9)
    with resumed.checkpointer(tmp_path) as checkpoint:
        checkpoint.resume()
    assert difference(resumed.state(), saved) is None


def test_an_error_of_the_loop_is_not_followed_by_a_new_save(tmp_path: Path) -> None:
    """The state may be half of an update; the error is not hidden by the save that was given up."""
    run, disk = Run(Way()), SlowDisk(3)

    def train_and_fail() -> None:
        with run.checkpointer(tmp_path) as checkpoint:
            run.train(STEPS)
            with disk.installed():
                checkpoint.save(wait=False)
                assert disk.stopped.wait(10)
                by_numpy(run.model[4].weight)
                disk.go_on()
            raise KeyError("the loop's")

    with pytest.warns(UserWarning, match="was written to"), pytest.raises(KeyError, match="loop's"):
        train_and_fail()
    assert list_checkpoints(tmp_path) == []


def test_a_save_that_waits_makes_one_save_for_one_that_was_given_up(tmp_path: Path) -> None:
    run, disk = Run(Way()), SlowDisk(3)
    with run.checkpointer(tmp_path, keep=9) as checkpoint:
        run.train(STEPS)
        with disk.installed():
            threading.Thread(
                target=lambda: (disk.stopped.wait(10), by_numpy(run.model[4].weight), disk.go_on())
            ).start()
            with pytest.warns(UserWarning, match="was written to while it was being saved"):
                path = checkpoint.save()
        run.train(1)
        checkpoint.wait()
        assert list_checkpoints(tmp_path) == [path]


def test_a_new_tensor_in_place_of_a_weight_leaves_the_save_as_it_was(tmp_path: Path) -> None:
    run, disk = Run(Way()), SlowDisk(3)
    with run.checkpointer(tmp_path) as checkpoint, disk.installed():
        run.train(STEPS)
        saved = run.state()
        handle = checkpoint.save(wait=False)
        assert disk.stopped.wait(10)
        for parameter in run.model.parameters():
            parameter.data = torch.zeros_like(parameter)
        disk.go_on()
        handle.result()
        resumed = Run(Way(), seed=9)
    with resumed.checkpointer(tmp_path) as checkpoint, SlowDisk(99).installed():
        checkpoint.resume()
    assert difference(resumed.state(), saved) is None


def test_copy_is_disturbed_by_no_write(tmp_path: Path) -> None:
    run = Run(Way())
    with run.checkpointer(tmp_path, copy=True) as checkpoint:
        run.train(STEPS)
        saved = run.state()
        checkpoint._snapshot._live = LiveTensors()
        handle = checkpoint.save(wait=False)
        assert not checkpoint._snapshot._live.sources
        by_numpy(run.model[4].weight)
        handle.result()
        resumed = Run(Way(), seed=9)
    with resumed.checkpointer(tmp_path) as checkpoint:
        checkpoint.resume()
    assert difference(resumed.state(), saved) is None


def test_nothing_of_a_save_is_held_once_it_is_written(tmp_path: Path) -> None:
    hooks = _global_optimizer_pre_hooks
    run = Run(Way())
    with run.checkpointer(tmp_path) as checkpoint:
        run.train(STEPS)
        checkpoint.save(wait=False).result()
        assert not checkpoint._snapshot._live.sources
        assert len(hooks) == 1
    assert not hooks


def test_a_copy_that_fails_before_the_step_gives_the_save_up(tmp_path: Path) -> None:
    """What the writer can't have any more is never read from weights that have been stepped."""
    disk, writer, live = SlowDisk(3), Writer(tmp_path), LiveTensors()
    encoded = encode(torch.arange(1000.0), "tensor")
    for name, tensor in encoded.tensors.items():
        live.add(name, tensor)
    job = Job({"update": 1, "micro_batch": 1}, {"model": encoded}, live=live)
    with disk.installed(), pytest.MonkeyPatch.context() as patch:
        writer.submit(job)
        assert disk.stopped.wait(10)
        patch.setattr("numpy.empty", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            live.release()
        disk.go_on()
        with pytest.raises(RuntimeError, match="could not be copied before the optimizer's step"):
            writer.wait()
    writer.close()


def live_until_killed(directory: Path, stopped: Connection, pieces: int, steps: bool) -> None:
    """Save twice; tell when the second save has come so far, perhaps with the step behind it."""
    run, disk = Run(Way()), SlowDisk(pieces)
    with run.checkpointer(directory) as checkpoint:
        run.train(STEPS)
        checkpoint.save()
        run.train(STEPS)
        with disk.installed():
            checkpoint.save(wait=False)
            assert disk.stopped.wait(10)
            if steps:
                run.train(STEPS)
            stopped.send(None)
            time.sleep(60)


@pytest.mark.parametrize("pieces", [0, 5, 13])
@pytest.mark.parametrize("steps", [False, True], ids=["before the step", "after the step"])
def test_a_kill_while_live_memory_is_written_leaves_the_checkpoint_before_whole(
    pieces: int, steps: bool, tmp_path: Path
) -> None:
    stopped, told = multiprocessing.Pipe(duplex=False)
    process = fork(live_until_killed, tmp_path, told, pieces, steps)
    assert stopped.poll(60)
    process.kill()
    process.join(60)
    assert len(list_checkpoints(tmp_path)) == 1
    assert list(faults(open_checkpoint(list_checkpoints(tmp_path)[0]), full=True)) == []
    alone = Run(Way())
    alone.train(STEPS)
    resumed = Run(Way(), seed=9)
    with resumed.checkpointer(tmp_path) as checkpoint:
        assert checkpoint.resume().update == 1
    assert difference(resumed.state(), alone.state()) is None


def test_the_copies_of_gradients_are_made_in_the_same_memory_in_each_window(tmp_path: Path) -> None:
    """Also after a save at a window's start, which has none: new memory costs page faults."""
    run = Run(Way())
    places: list[set[int]] = []
    with run.checkpointer(tmp_path) as checkpoint:
        for _ in range(2):
            run.train(STEPS)
            checkpoint.save(wait=False).result()
            run.train(1)
            checkpoint.save(wait=False).result()
            buffers = checkpoint._snapshot._buffers
            assert buffers is not None
            held = buffers._held["rank-0"]
            places.append({t.data_ptr() for n, t in held.items() if n.startswith("sums")})
            run.train(STEPS - 1)
            run.train(STEPS)
    assert places[0] == places[1]
    assert places[0]
