"""A plain loop: the same bits as the textbook, and what the Accumulator tells about it."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import (
    big_batch,
    data,
    gradients,
    mean_loss,
    network,
    relative,
    same,
    textbook_loop,
    weighted,
)
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR

from accumplug import Accumulator

MAKERS = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "AdamW, one by one": lambda p: AdamW(p, lr=0.01, foreach=False),
    "AdamW, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.1),
}


def halving(optimizer):
    return LambdaLR(optimizer, lambda n: 0.9**n)


def train(model, batches, accum, **weight):
    """Form (a) of the loop."""
    for batch in accum.batches(batches):
        with accum(model, **weight):
            accum.backward(mean_loss(model, batch))


def still(model):
    return SGD(model.parameters(), lr=0.0)


# -- the same bits --------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_windows_have_the_bits_of_the_textbook_loop(make, clip, dtype):
    """Five windows of three with a schedule: every weight is torch.equal."""
    ours, theirs = network(dtype), network(dtype)
    batches = data([4] * 15, dtype)
    optimizer, reference = make(ours.parameters()), make(theirs.parameters())
    schedule, their_schedule = halving(optimizer), halving(reference)
    accum = Accumulator(3, optimizer=optimizer, scheduler=schedule, max_grad_norm=clip)
    train(ours, batches, accum)
    textbook_loop(theirs, batches, 3, reference, scheduler=their_schedule, max_grad_norm=clip)
    assert same(ours, theirs)
    assert not same(ours, network(dtype))
    assert schedule.get_last_lr() == their_schedule.get_last_lr()
    assert schedule.last_epoch == 5


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [1.0, 0.1, 7.0, 5000.0])
@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_equal_weights_change_no_bit(steps, dtype, weight, on_device):
    """Whatever the weight is, if it is the same for all of a full window."""
    if on_device:
        weight = torch.tensor(weight, dtype=torch.float64)
    ours, theirs = network(dtype), network(dtype)
    batches = data([4] * (3 * steps), dtype)
    train(ours, batches, Accumulator(steps, optimizer=SGD(ours.parameters(), 0.1)), weight=weight)
    textbook_loop(theirs, batches, steps, SGD(theirs.parameters(), 0.1))
    assert same(ours, theirs)


@pytest.mark.parametrize("weight", [1, 0.1, 3, 7])
def test_equal_weights_known_ahead_change_no_bit(weight):
    """The look-ahead takes another way to the same factor."""
    ours, theirs = network(), network()
    batches = data([4] * 9)
    accum = Accumulator(3, optimizer=SGD(ours.parameters(), 0.1))
    for batch in accum.batches(batches, weigh=lambda _: weight):
        with accum(ours):
            accum.backward(mean_loss(ours, batch))
    textbook_loop(theirs, batches, 3, SGD(theirs.parameters(), 0.1))
    assert same(ours, theirs)


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.floats(1e-6, 1e6),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_any_equal_weight_in_any_full_window_changes_no_bit(steps, weight, dtype):
    """The gradient of one window, torch.equal."""
    ours, theirs = network(dtype), network(dtype)
    batches = data([2] * steps, dtype)
    got, accum = [], Accumulator(steps, optimizer=still(ours))
    accum.on_update(lambda: got.append(gradients(ours)))
    train(ours, batches, accum, weight=weight)
    for batch in batches:
        (mean_loss(theirs, batch) / steps).backward()
    assert all(torch.equal(a, b) for a, b in zip(got[0], gradients(theirs), strict=True))


def test_a_loss_of_shape_one_has_the_same_bits():
    """torch takes losses of one element in any shape."""
    ours, theirs = network(torch.float32), network(torch.float32)
    batches = data([4] * 6, torch.float32)
    accum = Accumulator(3, optimizer=SGD(ours.parameters(), 0.1))
    for batch in batches:
        with accum(ours):
            accum.backward(mean_loss(ours, batch).reshape(1, 1))
    textbook_loop(theirs, batches, 3, SGD(theirs.parameters(), 0.1))
    assert same(ours, theirs)


def test_dropout_draws_the_same_numbers():
    """Nothing of a block touches the random number generator."""

    def make():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()

    ours, theirs = make(), make()
    batches = data([4] * 6)
    torch.manual_seed(9)
    train(ours, batches, Accumulator(3, optimizer=SGD(ours.parameters(), 0.1)))
    torch.manual_seed(9)
    textbook_loop(theirs, batches, 3, SGD(theirs.parameters(), 0.1))
    assert same(ours, theirs)


def test_a_compiled_model_is_the_same_model():
    """torch.compile wraps; its parameters are the same objects."""
    ours, theirs = network(torch.float32), network(torch.float32)
    batches = data([4] * 6, torch.float32)
    accum = Accumulator(3, optimizer=SGD(ours.parameters(), 0.1))
    train(torch.compile(ours, backend="eager"), batches, accum)
    textbook_loop(theirs, batches, 3, SGD(theirs.parameters(), 0.1))
    assert same(ours, theirs)


def test_a_loop_that_steps_itself_has_the_same_bits():
    """`micro.closes` says when."""
    ours, theirs = network(), network()
    batches = data([4] * 9)
    optimizer = AdamW(ours.parameters(), lr=0.01)
    accum = Accumulator(3)
    for batch in batches:
        with accum(ours) as micro:
            micro.backward(mean_loss(ours, batch))
            if micro.closes:
                nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    textbook_loop(theirs, batches, 3, AdamW(theirs.parameters(), lr=0.01), max_grad_norm=0.5)
    assert same(ours, theirs)
    assert accum.updates == 3


def test_a_loop_may_step_after_the_block_too():
    """The gradient is finished when the closing block ends, and stays until the loop clears it."""
    ours, theirs = network(), network()
    batches = data([4] * 6)
    optimizer, accum = SGD(ours.parameters(), 0.1), Accumulator(3)
    for batch in batches:
        with accum(ours) as micro:
            accum.backward(mean_loss(ours, batch))
        if micro.closes:
            optimizer.step()
            optimizer.zero_grad()
    textbook_loop(theirs, batches, 3, SGD(theirs.parameters(), 0.1))
    assert same(ours, theirs)


def test_several_models_and_optimizers_in_one_block():
    """One window over both; each optimizer steps once."""
    one, two = network(), nn.Linear(2, 1).double()
    optimizers = [SGD(one.parameters(), 0.1), AdamW(two.parameters(), 0.1)]
    batches = data([4] * 4)
    expected_one, expected_two = network(), nn.Linear(2, 1).double()
    expected_two.load_state_dict(two.state_dict())
    reference = [SGD(expected_one.parameters(), 0.1), AdamW(expected_two.parameters(), 0.1)]
    for number, (x, _) in enumerate(batches, 1):
        (expected_two(expected_one(x)).pow(2).mean() / 2).backward()
        if number % 2 == 0:
            for optimizer in reference:
                optimizer.step()
                optimizer.zero_grad()
    accum = Accumulator(2, optimizer=optimizers)
    for x, _ in batches:
        with accum(one, two):
            accum.backward(two(one(x)).pow(2).mean())
    assert same(one, expected_one)
    assert same(two, expected_two)
    assert accum.updates == 2


def test_activation_checkpoints_work_in_a_window():
    """Both kinds; the second forward inside of the backward changes nothing."""
    batches = data([4] * 4)
    for reentrant in (True, False):
        ours, theirs = network(), network()
        accum = Accumulator(2, optimizer=SGD(ours.parameters(), 0.1))
        for x, y in batches:
            with accum(ours):
                x = x.clone().requires_grad_()
                out = torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=reentrant)
                accum.backward(F.mse_loss(out, y))
        textbook_loop(theirs, batches, 2, SGD(theirs.parameters(), 0.1))
        assert same(ours, theirs)


def test_backward_passes_its_flags_on():
    """retain_graph allows a second backward, create_graph gives gradients that have a graph."""
    model, (batch,) = network(), data([3])
    accum = Accumulator(1)
    with accum(model):
        loss = mean_loss(model, batch)
        accum.backward(loss / 2, retain_graph=True)
        accum.backward(loss / 2)
    assert relative(gradients(model), big_batch(model, [batch])) <= 1e-15
    model.zero_grad()
    with accum(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph, once in a process
        accum.backward(mean_loss(model, batch), create_graph=True)
    assert model[0].weight.grad.requires_grad
    model.zero_grad()


# -- windows and their ends -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "updates", "left"),
    [("flush", [3, 6], [0, 0]), ("drop", [2, 4], [0, 0]), ("carry", [2, 5], [2, 0])],
)
def test_updates_in_two_passes_of_ten_with_windows_of_four(tail, updates, left):
    """ceil(10/4), floor(10/4), and floor with what was carried: 3+3, 2+2, 2+3."""
    model = network()
    accum = Accumulator(4, optimizer=still(model), tail=tail)
    seen, pending = [], []
    for _ in range(2):
        train(model, data([2] * 10), accum)
        seen.append(accum.updates)
        pending.append(accum.pending)
    assert (seen, pending) == (updates, left)
    assert accum.epoch == 2
    assert accum.micro_batches == 20


@pytest.mark.parametrize(
    ("tail", "sizes", "left"),
    [("flush", [3, 3, 1, 3, 3, 1], 0), ("carry", [3, 3, 3, 3], 2), ("drop", [3, 3, 3, 3], 0)],
)
def test_windows_in_two_passes_of_seven_with_windows_of_three(tail, sizes, left):
    """No window ever has more micro-batches than planned, and none is lost in between."""
    model, found = network(), []
    accum = Accumulator(3, optimizer=still(model), tail=tail)
    accum.on_update(lambda: found.append(accum.last.micro_batches))
    for _ in range(2):
        train(model, data([2] * 7), accum)
    assert (found, accum.pending) == (sizes, left)


def test_a_pass_that_is_shorter_than_a_window_is_an_update_all_the_same():
    """3 batches, 8 planned: one update of their mean; a clear gradient afterwards."""
    model, got = network(), []
    accum = Accumulator(8, optimizer=still(model))
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([2] * 3)
    train(model, batches, accum)
    assert len(got) == 1
    assert relative(got[0], big_batch(model, batches)) <= 1e-15
    assert all(p.grad is None for p in model.parameters())


def test_a_carried_window_is_a_mean_over_both_passes():
    """Three of the first pass and one of the second."""
    model, got = network(), []
    accum = Accumulator(4, optimizer=still(model), tail="carry")
    accum.on_update(lambda: got.append(gradients(model)))
    first, second = data([1, 2, 3], seed=1), data([4, 5], seed=2)
    for batches in (first, second):
        for batch in accum.batches(batches):
            with accum(model, weight=len(batch[0])):
                accum.backward(mean_loss(model, batch))
    assert relative(got[0], big_batch(model, [*first, second[0]])) <= 1e-15
    assert accum.pending == 1


def test_a_dropped_tail_leaves_no_gradient_and_does_not_reach_the_next_pass():
    """The first window of the next pass is its own."""
    model, got = network(), []
    accum = Accumulator(2, optimizer=still(model), tail="drop")
    accum.on_update(lambda: got.append(gradients(model)))
    first, second = data([3] * 3, seed=1), data([3] * 2, seed=2)
    train(model, first, accum)
    assert all(p.grad is None for p in model.parameters())
    train(model, second, accum)
    assert relative(got[1], big_batch(model, second)) <= 1e-15


@pytest.mark.parametrize("takes_step", [True, False])
def test_flush_closes_a_started_window_as_a_mean_over_what_is_there(takes_step):
    """A loop without `batches` says itself that the data ended."""
    model, got = network(), []
    accum = Accumulator(4, optimizer=still(model) if takes_step else None)
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([1, 2, 3])
    for batch in batches:
        with accum(model, weight=len(batch[0])):
            accum.backward(mean_loss(model, batch))
    assert accum.flush()
    assert relative(got[0], big_batch(model, batches)) <= 1e-15
    assert (accum.updates, accum.pending, accum.micro_batches) == (1, 0, 3)
    assert accum.last.micro_batches == 3


def test_flush_without_a_started_window_is_nothing():
    """No update of no micro-batches, however often."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.1))
    assert not accum.flush()
    train(model, data([2] * 2), accum)
    before = [p.detach().clone() for p in model.parameters()]
    assert not accum.flush()
    assert not accum.flush()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert (accum.updates, accum.skipped) == (1, 0)


