"""A pass through the data: its last item, its position, look-ahead, loaders of every kind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from accelerate import Accelerator
from textbook import big_batch, data, gradients, mean_loss, network, relative
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accumplug import Accumulator


class Rows(Dataset):
    """A map-style dataset."""

    def __init__(self, count):
        self.x, self.y = data([count])[0]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        return self.x[place], self.y[place]


class Stream(IterableDataset):
    """A dataset that has no length."""

    def __init__(self, count):
        self.rows = Rows(count)

    def __iter__(self):
        return (self.rows[i] for i in range(len(self.rows)))


class WrongLength(list):
    """len() lies, as that of some streaming loaders does."""

    def __len__(self):
        return 0


class NoLength:
    def __init__(self, count):
        self.items = data([2] * count)

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        raise TypeError("this loader has no length")


def generator(count):
    yield from data([2] * count)


KINDS = {
    "list": lambda n: data([2] * n),
    "generator": generator,
    "iterator": lambda n: iter(data([2] * n)),
    "map-style": lambda n: DataLoader(Rows(2 * n), batch_size=2),
    "shuffled": lambda n: DataLoader(Rows(2 * n), batch_size=2, shuffle=True),
    "workers": lambda n: DataLoader(Rows(2 * n), batch_size=2, num_workers=1),
    "iterable": lambda n: DataLoader(Stream(2 * n), batch_size=2),
    "length raises": NoLength,
    "length lies": lambda n: WrongLength(data([2] * n)),
    "prepared": lambda n: Accelerator(cpu=True).prepare(DataLoader(Rows(2 * n), batch_size=2)),
    "prepared iterable": lambda n: Accelerator(cpu=True).prepare(
        DataLoader(Stream(2 * n), batch_size=2)
    ),
    "zip": lambda n: zip(data([2] * n), range(n), strict=True),
}


def train(model, accum, items, **weight):
    for batch in items:
        with accum(model, **weight):
            accum.backward(mean_loss(model, batch))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_last_item_closes_whatever_the_loader_is(make):
    """Six items and windows of four: no, no, no, yes, no, yes."""
    model, closes = network(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    for item in accum.batches(make(6)):
        batch = item[0] if isinstance(item[1], int) else item
        with accum(model) as micro:
            micro.backward(mean_loss(model, batch))
            closes.append(micro.closes)
    assert closes == [False, False, False, True, False, True]
    assert (accum.epoch, accum.updates, accum.micro_batches, accum.pending) == (1, 2, 6, 0)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("tail", ["flush", "drop", "carry"])
def test_short_and_empty_passes(count, tail):
    """No item: no update, one pass. Fewer than a window: what the tail says."""
    model = network()
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0), tail=tail)
    for batch in accum.batches(data([2] * count)):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert accum.updates == (count > 0 and tail == "flush")
    assert accum.pending == (count if tail == "carry" else 0)
    assert accum.epoch == 1


def test_items_come_as_they_are_and_in_order():
    """The same objects, each once."""
    items = [object() for _ in range(5)]
    assert list(Accumulator(2).batches(items)) == items


def test_it_looks_one_item_ahead_and_no_further():
    """When an item is handed out at most one more has been fetched."""
    fetched = []

    def source():
        for number in range(4):
            fetched.append(number)
            yield number

    seen = [(item, len(fetched)) for item in Accumulator(2).batches(source())]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_the_position_counts_what_was_trained_on_in_this_pass():
    """For resuming: an item that is in hand has to be fetched again; 0 between passes."""
    model, seen = network(), []
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0))
    for _ in range(2):
        for batch in accum.batches(data([2] * 3)):
            before = accum.position
            with accum(model):
                accum.backward(mean_loss(model, batch))
            seen.append((accum.epoch, before, accum.position))
    assert seen == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 1), (1, 1, 2), (1, 2, 3)]
    assert (accum.epoch, accum.position) == (2, 0)


def test_a_pass_without_blocks_is_a_pass():
    """Its items were handed out and left alone."""
    accum = Accumulator(2)
    for _ in range(2):
        for _ in accum.batches("abc"):
            pass
    assert (accum.epoch, accum.position) == (2, 0)


def test_a_pass_that_was_broken_off_is_no_end_of_the_data():
    """Nothing is flushed by it; the window goes on with the next pass."""
    model, got = network(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([2] * 6)
    for place, batch in enumerate(accum.batches(batches)):
        with accum(model):
            accum.backward(mean_loss(model, batch))
        if place == 1:
            break
    assert (accum.updates, accum.pending, accum.epoch) == (0, 2, 0)
    for batch in accum.batches(batches[2:4]):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert relative(got[0], big_batch(model, batches[:4])) <= 1e-15


def test_a_run_that_an_exception_ended_does_not_flush():
    """Half a window is no update that anyone asked for."""
    model = network()
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 1.0))

    def loop():
        for place, batch in enumerate(accum.batches(data([2] * 6))):
            if place == 2:
                raise KeyboardInterrupt
            with accum(model):
                accum.backward(mean_loss(model, batch))

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert accum.updates == 0
    assert torch.equal(model[0].weight, network()[0].weight)


def test_an_error_of_the_loader_arrives_and_flushes_nothing():
    """It is the loader's own error, and the pass has not ended."""

    def source():
        yield from data([2] * 2)
        raise OSError("the disk is gone")

    model = network()
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 1.0))
    with pytest.raises(OSError, match="the disk is gone"):
        train(model, accum, accum.batches(source()))
    assert (accum.updates, accum.epoch) == (0, 0)


