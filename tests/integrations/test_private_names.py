"""What accumplug reads of Accelerate, Lightning and Trainer, if one of them has moved it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, fsdp_utils
from ranks.test_private_names import without
from torch import nn
from torch.utils.data import DataLoader

from accumplug import Accumulator, MovedError
from accumplug.integrations import accelerate, accelerate_state

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of workers and CPUs


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared() -> tuple[Any, nn.Module, Any, Any]:
    """An Accelerator with a model, an optimizer and a loader of four items."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([torch.ones(3)] * 4, batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


@pytest.mark.parametrize("name", accelerate.PREPARED)
def test_an_accelerator_that_has_lost_a_name_is_refused(name: str) -> None:
    """Before anything of it is patched."""
    accelerator, *_ = prepared()
    before = set(vars(accelerator)) - {name}
    with without(accelerator, name), pytest.raises(MovedError) as raised:
        Accumulator(2, accelerator=accelerator)
    assert str(raised.value).startswith("accelerate ")
    assert f" moved Accelerator.{name}, which accumplug reads for " in str(raised.value)
    assert set(vars(accelerator)) - {name} == before


@pytest.mark.parametrize("name", accelerate.STATE)
def test_a_gradient_state_that_has_lost_a_name_is_refused(name: str) -> None:
    """The same."""
    accelerator, *_ = prepared()
    with (
        without(accelerator.gradient_state, name),
        pytest.raises(MovedError, match=rf"moved GradientState\.{name}, "),
    ):
        Accumulator(2, accelerator=accelerator)


@pytest.mark.parametrize("name", accelerate.WRAPPED)
@pytest.mark.parametrize("later", [False, True])
def test_a_prepared_optimizer_that_has_lost_a_name_is_refused(name: str, later: bool) -> None:
    """It would be taken for one of torch, whose step is not seen. One that is prepared after the
    Accumulator was built is looked at when a window closes."""
    accelerator, model, optimizer, loader = prepared()
    with without(optimizer, name):
        if not later:
            for options in ({}, {"optimizer": optimizer}):
                with pytest.raises(MovedError, match=rf"moved AcceleratedOptimizer\.{name}, "):
                    Accumulator(2, accelerator=accelerator, **options)
            return
        others, accelerator._optimizers = accelerator._optimizers, []
        accum = Accumulator(2, accelerator=accelerator)
        accelerator._optimizers = others
        with pytest.raises(MovedError, match=rf"moved AcceleratedOptimizer\.{name}, "):
            for x in loader:
                with accum(model):
                    accelerator.backward(model(x).mean())


@pytest.mark.parametrize("name", ["base_dataloader", "skip_batches"])
def test_a_prepared_loader_that_has_lost_a_name_is_refused(name: str) -> None:
    """When its pass begins, before a window takes its end for that of another."""
    accelerator, _, _, loader = prepared()
    accum = Accumulator(2, accelerator=accelerator)
    with without(loader, name), pytest.raises(MovedError, match=rf"\.{name}, which accumplug"):
        next(iter(loader))
    assert accum.micro_batches == 0


def test_a_dispatcher_that_has_lost_its_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are counted where it fetches them."""
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader([torch.ones(3)] * 4, batch_size=1))
    accum = Accumulator(2, accelerator=accelerator)
    monkeypatch.delattr(DataLoaderDispatcher, "_fetch_batches")
    with pytest.raises(MovedError, match="_fetch_batches"):
        next(iter(loader))
    assert accum.micro_batches == 0


def test_a_save_of_a_sharded_optimizer_that_has_moved_is_named() -> None:
    """Whether it loses the optimizer's state could not be seen."""
    with (
        without(fsdp_utils, "save_fsdp_optimizer"),
        pytest.raises(MovedError, match=r"fsdp_utils\.save_fsdp_optimizer, "),
    ):
        accelerate_state.refuse_lossy_saves()


def test_a_prepared_scheduler_that_has_lost_its_own_is_refused() -> None:
    """Given to accum, which would tick the one that Accelerate counts."""
    accelerator, _, optimizer, _ = prepared()
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    with (
        without(scheduler, "scheduler"),
        pytest.raises(MovedError, match=r"moved AcceleratedScheduler\.scheduler, "),
    ):
        Accumulator(2, accelerator=accelerator, optimizer=optimizer, scheduler=scheduler)


# -- transformers ----------------------------------------------------------------------------------


class Word(nn.Module):
    """A model that returns a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 5)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return {"loss": F.cross_entropy(self.words(input_ids), labels)}


IN_A_TRAINER = (
    *("current_gradient_accumulation_steps", "_loss_shifts_labels"),
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"),
)


@pytest.mark.parametrize("name", IN_A_TRAINER)
def test_a_trainer_that_calls_its_own_by_another_name_is_refused(name: str, tmp_path: Path) -> None:
    """In the first step, before a loss is divided by something else, or logged elsewhere."""
    transformers = pytest.importorskip("transformers")
    from accumplug.integrations.transformers import IN_A_RUN, IN_A_STEP, AccumTrainer

    assert IN_A_TRAINER == IN_A_STEP + IN_A_RUN

    class Moved(AccumTrainer):  # type: ignore[misc]
        def __setattr__(self, own: str, value: Any) -> None:
            super().__setattr__(f"new{own}" if own == name else own, value)

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": torch.tensor(i), "labels": torch.tensor(i)} for i in range(4)]
    trainer = Moved(Word(), args, train_dataset=rows)
    with pytest.raises(MovedError, match=rf"^transformers [\d.]+ moved Moved\.{name}, which "):
        trainer.train()
    assert all(p.grad is None for p in trainer.model.parameters())


# -- Lightning -------------------------------------------------------------------------------------


def fit(**options: Any) -> Any:
    """A fit of one layer with AccumCallback, over four batches in windows of one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Lightning imports
        lightning = pytest.importorskip("lightning.pytorch")
        from accumplug.integrations.lightning import AccumCallback

        class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer(batch).square().mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1}
        trainer = lightning.Trainer(max_epochs=1, callbacks=[AccumCallback()], **quiet | options)
        trainer.fit(Module(), DataLoader([torch.ones(3)] * 4, batch_size=1))


def test_a_lightning_that_calls_no_backward_of_the_module_is_refused() -> None:
    """Its gradients would be those of nobody, and taken away."""
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins import Precision

    def direct(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        tensor.backward()

    with (
        mock.patch.object(Precision, "backward", direct),
        pytest.raises(MovedError, match=r"^lightning [\d.]+ moved LightningModule\.backward, "),
    ):
        fit()


def test_a_precision_of_lightning_without_its_scaler_is_refused() -> None:
    """The loss would be taken for a scaled one, or the other way round."""
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("bf16-mixed", "cpu")
    with (
        without(plugin, "scaler"),
        pytest.raises(MovedError, match=r"^lightning [\d.]+ moved MixedPrecision\.scaler, "),
    ):
        fit(plugins=[plugin])


def test_a_precision_of_fabric_without_its_scaler_is_refused() -> None:
    """The same."""
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    from accumplug.integrations.lightning import FabricAccumulator

    plugin = MixedPrecision("bf16-mixed", "cpu")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    with (
        without(plugin, "scaler"),
        pytest.raises(MovedError, match=r"moved MixedPrecision\.scaler"),
    ):
        FabricAccumulator(fabric, 2, optimizer=optimizer)
