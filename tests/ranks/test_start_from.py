"""Ranks start together from what plain torch has saved, or not at all."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, Checkpointer

from .harness import Ranks


def start(rank: int, directory: Path, missing: int) -> list[Tensor] | str:
    """Two updates from a dict; the weights, or why not. Rank `missing` looks in another place."""
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    accum = Accumulator(2, optimizer=optimizer)
    source = directory / ("none" if rank == missing else "old.pt")
    with Checkpointer(directory / "new", accum, model=model, every=1) as checkpoint:
        try:
            checkpoint.resume(start_from=source)
        except (OSError, ValueError) as error:
            return str(error)
        for x in [torch.ones(1, 4), -torch.ones(1, 4)] * 2:
            with accum(model):
                accum.backward(model(x).square().mean())
    return [p.detach().clone() for p in model.parameters()]


def test_all_ranks_start_from_a_dict_of_a_wrapped_model(ranks: Ranks, tmp_path: Path) -> None:
    """And go on as plain torch does; or all of them refuse it if one can't read it."""
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(plain.parameters(), 0.1)

    def update() -> None:
        loss = sum(plain(x).square().mean() for x in (torch.ones(1, 4), -torch.ones(1, 4)))
        (loss / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    update()
    saved = {f"module.{name}": value.double() for name, value in plain.state_dict().items()}
    plain.double()
    moments = optimizer.state_dict()
    for state in moments["state"].values():
        state.update({name: state[name].double() for name in ("exp_avg", "exp_avg_sq")})
    torch.save({"model": saved, "optimizer": moments}, tmp_path / "old.pt")
    said = ranks.run(2, start, tmp_path, 1)
    assert "another rank" in said[0]
    assert "No such file" in said[1]
    optimizer = torch.optim.AdamW(plain.parameters(), 0.1)
    optimizer.load_state_dict(moments)
    with torch.no_grad():
        for name, value in plain.state_dict().items():
            value.copy_(saved[f"module.{name}"])
    torch.set_default_dtype(torch.float64)
    try:
        update()
        update()
    finally:
        torch.set_default_dtype(torch.float32)
    for found in ranks.run(2, start, tmp_path, -1):
        for weight, expected in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=1e-14)
