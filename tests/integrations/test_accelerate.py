"""Loops that have an Accelerator: every other line stays as it was."""

from __future__ import annotations

import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from textbook import (
    big_batch,
    data,
    gradients,
    mean_loss,
    network,
    relative,
    same,
    textbook_loop,
)
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accumplug import Accumulator, TornWindowError

ATTRIBUTES = ("backward", "accumulate", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients")


def loader_of(rows, batch_size=2, seed=1):
    x, y = data([rows], torch.float32, seed)[0]
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows):
        self.x, self.y = data([rows], torch.float32)[0]

    def __iter__(self):
        return iter(list(zip(self.x, self.y, strict=True)))


class Loop:
    """An Accelerate loop as its documentation writes it, with accum in place of accumulate."""

    def __init__(self, make=lambda p: SGD(p, lr=0.1), clip=None, accelerator=None):
        self.accelerator = accelerator or Accelerator(cpu=True)
        model = network(torch.float32)
        optimizer = make(model.parameters())
        scheduler = LambdaLR(optimizer, lambda n: 0.9**n)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.clip, self.seen, self.flags = clip, [], []
        self.guarded = False  # Accelerate alone would clip the partial sums
        self.optimizer.optimizer.register_step_pre_hook(
            lambda *_: self.seen.append(gradients(self.model))
        )

    def lines(self, batch, weight=1):
        """The lines that stand in a user's block."""
        self.flags.append(self.accelerator.sync_gradients)
        self.accelerator.backward(mean_loss(self.model, batch))
        if self.clip is not None and (self.accelerator.sync_gradients or not self.guarded):
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def run(self, accum, loader, weight=lambda batch: 1):
        for batch in loader:
            with accum(self.model, weight=weight(batch)):
                self.lines(batch)

    def sizes(self, accum):
        """A list that fills with the number of micro-batches of each update."""
        found = []
        accum.on_update(lambda: found.append(accum.last.micro_batches))
        return found


def fp16(scale=1024.0, **options):
    """Accelerate makes no scaler on the CPU; the attributes that it would set elsewhere."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
    accelerator.native_amp = True
    return accelerator


# -- full windows ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: AdamW(p, lr=0.01)])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_full_windows_have_the_bits_of_accelerates_own_accumulate(make, clip, steps):
    """Step, schedule, clip and zero_grad stand in every micro-batch, as they did."""
    theirs = Loop(make, clip, Accelerator(cpu=True, gradient_accumulation_steps=steps))
    theirs.guarded = True
    loader = theirs.accelerator.prepare(loader_of(2 * 3 * steps))
    for batch in loader:
        with theirs.accelerator.accumulate(theirs.model):
            theirs.lines(batch)
    weights = [p.detach().clone() for p in theirs.model.parameters()]
    rates, flags = theirs.scheduler.get_last_lr(), theirs.flags
    theirs.accelerator.free_memory()
    ours = Loop(make, clip, Accelerator(cpu=True, gradient_accumulation_steps=steps))
    accum = Accumulator(steps, accelerator=ours.accelerator)
    ours.run(accum, ours.accelerator.prepare(loader_of(2 * 3 * steps)))
    assert all(torch.equal(a, b) for a, b in zip(weights, ours.model.parameters(), strict=True))
    assert ours.scheduler.get_last_lr() == rates
    assert ours.flags == flags
    assert ours.scheduler.scheduler.last_epoch == accum.updates == 3


@pytest.mark.parametrize("weight", [1, 0.1, 3, 7, torch.tensor(7)])
def test_full_windows_have_the_bits_of_the_textbook_loop(weight):
    """Plain torch beside it, with clip and schedule."""
    ours, theirs = Loop(clip=0.5), network(torch.float32)
    accum = Accumulator(3, accelerator=ours.accelerator)
    loader = loader_of(18)
    ours.run(accum, ours.accelerator.prepare(loader), lambda _: weight)
    optimizer = SGD(theirs.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda n: 0.9**n)
    textbook_loop(theirs, list(loader), 3, optimizer, scheduler=scheduler, max_grad_norm=0.5)
    assert same(ours.model, theirs)


def test_it_follows_sync_gradients_as_the_rest_of_the_loop_reads_it():
    """True in the micro-batches that close, and only there."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    loop.run(accum, loop.accelerator.prepare(loader_of(20)))
    assert loop.flags == [False, False, False, True] * 2 + [False, True]


