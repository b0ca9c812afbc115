"""A run on a device that is stopped inside of a window, and one that goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.harness import Ranks
from torch import Tensor, nn

from accumplug import Accumulator, Checkpointer

STOP = 6
"""Micro-batches before the stop: two of the second window of four."""


def run(rank: int, folder: Path, kind: str, stop: bool) -> tuple[list[Tensor], str, str]:
    """Train 12 micro-batches, or stop after 6; continue if `folder` has a checkpoint.

    Returns the weights, and where the learning rate and the scaler's scale are.
    """
    torch.manual_seed(0 if stop or not folder.exists() else 99)
    second = "cuda:1" if kind == "two devices" else "cuda:0"
    model = nn.Sequential(nn.Linear(4, 8, device="cuda:0"), nn.Dropout(0.5))
    head = nn.Linear(8, 1, device=second)
    with torch.no_grad():
        for index, p in enumerate([*model.parameters(), *head.parameters()]):
            p.copy_(torch.linspace(-1, 1 + index, p.numel()).view_as(p))
    whole = nn.ModuleList([model, head])
    rate: Any = torch.tensor(0.01, device="cuda:0") if kind == "tensor lr" else 0.01
    optimizer = torch.optim.AdamW(whole.parameters(), lr=rate, capturable=kind == "tensor lr")
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0) if kind == "scaler" else None
    accum = Accumulator(4, optimizer=optimizer, scaler=scaler)
    data = [torch.linspace(-1, 1 + i, 12).view(3, 4) for i in range(12)]
    with Checkpointer(folder, accum, model=whole, loader=data) as checkpoint:
        checkpoint.resume()
        for x in accum.batches(data):
            n = 1 + accum.micro_batches % 3
            weight = n if kind == "numbers" else torch.tensor(n, device=second)
            with accum(whole, weight=weight):
                accum.backward(head(model(x.to("cuda:0")).to(second)).square().mean())
            if stop and accum.micro_batches == STOP:
                checkpoint.save()
                break
    found = optimizer.param_groups[0]["lr"]
    place = str(found.device) if isinstance(found, Tensor) else "host"
    scale = "" if scaler is None else str(scaler.get_scale())
    return [p.detach().cpu() for p in whole.parameters()], place, scale


@pytest.mark.parametrize("kind", ["numbers", "device", "scaler", "two devices", "tensor lr"])
def test_a_run_goes_on_inside_of_a_window_bit_for_bit(
    gpus: Ranks, tmp_path: Path, kind: str
) -> None:
    """With dropout on the device; a learning rate on the device stays there."""
    [whole] = gpus.run(1, run, tmp_path / "whole", kind, False, backend=None)
    gpus.run(1, run, tmp_path / "stopped", kind, True, backend=None)
    [resumed] = gpus.run(1, run, tmp_path / "stopped", kind, False, backend=None)
    assert all(map(torch.equal, whole[0], resumed[0]))
    assert whole[1:] == resumed[1:]
