"""The checkpoint section of benchmark.py: saves in windows of 16 micro-batches, and the resume.

They stand beside `accelerator.save_state`, which blocks the loop, and the `async_save` of
torch.distributed.checkpoint (DCP). One loop trains one model and the three take turns to save in
it, so that their ratios hold on a machine whose speed varies. Memory and resumes are measured in
processes of their own.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from benchmark_loops import Settings, peak_bytes

from accumplug import Accumulator, Checkpointer

STEPS = 16
APART = 2 * STEPS  # micro-batches from a save to the next: a window with a save, one without
TOKENS = 64


@dataclass
class Block:
    """The moments of a micro-batch: its backward is done; its block, and a save, have ended."""

    backward: float
    end: float


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

    def train(self, micro_batches: int, save: Callable[[], object] | None = None) -> list[Block]:
        """Train micro-batches, and save after the last one if there is a `save`."""
        blocks = []
        for left in reversed(range(micro_batches)):
            with self.accum(self.model):
                self.accum.backward(self.model(self.settings.token_ids(TOKENS))["loss"])
                self.settings.synchronize()
                backward = time.perf_counter()
            if save is not None and left == 0:
                save()
            self.settings.synchronize()
            blocks.append(Block(backward, time.perf_counter()))
        return blocks

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save_state(self) -> None:
        self.accelerator.save_state(self.folder / "accelerate")

    def async_save(self) -> None:
        for writing in self.writing:
            writing.result()
        path = self.folder / f"dcp-{len(self.writing)}"
        self.writing.append(dcp.async_save(self.state(), checkpoint_id=path))

    def seconds(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        self.settings.synchronize()
        return time.perf_counter() - start


def checkpoint(settings: Settings) -> dict[str, Any]:
    """Saves in a window of 16: the loop's time, the slowdown, memory, bytes and the resume."""
    with tempfile.TemporaryDirectory(dir=settings.output_dir) as folder:
        run = Run(settings, folder)
        run.train(STEPS)  # makes the moments
        with run.checkpointer() as checkpointer:
            first, held, longer = take_turns(run, checkpointer)
            run.train(STEPS // 2)
            _, held_inside, longer_inside = take_turns(run, checkpointer)
            checkpointer.save()
            run.train(1)
            share = new_share(checkpointer.save())
        loads = {"accum": "resume", "save_state": "load_state", "DCP async_save": "load_dcp"}
        resume = {
            name: spread([settings.in_child(load, folder) for _ in range(settings.repeats)])
            for name, load in loads.items()
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
        "resume in a new process, seconds": resume,
        "resume, of load_state": resume["accum"]["median"] / resume["save_state"]["median"],
    }


Times = dict[str, list[float]]


def take_turns(run: Run, checkpointer: Checkpointer) -> tuple[float, Times, Times]:
    """Save in each way in turn at the present place of a window, and in every second window.

    Returns the seconds that the first save of accum holds the loop's thread, those that each later
    save does, and those that the 16 micro-batches from a save on take longer than the 16 before.
    """
    ways: dict[str, Callable[[], object]] = {
        "accum": lambda: checkpointer.save(wait=False),
        "save_state": run.save_state,
        "DCP async_save": run.async_save,
    }
    blocks: list[Block] = []
    for _ in range(run.settings.repeats + 1):
        for save in ways.values():
            blocks += run.train(APART, save)
    blocks += run.train(STEPS)
    held: Times = {name: [] for name in ways}
    longer: Times = {name: [] for name in ways}
    for turn, at in enumerate(range(APART - 1, len(blocks) - STEPS, APART)):
        name, before = list(ways)[turn % len(ways)], blocks[at - STEPS]
        saving = blocks[at].end - blocks[at].backward - (before.end - before.backward)
        usual = blocks[at].end - saving - before.end
        held[name].append(saving)
        longer[name].append(blocks[at + STEPS].end - blocks[at].end + saving - usual)
    first = held["accum"][0]
    return first, *({name: times[1:] for name, times in all_.items()} for all_ in (held, longer))


def memory_of_a_save(settings: Settings, way: str) -> float:
    """In a child: memory at the peak of a save in a window's middle above that of windows."""
    with tempfile.TemporaryDirectory(dir=settings.output_dir) as folder:
        run = Run(settings, folder)
        with run.checkpointer() as checkpointer:
            run.train(2 * STEPS)
            gc.collect()
            peak_bytes(settings.device, reset=True)
            run.train(STEPS)
            usual = peak_bytes(settings.device, reset=True)
            ours = way == "accum"
            run.train(
                STEPS // 2, (lambda: checkpointer.save(wait=False)) if ours else run.async_save
            )
            run.train(STEPS)
            above = peak_bytes(settings.device) - usual
            for writing in run.writing:
                writing.result()
        return above / sum(p.numel() * p.element_size() for p in run.model.parameters())


def resume(settings: Settings, folder: str) -> float:
    """In a child: seconds of accum's resume, every byte checked."""
    run = Run(settings, folder)
    with run.checkpointer() as checkpointer:
        return run.seconds(checkpointer.resume)


def load_state(settings: Settings, folder: str) -> float:
    """In a child: seconds of Accelerate's load_state."""
    run = Run(settings, folder)
    return run.seconds(lambda: run.accelerator.load_state(run.folder / "accelerate"))


def load_dcp(settings: Settings, folder: str) -> float:
    """In a child: seconds of DCP's load."""
    run = Run(settings, folder)
    run.train(STEPS)  # makes the moments that it loads into
    return run.seconds(lambda: dcp.load(run.state(), checkpoint_id=run.folder / "dcp-0"))


def new_share(path: Path) -> float:
    """The share of a checkpoint's bytes that it wrote itself: in files without another link."""
    files = [file.stat() for file in path.rglob("*") if file.is_file()]
    return sum(f.st_size for f in files if f.st_nlink == 1) / sum(f.st_size for f in files)


def of(times: Times, unit: float) -> dict[str, dict[str, float]]:
    return {name: spread([s / unit for s in seconds]) for name, seconds in times.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
