"""Loops that read ahead, or cut an item: a block is the last one if it leaves no item waiting."""

from __future__ import annotations

import itertools

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from textbook import big_batch, data, gradients, mean_loss, network, relative
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

from accumplug import Accumulator

STEPS, ITEMS = 4, 7


def window_by_window(items):
    """As a Trainer fetches: a window's items first, then its blocks."""
    items = iter(items)
    while window := list(itertools.islice(items, STEPS)):
        yield from window


def one_ahead(items):
    """A prefetcher that holds one item more than the loop."""
    items = iter(items)
    held = next(items, None)
    while held is not None:
        following = next(items, None)
        yield held
        held = following


def all_first(items):
    """Everything is fetched before the first block."""
    yield from list(items)


READERS = {
    "one by one": iter,
    "window by window": window_by_window,
    "one ahead": one_ahead,
    "all first": all_first,
}


def run(accum, model, optimizer, batches, items):
    """A loop that steps itself, as it stands in many training scripts."""
    got, sizes = [], []
    for batch in items:
        with accum(model) as micro:
            accum.backward(mean_loss(model, batch))
            if micro.closes:
                got.append(gradients(model))
                sizes.append(micro.index + 1)
                optimizer.step()
                optimizer.zero_grad()
    return got, sizes


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_windows_are_4_and_3_however_the_loop_reads(read):
    """Seven micro-batches in windows of four; the tail is a mean over three."""
    model = network()
    optimizer = SGD(model.parameters(), 0.0)
    accum, batches = Accumulator(STEPS), data([2] * ITEMS)
    got, sizes = run(accum, model, optimizer, batches, read(accum.batches(batches)))
    assert sizes == [4, 3]
    assert relative(got[0], big_batch(model, batches[:4])) <= 1e-15
    assert relative(got[1], big_batch(model, batches[4:])) <= 1e-15
    assert (accum.updates, accum.pending, accum.epoch, accum.position) == (2, 0, 1, 0)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("tail", ["flush", "drop", "carry"])
def test_several_passes_end_as_the_tail_says_however_the_loop_reads(read, tail):
    """Each pass is counted once, and nothing of it is left open or closed twice."""
    model, sizes = network(), []
    accum = Accumulator(STEPS, optimizer=SGD(model.parameters(), 0.0), tail=tail)
    accum.on_update(lambda: sizes.append(accum.last.micro_batches))
    for epoch in range(2):
        assert accum.epoch == epoch
        for batch in read(accum.batches(data([2] * ITEMS))):
            with accum(model):
                accum.backward(mean_loss(model, batch))
    expected = {"flush": [4, 3, 4, 3], "drop": [4, 4], "carry": [4, 4, 4]}[tail]
    assert sizes == expected
    assert accum.pending == (2 if tail == "carry" else 0)
    assert (accum.epoch, accum.position) == (2, 0)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_the_position_is_the_number_of_items_that_were_trained_on(read):
    """Whatever was read ahead has to be fetched again after a resume."""
    model, seen = network(), []
    accum = Accumulator(STEPS, optimizer=SGD(model.parameters(), 0.0))
    for batch in read(accum.batches(data([2] * ITEMS))):
        with accum(model):
            accum.backward(mean_loss(model, batch))
        seen.append(accum.position)
    assert seen[:-1] == [1, 2, 3, 4, 5, 6]
    assert seen[-1] in (7, 0)  # the last block ends the pass where the loop has seen the end


def test_next_inside_of_the_block_is_a_prefetch_like_any_other():
    """The data end inside of the last block; the position is that of the blocks."""
    model, sizes, seen = network(), [], []
    accum = Accumulator(STEPS, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: sizes.append(accum.last.micro_batches))
    for _ in range(2):
        items = accum.batches(data([2] * ITEMS))
        batch = next(items)
        while batch is not None:
            with accum(model):
                accum.backward(mean_loss(model, batch))
                batch = next(items, None)
            seen.append(accum.position)
    assert seen == [1, 2, 3, 4, 5, 6, 0] * 2
    assert (sizes, accum.pending, accum.epoch) == ([4, 3, 4, 3], 0, 2)