def test_the_flag_stays_for_a_step_after_the_block():
    """Some loops step outside; in a window that goes on their lines must do nothing."""
    loop, theirs = Loop(), network(torch.float32)
    accum = Accumulator(2, accelerator=loop.accelerator)
    loader = loader_of(12)
    for batch in loop.accelerator.prepare(loader):
        with accum(loop.model):
            loop.accelerator.backward(mean_loss(loop.model, batch))
        loop.optimizer.step()
        loop.scheduler.step()
        loop.optimizer.zero_grad()
    optimizer = SGD(theirs.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda n: 0.9**n)
    textbook_loop(theirs, list(loader), 2, optimizer, scheduler=scheduler)
    assert same(loop.model, theirs)


# -- tails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_ten_batches_in_windows_of_four_are_updates_of_4_4_and_2(kind):
    """Each with the gradient of its own big batch; Accelerate's last one is half of that."""
    loop = Loop(lambda p: SGD(p, lr=0.0))
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    loader = loader_of(20) if kind == "map-style" else DataLoader(Stream(20), batch_size=2)
    loop.run(accum, loop.accelerator.prepare(loader))
    assert sizes == [4, 4, 2]
    batches = list(loader_of(20))
    for found, part in zip(loop.seen, (slice(0, 4), slice(4, 8), slice(8, 10)), strict=True):
        assert relative(found, big_batch(loop.model, batches[part])) <= 1e-6
    assert loop.scheduler.scheduler.last_epoch == 3
    assert (accum.epoch, accum.pending) == (1, 0)


@pytest.mark.parametrize(
    ("tail", "sizes", "pending"),
    [("flush", [4, 2, 4, 2], 0), ("drop", [4, 4], 0), ("carry", [4, 4, 4], 0)],
)
def test_the_tail_is_what_was_asked_for_over_two_passes(tail, sizes, pending):
    """Six batches, windows of four."""
    plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=tail == "flush")
    loop = Loop(accelerator=Accelerator(cpu=True, gradient_accumulation_plugin=plugin))
    accum = Accumulator(4, accelerator=loop.accelerator, tail=tail)
    found = loop.sizes(accum)
    loader = loop.accelerator.prepare(loader_of(12))
    for _ in range(2):
        loop.run(accum, loader)
    assert found == sizes
    assert (accum.pending, accum.epoch) == (pending, 2)


def test_fewer_batches_than_steps_are_one_update():
    """3 of 8: Accelerate's is 0.375 of the right one."""
    loop = Loop(lambda p: SGD(p, lr=0.0))
    accum = Accumulator(8, accelerator=loop.accelerator)
    loop.run(accum, loop.accelerator.prepare(loader_of(6)))
    assert len(loop.seen) == 1
    assert relative(loop.seen[0], big_batch(loop.model, list(loader_of(6)))) <= 1e-6


def test_token_weights_in_an_accelerate_loop():
    """Form (c): sum(w * l) / sum(w), with the clip's norm told."""
    loop = Loop(lambda p: SGD(p, lr=0.0), clip=1e9)
    accum = Accumulator(3, accelerator=loop.accelerator)
    batches = data([3, 1, 4, 1, 5], torch.float32)
    for batch in accum.batches(batches):
        with accum(loop.model, weight=len(batch[0])):
            loop.lines(batch)
    for found, part in zip(loop.seen, (slice(0, 3), slice(3, 5)), strict=True):
        assert relative(found, big_batch(loop.model, batches[part])) <= 1e-6
    norm = torch.stack([g.norm() for g in big_batch(loop.model, batches[3:])]).norm()
    assert accum.last.grad_norm == pytest.approx(float(norm), rel=1e-6)
    assert accum.last.weight == 6.0


