"""What a save costs the loop's thread in Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accumplug
from accumplug import Accumulator, Checkpointer


def test_a_save_of_a_two_layer_model_makes_at_most_600_calls_of_the_package(
    tmp_path: Path,
) -> None:
    """One walk over the state: 1,775 calls with four of them, each with markers of its own."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    accum = Accumulator(4, optimizer=torch.optim.AdamW(model.parameters()))
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), 4, shuffle=True)
    root, calls = str(Path(accumplug.__file__).parent), []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls[-1] += 1

    options = {"model": model, "loader": loader, "background": False}
    with Checkpointer(tmp_path, accum, **options) as checkpoint:
        for (x,) in accum.batches(loader):
            with accum(model):
                accum.backward(model(x).square().mean())
            calls.append(0)
            sys.setprofile(count)
            checkpoint.save()
            sys.setprofile(None)
            if accum.micro_batches == 8:
                break
    assert len(calls) == 8
    assert max(calls) <= 600  # the first also looks for the generators of the loader
