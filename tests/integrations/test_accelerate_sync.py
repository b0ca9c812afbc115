"""Accelerate's own test of gradient accumulation, with `accum` in place of `accumulate`.

After accelerate 1.15, accelerate/test_utils/scripts/test_sync.py (Apache License 2.0), for one
process. Its reference divides a tail by the steps that were planned, which is not right: here
the reference of a tail is a mean over its own micro-batches.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.test_utils import RegressionDataset, RegressionModel
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accumplug import Accumulator


def loss_of(model, batch):
    inputs, target = batch.values()
    return F.mse_loss(model(inputs), target)


def setup(accelerator):
    """The script's: five batches of sixteen; a plain copy beside the prepared model."""
    set_seed(42)
    model = RegressionModel()
    prepared = deepcopy(model)
    optimizers = [AdamW(m.parameters(), lr=1e-3) for m in (model, prepared)]
    schedulers = [LambdaLR(o, lr_lambda=lambda epoch: epoch**0.65) for o in optimizers]
    loader = DataLoader(RegressionDataset(length=80), batch_size=16)
    ours = accelerator.prepare(prepared, optimizers[1], schedulers[1], loader)
    return (model, optimizers[0], schedulers[0]), ours


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("dispatch_batches", [False, True])
@pytest.mark.parametrize("sync_each_batch", [False, True])
def test_gradients_are_those_of_the_plain_loop(split_batches, dispatch_batches, sync_each_batch):
    """`test_gradient_accumulation`: the same in each micro-batch, and rescaled in the tail."""
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            split_batches=split_batches, dispatch_batches=dispatch_batches
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=2, sync_each_batch=sync_each_batch
        ),
    )
    (model, _, _), (prepared, _, _, loader) = setup(accelerator)
    accum = Accumulator(2, accelerator=accelerator)
    for iteration, batch in enumerate(loader):
        (loss_of(model, batch) / (1 if iteration == 4 else 2)).backward()
        with accum(prepared):
            accelerator.backward(loss_of(prepared, batch))
        for ours, theirs in zip(prepared.parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad)
        if iteration % 2:
            model.zero_grad()
            prepared.zero_grad()
    assert accum.updates == 3


def test_optimizer_and_schedule_are_those_of_the_plain_loop():
    """`test_gradient_accumulation_with_opt_and_scheduler`: the rates, and the weights too."""
    plugin = GradientAccumulationPlugin(num_steps=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    (model, optimizer, scheduler), (prepared, ddp_optimizer, ddp_scheduler, loader) = setup(
        accelerator
    )
    accum = Accumulator(2, accelerator=accelerator)
    for iteration, batch in enumerate(loader):
        tail = iteration == len(loader) - 1
        (loss_of(model, batch) / (1 if tail else 2)).backward()
        if iteration % 2 == 1 or tail:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with accum(prepared):
            accelerator.backward(loss_of(prepared, batch))
            ddp_optimizer.step()
            ddp_scheduler.step()
            ddp_optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] == ddp_optimizer.param_groups[0]["lr"]
        for ours, theirs in zip(prepared.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert accum.updates == 3


def test_the_active_loader_is_told_as_before():
    """`test_dataloader_break`, with blocks in the outer loop: accum registers no loader."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(RegressionModel())
    first, second = accelerator.prepare(
        DataLoader(RegressionDataset(length=80), batch_size=16),
        DataLoader(RegressionDataset(length=96), batch_size=16),
    )
    state, accum = GradientState(), Accumulator(2, accelerator=accelerator)
    assert state.active_dataloader is None
    for iteration, batch in enumerate(first):
        assert state.active_dataloader is first
        with accum(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                model.zero_grad()
        if iteration == 1:
            for number, _ in enumerate(second):
                assert state.active_dataloader is second
                assert state.end_of_dataloader == (number == len(second) - 1)
        assert state.end_of_dataloader == (iteration == len(first) - 1)
    assert state.active_dataloader is None
    assert accum.updates == 3
