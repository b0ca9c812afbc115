"""The close of a window: norm, clip, step, schedulers; what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import big_batch, data, gradients, mean_loss, network, relative
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR

from accumplug import Accumulator, NonFiniteError, TornWindowError
from accumplug.core.optimizer_step import scale_state, take_update, total_norm, unscaled
from accumplug.errors import MovedError


def one(start=0.0):
    """A model of one weight; `run` makes its gradient any number."""
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, start)
    return layer


def run(accum, model, slope, weight=1):
    with accum(model, weight=weight):
        accum.backward((model.weight * slope).sum())


def test_one_clip_for_a_window_after_the_mean():
    """Contributions +4 and -2: their mean is +1. Clipping each to 1 would give 0."""
    model = one()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 1.0), max_grad_norm=1.0)
    run(accum, model, 4.0)
    run(accum, model, -2.0)
    assert model.weight.item() == pytest.approx(-1.0, rel=1e-5)  # torch adds 1e-6 to the norm
    assert accum.last.grad_norm == 1.0


def test_clip_comes_after_the_division():
    """Four slopes of 0.9 have a mean of 0.9, which is below 1; their sum is not."""
    model = one()
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 1.0), max_grad_norm=1.0)
    for _ in range(4):
        run(accum, model, 0.9)
    assert model.weight.item() == pytest.approx(-0.9, rel=1e-15)


@pytest.mark.parametrize("sizes", [[6], [1, 2, 3], [1, 1, 1, 1, 2]])
def test_the_norm_is_that_of_the_big_batch_before_clipping(sizes):
    """However it was split; and the clipped gradient is that of torch."""
    model, got = network(), []
    batches = data(sizes)
    accum = Accumulator(7, optimizer=SGD(model.parameters(), 0.0), max_grad_norm=0.01)
    accum.on_update(lambda: got.append(gradients(model)))
    for batch in accum.batches(batches):
        with accum(model, weight=len(batch[0])):
            accum.backward(mean_loss(model, batch))
    reference = network()
    for p, g in zip(reference.parameters(), big_batch(model, batches), strict=True):
        p.grad = g
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    assert accum.last.grad_norm == pytest.approx(float(norm), rel=1e-14)
    assert relative(got[0], gradients(reference)) <= 1e-13


def test_a_norm_below_the_limit_changes_no_bit():
    """torch's coefficient is clamped to 1."""
    models = []
    for limit in (None, 1e9):
        model = network()
        accum = Accumulator(1, optimizer=SGD(model.parameters(), 0.1), max_grad_norm=limit)
        with accum(model):
            accum.backward(mean_loss(model, data([4])[0]))
        models.append(model)
    assert torch.equal(models[0][0].weight, models[1][0].weight)


def test_the_norm_covers_what_the_optimizers_step_and_nothing_else():
    """A parameter that is not trained does not make the trained ones smaller."""
    model = network()
    accum = Accumulator(1, optimizer=SGD(model[2].parameters(), 0.0))
    (batch,) = data([4])
    expected = big_batch(model, [batch])[2:]
    with accum(model):
        accum.backward(mean_loss(model, batch))
    norm = torch.stack([g.norm() for g in expected]).norm()
    assert accum.last.grad_norm == pytest.approx(float(norm), rel=1e-14)


def test_the_norm_of_sparse_and_dense_gradients_together():
    """Rows that appear twice are added up first: 2 in row 1, 1 in row 0, and a dense 2."""
    table = nn.Embedding(4, 1, sparse=True).double()
    dense = one()
    table(torch.tensor([0, 1, 1])).sum().backward()
    (2 * dense.weight).sum().backward()
    norm = total_norm([table.weight, dense.weight])
    assert float(norm) == pytest.approx(math.sqrt(1 + 4 + 4), rel=1e-15)


@pytest.mark.filterwarnings("ignore:none of the")
def test_a_window_without_any_gradient_moves_nothing():
    """All its parameters were unused; AdamW does not step on None."""
    model, other = network(), one()
    accum = Accumulator(1, optimizer=AdamW(model.parameters(), 0.1))
    with accum(model):
        accum.backward((other.weight * 2).sum())
    assert torch.equal(model[0].weight, network()[0].weight)


@pytest.mark.parametrize("start_with_zeros", [False, True])
def test_an_unused_parameter_is_not_moved_by_adamw(start_with_zeros):
    """After an update gradients are None, not zeros, which AdamW would step on by its decay."""
    model, spare = one(1.0), nn.Parameter(torch.ones(()))
    optimizer = AdamW([*model.parameters(), spare], lr=0.1)
    accum = Accumulator(2, optimizer=optimizer)
    if start_with_zeros:
        spare.grad = torch.zeros(())
    for _ in range(4):
        run(accum, model, 1.0)
    assert spare.item() == 1.0
    assert spare.grad is None
    assert spare not in optimizer.state