@pytest.mark.parametrize("tail", ["drop", "carry"])
def test_flush_flushes_whatever_the_tail_option_says(tail):
    """It was asked for."""
    model = network()
    accum = Accumulator(4, optimizer=still(model), tail=tail)
    with accum(model):
        accum.backward(mean_loss(model, data([2])[0]))
    assert accum.flush()
    assert accum.updates == 1


def test_flush_in_a_window_that_was_looked_at_ahead_is_refused():
    """Its total is promised; discard() is the way out, and so is to leave the pass."""
    model, got = network(), []
    accum = Accumulator(4, optimizer=still(model))
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([1, 2, 3, 4])
    for place, batch in enumerate(accum.batches(batches, weigh=lambda b: len(b[0]))):
        with accum(model):
            accum.backward(mean_loss(model, batch))
        if place == 1:
            with pytest.raises(RuntimeError, match=r"weigh= has promised.*or discard\(\) it"):
                accum.flush()
            break
    accum.flush()
    assert relative(got[0], big_batch(model, batches[:2])) <= 1e-15


def test_discard_in_a_window_that_was_looked_at_ahead_goes_on_with_the_next():
    """The items that were counted with it are gone, too."""
    model, got = network(), []
    accum = Accumulator(3, optimizer=still(model))
    accum.on_update(lambda: got.append(gradients(model)))
    batches, seen = data([1, 2, 3, 4, 5, 6]), []
    for batch in accum.batches(batches, weigh=lambda b: len(b[0])):
        seen.append(len(batch[0]))
        with accum(model):
            accum.backward(mean_loss(model, batch))
        if len(seen) == 2:
            accum.discard()
    assert seen == [1, 2, 4, 5, 6]
    assert len(got) == 1
    assert relative(got[0], big_batch(model, batches[3:])) <= 1e-15


