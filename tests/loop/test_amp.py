"""Mixed precision on the CPU: a real fp16 autocast, and scalers of several makes."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import data, gradients, mean_loss, network, relative, same, textbook_loop, weighted
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from accumplug import Accumulator, NonFiniteError, TornWindowError


def scaler_of(scale=1024.0, **options):
    return GradScaler(torch.get_default_device().type, init_scale=scale, **options)


def one(start=1.0):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, start)
    return layer


def run(accum, model, slope, weight=1):
    with accum(model, weight=weight):
        accum.backward((model.weight * slope).sum())


def autocast_loss(model, batch):
    with torch.autocast(torch.get_default_device().type, torch.float16):
        out = model(batch[0])
        assert out.dtype == torch.float16
        return nn.functional.mse_loss(out, batch[1])


# -- the same bits --------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0, 3.0, 5.0])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_full_windows_with_a_scaler_have_the_bits_of_the_textbook_loop(scale, clip, steps):
    """Also with a scale that is no power of two; the scale grows on the way."""
    ours, theirs = network(torch.float32), network(torch.float32)
    batches = data([4] * (4 * steps), torch.float32)
    scalers = [scaler_of(scale, growth_interval=2) for _ in range(2)]
    optimizer = AdamW(ours.parameters(), 0.01)
    accum = Accumulator(steps, optimizer=optimizer, scaler=scalers[0], max_grad_norm=clip)
    for batch in batches:
        with accum(ours):
            accum.backward(mean_loss(ours, batch))
    reference = AdamW(theirs.parameters(), 0.01)
    textbook_loop(theirs, batches, steps, reference, scaler=scalers[1], max_grad_norm=clip)
    assert same(ours, theirs)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert scalers[0].get_scale() == scale * 4


@pytest.mark.parametrize("weight", [1, 0.1, 3, 7, 5000])
@pytest.mark.parametrize("make", [SGD, AdamW])
def test_fp16_autocast_with_equal_weights_has_the_bits_of_the_textbook(weight, make):
    """Real fp16 activations; the loss that goes back is that of the textbook."""
    ours, theirs = network(torch.float32), network(torch.float32)
    batches = data([4] * 9, torch.float32)
    scaler, reference = scaler_of(), scaler_of()
    accum = Accumulator(3, optimizer=make(ours.parameters(), lr=0.01), scaler=scaler)
    for batch in batches:
        with accum(ours, weight=weight):
            accum.backward(autocast_loss(ours, batch))
    optimizer = make(theirs.parameters(), lr=0.01)
    for number, batch in enumerate(batches, 1):
        reference.scale(autocast_loss(theirs, batch) / 3).backward()
        if number % 3 == 0:
            reference.step(optimizer)
            reference.update()
            optimizer.zero_grad()
    assert same(ours, theirs)


def test_a_loss_that_is_itself_fp16_has_the_bits_of_the_textbook():
    """The division and the scale meet in fp16 there."""
    models = network(torch.float32), network(torch.float32)
    scaler, reference = scaler_of(), scaler_of()

    def loss(model, batch):
        with torch.autocast(torch.get_default_device().type, torch.float16):
            out = model(batch[0]).pow(2).mean().reshape(1)
        assert out.dtype == torch.float16
        return out

    accum = Accumulator(3, optimizer=SGD(models[0].parameters(), 0.1), scaler=scaler)
    optimizer = SGD(models[1].parameters(), 0.1)
    for number, batch in enumerate(data([4] * 9, torch.float32), 1):
        with accum(models[0]):
            accum.backward(loss(models[0], batch))
        reference.scale(loss(models[1], batch) / 3).backward()
        if number % 3 == 0:
            reference.step(optimizer)
            reference.update()
            optimizer.zero_grad()
    assert same(*models)


def test_a_second_term_goes_through_the_scaler_as_well():
    """A token mean and a mean over micro-batches, unscaled together."""
    model, got = network(torch.float32), []
    accum = Accumulator(3, optimizer=SGD(model.parameters(), 0.0), scaler=scaler_of())
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([3, 1, 4], torch.float32)
    for batch in accum.batches(batches, weigh=lambda b: len(b[0])):
        loss = mean_loss(model, batch)
        with accum(model):
            accum.backward(loss, extra=loss.sqrt())
    losses = [mean_loss(model, batch) for batch in batches]
    main = (3 * losses[0] + losses[1] + 4 * losses[2]) / 8
    extra = sum(loss.sqrt() for loss in losses) / 3
    expected = torch.autograd.grad(main + extra, list(model.parameters()))
    assert relative(got[0], expected) <= 1e-6


def test_bf16_autocast_needs_no_scaler():
    """And has the bits of the textbook, too."""
    ours, theirs = network(torch.float32), network(torch.float32)
    batches = data([4] * 6, torch.float32)

    def loss(model, batch):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return nn.functional.mse_loss(model(batch[0]), batch[1].bfloat16())

    accum = Accumulator(3, optimizer=SGD(ours.parameters(), 0.01))
    for batch in batches:
        with accum(ours):
            accum.backward(loss(ours, batch))
    optimizer = SGD(theirs.parameters(), 0.01)
    for number, batch in enumerate(batches, 1):
        (loss(theirs, batch) / 3).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert same(ours, theirs)


def test_a_tail_under_a_scaler_is_a_mean_over_its_own():
    """1024 x the gradient, unscaled once: to fp32 rounding."""
    model, got = network(torch.float32), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0), scaler=scaler_of())
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([1, 2, 3], torch.float32)
    for batch in accum.batches(batches):
        with accum(model, weight=len(batch[0])):
            accum.backward(mean_loss(model, batch))
    assert relative(got[0], weighted(model, batches, [1, 2, 3])) <= 1e-6
    assert accum.last.scale == 1024.0


# -- the scaler's part ----------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_clip_comes_after_unscale(scale):
    """A slope of 0.5 under a limit of 1 moves by 0.5, whatever the scale."""
    model = one()
    accum = Accumulator(
        1, optimizer=SGD(model.parameters(), 1.0), scaler=scaler_of(scale), max_grad_norm=1.0
    )
    run(accum, model, 0.5)
    assert model.weight.item() == 0.5
    assert accum.last.grad_norm == 0.5


def test_unscale_happens_once_though_the_window_has_many():
    """Two micro-batches of slope 2: the gradient is 2.0, not 1025 or 3."""
    model, got = one(), []
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0), scaler=scaler_of())
    accum.on_update(lambda: got.append(model.weight.grad.item()))
    for _ in range(4):
        run(accum, model, 2.0)
    assert got == [2.0, 2.0]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_overflow_skips_the_window_and_halves_the_scale_once(place):
    """1024 -> 512; weights, moments, schedule, counters and hooks stay; the next one is clean."""
    model, ran = one(), []
    optimizer = AdamW(model.parameters(), 0.1)
    scheduler, scaler = LambdaLR(optimizer, lambda n: 0.5**n), scaler_of()
    accum = Accumulator(3, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    accum.on_update(lambda: ran.append(True))
    for index in range(3):
        run(accum, model, float("inf") if index == place else 1.0)
    assert scaler.get_scale() == 512.0
    assert model.weight.item() == 1.0
    assert model.weight.grad is None
    assert not optimizer.state
    assert (accum.updates, accum.skipped, scheduler.last_epoch, ran) == (0, 1, 0, [])
    assert not accum.last.stepped
    assert accum.last.scale == 1024.0
    for _ in range(3):
        run(accum, model, 1.0)
    assert (accum.updates, accum.skipped, scheduler.last_epoch, ran) == (1, 1, 1, [True])
    assert accum.last.scale == 512.0
    assert accum.last.grad_norm == 1.0


def test_after_one_skipped_and_three_good_windows_the_schedule_stands_at_three():
    """Not at four."""
    model = one()
    optimizer = SGD(model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
    accum = Accumulator(2, optimizer=optimizer, scheduler=scheduler, scaler=scaler_of())
    for slope in (float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        run(accum, model, slope)
    assert scheduler.last_epoch == 3
    assert (accum.updates, accum.skipped) == (3, 1)


def test_a_fused_optimizer_does_not_hide_that_the_update_was_skipped():
    """GradScaler calls its step in any case; the schedule must not believe it."""
    model = one()
    optimizer = AdamW(model.parameters(), 0.1, fused=True)
    scheduler, scaler = LambdaLR(optimizer, lambda n: 0.5**n), scaler_of()
    accum = Accumulator(1, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    run(accum, model, float("inf"))
    assert (scheduler.last_epoch, accum.updates, accum.skipped) == (0, 0, 1)
    assert model.weight.item() == 1.0
    assert scaler.get_scale() == 512.0
    run(accum, model, 1.0)
    assert (scheduler.last_epoch, accum.updates) == (1, 1)
    reference = one()
    torch_optimizer = AdamW(reference.parameters(), 0.1, fused=True)
    reference.weight.sum().backward()
    torch_optimizer.step()
    assert torch.equal(model.weight, reference.weight)


def test_the_scale_is_the_same_for_all_of_a_window_and_grows_after_it():
    """growth_interval counts updates, not micro-batches."""
    model, scaler, scales = one(), scaler_of(4.0, growth_interval=2), []
    accum = Accumulator(3, optimizer=SGD(model.parameters(), 0.0), scaler=scaler)
    for _ in range(12):
        run(accum, model, 1.0)
        scales.append(scaler.get_scale())
    assert scales == [4.0] * 5 + [8.0] * 6 + [16.0]


def test_two_optimizers_on_one_scaler_are_the_textbook_of_torch():
    """unscale both, clip, step both, update once; the first overflows in the second window."""
    ours, theirs = [one(), one(2.0)], [one(), one(2.0)]
    slopes = [(1.0, 5.0), (float("inf"), 3.0), (2.0, 1.0)]
    scalers = [scaler_of(), scaler_of()]

    def optimizers_of(models):
        return [SGD(models[0].parameters(), 0.5), SGD(models[1].parameters(), 0.25)]

    accum = Accumulator(2, optimizer=optimizers_of(ours), scaler=scalers[0])
    for a, b in slopes:
        for _ in range(2):
            with accum(*ours):
                accum.backward((ours[0].weight * a + ours[1].weight * b).sum())
    optimizers = optimizers_of(theirs)
    for a, b in slopes:
        for _ in range(2):
            loss = (theirs[0].weight * a + theirs[1].weight * b).sum() / 2
            scalers[1].scale(loss).backward()
        for optimizer in optimizers:
            scalers[1].unscale_(optimizer)
        for optimizer in optimizers:
            scalers[1].step(optimizer)
        scalers[1].update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert same(ours[0], theirs[0])
    assert same(ours[1], theirs[1])
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0


def test_two_optimizers_on_one_scaler_see_a_norm_of_five_and_clip_by_it():
    """3 and 4 make 5; with Accelerate's own clip the second one saw 0.00488 of it."""
    a, b = one(0.0), one(0.0)
    accum = Accumulator(
        1,
        optimizer=[SGD(a.parameters(), 1.0), SGD(b.parameters(), 1.0)],
        scaler=scaler_of(),
        max_grad_norm=2.5,
    )
    with accum(a, b):
        accum.backward((3 * a.weight + 4 * b.weight).sum())
    assert accum.last.grad_norm == 5.0
    assert a.weight.item() == pytest.approx(-1.5, rel=1e-6)
    assert b.weight.item() == pytest.approx(-2.0, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [None, 1e9])