def test_items_that_the_loop_leaves_out_are_no_micro_batches():
    """`continue` on bad data, also on the very last: the tail is flushed all the same."""
    model, got = network(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([2] * 7)
    for place, batch in enumerate(accum.batches(batches)):
        if place in (1, 6):
            continue
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert (len(got), accum.pending, accum.micro_batches) == (2, 0, 5)
    assert relative(got[0], big_batch(model, [batches[i] for i in (0, 2, 3, 4)])) <= 1e-15
    assert relative(got[1], big_batch(model, [batches[5]])) <= 1e-15


def test_a_loop_that_steps_itself_and_leaves_the_last_item_out_is_told():
    """Nobody would step on the tail: neither counted nor left to enter the next pass."""
    model = network()
    optimizer = SGD(model.parameters(), 0.0)
    accum = Accumulator(4)

    def loop():
        for place, batch in enumerate(accum.batches(data([2] * 3))):
            if place == 2:
                continue
            with accum(model) as micro:
                accum.backward(mean_loss(model, batch))
                if micro.closes:
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"call micro.skip\(\) in its block"):
        loop()
    assert accum.updates == 0


def test_an_evaluation_inside_of_the_pass_changes_nothing():
    """Another loader is another loader, whether it ends, breaks, or breaks on its last batch."""
    model, sizes = network(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: sizes.append(accum.last.micro_batches))
    held_out = data([2] * 3, seed=9)
    for place, batch in enumerate(accum.batches(data([2] * 10))):
        if place in (0, 2, 5):
            for number, other in enumerate(held_out):
                with torch.no_grad():
                    mean_loss(model, other)
                if number == place - 1:
                    break
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert sizes == [4, 4, 2]


def test_batches_does_not_keep_the_loader_alive():
    """When the pass is over nothing refers to its items."""

    class Items(list):
        pass

    accum, items = Accumulator(2), Items([1, 2, 3])
    for _ in accum.batches(items):
        pass
    gone = weakref.ref(items)
    del items
    gc.collect()
    assert gone() is None


# -- the look-ahead of a window -------------------------------------------------------------


def test_weighed_windows_are_known_from_their_first_micro_batch_on():
    """Full windows and a tail; the weights need not be said again."""
    model, got, told = network(), [], []
    accum = Accumulator(3, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append(gradients(model)))
    accum.on_update(lambda: told.append((accum.last.weight, accum.last.micro_batches)))
    batches = data([3, 1, 4, 1, 5, 9, 2, 6])
    for batch in accum.batches(batches, weigh=lambda b: len(b[0])):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert told == [(8.0, 3), (15.0, 3), (8.0, 2)]
    for found, start in zip(got, (0, 3, 6), strict=True):
        assert relative(found, big_batch(model, batches[start : start + 3])) <= 1e-15
    assert (accum.epoch, accum.position) == (1, 0)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_weighed_windows_work_with_every_loader(make):
    """No length is asked for there either."""
    model = network()
    accum, closes = Accumulator(4, optimizer=SGD(model.parameters(), 0.0)), []
    for item in accum.batches(make(6), weigh=lambda _: 2):
        batch = item[0] if isinstance(item[1], int) else item
        with accum(model) as micro:
            micro.backward(mean_loss(model, batch))
            closes.append(micro.closes)
    assert closes == [False, False, False, True, False, True]
    assert accum.epoch == 1


