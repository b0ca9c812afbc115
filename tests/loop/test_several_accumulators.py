"""Several Accumulators in one loop: one for each optimizer, and none in another's way (GAN)."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from accelerate import Accelerator
from textbook import relative
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from accumplug import Accumulator

ROWS = 12


def judge(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def maker(dtype=torch.float64):
    torch.manual_seed(2)
    return nn.Linear(3, 3).to(dtype)


def noise(dtype=torch.float64, rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 2, 3, generator=generator, dtype=dtype)


def judge_loss(d, g, z, detach):
    fake = g(z)
    return (d(z + 1).exp().mean() + (-d(fake.detach() if detach else fake)).exp().mean()) / 2


def maker_loss(d, g, z):
    return d(g(z)).exp().mean()


def references(batches, steps, detach):
    """The gradients of each window by one graph over it; the weights stand still."""
    d, g = judge(batches.dtype), maker(batches.dtype)
    of_d, of_g = [], []
    for start in range(0, len(batches), steps):
        window = batches[start : start + steps]
        loss = sum(judge_loss(d, g, z, detach) for z in window) / len(window)
        of_d.append(torch.autograd.grad(loss, list(d.parameters()), retain_graph=True))
        loss = sum(maker_loss(d, g, z) for z in window) / len(window)
        of_g.append(torch.autograd.grad(loss, list(g.parameters())))
    return of_d, of_g


def watch(optimizer, model):
    """What stands in `.grad` whenever the optimizer steps."""
    found = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append([p.grad.clone() for p in model.parameters()])
    )
    return found


def check(found, expected, tolerance):
    assert len(found) == len(expected)
    for got, reference in zip(found, expected, strict=True):
        assert relative(got, reference) <= tolerance


@pytest.mark.parametrize("order", ["judge first", "maker first"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("steps", [(2, 2), (2, 3), (4, 1)], ids=str)
def test_two_accumulators_in_a_plain_loop_each_have_their_own_windows(order, detach, steps):
    """Form (a): every gradient equals its own reference; the other's loss leaves nothing in it."""
    d, g, batches = judge(), maker(), noise()
    optimizers = [SGD(d.parameters(), 0.0), SGD(g.parameters(), 0.0)]
    found = [watch(optimizers[0], d), watch(optimizers[1], g)]
    of_d = Accumulator(steps[0], optimizer=optimizers[0])
    of_g = Accumulator(steps[1], optimizer=optimizers[1])
    for z in batches:
        for turn in ("judge", "maker") if order == "judge first" else ("maker", "judge"):
            if turn == "judge":
                with of_d(d):
                    of_d.backward(judge_loss(d, g, z, detach))
            else:
                with of_g(g):
                    of_g.backward(maker_loss(d, g, z))
    assert (of_d.updates, of_g.updates) == (ROWS // steps[0], ROWS // steps[1])
    check(found[0], references(batches, steps[0], detach)[0], 1e-14)
    check(found[1], references(batches, steps[1], detach)[1], 1e-14)
    assert all(p.requires_grad for p in [*d.parameters(), *g.parameters()])


@pytest.mark.parametrize("order", ["judge first", "maker first"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("rows", [6, 7])
def test_two_accumulators_on_one_accelerator_each_have_their_own_windows(order, detach, rows):
    """Form (b), 6 batches, 2 steps: 3 and 3 updates; with 7 a tail for each."""
    accelerator = Accelerator(cpu=True)
    batches = noise(torch.float32, rows)
    d, g = judge(torch.float32), maker(torch.float32)
    inner = [SGD(d.parameters(), 0.0), SGD(g.parameters(), 0.0)]
    found = [watch(inner[0], d), watch(inner[1], g)]
    d, g, *optimizers, loader = accelerator.prepare(
        d, g, *inner, DataLoader(TensorDataset(batches), batch_size=None)
    )
    accums = [Accumulator(2, accelerator=accelerator) for _ in range(2)]

    def turn_of(which, z):
        model = (d, g)[which]
        with accums[which](model):
            loss = maker_loss(d, g, z) if which else judge_loss(d, g, z, detach)
            accelerator.backward(loss)
            optimizers[which].step()
            optimizers[which].zero_grad()

    for (z,) in loader:
        for which in (0, 1) if order == "judge first" else (1, 0):
            turn_of(which, z)
    assert [a.updates for a in accums] == [(rows + 1) // 2] * 2
    assert [a.epoch for a in accums] == [1, 1]
    of_d, of_g = references(batches, 2, detach)
    check(found[0], of_d, 1e-6)
    check(found[1], of_g, 1e-6)


def test_two_accumulators_on_one_accelerator_that_take_the_steps():
    """accelerator= and optimizer= for each of them."""
    accelerator = Accelerator(cpu=True)
    batches = noise(torch.float32, 6)
    d, g = judge(torch.float32), maker(torch.float32)
    inner = [SGD(d.parameters(), 0.0), SGD(g.parameters(), 0.0)]
    found = [watch(inner[0], d), watch(inner[1], g)]
    d, g, *optimizers, loader = accelerator.prepare(
        d, g, *inner, DataLoader(TensorDataset(batches), batch_size=None)
    )
    of_d, of_g = [Accumulator(2, accelerator=accelerator, optimizer=o) for o in optimizers]
    for (z,) in loader:
        with of_d(d):
            accelerator.backward(judge_loss(d, g, z, True))
        with of_g(g):
            accelerator.backward(maker_loss(d, g, z))
    expected = references(batches, 2, True)
    check(found[0], expected[0], 1e-6)
    check(found[1], expected[1], 1e-6)


def test_blocks_of_two_accumulators_may_be_nested():
    """The judge's block around the maker's; both windows are right, and so are the flags after."""
    accelerator = Accelerator(cpu=True)
    batches = noise(torch.float32, 6)
    d, g = judge(torch.float32), maker(torch.float32)
    inner = [SGD(d.parameters(), 0.0), SGD(g.parameters(), 0.0)]
    found, flags = [watch(inner[0], d), watch(inner[1], g)], []
    d, g, *optimizers = accelerator.prepare(d, g, *inner)
    of_d, of_g = Accumulator(2, accelerator=accelerator), Accumulator(3, accelerator=accelerator)
    for z in batches:
        with of_d(d):
            accelerator.backward(judge_loss(d, g, z, True))
            with of_g(g):
                accelerator.backward(maker_loss(d, g, z))
                flags.append(accelerator.sync_gradients)
                optimizers[1].step()
                optimizers[1].zero_grad()
            flags.append(accelerator.sync_gradients)
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert flags == [False, False, False, True, True, False, False, True, False, False, True, True]
    assert "backward" not in vars(accelerator)
    check(found[0], references(batches, 2, True)[0], 1e-6)
    check(found[1], references(batches, 3, True)[1], 1e-6)


def test_one_loader_may_feed_two_accumulators():
    """Each `batches` around the other: seven items, windows of 2, 2, 2 and 1 for both."""
    d, g = judge(), maker()
    of_d = Accumulator(2, optimizer=SGD(d.parameters(), 0.0))
    of_g = Accumulator(2, optimizer=SGD(g.parameters(), 0.0))
    sizes = [], []
    of_d.on_update(lambda: sizes[0].append(of_d.last.micro_batches))
    of_g.on_update(lambda: sizes[1].append(of_g.last.micro_batches))
    for z in of_g.batches(of_d.batches(noise(rows=7))):
        with of_d(d):
            of_d.backward(judge_loss(d, g, z, True))
        with of_g(g):
            of_g.backward(maker_loss(d, g, z))
    assert sizes == ([2, 2, 2, 1], [2, 2, 2, 1])
    assert (of_d.epoch, of_g.epoch) == (1, 1)


def test_a_model_that_joins_in_the_middle_of_a_window_brings_nothing_along():
    """What other losses have left in its gradients is not of this window."""
    one, two = nn.Linear(3, 1, bias=False).double(), nn.Linear(3, 1, bias=False).double()
    ones = torch.ones(1, 3, dtype=torch.float64)
    accum = Accumulator(2)
    two(ones).mean().backward()
    with accum(one):
        accum.backward(one(ones).mean())
    with accum(one, two):
        accum.backward((one(ones) + two(ones)).mean())
    assert torch.equal(one.weight.grad, ones)
    assert torch.equal(two.weight.grad, ones / 2)


def test_one_block_of_a_single_accumulator_may_hold_both_models():
    """accumulate(D, G) in other words: one window, one sum of losses."""
    d, g, batches = judge(), maker(), noise()
    parameters = [*d.parameters(), *g.parameters()]
    optimizer = SGD(parameters, 0.0)
    found = []
    optimizer.register_step_pre_hook(lambda *_: found.append([p.grad.clone() for p in parameters]))
    accum = Accumulator(3, optimizer=optimizer)
    for z in batches:
        with accum(d, g):
            accum.backward(judge_loss(d, g, z, False))
    loss = sum(judge_loss(d, g, z, False) for z in batches[:3]) / 3
    assert relative(found[0], torch.autograd.grad(loss, parameters)) <= 1e-14
    assert accum.updates == 4


def test_requires_grad_comes_back_when_a_backward_raises():
    """The other's parameters are only spared, not frozen."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError

    d, g = judge(), maker()
    of_d = Accumulator(2, optimizer=SGD(d.parameters(), 0.0))
    of_g = Accumulator(2, optimizer=SGD(g.parameters(), 0.0))
    with of_d(d):
        of_d.backward(judge_loss(d, g, noise()[0], True))
    with pytest.raises(MemoryError), of_g(g):
        of_g.backward(Broken.apply(maker_loss(d, g, noise()[0])))
    assert all(p.requires_grad for p in d.parameters())


def test_windows_that_share_a_parameter_are_refused_or_right():
    """A common trunk under two Accumulators: their sums would mix in it."""
    trunk, heads = maker(), [nn.Linear(3, 1).double() for _ in range(2)]
    accums = [
        Accumulator(2, optimizer=SGD([*trunk.parameters(), *head.parameters()], 0.0))
        for head in heads
    ]

    def loop():
        for z in noise():
            for accum, head in zip(accums, heads, strict=True):
                with accum(trunk, head):
                    accum.backward(head(trunk(z)).mean())

    with pytest.raises(RuntimeError, match="torn after 1 of 2 micro-batches"):
        loop()


def test_a_leftover_accumulator_with_a_pending_window_does_not_stop_a_new_one():
    """A notebook cell that was interrupted and is run again, with the same model and optimizer."""
    model = maker()
    optimizer = SGD(model.parameters(), 1.0)

    def interrupted_cell():
        accum = Accumulator(2, optimizer=optimizer)
        accum.on_update(lambda: accum.last)  # a cycle, so that it stays
        with accum(model):
            accum.backward(model(noise()[0]).mean())

    interrupted_cell()
    expected = maker()
    loss = (expected(noise()[0]).mean() + expected(noise()[1]).mean()) / 2
    gradient = torch.autograd.grad(loss, list(expected.parameters()))
    new = Accumulator(2, optimizer=optimizer)
    for z in noise()[:2]:
        with new(model):
            new.backward(model(z).mean())
    for p, start, g in zip(model.parameters(), expected.parameters(), gradient, strict=True):
        assert torch.equal(p, start - g)


def test_a_model_whose_accumulator_is_gone_is_not_kept_by_the_others():
    """Its weights and gradients are memory."""
    model = maker()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0))

    def other():
        model_b = maker()
        accum_b = Accumulator(2, optimizer=SGD(model_b.parameters(), 0.0))
        for one, its in ((accum_b, model_b), (accum, model)):
            with one(its):
                one.backward(its(noise()[0]).mean())
        return weakref.ref(model_b.weight)

    weight = other()
    gc.collect()
    assert weight() is None


def test_nothing_stays_hooked_on_an_optimizer_when_its_accumulator_is_gone():
    """What was put on a user's object is removed again, when another Accumulator is made."""
    model = maker()
    optimizer = AdamW(model.parameters())
    for _ in range(3):
        accum = Accumulator(2, optimizer=optimizer)
        with accum(model):
            accum.backward(model(noise()[0]).mean())
    del accum
    gc.collect()
    Accumulator(2, optimizer=AdamW(maker().parameters()))
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
