"""The training recipes as a newcomer runs them: whole processes, one rank and several."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

RECIPES = Path(__file__).parents[2] / "recipes"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
BOTH = pytest.mark.parametrize("recipe", ["train.py", "train_ddp.py"])


@dataclass
class Run:
    """What a recipe has left behind."""

    code: int
    out: str
    err: str
    output_dir: Path

    @property
    def lines(self) -> list[dict[str, float]]:
        """Its metrics.jsonl."""
        text = (self.output_dir / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The trained model."""
        return load_file(self.output_dir / "model.safetensors")

    @property
    def held_out_loss(self) -> float:
        """The number in the last line."""
        found = re.fullmatch(
            r"held-out loss (\d\.\d{4}) nats per character", self.out.split("\n")[-2]
        )
        assert found, self.out + self.err
        return float(found[1])


Alone = Callable[[str], Run]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """Start `command` in a session of its own, without what another launcher has set."""
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return subprocess.Popen(
        command,
        env={**ours, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], output_dir: Path) -> Run:
    """Wait for it; leave none of its processes behind, whatever happens."""
    with process:
        try:
            out, err = process.communicate(timeout=200)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return Run(process.returncode, out, err, output_dir)


def train(recipe: str, output_dir: Path, *options: str, ranks: int = 1, code: int = 0) -> Run:
    """Run a recipe on so many ranks; it has to exit with `code`."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(RECIPES / recipe), "--output-dir", str(output_dir), *options]
    run = finish(start(command), output_dir)
    assert run.code == code, run.err
    assert code or f"{ranks} rank(s) on" in run.out
    return run


def options(texts: str) -> list[str]:
    """A short training, the same effective batch on 1, 2 and 3 ranks."""
    return ["--data", texts, "--effective-batch=12", "--micro-batch=2", "--max-updates=6"]


def same_bits(a: Run, b: Run) -> bool:
    """Whether two runs ended with the same weights."""
    assert a.weights.keys() == b.weights.keys()
    return all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def same_training(one: Run, other: Run) -> None:
    """The same windows; losses and norms differ by the rounding of fp32 alone, of which Adam's
    first updates, where the gradient is near its eps, make more."""
    for field in ("update", "weight", "lr", "epoch"):
        assert [line[field] for line in one.lines] == [line[field] for line in other.lines]
    for a, b in zip(one.lines, other.lines, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    assert other.held_out_loss == pytest.approx(one.held_out_loss, abs=2e-4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with 13 documents of uneven length: 37 sequences to train on in an epoch, which
    are 19 micro-batches of 2: windows of 6, 6, 6, 1. Of several ranks one has data for the last.
    """
    folder = tmp_path_factory.mktemp("texts")
    for i in range(13):
        words = (f"the {n * n + i} of {n} is {n + i}. " for n in range(7 + 2 * i))
        (folder / f"{i:02}.txt").write_text("".join(words), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def alone(texts: str, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The short training on one rank, run once for each recipe."""
    return functools.cache(
        lambda recipe: train(recipe, tmp_path_factory.mktemp("a"), *options(texts))
    )


def test_the_bare_command_leaves_a_log_a_picture_and_a_held_out_loss(tmp_path: Path) -> None:
    """`accelerate launch recipes/train.py`, cut to 3 updates, on the help texts of Python."""
    command = [*LAUNCH, str(RECIPES / "train.py")]
    run = finish(start([*command, "--max-updates", "3", "--output-dir", str(tmp_path)]), tmp_path)
    assert run.code == 0, run.err
    assert [line["update"] for line in run.lines] == [1, 2, 3]
    assert all(line["stepped"] and line["micro_batches"] == 4 for line in run.lines)
    wanted = {"loss", "lr", "grad_norm", "weight", "seconds", "scale", "skipped", "epoch"}
    assert wanted <= run.lines[0].keys()
    assert 1.0 < run.held_out_loss < run.lines[0]["loss"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "window/s" in run.err or "s/window" in run.err


@BOTH
def test_weights_of_the_log_are_characters(recipe: str, alone: Alone, texts: str) -> None:
    """Over an epoch they add up to the characters of all documents that are trained on, the
    first and the eleventh being held out; the tail's window has what was left."""
    lines = alone(recipe).lines
    documents = [file.read_text("utf-8") for file in sorted(Path(texts).iterdir())]
    characters = sum(len(d) for i, d in enumerate(documents) if i not in (0, 10))
    assert [line["micro_batches"] for line in lines] == [6, 6, 6, 1, 6, 6]
    assert [line["epoch"] for line in lines] == [0, 0, 0, 0, 1, 1]
    assert sum(line["weight"] for line in lines[:4]) == characters


@BOTH
def test_the_same_command_gives_the_same_weights(
    recipe: str, alone: Alone, tmp_path: Path, texts: str
) -> None:
    """Bit for bit."""
    first, again = alone(recipe), train(recipe, tmp_path, *options(texts))
    assert [line["loss"] for line in first.lines] == [line["loss"] for line in again.lines]
    assert same_bits(first, again)


def test_another_seed_gives_other_weights(alone: Alone, tmp_path: Path, texts: str) -> None:
    """Else the test above would hold nothing."""
    other = train("train_ddp.py", tmp_path, *options(texts), "--seed", "1")
    assert not same_bits(alone("train_ddp.py"), other)


def test_both_recipes_are_the_same_training(alone: Alone) -> None:
    """With and without Accelerate: the same order, the same bits."""
    assert same_bits(alone("train.py"), alone("train_ddp.py"))


@pytest.mark.parametrize(
    ("recipe", "ranks"), [("train.py", 2), ("train_ddp.py", 2), ("train_ddp.py", 3)]
)
def test_ranks_train_what_one_rank_trains(
    recipe: str, ranks: int, alone: Alone, tmp_path: Path, texts: str
) -> None:
    """The same windows, tails included, though ranks end unevenly."""
    same_training(alone(recipe), train(recipe, tmp_path, *options(texts), ranks=ranks))


def launch_machines(port: int, *options: str, output_dir: Path) -> list[Run]:
    """`accelerate launch` as it is typed on two machines, on loopback."""
    command = [*LAUNCH, "--cpu", "--num_machines=2"]
    command += ["--num_processes=2", "--main_process_ip=127.0.0.1", f"--main_process_port={port}"]
    script = [str(RECIPES / "train.py"), *options, "--output-dir", str(output_dir)]
    processes = [start([*command, f"--machine_rank={rank}", *script]) for rank in (0, 1)]
    return [finish(process, output_dir) for process in processes]


def test_two_machines_are_two_ranks(alone: Alone, tmp_path: Path, texts: str) -> None:
    """`--num_machines 2 --machine_rank R`, which leaves a CPU process without its rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = launch_machines(port, *options(texts), output_dir=tmp_path)
    assert first.code == second.code == 0, first.err + second.err
    assert first.out.startswith("2 rank(s) on cpu")
    assert second.out.startswith("2 rank(s) on cpu")
    same_training(alone("train.py"), first)


def test_processes_that_accelerate_does_not_start_are_missed(tmp_path: Path) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process and says nothing."""
    command = [*LAUNCH, "--cpu", "--num_processes=2", str(RECIPES / "train.py")]
    run = finish(start([*command, "--max-updates=1", "--output-dir", str(tmp_path)]), tmp_path)
    assert run.code != 0
    assert "train.py: error: accelerate launch starts one process a machine" in run.err
    assert "--num_processes 2" in run.err


@pytest.mark.parametrize(
    ("command", "numbers"),
    [
        ("python /bin/accelerate launch --num_machines 2 --machine_rank 1 train.py", (2, 2, 1)),
        ("python /bin/accelerate-launch --num-machines=3 --cpu train.py -x", (3, 3, None)),
        ("python -m accelerate.commands.launch --num_processes 4 train.py", (1, 4, None)),
        ("python /bin/accelerate launch --config_file CONFIG train.py", (2, 2, 1)),
        ("python /bin/accelerate launch --config_file CONFIG --machine_rank 0 a.py", (2, 2, 0)),
        ("bash launch.sh", (1, 1, None)),
    ],
)
def test_the_launchers_numbers_are_read(
    command: str, numbers: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its command line, in each of its spellings, and from the file that it names."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_CPU, mixed_precision: 'no', "
        "use_cpu: true, debug: false, num_processes: 2, num_machines: 2, machine_rank: 1}"
    )
    monkeypatch.syspath_prepend(str(RECIPES))
    machines = importlib.import_module("machines")
    monkeypatch.setattr(machines, "default_config_file", str(tmp_path / "none"))
    words = [str(config) if word == "CONFIG" else word for word in command.split()]
    assert machines.launcher_numbers(words) == numbers


@BOTH
def test_fp16_on_the_cpu_is_fp16(recipe: str, alone: Alone, tmp_path: Path, texts: str) -> None:
    """A scaler is at work, and the loss differs from that of fp32 by fp16's rounding: more than
    nothing, less than a thousandth."""
    half = train(recipe, tmp_path, *options(texts), "--mixed-precision", "fp16")
    assert "precision fp16" in half.out
    assert half.lines[-1]["scale"] >= 1024
    full = alone(recipe).lines[0]
    assert full["scale"] == 1.0
    assert half.lines[0]["loss"] != full["loss"]
    assert half.lines[0]["loss"] == pytest.approx(full["loss"], rel=1e-3)


def test_the_launchers_precision_is_kept(tmp_path: Path, texts: str) -> None:
    """`accelerate launch --mixed_precision bf16` says it for the recipe."""
    command = [*LAUNCH, "--mixed_precision=bf16"]
    command += [str(RECIPES / "train.py"), "--data", texts, "--max-updates=1"]
    run = finish(start([*command, "--output-dir", str(tmp_path)]), tmp_path)
    assert run.code == 0, run.err
    assert "precision bf16" in run.out


@BOTH
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--effective-batch", "30"], "30 is not a multiple of micro-batch 8; nearest effective"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_2(
    recipe: str, given: list[str], message: str, tmp_path: Path
) -> None:
    """No traceback, no usage, nothing written."""
    run = train(recipe, tmp_path / "none", *given, code=2)
    assert run.err.count("\n") == 1
    assert run.err.startswith(f"{recipe}: error: ")
    assert message in run.err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--micro-batch", "0"], "argument --micro-batch: '0' is not a whole number"),
        (["--mixed-precision", "fp8"], "invalid choice: 'fp8'"),
        (["--max-update", "3"], "unrecognized arguments: --max-update 3"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same form for what the command line itself can't take."""
    monkeypatch.syspath_prepend(str(RECIPES))
    options = importlib.import_module("options")
    with pytest.raises(SystemExit) as stopped:
        options.training_options("What it does.", "runs/x").parse_args(given)
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.count("\n") == 1
    assert message in said


def test_a_tracker_that_is_not_installed_is_said(tmp_path: Path) -> None:
    """Accelerate would leave it out in silence."""
    absent = [name for name in ("wandb", "trackio") if find_spec(name) is None]
    if not absent:
        pytest.skip("both trackers are installed")
    run = train("train.py", tmp_path, "--track", absent[0], code=2)
    assert run.err == (
        f"train.py: error: --track {absent[0]} needs a package: pip install {absent[0]}\n"
    )


def test_tensorboard_gets_the_lines_of_the_log(tmp_path: Path, texts: str) -> None:
    """The loss of each window, under the number of windows."""
    run = train("train.py", tmp_path, *options(texts), "--track", "tensorboard")
    read = (
        "import sys; from tensorboard.backend.event_processing.event_accumulator import *; "
        "events = EventAccumulator(sys.argv[1]); events.Reload(); "
        "print(*(f'{e.step}:{e.value:.4f}' for e in events.Scalars('loss')))"
    )
    command = [sys.executable, "-W", "ignore", "-c", read, str(tmp_path / "accumplug")]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    wanted = [f"{i}:{line['loss']:.4f}" for i, line in enumerate(run.lines, start=1)]
    assert seen.stdout.split() == wanted


def test_a_run_without_scaler_that_diverges_stops(tmp_path: Path, texts: str) -> None:
    """It would skip windows for ever; the error names the gradient."""
    code = "import train_ddp; train_ddp.LEARNING_RATE = 1e30; train_ddp.main()"
    options = ["--data", texts, "--output-dir", str(tmp_path)]
    process = start([sys.executable, "-c", code, *options], PYTHONPATH=str(RECIPES))
    run = finish(process, tmp_path)
    assert run.code == 1
    assert "NonFiniteError: the gradient of the window is not finite" in run.err


@BOTH
def test_the_noise_scale_is_logged_if_asked_for(recipe: str, tmp_path: Path, texts: str) -> None:
    """And changes nothing of the training: two norms are taken, nothing else."""
    common = ("--data", texts, "--max-updates", "4", "--effective-batch", "16")
    plain = train(recipe, tmp_path / "plain", *common)
    asked = train(recipe, tmp_path / "asked", *common, "--noise-scale")
    assert all("noise_scale" in line for line in asked.lines)
    assert not any("noise_scale" in line for line in plain.lines)
    assert all(torch.equal(w, asked.weights[name]) for name, w in plain.weights.items())