def test_a_bad_gradient_of_one_optimizer_does_not_reach_the_other_by_the_clip(bad, clip):
    """The scaler's rule: the one skips, the other steps on its own finite gradient."""
    a, b = one(), one()
    accum = Accumulator(
        1,
        optimizer=[SGD(a.parameters(), 1.0), SGD(b.parameters(), 0.5)],
        scaler=scaler_of(),
        max_grad_norm=clip,
    )
    with accum(a, b):
        accum.backward((bad * a.weight + b.weight).sum())
    assert (a.weight.item(), b.weight.item()) == (1.0, 0.5)


def test_the_schedulers_of_two_optimizers_tick_where_theirs_has_stepped():
    """The first one overflowed."""
    a, b = one(), one()
    optimizers = [SGD(a.parameters(), 1.0), SGD(b.parameters(), 0.5)]
    schedulers = [LambdaLR(o, lambda n: 0.5**n) for o in optimizers]
    accum = Accumulator(1, optimizer=optimizers, scheduler=schedulers, scaler=scaler_of())
    with accum(a, b):
        accum.backward((float("inf") * a.weight + b.weight).sum())
    assert [s.last_epoch for s in schedulers] == [0, 1]


def test_an_optimizer_whose_parameters_were_not_used_does_not_trouble_the_scaler():
    """torch asserts that some gradient was looked at; here the other one's was."""
    a, b = one(), one()
    accum = Accumulator(
        2, optimizer=[SGD(a.parameters(), 1.0), AdamW(b.parameters(), 0.5)], scaler=scaler_of()
    )
    for _ in range(2):
        with accum(a, b):
            accum.backward((2 * a.weight).sum())
    assert (a.weight.item(), b.weight.item()) == (-1.0, 1.0)
    assert accum.updates == 1


