"""What accumulation can't be made right with, said when a model or an optimizer is first seen."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from accumplug.core.options import PER_SAMPLE
from accumplug.errors import OptionTypeError
from accumplug.parallel import fsdp
from accumplug.parallel.ddp import check_names, ddp_modules, reduced_parameters
from accumplug.parallel.group import DataParallelGroup

ENGINE = (
    "a DeepSpeed engine accumulates by itself: its no_sync and its division by "
    "gradient_accumulation_steps would work against accumplug. Use DeepSpeed's own "
    "gradient_accumulation_steps, or DDP or fully_shard with accumplug"
)


def refuse_model(model: object, ranks: DataParallelGroup) -> None:
    """Raise if windows over `model` would be silently wrong."""
    refuse_engine(model)
    if not isinstance(model, nn.Module):
        raise OptionTypeError(
            f"accum(model) takes torch modules, got {type(model).__name__}; "
            f"several models are given one by one: accum(a, b)"
        )
    for name, module in model.named_modules():
        if any(c.__name__ == "GradSampleModule" for c in type(module).__mro__):
            raise ValueError(PER_SAMPLE)
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"{name or type(module).__name__} is FullyShardedDataParallel (FSDP1), whose "
                f"running sums can't be reached; shard it with torch.distributed.fsdp.fully_shard"
            )
    _refuse_unreduced(model, ranks)


def refuse_engine(model: object) -> None:
    """Raise ValueError for a DeepSpeed engine, which divides, reduces and steps by itself."""
    if any(c.__name__ == "DeepSpeedEngine" for c in type(model).__mro__):
        raise ValueError(ENGINE)


def refuse_static_graph(model: nn.Module) -> None:
    """Raise ValueError for DDP(static_graph=True) in a window of several micro-batches."""
    if any(ddp.static_graph for ddp in ddp_modules(model)):
        raise ValueError(
            "DistributedDataParallel(static_graph=True) records the graph in its first synced "
            "backward and fails on one that is not synced; build it with static_graph=False"
        )


def _refuse_unreduced(model: nn.Module, ranks: DataParallelGroup) -> None:
    for root in fsdp.roots(model):
        fsdp.check_names(root)
    ddps = ddp_modules(model)
    for ddp in ddps:
        check_names(ddp)
        own = dist.get_process_group_ranks(ddp.process_group)
        group = dist.get_process_group_ranks(ranks.group)
        if sorted(own) != sorted(group):
            raise ValueError(
                f"DistributedDataParallel reduces over {len(own)} ranks {own}, but the "
                f"Accumulator's process_group has {len(group)}, {group}; give both the same "
                f"process_group"
            )
    if ranks.size == 1:
        return
    covered = {id(p) for ddp in ddps for p in reduced_parameters(ddp)}
    ignored = {n for ddp in ddps for n in ddp.parameters_to_ignore}
    bare = [
        n
        for n, p in fsdp.named_parameters(model).items()
        if p.requires_grad
        and not isinstance(p, DTensor)
        and id(p) not in covered
        and not any(n == i or n.endswith("." + i) for i in ignored)
    ]
    if bare:
        what = "is not wrapped" if not ddps else "has parameters outside of its wrapped modules"
        raise ValueError(
            f"{type(model).__name__} {what}, and there are {ranks.size} ranks: {bare[0]}"
            f"{f' and {len(bare) - 1} more' if len(bare) > 1 else ''} would be reduced by nobody. "
            f"Wrap it in DistributedDataParallel (or accelerator.prepare it) and give accum the "
            f"wrapped model"
        )


def warn_batchnorm(model: nn.Module) -> None:
    """Warn, once for a model, about modules that see micro-batches instead of the window."""
    names = [
        n or "the model"
        for n, m in model.named_modules()
        if isinstance(m, _BatchNorm) and m.training
    ]
    if names:
        warnings.warn(
            f"BatchNorm sees micro-batches, not the window: {', '.join(names)} normalise over each "
            f"micro-batch and move their running statistics once for each, so a window can't equal "
            f"one large batch. GroupNorm or LayerNorm can; or freeze them with .eval()",
            stacklevel=4,
        )


def warn_lonely_process() -> None:
    """Warn if a launcher started several processes and none of them can see the others."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1 and not dist.is_initialized():
        warnings.warn(
            f"WORLD_SIZE is {size} but torch.distributed is not initialised: each process would "
            f"train alone. Call init_process_group first (Accelerate on the CPU: set "
            f"ACCELERATE_USE_CPU=true)",
            stacklevel=4,
        )


def refuse_fused_backward(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if an optimizer steps inside of backward, once for each micro-batch."""
    for parameter in parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if hasattr(parameter, "_in_backward_optimizers") or any(
            _reaches_optimizer(hook) for hook in hooks.values()
        ):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has an optimizer that steps inside "
                f"of backward: it would update once for each micro-batch, not for each window. "
                f"Remove the hook and step after the window, or use steps=1"
            )


def _reaches_optimizer(hook: object) -> bool:
    """Whether the function `hook` refers to an optimizer, directly or in a container."""
    owner = getattr(hook, "__self__", None)
    wrapped: Any = getattr(hook, "__func__", getattr(hook, "func", hook))  # a function or not
    function = inspect.unwrap(wrapped)
    reached: list[object] = [owner, *getattr(hook, "args", ())]
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        reached += [*variables.nonlocals.values(), *variables.globals.values()]
        reached += function.__defaults__ or ()
    reached += getattr(owner, "__dict__", {}).values()
    for value in list(reached):
        if isinstance(value, dict):
            reached += value.values()
        elif isinstance(value, (list, tuple)):
            reached += value
    return any(isinstance(value, Optimizer) for value in reached)
