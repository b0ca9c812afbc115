"""Whatever the ranks, micro-batches, weights and heads: each window is one big batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from versions import SYNC_BUFFERS

from accumplug import Accumulator

from .harness import Ranks
from .reference import Gradients, equal, error, errors, forked, grads, items, parameters, sgd


@dataclass(frozen=True)
class Piece:
    """One micro-batch: its samples, the heads it uses, and how it is left out, if it is."""

    size: int
    heads: str
    out: str


@dataclass(frozen=True)
class Case:
    """Micro-batches of each pass and rank, and how they are accumulated."""

    passes: list[list[list[Piece]]]
    steps: int
    sync: str
    weights: str
    buffers: bool
    bucket_view: bool


class Model(nn.Module):
    """Heads, and a buffer that DDP broadcasts if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.forked = forked()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, heads: str) -> Tensor:
        """The heads."""
        self.calls += 1
        return self.forked(x, heads)


def loss(model: nn.Module, x: Tensor, y: Tensor, heads: str) -> Tensor:
    """Mean over the samples."""
    return nn.functional.mse_loss(model(x, heads), y)


def weight(piece: Piece) -> int:
    """Of a micro-batch, 0 if it is left out."""
    return 0 if piece.out else piece.size


def train(rank: int, case: Case) -> tuple[list[Gradients], list[Tensor], tuple[int, ...]]:
    """What accum makes of `case`."""
    ddp = DistributedDataParallel(
        Model(),
        find_unused_parameters=True,
        gradient_as_bucket_view=case.bucket_view,
        **{SYNC_BUFFERS: case.buffers},
    )
    accum = Accumulator(case.steps, optimizer=sgd(ddp.parameters()), sync=case.sync)
    seen: list[Gradients] = []
    accum.on_update(lambda: seen.append(grads(ddp)))
    planned = case.weights == "weigh"
    for number, pieces in enumerate(case.passes):
        data = items(rank, [piece.size for piece in pieces[rank]], number)
        pairs = list(zip(data, pieces[rank], strict=True))
        for (x, y), piece in accum.batches(
            pairs, weigh=(lambda pair: weight(pair[1])) if planned else None
        ):
            known: Any = weight(piece)
            if case.weights == "tensor" and not piece.out:
                known = torch.tensor(known)
            with accum(ddp, weight=1 if planned else known) as micro:
                if piece.out == "skip":
                    micro.skip()
                elif piece.out == "forward":
                    loss(ddp, x, y, piece.heads)
                    micro.skip()
                elif piece.out:
                    accum.backward(loss(ddp, x, y, piece.heads) * float("nan"))
                else:
                    accum.backward(loss(ddp, x, y, piece.heads))
    return seen, parameters(ddp), (accum.updates, accum.windows, accum.pending)


def expected(case: Case) -> tuple[list[Gradients], list[Tensor], int]:
    """What plain torch makes of it in one process, and the number of windows."""
    model = Model()
    optimizer = sgd(model.parameters())
    gradients, windows = [], 0
    for number, pieces in enumerate(case.passes):
        data = [items(r, [p.size for p in own], number) for r, own in enumerate(pieces)]
        for start in range(0, max(len(own) for own in pieces), case.steps):
            windows += 1
            inside = [
                (item, piece)
                for own_data, own in zip(data, pieces, strict=True)
                for item, piece in list(zip(own_data, own, strict=True))[start : start + case.steps]
                if not piece.out
            ]
            if not inside:
                continue
            optimizer.zero_grad()
            total = sum(piece.size for _, piece in inside)
            terms = [
                loss(model, *item, piece.heads) * (piece.size / total) for item, piece in inside
            ]
            torch.stack(terms).sum().backward()
            gradients.append(grads(model))
            optimizer.step()
    return gradients, parameters(model), windows


pieces = st.builds(
    Piece,
    size=st.integers(1, 6),
    heads=st.sampled_from(["a", "b", "ab"]),
    out=st.sampled_from(["", "", "", "skip", "forward", "nan"]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any of them."""
    world = draw(st.integers(1, 3))
    ranks = st.lists(st.lists(pieces, max_size=6), min_size=world, max_size=world)
    weights = draw(st.sampled_from(["number", "tensor", "weigh"]))
    # a look-ahead with a reduction in each micro-batch needs ranks of equally many
    sync = "last" if weights == "weigh" else draw(st.sampled_from(["last", "every"]))
    return Case(
        passes=draw(st.lists(ranks, min_size=1, max_size=2)),
        steps=draw(st.integers(1, 4)),
        sync=sync,
        weights=weights,
        buffers=draw(st.booleans()),
        bucket_view=draw(st.booleans()),
    )


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_any_partition_is_one_big_batch(ranks: Ranks, case: Case) -> None:
    """Gradients, weights and counters, over ranks that end when they like."""
    results = ranks.run(len(case.passes[0]), train, case)
    gradients, weights, windows = expected(case)
    for seen, after, counters in results:
        assert counters == (len(gradients), windows, 0)
        assert not gradients or errors(seen, gradients) <= 1e-12
        assert error(after, weights) <= 1e-12
    assert equal([after for _, after, _ in results])