def test_optimizer_state_advances_once_for_a_window():
    """Eight micro-batches in windows of four are two steps of AdamW."""
    model = network()
    optimizer = AdamW(model.parameters(), 0.1)
    accum = Accumulator(4, optimizer=optimizer)
    for batch in data([2] * 8):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


# -- not finite, without a scaler -----------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_not_finite_is_no_update_and_the_next_window_is_clean(bad, place, clip):
    """Weights, optimizer state, schedule and counters stay; nothing of it is left."""
    model = one(1.0)
    optimizer = Adam(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
    accum = Accumulator(2, optimizer=optimizer, scheduler=scheduler, max_grad_norm=clip)
    for index in range(2):
        run(accum, model, bad if index == place else 1.0)
    assert model.weight.item() == 1.0
    assert not optimizer.state
    assert model.weight.grad is None
    assert (accum.updates, accum.skipped, scheduler.last_epoch) == (0, 1, 0)
    assert not accum.last.stepped
    assert not math.isfinite(accum.last.grad_norm)
    for _ in range(2):
        run(accum, model, 0.25)
    assert (accum.updates, accum.skipped, scheduler.last_epoch) == (1, 1, 1)
    assert accum.last.grad_norm == 0.25


def test_several_optimizers_without_a_scaler_skip_together():
    """One gradient is not finite: it is one window, and one update."""
    a, b = one(1.0), one(1.0)
    accum = Accumulator(1, optimizer=[SGD(a.parameters(), 1.0), SGD(b.parameters(), 1.0)])
    with accum(a, b):
        accum.backward((a.weight * float("nan") + b.weight).sum())
    assert (a.weight.item(), b.weight.item()) == (1.0, 1.0)


def test_raise_says_the_norm_and_leaves_the_gradients_to_be_looked_at():
    """Until discard() the window is torn; then the next one is right."""
    model = one(1.0)
    accum = Accumulator(1, optimizer=SGD(model.parameters(), 1.0), nonfinite="raise")
    with pytest.raises(NonFiniteError, match=r"its norm is inf.* left in place to be looked at"):
        run(accum, model, float("inf"))
    assert math.isinf(model.weight.grad)
    assert model.weight.item() == 1.0
    with pytest.raises(TornWindowError, match=r"not finite.*accum.discard\(\)"):
        run(accum, model, 1.0)
    accum.discard()
    assert model.weight.grad is None
    run(accum, model, 1.0)
    assert model.weight.item() == 0.0
    assert (accum.updates, accum.skipped) == (1, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_skip_micro_batch_divides_by_what_was_really_added(bad, place):
    """One of three is bad: the mean of the two others by weight, and an update."""
    model = one()
    accum = Accumulator(3, optimizer=SGD(model.parameters(), 1.0), nonfinite="skip_micro_batch")
    slopes, weights = [1.0, 2.0, 4.0], [1, 2, 3]
    for index, (slope, weight) in enumerate(zip(slopes, weights, strict=True)):
        run(accum, model, bad if index == place else slope, weight)
    good = [i for i in range(3) if i != place]
    expected = sum(weights[i] * slopes[i] for i in good) / sum(weights[i] for i in good)
    assert model.weight.item() == pytest.approx(-expected, rel=1e-15)
    assert accum.last.weight == sum(weights[i] for i in good)
    assert (accum.updates, accum.skipped, accum.last.micro_batches) == (1, 0, 3)
    assert accum.last.loss == 0.0  # the weight was 0 at the start


def test_skip_micro_batch_drops_a_loss_that_is_nan_though_its_gradient_is_not():
    """cross_entropy over ignored labels only: nan, with a gradient of 0 on the CPU."""
    model = nn.Linear(2, 3).double()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0), nonfinite="skip_micro_batch")
    got = []
    accum.on_update(lambda: got.append(gradients(model)))
    x = torch.randn(4, 2, dtype=torch.float64)
    labels = [torch.tensor([0, 1, 2, 0]), torch.full((4,), -100)]
    expected = torch.autograd.grad(
        nn.functional.cross_entropy(model(x), labels[0]), list(model.parameters())
    )
    for y in labels:
        with accum(model):
            accum.backward(nn.functional.cross_entropy(model(x), y))
    assert relative(got[0], expected) <= 1e-15
    assert math.isfinite(accum.last.loss)


def test_skip_micro_batch_with_nothing_left_is_no_update():
    """All of the window was bad."""
    model = one(1.0)
    optimizer = AdamW(model.parameters(), 0.1)
    accum = Accumulator(2, optimizer=optimizer, nonfinite="skip_micro_batch")
    for _ in range(2):
        run(accum, model, float("nan"))
    assert model.weight.item() == 1.0
    assert model.weight.grad is None
    assert not optimizer.state
    assert (accum.updates, accum.skipped) == (0, 1)


