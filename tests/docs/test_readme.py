"""The loops of README.md run as they stand there, and are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from documents import Document
from loops import apart, given, rows, trained
from textbook import data, network, same, textbook_loop
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accumplug import Accumulator

README = Document("README.md")


def test_before_and_after_have_the_same_bits_in_full_windows():
    """The old loop and the new one end with equal weights."""
    before, after = given(data([4] * 48)), given(data([4] * 48))
    README.run("The loop, before and after", 0, **before)
    README.run("The loop, before and after", 1, **after)
    assert same(before["model"], after["model"])
    assert before["scheduler"].last_epoch == after["scheduler"].last_epoch == 3


def test_after_closes_the_tail_that_before_leaves_over():
    """20 micro-batches in windows of 16: the new loop makes a second update, a mean over 4."""
    batches = data([4] * 20)
    before, after = given(batches), given(batches)
    README.run("The loop, before and after", 0, **before)
    accum = README.run("The loop, before and after", 1, **after)["accum"]
    assert (before["scheduler"].last_epoch, accum.updates, accum.last.micro_batches) == (1, 2, 4)


def accelerated(samples):
    """The model that the loop with Accelerate leaves, from micro-batches of 2."""
    names = given(DataLoader(rows(samples), 2), torch.float32)
    names["scheduler"] = StepLR(names["optimizer"], 100)
    model, order = names["model"], ("model", "optimizer", "scheduler", "loader")
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*(names[key] for key in order))
    names |= dict(zip(order, prepared, strict=True))
    README.run("The loop, before and after", 2, accelerator=accelerator, **names)
    return model


def test_one_line_in_a_loop_with_accelerate_keeps_the_bits_of_full_windows():
    """32 micro-batches are two windows, as the textbook loop has them."""
    reference = network(torch.float32)
    optimizer = SGD(reference.parameters(), lr=0.1)
    textbook_loop(reference, DataLoader(rows(64), 2), 16, optimizer, max_grad_norm=1.0)
    assert same(accelerated(64), reference)


def test_one_line_in_a_loop_with_accelerate_closes_the_tail():
    """20 micro-batches: the second window is a mean over 4."""
    batches = list(DataLoader(rows(40), 2))
    assert apart(accelerated(40), trained(network(torch.float32), batches, 16, clip=1.0)) < 1e-6


def test_a_run_that_is_killed_continues_to_the_same_bits(tmp_path, monkeypatch):
    """Broken off by an exception in mid-window, the loop ends as one that never was."""
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = checkpointed(given(data([4] * 80)))
    monkeypatch.chdir(tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        checkpointed(given(data([4] * 80)), stop_after=57)
    again = checkpointed(given(data([4] * 80)))
    assert again["accum"].updates == 10
    assert same(again["model"], whole["model"])


def checkpointed(names, stop_after=None):
    """Run the loop with the Checkpointer over two passes; it may break off in a micro-batch."""
    calls = iter(range(1, 1000))

    def loss_fn(output, target):
        if next(calls) == stop_after:
            raise KeyboardInterrupt
        return F.mse_loss(output, target)

    accum = Accumulator(16, optimizer=names["optimizer"], scheduler=names["scheduler"])
    names |= {"loss_fn": loss_fn, "accum": accum, "epochs": 2}
    return README.run("The loop, before and after", 3, **names)
