"""An exception at any line of a window: discard() works between blocks, and the loop goes on."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accumplug
from accumplug import Accumulator

ROOMS = tuple(
    str(Path(accumplug.__file__).parent / name)
    for name in ("loop", "core", "parallel", "integrations", "accumulator.py")
)
DATA = [torch.full((2, 3), float(n)) for n in (1, -2, 3, 1)]


class Injected(Exception):
    """What no line of the package raises by itself."""


@contextmanager
def injected(point: int) -> Iterator[list[str]]:
    """Raise at the line number `point` that runs in ROOMS; yields where that was."""
    passed, places = 0, []

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal passed
        if event == "line":
            passed += 1
            if passed == point:
                places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                raise Injected
        return at_line

    def at_call(frame: FrameType, event: str, argument: Any) -> Any:
        return at_line if frame.f_code.co_filename.startswith(ROOMS) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield places
    except Injected:
        pass
    finally:
        sys.settrace(before)


class Loop:
    """One kind of loop, with steps=2."""

    def __init__(self, kind: str) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.kind, self.accelerator = kind, None
        self.model: Any = self.net
        if kind == "ddp":
            self.model = DistributedDataParallel(self.net)
        if kind == "accelerate":
            self.accelerator = Accelerator(cpu=True)
            self.model, self.optimizer = self.accelerator.prepare(self.net, self.optimizer)
            self.accum = Accumulator(2, accelerator=self.accelerator)
            self.before = dict(vars(self.accelerator))
        else:
            self.accum = Accumulator(2, optimizer=self.optimizer, max_grad_norm=1.0)

    def train(self, data: list[Tensor]) -> None:
        """Whole windows."""
        for x in self.accum.batches(data) if self.kind == "batches" else data:
            with self.accum(self.model):
                self.accum.backward(self.model(x).square().mean())
                if self.accelerator is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def goes_on(self) -> bool:
        """Whether it is as it would be in plain torch, from what it has now."""
        net = copy.deepcopy(self.net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.train(DATA)
        for window in (DATA[:2], DATA[2:]):
            optimizer.zero_grad()
            for x in window:
                (net(x).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        return all(map(torch.equal, net.parameters(), self.net.parameters()))

    def is_put_back(self) -> bool:
        """Whether nothing of the block is left on the user's objects."""
        if self.accelerator is not None:
            now, names = vars(self.accelerator), {"step"}
            return {n for n in now if n not in names} == {n for n in self.before if n not in names}
        return self.kind != "ddp" or bool(self.model.require_backward_grad_sync)


def fault(kind: str, point: int) -> tuple[bool, str | None]:
    """Whether the window had that many lines, and what went wrong after an exception there."""
    loop = Loop(kind)
    loop.train(DATA[:2])
    with injected(point) as places:
        loop.train(DATA[:2])
    if not places:
        return False, None
    if loop.accelerator is not None:
        loop.optimizer.zero_grad()  # the loop's own, which may not have come to it
    try:
        loop.accum.discard()
        assert loop.is_put_back(), "something is left on the user's objects"
        assert loop.goes_on(), "other weights than plain torch"
    except Exception as error:
        return True, f"{places[0]}: {type(error).__name__}: {error}"
    return True, None


def faults(kind: str, start: int, stride: int) -> tuple[int, list[str]]:
    """Of each `stride`-th line, how many there were and what went wrong."""
    wrong, point = [], start
    gc.freeze()  # collecting what is there already takes most of the time
    while True:
        gc.collect()  # the Accumulators of before
        reached, what = fault(kind, point)
        if not reached:
            return (point - start) // stride, wrong
        if what is not None:
            wrong.append(what)
        point += stride


KINDS = ["plain", "batches", "accelerate", "ddp"]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", KINDS)
def test_discard_works_after_an_exception_at_some_lines_of_a_window(kind: str) -> None:
    """Each 13th; the next windows have the bits of plain torch."""
    count, wrong = faults(kind, 5, 13)
    assert count >= 20
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", KINDS)
def test_discard_works_after_an_exception_at_any_line_of_a_window(kind: str) -> None:
    """All of them."""
    count, wrong = faults(kind, 1, 1)
    assert count >= 300
    assert not wrong, "\n".join(wrong)