@pytest.mark.filterwarnings("ignore:none of the")
def test_a_window_without_any_gradient_leaves_the_scaler_alone():
    """All parameters were unused: torch's scaler asserts if it is asked to update then."""
    model, other, scaler = one(), one(), scaler_of(growth_interval=1)
    accum = Accumulator(1, optimizer=SGD(model.parameters(), 1.0), scaler=scaler)
    with accum(model):
        accum.backward(other.weight.sum())
    assert scaler.get_scale() == 1024.0
    run(accum, model, 1.0)
    assert (model.weight.item(), scaler.get_scale()) == (0.0, 2048.0)


def test_a_window_without_weight_leaves_the_scaler_alone():
    """No update of the scale either, in the first window and in a later one."""
    model, scaler = one(), scaler_of(growth_interval=1)
    accum = Accumulator(1, optimizer=SGD(model.parameters(), 1.0), scaler=scaler)
    for weight, scale in ((0, 1024.0), (1, 2048.0), (0, 2048.0), (1, 4096.0)):
        run(accum, model, 1.0, weight)
        assert scaler.get_scale() == scale
    assert (accum.updates, accum.skipped) == (2, 2)


def test_two_accumulators_on_one_scaler_do_not_change_each_others_windows():
    """The first one's update makes the scale grow inside of the second one's window."""
    models, scaler = [one(), one()], scaler_of(4.0, growth_interval=1)
    accums = [
        Accumulator(2, optimizer=SGD(model.parameters(), 1.0), scaler=scaler) for model in models
    ]
    for _ in range(3):
        for accum, model in zip(accums, models, strict=True):
            run(accum, model, 1.0)
            run(accum, model, 1.0)
            run(accum, model, 1.0)
    assert [a.updates for a in accums] == [4, 4]
    assert [m.weight.item() for m in models] == [-3.0, -3.0]
    assert [a.last.grad_norm for a in accums] == [1.0, 1.0]


