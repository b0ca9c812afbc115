"""A block that goes wrong: what counts, what is torn, what is put back; and what waits for it."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref

import pytest
import torch
from textbook import big_batch, data, gradients, mean_loss, network, relative
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from accumplug import Accumulator, TornWindowError


class FailsInBackward(torch.autograd.Function):
    """Half of the backward has run when it raises, as when memory is over."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("out of memory")


def watched(steps, model, **options):
    """An Accumulator that takes steps of length 0, and the gradients of its updates."""
    accum, got = Accumulator(steps, optimizer=SGD(model.parameters(), 0.0), **options), []
    accum.on_update(lambda: got.append(gradients(model)))
    return accum, got


def run(accum, model, batch):
    with accum(model):
        accum.backward(mean_loss(model, batch))


# -- blocks that did not do what a micro-batch has to ----------------------------------------


@pytest.mark.parametrize("place", [0, 1])
def test_a_block_without_a_backward_is_an_error_and_does_not_count(place):
    """In the middle of a window and at its end; with what to do instead."""
    model = network()
    accum, got = watched(2, model)
    batches = data([2] * 2)
    for batch in batches[:place]:
        run(accum, model, batch)
    with pytest.raises(RuntimeError, match=r"without a backward.*or micro.skip\(\)"), accum(model):
        pass
    assert accum.pending == place
    for batch in batches[place:]:
        run(accum, model, batch)
    assert relative(got[0], big_batch(model, batches)) <= 1e-15


def test_a_backward_of_torch_itself_is_seen_where_it_can_be():
    """loss.backward() in a block is no backward of the window."""
    model = network()
    accum, _ = watched(2, model)
    with pytest.raises(RuntimeError, match=r"never loss.backward\(\)"), accum(model):
        mean_loss(model, data([2])[0]).backward()


def test_backward_outside_of_a_block_is_an_error():
    """Before the first, between two, and by a micro-batch that is over."""
    model = network()
    accum, _ = watched(2, model)
    (batch,) = data([2])
    with pytest.raises(RuntimeError, match="backward outside of a block"):
        accum.backward(mean_loss(model, batch))
    with accum(model) as micro:
        micro.backward(mean_loss(model, batch))
    with pytest.raises(RuntimeError, match="backward outside of a block"):
        accum.backward(mean_loss(model, batch))
    with pytest.raises(RuntimeError, match="outside of its block"):
        micro.backward(mean_loss(model, batch))
    with pytest.raises(RuntimeError, match="skip outside of its block"):
        micro.skip()
    assert accum.pending == 1


def test_a_block_inside_of_a_block_of_the_same_accumulator_is_an_error():
    """And the outer one does not count either, as the error leaves it."""
    model = network()
    accum, _ = watched(2, model)
    with pytest.raises(RuntimeError, match=r"accum\(a, b\)"), accum(model), accum(model):
        pass
    assert accum.pending == 0


def test_a_context_is_good_for_one_block():
    """Kept outside of the loop it would count its weight once."""
    model = network()
    accum, _ = watched(2, model)
    context = accum(model)
    batches = data([2] * 2)
    with context:
        accum.backward(mean_loss(model, batches[0]))
    with pytest.raises(RuntimeError, match=r"call accum\(model\) for each"), context:
        pass
    assert accum.pending == 1


def test_skip_and_backward_exclude_each_other():
    """Whichever came first."""
    model = network()
    accum, _ = watched(2, model)
    (batch,) = data([2])
    with accum(model) as micro:
        micro.skip()
        with pytest.raises(RuntimeError, match="backward after skip"):
            micro.backward(mean_loss(model, batch))
    accum.discard()
    with accum(model) as micro:
        micro.backward(mean_loss(model, batch))
        with pytest.raises(RuntimeError, match="skip after a backward"):
            micro.skip()


def test_a_flush_inside_of_a_block_is_an_error():
    """The block has to end first."""
    model = network()
    accum, _ = watched(2, model)
    with accum(model):
        accum.backward(mean_loss(model, data([2])[0]))
        with pytest.raises(RuntimeError, match="a block inside a block"):
            accum.flush()
    assert accum.pending == 1


def test_a_discard_inside_of_a_block_ends_it():
    """It can't be told from a block whose end was kept from running; what follows in it is told."""
    model = network()
    accum, _ = watched(2, model)
    loss = mean_loss(model, data([2])[0])
    with pytest.raises(RuntimeError, match="thrown away inside of its block"), accum(model):
        accum.backward(loss, retain_graph=True)
        accum.discard()
    with pytest.raises(RuntimeError, match="backward outside of"), accum(model):
        accum.discard()
        accum.backward(loss)
    assert (accum.pending, accum.micro_batches) == (0, 0)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("later", [4, 0])
