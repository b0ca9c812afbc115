"""What not every supported version of torch has, for the tests that need it."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel

needs_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="Tensor.grad_dtype comes with torch 2.10"
)

_options = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _options else "broadcast_buffers"
"""The option of DDP by which a forward broadcasts no buffers; the first comes with torch 2.13."""

REDUCE_SCATTER = next(
    name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)
)
"""The function by which fully_shard reduces; older versions have the second."""


@contextmanager
def averaging() -> Iterator[None]:
    """Let fully_shard average over the ranks: in torch 2.8, fp32 gradients are summed on gloo."""
    if hasattr(torch.Tensor, "grad_dtype"):
        yield
        return
    factors = _fsdp_collectives._get_gradient_divide_factors

    def divided(*args: Any) -> Any:
        return factors(*args[:-1], True)  # force_sum_reduction_for_comms, and a division

    with mock.patch.object(_fsdp_collectives, "_get_gradient_divide_factors", divided):
        yield