@pytest.mark.parametrize("takes_step", [True, False])
def test_a_scale_that_is_set_in_the_middle_of_a_window_does_not_change_its_gradient(takes_step):
    """Slopes of 2 at a scale of 4 and then of 8 are a gradient of 2.0, not of 3.0 or 1.5."""
    model, scaler, got = one(), scaler_of(4.0), []
    optimizer = SGD(model.parameters(), 0.0)
    optimizer.register_step_pre_hook(lambda *_: got.append(model.weight.grad.item()))
    accum = Accumulator(2, optimizer=optimizer if takes_step else None, scaler=scaler)
    for place in range(2):
        with accum(model) as micro:
            accum.backward((model.weight * 2.0).sum())
            if micro.closes and not takes_step:
                scaler.step(optimizer)
                scaler.update()
        if place == 0:
            scaler.update(8.0)
    assert got == [2.0]


def test_unscale_in_a_micro_batch_that_does_not_close_is_seen():
    """In a plain loop it would divide a partial sum, and then the scaled rest is added."""
    model, scaler = one(), scaler_of()
    optimizer = SGD(model.parameters(), 0.0)
    accum = Accumulator(2, scaler=scaler)

    def block():
        with accum(model):
            accum.backward((model.weight * 2.0).sum())
            scaler.unscale_(optimizer)

    with pytest.raises(TornWindowError, match="clip and unscale belong after the micro-batch tha"):
        block()


