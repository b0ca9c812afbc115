"""The commands of docs/command_line.md run as they stand there."""

from __future__ import annotations

import shlex
import sys

import pytest
import torch
import torch.nn.functional as F
from documents import Document
from loops import given
from textbook import data
from torch import nn

from accumplug import Accumulator, Checkpointer
from accumplug.cli.parser import main

PAGE = Document("docs/command_line.md")


def test_parts_gives_a_model_a_batch_and_a_loss():
    """The function that the commands name can be called."""
    model, (inputs, targets), loss = PAGE.run("Command line", 0, torch=torch, nn=nn)["parts"]()
    assert loss(model(inputs), targets).ndim == 0


@pytest.mark.parametrize("line", PAGE.commands())
def test_the_commands_run(line, tmp_path, monkeypatch, capsys):
    """Each command says something and exits with 0, with what it names in place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    target = PAGE.find("Command line").text
    (tmp_path / "train.py").write_text(f"import torch\nfrom torch import nn\n\n\n{target}\n")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    log = '{"update": 1, "loss": 2.0, "lr": 0.1}\n{"update": 2, "loss": 1.0, "lr": 0.1}\n'
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text(log)
    if line.startswith(("accumplug inspect", "accumplug export")):
        save(tmp_path / "runs" / "a")
    program, *arguments = shlex.split(line)
    assert program == "accumplug"
    monkeypatch.delitem(sys.modules, "train", raising=False)
    try:
        assert main(arguments) == 0
    finally:
        sys.modules.pop("train", None)
    assert capsys.readouterr().out


def save(directory):
    """A checkpoint in mid-window, as a run leaves them."""
    names = given(data([4] * 8))
    accum = Accumulator(steps=16, optimizer=names["optimizer"])
    with Checkpointer(directory, accum, model=names["model"], every=5):
        for x, y in accum.batches(names["loader"]):
            with accum(names["model"]):
                accum.backward(F.mse_loss(names["model"](x), y))