def test_a_parameter_that_is_the_loss_itself_shares_no_memory_with_the_root():
    """A temperature, say: its gradient is what the backward started with."""

    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))

    model, got = Scalar(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append(model.value.grad.item()))
    for _ in range(3):
        for place in accum.batches(range(3)):
            with accum(model):
                accum.backward(model.value if place == 1 else model.value + 1)
    assert got == [1.0, 1.0, 1.0]


def test_equal_device_weights_change_no_bit_after_a_window_of_others():
    """The mean weight of the window before only tells the magnitude."""
    ours, theirs = network(), network()
    batches, got = data([4] * 14), []
    accum = Accumulator(7, optimizer=still(ours))
    accum.on_update(lambda: got.append(gradients(ours)))
    for place, batch in enumerate(batches):
        weight = torch.tensor(0.1 if place > 6 else 0.1 * place, dtype=torch.float64)
        with accum(ours, weight=weight):
            accum.backward(mean_loss(ours, batch))
    for batch in batches[7:]:
        (mean_loss(theirs, batch) / 7).backward()
    assert all(torch.equal(a, b) for a, b in zip(got[1], gradients(theirs), strict=True))


def test_flush_in_the_middle_of_a_pass_starts_the_next_window_there():
    """Two, then four, then the tail."""
    model, found = network(), []
    accum = Accumulator(4, optimizer=still(model))
    accum.on_update(lambda: found.append(accum.last.micro_batches))
    for place, batch in enumerate(accum.batches(data([2] * 7))):
        with accum(model):
            accum.backward(mean_loss(model, batch))
        if place == 1:
            accum.flush()
    assert found == [2, 4, 1]


