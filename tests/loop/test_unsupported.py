"""What is refused or said when options, models and optimizers are first seen. One process."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from textbook import big_batch, data, gradients, mean_loss, network, relative
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from accumplug import Accumulator
from accumplug.loop.unsupported import refuse_engine

# -- options --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, -3, 2.5, "8", True])
def test_steps_that_are_no_number_of_micro_batches_are_refused(steps):
    """At the constructor and at the setter."""
    with pytest.raises(ValueError, match="an int of at least 1; got"):
        Accumulator(steps)
    accum = Accumulator(1)
    with pytest.raises(ValueError, match="an int of at least 1; got"):
        accum.steps = steps
    assert accum.steps == 1


def test_a_schedule_of_steps_that_returns_nonsense_is_refused_where_it_does():
    """The function is the user's; what it returned is named."""
    model = network()
    accum = Accumulator(lambda updates: 0.5, optimizer=SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"an int of at least 1; got 0\.5"), accum(model):
        pass


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tail": "keep"}, r"tail is one of flush, drop, carry; got 'keep'"),
        ({"sync": "never"}, r"sync is one of last, every; got 'never'"),
        ({"nonfinite": "ignore"}, r"nonfinite is one of skip_window, skip_micro_batch, raise"),
        ({"optimizer": "SGD"}, r"optimizer is a torch Optimizer, got str"),
        ({"optimizer": object()}, r"optimizer is a torch Optimizer, got object"),
        ({"scheduler": object()}, r"scheduler has a step method; object has none"),
    ],
)
def test_unknown_options_are_refused_with_what_is_known(option, message):
    """Never ignored."""
    with pytest.raises(ValueError, match=message):
        Accumulator(2, **option)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_of_the_norm_that_is_none_is_refused(limit):
    """None is no clipping; 0 and inf would be something else."""
    optimizer = SGD(network().parameters(), 0.1)
    with pytest.raises(ValueError, match="a finite number above 0; got"):
        Accumulator(2, optimizer=optimizer, max_grad_norm=limit)


@pytest.mark.parametrize("name", ["scheduler", "max_grad_norm", "nonfinite"])
def test_options_of_the_step_are_refused_without_an_optimizer(name):
    """Nobody would act on them."""
    scheduler = LambdaLR(SGD(network().parameters(), 0.1), lambda n: 1.0)
    value = {"scheduler": scheduler, "max_grad_norm": 1.0, "nonfinite": "raise"}[name]
    with pytest.raises(ValueError, match=rf"{name} acts where accum takes the step; give opti"):
        Accumulator(2, **{name: value})


def test_a_schedule_that_needs_a_metric_is_refused():
    """With the way to do it; and that way works."""
    model = network()
    optimizer = SGD(model.parameters(), 1.0)
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    with pytest.raises(ValueError, match=r"step\(metric\) yourself, e.g. .* @accum.on_update"):
        Accumulator(2, optimizer=optimizer, scheduler=plateau)
    accum = Accumulator(1, optimizer=optimizer)
    accum.on_update(lambda: plateau.step(1.0))
    for batch in data([2] * 3):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert optimizer.param_groups[0]["lr"] < 1.0


def test_an_optimizer_that_needs_a_closure_is_refused():
    """It asks for the loss again and again, which a window can't repeat."""
    with pytest.raises(ValueError, match=r"LBFGS.*a closure"):
        Accumulator(2, optimizer=torch.optim.LBFGS(network().parameters()))


def test_the_same_optimizer_twice_is_refused_or_steps_once():
    """Two lists that were joined."""
    model, (batch,) = network(), data([3])
    optimizer = SGD(model.parameters(), 1.0)
    try:
        accum = Accumulator(1, optimizer=[optimizer, optimizer])
    except ValueError:
        return
    expected = [p - g for p, g in zip(model.parameters(), big_batch(model, [batch]), strict=True)]
    with accum(model):
        accum.backward(mean_loss(model, batch))
    assert relative(list(model.parameters()), expected) <= 1e-15