# -- nonfinite with a scaler ----------------------------------------------------------------


def test_raise_names_the_scale_and_goes_on_after_discard():
    """The scaler is not left between unscale and update."""
    model, scaler = one(), scaler_of()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 1.0), scaler=scaler, nonfinite="raise")
    run(accum, model, float("inf"))
    with pytest.raises(NonFiniteError, match=r"while it searches its scale an overflow is normal"):
        run(accum, model, 1.0)
    assert scaler.get_scale() == 512.0
    accum.discard()
    for _ in range(2):
        run(accum, model, 0.5)
    assert model.weight.item() == 0.5
    assert accum.updates == 1


def test_skip_micro_batch_under_a_scaler_keeps_the_others_and_lowers_the_scale():
    """A finite loss with an infinite gradient means that the scale is too large."""
    model, scaler = one(), scaler_of()
    accum = Accumulator(
        3, optimizer=SGD(model.parameters(), 1.0), scaler=scaler, nonfinite="skip_micro_batch"
    )
    for slope in (1.0, 1e37, 0.5):
        with accum(model):
            accum.backward((model.weight * slope).sum() * 1.0)
    assert model.weight.item() == 0.25
    assert (accum.updates, accum.last.weight) == (1, 2.0)
    assert accum.last.grad_norm == 0.75
    assert scaler.get_scale() == 512.0


def test_skip_micro_batch_does_not_blame_the_scale_for_a_bad_loss():
    """nan in the data: the scale stays."""
    model, scaler = one(), scaler_of()
    accum = Accumulator(
        2, optimizer=SGD(model.parameters(), 1.0), scaler=scaler, nonfinite="skip_micro_batch"
    )
    run(accum, model, float("nan"))
    run(accum, model, 0.5)
    assert model.weight.item() == 0.5
    assert scaler.get_scale() == 1024.0


def test_skip_micro_batch_with_every_one_overflowing_finds_a_smaller_scale():
    """Or it would never train."""
    model, scaler = one(), scaler_of(2.0**127)
    accum = Accumulator(
        2, optimizer=SGD(model.parameters(), 1.0), scaler=scaler, nonfinite="skip_micro_batch"
    )
    for _ in range(2):
        run(accum, model, 16.0)
    assert (accum.updates, accum.skipped) == (0, 1)
    assert scaler.get_scale() == 2.0**126
    for _ in range(10):
        run(accum, model, 16.0)
    assert accum.updates > 0


