"""A signal saves the run and ends the pass; what handled it before is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from training import Run, Setup, difference

from accumplug.checkpoint.signals import Signals

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """No test leaves a handler behind."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


class Interrupted(Run):
    """A run that gets a signal while its micro-batch number `at` runs."""

    at = 5

    def block(self, x: Tensor, y: Tensor) -> None:
        if len(self.seen) + 1 == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)
        super().block(x, y)


@pytest.mark.parametrize("at", [1, 2, 3, 8, 9])
def test_a_signal_saves_at_the_end_of_its_micro_batch_and_ends_the_pass(
    at: int, tmp_path: Path
) -> None:
    """Wherever it comes: first, last of a window, last of a pass. Another process goes on."""
    quiet = Run(Setup()).train()
    first = Interrupted(Setup())
    first.at = at
    with first.checkpoints(tmp_path, signals=(signal.SIGUSR1,)) as checkpoint:
        assert not checkpoint.interrupted
        first.train(checkpoint=checkpoint)
        assert checkpoint.interrupted
    assert len(first.seen) == at
    rest = Run(Setup(), seed=9)
    with rest.checkpoints(tmp_path) as checkpoint:
        position = checkpoint.resume()
        assert position is not None
        assert position.micro_batch == at
        rest.train()
    assert difference(first.seen + rest.seen, quiet.seen) is None
    assert difference(rest.state(), quiet.state()) is None


def test_a_signal_between_two_blocks_is_answered_before_the_next_one(tmp_path: Path) -> None:
    """E.g. in an evaluation behind the pass: the next pass hands out nothing."""
    run = Run(Setup())
    with run.checkpoints(tmp_path, signals=(signal.SIGUSR1,)) as checkpoint:
        run.train(epochs=1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert list(run.accum.batches(run.loader)) == []
        assert checkpoint.interrupted
        with pytest.raises(RuntimeError, match=r"if checkpoint\.interrupted: break"):
            list(run.accum.batches(run.loader))
    quiet = Run(Setup()).train()
    rest = Run(Setup(), seed=9)
    with rest.checkpoints(tmp_path) as checkpoint:
        checkpoint.resume()
        rest.train()
    assert difference(run.seen + rest.seen, quiet.seen) is None


def test_a_function_that_handled_the_signal_before_runs_as_well_and_comes_back(
    tmp_path: Path,
) -> None:
    """It is called with the same arguments, and is the handler again after close."""
    calls: list[int] = []

    def earlier(number: int, frame: Any) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGUSR2, earlier)
    run = Run(Setup())
    checkpoint = run.checkpoints(tmp_path, signals=(signal.SIGUSR2,))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert calls == [signal.SIGUSR2]
    checkpoint.close()
    assert signal.getsignal(signal.SIGUSR2) is earlier
    signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_was_set_later_stays() -> None:
    """close does not take away what somebody else has put there."""

    def later(number: int, frame: Any) -> None: ...

    signals = Signals((signal.SIGUSR1,))
    signals.install()
    before = signal.signal(signal.SIGUSR1, later)
    signals.restore()
    assert signal.getsignal(signal.SIGUSR1) is later
    signal.signal(signal.SIGUSR1, before)
    signals = Signals((signal.SIGUSR1,))
    signals.restore()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_second_signal_after_a_while_does_what_it_did_before() -> None:
    """Ctrl-C twice, a second apart: KeyboardInterrupt. Quickly: the same request."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals = Signals((signal.SIGINT,))
    signals.install()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.arrived
    signals._since -= 2
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    signals.restore()
    signal.signal(signal.SIGINT, before)


WORKERS = """
import os, signal, sys, time
from torch.utils.data import DataLoader
from accumplug.checkpoint.signals import protect_workers

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    loader = DataLoader(range(24), 2, num_workers=1, multiprocessing_context=sys.argv[1])
    with protect_workers(loader, (signal.SIGTERM, signal.SIGUSR1)):
        items = iter(loader)
    assert loader.worker_init_fn is None
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    (worker,) = items._workers
    for number in range(2):  # while it starts, and after that
        os.kill(worker.pid, signal.SIGUSR1)
        os.system(f"kill -TERM {worker.pid}")  # from another process than its parent
        next(items)
    time.sleep(0.3)
    assert len(list(items)) == 10, "it died of the signal"
    with protect_workers(loader, (signal.SIGTERM,)):
        items = iter(loader)
    next(items)
    (worker,) = items._workers
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0, "it did not end for its parent"
    os._exit(0)
"""


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_live_through_a_signal_to_the_whole_group_and_end_for_their_parent(
    context: str, tmp_path: Path
) -> None:
    """torch lets a worker die of a SIGTERM that its parent did not send, and the run with it.
    While the worker starts, too, and whatever threads its libraries have made."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(script), context],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "4"},
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