def test_reducing_every_micro_batch_changes_no_bit_on_one_rank():
    """There is nobody to reduce with."""
    models = []
    for sync in ("last", "every"):
        model = network()
        accum = Accumulator(3, optimizer=SGD(model.parameters(), 0.1), sync=sync)
        for batch in accum.batches(data([3, 1, 4, 1, 5])):
            with accum(model, weight=len(batch[0])):
                accum.backward(mean_loss(model, batch))
        models.append(model)
    assert same(*models)


def test_the_weight_of_a_backward_is_that_of_its_micro_batch():
    """Said at the block, at the backward, or nowhere: 1."""
    model, got = network(), []
    accum = Accumulator(3, optimizer=still(model))
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([2] * 3)
    with accum(model, weight=5):
        accum.backward(mean_loss(model, batches[0]))
    with accum(model) as micro:
        micro.backward(mean_loss(model, batches[1]), weight=3)
    with accum(model):
        accum.backward(mean_loss(model, batches[2]))
    assert relative(got[0], weighted(model, batches, [5, 3, 1])) <= 1e-15
    assert accum.last.weight == 9.0


def test_discard_throws_the_window_away():
    """Its gradient, its weight, its place in the count of the window."""
    model, got = network(), []
    accum = Accumulator(2, optimizer=still(model))
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([1, 2, 3])
    with accum(model, weight=100):
        accum.backward(mean_loss(model, batches[0]))
    accum.discard()
    assert accum.pending == 0
    assert all(p.grad is None for p in model.parameters())
    for batch in batches[1:]:
        with accum(model, weight=len(batch[0])):
            accum.backward(mean_loss(model, batch))
    assert relative(got[0], big_batch(model, batches[1:])) <= 1e-15
    assert accum.last.weight == 5.0
    assert accum.last.loss == pytest.approx(
        float(mean_loss(model, tuple(map(torch.cat, zip(*batches[1:], strict=True)))).detach())
    )


