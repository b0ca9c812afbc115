"""What windows over ranks can't be made right with is said, on every rank, and none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumplug import Accumulator, TornWindowError

from .harness import Ranks
from .reference import error, grads, items, loss, net, parameters, sgd


def bare(rank: int) -> None:
    """A model that nobody reduces."""
    model = net()
    accum = Accumulator(2, optimizer=sgd(model.parameters()))
    with pytest.raises(ValueError, match=r"not wrapped, and there are 2 ranks: 0.weight and 3"):
        accum(model).__enter__()
    with pytest.raises(ValueError, match="give accum the wrapped model"):
        accum(DistributedDataParallel(model).module).__enter__()


def partly_bare(rank: int) -> None:
    """A model of which only a part is reduced."""
    model = nn.Sequential(DistributedDataParallel(net()), nn.Linear(2, 2))
    accum = Accumulator(2, optimizer=sgd(model.parameters()))
    with pytest.raises(
        ValueError, match=r"has parameters outside of its wrapped modules.*1\.weight"
    ):
        accum(model).__enter__()


def beside_a_wrapped_one(rank: int) -> None:
    """A second model of the block that nobody reduces."""
    first, second = DistributedDataParallel(net()), net()
    with pytest.raises(ValueError, match="Linear is not wrapped|Sequential is not wrapped"):
        Accumulator(2)(first, second).__enter__()


def static_graph(rank: int) -> None:
    """DDP fails in its first backward if that is not synced; one that is synced is no matter."""
    ddp = DistributedDataParallel(net(), static_graph=True)
    with pytest.raises(ValueError, match="static_graph=False"):
        Accumulator(2)(ddp).__enter__()
    accum = Accumulator(1, optimizer=sgd(ddp.parameters()))
    for item in items(rank, [2, 3]):
        with accum(ddp):
            accum.backward(loss(ddp, item))
    assert accum.updates == 2


def second_backward(rank: int) -> None:
    """The first backward of the micro-batch that closes is reduced; it is refused in all."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(2, optimizer=sgd(ddp.parameters()))
    first, second = items(rank, [2, 3])
    for _ in range(2):
        before = parameters(ddp)
        with (
            pytest.raises(RuntimeError, match="add the losses and call backward once"),
            accum(ddp),
        ):
            output = ddp(first[0])
            accum.backward(output.mean(), retain_graph=True)
            accum.backward(output.square().mean())
        assert all(map(torch.equal, before, parameters(ddp)))
        with pytest.raises(TornWindowError, match=r"torn after . of 2"), accum(ddp):
            pass
        accum.discard()
        with accum(ddp):
            accum.backward(loss(ddp, first))
    with accum(ddp):
        accum.backward(loss(ddp, second))
    assert accum.updates == 1


def other_group(rank: int) -> None:
    """DDP that reduces over other ranks than the window is over."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    ddp = DistributedDataParallel(net(), process_group=alone)
    with pytest.raises(ValueError, match="reduces over 1 ranks.*process_group has 2"):
        Accumulator(2)(ddp).__enter__()
    over_all = DistributedDataParallel(net())
    with pytest.raises(ValueError, match="reduces over 2 ranks.*process_group has 1"):
        Accumulator(2, process_group=alone)(over_all).__enter__()


@pytest.mark.parametrize(
    "program", [bare, partly_bare, beside_a_wrapped_one, static_graph, second_backward, other_group]
)
def test_it_is_refused_with_what_to_do(ranks: Ranks, program: Any) -> None:
    """The program itself asserts the message."""
    ranks.run(2, program)


def same_size(rank: int) -> None:
    """Rows and columns of a mesh of 2 x 2 have equally many ranks."""
    rows = [dist.new_group(group) for group in ([0, 1], [2, 3])]
    columns = [dist.new_group(group) for group in ([0, 2], [1, 3])]
    ddp = DistributedDataParallel(net(), process_group=rows[rank // 2])
    with pytest.raises(ValueError, match="process_group"):
        Accumulator(2, process_group=columns[rank % 2])(ddp).__enter__()


def test_a_group_of_the_same_size_but_other_ranks_is_refused(ranks: Ranks) -> None:
    """The size alone does not tell."""
    ranks.run(4, same_size)


def forward_outside(rank: int) -> tuple[str, list[Any]]:
    """DDP decides in the forward whether a backward reduces; here it runs before the block."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(2)
    try:
        for item in items(rank, [[3, 8], [7, 2]][rank]):
            value = loss(ddp, item)
            with accum(ddp, weight=len(item[0])):
                accum.backward(value)
    except RuntimeError as error:
        return str(error), []
    return "", grads(ddp)


def test_a_forward_outside_of_its_block_is_right_or_refused(ranks: Ranks) -> None:
    """The ranks weigh differently, so that a reduction too many would be wrong."""
    whole = [*items(0, [3, 8]), *items(1, [7, 2])]
    model = net()
    loss(model, (torch.cat([x for x, _ in whole]), torch.cat([y for _, y in whole]))).backward()
    for said, seen in ranks.run(2, forward_outside):
        assert said or all(
            torch.allclose(a, e, rtol=0, atol=1e-13)
            for a, e in zip(seen, grads(model), strict=True)
        )
        assert not said or "forward" in said


def forward_of_another_block(rank: int) -> list[Any]:
    """The forward runs in a block that does not reduce, its backward in the one that closes."""
    ddp = DistributedDataParallel(net())
    accum = Accumulator(2)
    item = items(rank, [3, 5])[rank]
    with accum(ddp) as micro:
        kept = loss(ddp, item)
        micro.skip()
    with accum(ddp, weight=len(item[0])):
        accum.backward(kept)
    return grads(ddp)


def test_a_forward_of_an_earlier_block_is_reduced_with_its_backward(ranks: Ranks) -> None:
    """DDP alone would leave it on its rank."""
    whole = [items(0, [3, 5])[0], items(1, [3, 5])[1]]
    model = net()
    loss(model, (torch.cat([x for x, _ in whole]), torch.cat([y for _, y in whole]))).backward()
    for seen in ranks.run(2, forward_of_another_block):
        assert error(seen, grads(model)) <= 1e-13


def models_that_change(rank: int) -> tuple[str, list[list[Tensor]]]:
    """One model in the first micro-batch of a window, another in the one that closes."""
    models = [DistributedDataParallel(net()), DistributedDataParallel(net())]
    optimizer = sgd([p for model in models for p in model.parameters()])
    accum = Accumulator(2, optimizer=optimizer)
    try:
        for model, item in zip(models, items(rank, [2, 3]), strict=True):
            with accum(model):
                accum.backward(loss(model, item))
    except (RuntimeError, ValueError) as error:
        return str(error), []
    return "", [parameters(model) for model in models]


def test_a_model_of_an_earlier_micro_batch_is_reduced_or_refused(ranks: Ranks) -> None:
    """Never stepped on with gradients that only one rank has."""
    results = ranks.run(2, models_that_change)
    for said, _ in results:
        assert said == results[0][0]
    if not results[0][0]:
        for mine, others in zip(results[0][1], results[1][1], strict=True):
            assert all(map(torch.equal, mine, others))