def test_what_was_read_ahead_and_left_out_is_told_and_the_tail_is_flushed():
    """At the next pass: until then a block could have come."""
    model, sizes = network(), []
    accum = Accumulator(STEPS, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: sizes.append(accum.last.micro_batches))
    for place, batch in enumerate(window_by_window(accum.batches(data([2] * ITEMS)))):
        if place < 6:
            with accum(model):
                accum.backward(mean_loss(model, batch))
    assert (sizes, accum.pending) == ([4], 2)
    with pytest.warns(UserWarning, match="1 items that the loop had read ahead"):
        assert len(list(accum.batches([1, 2]))) == 2
    assert sizes == [4, 2]


@pytest.mark.parametrize("read", [window_by_window, one_ahead], ids=["windows", "one ahead"])
@pytest.mark.parametrize("steps_inside", [True, False])
@pytest.mark.parametrize("made", ["before", "after"])
def test_a_prepared_loader_is_counted_where_the_loop_reads_ahead(read, steps_inside, made):
    """Accelerate's autoregressive example is such a loop: it sees the end of the loader early."""
    accelerator = Accelerator(cpu=True)
    model, batches = network(torch.float32), data([2] * ITEMS, torch.float32)
    start = network(torch.float32)
    optimizer = SGD(model.parameters(), 0.0)
    accum = Accumulator(STEPS, accelerator=accelerator) if made == "before" else None
    rows = [(x, y) for batch in batches for x, y in zip(*batch, strict=True)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    accum = accum or Accumulator(STEPS, accelerator=accelerator)
    got = []
    for _ in range(2):
        for batch in read(loader):
            with accum(model) as micro:
                accelerator.backward(mean_loss(model, batch))
                if micro.closes:
                    got.append(gradients(model))
                if steps_inside:
                    optimizer.step()
                    optimizer.zero_grad()
            if not steps_inside:
                optimizer.step()
                optimizer.zero_grad()
    assert (accum.updates, accum.pending, accum.epoch) == (4, 0, 2)
    for place in (0, 2):
        assert relative(got[place], big_batch(start, batches[:4])) <= 1e-6
        assert relative(got[place + 1], big_batch(start, batches[4:])) <= 1e-6


def test_a_prepared_loader_that_can_not_be_counted_is_refused_before_the_wrong_update():
    """The Accumulator was built when the loop was inside of its first pass."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network(torch.float32))
    rows = [(x[0], y[0]) for x, y in data([2] * 6, torch.float32)]
    items = iter(accelerator.prepare(DataLoader(rows, batch_size=1)))
    first = next(items)
    accum = Accumulator(STEPS, accelerator=accelerator)
    for batch in [first, *itertools.islice(items, 1)]:
        with accum(model):
            accelerator.backward(mean_loss(model, batch))
    rest = [next(items) for _ in range(4)]
    told = pytest.raises(RuntimeError, match=r"the loop reads ahead.*accum.batches\(loader\)")
    with told, accum(model):
        accelerator.backward(mean_loss(model, rest[0]))
    assert accum.updates == 0


# -- one item, several blocks ---------------------------------------------------------------


def test_items_cut_by_hand_make_full_windows():
    """Three items of four blocks each, in windows of four: never closed by an item's first."""
    model, got = network(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append((accum.last.micro_batches, gradients(model))))
    batches = data([8] * 3)
    for x, y in accum.batches(batches):
        for part in zip(x.split(2), y.split(2), strict=True):
            with accum(model):
                accum.backward(mean_loss(model, part))
    assert [size for size, _ in got] == [4, 4, 4]
    for (_, found), batch in zip(got, batches, strict=True):
        assert relative(found, big_batch(model, [batch])) <= 1e-15
    assert (accum.pending, accum.epoch) == (0, 1)


@pytest.mark.parametrize("count", [1, 3])
def test_split_knows_its_last_part(count):
    """Also in a pass of one item; a part of another size is the last one of its item."""
    model, got = network(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append((accum.last.micro_batches, gradients(model))))
    batches, parts = data([7] * count), []
    for batch in accum.batches(batches):
        for part in accum.split(batch, 2):
            parts.append(len(part[0]))
            with accum(model, weight=len(part[0])):
                accum.backward(mean_loss(model, part))
    assert parts == [2, 2, 2, 1] * count
    assert [size for size, _ in got] == [4] * count
    for (_, found), batch in zip(got, batches, strict=True):
        assert relative(found, big_batch(model, [batch])) <= 1e-15
    assert (accum.pending, accum.epoch, accum.micro_batches) == (0, 1, 4 * count)


def test_parts_count_like_any_micro_batch_and_the_very_last_one_closes_the_tail():
    """Five items of two parts in windows of four: 4, 4 and 2."""
    model, sizes = network(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: sizes.append(accum.last.micro_batches))
    positions = []
    for batch in accum.batches(data([4] * 5)):
        for part in accum.split(batch, 2):
            with accum(model):
                accum.backward(mean_loss(model, part))
            positions.append(accum.position)
    assert sizes == [4, 4, 2]
    assert positions == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


@pytest.mark.parametrize("inside", [True, False], ids=["in batches", "alone"])
def test_without_steps_the_last_part_closes_the_window(inside):
    """One batch, one update; the loss keeps the size of the mean loss."""
    model, got = network(), []
    accum = Accumulator(None, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append((accum.last.micro_batches, gradients(model))))
    batches = data([5, 2, 9])
    for batch in accum.batches(batches) if inside else batches:
        for part in accum.split(batch, 2):
            with accum(model, weight=len(part[0])):
                accum.backward(mean_loss(model, part))
    assert [size for size, _ in got] == [3, 1, 5]
    for (_, found), batch in zip(got, batches, strict=True):
        assert relative(found, big_batch(model, [batch])) <= 1e-15


@pytest.mark.parametrize("steps", [1, 2, None])
def test_under_weigh_a_window_is_whole_items_and_each_part_is_weighed(steps):
    """The total is known from the first part on, so a second term has its own denominator."""
    model, got = network(), []
    accum = Accumulator(steps, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append((accum.last.weight, gradients(model))))
    batches = data([5, 3, 4])
    for batch in accum.batches(batches, weigh=lambda b: len(b[0])):
        for part in accum.split(batch, 2):
            with accum(model):
                accum.backward(mean_loss(model, part))
    size = steps or 1
    windows = [batches[i : i + size] for i in range(0, 3, size)]
    assert [weight for weight, _ in got] == [sum(len(b[0]) for b in w) for w in windows]
    for (_, found), window in zip(got, windows, strict=True):
        assert relative(found, big_batch(model, window)) <= 1e-15
    assert (accum.pending, accum.epoch) == (0, 1)


UNEVEN = [3, 1, 5, 1, 2, 4, 1]


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("steps", [1, 2, 3, ITEMS])
def test_under_weigh_a_loop_may_read_ahead_if_its_blocks_say_their_weights(read, steps):
    """Several windows ahead, too: each is planned, and none is taken for another."""
    model, got = network(), []
    accum = Accumulator(steps, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: got.append(gradients(model)))
    for _ in range(2):
        batches = data(UNEVEN)
        for batch in read(accum.batches(batches, weigh=lambda b: len(b[0]))):
            with accum(model, weight=len(batch[0])):
                accum.backward(mean_loss(model, batch))
    windows = [batches[i : i + steps] for i in range(0, ITEMS, steps)] * 2
    for found, window in zip(got, windows, strict=True):
        assert relative(found, big_batch(model, window)) <= 1e-15
    assert (accum.pending, accum.epoch) == (0, 2)


@pytest.mark.parametrize(
    ("says", "error", "message"),
    [
        ({"weight": 5}, ValueError, "has the weight 3.0 .from weigh=., and now 5"),
        ({}, RuntimeError, r"had 2 items before a block .* Say it: accum\(model, weight=n\)"),
    ],
    ids=["with its weight", "without"],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_under_weigh_an_item_left_out_before_the_first_block_is_refused(
    steps, says, error, message
):
    """It looks like reading ahead: the next items would get the weights of those before."""
    model = network()
    accum = Accumulator(steps, optimizer=SGD(model.parameters(), 0.0))
    with pytest.raises(error, match=message):
        for number, batch in enumerate(
            accum.batches(data([3, 5, 2, 4]), weigh=lambda b: len(b[0]))
        ):
            if number == 0:
                continue
            with accum(model, **says):
                accum.backward(mean_loss(model, batch))
    assert accum.updates == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_under_weigh_a_schedule_of_steps_is_followed_however_far_the_loop_reads_ahead(read):
    """Windows of 1, 2, 1, 2, 1 micro-batches; one without weight is no update."""
    model, sizes = network(), []
    accum = Accumulator(lambda update: 1 + update % 2, optimizer=SGD(model.parameters(), 0.0))
    accum.on_window(lambda result: sizes.append((result.micro_batches, result.stepped)))
    weights = [2, 3, 1, 0, 4, 5, 6, 7]
    for number, batch in read(enumerate_batches(accum, data([2] * 8), weights)):
        with accum(model, weight=weights[number]) as micro:
            micro.backward(mean_loss(model, batch)) if weights[number] else micro.skip()
    assert sizes == [(1, True), (2, True), (1, False), (1, True), (2, True), (1, True)]


def enumerate_batches(accum, batches, weights):
    return accum.batches(list(enumerate(batches)), weigh=lambda item: weights[item[0]])


def test_split_cuts_nested_batches_and_gives_the_rest_to_all():
    """Tensors along their first dimension; a name or a scalar belongs to each part."""
    batch = {"x": torch.arange(5), "pair": (torch.arange(10).view(5, 2), [1.0]), "name": "a"}
    parts = list(Accumulator(2).split(batch, 2))
    assert [p["x"].tolist() for p in parts] == [[0, 1], [2, 3], [4]]
    assert [p["pair"][0].shape[0] for p in parts] == [2, 2, 1]
    assert all(p["name"] == "a" and p["pair"][1] == [1.0] for p in parts)


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (0, ValueError, "at least 1; got 0"),
        (-2, ValueError, "at least 1; got -2"),
        (2.5, TypeError, "an int; got float"),
        (True, TypeError, "an int; got bool"),
    ],
)
def test_sizes_that_are_no_number_of_rows_are_refused(size, error, message):
    """Before anything is cut."""
    with pytest.raises(error, match=message):
        Accumulator(2).split(torch.zeros(4, 2), size)


