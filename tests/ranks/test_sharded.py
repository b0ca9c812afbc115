"""fully_shard: both sync modes have the gradient of one big batch in one process."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from accumplug import Accumulator
from accumplug.errors import MovedError
from accumplug.parallel import fsdp

from .harness import Ranks
from .reference import Item, items, loss

SIZES = [[3, 8, 1, 5, 2, 9, 4], [7, 2, 2, 6, 1, 1, 3], [4, 4, 10, 2, 5, 3, 8]]
"""Samples in each micro-batch of each rank."""
STEPS = 3
CLIP = 0.05
SUMS_WIDELY = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether torch defers in the parameter's own dtype, not in param_dtype: from 2.15 on."""
sums_widely = pytest.mark.skipif(not SUMS_WIDELY, reason="comes with torch 2.15")


def net() -> nn.Module:
    """A small model with two shardable layers and a root of its own, the same on each rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """`fully_shard` the inner layers and the root."""
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def textbook(world: int, clip: float | None) -> tuple[list[Tensor], list[float]]:
    """Parameters and gradient norms if each window is one batch in one process."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = [items(rank, SIZES[rank]) for rank in range(world)]
    norms = []
    for start in range(0, len(SIZES[0]), STEPS):
        window = [item for own in data for item in own[start : start + STEPS]]
        loss(model, tuple(torch.cat(part) for part in zip(*window, strict=True))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), norms