def test_a_micro_batch_has_one_weight(later):
    """A second backward with another one contradicts the first."""
    model = network()
    accum, _ = watched(2, model)
    loss = mean_loss(model, data([2])[0])

    def block():
        with accum(model, weight=3):
            accum.backward(loss, retain_graph=True)
            accum.backward(loss, weight=later)

    with pytest.raises(ValueError, match=rf"weight 3.0 \(from its first.*and now {later}.0"):
        block()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out, r"loss is a tensor of one element, a mean or a sum; got \(2, 2\)"),
        (lambda out: 3.0, r"loss is a tensor of one element, a mean or a sum; got float"),
        (lambda out: out.mean().item(), "got float"),
        (lambda out: None, "got NoneType"),
        (lambda out: out.mean().detach(), "Was it detached, or computed under no_grad"),
    ],
)
def test_a_loss_that_can_not_go_back_is_refused(loss, message):
    """Before anything was added."""
    model = network()
    accum, _ = watched(2, model)
    x, _ = data([2])[0]
    with pytest.raises(ValueError, match=message), accum(model):
        accum.backward(loss(model(x)))
    assert accum.pending == 0
    run(accum, model, data([2])[0])
    assert accum.pending == 1


def test_an_unknown_reduction_is_refused():
    """With the two that there are."""
    model = network()
    accum, _ = watched(2, model)
    loss = mean_loss(model, data([2])[0])
    with pytest.raises(ValueError, match=r'is "mean" or "sum"; got .none'), accum(model):
        accum.backward(loss, reduction="none")


@pytest.mark.parametrize(
    "weight", [-1, float("nan"), float("inf"), torch.ones(2), "3", None, torch.ones(1)]
)
def test_a_weight_that_counts_nothing_is_refused_at_the_block_and_at_the_backward(weight):
    """It is the number of items that the loss is a mean over."""
    model = network()
    accum, _ = watched(2, model)
    with pytest.raises(ValueError, match="weight is "):
        accum(model, weight=weight)
    if weight is not None:
        with pytest.raises(ValueError, match="weight is "), accum(model):
            accum.backward(mean_loss(model, data([2])[0]), weight=weight)
    assert accum.pending == 0


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=4.0)])
@pytest.mark.parametrize("weights", [(3.0, -4.0), (1.0, math.nan), (math.inf, 1.0)])
def test_device_weights_that_sum_up_to_no_number_are_refused_at_the_close(weights, scaler):
    """Nobody reads them before; nothing steps, and after discard() the next window is right."""
    model = network()
    before = [p.clone() for p in model.parameters()]
    optimizer = SGD(model.parameters(), 0.1)
    accum, batches = Accumulator(2, optimizer=optimizer, scaler=scaler), data([2] * 2)
    with pytest.raises(ValueError, match=rf"weights of the window sum up to {sum(weights)}"):
        for batch, weight in zip(batches, weights, strict=True):
            with accum(model, weight=torch.tensor(weight)):
                accum.backward(mean_loss(model, batch))
    assert all(map(torch.equal, before, model.parameters()))
    assert accum.updates == 0
    accum.discard()
    expected, got = big_batch(model, batches), []
    accum.on_update(lambda: got.append(gradients(model)))
    for batch in batches:
        run(accum, model, batch)
    assert relative(got[0], expected) <= 1e-6


def test_weights_of_numpy_are_numbers():
    """len() of something, or a count, is often one of numpy's."""
    numpy = pytest.importorskip("numpy")
    model = network()
    accum, got = watched(2, model)
    batches = data([2, 3])
    for batch, weight in zip(batches, (numpy.int64(2), numpy.float32(3)), strict=True):
        with accum(model, weight=weight):
            accum.backward(mean_loss(model, batch))
    assert relative(got[0], big_batch(model, batches)) <= 1e-15