def test_split_of_what_holds_no_tensor_is_refused():
    """There is nothing to cut."""
    with pytest.raises(ValueError, match="no tensor with a first dimension"):
        Accumulator(2).split({"name": "a"}, 2)


def test_a_last_part_that_the_loop_leaves_out_ends_its_item_all_the_same():
    """`continue` on the last part of the last item: the tail is flushed behind it."""
    model, sizes = network(), []
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    accum.on_update(lambda: sizes.append(accum.last.micro_batches))
    for batch in accum.batches(data([6] * 2)):
        for place, part in enumerate(accum.split(batch, 2)):
            if place == 2:
                continue
            with accum(model):
                accum.backward(mean_loss(model, part))
    assert (sizes, accum.pending, accum.epoch) == ([4], 0, 1)


DISPATCH = DataLoaderConfiguration(dispatch_batches=True)


def dispatched(read, config, iterable=False, sizes=None, tail="flush", through=iter):
    """Sizes of the windows of two passes through a prepared loader, as `read` gives its batches."""
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    net, sizes = network(), [] if sizes is None else sizes
    accum = Accumulator(STEPS, accelerator=accelerator, tail=tail)
    items = [(x[0], y[0]) for x, y in data([1] * ITEMS)]
    loader = DataLoader(Stream(items) if iterable else items, batch_size=1)
    model, optimizer, loader = accelerator.prepare(net, SGD(net.parameters(), 0.0), loader)
    for batch in through(batch for _ in range(2) for batch in read(loader)):
        with accum(model) as micro:
            accelerator.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if micro.closes:
            sizes.append(micro.index + 1)
    return sizes


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("read", [iter, window_by_window, one_ahead])
@pytest.mark.parametrize("iterable", [False, True])
def test_a_dispatcher_is_counted_however_the_loop_reads(iterable, read):
    """One process fetches for all, one ahead of what it hands out."""
    assert dispatched(read, DISPATCH, iterable) == [4, 3] * 2