# -- the magnitude of what goes back --------------------------------------------------------


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize(
    "weights",
    [[2048] * 4, [5000, 4000, 3000, 6000], [1, 5000, 5000, 5000], [5000, 1, 1, 5000], [0, 5000, 1]],
    ids=str,
)
def test_weights_of_thousands_do_not_overflow_fp16(kind, weights):
    """At a scale that the mean loss just bears, no window is skipped, in fp16 activations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 2))
    batches = data([4] * len(weights), torch.float32)
    accum, got = (
        Accumulator(len(weights), optimizer=SGD(model.parameters(), 0.0), scaler=scaler_of(8192.0)),
        [],
    )
    accum.on_update(lambda: got.append(gradients(model)))
    for _ in range(2):
        for batch, weight in zip(batches, weights, strict=True):
            with accum(model, weight=kind(weight)):
                accum.backward(autocast_loss(model, batch))
    assert (accum.updates, accum.skipped) == (2, 0)
    # fp16 has 11 bits: the gradients agree to a few of its roundings
    assert relative(got[0], weighted(model, batches, weights)) < 5e-3
    assert relative(got[1], got[0]) < 5e-3


def test_the_scale_that_the_textbook_bears_is_borne():
    """Forty windows with 2048 tokens a micro-batch, from 65536 on: as many are skipped as there."""
    ours, theirs = network(torch.float32), network(torch.float32)
    scaler, reference = scaler_of(65536.0), scaler_of(65536.0)
    accum = Accumulator(2, optimizer=SGD(ours.parameters(), 0.01), scaler=scaler)
    optimizer = SGD(theirs.parameters(), 0.01)
    for index, batch in enumerate(data([4] * 80, torch.float32)):
        with accum(ours, weight=2048):
            accum.backward(autocast_loss(ours, batch))
        reference.scale(autocast_loss(theirs, batch) / 2).backward()
        if index % 2:
            reference.step(optimizer)
            reference.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == reference.get_scale()
    assert same(ours, theirs)


# -- scalers of other makes -----------------------------------------------------------------


def test_a_scaler_that_is_not_enabled_is_none():
    """The identity, with the bits of the loop without one."""
    ours, theirs = network(torch.float32), network(torch.float32)
    batches = data([4] * 6, torch.float32)
    scaler = GradScaler("cpu", enabled=False)
    accum = Accumulator(3, optimizer=SGD(ours.parameters(), 0.1), scaler=scaler)
    for batch in batches:
        with accum(ours):
            accum.backward(mean_loss(ours, batch))
    textbook_loop(theirs, batches, 3, SGD(theirs.parameters(), 0.1))
    assert same(ours, theirs)
    assert accum.last.scale == 1.0


class Duck:
    """A scaler of another make: nothing private of torch's in it."""

    def __init__(self, scale):
        self.value, self.log = scale, []

    def is_enabled(self):
        return True

    def scale(self, outputs):
        return outputs * self.value

    def get_scale(self):
        return self.value

    def unscale_(self, optimizer):
        self.log.append("unscale")
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(self.value)

    def step(self, optimizer):
        self.log.append("step")
        grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
        self.bad = any(g is not None and not torch.isfinite(g).all() for g in grads)
        if not self.bad:
            optimizer.step()

    def update(self):
        self.log.append("update")
        if self.bad:
            self.value /= 2


def test_a_scaler_of_another_make_is_used_by_its_methods():
    """scale, unscale_, step, update, once each for a window, in this order."""
    model, duck = one(), Duck(8.0)
    optimizer = SGD(model.parameters(), 1.0)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
    accum = Accumulator(
        2, optimizer=optimizer, scheduler=scheduler, scaler=duck, max_grad_norm=10.0
    )
    for slope in (1.0, 0.0, float("inf"), 1.0, 1.0, 0.0):
        run(accum, model, slope)
    assert duck.log == ["unscale", "step", "update"] * 3
    assert model.weight.item() == 1.0 - 0.5 - 0.5 * 0.5
    assert (accum.updates, accum.skipped, scheduler.last_epoch, duck.value) == (2, 1, 2, 4.0)


# -- loops that step themselves -------------------------------------------------------------


def test_a_loop_that_steps_itself_hands_its_scaler_over_for_the_backward():
    """The textbook's lines follow when the micro-batch closes; the same bits."""
    ours, theirs = network(torch.float32), network(torch.float32)
    batches = data([4] * 9, torch.float32)
    optimizer, scaler = SGD(ours.parameters(), 0.1), scaler_of()
    accum = Accumulator(3, scaler=scaler)
    for batch in batches:
        with accum(ours) as micro:
            accum.backward(mean_loss(ours, batch))
            if micro.closes:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    reference = SGD(theirs.parameters(), 0.1)
    textbook_loop(theirs, batches, 3, reference, scaler=scaler_of(), max_grad_norm=0.5)
    assert same(ours, theirs)
    assert accum.updates == 3


def test_a_loop_whose_scaler_skips_is_not_counted_as_an_update():
    """The hook does not run, and the window's scale is the one that it had."""
    model, ran, scaler = one(), [], scaler_of()
    optimizer, accum = SGD(model.parameters(), 1.0), Accumulator(1, scaler=scaler)
    accum.on_update(lambda: ran.append(accum.updates))
    for slope in (float("inf"), 1.0):
        with accum(model):
            accum.backward((model.weight * slope).sum())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if math.isinf(slope):
            assert not accum.last.stepped
            assert accum.last.scale == 1024.0
    assert ran == [1]
    assert (accum.updates, accum.skipped, accum.last.scale) == (1, 1, 512.0)
