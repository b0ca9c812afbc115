"""The code of docs/mixed_precision.md runs as it stands there, and is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from documents import Document
from loops import COMMON
from textbook import data, network, same
from torch import nn
from torch.optim import SGD

PAGE = Document("docs/mixed_precision.md")


def test_mixed_precision_is_the_textbook_of_torch():
    """fp16 on the CPU with a scaler has the bits of the loop that torch's documents show."""
    reference, model = network(torch.float32), network(torch.float32)
    batches = data([3] * 8, torch.float32)
    scaler, optimizer = torch.amp.GradScaler("cpu"), SGD(reference.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches, 1):
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(reference(x), y)
        scaler.scale(loss / 4).backward()
        if number % 4 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    names = PAGE.run(
        "autocast and GradScaler",
        0,
        **COMMON,
        device=torch.device("cpu"),
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        loader=batches,
    )
    assert names["accum"].updates == 2
    assert same(model, reference)


def test_sums_in_fp32_are_the_mean_over_256_micro_batches():
    """Of a model with one weight, whose gradient is its input: a sum in bf16 is 1e-2 off."""
    inputs = (1 + torch.rand(256, 1, 1)).bfloat16()
    names = COMMON | {"loss_fn": lambda output, _: output.float().mean()}
    names |= {"model": nn.Linear(1, 1, bias=False), "loader": [(x, None) for x in inputs]}
    last = PAGE.run("Sums in fp32", 0, **names)["accum"].last
    expected = inputs.double().mean().item()
    assert last.grad_norm == pytest.approx(expected, rel=1e-5)  # fp32, 256 additions
    in_bf16 = sum(x.flatten() / 256 for x in inputs).item()
    assert in_bf16 != pytest.approx(expected, rel=1e-3)
