"""finetune_lora.py and pretrain_fsdp.py in short: they train, and a signal costs nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

RECIPES = Path(__file__).parents[2] / "recipes"
RANKS = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
FSDP = [*RANKS, str(RECIPES / "pretrain_fsdp.py"), "--effective-batch", "16", "--micro-batch", "2"]
LORA = [sys.executable, str(RECIPES / "finetune_lora.py"), "--steps", "4", "--micro-batch", "2"]


def run(command: list[str], where: Path, stop_at: str = "") -> tuple[int, str]:
    """The exit code and what was printed; SIGTERM comes when a line begins with `stop_at`."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    lines = []
    with subprocess.Popen(
        [*command, "--output-dir", str(where)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if stop_at and line.startswith(stop_at):
                process.send_signal(signal.SIGTERM)
                stop_at = ""
    return process.returncode, "".join(lines)


def last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.startswith("held-out loss")][-1]


def test_the_adapters_learn_and_a_signal_costs_nothing(tmp_path: Path) -> None:
    """SIGTERM after 10 updates, --resume: the files of a run that was never stopped."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    command = [*LORA, "--max-updates", "14"]
    code, straight = run(command, tmp_path / "straight")
    assert code == 0, straight
    assert float(last_line(straight).split()[2]) < 4.0  # 4.6 is chance
    code, stopped = run(command, tmp_path / "stopped", stop_at="{'loss'")
    assert code == 75, stopped
    assert "saved after" in stopped
    code, resumed = run([*command, "--resume"], tmp_path / "stopped")
    assert code == 0, resumed
    one, other = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("straight", "stopped")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sharded_pretraining_goes_on_after_a_signal(tmp_path: Path) -> None:
    """On two ranks: the held-out loss of a run that was never stopped."""
    command = [*FSDP, "--max-updates", "12", "--checkpoint-every", "30"]
    code, straight = run(command, tmp_path / "straight")
    assert code == 0, straight
    assert float(last_line(straight).split()[2]) < 4.0
    code, stopped = run(command, tmp_path / "stopped", stop_at="update 10")
    assert code != 0
    assert "micro-batches into update" in stopped
    code, resumed = run([*command, "--resume"], tmp_path / "stopped")
    assert code == 0, resumed
    assert "going on in update" in resumed
    assert last_line(resumed) == last_line(straight)