def test_a_loader_that_was_not_prepared_needs_batches():
    """Without it nobody knows the end: windows go on into the next pass. With it, 4 and 2."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    loop.run(accum, loader_of(12))
    assert (sizes, accum.pending) == ([4], 2)
    accum.discard()
    loop.run(accum, accum.batches(loader_of(12)))
    assert sizes == [4, 4, 2]


# -- evaluation inside of the training pass --------------------------------------------------


def evaluate(loop, loader, until):
    for number, batch in enumerate(loader):
        with torch.no_grad():
            mean_loss(loop.model, batch)
        if number == until:
            break


@pytest.mark.parametrize("until", [None, 1, 4], ids=["complete", "left early", "left on its last"])
@pytest.mark.parametrize("at", [[0], [2], [3, 5], [0, 9], range(10)], ids=str)
def test_an_evaluation_in_the_training_pass_changes_no_window(until, at):
    """Ten batches, windows of 4, 4 and 2 in both passes, wherever it stands and however it ends."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    train, held_out = loop.accelerator.prepare(loader_of(20), loader_of(10, seed=5))
    for _ in range(2):
        for place, batch in enumerate(train):
            if place in at:
                evaluate(loop, held_out, until)
            with accum(loop.model):
                loop.lines(batch)
    assert sizes == [4, 4, 2] * 2
    assert (accum.epoch, accum.pending) == (2, 0)


@pytest.mark.parametrize("until", [None, 1, 4], ids=["complete", "left early", "left on its last"])
@pytest.mark.parametrize("made", ["before", "after"])
def test_an_evaluation_before_each_pass_changes_no_window(until, made):
    """Also the very first, before or after the Accumulator was made."""
    loop = Loop()
    train, held_out = loop.accelerator.prepare(loader_of(20), loader_of(10, seed=5))
    if made == "after":
        evaluate(loop, held_out, until)
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    for _ in range(2):
        evaluate(loop, held_out, until)
        loop.run(accum, train)
    assert sizes == [4, 4, 2] * 2
    assert (accum.epoch, accum.pending) == (2, 0)


@pytest.mark.parametrize("until", [None, 1, 4], ids=["complete", "left early", "left on its last"])
def test_an_evaluation_inside_of_an_evaluation_loader_changes_no_window(until):
    """Two held-out sets, the second one left by break in the first one's pass."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    train, first, second = loop.accelerator.prepare(loader_of(20), loader_of(10), loader_of(10))
    for place, batch in enumerate(train):
        if place == 3:
            for _ in first:
                evaluate(loop, second, until)
                break
        with accum(loop.model):
            loop.lines(batch)
    assert sizes == [4, 4, 2]


def test_an_outer_loader_does_not_end_the_windows_of_the_inner_one():
    """A loader of tasks around the loader of batches: each inner pass ends its own windows."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    tasks, train = loop.accelerator.prepare(loader_of(6), loader_of(12))

    def run():
        for _ in tasks:
            loop.run(accum, train)

    with pytest.warns(UserWarning, match="windows follow the innermost"):
        run()
    assert sizes == [4, 2] * 3
    assert accum.epoch == 3


@pytest.mark.parametrize("how", ["next", "zip"])
def test_two_loaders_at_once_are_told_apart_or_it_is_said(how):
    """Which of them ends the loop can't be seen from here."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    train, other = loop.accelerator.prepare(loader_of(12), loader_of(20 if how == "zip" else 6))

    def cycle():
        while True:
            yield from other

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, _ in zip(train, other if how == "zip" else cycle(), strict=False):
            with accum(loop.model):
                loop.lines(batch)
    assert sizes == [4, 2] or any("accum.batches" in str(w.message) for w in caught)


def test_a_loader_that_was_left_by_break_may_feed_a_later_pass():
    """Evaluated on first, trained on afterwards."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    train, other = loop.accelerator.prepare(loader_of(12), loader_of(10))
    evaluate(loop, other, 1)
    loop.run(accum, train)
    loop.run(accum, other)
    assert sizes == [4, 2, 4, 1]
    assert accum.epoch == 2


def test_batches_says_which_of_two_loaders_ends_the_windows():
    """The way out."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    train, other = loop.accelerator.prepare(loader_of(12), loader_of(6))
    for _ in range(2):
        for batch in accum.batches(train):
            next(iter(other))
            with accum(loop.model):
                loop.lines(batch)
    assert sizes == [4, 2] * 2


def test_a_pass_that_starts_in_its_middle_ends_like_any_other():
    """accelerator.skip_first_batches makes a new loader."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    train = loop.accelerator.prepare(loader_of(20))
    loop.run(accum, loop.accelerator.skip_first_batches(train, 3))
    loop.run(accum, accum.batches(loop.accelerator.skip_first_batches(train, 5)))
    assert sizes == [4, 3, 4, 1]
    assert accum.epoch == 2


