"""What accumplug reads of DDP and fully_shard without a public name, if a torch has moved it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, MovedError
from accumplug.checkpoint import coordination
from accumplug.checkpoint.coordination import RankStore
from accumplug.parallel import ddp, fsdp
from accumplug.parallel.group import DataParallelGroup, timeout_of
from ranks.harness import Ranks


@contextmanager
def without(owner: object, name: str) -> Iterator[None]:
    """`owner` and its class have no `name` for a while."""
    if name in vars(owner) if hasattr(owner, "__dict__") else False:
        place = vars(owner)
        value = place.pop(name)
        yield
        place[name] = value
        return
    cls = next(c for c in type(owner).__mro__ if name in vars(c))
    value = vars(cls)[name]
    delattr(cls, name)
    yield
    setattr(cls, name, value)


def said_without(model: nn.Module, owner: object, name: str) -> tuple[str, bool]:
    """What the first block over `model` says, and whether anything was added before."""
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with without(owner, name), pytest.raises(MovedError) as raised, accum(model):
        accum.backward(model(torch.ones(2, 3)).mean())
    return str(raised.value), any(p.grad is not None for p in model.parameters())


def of_ddp(rank: int) -> list[tuple[str, str, bool]]:
    model = DistributedDataParallel(nn.Linear(3, 2))
    owners = [(model, name) for name in ddp.PRIVATE]
    owners += [(model.reducer, name) for name in ddp.REDUCER]
    return [(name, *said_without(model, owner, name)) for owner, name in owners]


def of_fully_shard(rank: int) -> list[tuple[str, str, bool]]:
    model = nn.Linear(3, 2)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    state = model._get_fsdp_state()
    group = next(iter(fsdp._groups(model)))
    listed = hasattr(state, "_fsdp_param_groups")
    owners: list[tuple[object, str]] = [
        (model, "_get_fsdp_state"),
        (state, "_lazy_init"),
        (state, "_fsdp_param_groups" if listed else "_fsdp_param_group"),
        (group, "fsdp_params"),
        (group, "post_backward"),
        (group.fsdp_params[0], "sharded_param"),
        (group.fsdp_params[0], "mp_policy"),
    ]
    if not hasattr(model, "finalize_backward"):
        owners += [(group, "finalize_backward"), (group, "_training_state")]
    return [(name, *said_without(model, owner, name)) for owner, name in owners]


@pytest.mark.parametrize("wrapper", [of_ddp, of_fully_shard], ids=["DDP", "fully_shard"])
def test_a_private_name_that_is_gone_is_named_before_anything_is_added(
    ranks: Ranks, wrapper: object
) -> None:
    """One after the other, by the name of torch that is missing."""
    for found in ranks.run(1, wrapper):
        assert len(found) >= 7
        for name, said, added in found:
            assert "moved " in said
            assert f".{name}" in said  # of two names of torch 2.8 to 2.13, either
            assert not added


def of_the_store(rank: int) -> list[str]:
    """What is said without the store of the process group, or its timeout, which a group that
    reduces on devices only gives to the one beside it."""
    said = []

    def says(call: Callable[..., object], *args: object) -> None:
        with pytest.raises(MovedError) as raised:
            call(*args)
        said.append(str(raised.value))

    group = DataParallelGroup(None)
    with without(dist.distributed_c10d, "_get_default_store"):
        says(group.compare, {"steps": 2}, False)
        says(RankStore, group)
    with without(dist.group.WORLD, "_get_backend"):
        says(coordination._timeout_of, None)
        says(timeout_of, dist.group.WORLD, torch.device("cpu"))
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    with without(options, "_timeout"):
        says(timeout_of, dist.group.WORLD, torch.device("cpu"))
    return said


def test_a_process_group_that_has_lost_its_store_is_named(ranks: Ranks) -> None:
    """Where ranks compare options, and where they agree on a checkpoint."""
    for found in ranks.run(2, of_the_store):
        names = ("_get_default_store",) * 2 + ("_get_backend",) * 2 + ("_timeout",)
        assert all(f".{name}, " in said for name, said in zip(names, found, strict=True))
        assert all(said.startswith("torch ") and " moved " in said for said in found)


LOST = """
import importlib, pkgutil, torch
import torch.distributed as dist, torch.distributed.fsdp, torch.distributed.tensor as tensor
import accelerate
del tensor._utils.compute_local_shape_and_global_offset
del dist.distributed_c10d._get_default_store, torch.autograd.graph._engine_run_backward
for name in ("_will_engine_execute_node", "DisableTorchFunctionSubclass",
             "_disabled_torch_function_impl", "_are_functorch_transforms_active",
             "_len_torch_dispatch_stack"):
    delattr(torch._C, name)
import accumplug
for module in pkgutil.walk_packages(accumplug.__path__, "accumplug."):
    if not module.name.endswith(("__main__", ".transformers", ".lightning")):  # they need them too
        importlib.import_module(module.name)
"""


def test_without_its_private_names_it_can_be_imported() -> None:
    """What is gone is missed where it is used, and by nobody who does not use it."""
    subprocess.run([sys.executable, "-c", LOST], check=True)