def test_skip_micro_batch_changes_no_bit_where_all_is_finite():
    """Each micro-batch runs on an empty gradient and is added to the sum: the same additions."""
    models = []
    for nonfinite in ("skip_window", "skip_micro_batch"):
        model = network()
        accum = Accumulator(3, optimizer=SGD(model.parameters(), 0.1), nonfinite=nonfinite)
        for batch in data([4] * 9):
            with accum(model):
                accum.backward(mean_loss(model, batch))
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


# -- schedulers -----------------------------------------------------------------------------


def test_each_scheduler_follows_its_own_optimizer():
    """Two optimizers with a scheduler each: both tick once for each update."""
    a, b = one(1.0), one(1.0)
    optimizers = [SGD(a.parameters(), 1.0), SGD(b.parameters(), 1.0)]
    schedulers = [LambdaLR(o, lambda n: 0.5**n) for o in optimizers]
    accum = Accumulator(2, optimizer=optimizers, scheduler=schedulers)
    for _ in range(4):
        with accum(a, b):
            accum.backward((a.weight + b.weight).sum())
    assert [s.last_epoch for s in schedulers] == [2, 2]


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of torch 2.8 about itself
def test_a_scheduler_made_of_schedulers_ticks_as_one():
    """SequentialLR steps its parts itself: warm-up of 2, then decay."""
    model = one()
    optimizer = SGD(model.parameters(), 1.0)
    parts = [LinearLR(optimizer, 0.5, 1.0, 2), LambdaLR(optimizer, lambda n: 0.1**n)]
    scheduler = SequentialLR(optimizer, parts, milestones=[2])
    accum, rates = Accumulator(2, optimizer=optimizer, scheduler=scheduler), []
    accum.on_update(lambda: rates.append(optimizer.param_groups[0]["lr"]))
    for _ in range(8):
        run(accum, model, 1.0)
    assert rates == pytest.approx([0.75, 1.0, 0.1, 0.01])


def test_anything_with_a_step_is_a_scheduler():
    """A user's own; it ticks with any update."""

    class Mine:
        ticks = 0

        def step(self):
            self.ticks += 1

    model, mine = one(), Mine()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 1.0), scheduler=mine)
    for _ in range(5):
        run(accum, model, 1.0)
    assert mine.ticks == 2


# -- the function by itself -----------------------------------------------------------------


def test_take_update_works_without_an_accumulator():
    """It takes a finished gradient, whoever finished it."""
    model = one(1.0)
    model.weight.grad = torch.full((1, 1), 4.0, dtype=torch.float64)
    optimizer = SGD(model.parameters(), 1.0)
    outcome = take_update([model.weight], [optimizer], [], None, 2.0, "skip_window")
    assert outcome.stepped
    assert float(outcome.grad_norm) == 4.0
    assert model.weight.item() == pytest.approx(-1.0, abs=1e-5)


@pytest.mark.parametrize(("total", "stepped"), [(0.0, False), (3.0, True)])
def test_take_update_makes_none_of_a_total_weight_of_zero(total, stepped):
    """It reads the total together with the norm."""
    model = one(1.0)
    model.weight.grad = torch.zeros(1, 1, dtype=torch.float64)
    optimizer = AdamW(model.parameters(), 1.0)
    outcome = take_update([model.weight], [optimizer], [], None, None, "raise", torch.tensor(total))
    assert outcome.stepped is stepped
    assert bool(optimizer.state) is stepped


def test_a_scaler_between_unscale_and_update_is_known():
    """Nothing may be saved there."""
    model = one().float()
    optimizer, scaler = SGD(model.parameters(), 1.0), torch.amp.GradScaler("cpu")
    assert not unscaled(scaler)
    scaler.scale(model.weight.sum()).backward()
    assert not unscaled(scaler)
    scaler.unscale_(optimizer)
    assert unscaled(scaler)
    scaler.step(optimizer)
    assert unscaled(scaler)
    scaler.update()
    assert not unscaled(scaler)
    assert not unscaled(None)


@pytest.mark.parametrize(
    ("name", "reads"), [("_per_optimizer_states", unscaled), ("_scale", scale_state)]
)
def test_a_scaler_that_has_lost_a_field_is_named(name, reads):
    """Else a step could be taken on infinities, or a torn window not be noticed."""
    scaler = torch.amp.GradScaler("cpu")
    delattr(scaler, name)
    with pytest.raises(MovedError, match=f"torch .* moved GradScaler.{name}"):
        reads(scaler)
    assert not reads(object())  # another kind of scaler has none