def train(
    rank: int, sync: str, clip: float | None, scaled: bool, flush: bool
) -> tuple[list[Tensor], list[float], int, int, list[str]]:
    """What `textbook` returns, and syncs, reduce-scatters' windows and warnings."""
    model = shard(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accum = Accumulator(
            STEPS,
            optimizer=optimizer,
            scaler=scaler,
            max_grad_norm=clip,
            sync=sync,
            tail="carry" if flush else "flush",
        )
        norms = []

        @accum.on_update
        def note() -> None:
            assert accum.last is not None
            assert accum.last.grad_norm is not None
            norms.append(accum.last.grad_norm)

        for item in accum.batches(items(rank, SIZES[rank])):
            with accum(model, weight=len(item[0])):
                accum.backward(loss(model, item))
        if flush:
            assert accum.pending == 1
            assert accum.flush()
    whole = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    return whole, norms, accum.syncs, accum.updates, [str(w.message) for w in said]


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sharded_window_is_one_big_batch(
    ranks: Ranks, world: int, sync: str, scaled: bool, flush: bool
) -> None:
    """Same weights and norms as one process, in both modes; reductions as the mode says."""
    expected, expected_norms = textbook(world, CLIP)
    for got, norms, syncs, updates, _ in ranks.run(world, train, sync, CLIP, scaled, flush):
        assert updates == 3
        assert syncs == (3 if sync == "last" else 7)
        # AdamW divides by the root of a moment, which stretches rounding (1e-16) a hundredfold
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
        tolerance = 1e-6 if scaled else 1e-13  # the scaler's inverse scale is fp32
        assert norms == pytest.approx(expected_norms, rel=tolerance)


def test_deferring_is_said_once_with_its_bytes(ranks: Ranks) -> None:
    """80 fp64 gradients of the whole model stay on each rank; the other mode is named."""
    numel = sum(p.numel() for p in net().parameters())
    for _, _, _, _, said in ranks.run(2, train, "last", None, False, False):
        deferral = [text for text in said if "deferring" in text]
        assert len(deferral) == 1
        assert f"{numel * 8 / 2**20:,.1f} MiB" in deferral[0]
        assert 'sync="every"' in deferral[0]
    for _, _, _, _, said in ranks.run(2, train, "every", None, False, False):
        assert not [text for text in said if "deferring" in text]


def evaluated(rank: int, sync: str) -> list[Tensor]:
    """Train with a forward under no_grad, which leaves the root unsharded, before each block."""
    warnings.simplefilter("ignore")
    model = shard(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accum = Accumulator(STEPS, optimizer=optimizer, max_grad_norm=CLIP, sync=sync)
    for item in accum.batches(items(rank, SIZES[rank])):
        with torch.no_grad():
            model(item[0])
        with accum(model, weight=len(item[0])):
            accum.backward(loss(model, item))
    return [p.full_tensor().detach() for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("sync", ["last", "every"])
def test_an_evaluation_before_and_inside_of_windows_changes_nothing(
    ranks: Ranks, sync: str
) -> None:
    """`model.parameters()` are whole ones after it; the sum has to be scaled once all the same."""
    expected, _ = textbook(2, CLIP)
    for got in ranks.run(2, evaluated, sync):
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def plainly(rank: int, model: nn.Module, sync: str) -> tuple[list[Tensor], int]:
    """Train `model`, whatever is around it."""
    warnings.simplefilter("ignore")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accum = Accumulator(STEPS, optimizer=optimizer, max_grad_norm=CLIP, sync=sync)
    for item in accum.batches(items(rank, SIZES[rank])):
        with accum(model, weight=len(item[0])):
            accum.backward(loss(model, item))
    return [p.full_tensor().detach() for p in optimizer.param_groups[0]["params"]], accum.syncs


def compiled(rank: int, outside: bool, sync: str) -> tuple[list[Tensor], int]:
    """torch.compile around the sharded model, or around layers that are sharded then."""
    torch._dynamo.reset()
    model: Any = net()
    if outside:
        model = torch.compile(shard(model), backend="aot_eager")
    else:
        model[0], model[2] = (torch.compile(model[i], backend="aot_eager") for i in (0, 2))
        shard(model)
    result = plainly(rank, model, sync)
    torch._dynamo.reset()
    return result


def replicated(rank: int, sync: str) -> tuple[list[Tensor], int]:
    """A mesh that repeats the shards over two ranks (HSDP)."""
    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("repeated", "sharded"))
    return plainly(rank, shard(net(), mesh=mesh), sync)


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize(
    ("function", "options"),
    [(compiled, (True,)), (compiled, (False,)), (replicated, ())],
    ids=["compiled", "of compiled", "replicated"],
)
def test_what_is_around_and_inside_of_a_sharded_model(
    ranks: Ranks, function: Any, options: tuple[bool, ...], sync: str
) -> None:
    """The same updates, one reduction a window or one a micro-batch."""
    expected, _ = textbook(2, CLIP)
    for got, syncs in ranks.run(2, function, *options, sync, timeout=120):
        assert syncs == (3 if sync == "last" else 7)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def served(rank: int, outside: bool) -> dict[str, str]:
    """What in-place gradients say of a sharded model, compiled or not."""
    warnings.simplefilter("ignore")
    model: Any = shard(net())
    if outside:
        model = torch.compile(model, backend="aot_eager")
    accum = Accumulator(STEPS, optimizer=torch.optim.SGD(model.parameters(), 0.1), inplace=True)
    for item in items(rank, SIZES[rank]):
        with accum(model):
            accum.backward(loss(model, item))
    torch._dynamo.reset()
    assert not accum.inplace_report().served
    return dict(accum.inplace_report().others)


def test_a_sharded_model_is_not_served_in_place_and_says_so(ranks: Ranks) -> None:
    """Compiled or not."""
    for outside in (False, True):
        others = ranks.run(1, served, outside, timeout=120)[0]
        assert len(others) == 3
        assert set(others.values()) == {"sharded"}


def players() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator of what it makes."""
    torch.manual_seed(5)
    generator, discriminator = net(), net()
    discriminator[0] = nn.Linear(2, 6)  # type: ignore[index]
    return generator, discriminator


def judge(discriminator: nn.Module, generator: nn.Module, item: Item) -> Tensor:
    """What the discriminator learns from."""
    real, fake = discriminator(item[1]), discriminator(generator(item[0]).detach())
    return fake.square().mean() - real.tanh().mean()


def fool(discriminator: nn.Module, generator: nn.Module, item: Item) -> Tensor:
    """What the generator learns from, through the discriminator."""
    return -discriminator(generator(item[0])).tanh().mean()


def play(rank: int, sync: str) -> list[Tensor]:
    """Windows of two micro-batches, each of one block of either; the discriminator comes first."""
    warnings.simplefilter("ignore")
    generator, discriminator = map(shard, players())
    first = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    judging = Accumulator(2, optimizer=first, sync=sync)
    fooling = Accumulator(2, optimizer=second, sync=sync)
    for index, item in enumerate(items(rank, [4] * 4)):
        with judging(discriminator, weight=1 + index + rank):
            judging.backward(judge(discriminator, generator, item))
        with fooling(generator):
            fooling.backward(fool(discriminator, generator, item))
    both = [*discriminator.parameters(), *generator.parameters()]
    return [p.full_tensor().detach() for p in both]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("world", [1, 2])
def test_one_accumulator_for_each_of_two_sharded_models(
    ranks: Ranks, world: int, sync: str
) -> None:
    """The loss of the generator adds nothing to the discriminator's window, nor reduces it."""
    generator, discriminator = players()
    first = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    data = [items(rank, [4] * 4) for rank in range(world)]
    for start in (0, 2):
        second.zero_grad()
        early = [fool(discriminator, generator, own[start]) for own in data]
        torch.stack(early).sum().div(2 * world).backward()
        first.zero_grad()
        weights = [start + i + 1 + rank for rank in range(world) for i in (0, 1)]
        window = [item for own in data for item in own[start : start + 2]]
        for weight, item in zip(weights, window, strict=True):
            (judge(discriminator, generator, item) * weight / sum(weights)).backward()
        first.step()
        late = [fool(discriminator, generator, own[start + 1]) for own in data]
        torch.stack(late).sum().div(2 * world).backward()
        second.step()
    expected = [*discriminator.parameters(), *generator.parameters()]
    for got in ranks.run(world, play, sync):
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def empty(rank: int) -> list[float]:
    """A micro-batch of weight 0 on rank 1, with a finite loss, then a window of NaN alone."""
    warnings.simplefilter("ignore")
    model = shard(net())
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    for index, item in enumerate(items(rank, [4, 4])):
        weight = 0 if rank == 1 and index == 1 else 4
        with accum(model, weight=weight):
            accum.backward(loss(model, item))
    for _ in range(2):
        with accum(model, weight=0):
            accum.backward(loss(model, items(rank, [4])[0]) * math.nan)
    assert (accum.updates, accum.skipped) == (1, 1)
    moved = [p.full_tensor().flatten() for p in model.parameters()]  # type: ignore[attr-defined]
    return torch.cat(moved).tolist()


def test_weight_0_adds_nothing_even_if_the_loss_is_nan(ranks: Ranks) -> None:
    """The backward runs for the other ranks' sake, from zeros at the model's outputs."""
    model = net()
    window = [items(0, [4, 4])[0], items(0, [4, 4])[1], items(1, [4, 4])[0]]
    loss(model, tuple(torch.cat(part) for part in zip(*window, strict=True))).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for moved in ranks.run(2, empty):
        torch.testing.assert_close(torch.tensor(moved), expected, rtol=1e-13, atol=1e-13)


def one_block(accum: Accumulator, model: nn.Module, skip: bool = False) -> None:
    """Open a block, and leave it out or do nothing."""
    with accum(model) as micro:
        if skip:
            micro.skip()


def one_pass(accum: Accumulator, model: nn.Module, rank: int) -> None:
    """A pass over 2 items on rank 0 and 3 on rank 1."""
    for item in accum.batches(items(rank, [3, 3, 3][: 2 + rank])):
        with accum(model):
            accum.backward(loss(model, item))


def refused(rank: int) -> int:
    """Uneven data, skip, and options that can't be kept."""
    warnings.simplefilter("ignore")
    model = shard(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="skip_micro_batch"):
        one_block(Accumulator(2, optimizer=optimizer, nonfinite="skip_micro_batch"), model)
    if not SUMS_WIDELY:
        half = shard(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="reduce_dtype"):
            one_block(Accumulator(2, accumulate_dtype=torch.float32), half)
    with pytest.raises(RuntimeError, match="weight=0"):
        one_block(Accumulator(2, optimizer=optimizer), model, skip=True)
    with pytest.raises(RuntimeError, match="drop_last"):
        one_pass(Accumulator(1, optimizer=optimizer), model, rank)
    return 4


def test_what_sharding_can_not_do_is_said(ranks: Ranks) -> None:
    """All ranks raise, none waits for another."""
    assert ranks.run(2, refused) == [4, 4]


def half_precision(rank: int, sync: str, reduce_dtype: torch.dtype | None) -> list[float]:
    """The gradient of 1 + 255 * 2^-9 in micro-batches of bf16 compute, over the gradient of 1.

    The latter is that of plain torch: 2.8 takes sums for means in fp32 on gloo.
    """
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, plain = (fully_shard(nn.Linear(1, 1, bias=False), mp_policy=policy) for _ in range(2))
    plain(torch.ones(1, 1)).sum().backward()
    accum = Accumulator(256, sync=sync, accumulate_dtype=torch.float32)
    for index in range(256):
        with accum(model):
            accum.backward(model(torch.tensor([[1.0 if index == 0 else 2.0**-9]])).sum())
    ours, one = (m.weight.grad.full_tensor().item() for m in (model, plain))
    return [ours / one * 256]


@pytest.mark.parametrize(
    ("sync", "reduce_dtype"),
    [
        ("last", torch.float32),
        ("every", torch.float32),
        pytest.param("last", None, marks=sums_widely),
        pytest.param("every", None, marks=sums_widely),
    ],
)
def test_sums_in_fp32_lose_nothing(
    ranks: Ranks, sync: str, reduce_dtype: torch.dtype | None
) -> None:
    """reduce_dtype=fp32 is what accumulate_dtype asks of fully_shard; of torch 2.15, nothing."""
    for grads in ranks.run(2, half_precision, sync, reduce_dtype):
        assert grads == [1.498046875]


def hidden(rank: int, deferred: str) -> str:
    """What is said if the deferred gradients are not where they were."""
    warnings.simplefilter("ignore")
    model = shard(net())
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    hide = mock.patch.object(fsdp, "_whole", return_value=None)
    if deferred == "the reduction":
        one_item(accum, model, items(rank, [4])[0])
        hide = mock.patch.object(FSDPParamGroup, "post_backward")
    with pytest.raises(MovedError) as raised, hide:
        if accum.pending:
            accum.flush()
        else:
            one_item(accum, model, items(rank, [4])[0])
    return str(raised.value)


def one_item(accum: Accumulator, model: nn.Module, item: Item) -> None:
    """A micro-batch."""
    with accum(model):
        accum.backward(loss(model, item))


@pytest.mark.parametrize(
    ("deferred", "name"), [("the sum", "_unsharded_param"), ("the reduction", "post_backward")]
)
def test_a_torch_that_has_moved_what_is_read_is_named(
    ranks: Ranks, deferred: str, name: str
) -> None:
    """Before an optimizer steps on a gradient that was not scaled or not reduced."""
    for said in ranks.run(2, hidden, deferred):
        assert f"torch {torch.__version__} moved" in said
        assert name in said


def manual(rank: int) -> str:
    """What is said where the loop finalizes backward by itself."""
    warnings.simplefilter("ignore")
    model = shard(net())
    model.set_manual_backward_finalization(True)
    with pytest.raises(ValueError, match="finalize_backward") as raised:
        one_block(Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)), model)
    return str(raised.value)


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="comes with torch 2.15")
def test_a_loop_that_finalizes_backward_itself_is_refused(ranks: Ranks) -> None:
    """accum would step before it does."""
    for said in ranks.run(2, manual):
        assert "leave it off" in said