def test_skip_counts_a_micro_batch_with_weight_zero_and_without_a_backward():
    """Bad data: the window has it, the mean has not."""
    model, got = network(), []
    accum = Accumulator(2, optimizer=still(model))
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([2, 2])
    with accum(model) as micro:
        micro.skip()
    assert accum.pending == 1
    with accum(model):
        accum.backward(mean_loss(model, batches[1]))
    assert relative(got[0], big_batch(model, batches[1:])) <= 1e-15
    assert (accum.last.micro_batches, accum.last.weight) == (2, 1.0)


def test_skip_in_the_closing_micro_batch_closes():
    """The update is the mean of what came before."""
    model, got = network(), []
    accum = Accumulator(2, optimizer=still(model))
    accum.on_update(lambda: got.append(gradients(model)))
    (batch,) = data([2])
    with accum(model):
        accum.backward(mean_loss(model, batch))
    with accum(model) as micro:
        micro.skip()
        assert micro.closes
    assert relative(got[0], big_batch(model, [batch])) <= 1e-15


def test_a_block_of_weight_zero_needs_no_backward():
    """There is nothing to go back from."""
    model = network()
    accum = Accumulator(2, optimizer=still(model))
    with accum(model, weight=0):
        pass
    with accum(model):
        accum.backward(mean_loss(model, data([2])[0]))
    assert (accum.updates, accum.last.weight) == (1, 1.0)


