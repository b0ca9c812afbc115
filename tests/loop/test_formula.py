"""The one formula: the gradient of sum(w * l) / sum(w), whatever the split. One process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import big_batch, data, gradients, mean_loss, network, relative, weighted
from torch import nn

from accumplug import Accumulator

# One big batch adds up its rows in another order than its splits do; each addition rounds by
# 1e-16 (fp32: 6e-8) of the largest term, and there are at most a few hundred.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}


def still(model):
    """An optimizer that moves nothing, so that every window meets the same weights."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def as_weight(kind, items, unit):
    """The weight of a micro-batch of so many rows, in one of the forms that users have."""
    if kind == "int tensor":
        return torch.tensor(items)
    if kind == "float tensor":
        return torch.tensor(items * unit, dtype=torch.float64)
    return items * unit


micro_batches = st.lists(
    st.tuples(
        st.integers(0, 5),  # rows; 0: an empty micro-batch of weight 0
        st.sampled_from(["mean", "sum", "two terms"]),
    ),
    min_size=1,
    max_size=14,
)
schedules = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def cut(sizes, schedule, tail):
    """Where windows begin and end, by hand: their places, and what is left at the end."""
    windows, start, updates = [], 0, 0
    while start < len(sizes):
        steps = schedule[updates % len(schedule)]
        window = list(range(start, min(start + steps, len(sizes))))
        if len(window) < steps and tail != "flush":
            return windows, window
        windows.append(window)
        updates += any(sizes[i] for i in window)
        start += steps
    return windows, []


def run(accum, model, batches, micro_batches, unit, kind):
    """The loop of a user; returns the finished gradient of each update."""
    got, steps_itself = [], not accum.takes_step
    accum.on_update(lambda: got.append(gradients(model)))
    weights = [as_weight(kind, rows, unit) for rows, _ in micro_batches]
    zeros = [0] * len(weights)
    for place, (x, y) in enumerate(accum.batches(batches)):
        rows, how = micro_batches[place]
        weight = weights[place] if rows else zeros[place]
        with accum(model, weight=weight) as micro:
            if not rows:  # a loss that is a mean over nothing
                micro.backward(F.mse_loss(model(x), y))
            elif how == "sum":
                micro.backward(mean_loss(model, (x, y)) * weight, weight, reduction="sum")
            elif how == "two terms":
                loss = mean_loss(model, (x, y))
                micro.backward(0.25 * loss, retain_graph=True)
                micro.backward(0.75 * loss)
            else:
                micro.backward(mean_loss(model, (x, y)))
        if steps_itself and micro.closes:
            model.zero_grad()
    return got


