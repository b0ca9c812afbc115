"""Marks for tests that need what not every supported version of torch has."""

import pytest
import torch

needs_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="Tensor.grad_dtype comes with torch 2.10"
)