def test_weighed_windows_drop_their_tail_if_that_is_asked_for():
    """Two full windows of two; the fifth micro-batch is not even handed out."""
    model, seen = network(), []
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0), tail="drop")
    for batch in accum.batches(data([2] * 5), weigh=lambda _: 2):
        seen.append(batch)
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert (len(seen), accum.updates, accum.pending) == (4, 2, 0)


def test_weights_that_contradict_the_look_ahead_are_refused():
    """One of the two is wrong, and the total is fixed already."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0))
    items = accum.batches(data([2] * 2), weigh=lambda _: 2)
    with pytest.raises(ValueError, match=r"has the weight 2.0 \(from weigh=\), and now 5.0"):
        train(model, accum, items, weight=5)


def test_the_same_weight_may_be_said_again():
    """An existing loop need not be changed for the look-ahead."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0))
    for batch in accum.batches(data([2] * 2), weigh=lambda b: len(b[0])):
        with accum(model, weight=len(batch[0])):
            accum.backward(mean_loss(model, batch))
    assert accum.updates == 1


def test_items_that_were_weighed_and_then_left_out_are_an_error():
    """Their weight is in the total already."""
    model = network()
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    items = accum.batches(data([2] * 4), weigh=lambda _: 2)
    every_other = (batch for place, batch in enumerate(items) if place != 1)
    with pytest.raises(RuntimeError, match="let weigh return 0 for what the loop leaves out"):
        train(model, accum, every_other)


def test_skip_of_what_was_weighed_is_an_error():
    """The promise can't be taken back."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0))
    for _ in accum.batches(data([2] * 2), weigh=lambda _: 2):
        with pytest.raises(RuntimeError, match="let weigh return 0"), accum(model) as micro:
            micro.skip()
        break


def test_weigh_of_zero_leaves_a_micro_batch_out():
    """It may be skipped, or run with a loss that is nan."""
    model, got = network(), []
    accum = Accumulator(3, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append(gradients(model)))
    batches, weights = data([2] * 3), iter([0, 2, 0])
    for place, batch in enumerate(accum.batches(batches, weigh=lambda _: next(weights))):
        with accum(model) as micro:
            if place == 0:
                micro.skip()
            else:
                micro.backward(mean_loss(model, batch) * (float("nan") if place == 2 else 1.0))
    assert relative(got[0], big_batch(model, [batches[1]])) <= 1e-15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "carry"}, 'which tail="carry" spreads over passes'),
        ({"nonfinite": "skip_micro_batch"}, 'which nonfinite="skip_micro_batch" breaks'),
    ],
)
def test_options_that_a_look_ahead_can_not_keep_are_refused(options, message):
    """Before the first item."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0), **options)
    with pytest.raises(ValueError, match=message):
        next(iter(accum.batches(data([2]), weigh=lambda _: 1)))


def test_a_look_ahead_can_not_start_inside_of_a_window():
    """It has to see it whole."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0))
    with accum(model):
        accum.backward(mean_loss(model, data([2])[0]))
    with pytest.raises(
        RuntimeError, match=r"1 micro-batches are pending; flush\(\) or discard\(\)"
    ):
        next(iter(accum.batches(data([2]), weigh=lambda _: 1)))


def test_extra_without_a_look_ahead_says_what_to_do():
    """Its denominator is the size of the window."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0))
    loss = mean_loss(model, data([2])[0])
    with pytest.raises(ValueError, match=r"use accum.batches\(loader, weigh=...\)"), accum(model):
        accum.backward(loss, extra=loss)


def test_weigh_gives_a_wrong_weight():
    """Said before the window runs."""
    with pytest.raises(ValueError, match="finite and at least 0; got -2"):
        next(iter(Accumulator(2).batches(data([2]), weigh=lambda _: -2)))
