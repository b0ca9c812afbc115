"""What DistributedDataParallel can be told, and what it can be wrapped in or around."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from versions import SYNC_BUFFERS

from accumplug import Accumulator

from .harness import Ranks
from .reference import (
    Gradients,
    Reductions,
    big_batches,
    equal,
    error,
    errors,
    forked,
    grads,
    items,
    loss,
    net,
    parameters,
    sgd,
    windows_of,
)

SIZES = [[3, 8, 1, 5, 2], [7, 2, 2, 6, 1], [4, 4, 10, 2, 5]]
Trained = tuple[list[Gradients], list[Tensor], int]


def train(rank: int, model: nn.Module, ddp: nn.Module, run: Any = None, **options: Any) -> Trained:
    """Windows of two over a pass: gradients, parameters of `model` and syncs."""
    accum = Accumulator(2, optimizer=sgd(model.parameters()), **options)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(model)))
    for item in accum.batches(items(rank, SIZES[rank])):
        with accum(ddp, weight=len(item[0])):
            accum.backward(loss(run or ddp, item))
    return seen, parameters(model), accum.syncs


def check(results: Any, tolerance: float = 1e-13) -> None:
    """All is as in one process, with one reduction for each of three windows."""
    world = len(results)
    data = [items(rank, SIZES[rank]) for rank in range(world)]
    expected, weights = big_batches(windows_of(data, 2))
    for seen, after, syncs in results:
        assert errors(seen, expected) <= tolerance
        assert error(after, weights) <= tolerance
        assert syncs == 3
    assert equal([after for _, after, _ in results])


def with_options(rank: int, wrap_with: dict[str, Any]) -> Trained:
    """Plain DDP with options."""
    model = net()
    return train(rank, model, DistributedDataParallel(model, **wrap_with))


@pytest.mark.parametrize(
    "wrap_with",
    [
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {SYNC_BUFFERS: False},
        {"bucket_cap_mb": 1e-6},
        {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [2, 3])
def test_options_of_ddp_change_nothing(ranks: Ranks, world: int, wrap_with: dict[str, Any]) -> None:
    """Over several windows, with the gradients set to None in between."""
    check(ranks.run(world, with_options, wrap_with))


class Outer(nn.Module):
    """A module of which only a part is wrapped: the rest is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(net())
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        nn.init.eye_(self.frozen.weight)
        nn.init.zeros_(self.frozen.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The wrapped model of an unchanged input."""
        return self.inner(self.frozen(x))


def nested(rank: int) -> Trained:
    """DDP inside a module that accum is given."""
    outer = Outer()
    return train(rank, outer.inner.module, outer)


def test_ddp_inside_of_a_module(ranks: Ranks) -> None:
    """It is found, deferred and reduced."""
    check(ranks.run(2, nested))


class Halves(nn.Module):
    """Two wrapped parts beside each other."""

    def __init__(self) -> None:
        super().__init__()
        whole = net()
        self.first = DistributedDataParallel(nn.Sequential(whole[0], whole[1]))
        self.second = DistributedDataParallel(whole[2])

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        return self.second(self.first(x))


def halves(rank: int, several: bool) -> Trained:
    """Both parts in one module, or given one by one."""
    model = Halves()
    accum = Accumulator(2, optimizer=sgd(model.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(model)))
    models = (model.second, model.first) if several else (model,)
    with Reductions() as counted:
        for item in accum.batches(items(rank, SIZES[rank][: 5 - 3 * rank])):
            with accum(*models, weight=len(item[0])):
                accum.backward(loss(model, item))
    assert len(counted.others) <= 3 + 1
    return seen, parameters(model), accum.syncs


@pytest.mark.parametrize("several", [False, True], ids=["one module", "one by one"])
def test_several_replicas_in_a_block(ranks: Ranks, several: bool) -> None:
    """Both are reduced in each window; one rank has fewer micro-batches."""
    results = ranks.run(2, halves, several)
    data = [items(0, SIZES[0]), items(1, SIZES[1][:2])]
    expected, weights = big_batches(windows_of(data, 2))
    for seen, after, _ in results:
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


def compiled(rank: int, outside: bool, backend: str) -> Trained:
    """torch.compile around DDP, or inside of it."""
    torch._dynamo.reset()
    model = net()
    if outside:
        run = torch.compile(DistributedDataParallel(model), backend=backend)
    else:
        run = DistributedDataParallel(torch.compile(model, backend=backend))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo
        result = train(rank, model, run)
    torch._dynamo.reset()
    return result


@pytest.mark.parametrize("outside", [True, False], ids=["compiled DDP", "DDP of compiled"])
def test_compiled_models(ranks: Ranks, outside: bool) -> None:
    """One reduction a window, whichever wraps the other."""
    check(ranks.run(2, compiled, outside, "aot_eager", timeout=120))


class Checkpointed(nn.Module):
    """The same model, whose middle is computed again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.whole = net()

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        x.requires_grad_(self.reentrant)
        return checkpoint(self.whole, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def checkpointed(rank: int, reentrant: bool) -> Trained:
    """Activation checkpointing under DDP."""
    model = Checkpointed(reentrant)
    return train(rank, model, DistributedDataParallel(model))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing(ranks: Ranks, reentrant: bool) -> None:
    """Both kinds, with one use of each block in a micro-batch."""
    check(ranks.run(2, checkpointed, reentrant))


def compressed(rank: int) -> Trained:
    """A communication hook that reduces in fp16."""
    model = net()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    accum = Accumulator(2, optimizer=sgd(model.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(model)))
    for item in accum.batches(items(rank, SIZES[rank][: 5 - 3 * rank])):
        with accum(ddp, weight=4000 * len(item[0])):
            accum.backward(loss(ddp, item))
    return seen, parameters(model), accum.syncs


def test_a_hook_that_reduces_in_fp16(ranks: Ranks) -> None:
    """Within fp16's precision: weights of thousands do not overflow it, nor do ranks that end."""
    results = ranks.run(2, compressed)
    data = [items(0, SIZES[0]), items(1, SIZES[1][:2])]
    expected, _ = big_batches(windows_of(data, 2))
    for seen, _, syncs in results:
        assert errors(seen, expected) <= 2e-3
        assert syncs == 3
    assert equal([after for _, after, _ in results])


def early_heads(rank: int, find_unused_parameters: bool) -> Any:
    """Head b is used in the first of two micro-batches only, on rank 0 only."""
    ddp = DistributedDataParallel(forked(), find_unused_parameters=find_unused_parameters)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    before = parameters(ddp)
    said = ""
    data = items(rank, [2, 2])
    try:
        for names, item in zip((["ab", "a"], ["a", "a"])[rank], data, strict=True):
            with accum(ddp):
                accum.backward(ddp(item[0], names).square().mean())
    except RuntimeError as wrong:
        said = str(wrong)
    return seen, all(map(torch.equal, before, parameters(ddp))), said


def test_a_head_of_an_early_micro_batch_is_reduced(ranks: Ranks) -> None:
    """With find_unused_parameters; the head that nobody uses has no gradient."""
    results = ranks.run(2, early_heads, True)
    model = forked()
    used = (["ab", "a"], ["a", "a"])
    losses = [
        model(item[0], names).square().mean()
        for rank in range(2)
        for names, item in zip(used[rank], items(rank, [2, 2]), strict=True)
    ]
    (sum(losses) / 4).backward()
    assert grads(model)[-1] is None
    for seen, _, said in results:
        assert not said
        assert errors(seen, [grads(model)]) <= 1e-13


def test_unreduced_gradients_are_refused_before_the_optimizer_steps(ranks: Ranks) -> None:
    """Without find_unused_parameters DDP itself says so only in the next forward."""
    for seen, unchanged, said in ranks.run(2, early_heads, False):
        assert not seen
        assert unchanged
        assert "heads.b.weight" in said
        assert "find_unused_parameters=True" in said


def kept(rank: int, kind: str) -> list[bool]:
    """Of micro-batches that end well or not: is the wrapped model still alive behind them?"""
    found = []
    for fails in (False, True):
        model: Any = net()
        if kind == "fsdp":
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        accum = Accumulator(1)
        with contextlib.suppress(KeyError), accum(model) as micro:
            if fails:
                raise KeyError
            accum.backward(loss(model, items(rank, [3])[0]))
        alive = weakref.ref(model)
        del model
        gc.collect()
        found.append(alive() is not None)
        assert micro.index == 0
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_micro_batch_that_is_kept_keeps_no_wrapped_model(ranks: Ranks, kind: str) -> None:
    """DistributedDataParallel must not outlive its process group."""
    assert ranks.run(2, kept, kind) == [[False, False]] * 2