def test_a_training_pass_that_was_left_by_break_goes_on_in_the_next():
    """6 of 10 batches, then a whole pass: 4, then 2 + 2, 4, 4."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    train = loop.accelerator.prepare(loader_of(20))
    for place, batch in enumerate(train):
        with accum(loop.model):
            loop.lines(batch)
        if place == 5:
            break
    loop.run(accum, train)
    assert sizes == [4, 4, 4, 4]
    assert accum.epoch == 1


def test_a_second_training_loader_is_followed_as_well():
    """Pretraining, then tuning: each loader ends its own windows."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    one, two = loop.accelerator.prepare(loader_of(12), loader_of(10))
    loop.run(accum, one)
    loop.run(accum, two)
    assert sizes == [4, 2, 4, 1]


@pytest.mark.parametrize("until", [None, 1, 4], ids=["complete", "left early", "left on its last"])
def test_batches_knows_its_own_loader_whatever_is_registered_beside_it(until):
    """The same loops with `accum.batches(loader)`."""
    loop = Loop()
    accum = Accumulator(4, accelerator=loop.accelerator)
    sizes = loop.sizes(accum)
    train, held_out = loop.accelerator.prepare(loader_of(20), loader_of(10, seed=5))
    for _ in range(2):
        evaluate(loop, held_out, until)
        for place, batch in enumerate(accum.batches(train)):
            if place in (0, 4, 9):
                evaluate(loop, held_out, until)
            with accum(loop.model):
                loop.lines(batch)
    assert sizes == [4, 4, 2] * 2
    assert accum.epoch == 2


# -- no-ops ---------------------------------------------------------------------------------


def test_clip_and_unscale_do_nothing_in_a_micro_batch_that_does_not_close():
    """Partial sums of +4 and -2: clipping the first to 1 would end in -0.5, not in +1."""
    accelerator = Accelerator(cpu=True)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    model, optimizer = accelerator.prepare(layer, SGD(layer.parameters(), 1.0))
    accum, norms = Accumulator(2, accelerator=accelerator), []
    for slope in (4.0, -2.0):
        with accum(model):
            accelerator.backward((layer.weight * slope).sum())
            accelerator.unscale_gradients()
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            if not accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 1e-9)
            optimizer.step()
            optimizer.zero_grad()
    assert layer.weight.item() == pytest.approx(-1.0, rel=1e-5)
    assert torch.tensor(norms[0]).isnan()
    assert norms[1] == accum.last.grad_norm == 1.0


def test_clip_by_value_works_in_the_micro_batch_that_closes():
    """It is the loop's own, untouched."""
    accelerator = Accelerator(cpu=True)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    model, optimizer = accelerator.prepare(layer, SGD(layer.parameters(), 1.0))
    accum = Accumulator(2, accelerator=accelerator)
    for slope in (4.0, 2.0):
        with accum(model):
            accelerator.backward((layer.weight * slope).sum())
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert layer.weight.item() == -0.5
    assert accum.last.grad_norm is None


@pytest.mark.parametrize("order", ["zero_grad first", "step first"])
def test_lines_in_an_order_that_loses_gradients_are_refused(order):
    """zero_grad, or step and zero_grad, before the backward of the micro-batch that closes."""
    loop = Loop()
    accum = Accumulator(3, accelerator=loop.accelerator)

    def run():
        for batch in data([2] * 3, torch.float32):
            with accum(loop.model):
                if order == "step first":
                    loop.optimizer.step()
                loop.optimizer.zero_grad()
                loop.accelerator.backward(mean_loss(loop.model, batch))

    with pytest.raises(RuntimeError, match=r"torn|before"):
        run()
    assert accum.updates == 0
    assert same(loop.model, network(torch.float32))