# -- how many steps -------------------------------------------------------------------------


def test_steps_may_be_a_function_of_the_updates_so_far():
    """A schedule of batch sizes: 1, 2, 3, 3 ... micro-batches."""
    model, found = network(), []
    accum = Accumulator(lambda updates: min(updates + 1, 3), optimizer=still(model))
    accum.on_update(lambda: found.append(accum.last.micro_batches))
    train(model, data([2] * 12), accum)
    assert found == [1, 2, 3, 3, 3]


def test_the_schedule_of_steps_counts_updates_and_not_skipped_windows():
    """A window without weight is none."""
    model, asked = network(), []

    def schedule(updates):
        asked.append(updates)
        return 2

    accum = Accumulator(schedule, optimizer=still(model))
    for weight in (0, 0, 1, 1, 1, 1):
        with accum(model, weight=weight):
            accum.backward(mean_loss(model, data([2])[0]))
    assert sorted(set(asked)) == [0, 1]
    assert (accum.updates, accum.skipped) == (2, 1)


def test_a_new_value_of_steps_takes_effect_at_the_next_window():
    """The open one keeps what it was opened with, and divides by that."""
    model, found, got = network(), [], []
    accum = Accumulator(2, optimizer=still(model))
    accum.on_update(lambda: found.append(accum.last.micro_batches))
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([2] * 8)
    for place, batch in enumerate(batches):
        with accum(model) as micro:
            accum.backward(mean_loss(model, batch))
            if place == 0:
                accum.steps = 3
        assert micro.closes == (place in (1, 4, 7))
    assert found == [2, 3, 3]
    for gradient, part in zip(got, (slice(0, 2), slice(2, 5), slice(5, 8)), strict=True):
        assert relative(gradient, big_batch(model, batches[part])) <= 1e-15
    assert accum.steps == 3


def test_steps_may_turn_from_a_number_into_a_function_and_back():
    """Both are settable."""
    model, found = network(), []
    accum = Accumulator(1, optimizer=still(model))
    accum.on_update(lambda: found.append(accum.last.micro_batches))
    batches = data([2] * 6)
    train(model, batches[:1], accum)
    accum.steps = lambda _: 3
    train(model, batches[1:4], accum)
    accum.steps = 2
    train(model, batches[4:], accum)
    assert found == [1, 3, 2]


# -- what it tells --------------------------------------------------------------------------


def test_a_micro_batch_tells_its_place_and_whether_it_closes():
    """From the moment of its start."""
    model, told = network(), []
    accum = Accumulator(3, optimizer=still(model))
    for batch in accum.batches(data([2] * 5)):
        with accum(model) as micro:
            told.append((micro.index, micro.closes, accum.pending))
            micro.backward(mean_loss(model, batch))
    assert told == [(0, False, 0), (1, False, 1), (2, True, 2), (0, False, 0), (1, True, 1)]


def test_closes_turns_false_if_the_whole_window_has_no_weight():
    """So that the loop's own optimizer does not step on nothing."""
    model, told = network(), []
    accum = Accumulator(2)
    for _ in range(2):
        with accum(model, weight=0) as micro:
            micro.backward(mean_loss(model, data([2])[0]))
            told.append(micro.closes)
    assert told == [False, False]
    assert (accum.updates, accum.skipped) == (0, 1)
    assert all(p.grad is None for p in model.parameters())