def test_steps_may_be_an_integer_of_numpy():
    """As a schedule that is computed gives them."""
    numpy = pytest.importorskip("numpy")
    assert Accumulator(numpy.int64(4)).steps == 4
    assert Accumulator(lambda updates: numpy.int32(8)).steps == 8


# -- models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [[nn.Linear(1, 1)], (nn.Linear(1, 1),), None, "model", len])
def test_what_is_no_module_is_refused(model):
    """A list of models is the usual one."""
    accum = Accumulator(2)
    with pytest.raises(ValueError, match=r"several models are given one by one: accum\(a, b\)"):
        accum(model).__enter__()


class DeepSpeedEngine(nn.Module):
    """Looks like one by its name, as the real class does."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(1, 1)

    def no_sync(self):
        raise AssertionError("no_sync is not compatible with gradient partitioning")


class PartOfAnEngine(DeepSpeedEngine):
    pass


@pytest.mark.parametrize("kind", [DeepSpeedEngine, PartOfAnEngine])
def test_a_deepspeed_engine_is_refused_by_name(kind):
    """Its no_sync asserts and its own division would come on top; neither is ever entered."""
    accum = Accumulator(2)
    with pytest.raises(ValueError, match="Use DeepSpeed's own gradient_accumulation_steps"):
        accum(kind()).__enter__()
    with pytest.raises(ValueError, match="a DeepSpeed engine accumulates by itself"):
        refuse_engine(kind())


def test_a_refused_model_leaves_no_open_window():
    """The next block, with a right one, starts from nothing."""
    model = network()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.0))
    with pytest.raises(ValueError, match="DeepSpeed"):
        accum(DeepSpeedEngine()).__enter__()
    assert accum.pending == 0
    for batch in data([2] * 2):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert accum.updates == 1


# -- optimizers in the backward --------------------------------------------------------------


def hook_by_closure(model):
    optimizers = {p: SGD([p], 0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: optimizers[q].step())


def hook_by_default(model):
    for p in model.parameters():
        own = SGD([p], 0.1)
        p.register_post_accumulate_grad_hook(lambda q, optimizer=own: optimizer.step())


def hook_by_partial(model):
    def step(optimizer, parameter):
        optimizer.step()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(functools.partial(step, SGD([p], 0.1)))


class Trainer:
    def __init__(self, model):
        self.optimizers = [SGD([p], 0.1) for p in model.parameters()]
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter):
        for optimizer in self.optimizers:
            optimizer.step()


class Deep:
    """Hides its optimizer where nobody looks."""

    def __init__(self, parameter):
        self.optimizer = SGD([parameter], 0.1)

    def __call__(self, parameter):
        self.optimizer.step()
        parameter.grad = None


def hook_that_hides_it(model):
    for p in model.parameters():
        deep = [[Deep(p)]]
        p.register_post_accumulate_grad_hook(lambda q, deep=deep: deep[0][0](q))


def torchs_own(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the import runs torch.jit.script
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})


FUSED = [hook_by_closure, hook_by_default, hook_by_partial, Trainer, torchs_own, hook_that_hides_it]


@pytest.mark.parametrize("fuse", FUSED)
@pytest.mark.parametrize("takes_step", [True, False])
def test_an_optimizer_that_steps_in_the_backward_is_refused(fuse, takes_step):
    """It would update once for each micro-batch."""
    model = network()
    fuse(model)
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.1) if takes_step else None)
    with pytest.raises(ValueError, match=r"once for each micro-batch.*use steps=1"), accum(model):
        accum.backward(mean_loss(model, data([2])[0]))


@pytest.mark.parametrize("fuse", FUSED)
def test_an_optimizer_in_the_backward_is_fine_in_windows_of_one(fuse):
    """There it updates once for each window, too."""
    model = network()
    fuse(model)
    accum = Accumulator(1)
    with accum(model):
        accum.backward(mean_loss(model, data([2])[0]))
    assert accum.updates == 1


def test_a_hook_that_steps_nothing_is_no_optimizer():
    """E.g. one that counts."""
    model, seen = network(), []
    optimizer = SGD(model.parameters(), 0.1)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: seen.append(q.shape))
    accum = Accumulator(2, optimizer=optimizer)
    for batch in data([2] * 2):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert (accum.updates, len(seen)) == (1, 8)


# -- BatchNorm ------------------------------------------------------------------------------


def normed(kind=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(4, 4), kind(4), nn.Linear(4, 2)).double()


def test_batchnorm_is_named_in_one_warning():
    """Not in every block."""
    model = normed()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in data([3] * 6):
            with accum(model):
                accum.backward(mean_loss(model, batch))
    assert len(caught) == 1
    assert "BatchNorm sees micro-batches, not the window: 1 normalise" in str(caught[0].message)


def test_batchnorm_is_said_when_steps_grow_later():
    """A window of one is what BatchNorm was made for."""
    model = normed()
    accum = Accumulator(1, optimizer=SGD(model.parameters(), 0.1))
    with accum(model):
        accum.backward(mean_loss(model, data([3])[0]))
    accum.steps = 2
    with pytest.warns(UserWarning, match="BatchNorm sees micro-batches"), accum(model):
        accum.backward(mean_loss(model, data([3])[0]))


@pytest.mark.parametrize("kind", ["frozen", "evaluated", "layer norm"])
def test_what_does_not_look_at_the_batch_is_not_warned_about(kind):
    """The suite turns warnings into errors."""
    model = normed(nn.LayerNorm if kind == "layer norm" else nn.BatchNorm1d)
    if kind == "frozen":
        model[1].eval()
    if kind == "evaluated":
        model.eval()
    accum = Accumulator(2, optimizer=SGD(model.parameters(), 0.1))
    for batch in data([3] * 2):
        with accum(model):
            accum.backward(mean_loss(model, batch))
    assert accum.updates == 1


def test_batchnorm_moves_its_statistics_as_the_warning_says():
    """Four times in a window of four; 0.344 of the mean instead of 0.1 of it."""
    model = nn.BatchNorm1d(1, affine=True).double()
    accum = Accumulator(4, optimizer=SGD(model.parameters(), 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            with accum(model):
                accum.backward(model(torch.tensor([[0.0], [2.0]], dtype=torch.float64)).sum())
    assert int(model.num_batches_tracked) == 4
    assert float(model.running_mean) == pytest.approx(1 - 0.9**4, rel=1e-15)


# -- one rank -------------------------------------------------------------------------------


@pytest.fixture
def lonely_group(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.get_world_size() == 1
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lonely_group")
def test_ddp_on_one_rank_is_the_same_mean_and_reduces_once_in_a_window():
    """Two full windows and a tail: three reductions."""
    model = network()
    ddp = DistributedDataParallel(model)
    accum, got = Accumulator(3, optimizer=SGD(model.parameters(), 0.0)), []
    accum.on_update(lambda: got.append(gradients(model)))
    batches = data([3, 1, 4, 1, 5, 9, 2])
    for batch in accum.batches(batches):
        with accum(ddp, weight=len(batch[0])):
            accum.backward(mean_loss(ddp, batch))
    for found, start in zip(got, (0, 3, 6), strict=True):
        assert relative(found, big_batch(model, batches[start : start + 3])) <= 1e-14
    assert accum.syncs == 3
    del ddp


@pytest.mark.usefixtures("lonely_group")
@pytest.mark.parametrize("when", ["at once", "when steps grow"])
def test_a_static_graph_is_refused_in_windows_of_several(when):
    """Its first backward must not be an unsynced one: torch asserts then."""
    model = network()
    ddp = DistributedDataParallel(model, static_graph=True)
    accum = Accumulator(2 if when == "at once" else 1, optimizer=SGD(model.parameters(), 0.1))
    if when == "when steps grow":
        with accum(ddp):
            accum.backward(mean_loss(ddp, data([2])[0]))
        accum.steps = 2
    with pytest.raises(ValueError, match="build it with static_graph=False"), accum(ddp):
        accum.backward(mean_loss(ddp, data([2])[0]))
    del ddp


@pytest.mark.usefixtures("lonely_group")
@pytest.mark.parametrize("steps", [1, 2])
def test_a_second_backward_in_a_block_of_ddp_is_refused(steps):
    """Where the window closes the first one has reduced; a loop is told in its first block."""
    ddp = DistributedDataParallel(network())
    accum = Accumulator(steps)

    def block():
        with accum(ddp):
            loss = mean_loss(ddp, data([2])[0]) / 2
            accum.backward(loss, retain_graph=True)
            accum.backward(loss)

    with pytest.raises(RuntimeError, match="add the losses and call backward once"):
        block()


@pytest.mark.usefixtures("lonely_group")
def test_a_forward_outside_of_its_block_is_refused_under_ddp():
    """DDP decides in the forward whether the backward reduces; here it would, too early."""
    ddp = DistributedDataParallel(network())
    accum = Accumulator(2)
    loss = mean_loss(ddp, data([2])[0])
    with pytest.raises(RuntimeError, match=r"Run it inside of `with accum\(model\):`"), accum(ddp):
        accum.backward(loss)


@pytest.mark.usefixtures("lonely_group")
def test_no_sync_is_restored_after_an_exception():
    """The flag that DDP reads in its forward."""
    ddp = DistributedDataParallel(network())
    accum = Accumulator(2)

    def block(ddp):
        with accum(ddp):
            assert not ddp.require_backward_grad_sync
            raise MemoryError

    with pytest.raises(MemoryError):
        block(ddp)
    assert ddp.require_backward_grad_sync
    del ddp


@pytest.mark.usefixtures("lonely_group")
def test_a_parameter_that_the_closing_micro_batch_does_not_use_is_named_before_the_step():
    """find_unused_parameters=False leaves the whole window unreduced, and says so too late."""
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = model

        def forward(self, x, which):
            return self.heads[which](x).mean()

    ddp = DistributedDataParallel(Heads())
    optimizer = SGD(model.parameters(), 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    accum = Accumulator(1, optimizer=optimizer)
    with (
        pytest.raises(RuntimeError, match=r"heads.b.weight.*find_unused_parameters=True"),
        accum(ddp),
    ):
        accum.backward(ddp(torch.ones(1, 2), "a"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    del ddp


@pytest.mark.usefixtures("lonely_group")
def test_fsdp_of_the_first_kind_is_refused_by_name():
    """Its running sums can't be reached."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not shard on one rank
        model = FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"shard it with torch\.distributed\.fsdp\.fully_shard"):
        Accumulator(2)(model).__enter__()


def test_processes_that_can_not_see_each_other_are_warned_about(monkeypatch):
    """A launcher started four, and nobody called init_process_group."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = network()
    accum = Accumulator(2)
    with pytest.warns(UserWarning, match="each process would train alone"), accum(model):
        accum.backward(mean_loss(model, data([2])[0]))


@pytest.mark.parametrize("empty", [[], ()])
def test_no_optimizer_among_those_given_is_refused(empty):
    """Else nobody would step: the loop trusts accum, and accum leaves it to the loop."""
    with pytest.raises(ValueError, match="optimizer= is empty"):
        Accumulator(steps=2, optimizer=empty)


def test_a_scaler_that_is_none_is_refused():
    """By its type, in words."""
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"scaler is a torch.amp.GradScaler.* got int"):
        Accumulator(steps=2, optimizer=SGD(model.parameters(), 0.1), scaler=3)
