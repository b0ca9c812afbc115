"""The examples in the docstrings of public names run, and the reference has each name."""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import asdict

import pytest
import torch
from documents import Document
from loops import given
from textbook import data
from torch import nn
from torch.utils.data import DataLoader

import accumplug
from accumplug import Accumulator, NoiseScale


def example(name):
    """The example in the docstring of a public name, as one piece of code; None without one."""
    found = doctest.DocTestParser().get_examples(getattr(accumplug, name).__doc__ or "")
    return "".join(one.source for one in found) or None


EXAMPLES = [name for name in accumplug.__all__ if example(name)]


def test_the_reference_has_every_public_name():
    """And no other."""
    text = "\n".join(Document("docs/reference.md").lines)
    names = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(accumplug.__all__)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_in_a_docstring_runs(name, tmp_path, monkeypatch):
    """With a model, data and an optimizer of two windows, as the documents' loops have them."""
    monkeypatch.chdir(tmp_path)
    names = given(DataLoader([(x[0], y[0]) for x, y in data([1] * 16)], 2))
    accum = Accumulator(steps=4, optimizer=names["optimizer"])
    accum.noise_scale = NoiseScale()
    for x, y in accum.batches(names["loader"]):
        with accum(names["model"]):
            accum.backward(names["loss_fn"](names["model"](x), y))
    names |= {key: getattr(accumplug, key) for key in accumplug.__all__}
    names |= {"accum": accum, "noise": NoiseScale(), "epochs": 1, "train": lambda model: None}
    names |= {"json": json, "asdict": asdict}
    names |= {"inputs": torch.randn(16, 4).double(), "targets": torch.randint(2, (16,))}
    names |= {"nn": nn}
    exec(compile(example(name), f"the docstring of {name}", "exec"), names)