@pytest.mark.parametrize("kind", ["first", "later"])
def test_a_window_without_weight_is_no_update_of_the_loop(kind):
    """Neither its optimizer nor its schedule move, and its clip troubles nobody afterwards."""
    loop = Loop(lambda p: AdamW(p, lr=0.1), clip=1.0)
    accum = Accumulator(2, accelerator=loop.accelerator)
    weights = [0, 0, 1, 1] if kind == "first" else [1, 1, 0, 0, 1, 1]
    for weight, batch in zip(weights, data([2] * 6, torch.float32), strict=False):
        with accum(loop.model, weight=weight):
            loop.lines(batch)
    assert (accum.updates, accum.skipped) == (weights.count(1) // 2, 1)
    assert loop.scheduler.scheduler.last_epoch == len(loop.seen) == accum.updates
    assert all(p.grad is None for p in loop.model.parameters())


# -- accum takes the step --------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [True, False])
def test_with_an_optimizer_accum_takes_the_step(prepared):
    """Prepared or bare; the bits of the textbook, and a tail."""
    loop, theirs = Loop(), network(torch.float32)
    optimizer = loop.optimizer if prepared else loop.optimizer.optimizer
    scheduler = loop.scheduler if prepared else loop.scheduler.scheduler
    accum = Accumulator(
        2,
        accelerator=loop.accelerator,
        optimizer=optimizer,
        scheduler=scheduler,
        max_grad_norm=0.5,
    )
    loader = loader_of(12)
    for batch in loop.accelerator.prepare(loader):
        with accum(loop.model):
            loop.accelerator.backward(mean_loss(loop.model, batch))
    reference = SGD(theirs.parameters(), 0.1)
    schedule = LambdaLR(reference, lambda n: 0.9**n)
    textbook_loop(theirs, list(loader), 2, reference, scheduler=schedule, max_grad_norm=0.5)
    assert same(loop.model, theirs)
    assert loop.scheduler.scheduler.last_epoch == accum.updates == 3


def test_with_an_optimizer_the_lines_that_are_still_there_do_nothing():
    """Step, schedule, clip and zero_grad inside of the block: one step, one tick."""
    loop, theirs = Loop(clip=0.5), network(torch.float32)
    accum = Accumulator(
        2,
        accelerator=loop.accelerator,
        optimizer=loop.optimizer,
        scheduler=loop.scheduler,
        max_grad_norm=0.5,
    )
    loader = loader_of(12)
    loop.run(accum, loop.accelerator.prepare(loader))
    reference = SGD(theirs.parameters(), 0.1)
    schedule = LambdaLR(reference, lambda n: 0.9**n)
    textbook_loop(theirs, list(loader), 2, reference, scheduler=schedule, max_grad_norm=0.5)
    assert same(loop.model, theirs)
    assert loop.scheduler.scheduler.last_epoch == 3


def test_with_an_optimizer_a_clip_of_the_loop_that_nobody_would_do_is_refused():
    """It would be dropped without a word."""
    loop = Loop(clip=0.5)
    accum = Accumulator(1, accelerator=loop.accelerator, optimizer=loop.optimizer)
    with pytest.raises(RuntimeError, match="give the Accumulator max_grad_norm= instead"):
        loop.run(accum, loop.accelerator.prepare(loader_of(2)))


def test_with_an_optimizer_a_step_after_the_block_is_refused_in_an_open_window():
    """It would step on a partial sum."""
    loop = Loop()
    accum = Accumulator(2, accelerator=loop.accelerator, optimizer=loop.optimizer)
    (batch,) = data([2], torch.float32)
    with accum(loop.model):
        loop.accelerator.backward(mean_loss(loop.model, batch))
    with pytest.raises(RuntimeError, match="leave optimizer"):
        loop.optimizer.step()


# -- what it does to the Accelerator ---------------------------------------------------------


def state_of(accelerator):
    own = {name: vars(accelerator).get(name) for name in ATTRIBUTES}
    return own, accelerator.gradient_accumulation_steps, accelerator.step


def test_the_accelerator_has_its_own_methods_again_after_each_block():
    """Outside of a block `backward` is Accelerate's, e.g. for a loop of another kind."""
    loop = Loop()
    accum = Accumulator(2, accelerator=loop.accelerator)
    before = state_of(loop.accelerator)
    for batch in data([2] * 3, torch.float32):
        with accum(loop.model):
            assert vars(loop.accelerator)["backward"] == accum.backward
            loop.lines(batch)
        assert state_of(loop.accelerator) == before
    loss = mean_loss(loop.model, batch)
    accum.discard()
    loop.accelerator.backward(loss)
    assert relative(gradients(loop.model), big_batch(loop.model, [batch])) <= 1e-6


@pytest.mark.parametrize("where", ["before backward", "after backward", "no backward"])
def test_the_accelerator_has_its_own_methods_again_after_an_exception(where):
    """Whatever ended the block."""
    loop = Loop()
    accum = Accumulator(2, accelerator=loop.accelerator)
    before = state_of(loop.accelerator)
    (batch,) = data([2], torch.float32)

    def block():
        with accum(loop.model):
            if where == "after backward":
                loop.accelerator.backward(mean_loss(loop.model, batch))
            if where != "no backward":
                raise MemoryError

    with pytest.raises(RuntimeError if where == "no backward" else MemoryError):
        block()
    assert state_of(loop.accelerator) == before
    if where == "after backward":
        with pytest.raises(TornWindowError, match="MemoryError in micro-batch 0"):
            loop.run(accum, [batch])
        assert state_of(loop.accelerator) == before
        accum.discard()
    loop.run(accum, [batch, batch])
    assert accum.updates == 1


def test_a_user_s_own_backward_on_the_accelerator_comes_back():
    """What someone else has put there is put back."""
    loop = Loop()

    def mine(loss):
        raise AssertionError("not in a block")

    loop.accelerator.backward = mine
    accum = Accumulator(2, accelerator=loop.accelerator)
    for batch in data([2] * 2, torch.float32):
        with accum(loop.model):
            loop.lines(batch)
    assert loop.accelerator.backward is mine


def test_backward_takes_the_arguments_that_accelerates_takes():
    """retain_graph goes through."""
    loop = Loop(lambda p: SGD(p, lr=0.0))
    accum = Accumulator(1, accelerator=loop.accelerator)
    (batch,) = data([2], torch.float32)
    with accum(loop.model):
        loss = mean_loss(loop.model, batch) / 2
        loop.accelerator.backward(loss, retain_graph=True)
        loop.accelerator.backward(loss)
        loop.optimizer.step()
    assert relative(loop.seen[0], big_batch(loop.model, [batch])) <= 1e-6


def test_accum_backward_and_the_micro_batch_s_are_the_same_call_as_the_accelerator_s():
    """One window out of three spellings."""
    loop = Loop(lambda p: SGD(p, lr=0.0))
    accum = Accumulator(3, accelerator=loop.accelerator)
    batches = data([2] * 3, torch.float32)
    for place, batch in enumerate(batches):
        with accum(loop.model) as micro:
            call = (loop.accelerator.backward, accum.backward, micro.backward)[place]
            call(mean_loss(loop.model, batch))
            loop.optimizer.step()
    assert relative(loop.seen[0], big_batch(loop.model, batches)) <= 1e-6


def test_save_and_load_between_windows_change_nothing(tmp_path):
    """load_state brings another `step` along, which is not a use of accumulate."""
    loop = Loop()
    accum = Accumulator(2, accelerator=loop.accelerator)
    loader = loop.accelerator.prepare(loader_of(8))
    loop.run(accum, loader)
    loop.accelerator.save_state(tmp_path / "state")
    loop.run(accum, loader)
    expected = [p.detach().clone() for p in loop.model.parameters()]
    loop.accelerator.step = 0
    loop.accelerator.load_state(tmp_path / "state")
    loop.run(accum, loader)
    assert all(torch.equal(a, b) for a, b in zip(expected, loop.model.parameters(), strict=True))
    assert accum.updates == 4  # the two that were saved, and two after them


def test_load_of_a_run_that_used_accumulate_is_no_use_of_accumulate(tmp_path):
    """Its `step` was 6; a run that goes over to accum goes on."""
    old = Loop(accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4))
    for batch in data([2] * 6, torch.float32):
        with old.accelerator.accumulate(old.model):
            old.lines(batch)
    old.accelerator.save_state(tmp_path / "state")
    old.accelerator.free_memory()
    loop = Loop(accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4))
    accum = Accumulator(4, accelerator=loop.accelerator)
    loop.accelerator.load_state(tmp_path / "state")
    assert loop.accelerator.step == 6
    loop.run(accum, data([2] * 4, torch.float32))
    assert accum.updates == 1


