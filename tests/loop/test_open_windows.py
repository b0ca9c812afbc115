"""Windows whose number of micro-batches is open, and windows that the loop has to close itself."""

from __future__ import annotations

import pytest
import torch
from textbook import big_batch, data, gradients, mean_loss, network, relative
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from accumplug import Accumulator


def collect(accum, model):
    got = []
    accum.on_update(lambda: got.append((accum.last.micro_batches, gradients(model))))
    return got


# -- steps=None -------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [None, 10])
def test_a_block_may_say_that_the_window_ends_with_it(steps):
    """A token budget: with steps=None, and before a number is reached."""
    model = network()
    accum = Accumulator(steps, optimizer=SGD(model.parameters(), 0.0))
    got, batches = collect(accum, model), data([3, 4, 1, 6, 2])
    for place, batch in enumerate(batches):
        with accum(model, weight=len(batch[0]), closes=place in (2, 4)) as micro:
            accum.backward(mean_loss(model, batch))
        assert micro.closes == (place in (2, 4))
    assert [size for size, _ in got] == [3, 2]
    assert relative(got[0][1], big_batch(model, batches[:3])) <= 1e-15
    assert relative(got[1][1], big_batch(model, batches[3:])) <= 1e-15


def test_without_steps_a_window_is_open_until_flush():
    """However many micro-batches there are."""
    model = network()
    accum = Accumulator(None, optimizer=SGD(model.parameters(), 0.0))
    got, batches = collect(accum, model), data([2] * 37)
    for batch in batches:
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert (accum.steps, accum.pending, accum.updates) == (None, 37, 0)
    assert accum.flush()
    assert relative(got[0][1], big_batch(model, batches)) <= 1e-14


def test_without_steps_the_end_of_the_data_closes_the_tail():
    """Under batches, in the block of the last item."""
    model = network()
    accum = Accumulator(None, optimizer=SGD(model.parameters(), 0.0))
    got, batches = collect(accum, model), data([2] * 5)
    for batch in accum.batches(batches):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert [size for size, _ in got] == [5]
    assert relative(got[0][1], big_batch(model, batches)) <= 1e-15


@pytest.mark.parametrize("count", [1, 200])
def test_without_steps_the_loss_keeps_the_size_of_the_mean_loss(count):
    """With a plan of 1e9 micro-batches each of them would underflow in fp16."""
    seen = []
    model = nn.Linear(2, 1)
    accum = Accumulator(None, optimizer=SGD(model.parameters(), 0.0))
    for _ in range(count):
        with accum(model, weight=1000):
            loss = model(torch.ones(3, 2)).mean()
            loss.register_hook(lambda grad: seen.append(grad.item()))
            accum.backward(loss)
    accum.flush()
    assert set(seen) == {1.0}


# -- a loop that steps itself and does not ----------------------------------------------------


@pytest.mark.parametrize("does", ["neither", "steps", "zeroes in place too late"])
def test_a_closed_window_that_nobody_stepped_or_zeroed_is_an_error_before_the_next_one(does):
    """Its gradient would be counted again; said when the first backward begins."""
    model = network()
    optimizer, accum = SGD(model.parameters(), 0.1), Accumulator(2)
    batches = data([2] * 4)
    with pytest.raises(RuntimeError, match=r"window 0 has closed.*optimizer.zero_grad\(\)"):
        for batch in batches:
            with accum(model) as micro:
                accum.backward(mean_loss(model, batch))
            if micro.closes and does == "steps":
                optimizer.step()
    assert accum.windows == 1
    accum.discard()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["inside", "behind", "first line of the next"])
def test_a_loop_that_zeroes_in_whatever_place_is_right(when, set_to_none):
    """`zero_grad` as the first line of a block is legal."""
    model, got = network(), []
    optimizer, accum, batches = SGD(model.parameters(), 0.0), Accumulator(2), data([2] * 6)
    closed = False
    for batch in batches:
        with accum(model) as micro:
            if closed and when == "first line of the next":
                optimizer.zero_grad(set_to_none=set_to_none)
            accum.backward(mean_loss(model, batch))
            closed = micro.closes
            if closed:
                got.append(gradients(model))
                optimizer.step()
                if when == "inside":
                    optimizer.zero_grad(set_to_none=set_to_none)
        if closed and when == "behind":
            optimizer.zero_grad(set_to_none=set_to_none)
    for place in range(3):
        assert relative(got[place], big_batch(model, batches[2 * place : 2 * place + 2])) <= 1e-15


def test_a_window_without_weight_leaves_nothing_to_step_on():
    """It was skipped, and the next window is right."""
    model, accum = network(), Accumulator(2)
    batches = data([2] * 4)
    for place, batch in enumerate(batches):
        with accum(model, weight=0 if place < 2 else 1):
            accum.backward(mean_loss(model, batch))
    assert (accum.skipped, accum.updates) == (1, 1)
    assert relative(gradients(model), big_batch(model, batches[2:])) <= 1e-15


# -- what can be known at construction --------------------------------------------------------


class NeedsEpoch:
    """A scheduler as timm has it."""

    def step(self, epoch, metric=None):
        """Not called."""


class DPOptimizer(SGD):
    """As Opacus has it: known by its name."""


class GradSampleModule(nn.Linear):
    """As Opacus has it: known by its name."""