# -- exceptions -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_exception_before_the_backward_does_not_count_and_tears_nothing(place):
    """Out of memory in the forward, caught, and tried again with two smaller ones."""
    model = network()
    accum, got = watched(4, model)
    batches = data([2] * 3)
    for batch in batches[:place]:
        run(accum, model, batch)
    with pytest.raises(MemoryError), accum(model):
        raise MemoryError
    assert (accum.pending, accum.micro_batches) == (place, place)
    for batch in batches[place:]:
        run(accum, model, batch)
    accum.flush()
    assert relative(got[0], big_batch(model, batches)) <= 1e-15


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("where", ["in the backward", "after it"])
def test_an_exception_after_the_backward_began_tears_the_window(place, where):
    """Part of its gradient is in the sum. The window says so until discard()."""
    model = network()
    accum, got = watched(2, model)
    batches = data([2] * 2)
    for batch in batches[:place]:
        run(accum, model, batch)

    def block():
        with accum(model):
            loss = mean_loss(model, data([2])[0])
            accum.backward(FailsInBackward.apply(loss) if where == "in the backward" else loss)
            raise MemoryError

    with pytest.raises(MemoryError):
        block()
    assert accum.micro_batches == place
    for _ in range(2):
        with pytest.raises(TornWindowError, match=rf"after {place} of 2 .*MemoryError in micro-b"):
            run(accum, model, batches[0])
    with pytest.raises(TornWindowError, match=r"accum.discard\(\) throws it away"):
        accum.flush()
    accum.discard()
    for batch in batches:
        run(accum, model, batch)
    assert relative(got[0], big_batch(model, batches)) <= 1e-15
    assert accum.updates == 1


def test_a_torn_window_is_an_error_of_its_own_kind():
    """So that a loop can catch it, and nothing else."""
    assert issubclass(TornWindowError, RuntimeError)


def nothing_then_memory_error(accum, model, batch, how):
    with accum(model, weight=0) as micro:
        if how == "skip":
            micro.skip()
        else:
            micro.backward(mean_loss(model, batch))
        raise MemoryError


@pytest.mark.parametrize("how", ["weight 0", "skip"])
def test_an_exception_in_a_block_that_adds_nothing_tears_nothing(how):
    """In the middle of a window."""
    model = network()
    accum, got = watched(3, model)
    batches = data([2] * 3)
    run(accum, model, batches[0])
    with pytest.raises(MemoryError):
        nothing_then_memory_error(accum, model, batches[1], how)
    for batch in batches[1:]:
        run(accum, model, batch)
    assert relative(got[0], big_batch(model, batches)) <= 1e-15


@pytest.mark.parametrize("how", ["weight 0", "skip"])
def test_an_exception_in_a_closing_block_that_adds_nothing_is_no_silent_rescaling(how):
    """The sum is finished by then: either it is torn, or the next close is right all the same."""
    model = network()
    accum, got = watched(2, model)
    batches = data([2] * 2)
    run(accum, model, batches[0])
    with pytest.raises(MemoryError):
        nothing_then_memory_error(accum, model, batches[1], how)
    try:
        run(accum, model, batches[1])
    except TornWindowError:
        return
    assert relative(got[0], big_batch(model, batches)) <= 1e-15


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, SystemExit])
def test_exceptions_that_are_no_errors_are_treated_alike(kind):
    """Ctrl-C in the middle of a forward leaves a window that can go on."""
    model = network()
    accum, _ = watched(2, model)
    with pytest.raises(kind), accum(model):
        raise kind
    run(accum, model, data([2])[0])
    assert accum.pending == 1


def test_an_exception_in_the_hook_of_an_update_leaves_a_closed_window():
    """The update has happened; the next window is clean."""
    model = network()
    accum = Accumulator(1, optimizer=SGD(model.parameters(), 0.0))

    @accum.on_update
    def fails():
        if accum.updates == 1:
            raise OSError("disk full")

    batches = data([2] * 2)
    with pytest.raises(OSError, match="disk full"):
        run(accum, model, batches[0])
    assert (accum.updates, accum.pending) == (1, 0)
    assert all(p.grad is None for p in model.parameters())
    run(accum, model, batches[1])
    assert accum.updates == 2