# -- fp16 -----------------------------------------------------------------------------------


def test_an_fp16_loop_has_the_bits_of_accelerates_own():
    """Autocast, scaler, clip, schedule; the scale grows on the way."""
    theirs = Loop(clip=0.5, accelerator=fp16(growth_interval=2))
    theirs.accelerator.gradient_accumulation_steps = 3
    loader = loader_of(24)
    for number, batch in enumerate(theirs.accelerator.prepare(loader), 1):
        theirs.accelerator.gradient_state._set_sync_gradients(number % 3 == 0)
        theirs.accelerator.backward(mean_loss(theirs.model, batch))
        if number % 3 == 0:  # Accelerate's clip would unscale in every micro-batch
            theirs.accelerator.clip_grad_norm_(theirs.model.parameters(), 0.5)
        theirs.optimizer.step()
        theirs.scheduler.step()
        theirs.optimizer.zero_grad()
    expected = [p.detach().clone() for p in theirs.model.parameters()]
    scale = theirs.accelerator.scaler.get_scale()
    theirs.accelerator.gradient_accumulation_steps = 1
    theirs.accelerator.free_memory()
    ours = Loop(clip=0.5, accelerator=fp16(growth_interval=2))
    accum = Accumulator(3, accelerator=ours.accelerator)
    ours.run(accum, ours.accelerator.prepare(loader))
    assert all(torch.equal(a, b) for a, b in zip(expected, ours.model.parameters(), strict=True))
    assert ours.accelerator.scaler.get_scale() == scale == 4096.0
    assert ours.scheduler.scheduler.last_epoch == accum.updates == 4


