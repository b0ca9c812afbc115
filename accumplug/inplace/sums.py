"""Where a weight's running sum lies, and whether it may be added to in place right now."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sum:
    """One weight and the running sum of its gradient, its `.grad`.

    `open`: whether a micro-batch is running that may add to it. `opened` counts those;
    `added` counts the gradients that went straight into the sum; `fallback` says why the
    last one that did not was left to autograd.
    """

    def __init__(self, weight: Tensor) -> None:
        self.sum = self
        self.weight = weight
        self.open = False
        self.opened = 0
        self.added = 0
        self.fallback: str | None = None
        self._stream: Any = None
        self._low: tuple[Any, Tensor] | None = None

    def refusal(self) -> str | None:
        """Why no gradient can be added in place at this moment; None if it can."""
        if type(self.weight) is not torch.nn.Parameter:
            return f"its weight is a {type(self.weight).__name__}"
        if not self.weight.requires_grad:
            return "frozen"
        return self._obstacle()

    def start(self) -> None:
        """A micro-batch begins that may add to the sum."""
        self.open = True
        self.opened += 1
        self._stream = _stream(self.weight)

    def end(self) -> None:
        """Nothing is added in place from here on, and nothing is kept."""
        self.open = False
        self._stream = self._low = None

    def target(self) -> Tensor | None:
        """The tensor to add to, found at backward time; None: leave it to autograd.

        A window's first gradient is added to zeros. On another CUDA stream than that of the
        caller the order of the additions would be autograd's business.
        """
        weight = self.weight
        if not self.open or _stream(weight) != self._stream or self._obstacle():
            return None
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=self.dtype, requires_grad=False)
        return weight.grad

    @property
    def dtype(self) -> torch.dtype:
        """That of the sum, which may be wider than that of the weight."""
        if self.weight.grad is not None:
            return self.weight.grad.dtype
        return getattr(self.weight, "grad_dtype", None) or self.weight.dtype

    def _obstacle(self) -> str | None:
        if self.weight._backward_hooks or self.weight._post_accumulate_grad_hooks:
            return "a hook on the weight has to see each gradient"
        return None if self.weight.grad is None else _misfit(self.weight.grad, self.weight)

    def in_dtype(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The weight in autocast's dtype, cast once for all uses in a forward as autocast does."""
        if weight.dtype is dtype:
            return None
        key = (weight._version, weight.data_ptr(), dtype)
        if self._low is None or self._low[0] != key:
            self._low = (key, weight.detach().to(dtype))
        return self._low[1]

    def forget_low(self) -> None:
        """A backward or an optimizer has run: the weight may be changed now in ways unseen."""
        self._low = None

    def hooked(self) -> bool:
        """Whether somebody looks at the gradient on its way; of the weight itself, see above."""
        return False


class Part:
    """The part of a sum that a view (a transpose, a slice) is of its weight.

    Args:
        of: the sum of the tensor that the view was taken of, or its part.
        source: that tensor.
        view: the view.
    """

    def __init__(self, of: Sum | Part, source: Tensor, view: Tensor) -> None:
        self.of = of
        self.sum: Sum = of.sum
        self._source = source
        offset = view.storage_offset() - self.sum.weight.storage_offset()
        self._place = (view.shape, view.stride(), offset)

    def target(self) -> Tensor | None:
        """The same as `Sum.target`, of this part; the sum has to lie in memory like the weight."""
        target = self.sum.target()
        if target is None or target.stride() != self.sum.weight.stride():
            return None
        shape, stride, offset = self._place
        return target.as_strided(shape, stride, target.storage_offset() + offset)

    def hooked(self) -> bool:
        """Whether somebody looks at the gradient on its way from the view to the weight."""
        return _looked_at(self._source) or self.of.hooked()

    def in_dtype(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The view in autocast's dtype, cast at each use as autocast does with views."""
        return None if weight.dtype is dtype else weight.detach().to(dtype)


def _looked_at(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks) or tensor.retains_grad


def _stream(weight: Tensor) -> Any:
    return torch.cuda.current_stream(weight.device) if weight.is_cuda else None


def _misfit(target: Tensor, weight: Tensor) -> str | None:
    if target.layout is not torch.strided or type(target) is not Tensor:
        return f"its gradient is a {type(target).__name__}, {target.layout}"
    if target.dtype not in (weight.dtype, torch.float32):
        return f"its gradient is {target.dtype}, the weight {weight.dtype}"
    return "its gradient is part of a graph" if target.requires_grad else None