@pytest.mark.parametrize("who", ["optimizer", "scheduler", "scaler"])
def test_an_exception_in_the_close_itself_tears_the_window(who):
    """Out of memory in the first step, when AdamW makes its state: nothing goes on by accident."""
    model = network(torch.float32)
    optimizer = SGD(model.parameters(), 0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accum, got = Accumulator(2, optimizer=optimizer, scheduler=scheduler, scaler=scaler), []
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([2] * 2, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        target, name = {
            "optimizer": (optimizer, "step"),
            "scheduler": (scheduler, "step"),
            "scaler": (scaler, "update"),
        }[who]

        def fails(*_):
            raise MemoryError

        patch.setattr(target, name, fails)
        run(accum, model, batches[0])
        with pytest.raises(MemoryError):
            run(accum, model, batches[1])
    with pytest.raises(TornWindowError, match="MemoryError"):
        run(accum, model, batches[0])
    accum.discard()
    for batch in batches:
        run(accum, model, batch)
    assert relative(got[-1], big_batch(model, batches)) <= 1e-6
    assert accum.last.micro_batches == 2


def test_a_step_in_a_closing_block_of_weight_zero_without_backward_is_right():
    """Nothing to go back from, but the window closes here: the mean of the micro-batch before."""
    model = network()
    optimizer, accum = SGD(model.parameters(), 1.0), Accumulator(2)
    (batch,) = data([2])
    expected = [
        p - g for p, g in zip(network().parameters(), big_batch(model, [batch]), strict=True)
    ]
    for weight in (1, 0):
        with accum(model, weight=weight) as micro:
            if weight:
                accum.backward(mean_loss(model, batch))
            if micro.closes:
                optimizer.step()
                optimizer.zero_grad()
    assert relative(list(model.parameters()), expected) <= 1e-15


def test_a_block_leaves_no_graph_behind():
    """No buffering: when the loop lets go of its loss, the graph is gone."""
    alive = weakref.WeakSet()

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.what = Anything()
            alive.add(ctx.what)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Anything:
        pass

    model = network()
    accum, _ = watched(8, model)
    blocks = []
    for batch in data([2] * 4):
        with accum(model) as micro:
            micro.backward(Held.apply(mean_loss(model, batch)))
        blocks.append(micro)
    assert len(blocks) == accum.pending == 4
    assert len(alive) == 0


# -- what a loop does to an open window ------------------------------------------------------

TOUCHES = {
    "model.zero_grad": lambda m: m.zero_grad(),
    "optimizer.zero_grad": lambda m: SGD(m.parameters(), 0.1).zero_grad(),
    "zero_grad to zeros": lambda m: SGD(m.parameters(), 0.1).zero_grad(set_to_none=False),
    "zero_grad of the head": lambda m: SGD(m[2].parameters(), 0.1).zero_grad(),
    "clip": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
    "another backward": lambda m: mean_loss(m, data([2], seed=7)[0]).backward(),
    "division": lambda m: [p.grad.div_(2) for p in m.parameters()],
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
@pytest.mark.parametrize("where", ["first in the block", "last in the block", "between two blocks"])
@pytest.mark.parametrize("takes_step", [True, False])
def test_whoever_touches_the_sum_of_an_open_window_tears_it(touch, where, takes_step):
    """Only the last micro-batch would survive a zero_grad in each."""
    model = network()
    accum = Accumulator(3, optimizer=SGD(model.parameters(), 0.0) if takes_step else None)

    def loop():
        for batch in data([2] * 3):
            with accum(model):
                if where == "first in the block" and accum.pending:
                    touch(model)
                accum.backward(mean_loss(model, batch))
                if where == "last in the block":
                    touch(model)
            if where == "between two blocks":
                touch(model)

    with pytest.raises(TornWindowError, match=r"was (changed in place|set to None or replaced)"):
        loop()
    assert accum.updates == 0
    accum.discard()
    for batch in data([2] * 2):
        run(accum, model, batch)
    assert accum.pending == 2


@pytest.mark.parametrize("how", ["weight 0", "skip"])
def test_whoever_touches_the_sum_before_a_micro_batch_that_adds_nothing_tears_it(how):
    """zero_grad as the first line of every block, also of one that is left out."""
    model = network()
    accum, _ = watched(3, model)
    batches = data([2] * 2)
    run(accum, model, batches[0])

    def block():
        with accum(model, weight=0) as micro:
            model.zero_grad()
            if how == "skip":
                micro.skip()
            else:
                micro.backward(mean_loss(model, batches[1]))

    with pytest.raises(TornWindowError, match="set to None or replaced"):
        block()


@pytest.mark.parametrize("steps", [1, 2])
def test_zero_grad_in_the_closing_block_is_an_error_where_accum_takes_the_step(steps):
    """It would be an update of nothing."""
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    accum = Accumulator(steps, optimizer=optimizer)
    batches = data([2] * steps)
    for batch in batches[:-1]:
        run(accum, model, batch)

    def block():
        with accum(model):
            accum.backward(mean_loss(model, batches[-1]))
            optimizer.zero_grad()

    with pytest.raises(TornWindowError, match="set to None or replaced"):
        block()
    assert accum.updates == 0


@pytest.mark.parametrize("where", ["in the block", "between two blocks"])
def test_a_step_of_the_loop_is_refused_where_accum_takes_it(where):
    """Two of them would move the weights twice, once on a partial sum."""
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    accum = Accumulator(2, optimizer=optimizer)
    (batch,) = data([2])

    def loop():
        with accum(model):
            accum.backward(mean_loss(model, batch))
            if where == "in the block":
                optimizer.step()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"leave optimizer\.step\(\) out of the loop"):
        loop()
    assert torch.equal(model[0].weight, network()[0].weight)


def test_an_accumulator_that_is_collected_while_its_optimizer_steps_does_not_disturb_the_step():
    """Its hook can't be removed there: torch is going through the hooks."""
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: gc.collect() and None)
    gc.disable()
    try:
        first = Accumulator(2, optimizer=optimizer)
        first.on_update(first.flush)  # a reference to itself: left to the collector
        del first
        accum = Accumulator(1, optimizer=optimizer)
        run(accum, model, data([2])[0])
    finally:
        gc.enable()
    assert accum.updates == 1
    third = Accumulator(1, optimizer=optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 3  # one of the test, two of those alive
    del third


def test_an_accumulator_that_nobody_holds_is_gone_at_once():
    """In a notebook a cell that runs again leaves no second owner of the model behind."""
    model = network()
    gc.disable()
    try:
        accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.1))
        for batch in accum.batches(data([2] * 3)):
            run(accum, model, batch)
        parts = weakref.ref(accum.parts)
        del accum, batch
        assert parts() is None
    finally:
        gc.enable()


