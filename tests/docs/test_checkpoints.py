"""The code of docs/checkpoints.md runs as it stands there, and is right."""

from __future__ import annotations

import signal

import torch
import torch.nn.functional as F
from documents import Document
from loops import given
from textbook import data, same
from torch import nn
from torch.utils.data import DataLoader

PAGE = Document("docs/checkpoints.md")


def test_a_run_that_is_stopped_and_started_again_ends_as_one_that_never_was(tmp_path, monkeypatch):
    """The shown loop, told to stop in mid-window and run again, has the bits of a whole run."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole, _ = checkpointed()
    monkeypatch.chdir(tmp_path / "stopped")
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        stopped, found = checkpointed(stop_after=53)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found["checkpoint"].interrupted
    assert found["accum"].pending == 53 - 40
    assert not same(stopped, whole)
    again, found = checkpointed()
    assert found["position"].pending == 53 - 40
    assert same(again, whole)


def checkpointed(stop_after=None):
    """Run the shown loop over two passes of 40; a signal arrives in one of the micro-batches."""
    torch.manual_seed(5)
    names = given(
        DataLoader([(x[0], y[0]) for x, y in data([1] * 40)], 1, shuffle=True), momentum=0.9
    )
    names["model"].append(nn.Dropout(0.2))
    calls = iter(range(1, 1000))

    def loss_fn(output, target):
        if next(calls) == stop_after:
            signal.raise_signal(signal.SIGTERM)
        return F.mse_loss(output, target)

    names = names | {"loss_fn": loss_fn, "epochs": 2}
    return names["model"], PAGE.run("Checkpoints inside a window", 0, **names)
