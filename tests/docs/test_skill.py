"""The skill file: agents find it, validators accept it, and what it shows runs and is right."""

from __future__ import annotations

import copy
import re
import shlex
import sys

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from documents import ROOT, Document
from textbook import big_batch, data, network, relative, same
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accumplug import Accumulator
from accumplug.cli.parser import main

SKILL = Document("outputs/skill-gradient-accumulation.md")
FOUND_BY_AGENTS = ROOT / ".agents" / "skills" / "gradient-accumulation" / "SKILL.md"
SIZES = [4] * 16 + [3, 1, 4, 2]
"""A full window of equal micro-batches, then a tail of uneven ones."""


def given(batches, dtype=torch.float64):
    """What the loops take as known: a model, its data, an optimizer that hides nothing."""
    model = network(dtype)
    optimizer = SGD(model.parameters(), lr=0.1)
    return {
        "torch": torch,
        "Accumulator": Accumulator,
        "model": model,
        "loader": batches,
        "optimizer": optimizer,
        "scheduler": StepLR(optimizer, 100),
        "loss_fn": F.mse_loss,
    }


def trained(batches, dtype=torch.float64):
    """Plain torch on one large batch for each window of 16, clipped."""
    model = network(dtype)
    optimizer = SGD(model.parameters(), lr=0.1)
    for window in (batches[:16], batches[16:]):
        for parameter, grad in zip(model.parameters(), big_batch(model, window), strict=True):
            parameter.grad = grad
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def apart(one, other):
    """How far the parameters of two models are from each other, relatively."""
    return relative(list(one.parameters()), list(other.parameters()))


def test_before_is_right_in_full_windows_and_after_in_the_tail_as_well():
    """On 16 equal micro-batches both agree to the bit; after 4 more only one is a large batch."""
    before, after = given(data(SIZES[:16])), given(data(SIZES[:16]))
    SKILL.run("Before and after", 0, **before)
    SKILL.run("Before and after", 1, **after)
    assert same(before["model"], after["model"])
    before, after = given(data(SIZES)), given(data(SIZES))
    SKILL.run("Before and after", 0, **before)
    SKILL.run("Before and after", 1, **after)
    expected = trained(data(SIZES))
    assert apart(after["model"], expected) < 1e-13
    assert apart(before["model"], expected) > 1e-3


def test_the_loop_with_accelerate_is_one_large_batch_for_each_window():
    """The same windows through prepared objects, whose own loader tells where the data end."""
    names = given(DataLoader(data(SIZES, torch.float32), batch_size=None), torch.float32)
    order = ("model", "optimizer", "scheduler", "loader")
    accelerator = Accelerator(cpu=True)
    prepared = dict(zip(order, accelerator.prepare(*(names[k] for k in order)), strict=True))
    SKILL.run("Before and after", 2, accelerator=accelerator, **names | prepared)
    assert apart(names["model"], trained(data(SIZES, torch.float32), torch.float32)) < 1e-6


def test_the_loop_in_fp16_is_the_textbook_of_torch_in_full_windows():
    """autocast and a GradScaler by hand, as torch's documents show them, give the same bits."""
    batches = data([4] * 16, torch.float32)
    names, reference = given(batches, torch.float32), network(torch.float32)
    scaler, optimizer = torch.amp.GradScaler("cpu"), SGD(reference.parameters(), lr=0.1)
    for x, y in batches:
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(reference(x), y)
        scaler.scale(loss / 16).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    scaler.step(optimizer)
    found = SKILL.run("fp16 and bf16", device=torch.device("cpu"), **names)
    assert found["accum"].updates == 1
    assert same(names["model"], reference)


def test_a_run_goes_on_from_where_it_was_stopped(tmp_path, monkeypatch):
    """Broken off by an exception in mid-window, the shown loop ends as one that never was."""
    whole, stopped, again = (given(data([4] * 80)) for _ in range(3))
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    run_checkpointed(whole)
    monkeypatch.chdir(tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        run_checkpointed(stopped, stop_after=57)
    accum = run_checkpointed(again)
    assert accum.updates == 10
    assert same(again["model"], whole["model"])


def run_checkpointed(names, stop_after=None):
    names, calls = copy.copy(names), iter(range(1, 1000))

    def loss_fn(output, target):
        if next(calls) == stop_after:
            raise KeyboardInterrupt
        return F.mse_loss(output, target)

    accum = Accumulator(16, optimizer=names["optimizer"], scheduler=names["scheduler"])
    SKILL.run("Stopping inside a window", **names | {"loss_fn": loss_fn}, accum=accum, epochs=2)
    return accum


def commands():
    """The lines of all blocks of commands, and the commands within the text."""
    lines = [line for b in SKILL.blocks if b.language == "bash" for line in b.text.splitlines()]
    return lines + re.findall(r"`(accumplug \w+ \d[^`]*)`", "\n".join(SKILL.lines))


PARTS = """
import torch
from torch import nn


def parts():
    torch.manual_seed(0)
    return nn.Linear(4, 3), (torch.randn(16, 4), torch.randint(3, (16,))), nn.CrossEntropyLoss()
"""


@pytest.mark.parametrize("line", commands())
def test_the_commands_run(line, tmp_path, monkeypatch, capsys):
    """Each command says something and exits with 0, for a model that can be accumulated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (tmp_path / "train.py").write_text(PARTS)
    program, *arguments = shlex.split(line)
    assert program == "accumplug"
    try:
        assert main(arguments) == 0
    finally:
        sys.modules.pop("train", None)
    assert capsys.readouterr().out


def test_agents_find_it_under_its_own_name():
    """`.agents/skills/NAME/SKILL.md` is the file in outputs/, and NAME is what it calls itself.

    In a clone it is a link, in an archive of the sources a copy.
    """
    assert FOUND_BY_AGENTS.read_text() == SKILL.path.read_text()
    assert not FOUND_BY_AGENTS.is_symlink() or not FOUND_BY_AGENTS.readlink().is_absolute()
    assert frontmatter()["name"] == FOUND_BY_AGENTS.parent.name


def test_the_frontmatter_is_what_validators_accept():
    """Known keys, a description of at most 1024 characters, and no value with a colon in it."""
    found = frontmatter()
    known = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert {"name", "description"} <= set(found) <= known
    assert len(found["description"]) <= 1024
    assert not any(": " in value for value in found.values())


def test_it_is_short_enough_to_be_read():
    """120 to 180 lines."""
    assert 120 <= len(SKILL.lines) <= 180


def frontmatter():
    """The keys at the top level, between the two lines of dashes."""
    assert SKILL.lines[0] == "---"
    lines = SKILL.lines[1 : SKILL.lines.index("---", 1)]
    pairs = [line.split(":", 1) for line in lines if not line.startswith(" ")]
    return {key: value.strip() for key, value in pairs}
