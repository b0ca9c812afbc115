"""The checkpoint section of benchmark.py: saves in windows of 16 micro-batches, and the resume.

They stand beside `accelerator.save_state`, which blocks the loop, and the `async_save` of
torch.distributed.checkpoint (DCP). One loop trains one model; in each turn each way saves once and
one window has no save, so that ratios hold on a machine whose speed varies. Memory and resumes are
measured in processes of their own, resumes with the files in the page cache and without.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from benchmark_loops import Settings, peak_bytes

from accumplug import Accumulator, Checkpointer

STEPS = 16
TOKENS = 64


class Run:
    """A model and AdamW in an Accelerate loop, and the ways to save them in `folder`."""

    def __init__(self, settings: Settings, folder: str | Path) -> None:
        self.settings, self.folder = settings, Path(folder)
        self.accelerator = Accelerator(cpu=settings.device == "cpu")
        model = settings.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.accum = Accumulator(STEPS, accelerator=self.accelerator, optimizer=self.optimizer)
        self.writing: list[Any] = []

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.folder / "accum", self.accum, model=self.model)

    def train(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            with self.accum(self.model):
                self.accum.backward(self.model(self.settings.token_ids(TOKENS))["loss"])
        self.settings.synchronize()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save_state(self) -> None:
        self.accelerator.save_state(self.folder / "accelerate")

    def async_save(self) -> None:
        path = self.folder / f"dcp-{len(self.writing) % 2}"
        self.writing.append(dcp.async_save(self.state(), checkpoint_id=path))

    def wait(self, checkpointer: Checkpointer) -> None:
        """Until nothing is written, and the disk has all that is in the page cache."""
        checkpointer.wait()
        for writing in self.writing:
            writing.result()
        os.sync()

    def seconds(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        self.settings.synchronize()
        return time.perf_counter() - start


def checkpoint(settings: Settings) -> dict[str, Any]:
    """Saves in a window of 16: the loop's time, the slowdown, memory, bytes and the resume."""
    repeats = settings.repeats
    with tempfile.TemporaryDirectory(dir=settings.output_dir) as folder:
        run = Run(settings, folder)
        run.train(STEPS)  # makes the moments
        with run.checkpointer() as checkpointer:
            first = run.seconds(lambda: checkpointer.save(wait=False))
            run.train(STEPS)
            held, longer = take_turns(run, checkpointer, 2 * repeats + 2)
            run.train(STEPS // 2)
            held_inside, longer_inside = take_turns(run, checkpointer, repeats // 2 + 1)
            checkpointer.save()
            run.train(1)
            share = new_share(checkpointer.save())
            run.wait(checkpointer)
        loads = {"accum": "resume", "save_state": "load_state", "DCP async_save": "load_dcp"}
        resumes = {
            place: {
                name: [settings.in_child(load, folder, place) for _ in range(repeats)]
                for name, load in loads.items()
            }
            for place in ("cached", "on disk")
        }
    save_state = statistics.median(held["save_state"])
    return {
        "save_state, seconds": spread(held["save_state"]),
        "loop held by a save, of save_state": {
            "first one of a process": first / save_state,
            "at a window's start": of(held, save_state),
            "in its middle": of(held_inside, save_state),
        },
        "window longer by a save, of save_state": {
            "at its start": of(longer, save_state),
            "in its middle": of(longer_inside, save_state),
        },
        "peak memory above that of a window, of the gradients": {
            name: settings.in_child("memory_of_a_save", name) for name in ("accum", "DCP")
        },
        "bytes written inside of a window, of a whole checkpoint": share,
        "resume in a new process, seconds": {
            place: {name: spread(seconds) for name, seconds in rows.items()}
            for place, rows in resumes.items()
        },
        "resume, of load_state": {
            place: statistics.median(rows["accum"]) / statistics.median(rows["save_state"])
            for place, rows in resumes.items()
        },
    }


Times = dict[str, list[float]]


def take_turns(run: Run, checkpointer: Checkpointer, turns: int) -> tuple[Times, Times]:
    """Save in each way at the present place of a window, train 16 micro-batches, and wait.

    Returns the seconds that the saves hold the loop's thread, and those that the save and the 16
    micro-batches take longer than 16 without a save in the same turn. The order changes.
    """
    ways: dict[str, Callable[[], object]] = {
        "none": lambda: None,
        "accum": lambda: checkpointer.save(wait=False),
        "save_state": run.save_state,
        "DCP async_save": run.async_save,
    }
    names = list(ways)
    held: Times = {name: [] for name in ways}
    whole: Times = {name: [] for name in ways}
    for turn in range(turns):
        for name in names[turn % 4 :] + names[: turn % 4]:
            run.wait(checkpointer)
            held[name].append(run.seconds(ways[name]))
            whole[name].append(held[name][-1] + run.seconds(lambda: run.train(STEPS)))
    bare = whole.pop("none")
    del held["none"]
    longer = {n: [w - b for w, b in zip(times, bare, strict=True)] for n, times in whole.items()}
    return held, longer


def memory_of_a_save(settings: Settings, way: str) -> float:
    """In a child: memory at the peak of a save in a window's middle above that of windows."""
    with tempfile.TemporaryDirectory(dir=settings.output_dir) as folder:
        run = Run(settings, folder)
        with run.checkpointer() as checkpointer:
            run.train(STEPS)
            gc.collect()
            peak_bytes(settings.device, reset=True)
            run.train(STEPS + STEPS // 2)
            usual = peak_bytes(settings.device, reset=True)
            checkpointer.save(wait=False) if way == "accum" else run.async_save()
            run.train(STEPS)
            above = peak_bytes(settings.device) - usual
            run.wait(checkpointer)
        return above / sum(p.numel() * p.element_size() for p in run.model.parameters())


def resume(settings: Settings, folder: str, place: str) -> float:
    """In a child: seconds of accum's resume, every byte checked."""
    run = Run(settings, folder)
    put(run.folder / "accum", place)
    with run.checkpointer() as checkpointer:
        return run.seconds(checkpointer.resume)


def load_state(settings: Settings, folder: str, place: str) -> float:
    """In a child: seconds of Accelerate's load_state."""
    run = Run(settings, folder)
    put(run.folder / "accelerate", place)
    return run.seconds(lambda: run.accelerator.load_state(run.folder / "accelerate"))


def load_dcp(settings: Settings, folder: str, place: str) -> float:
    """In a child: seconds of DCP's load."""
    run = Run(settings, folder)
    run.train(STEPS)  # makes the moments that it loads into
    put(run.folder / "dcp-0", place)
    return run.seconds(lambda: dcp.load(run.state(), checkpoint_id=run.folder / "dcp-0"))


def put(folder: Path, place: str) -> None:
    """Let the page cache have the files in `folder`, or let it have none of their clean pages."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if place == "on disk":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(1 << 20):
                        pass


def new_share(path: Path) -> float:
    """The share of a checkpoint's bytes that it wrote itself: in files without another link."""
    files = [file.stat() for file in path.rglob("*") if file.is_file()]
    return sum(f.st_size for f in files if f.st_nlink == 1) / sum(f.st_size for f in files)


def of(times: Times, unit: float) -> dict[str, dict[str, float]]:
    return {name: spread([s / unit for s in seconds]) for name, seconds in times.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
