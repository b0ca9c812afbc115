"""What not every supported version of torch has, for the tests that need it."""

import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

needs_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="Tensor.grad_dtype comes with torch 2.10"
)

_options = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _options else "broadcast_buffers"
"""The option of DDP by which a forward broadcasts no buffers; the first comes with torch 2.13."""