def test_unscale_in_every_micro_batch_of_an_fp16_loop_happens_once():
    """A loop may look at its gradients so; before the close there is nothing to unscale."""
    accelerator = fp16()
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    model, optimizer = accelerator.prepare(layer, SGD(layer.parameters(), 1.0))
    accum, seen = Accumulator(3, accelerator=accelerator), []
    for slope in (1.0, 2.0, 6.0):
        with accum(model):
            accelerator.backward((layer.weight * slope).sum())
            accelerator.unscale_gradients()
            seen.append(layer.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [pytest.approx(1024 / 3), 1024.0, 3.0]
    assert layer.weight.item() == -3.0


def test_an_fp16_loop_that_overflows_skips_its_window():
    """Schedule, counters and hook stay; the scale halves; the next window is an update."""
    loop, ran = Loop(clip=1.0, accelerator=fp16()), []
    accum = Accumulator(2, accelerator=loop.accelerator)
    accum.on_update(lambda: ran.append(accum.updates))
    batches = data([2] * 4, torch.float32)
    batches[1] = (batches[1][0] * 1e30, batches[1][1])
    loop.run(accum, batches)
    assert (accum.updates, accum.skipped, ran) == (1, 1, [1])
    assert loop.scheduler.scheduler.last_epoch == 1
    assert loop.accelerator.scaler.get_scale() == 512.0
    assert accum.last.scale == 512.0


@pytest.mark.parametrize("kind", ["first", "later"])
def test_an_fp16_window_without_weight_leaves_the_scaler_ready(kind):
    """The loop's clip stands in it and must not unscale what nobody will step on."""
    loop = Loop(clip=1.0, accelerator=fp16())
    accum = Accumulator(2, accelerator=loop.accelerator)
    weights = [0, 0, 1, 1] if kind == "first" else [1, 1, 0, 0, 1, 1]
    for weight, batch in zip(weights, data([2] * 6, torch.float32), strict=False):
        with accum(loop.model, weight=weight):
            loop.lines(batch)
    assert (accum.updates, accum.skipped) == (weights.count(1) // 2, 1)
    assert loop.accelerator.scaler.get_scale() == 1024.0


def test_an_fp16_loop_with_two_optimizers_is_asked_to_let_accum_step():
    """Accelerate unscales the second one twice."""
    accelerator = fp16()
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    models = accelerator.prepare(a, b, SGD(a.parameters(), 1.0), SGD(b.parameters(), 1.0))
    accum = Accumulator(1, accelerator=accelerator)
    with pytest.raises(ValueError, match="Let accum take the step"), accum(*models[:2]):
        pass
    assert "backward" not in vars(accelerator)


def test_an_fp16_loop_with_two_optimizers_is_right_where_accum_steps():
    """3 and 4 make a norm of 5, clipped to 2.5; with Accelerate's clip it was 0.00488."""
    accelerator = fp16()
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    for layer in (a, b):
        nn.init.zeros_(layer.weight)
    a, b, *optimizers = accelerator.prepare(
        a, b, SGD(a.parameters(), 1.0), SGD(b.parameters(), 1.0)
    )
    accum = Accumulator(2, accelerator=accelerator, optimizer=optimizers, max_grad_norm=2.5)
    for _ in range(2):
        with accum(a, b):
            accelerator.backward((3 * a.weight + 4 * b.weight).sum())
    assert accum.last.grad_norm == 5.0
    assert a.weight.item() == pytest.approx(-1.5, rel=1e-6)
    assert b.weight.item() == pytest.approx(-2.0, rel=1e-6)


def test_a_fused_optimizer_under_a_scaler_is_warned_about():
    """Accelerate does not see that it skipped, so its schedule would tick."""
    accelerator = fp16()
    model = network(torch.float32)
    accelerator.prepare(model, AdamW(model.parameters(), fused=True))
    with pytest.warns(UserWarning, match="Let accum take the step"):
        Accumulator(2, accelerator=accelerator)


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, lambda _: 4])
def test_an_accelerator_with_a_number_of_its_own_is_refused(steps):
    """Two divisions can't both be right."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(
        ValueError, match=r"built with gradient_accumulation_steps=4.*leave it at 1"
    ):
        Accumulator(steps, accelerator=accelerator)


def test_an_accelerator_with_the_same_number_divides_once():
    """4 in both: the mean over four, not a sixteenth."""
    loop = Loop(
        lambda p: SGD(p, lr=0.0), accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4)
    )
    accum = Accumulator(4, accelerator=loop.accelerator)
    batches = data([2] * 4, torch.float32)
    loop.run(accum, batches)
    assert relative(loop.seen[0], big_batch(loop.model, batches)) <= 1e-6


def test_accumulate_inside_of_a_block_is_refused():
    """Two counters, one window."""
    loop = Loop()
    accum = Accumulator(2, accelerator=loop.accelerator)
    block = accum(loop.model)
    with pytest.raises(RuntimeError, match=r"`with accum\(model\):` takes its place"), block:
        loop.accelerator.accumulate(loop.model)


@pytest.mark.parametrize("when", ["before the first block", "between two blocks"])
def test_accumulate_beside_accum_is_refused(when):
    """At the next block, with both numbers."""
    loop = Loop()
    accum = Accumulator(2, accelerator=loop.accelerator)
    batches = data([2] * 3, torch.float32)
    if when == "between two blocks":
        loop.run(accum, batches[:1])
    with loop.accelerator.accumulate(loop.model):
        pass
    with pytest.raises(RuntimeError, match=r"accelerator\.accumulate was used beside accum"):
        loop.run(accum, batches[1:])


def test_a_loader_end_that_nobody_may_see_is_refused():
    """sync_with_dataloader=False is tail="carry" in Accelerate's words."""
    plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    with pytest.raises(ValueError, match='say tail="carry"'):
        Accumulator(2, accelerator=accelerator)
    assert Accumulator(2, accelerator=accelerator, tail="carry").updates == 0


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_an_accelerator_whose_engine_accumulates_itself_is_refused(kind):
    """backward, division and step all happen inside of the engine."""
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = kind
    with pytest.raises(ValueError, match="Use DeepSpeed's own gradient_accumulation_steps"):
        Accumulator(2, accelerator=accelerator)