def test_a_dispatcher_has_its_own_method_again_behind_each_pass():
    """What counts its batches is put on it for the length of a pass."""
    accelerator = Accelerator(cpu=True, dataloader_config=DISPATCH)
    accum = Accumulator(STEPS, accelerator=accelerator)
    loader = accelerator.prepare(DataLoader(list(range(3))))
    items = iter(loader)
    next(items)
    assert "_fetch_batches" in vars(loader)
    del items
    assert "_fetch_batches" not in vars(loader)
    assert len(list(loader)) == 3
    assert "_fetch_batches" not in vars(loader)
    assert accum.micro_batches == 0


@pytest.mark.filterwarnings("ignore:a prepared loader was read to its end before")
@pytest.mark.parametrize("iterable", [False, True])
def test_a_prepared_loader_that_is_read_whole_before_its_first_block_is_counted(iterable):
    """Its batches are all there, so the loop has read ahead."""
    assert dispatched(all_first, None, iterable) == [4, 3] * 2


@pytest.mark.parametrize("config", [None, DISPATCH])
def test_one_that_is_rebuilt_before_its_first_block_is_refused_at_its_tail(config):
    """It may as well be that of an evaluation. Before the wrong update: 4, then nothing."""

    def rebuilt(items):
        return [(x * 1.0, y * 1.0) for x, y in items]

    told = pytest.raises(RuntimeError, match=r"last 3 of its 7 .* accum.batches\(loader\)")
    with pytest.warns(UserWarning, match="was read to its end"), told:
        dispatched(rebuilt, config, sizes=(sizes := []))
    assert sizes == [4]


