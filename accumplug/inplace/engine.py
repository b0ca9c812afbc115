"""The private parts of torch that adding in place needs (read from 2.8 to 2.15).

Without one of them nothing is added in place, and the report says which one is missing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

MISSING: list[str] = []
"""What this version of torch does not have."""


def _find(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        MISSING.append(f"{owner.__name__}.{name}")
    return found


# Whether this backward reaches a node; refuses a leaf that autograd.grad captures.
will_execute = _find(torch._C, "_will_engine_execute_node")
# Calls see ordinary tensors inside of it.
DisableTorchFunctionSubclass = _find(torch._C, "DisableTorchFunctionSubclass")
# A call as if its arguments were ordinary tensors.
call_plainly = _find(torch._C, "_disabled_torch_function_impl")
_transforms_active = _find(torch._C, "_are_functorch_transforms_active")
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)


def plain_reverse_mode() -> bool:
    """Whether a backward is all that can be done with what is computed now."""
    return (
        torch.is_grad_enabled()
        and not _transforms_active()
        and getattr(forward_ad, "_current_level", 0) < 0
    )


def is_observed() -> bool:
    """Whether a dispatch mode may see the operations."""
    return _dispatch_modes is None or _dispatch_modes() > 0


def is_traced(gradient: Tensor) -> bool:
    """Whether this backward is only traced; what is done to `.grad` in it would be lost."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    inside = compiled is not None and getattr(compiled, "in_compiled_autograd_region", True)
    return bool(inside) or type(gradient) is not Tensor