def test_the_last_window_is_told_in_full():
    """Index, size, weight, loss, norm, whether it stepped, scale, seconds; frozen."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0), max_grad_norm=0.1)
    assert accum.last is None
    batches = data([1, 2, 3, 4])
    for batch in batches:
        with accum(model, weight=len(batch[0])):
            accum.backward(mean_loss(model, batch))
    last = accum.last
    window = batches[2:]
    expected = sum(len(b[0]) * mean_loss(model, b) for b in window).detach() / 7
    assert (last.index, last.micro_batches, last.weight) == (1, 2, 7.0)
    assert last.loss == pytest.approx(float(expected), rel=1e-14)
    norm = torch.stack([g.norm() for g in big_batch(model, window)]).norm()
    assert last.grad_norm == pytest.approx(float(norm), rel=1e-14)
    assert last.grad_norm > 0.1  # before clipping
    assert last.stepped
    assert last.scale == 1.0
    assert last.seconds > 0
    assert accum.last is last
    with pytest.raises(AttributeError):
        last.loss = 0.0


def test_where_the_loop_steps_there_is_no_norm():
    """accum never sees it."""
    model = network()
    accum = Accumulator(1)
    with accum(model):
        accum.backward(mean_loss(model, data([2])[0]))
    assert accum.last.grad_norm is None


def test_on_update_runs_once_for_each_update_with_the_gradients_still_there():
    """In the order in which they were given; the decorator returns the function."""
    model, ran = network(), []
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.1))
    before = [p.detach().clone() for p in model.parameters()]

    @accum.on_update
    def first():
        moved = not torch.equal(before[0], next(iter(model.parameters())))
        ran.append(("first", moved, model[0].weight.grad is not None, accum.updates))

    accum.on_update(lambda: ran.append("second"))
    train(model, data([2] * 4), accum)
    assert callable(first)
    assert ran == [("first", True, True, 1), "second", ("first", True, True, 2), "second"]


def test_on_update_does_not_run_for_a_skipped_window():
    """Neither an average of the weights nor a counter moves then."""
    model, ran = network(), []
    accum = Accumulator(1, optimizer=SGD(model.parameters(), 0.1))
    accum.on_update(lambda: ran.append(accum.updates))
    for scale in (1.0, float("nan"), 1.0):
        with accum(model):
            accum.backward(mean_loss(model, data([2])[0]) * scale)
    assert ran == [1, 2]
    assert accum.skipped == 1


def test_an_exponential_average_follows_updates_only():
    """What people use it for: 24 micro-batches, windows of 4: 6 ticks."""
    model = weights = network()
    average = torch.optim.swa_utils.AveragedModel(weights)
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.1))
    accum.on_update(lambda: average.update_parameters(model))
    train(model, data([2] * 24), accum)
    assert int(average.n_averaged) == 6


@pytest.mark.parametrize(("count", "steps", "ticks"), [(24, 4, 6), (24, 1, 24), (10, 4, 3)])
def test_the_scheduler_ticks_once_for_each_update(count, steps, ticks):
    """Neither per micro-batch nor per planned window."""
    model = network()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
    accum = Accumulator(steps, optimizer=optimizer, scheduler=scheduler)
    train(model, data([2] * count), accum)
    assert scheduler.last_epoch == ticks
    assert optimizer.param_groups[0]["lr"] == 0.5**ticks


def test_counters_over_three_passes_with_tails_and_skipped_windows():
    """Nothing is counted twice, nothing is left out."""
    model = network()
    accum = Accumulator(4, optimizer=still(model))
    for epoch in range(3):
        for place, batch in enumerate(accum.batches(data([2] * 6))):
            assert accum.position == place
            with accum(model, weight=0 if epoch == 1 and place < 4 else 1):
                accum.backward(mean_loss(model, batch))
    assert (accum.windows, accum.updates, accum.skipped) == (6, 5, 1)
    assert (accum.micro_batches, accum.epoch, accum.pending) == (18, 3, 0)
    assert accum.position == 0
    assert accum.syncs == 0
    assert accum.last.index == 5


def test_gradients_that_stood_there_before_the_first_window_do_not_enter_it():
    """Where accum takes the step the window is its own from the start."""
    model, got = network(), []
    first, second = data([2, 2])
    mean_loss(model, first).backward()
    accum = Accumulator(1, optimizer=still(model))
    accum.on_update(lambda: got.append(gradients(model)))
    train(model, [second], accum)
    assert relative(got[0], big_batch(model, [second])) <= 1e-15


def test_parameters_that_no_optimizer_steps_are_cleared_with_the_rest():
    """A frozen-by-omission trunk must not pile up gradients."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model[2].parameters(), 0.1))
    train(model, data([2] * 4), accum)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model[0].weight, network()[0].weight)