def test_a_pass_keeps_its_accumulator_alive():
    assert list(Accumulator(2).batches([1, 2, 3])) == [1, 2, 3]


def test_zero_grad_between_windows_is_fine():
    """As most loops have it at their start."""
    model = network()
    accum, got = watched(2, model)
    batches = data([2] * 4)
    for place, batch in enumerate(batches):
        if place % 2 == 0:
            model.zero_grad()
        run(accum, model, batch)
    assert relative(got[1], big_batch(model, batches[2:])) <= 1e-15


# -- saving where nothing may be saved ------------------------------------------------------


def test_the_state_is_refused_inside_of_a_block_and_in_a_torn_window():
    """Half a micro-batch is nothing to go on from."""
    model = network()
    accum, _ = watched(3, model)
    (batch,) = data([2])
    with accum(model):
        accum.backward(mean_loss(model, batch))
        with pytest.raises(RuntimeError, match="state_dict inside of a block"):
            accum.state_dict()
    assert accum.state_dict()["window"]["index"] == 1
    model.zero_grad()
    with pytest.raises(TornWindowError, match="set to None or replaced"):
        run(accum, model, batch)
    with pytest.raises(TornWindowError, match="torn after 1 of 3"):
        accum.state_dict()


def test_the_state_is_refused_between_unscale_and_update():
    """The gradients would be unscaled a second time: 0.000977 instead of 1.0."""
    model = network(torch.float32)
    optimizer, scaler = SGD(model.parameters(), 0.0), torch.amp.GradScaler("cpu")
    accum = Accumulator(1, scaler=scaler)
    run(accum, model, data([2], torch.float32)[0])
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"Save after scaler.update\(\)"):
        accum.state_dict()
    scaler.step(optimizer)
    scaler.update()
    assert accum.state_dict()["updates"] == 1


# -- what the host waits for ----------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device: values read as Python numbers.

    A tensor of the CPU is read without a trace by `tolist`, so that is counted by itself.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        tolist = torch.Tensor.tolist

        def counted(tensor):
            self.count += 1
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", counted)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        self.count += function in waits
        self.count += function is torch.ops.aten.nonzero.default
        return function(*args, **(kwargs or {}))


def reads_of(monkeypatch, accum, model, weights, scaler=None):
    """How often the host waited in each block."""
    counts = []
    with Reads(monkeypatch) as reads:
        for batch, weight in zip(data([2] * len(weights), torch.float32), weights, strict=True):
            before = reads.count
            with accum(model, weight=weight) as micro:
                accum.backward(mean_loss(model, batch))
            counts.append(reads.count - before)
            if micro.closes:
                model.zero_grad()
    return counts