def test_fp16_that_would_silently_be_fp32_is_refused():
    """Accelerate makes neither scaler nor autocast for it on the CPU."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    with pytest.raises(ValueError, match=r"trains in fp32 without saying so.*GradScaler"):
        Accumulator(2, accelerator=accelerator)


def test_bf16_is_really_bf16():
    """The prepared model runs under autocast, and accum changes nothing about that."""
    loop = Loop(accelerator=Accelerator(cpu=True, mixed_precision="bf16"))
    accum = Accumulator(2, accelerator=loop.accelerator)
    kinds = []
    loop.model[2].register_forward_hook(lambda *args: kinds.append(args[2].dtype))
    loop.run(accum, data([2] * 2, torch.float32))
    assert kinds == [torch.bfloat16] * 2
    assert accum.updates == 1


def test_a_scaler_that_the_loop_s_optimizers_would_not_use_is_refused():
    """Prepared optimizers only know the Accelerator's."""
    with pytest.raises(ValueError, match="whose optimizers would not use it"):
        Accumulator(2, accelerator=Accelerator(cpu=True), scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    "option", [{"nonfinite": "raise"}, {"max_grad_norm": 1.0}, {"scheduler": object()}]
)
def test_options_of_the_step_are_refused_where_the_loop_steps(option):
    """They would be ignored."""
    if "scheduler" in option:
        model = network()
        option = {"scheduler": LambdaLR(SGD(model.parameters(), 1.0), lambda n: 1.0)}
    with pytest.raises(ValueError, match="acts where accum takes the step; give optimizer="):
        Accumulator(2, accelerator=Accelerator(cpu=True), **option)