def test_a_scheduler_whose_step_needs_an_argument_is_refused_at_construction():
    """Not after the weights have moved."""
    optimizer = SGD(network().parameters(), 0.1)
    with pytest.raises(ValueError, match=r"NeedsEpoch.step needs the argument epoch"):
        Accumulator(2, optimizer=optimizer, scheduler=NeedsEpoch())


def test_a_scheduler_of_another_optimizer_is_refused_at_construction():
    """Its learning rates would never be used."""
    one, other = (SGD(network().parameters(), 0.1) for _ in range(2))
    with pytest.raises(ValueError, match="schedules an optimizer that is not among the 1"):
        Accumulator(2, optimizer=one, scheduler=LambdaLR(other, lambda _: 1.0))


def test_per_sample_clipping_is_refused_by_name():
    """By the optimizer at construction, by the model in its first block."""
    with pytest.raises(ValueError, match="Opacus"):
        Accumulator(2, optimizer=DPOptimizer(network().parameters(), 0.1))
    model = GradSampleModule(2, 1)
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="Opacus"), accum(model):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": 3},
        {"scheduler": 3},
        {"scaler": 3},
        {"max_grad_norm": "1"},
        {"steps": 2.5},
        {"steps": "8"},
    ],
    ids=str,
)
def test_wrong_types_are_type_errors(options):
    """And ValueErrors, as they were."""
    model = network()
    given = {"steps": 2, "optimizer": SGD(model.parameters(), 0.1)} | options
    with pytest.raises(TypeError) as told:
        Accumulator(**given)
    assert isinstance(told.value, ValueError)


# -- two Accumulators over one model ----------------------------------------------------------


def test_two_accumulators_with_windows_over_one_model_name_the_cause():
    """Not zero_grad, which nobody called."""
    model = network()
    one, other = (Accumulator(2, optimizer=SGD(model.parameters(), 0.1)) for _ in range(2))
    batch = data([2])[0]
    with one(model):
        one.backward(mean_loss(model, batch))
    with other(model):
        other.backward(mean_loss(model, batch))
    with (
        pytest.raises(RuntimeError, match="another Accumulator has 1 micro-batches pending in"),
        one(model),
    ):
        one.backward(mean_loss(model, batch))


def test_nested_blocks_of_two_accumulators_over_one_model_name_the_cause():
    """Not a missing backward."""
    model = network()
    one, other = (Accumulator(2, optimizer=SGD(model.parameters(), 0.1)) for _ in range(2))
    with (
        pytest.raises(RuntimeError, match="inside a block of another Accumulator over the same"),
        one(model),
        other(model),
    ):
        pass


# -- who wants to know ------------------------------------------------------------------------


def test_on_window_is_told_of_each_closed_window_with_its_result():
    """Skipped ones too; `remove` ends it."""
    model, told = network(), []
    accum = Accumulator(1, optimizer=AdamW(model.parameters()))
    handle = accum.on_window(told.append)
    for place, batch in enumerate(data([2] * 4)):
        with accum(model, weight=0 if place == 1 else 1):
            accum.backward(mean_loss(model, batch))
        if place == 2:
            handle.remove()
            handle.remove()
    assert [(result.index, result.stepped) for result in told] == [(0, True), (1, False), (2, True)]
    assert told[-1].loss > 0


def test_on_update_decorates_and_can_be_removed():
    """What it gives back is still the function."""
    model, calls = network(), []
    accum = Accumulator(1, optimizer=SGD(model.parameters(), 0.1))

    @accum.on_update
    def count():
        calls.append(accum.updates)
        return len(calls)

    def block():
        with accum(model):
            accum.backward(mean_loss(model, data([2])[0]))

    block()
    assert calls == [1]
    assert count() == 2
    count.remove()
    block()
    assert calls == [1, 1]


def test_close_lets_go_of_callbacks_and_of_an_open_window():
    """And the object may be used on."""
    model, calls = network(), []
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.1))
    accum.on_update(lambda: calls.append(1))
    for _ in range(3):
        with accum(model):
            accum.backward(mean_loss(model, data([2])[0]))
    accum.close()
    assert (accum.pending, calls) == (0, [1])
    assert all(p.grad is None for p in model.parameters())
    for _ in range(2):
        with accum(model):
            accum.backward(mean_loss(model, data([2])[0]))
    assert (accum.updates, calls) == (2, [1])


def test_counters_can_be_read_and_not_set():
    """They say what happened."""
    accum = Accumulator(2)
    for name in ("windows", "updates", "skipped", "micro_batches", "epoch", "position", "syncs"):
        assert getattr(accum, name) == 0
        with pytest.raises(AttributeError):
            setattr(accum, name, 1)


def test_batches_has_the_length_of_its_loader_if_any():
    """For a progress bar."""
    accum = Accumulator(2)
    assert len(accum.batches([1, 2, 3])) == 3
    with pytest.raises(TypeError, match="generator has no length"):
        len(accum.batches(i for i in range(3)))


def test_a_micro_batch_shows_what_the_documents_show():
    """And nothing else."""
    names = [name for name in dir(Accumulator(2)(nn.Linear(1, 1))) if not name.startswith("_")]
    assert names == ["backward", "closes", "index", "skip", "weight"]