@pytest.mark.filterwarnings("ignore:a prepared loader was read to its end before")
@pytest.mark.parametrize("evaluation", ["eval()", "no_grad()", "neither"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_an_evaluation_is_not_taken_for_the_pass_that_was_read_whole(evaluation, order):
    """Of its batches nothing is left; those of the training are all there."""
    accelerator = Accelerator(cpu=True)
    net, sizes = network(), []
    accum = Accumulator(STEPS, accelerator=accelerator)
    rows = [(x[0], y[0]) for x, y in data([1] * ITEMS)]
    loaders = DataLoader(rows, batch_size=1), DataLoader(rows[:5], batch_size=1)
    model, optimizer, loader, other = accelerator.prepare(net, SGD(net.parameters(), 0.0), *loaders)

    def evaluate():
        model.train(evaluation != "eval()")
        with torch.set_grad_enabled(evaluation != "no_grad()"):
            for batch in other:
                mean_loss(model, batch)
        model.train()

    for _ in range(2):
        if order == "before":
            evaluate()
        batches = list(loader)
        if order == "after":
            evaluate()
        for batch in batches:
            with accum(model) as micro:
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if micro.closes:
                sizes.append(micro.index + 1)
    assert sizes == [4, 3] * 2
    assert accum.epoch == 2


def test_two_loaders_that_were_read_whole_are_told_apart_by_nothing():
    """Training batches and those of an evaluation, both kept."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network(torch.float32))
    accum = Accumulator(STEPS, accelerator=accelerator)
    rows = [(x[0], y[0]) for x, y in data([1] * ITEMS, torch.float32)]
    kept = [list(accelerator.prepare(DataLoader(rows[:n]))) for n in (7, 5)]
    with pytest.raises(RuntimeError, match="2 prepared loaders were read"), accum(model):
        accelerator.backward(mean_loss(model, kept[0][0]))


def left_out(place):
    """Windows of two passes of seven batches where the loop leaves the batch at `place` out."""

    def read(items):
        return (batch for at, batch in enumerate(items) if at != place)

    return read


@pytest.mark.parametrize("config", [None, DISPATCH])
@pytest.mark.parametrize("place", [0, 6])
def test_a_tail_whose_last_block_was_not_known_is_refused_before_the_next_pass_joins_it(
    place, config
):
    """The first batch left out looks like reading ahead, the last one is left out too late."""
    with pytest.raises(RuntimeError, match=r"1 of 7 batches had no block.*\(2 micro-.*skip\(\)"):
        dispatched(left_out(place), config, sizes=(sizes := []))
    assert sizes == [4]


@pytest.mark.parametrize("config", [None, DISPATCH])
@pytest.mark.parametrize("place", [0, 6])
def test_a_window_that_is_carried_needs_no_last_block(place, config):
    """Twelve of fourteen batches."""
    assert dispatched(left_out(place), config, tail="carry") == [4, 4, 4]


@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_batch_that_is_left_out_in_the_middle_changes_nothing_else(place):
    """The next request for a batch shows that it had none."""
    assert dispatched(left_out(place), None) == [4, 2] * 2


def test_a_batch_that_is_left_out_in_a_block_is_no_reading_ahead():
    """What the message says works: a tail of 3, one of them with weight 0."""
    accelerator = Accelerator(cpu=True)
    net, sizes = network(), []
    accum = Accumulator(STEPS, accelerator=accelerator)
    rows = [(x[0], y[0]) for x, y in data([1] * ITEMS)]
    model, optimizer, loader = accelerator.prepare(
        net, SGD(net.parameters(), 0.0), DataLoader(rows)
    )
    for at, batch in enumerate(batch for _ in range(2) for batch in loader):
        with accum(model) as micro:
            if at % ITEMS in (0, 6):
                micro.skip()
            else:
                accelerator.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if micro.closes:
            sizes.append(micro.index + 1)
    assert sizes == [4, 3] * 2
    assert accum.epoch == 2


def test_a_prefetcher_that_reads_on_into_the_next_pass_is_followed():
    """The last batch of a pass is still there when the next one has begun."""
    assert dispatched(iter, None, through=one_ahead) == [4, 3] * 2


@pytest.mark.parametrize(("read", "before"), [(window_by_window, [4, 3, 4]), (all_first, [])])
def test_a_loop_that_reads_windows_over_two_passes_is_refused(read, before):
    """Which of its batches have a block can't be told."""
    with pytest.raises(RuntimeError, match=r"accum.batches\(loader\)"):
        dispatched(iter, None, through=read, sizes=(sizes := []))
    assert sizes == before


@pytest.mark.parametrize("count", [1, 3])
def test_split_knows_its_last_part_in_a_prepared_loader_too(count):
    """Items of four parts, in windows of three; the last part of the last item ends the pass."""
    accelerator = Accelerator(cpu=True)
    net, sizes = network(), []
    accum = Accumulator(3, accelerator=accelerator)
    rows = [(x[0], y[0]) for x, y in data([1] * 8 * count)]
    model, optimizer, loader = accelerator.prepare(
        net, SGD(net.parameters(), 0.0), DataLoader(rows, batch_size=8)
    )
    for batch in loader:
        for part in accum.split(batch, 2):
            with accum(model) as micro:
                accelerator.backward(mean_loss(model, part))
                optimizer.step()
                optimizer.zero_grad()
            if micro.closes:
                sizes.append(micro.index + 1)
    assert sizes == {1: [3, 1], 3: [3] * 4}[count]
    assert (accum.pending, accum.epoch) == (0, 1)


def test_items_of_a_prepared_loader_that_are_cut_by_hand_are_refused_in_the_next_pass():
    """No block is known to be the last one of its item."""

    def cut(items):
        return ((a, b) for x, y in items for a, b in zip(x.split(1), y.split(1), strict=True))

    accelerator = Accelerator(cpu=True)
    net, sizes = network(), []
    accum = Accumulator(STEPS, accelerator=accelerator)
    rows = [(x[0], y[0]) for x, y in data([1] * 6)]
    model, optimizer, loader = accelerator.prepare(
        net, SGD(net.parameters(), 0.0), DataLoader(rows, batch_size=2)
    )
    with pytest.raises(RuntimeError, match=r"or one had several.*accum.split"):
        for batch in (batch for _ in range(2) for batch in cut(loader)):
            with accum(model) as micro:
                accelerator.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if micro.closes:
                sizes.append(micro.index + 1)
    assert sizes == [4]
