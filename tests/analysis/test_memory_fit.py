"""What trying sizes promises: out of memory is an answer, other errors are not, nothing moves."""

import pytest
import torch
from torch import nn

from accumplug.analysis import memory_fit
from accumplug.analysis.plan import largest_micro_batch
from accumplug.analysis.user_target import Target


def target(loss=None, holds=10):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def limited(model, batch):
        if len(batch["x"]) > holds:
            raise torch.OutOfMemoryError("pretended")
        return model(batch["x"]).square().mean()

    return Target(model, {"x": torch.randn(3, 4)}, loss or limited)


def test_the_largest_size_that_runs_is_found_and_the_model_is_left_alone():
    """A device that holds 10 items: of the divisors of 48 it is 8; weights and gradients stay."""
    parts = target()
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    trial = memory_fit.Trial(parts, torch.device("cpu"))
    assert largest_micro_batch(trial, 48) == 8
    assert all(torch.equal(before[name], value) for name, value in parts.model.state_dict().items())
    assert parts.model.weight.grad is None


def test_an_allocator_that_fails_is_an_answer_and_another_error_is_not():
    """The CPU's allocator raises a plain RuntimeError; a wrong shape raises one as well."""

    def too_much(model, batch):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")

    def wrong(model, batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    assert not memory_fit.Trial(target(too_much), torch.device("cpu"))(1)
    with pytest.raises(RuntimeError, match="shapes"):
        memory_fit.Trial(target(wrong), torch.device("cpu"))(1)


def test_on_the_cpu_a_size_that_would_not_fit_is_not_tried(monkeypatch):
    """64 MiB an item were seen: with 1 GiB left, 8 items are run and 32 are not."""
    tried = []

    def hungry(model, batch):
        tried.append(len(batch["x"]))
        block = torch.ones(len(batch["x"]), 16 * 2**20)
        return model(batch["x"]).square().mean() + 0 * block.sum()

    trial = memory_fit.Trial(target(hungry), torch.device("cpu"))
    monkeypatch.setattr(memory_fit, "available_memory", lambda: 2.0**30)
    assert trial(2)
    assert not trial(32)
    assert set(tried) == {2}


def test_without_a_launcher_there_is_one_rank():
    """Its answer is everybody's."""
    with memory_fit.launched_ranks() as (ranks, smallest):
        assert ranks == 1
        assert smallest(5) == 5


def test_available_memory_is_a_number_of_bytes():
    """More than a MiB on any machine that runs the tests."""
    assert memory_fit.available_memory() > 2**20


def test_a_model_with_batchnorm_is_tried_from_two_items_on():
    """It refuses a single one in training; in eval mode it takes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    seen = []

    def loss(model, batch):
        seen.append(len(batch))
        return model(batch).square().mean()

    trial = memory_fit.Trial(Target(model, torch.randn(3, 4), loss), torch.device("cpu"))
    assert largest_micro_batch(trial, 4) == 4
    assert set(seen) == {2, 4}
    seen.clear()
    assert memory_fit.Trial(Target(model.eval(), torch.randn(3, 4), loss), torch.device("cpu"))(1)
    assert set(seen) == {1}


@pytest.fixture
def two_devices(monkeypatch):
    """A machine with cuda:0 and cuda:1, as far as torch is asked; the one that was made current."""
    current = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    return current


def test_under_a_launcher_each_rank_tries_its_own_device(two_devices, monkeypatch):
    """LOCAL_RANK is the index; it is made current, so that a target's "cuda" is it too."""
    assert memory_fit.rank_device() == torch.device("cuda")
    assert two_devices == []
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert memory_fit.rank_device() == torch.device("cuda", rank)
        assert memory_fit.rank_device("cuda") == torch.device("cuda", rank)
    assert two_devices == [torch.device("cuda", rank) for rank in (0, 0, 1, 1)]
    assert memory_fit.rank_device("cuda:0") == torch.device("cuda:0")
    assert memory_fit.rank_device("cpu") == torch.device("cpu")


def test_a_cuda_build_without_a_gpu_takes_the_cpu(two_devices, monkeypatch):
    """torch names an accelerator that is not there."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for rank in (None, "0"):
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        assert memory_fit.rank_device() == torch.device("cpu")
    assert two_devices == []


def test_a_rank_without_a_device_is_told_so(two_devices, monkeypatch):
    """Three ranks on two devices."""
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="rank 2 of this machine has no device: torch sees 2"):
        memory_fit.rank_device()
    assert two_devices == []


def test_a_batch_without_items_can_not_be_repeated():
    """Its rows are what larger micro-batches are made of."""
    parts = Target(nn.Linear(4, 2), torch.ones(0, 4), lambda model, batch: model(batch).mean())
    with pytest.raises(ValueError, match="the batch has no items"):
        memory_fit.Trial(parts, torch.device("cpu"))