@settings(max_examples=120)
@given(
    micro_batches,
    schedules,
    st.sampled_from(["flush", "drop", "carry"]),
    st.sampled_from(["number", "int tensor", "float tensor"]),
    st.sampled_from([1.0, 0.37, 4096.0, 1e-4]),
    st.booleans(),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_any_partition_into_weighted_micro_batches_is_one_big_batch(
    micro_batches, schedule, tail, kind, unit, takes_step, dtype
):
    """Rows in one batch or cut anyhow: the same gradient, the same number of updates."""
    model = network(dtype)
    sizes = [rows for rows, _ in micro_batches]
    batches = data(sizes, dtype)
    accum = Accumulator(
        lambda updates: schedule[updates % len(schedule)],
        optimizer=still(model) if takes_step else None,
        tail=tail,
    )
    got = run(accum, model, batches, micro_batches, unit, kind)
    windows, left = cut(sizes, schedule, tail)
    full = [w for w in windows if any(sizes[i] for i in w)]
    assert (accum.updates, accum.skipped) == (len(full), len(windows) - len(full))
    assert accum.pending == (len(left) if tail == "carry" else 0)
    for found, window in zip(got, full, strict=True):
        assert relative(found, big_batch(model, [batches[i] for i in window])) <= TOLERANCE[dtype]


@settings(max_examples=60)
@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from(["number", "tensor", "look-ahead"]),
)
def test_any_weights_give_the_gradient_of_the_weighted_mean(weights, steps, how):
    """Weights that span twelve orders of magnitude, with a tail, in each of their forms."""
    model = network()
    batches = data([2] * len(weights))
    accum, got = Accumulator(steps, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    ahead = iter(weights)
    items = accum.batches(batches, weigh=(lambda _: next(ahead)) if how == "look-ahead" else None)
    for place, batch in enumerate(items):
        weight = weights[place]
        if how == "tensor":
            weight = torch.tensor(weight, dtype=torch.float64)
        with accum(model, weight=1 if how == "look-ahead" else weight):
            accum.backward(mean_loss(model, batch))
    assert len(got) == math.ceil(len(weights) / steps)
    for index, found in enumerate(got):
        part = slice(index * steps, (index + 1) * steps)
        expected = weighted(model, batches[part], weights[part])
        assert relative(found, expected) <= 1e-13


def token_losses(model, counts, vocabulary=7):
    """Micro-batches of so many target tokens: a function from a model to their token losses."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for count in counts:
        x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(0, vocabulary, (count,), generator=generator)
        out.append((x, y))
    return [F.cross_entropy(model(x), y, reduction="none") for x, y in out]


def classifier():
    return nn.Linear(4, 7).double()


def test_a_token_mean_over_10_and_100_tokens_is_not_the_mean_of_two_means():
    """110 tokens in one batch is the truth; dividing two means by 2 is far away from it."""
    model = classifier()
    parameters = list(model.parameters())
    truth = torch.autograd.grad(torch.cat(token_losses(model, [10, 100])).mean(), parameters)
    halves = [losses.mean() / 2 for losses in token_losses(model, [10, 100])]
    naive = torch.autograd.grad(sum(halves), parameters)
    assert relative(naive, truth) > 0.2
    accum, got = Accumulator(2, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    for losses in token_losses(model, [10, 100]):
        with accum(model, weight=len(losses)):
            accum.backward(losses.mean())
    assert relative(got[0], truth) <= 1e-15
    assert accum.last.weight == 110.0


def test_the_window_loss_is_the_weighted_mean():
    """Losses 4 (10 tokens) and 1 (100 tokens): 140/110, not 2.5, 1.25 or 5."""
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    accum = Accumulator(2, optimizer=still(layer))
    for loss, tokens in ((4.0, 10), (1.0, 100)):
        with accum(layer, weight=tokens):
            accum.backward(layer(torch.tensor([[loss]], dtype=torch.float64)).mean())
    assert accum.last.loss == pytest.approx(140 / 110, rel=1e-15)
    assert accum.last.weight == 110.0


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
def test_the_window_loss_does_not_depend_on_the_split(steps):
    """The same twenty losses in windows of any size have the same mean."""
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    accum, told = Accumulator(steps, optimizer=still(layer)), []
    accum.on_update(lambda: told.append(accum.last.loss))
    for loss in range(20):
        with accum(layer):
            accum.backward(layer(torch.tensor([[float(loss)]], dtype=torch.float64)).mean())
    assert sum(told) / len(told) == pytest.approx(9.5, rel=1e-15)
    assert told[0] == pytest.approx((steps - 1) / 2, rel=1e-15)


def test_the_window_loss_adds_sums_and_terms():
    """A sum counts as it is; two terms of a micro-batch are one objective."""
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    accum = Accumulator(2, optimizer=still(layer))
    ones = torch.ones(1, 1, dtype=torch.float64)
    with accum(layer):
        accum.backward(layer(40 * ones).sum(), weight=10, reduction="sum")
    with accum(layer, weight=100):
        accum.backward(layer(0.75 * ones).mean())
        accum.backward(layer(0.25 * ones).mean())
    assert accum.last.loss == pytest.approx(140 / 110, rel=1e-15)


def test_exactly_one_division_by_the_number_of_micro_batches():
    """Four equal micro-batches: the gradient of one of them; 4x and 0.25x are the wrong ones."""
    model = network()
    (batch,) = data([6])
    accum, got = Accumulator(4, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    for _ in range(4):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert relative(got[0], big_batch(model, [batch])) <= 1e-15


@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_tail_is_a_mean_over_its_own_micro_batches(members):
    """Of 4 planned only some came: the ratio to the right gradient is 1, not members / 4."""
    model = network()
    batches = data([3] * (4 + members))
    accum, got = Accumulator(4, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    for batch in accum.batches(batches):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert len(got) == 2
    assert relative(got[1], big_batch(model, batches[4:])) <= 1e-15
    assert accum.last.micro_batches == members


def test_a_micro_batch_of_weight_zero_adds_exactly_nothing_though_its_loss_is_nan():
    """No bit of the gradient changes, and the mean is over the other one alone, not half of it."""
    model, batches = network(), data([3, 3])
    accum, got = Accumulator(2, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    with accum(model):
        accum.backward(mean_loss(model, batches[0]))
    with accum(model, weight=0):
        accum.backward(mean_loss(model, batches[1]) * float("nan"))
    expected = torch.autograd.grad(mean_loss(model, batches[0]), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got[0], expected, strict=True))
    assert accum.last.loss == float(mean_loss(model, batches[0]).detach())
    assert accum.micro_batches == 2


def test_all_labels_ignored_in_one_micro_batch_neither_poisons_nor_halves():
    """cross_entropy is nan there; the token mean is over the tokens that there are."""
    model = classifier()
    x = torch.randn(6, 4, dtype=torch.float64)
    labels = [torch.tensor([1, 2, 3]), torch.full((3,), -100)]
    expected = torch.autograd.grad(
        F.cross_entropy(model(x[:3]), labels[0]), list(model.parameters())
    )
    accum, got = Accumulator(2, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    for rows, y in zip((x[:3], x[3:]), labels, strict=True):
        with accum(model, weight=int((y != -100).sum())):
            accum.backward(F.cross_entropy(model(rows), y))
    assert relative(got[0], expected) <= 1e-15
    assert math.isfinite(accum.last.loss)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_device_weight_that_is_zero_adds_nothing(reduction, place):
    """A masked sum over an empty mask, wherever it stands in the window."""
    model, batches = network(), data([3, 3, 3])
    accum, got = Accumulator(3, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    for index, batch in enumerate(batches):
        weight = torch.tensor(0 if index == place else 3)
        loss = mean_loss(model, batch)
        with accum(model):
            accum.backward(loss * weight if reduction == "sum" else loss, weight, reduction)
    others = [b for i, b in enumerate(batches) if i != place]
    assert relative(got[0], big_batch(model, others)) <= 1e-15


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_window_of_total_weight_zero_is_no_update_and_leaves_no_gradient(kind):
    """Not even for AdamW, which would move by its momentum and its decay."""
    model, batches = network(), data([3] * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    accum, ran = Accumulator(2, optimizer=optimizer, scheduler=scheduler), []
    accum.on_update(lambda: ran.append(True))
    for batch in batches[:2]:
        with accum(model):
            accum.backward(mean_loss(model, batch))
    before = [p.detach().clone() for p in model.parameters()]
    state = str(optimizer.state_dict())
    for batch in batches[2:]:
        with accum(model, weight=torch.tensor(0.0) if kind == "tensor" else 0):
            accum.backward(mean_loss(model, batch))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert str(optimizer.state_dict()) == state
    assert all(p.grad is None for p in model.parameters())
    assert (accum.updates, accum.skipped, len(ran), scheduler.last_epoch) == (1, 1, 1, 1)
    assert not accum.last.stepped
    assert accum.last.weight == 0.0
    assert math.isnan(accum.last.loss)


@pytest.mark.parametrize("takes_step", [True, False])
def test_a_second_term_alone_makes_no_update(takes_step):
    """Total weight 0: whatever else was back-propagated is gone, too."""
    model = network()
    accum = Accumulator(2, optimizer=still(model) if takes_step else None)
    closes = []
    for batch in accum.batches(data([3, 3]), weigh=lambda _: 0):
        loss = mean_loss(model, batch)
        with accum(model) as micro:
            accum.backward(loss, extra=loss)
        closes.append(micro.closes)
    assert closes == [False, False]
    assert (accum.updates, accum.skipped) == (0, 1)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
def test_device_weights_of_zero_leave_no_nan_to_a_loop_that_steps(weights):
    """The host does not know that the total is 0; the gradient is 0 then, not 0 / 0."""
    model, batches = network(), data([3, 3])
    accum = Accumulator(2)
    for batch, weight in zip(batches, weights, strict=True):
        with accum(model, weight=torch.tensor(weight)):
            accum.backward(mean_loss(model, batch))
    used = [batch for batch, weight in zip(batches, weights, strict=True) if weight]
    if used:
        assert relative(gradients(model), big_batch(model, used)) <= 1e-15
    else:
        assert not any(g.any() for g in gradients(model))


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.int64, [2**25 + 1, 1, 1, 1]),
        (torch.float32, [0.1, 0.7, 0.3, 3.0]),
        (torch.bfloat16, [256.0, 3.0, 3.0, 3.0]),
        (torch.float16, [30000.0, 30000.0, 30000.0, 3.0]),
    ],
)
def test_device_weights_of_a_narrow_type_are_summed_without_its_rounding(dtype, weights):
    """mask.sum() of a half mask: 4 x 30000 is inf in fp16, 256 + 9 is 268 in bf16."""
    model, batches = network(), data([2] * 4)
    accum, got = Accumulator(4, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    given_weights = [torch.tensor(w, dtype=dtype) for w in weights]
    for batch, weight in zip(batches, given_weights, strict=True):
        with accum(model, weight=weight):
            accum.backward(mean_loss(model, batch))
    exact = [float(w) for w in given_weights]
    assert relative(got[0], weighted(model, batches, exact)) <= 1e-13
    assert accum.last.weight == sum(exact)


def test_number_and_device_weights_mix_in_a_window():
    """In any order, and with a zero first."""
    model, batches = network(), data([2] * 4)
    for weights in ([3, torch.tensor(4), 5.0], [torch.tensor(4.0), 3, 5], [0, torch.tensor(4), 3]):
        accum, got = Accumulator(3, optimizer=still(model)), []
        accum.on_update(lambda got=got: got.append(gradients(model)))
        for batch, weight in zip(batches, weights, strict=False):
            with accum(model, weight=weight):
                accum.backward(mean_loss(model, batch))
        expected = weighted(model, batches[:3], [float(w) for w in weights])
        assert relative(got[0], expected) <= 1e-14


def test_two_terms_with_denominators_of_their_own():
    """A token mean, and an auxiliary loss that is a mean over micro-batches, in one backward."""
    model, batches = network(), data([10, 100, 3, 7, 50])
    counts = [len(x) for x, _ in batches]

    def auxiliary(batch):
        return model(batch[0]).tanh().mean()

    accum, got = Accumulator(3, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    for batch in accum.batches(batches, weigh=lambda b: len(b[0])):
        with accum(model):
            accum.backward(mean_loss(model, batch), extra=0.01 * auxiliary(batch))
    for found, part in zip(got, (slice(0, 3), slice(3, 5)), strict=True):
        window, total = batches[part], sum(counts[part])
        main = sum(len(b[0]) * mean_loss(model, b) for b in window) / total
        aux = sum(0.01 * auxiliary(b) for b in window) / len(window)
        expected = torch.autograd.grad(main + aux, list(model.parameters()))
        assert relative(found, expected) <= 1e-14


def test_a_micro_batch_without_items_still_counts_for_its_second_term():
    """Weight 0 takes the main term out, and only that one."""
    model, batches = network(), data([4, 4])
    accum, got = Accumulator(2, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    weights = iter([4, 0])
    for batch in accum.batches(batches, weigh=lambda _: next(weights)):
        loss = mean_loss(model, batch)
        with accum(model):
            accum.backward(loss, extra=loss.sqrt())
    first, second = (mean_loss(model, b) for b in batches)
    expected = torch.autograd.grad(
        first + (first.sqrt() + second.sqrt()) / 2, list(model.parameters())
    )
    assert relative(got[0], expected) <= 1e-14


def test_sparse_gradients_are_weighted_and_rescaled_too():
    """Rows 0 and 1 of an embedding with 10 and 100 tokens in a tail of 2 of 3."""
    for kind in (float, torch.tensor):
        table = nn.Embedding(5, 2, sparse=True).double()
        accum, got = Accumulator(3, optimizer=still(table)), []
        accum.on_update(lambda table=table, got=got: got.append(table.weight.grad.to_dense()))
        for row, tokens in accum.batches([(0, 10), (1, 100)]):
            with accum(table, weight=kind(tokens)):
                accum.backward(table(torch.tensor([row])).sum())
        expected = torch.zeros(5, 2, dtype=torch.float64)
        expected[0], expected[1] = 10 / 110, 100 / 110
        assert torch.allclose(got[0], expected, rtol=1e-15)


def test_a_parameter_that_only_some_micro_batches_use_is_rescaled_with_the_rest():
    """Two heads used in turn; the other one's gradient of earlier is part of the sum."""
    trunk, heads = nn.Linear(3, 3).double(), nn.ModuleList([nn.Linear(3, 1).double() for _ in "ab"])
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    xs = [torch.randn(2, 3, dtype=torch.float64) for _ in range(3)]

    def loss(place):
        return heads[place % 2](trunk(xs[place])).pow(2).mean()

    accum, got = Accumulator(4, optimizer=still(model)), []
    accum.on_update(lambda: got.append(gradients(model)))
    for place, _ in enumerate(accum.batches(xs)):
        with accum(model, weight=10**place):
            accum.backward(loss(place))
    expected = torch.autograd.grad(
        sum(10**i * loss(i) for i in range(3)) / 111, list(model.parameters())
    )
    assert relative(got[0], expected) <= 1e-15
