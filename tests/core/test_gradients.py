"""A gradient of another dtype than the parameter's, where torch has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accumplug import Accumulator
from accumplug.core.gradients import assign


class Older(nn.Parameter):
    """As in torch 2.9 and before."""

    @property
    def grad_dtype(self) -> torch.dtype:
        """There is none."""
        raise AttributeError("grad_dtype")


class Weight(nn.Module):
    """One weight of an older torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = Older(torch.ones(1, dtype=dtype))


def test_without_grad_dtype_a_wider_sum_is_refused_by_name() -> None:
    """In the first block, with the version that has it."""
    model = Weight(torch.bfloat16)
    accum = Accumulator(2, accumulate_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"accumulate_dtype needs Tensor.grad_dtype.* 2\.10"):
        micro_batch(accum, model)


def test_without_grad_dtype_a_sum_of_the_same_dtype_is_a_sum() -> None:
    """accumulate_dtype asks for nothing there, and a restored gradient can be assigned."""
    model = Weight(torch.float32)
    micro_batch(Accumulator(2, accumulate_dtype=torch.float32), model)
    assert model.w.grad == 1.0
    assign(model.w, torch.full((1,), 2.0))
    assert model.w.grad == 2.0


def micro_batch(accum: Accumulator, model: Weight) -> None:
    """One, whose gradient is 1."""
    with accum(model):
        accum.backward(model.w.sum() * 2)
