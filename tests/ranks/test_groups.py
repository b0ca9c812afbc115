"""Data-parallel groups that are not all ranks, and several Accumulators over the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator

from .harness import Ranks
from .reference import (
    Gradients,
    Item,
    Reductions,
    big_batches,
    equal,
    error,
    errors,
    grads,
    items,
    loss,
    net,
    parameters,
    sgd,
    windows_of,
)

SIZES = [[3, 8, 1, 5], [7, 2], [4, 4, 10], [1]]


def train_in_pairs(rank: int, sync: str) -> tuple[list[Gradients], list[Tensor], int]:
    """Ranks 0 and 2 share the data, and so do 1 and 3, as with two tensor-parallel ranks."""
    groups = [dist.new_group(group) for group in ([0, 2], [1, 3])]
    group = groups[rank % 2]
    ddp = DistributedDataParallel(net(), process_group=group)
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()), process_group=group, sync=sync)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    for item in accum.batches(items(rank, SIZES[rank])):
        with accum(ddp, weight=len(item[0])):
            accum.backward(loss(ddp, item))
    return seen, parameters(ddp), accum.updates


@pytest.mark.parametrize("sync", ["last", "every"])
def test_pairs_of_ranks_are_windows_of_their_own(ranks: Ranks, sync: str) -> None:
    """Their numbers of updates differ, too."""
    results = ranks.run(4, train_in_pairs, sync)
    for first, second in ((0, 2), (1, 3)):
        data = [items(first, SIZES[first]), items(second, SIZES[second])]
        expected, weights = big_batches(windows_of(data, 2))
        for seen, after, updates in (results[first], results[second]):
            assert updates == len(expected)
            assert errors(seen, expected) <= 1e-13
            assert error(after, weights) <= 1e-13
        assert equal([results[first][1], results[second][1]])


def generator() -> nn.Module:
    """Makes samples of noise; the same on each rank."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def judge() -> nn.Module:
    """Judges samples; the same on each rank."""
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def judge_loss(d: nn.Module, g: nn.Module, item: Item) -> Tensor:
    """Real samples high, made ones low: two forwards of `d`, one backward."""
    noise, real = item[0], torch.cat([item[1], item[1][:, :1]], 1)
    return d(g(noise).detach()).sigmoid().mean() - d(real).sigmoid().mean()


def generator_loss(d: nn.Module, g: nn.Module, item: Item) -> Tensor:
    """Made samples high."""
    return -d(g(item[0])).sigmoid().mean()


def train_gan(rank: int, counts: list[int]) -> Any:
    """One Accumulator for each optimizer; D is part of G's graph."""
    d, g = DistributedDataParallel(judge()), DistributedDataParallel(generator())
    d_accum = Accumulator(2, optimizer=sgd(d.parameters()))
    g_accum = Accumulator(2, optimizer=sgd(g.parameters()))
    seen: dict[str, list[Gradients]] = {"d": [], "g": []}
    d_accum.on_update(lambda: seen["d"].append(grads(d)))
    g_accum.on_update(lambda: seen["g"].append(grads(g)))
    with Reductions() as counted:
        for item in items(rank, [3, 8, 1, 5, 2, 4][: counts[rank]]):
            with d_accum(d, weight=len(item[0])):
                d_accum.backward(judge_loss(d, g, item))
            with g_accum(g, weight=len(item[0])):
                g_accum.backward(generator_loss(d, g, item))
    assert len(counted.others) == (d_accum.windows + g_accum.windows)
    return seen, parameters(d), parameters(g), d_accum.syncs, g_accum.syncs


def plain_gan(data: list[list[Item]]) -> tuple[dict[str, list[Gradients]], Any, Any]:
    """The same alternation in one process with sums over the window by hand."""
    d, g = judge(), generator()
    optimizers = sgd(d.parameters()), sgd(g.parameters())
    seen: dict[str, list[Gradients]] = {"d": [], "g": []}
    for start in range(0, len(data[0]), 2):
        window = [item for own in data for item in own[start : start + 2]]
        total = sum(len(x) for x, _ in window)
        # D's update comes before G's last micro-batch of the window, but after its first.
        sums = [torch.zeros_like(p) for p in g.parameters()]
        firsts = [own[start] for own in data]
        lasts = [own[start + 1] for own in data]

        def add(items_: list[Item], sums: list[Tensor] = sums, total: int = total) -> None:
            for item in items_:
                value = generator_loss(d, g, item) * len(item[0]) / total
                for part, grad in zip(
                    sums, torch.autograd.grad(value, list(g.parameters())), strict=True
                ):
                    part += grad

        optimizers[0].zero_grad()
        value = sum(judge_loss(d, g, item) * len(item[0]) / total for item in window)
        add(firsts)
        value.backward()  # type: ignore[union-attr]
        seen["d"].append(grads(d))
        optimizers[0].step()
        add(lasts)
        for p, part in zip(g.parameters(), sums, strict=True):
            p.grad = part.clone()
        seen["g"].append(grads(g))
        optimizers[1].step()
    return seen, parameters(d), parameters(g)


