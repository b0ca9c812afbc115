"""What the counter promises: the reductions that ran, seen where they run; and one window."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

from accumplug.accumulator import Accumulator
from accumplug.analysis.sync_counter import sync_counter, train_one_optimizer_step

CRITERION = nn.CrossEntropyLoss()


def setup(items=12, sizes=(3, 3, 3, 3), seed=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(items, 6, generator=generator)
    targets = torch.randint(0, 3, (items,), generator=generator)
    return model, list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def test_a_plain_ddp_loop_reduces_in_each_micro_batch_and_an_accumulator_once():
    """4 micro-batches: 4 reductions where nothing defers them, 1 with an Accumulator."""
    model, micro_batches = setup()
    with sync_counter(model) as counter:
        for x, y in micro_batches:
            CRITERION(counter.model(x), y).backward()
        assert (counter.syncs, counter.buckets) == (4, 4)
    model.zero_grad()
    with sync_counter(model) as counter:
        accum = Accumulator(4, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in micro_batches * 2:
            with accum(counter.model):
                accum.backward(CRITERION(counter.model(x), y))
        assert counter.syncs == accum.syncs == 2


def test_a_reduction_in_several_buckets_is_one_reduction():
    """DDP lays out its buckets after the first backward; the first of them holds 1 MiB."""
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    with sync_counter(model) as counter:
        for _ in range(2):
            counter.model(torch.ones(2, 600)).sum().backward()
        assert counter.syncs == 2
        assert counter.buckets == 1 + 2


class Loose(nn.Module):
    """Has a parameter that no loss reaches, and gives its loss by itself."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        self.size = self.used(x).square().mean()
        return self.used(x)

    def loss(self, batch):
        return CRITERION(self.used(batch[0]), batch[1])


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (12,)])
@pytest.mark.parametrize(
    "loss", [CRITERION, lambda m, b: m.loss(b), lambda m, b: m(b[0]).mean() + m.size]
)
def test_losses_that_use_attributes_of_the_model_are_counted_too(loss, sizes):
    """In a single process the user's model is in no DDP, so its attributes are where they were."""
    _, micro_batches = setup(sizes=sizes)
    model = Loose()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = train_one_optimizer_step(
        model, optimizer, micro_batches, loss, find_unused_parameters=True
    )
    assert (step.syncs, step.stepped) == (1, True)
    with pytest.raises(AttributeError, match="nothing"), sync_counter(model) as counter:
        _ = counter.model.nothing


def test_a_parameter_that_no_loss_reaches_is_named():
    """DDP would wait for it; `find_unused_parameters` is what it asks for."""
    (model, (_, micro_batches)) = Loose(), setup()
    with pytest.raises(RuntimeError, match=r"used no unused.weight, .*find_unused_parameters=True"):
        train_one_optimizer_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches, CRITERION
        )


def test_the_group_that_was_made_is_taken_down_also_after_an_error():
    """Nothing is left behind: no process group, and `model` is the bare model again."""
    model, _ = setup()
    with sync_counter(model) as counter:
        assert dist.is_initialized()
        assert isinstance(counter.model, DistributedDataParallel)
    assert counter.model is model
    with pytest.raises(OSError, match="disk"), sync_counter(model):
        raise OSError("disk")
    assert not dist.is_initialized()


def test_a_group_that_was_there_is_used_and_left():
    """The reductions run over it, and a model that is in DDP already keeps its own hook free."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model, ((x, y), *_) = setup()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        with sync_counter(wrapped) as counter:
            assert counter.model is not wrapped
            assert counter.model.gradient_as_bucket_view
            CRITERION(counter.model(x), y).backward()
            assert counter.syncs == 1
        assert counter.model is wrapped
        assert dist.is_initialized()
        model.zero_grad()
        CRITERION(wrapped(x), y).backward()
        assert counter.syncs == 1, "the block is over"
        del wrapped, counter
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (1, 2, 9), (12,)])
def test_one_window_is_one_reduction_and_the_step_of_one_large_batch(sizes):
    """Weights after the step are those of plain torch on all 12 items at once."""
    model, micro_batches = setup(sizes=sizes)
    reference = copy.deepcopy(model)
    step = train_one_optimizer_step(
        model, torch.optim.SGD(model.parameters(), lr=0.5), micro_batches, CRITERION
    )
    whole = CRITERION(
        reference(torch.cat([x for x, _ in micro_batches])),
        torch.cat([y for _, y in micro_batches]),
    )
    whole.backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    assert (step.micro_batches, step.syncs, step.stepped) == (len(sizes), 1, True)
    assert step.loss == pytest.approx(float(whole.detach()), rel=1e-6)
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        assert ours.grad is None


def test_weights_and_clipping_are_handed_on():
    """Weights that count items, and a norm that is told before clipping to 0.01."""
    model, micro_batches = setup(sizes=(2, 10))
    reference = copy.deepcopy(model)
    step = train_one_optimizer_step(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        micro_batches,
        lambda model, batch: CRITERION(model(batch[0]), batch[1]),
        items=lambda batch: 5.0,
        max_grad_norm=0.01,
    )
    mean = sum(CRITERION(reference(x), y) for x, y in micro_batches) / 2
    assert step.loss == pytest.approx(float(mean.detach()), rel=1e-6)
    assert step.grad_norm > 0.01
    moved = [
        (a - b).detach() for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    assert float(torch.cat([m.flatten() for m in moved]).norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("functional", [False, True])
def test_targets_that_a_criterion_ignores_are_not_counted(ignored, functional):
    """Weights after the step are those of plain torch on all targets; one piece has none."""
    model, micro_batches = setup(sizes=(3, 3, 6))
    for targets in (micro_batches[0][1], micro_batches[1][1][:2]):
        targets[:] = ignored
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    if functional:
        loss = functools.partial(F.cross_entropy, ignore_index=ignored)
        loss = F.cross_entropy if ignored == -100 else loss
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_one_optimizer_step(model, optimizer, micro_batches, loss)
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    loss(reference(inputs), targets).backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_targets_that_are_probabilities_count_as_rows():
    """cross_entropy takes them too, and ignores none."""
    model, micro_batches = setup(sizes=(2, 10))
    micro_batches = [(x, F.one_hot(y, 3).float()) for x, y in micro_batches]
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = train_one_optimizer_step(model, optimizer, micro_batches, F.cross_entropy)
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    whole = float(F.cross_entropy(reference(inputs), targets).detach())
    assert step.loss == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    "batch", [{"x": torch.ones(2, 6)}, (torch.ones(2, 6),), [torch.ones(2)] * 3]
)
def test_a_criterion_needs_pairs_and_says_so(batch):
    """Whatever came in their place."""
    model, _ = setup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"needs a batch that is a pair \(inputs, targets\), got a"
    ):
        train_one_optimizer_step(model, optimizer, [batch], CRITERION)


def test_a_step_without_micro_batches_is_refused():
    """Nothing to train on is said."""
    model, _ = setup()
    with pytest.raises(ValueError, match="at least one micro-batch, got none"):
        train_one_optimizer_step(model, torch.optim.SGD(model.parameters(), 0.1), [], CRITERION)
