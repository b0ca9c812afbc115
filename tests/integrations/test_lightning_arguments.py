"""Lightning's options beside the window: each does what it does in a fit whose batch is the whole
window, without accumulation."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Lightning imports
    pytest.importorskip("lightning")
    from integrations.test_lightning import BATCH, STEPS, Module, apart, data, trainer
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy
    from lightning.pytorch import callbacks as theirs
    from lightning.pytorch.callbacks import ModelCheckpoint

    from accumplug.integrations.lightning import AccumCallback, FabricAccumulator

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Validated(Module):
    """With a loss on held-out rows, logged as "v"."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", F.mse_loss(self.net(batch[0]), batch[1]))

    def val_dataloader(self) -> Any:
        return DataLoader(data(6), 2)


class ByEpoch(Validated):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "epoch"},
        }


class Plateau(Validated):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "v"}}


class OwnStep(Validated):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        optimizer, closure = args[2], kwargs.get("optimizer_closure", args[-1])
        optimizer.step(closure=closure)

    def optimizer_zero_grad(self, *args: Any) -> None:
        args[-1].zero_grad(set_to_none=False)


class OwnClip(Validated):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Logs(Validated):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("l", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "more": 1}


def saves(**options: Any) -> Callable[[Path], Any]:
    return lambda folder: ModelCheckpoint(folder, **options)


EVERY = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
BEST = {"monitor": "v", "save_top_k": 1, "save_last": True, "filename": "{epoch}"}
CASES: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "ModelCheckpoint by steps": {"callbacks": [saves(**EVERY)]},
    "ModelCheckpoint of the best": {"callbacks": [saves(**BEST)], "max_epochs": 3},
    "EarlyStopping": {
        "callbacks": [lambda _: theirs.EarlyStopping("v", patience=0, min_delta=0.03)],
        "max_epochs": 20,
    },
    "StochasticWeightAveraging": {
        "callbacks": [lambda _: theirs.StochasticWeightAveraging(0.05, swa_epoch_start=1)],
        "max_epochs": 4,
    },
    "clipping by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "no clipping": {"gradient_clip_val": None},
    "clipping of the module": {"module": OwnClip, "gradient_clip_val": None},
    "optimizer_step of the module": {"module": OwnStep},
    "schedule by the epoch": {"module": ByEpoch, "max_epochs": 4},
    "schedule by a plateau": {"module": Plateau, "max_epochs": 4},
    "dict from training_step": {"module": Logs},
    "barebones": {"barebones": True},
    "limit_train_batches": {"limit_train_batches": 6, "whole": {"limit_train_batches": None}},
    "a half": {"limit_train_batches": 0.5, "whole": {"limit_train_batches": None, "rows": 10}},
    "overfit_batches": {"overfit_batches": 6, "whole": {"overfit_batches": 0.0}},
}


def fitted(
    ours: bool,
    module: type[Validated] = Validated,
    callbacks: Any = (),
    rows: int = 21,
    **options: Any,
) -> tuple[Any, Any, list[str]]:
    """The module, the trainer and the names of the checkpoints, of a fit."""
    folder = Path(tempfile.mkdtemp())
    options = {"precision": "64-true", "enable_checkpointing": bool(callbacks)} | options
    options["default_root_dir"] = folder
    if options.get("barebones"):
        keys = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options |= dict.fromkeys(keys)
    own = [AccumCallback()] if ours else []
    steps, size = (STEPS, BATCH) if ours else (1, BATCH * STEPS)
    made = [make(folder) for make in callbacks]
    fit = trainer(*own, *made, accumulate_grad_batches=steps, **options)
    one = module()
    fit.fit(one, DataLoader(data()[:rows], size))
    return one, fit, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_an_option_does_what_it_does_for_one_large_batch(case: str) -> None:
    """Weights to 1e-13; updates, epochs, checkpoints and what was monitored."""
    options = dict(CASES[case])
    changed = options.pop("whole", {})
    if changed:  # batches are micro-batches where there is a window
        changed = {"rows": 12} | changed
    ours, theirs_ = fitted(True, **options), fitted(False, **options | changed)
    assert apart(ours[0].net, theirs_[0].net) <= 1e-13
    for name in ("global_step", "current_epoch"):
        assert getattr(ours[1], name) == getattr(theirs_[1], name)
    assert ours[2] == theirs_[2]
    values = [fit.callback_metrics.get("v", torch.zeros(())) for _, fit, _ in (ours, theirs_)]
    assert torch.allclose(*values, rtol=1e-10)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_full_windows_have_lightning_s_own_bits_in_each_precision(precision: str) -> None:
    """Where its windows are right."""
    torch.set_default_dtype(torch.float32)
    rows = [(x.float(), y.float()) for x, y in data(16)]
    found = []
    for own in ([], [AccumCallback()]):
        module = Validated()
        trainer(*own, precision=precision).fit(module, DataLoader(rows, BATCH))
        found.append(list(module.parameters()))
    assert all(map(torch.equal, *found))


def test_a_callback_may_serve_two_fits() -> None:
    """The second has an Accumulator of its own."""
    module, callback = Validated(), AccumCallback()
    found = []
    for epochs in (1, 2):
        fit = trainer(callback, max_epochs=epochs, precision="64-true")
        fit.fit(module, DataLoader(data(), BATCH))
        found.append((callback.accum, callback.accum.updates))
    assert [updates for _, updates in found] == [3, 6]
    assert found[0][0] is not found[1][0]


def test_a_sharding_strategy_is_refused() -> None:
    """By its name, before a window begins."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric._strategy = FSDPStrategy()
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="in Fabric with FSDPStrategy"):
        FabricAccumulator(fabric, 2, optimizer=optimizer)
