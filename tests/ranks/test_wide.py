"""accumulate_dtype over ranks: reduced in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from versions import needs_grad_dtype

from accumplug import Accumulator

from .harness import Ranks

pytestmark = needs_grad_dtype


def sums(rank: int, find_unused: bool, view: bool) -> list[float | None]:
    """Norms over two windows of a bf16 model; only rank 0 has the large term."""
    model = nn.ModuleDict(
        {name: nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) for name in ("used", "other")}
    )
    if not find_unused:
        del model["other"]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["used"](x)

    ddp = DistributedDataParallel(
        Net(), find_unused_parameters=find_unused, gradient_as_bucket_view=view
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    accum = Accumulator(128, optimizer=optimizer, accumulate_dtype=torch.float32)
    norms: list[float | None] = []

    @accum.on_update
    def note() -> None:
        assert accum.last is not None
        norms.append(accum.last.grad_norm)

    for index in range(256):
        large = rank == 0 and index % 128 == 0
        x = torch.tensor([[1.0 if large else 2.0**-9]], dtype=torch.bfloat16)
        with accum(ddp):
            accum.backward(ddp(x).sum())
    assert accum.syncs == 2
    return norms


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_are_added_up_in_fp32(
    ranks: Ranks, world: int, find_unused: bool, view: bool
) -> None:
    """1 + (128 W - 1) / 512 over 128 W micro-batches, exactly for powers of two."""
    expected = (1 + (128 * world - 1) / 512) / (128 * world)
    for norms in ranks.run(world, sums, find_unused, view):
        tolerance = 0 if world < 3 else 1e-7  # a third is not a number of fp32
        assert norms == pytest.approx([expected] * 2, rel=tolerance, abs=0)