def test_two_accumulators_share_no_window(ranks: Ranks) -> None:
    """Six items in windows of two: three updates each, D free of what G's loss leaves in it."""
    results = ranks.run(2, train_gan, [6, 6])
    data = [items(rank, [3, 8, 1, 5, 2, 4]) for rank in range(2)]
    expected, d, g = plain_gan(data)
    for seen, d_after, g_after, d_syncs, g_syncs in results:
        assert (d_syncs, g_syncs) == (3, 3)
        assert errors(seen["d"], expected["d"]) <= 1e-13
        assert errors(seen["g"], expected["g"]) <= 1e-13
        assert error(d_after, d) <= 1e-13
        assert error(g_after, g) <= 1e-13
    assert equal([r[1] for r in results])
    assert equal([r[2] for r in results])


def train_uneven_gan(rank: int, counts: list[int], first: str) -> Any:
    """D's batches feed both, and rank 1 has fewer of them."""
    d, g = DistributedDataParallel(judge()), DistributedDataParallel(generator())
    d_accum = Accumulator(2, optimizer=sgd(d.parameters()))
    g_accum = Accumulator(2, optimizer=sgd(g.parameters()))
    try:
        for item in d_accum.batches(items(rank, [3, 8, 1, 5, 2, 4][: counts[rank]])):
            for turn in ("d", "g") if first == "d" else ("g", "d"):
                if turn == "g":
                    with g_accum(g, weight=len(item[0])):
                        g_accum.backward(generator_loss(d, g, item))
                    continue
                with d_accum(d, weight=len(item[0])):
                    with torch.no_grad():
                        made = g(item[0])
                    real = torch.cat([item[1], item[1][:, :1]], 1)
                    d_accum.backward(d(made).sigmoid().mean() - d(real).sigmoid().mean())
        g_accum.flush()
    except RuntimeError as wrong:
        return str(wrong), []
    return "", [*parameters(d), *parameters(g)]


@pytest.mark.parametrize("first", ["d", "g"])
@pytest.mark.parametrize(
    "counts", [[6, 2], [6, 3], [3, 6], [5, 4], [2, 1], [4, 4], [5, 5]], ids=str
)
def test_two_accumulators_of_uneven_data_are_refused(
    ranks: Ranks, counts: list[int], first: str
) -> None:
    """A rank without data can't join the windows of an Accumulator that it has no batches of."""
    results = ranks.run(2, train_uneven_gan, counts, first)
    said = [words for words, _ in results]
    if counts[0] == counts[1]:
        assert not any(said)
    else:
        assert all("data of some ranks have ended" in words for words in said)
    assert equal([after for _, after in results])


def train_two_models(
    rank: int, counts: list[int], order: str, out: int | None = None
) -> tuple[list[Gradients], list[Tensor], int]:
    """Blocks of two DDP models; rank 1 leaves the micro-batch `out` out."""
    torch.manual_seed(4)
    small, large = DistributedDataParallel(nn.Linear(3, 3)), DistributedDataParallel(net())
    models = (small, large) if order == "small first" else (large, small)
    accum = Accumulator(2, optimizer=sgd([*small.parameters(), *large.parameters()]))
    both = nn.ModuleList([small.module, large.module])
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(both)))
    for index, (x, y) in enumerate(accum.batches(items(rank, [3, 8, 1, 5, 2][: counts[rank]]))):
        with accum(*models, weight=len(x)) as micro:
            if rank == 1 and index == out:
                micro.skip()
            else:
                accum.backward(nn.functional.mse_loss(large(small(x)), y))
    return seen, parameters(both), accum.updates


def check_two_models(results: Any, data: list[list[Item]]) -> None:
    """All ranks have made the updates that plain torch makes of windows of two."""
    torch.manual_seed(4)
    both = nn.ModuleList([nn.Linear(3, 3), net()])
    expected, weights = big_batches(
        windows_of(data, 2),
        both,
        lambda _, item: nn.functional.mse_loss(both[1](both[0](item[0])), item[1]),
    )
    for seen, after, updates in results:
        assert updates == len(expected)
        assert errors(seen, expected) <= 1e-13
        assert error(after, weights) <= 1e-13
    assert equal([after for _, after, _ in results])


@pytest.mark.parametrize("order", ["small first", "large first"])
@pytest.mark.parametrize("counts", [[5, 5], [5, 2], [0, 3], [3, 0]], ids=str)
def test_two_models_in_one_block(ranks: Ranks, counts: list[int], order: str) -> None:
    """Reduced in the same order by a rank that never ran a block."""
    results = ranks.run(2, train_two_models, counts, order)
    check_two_models(results, [items(r, [3, 8, 1, 5, 2][:count]) for r, count in enumerate(counts)])


@pytest.mark.parametrize("order", ["small first", "large first"])
def test_two_models_of_which_one_rank_leaves_the_closing_out(ranks: Ranks, order: str) -> None:
    """It reduces them without a backward, in the order of those that have one."""
    results = ranks.run(2, train_two_models, [4, 4], order, 3)
    check_two_models(results, [items(0, [3, 8, 1, 5]), items(1, [3, 8, 1])])
