"""The training recipes, killed and started again with the same command, end as if nothing were.

The last test starts them as a user does, the others in forked processes.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import fork
from safetensors.torch import load_file

RECIPES = Path(__file__).parents[2] / "recipes"
AGAIN = 75
BOTH = pytest.mark.parametrize("recipe", ["train", "train_ddp"])

Options = tuple[str, ...]


def live(recipe: str, options: Options, rank: dict[str, str], output: Path, end: Any) -> None:
    """What a process does: run the recipe until `end` (a signal, the number of a forward pass in
    which it comes, and how much later)."""
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **rank})
    sys.argv = [f"{recipe}.py", *options]
    if end is not None:
        die(*end)
    code = importlib.import_module(recipe).main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)


def die(number: int, at: int, later: float) -> None:
    """Let a signal come while this process trains."""
    model = importlib.import_module("model").LanguageModel
    forward, calls = model.forward, iter(range(1, 10_000))

    def counted(self: Any, inputs: torch.Tensor) -> Any:
        if next(calls) == at:
            threading.Timer(later, os.kill, (os.getpid(), number)).start()
        return forward(self, inputs)

    model.forward = counted


def start(recipe: str, output: Path, *options: str, ranks: int = 1, end: Any = None) -> list[int]:
    """Run a recipe on so many ranks, of which the last one gets the signal; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    output.mkdir(exist_ok=True)
    processes = []
    for rank in range(ranks):
        given = {} if ranks == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
        to = ("--output-dir", str(output), *options), given, output / f"rank-{rank}.txt"
        mine = end if rank == ranks - 1 else None
        processes.append(fork(live, recipe, *to, mine))
    for process in reversed(processes):
        process.join(60)
        if process.exitcode not in (0, AGAIN):
            break
    for process in processes:  # a launcher ends the others, which may wait for the one that died
        process.join(1)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def lines(output: Path) -> list[dict[str, Any]]:
    """The log without what a clock has to say."""
    text = (output / "metrics.jsonl").read_text(encoding="ascii")
    found = [json.loads(line) for line in text.splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def same_end(output: Path, quiet: Path) -> None:
    """Both runs left the same log and the same weights, bit for bit."""
    assert lines(output) == lines(quiet)
    weights, expected = (load_file(p / "model.safetensors") for p in (output, quiet))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """A short training on 13 documents: windows of 6, 6, 6, 1, 6, 6 micro-batches on one rank."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(13):
        words = (f"the {n * n + i} of {n} is {n + i}. " for n in range(7 + 2 * i))
        (folder / f"{i:02}.txt").write_text("".join(words), encoding="utf-8")
    sizes = ("--effective-batch=12", "--micro-batch=2", "--max-updates=6")
    return ("--data", str(folder), *sizes, "--noise-scale")


Quiet = Callable[..., Path]


@pytest.fixture(scope="module")
def quiet(options: Options, tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    """Where a run that nobody disturbs ends, without the options that save. Run once for each
    kind; both recipes are the same training."""

    @functools.cache
    def run(ranks: int, *more: str) -> Path:
        output = tmp_path_factory.mktemp("quiet")
        assert start("train_ddp", output, *options, *more, ranks=ranks) == [0] * ranks
        return output

    return run


SAVING = ("--checkpoint-every=1", "--resume")


@BOTH
@pytest.mark.parametrize(
    ("ranks", "forwards", "more"),
    [(1, (8, 6, 2, 7), ()), (2, (4, 2, 3, 3), ()), (1, (3, 12), ("--mixed-precision=fp16",))],
    ids=["1 rank", "2 ranks", "fp16"],
)
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(
    recipe: str,
    ranks: int,
    forwards: tuple[int, ...],
    more: Options,
    options: Options,
    quiet: Quiet,
    tmp_path: Path,
) -> None:
    """SIGKILL while it trains, or saves, or logs; then the same command: the same weights bit for
    bit, the same log."""
    moment = random.Random(f"{recipe} {ranks} {more}")
    for at in forwards:
        end = (signal.SIGKILL, at, 0.03 * moment.random())
        codes = start(recipe, tmp_path, *options, *more, *SAVING, ranks=ranks, end=end)
        assert codes[-1] == -signal.SIGKILL
        assert len(list((tmp_path / "checkpoints").glob("update-*"))) <= 3
    assert start(recipe, tmp_path, *options, *more, *SAVING, ranks=ranks) == [0] * ranks
    assert "\ngoing on after " in (tmp_path / "rank-0.txt").read_text()
    same_end(tmp_path, quiet(ranks, *more))


@BOTH
@pytest.mark.parametrize(("ranks", "at"), [(1, 9), (2, 5)])
def test_a_signal_saves_the_run_and_says_how_to_go_on(
    recipe: str, ranks: int, at: int, options: Options, quiet: Quiet, tmp_path: Path
) -> None:
    """In mid-window, to one of the ranks; all end with an exit code that is not success, and the
    progress bar begins where the run does."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        resume = ("--resume",) if number == signal.SIGTERM else SAVING
        codes = start(recipe, tmp_path, *options, *resume, ranks=ranks, end=(number, at, 0.0))
        said = (tmp_path / "rank-0.txt").read_text()
        assert codes == [AGAIN] * ranks, said
        assert "saved after " in said
        assert said.endswith("; to go on: the same command, with --resume\n")
        assert not (tmp_path / "model.safetensors").exists()
        assert (" 0/6 " in said) == (number == signal.SIGUSR1)
    assert start(recipe, tmp_path, *options, "--resume", ranks=ranks) == [0] * ranks
    same_end(tmp_path, quiet(ranks))


def test_a_window_that_was_saved_before_its_line_was_written_is_logged_on_resuming(
    options: Options, quiet: Quiet, tmp_path: Path
) -> None:
    """A run can die between the save and the log; a line that is cut off is written again too."""
    assert start("train_ddp", tmp_path, *options, *SAVING, end=(signal.SIGTERM, 12, 0.0)) == [AGAIN]
    log = tmp_path / "metrics.jsonl"
    whole = log.read_text().splitlines(keepends=True)
    assert len(whole) == 2
    for text in (whole[0], whole[0] + whole[1][:50], "".join(whole) + whole[1]):
        log.write_text(text)
        end = (signal.SIGTERM, 1, 0.0)
        assert start("train_ddp", tmp_path, *options, *SAVING, end=end) == [AGAIN]
        assert lines(tmp_path) == lines(quiet(1))[:2]


@pytest.fixture(scope="module")
def stopped(options: Options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run that a signal has ended."""
    output = tmp_path_factory.mktemp("stopped")
    assert start("train_ddp", output, *options, *SAVING, end=(signal.SIGTERM, 2, 0.0)) == [AGAIN]
    return output


@BOTH
@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        (["--effective-batch=24", "--resume"], 1, "--effective-batch is 12, and here it is 24"),
        (["--micro-batch=4", "--resume"], 1, "--micro-batch is 2, and here it is 4"),
        (["--seed=1", "--resume"], 1, "--seed is 0, and here it is 1"),
        (["--data=", "--resume"], 1, "size mismatch for embedding.weight"),
        (["--checkpoint-every=3"], 1, "is of an earlier run; go on from it by --resume"),
    ],
)
def test_another_run_than_the_one_that_was_saved_is_one_line(
    recipe: str,
    given: list[str],
    ranks: int,
    message: str,
    options: Options,
    stopped: Path,
    tmp_path: Path,
) -> None:
    """Exit code 2, with the number that differs, or what to do; the log stays as it is."""
    if given[0] == "--data=":
        text = tmp_path / "other.txt"
        text.write_text("completely different " * 20)
        given = [f"--data={text}", *given[1:]]
    before = (stopped / "metrics.jsonl").read_bytes()
    assert start(recipe, stopped, *options, *given, ranks=ranks) == [2] * ranks
    (said,) = (stopped / "rank-0.txt").read_text().splitlines()
    assert said.startswith(f"{recipe}.py: error: ")
    assert message in said
    assert (stopped / "metrics.jsonl").read_bytes() == before


def test_plain_ddp_goes_on_on_as_many_ranks_only(options: Options, stopped: Path) -> None:
    """Its batch sampler is the recipe's own, so nobody else can deal the rest of the pass."""
    assert start("train_ddp", stopped, *options, "--resume", ranks=2) == [2, 2]
    (said,) = (stopped / "rank-0.txt").read_text().splitlines()
    assert "number of ranks is 1, and here it is 2" in said


def test_accelerates_loader_goes_on_on_another_number_of_ranks(
    options: Options, quiet: Quiet, tmp_path: Path
) -> None:
    """From one rank, in the middle of a window, to two: the same windows, within rounding."""
    assert start("train", tmp_path, *options, *SAVING, end=(signal.SIGTERM, 9, 0.0)) == [AGAIN]
    assert start("train", tmp_path, *options, "--resume", ranks=2) == [0, 0]
    found, expected = lines(tmp_path), lines(quiet(1))
    for field in ("update", "index", "weight", "lr", "epoch", "skipped"):
        assert [line[field] for line in found] == [line[field] for line in expected]
    for a, b in zip(found, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_a_tracker_gets_each_window_under_its_number(
    options: Options, quiet: Quiet, tmp_path: Path
) -> None:
    """Over two processes: none twice, none left out."""
    given = (*options, *SAVING, "--track=tensorboard")
    assert start("train", tmp_path, *given, end=(signal.SIGTERM, 14, 0.0)) == [AGAIN]
    assert start("train", tmp_path, *given) == [0]
    code = (
        "import sys; from tensorboard.backend.event_processing.event_accumulator import *\n"
        "for path in sys.argv[1:]:\n"
        "    events = EventAccumulator(path); events.Reload()\n"
        "    if 'loss' in events.Tags()['scalars']:\n"
        "        print(*(f'{e.step}:{e.value:.4f}' for e in events.Scalars('loss')))\n"
    )
    files = sorted(map(str, (tmp_path / "accumplug").glob("events*")))
    read = [sys.executable, "-W", "ignore", "-c", code, *files]
    seen = subprocess.run(read, capture_output=True, text=True, timeout=120, check=True)
    wanted = [f"{i}:{line['loss']:.4f}" for i, line in enumerate(lines(quiet(1)), start=1)]
    assert seen.stdout.split() == wanted


def test_torchrun_hands_the_signal_on_and_the_same_command_goes_on(
    options: Options, quiet: Quiet, tmp_path: Path
) -> None:
    """As it is typed: SIGTERM to the launcher alone, in the middle of the run."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, str(RECIPES / "train_ddp.py"), *options, *SAVING]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    codes, log = [], tmp_path / "metrics.jsonl"
    for stops in (True, False):
        with (
            open(tmp_path / "said.txt", "w") as said,
            subprocess.Popen(
                [*command, "--output-dir", str(tmp_path)],
                env=environment,
                stdout=said,
                stderr=said,
                start_new_session=True,
            ) as process,
        ):
            try:
                while stops and process.poll() is None and not (log.exists() and lines(tmp_path)):
                    time.sleep(0.01)
                if stops:
                    process.terminate()
                codes.append(process.wait(100))
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        if stops:
            assert "\nsaved after " in (tmp_path / "said.txt").read_text()
    assert codes[0] != 0
    assert codes[1] == 0
    same_end(tmp_path, quiet(2))