def test_frozen_parameters_stay_frozen_and_without_gradient():
    """No requires_grad is left switched."""
    model = network()
    model[0].requires_grad_(False)
    accum = Accumulator(2, optimizer=SGD(model[2].parameters(), 0.1))
    train(model, data([2] * 4), accum)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert model[0].weight.grad is None


@pytest.mark.parametrize("steps", [3, 4])
def test_parameters_that_come_later_belong_to_the_window(steps):
    """A layer added between two windows, and its group added to the optimizer: a tail of it."""
    model, got = network(), []
    optimizer = SGD(model.parameters(), lr=0.0)
    accum = Accumulator(steps, optimizer=optimizer, max_grad_norm=1e-3)
    train(model, data([2] * steps), accum)
    model.append(nn.Linear(2, 2).double())
    optimizer.add_param_group({"params": model[3].parameters()})
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([1, 3])
    for batch in accum.batches(batches):
        with accum(model, weight=len(batch[0])):
            accum.backward(mean_loss(model, batch))
    expected = big_batch(model, batches)
    norm = float(torch.stack([g.norm() for g in expected]).norm())
    assert accum.last.grad_norm == pytest.approx(norm, rel=1e-14)
    assert relative(got[0], [g * 1e-3 / (norm + 1e-6) for g in expected]) <= 1e-14
    assert all(p.grad is None for p in model.parameters())


def test_memory_and_work_do_not_depend_on_how_often_accumulators_were_made():
    """A hundred finished Accumulators over the same model change nothing in the next one."""
    ours, theirs = network(), network()
    batches = data([4] * 6)
    for _ in range(100):
        Accumulator(2, optimizer=SGD(ours.parameters(), 0.1))
    old = Accumulator(2, optimizer=SGD(ours.parameters(), 0.1))
    train(ours, batches, Accumulator(3, optimizer=SGD(ours.parameters(), 0.1)))
    textbook_loop(theirs, batches, 3, SGD(theirs.parameters(), 0.1))
    assert same(ours, theirs)
    assert old.updates == 0


def test_weighted_updates_of_a_whole_run_are_those_of_big_batches():
    """Three passes with tails, momentum and decay: the weights agree to rounding."""
    ours, theirs = network(), network()
    accum = Accumulator(4, optimizer=SGD(ours.parameters(), 0.05, momentum=0.9, weight_decay=0.1))
    reference = SGD(theirs.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    for epoch in range(3):
        batches = data([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], seed=epoch)
        for batch in accum.batches(batches):
            with accum(ours, weight=len(batch[0])):
                accum.backward(mean_loss(ours, batch))
        for start in range(0, 10, 4):
            window = batches[start : start + 4]
            for p, g in zip(
                theirs.parameters(),
                weighted(theirs, window, [len(b[0]) for b in window]),
                strict=True,
            ):
                p.grad = g
            reference.step()
    assert relative(list(ours.parameters()), list(theirs.parameters())) <= 1e-13
    assert accum.updates == 3 * math.ceil(10 / 4)


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_lets_go_of_its_models_at_its_end(fails):
    """A loop keeps its last micro-batch in a variable; that keeps no model."""
    model = network()
    accum = Accumulator(2)
    with contextlib.suppress(KeyError), accum(model) as micro:
        accum.backward(mean_loss(model, data([2])[0]))
        if fails:
            raise KeyError
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert (micro.index, micro.closes) == (0, False)