CASES = {
    "plain": {},
    "clip": {"max_grad_norm": 1e-3},
    "scaler": {"scaler": True},
    "scaler and clip": {"scaler": True, "max_grad_norm": 1e-3},
    "raise": {"nonfinite": "raise"},
    "two optimizers": {"two": True, "scaler": True, "max_grad_norm": 1e-3},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("weights", ["numbers", "tensors", "tensors with zeros", "all zero"])
def test_the_host_reads_nothing_before_the_close_and_once_at_it(monkeypatch, options, weights):
    """Whatever the weights are; the count, norm, flags and total come in one read."""
    options, model = dict(options), network(torch.float32)
    parts = [model[0], model[2]] if options.pop("two", False) else [model]
    if options.pop("scaler", False):
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accum = Accumulator(4, optimizer=[SGD(p.parameters(), 0.1) for p in parts], **options)
    values = {
        "numbers": [3, 1, 5000, 2, 7, 5, 3, 1],
        "tensors": [torch.tensor(n) for n in (3, 1, 5000, 2, 7, 5, 3, 1)],
        "tensors with zeros": [torch.tensor(n) for n in (0, 1, 5000, 0, 7, 5, 3, 0)],
        "all zero": [torch.tensor(n) for n in (0, 0, 0, 0, 1, 1, 1, 1)],
    }[weights]
    counts = reads_of(monkeypatch, accum, model, values)
    assert counts == [0, 0, 0, 1] * 2
    assert accum.updates == (1 if weights == "all zero" else 2)


@pytest.mark.parametrize("weights", ["numbers", "tensors"])
def test_the_host_reads_nothing_at_all_where_the_loop_steps(monkeypatch, weights):
    """The closing block neither looks at the norm nor at the total."""
    model = network(torch.float32)
    accum = Accumulator(2)
    values = [3, 1, 2, 5] if weights == "numbers" else [torch.tensor(n) for n in (3, 1, 2, 5)]
    assert reads_of(monkeypatch, accum, model, values) == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_the_host_reads_once_for_a_flush(monkeypatch, kind):
    """It is a close like any other."""
    model = network(torch.float32)
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.1))
    assert reads_of(monkeypatch, accum, model, [kind(3), kind(4)]) == [0, 0]
    with Reads(monkeypatch) as reads:
        accum.flush()
    assert reads.count == 1


def test_reading_the_last_window_is_what_may_wait(monkeypatch):
    """Not its close; and the second look is for free."""
    model = network(torch.float32)
    accum = Accumulator(1, optimizer=SGD(model.parameters(), 0.1))
    run(accum, model, data([2], torch.float32)[0])
    with Reads(monkeypatch) as reads:
        assert accum.last.stepped
        first = reads.count
        assert accum.last.loss > 0
    assert first > 0
    assert reads.count == first


def test_skip_micro_batch_may_read_once_in_each(monkeypatch):
    """That is its price; no more than one in a micro-batch, and two where it closes."""
    model = network(torch.float32)
    accum = Accumulator(3, optimizer=SGD(model.parameters(), 0.1), nonfinite="skip_micro_batch")
    counts = reads_of(monkeypatch, accum, model, [1, 1, 1])
    assert counts[:2] == [1, 1]
    assert counts[2] <= 3


def test_the_counter_of_reads_can_fail(monkeypatch):
    """It sees item, bool, float and tolist."""
    with Reads(monkeypatch) as reads:
        number = torch.ones(())
        number.item()
        bool(number)
        float(number)
        torch.ones(2).tolist()
    assert reads.count >= 4


def test_the_optimizer_s_own_state_is_not_touched_by_a_skipped_window():
    """Neither created nor advanced."""
    model = network()
    optimizer = AdamW(model.parameters(), 0.1)
    accum = Accumulator(1, optimizer=optimizer)
    run(accum, model, data([2])[0])
    before = str(optimizer.state_dict())
    with contextlib.suppress(RuntimeError), accum(model):
        accum.backward(mean_loss(model, data([2])[0]) * float("nan"))
    assert str(optimizer.state_dict()) == before
    assert accum.skipped == 1


def test_an_optimizer_over_another_model_is_said() -> None:
    """It would step on nothing, window after window."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    accum = Accumulator(1, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    said = pytest.warns(UserWarning, match="none of the 2 parameters that the optimizer steps")
    with said, accum(model):
        accum.backward(model(torch.ones(1, 2)).sum())


def test_an_accumulator_says_where_it_is() -> None:
    """In a debugger, without a look into private fields."""
    model = nn.Linear(2, 1)
    accum = Accumulator(3, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        with accum(model):
            accum.backward(model(torch.ones(1, 2)).sum())
    assert repr(accum) == "<Accumulator: 1 updates, 1 pending>"
