"""Notices where a watched weight is multiplied or looked up; every other call is left alone.

A weight is watched by giving it a subclass of Parameter that has `__torch_function__`, and
unwatched by giving its class back: no module, no forward and no other tensor is touched.
Code that asks for a parameter's exact class sees the difference while a micro-batch runs.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from accumplug.inplace.engine import DisableTorchFunctionSubclass, call_plainly, plain_reverse_mode
from accumplug.inplace.products import Lookup, Product
from accumplug.inplace.sums import Part, Sum


def watch(total: Sum) -> None:
    """From here on, the products of this weight add to its sum in place."""
    weight: Any = total.weight
    weight.__class__ = _WatchedParameter
    weight._accumplug_sum = total


def unwatch(total: Sum) -> None:
    """The weight is again what it was."""
    if type(total.weight) is _WatchedParameter:
        weight: Any = total.weight
        weight.__class__ = Parameter
        del weight._accumplug_sum


class _Watched(Tensor):
    """A tensor whose calls are looked at first."""

    _accumplug_sum: Sum | Part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # in words that Dynamo can trace
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        others = tuple(t for t in types if t is not Tensor and not issubclass(t, _Watched))
        if others:  # another subclass decides, as it would beside an ordinary weight
            return others[0].__torch_function__(func, others, args, kwargs)
        call = _CALLS.get(func)
        if call is not None and plain_reverse_mode():
            result = call(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return call_plainly(func, types, args, kwargs)


class _WatchedParameter(_Watched, Parameter):
    """A weight, for the time of a micro-batch; copies of it are ordinary parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy: Any = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copy.__class__ = Parameter
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({k: v for k, v in vars(self).items() if k != "_accumplug_sum"})
        return plain.__reduce_ex__(protocol)


class _WatchedView(_Watched):
    """A transpose or a slice of a weight."""


def _sum_of(weight: Any) -> Sum | Part | None:
    watched = isinstance(weight, _Watched) and weight.dim() == 2
    return weight._accumplug_sum if watched else None


def _dense(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not _dense(input) or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented  # of the shapes of a bias that would do, one is usual
    if input.dim() <= 2:
        return _product(True, input, weight, bias)
    fused = bias if input.is_contiguous() else None  # torch rounds in between otherwise
    y = _product(True, input.reshape(-1, input.shape[-1]), weight, fused)
    if y is NotImplemented:
        return y
    if bias is not fused and bias is not None:
        y.add_(bias.to(y.dtype))
    return y.view(*input.shape[:-1], weight.shape[0])


def _addmm(func: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 3 or not _dense(args[1]):
        return NotImplemented
    bias, x, weight = args
    if bias.shape != weight.shape[1:]:
        return NotImplemented
    return _product(False, x, weight, bias)


def _matmul(func: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 2 or not _dense(args[0]):
        return NotImplemented
    x, weight = args
    if x.dim() <= 2:
        return _product(False, x, weight, None)
    y = _product(False, x.reshape(-1, x.shape[-1]), weight, None)
    return y if y is NotImplemented else y.view(*x.shape[:-1], weight.shape[1])


def _product(transposed: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    total = _sum_of(weight)
    if total is None or x.dim() != 2 or isinstance(x, _Watched):
        return NotImplemented
    low = None
    if torch.is_autocast_enabled(x.device.type):
        if not {x.dtype, weight.dtype} <= _CAST:
            return NotImplemented
        dtype = torch.get_autocast_dtype(x.device.type)
        x, low = x.to(dtype), total.in_dtype(weight, dtype)
        bias = None if bias is None else bias.to(dtype)
    return Product.apply(total, transposed, weight, x, bias, low)  # type: ignore[no-untyped-call]


def _embedding(
    func: Any,
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    total = _sum_of(weight)
    if total is None:
        return NotImplemented
    if max_norm is not None or scale_grad_by_freq or sparse:
        total.sum.fallback = "an embedding with max_norm, scale_grad_by_freq or sparse"
        return NotImplemented
    if total.sum.dtype.itemsize < 4:
        total.sum.fallback = f"an embedding whose sum in {total.sum.dtype} would round at each row"
        return NotImplemented
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        return NotImplemented  # F.embedding has the words for it
    padding_idx = -1 if padding_idx is None else padding_idx % rows
    return Lookup.apply(total, weight, ids, padding_idx)  # type: ignore[no-untyped-call]


def _attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own function, past the question that led here.

    It would hand itself over again; a copy of it that is told of no subclass runs the body,
    and the projections inside are noticed like any other.
    """
    if "has_torch_function" not in func.__code__.co_names:
        return NotImplemented  # another torch than 2.8 to 2.15, which asks in another way
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    return body(*args, **kwargs)


def _view(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same view, watched too."""
    if not args or not isinstance(args[0], _Watched):
        return NotImplemented
    with DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            return _watched(result, args[0])
        return tuple(_watched(view, args[0]) for view in result)


def _watched(view: Tensor, source: _Watched) -> Tensor:
    if not view._is_view():  # indexed by a tensor: a copy
        return view
    watched = view.as_subclass(_WatchedView)
    watched._accumplug_sum = Part(source._accumplug_sum, source, view)
    return watched


_CAST = {torch.float32, torch.bfloat16, torch.float16}  # what autocast casts
_TENSOR: Any = Tensor
_VIEWS = (
    *(_TENSOR.t, _TENSOR.T.__get__, _TENSOR.mT.__get__, _TENSOR.transpose),
    *(_TENSOR.chunk, _TENSOR.split, _TENSOR.__getitem__),
    *(torch.t, torch.transpose, torch.chunk, torch.split),
)
_CALLS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.mm, torch.matmul, Tensor.mm, Tensor.matmul), _matmul),
    **dict.fromkeys(_VIEWS, _view),
}
