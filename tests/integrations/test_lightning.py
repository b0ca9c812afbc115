"""Lightning with accum's window: its habits, the right mean, windows in its checkpoints; Fabric."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Lightning imports
    lightning = pytest.importorskip("lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision as FabricMixed
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision

    from accumplug.integrations.lightning import (
        NEEDED,
        AccumCallback,
        FabricAccumulator,
        check_lightning,
        rows,
    )

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of workers, loggers, CPUs
STEPS, BATCH, ROWS = 4, 2, 21


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data(count: int = ROWS) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator)
    return [(row, row.sum().sin().reshape(1)) for row in x]


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


class Module(LightningModule):
    """One layer more than a loss needs, a schedule by the step, SGD."""

    def __init__(self, dropout: float = 0.0, optimizer: Any = None) -> None:
        super().__init__()
        self.net = net(dropout)
        self.rates: list[float] = []
        self.optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Watch(Callback):
    """Writes down what each window told."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        accum = next(c.accum for c in trainer.callbacks if isinstance(c, AccumCallback))
        if accum.windows > len(self.losses):
            self.losses.append(accum.last.loss)
        self.steps.append(trainer.global_step)


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    common = {
        "max_epochs": 2,
        "accumulate_grad_batches": STEPS,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.5,
    }
    return Trainer(callbacks=list(callbacks), **(common | options))


def plain(epochs: int = 2, window: int = STEPS * BATCH) -> tuple[nn.Module, list[float]]:
    """One large batch for each window, in plain torch."""
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(epochs):
        for start in range(0, ROWS, window):
            x, y = (torch.stack(side) for side in zip(*data()[start : start + window], strict=True))
            loss = F.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model, losses


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(data())


@pytest.mark.parametrize("source", [data, Stream], ids=["rows", "stream"])
def test_each_update_is_the_mean_over_the_rows_of_its_window(source: Any) -> None:
    """11 batches in a pass, the last of one row: the tail is a mean over its 5 rows."""
    expected, losses = plain()
    module, accum, watch = Module(), AccumCallback(), Watch()
    trainer(accum, watch, precision="64-true").fit(module, DataLoader(source(), BATCH))
    assert apart(module.net, expected) <= 1e-13
    assert watch.losses == pytest.approx(losses, rel=1e-13)
    assert accum.accum.updates == 6
    assert accum.accum.epoch == 2
    assert "backward" not in vars(module)


def test_lightning_alone_has_a_quarter_of_the_tail() -> None:
    """What the callback is there for."""
    expected, _ = plain()
    module = Module()
    trainer(precision="64-true").fit(module, DataLoader(data(), BATCH))
    assert apart(module.net, expected) > 1e-2


def test_steps_schedules_and_checkpoints_are_lightning_s(tmp_path: Path) -> None:
    """global_step counts updates, max_steps and ModelCheckpoint fire as before."""
    found = []
    for extra in ([], [AccumCallback(), Watch()]):
        module = Module()
        folder = tmp_path / str(len(extra))
        saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        fit = trainer(*extra, saver, max_steps=5, max_epochs=-1, enable_checkpointing=True)
        fit.fit(module, DataLoader(data(), BATCH))
        names = sorted(path.name for path in folder.iterdir())
        found.append((fit.global_step, fit.current_epoch, module.rates, names))
    assert found[0] == found[1]
    assert found[1][0] == 5
    assert len(found[1][3]) == 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_is_lightning_s(precision: str) -> None:
    """Full windows are those of Lightning itself; the scale is out of the loss."""
    torch.set_default_dtype(torch.float32)
    found = []
    for extra in ([], [AccumCallback(), Watch()]):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision[0] == "1" else None
        plugin = MixedPrecision(precision, "cpu", scaler)
        module = Module()
        trainer(*extra, plugins=[plugin]).fit(module, DataLoader(data(16), BATCH))
        found.append(module.net)
    assert apart(found[1], found[0]) <= 1e-5
    assert all(0.01 < loss < 5 for loss in extra[1].losses)


def test_a_step_that_returns_none_adds_nothing() -> None:
    """Neither in the middle of a window nor where it closes."""

    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (1, 3) else super().training_step(batch, batch_idx)

    module = Skips()
    trainer(AccumCallback(), max_epochs=1, precision="64-true").fit(module, DataLoader(data(8), 2))
    expected = net()
    kept = [data(8)[i] for i in (0, 1, 4, 5)]
    x, y = (torch.stack(side) for side in zip(*kept, strict=True))
    F.mse_loss(expected(x), y).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert apart(module.net, expected) <= 1e-13


def test_rows_are_found_in_any_batch() -> None:
    """Of the first tensor."""
    assert rows({"a": ["x", (torch.zeros(3, 2),)], "b": torch.zeros(2)}) == 3
    assert rows(torch.zeros(())) == rows("text") == 1


# -- checkpoints inside of a window ----------------------------------------------------------------


class Resumable:
    """A loader whose place Lightning saves and brings back."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.start = items, 0

    def __iter__(self) -> Any:
        begin, self.start = self.start, 0
        for place in range(begin, len(self.items)):
            self.place = place + 1
            yield self.items[place]

    def __len__(self) -> int:
        return len(self.items)

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.start = state["place"]


class SaveAt(Callback):
    def __init__(self, path: Path, place: int) -> None:
        self.path, self.place, self.count = path, place, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.count += 1
        if self.count == self.place:
            trainer.save_checkpoint(self.path)


def batches() -> list[Any]:
    return list(DataLoader(data(), BATCH))


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("place", [2, 4, 7, 10])
def test_a_fit_goes_on_inside_of_its_window(place: int, tmp_path: Path) -> None:
    """Dropout and AdamW; the weights are those of the fit that was never stopped."""
    straight, path = Module(0.3, adam), tmp_path / "a.ckpt"
    save = SaveAt(path, place)
    torch.manual_seed(5)
    trainer(AccumCallback(), save, precision="64-true").fit(straight, Resumable(batches()))
    resumed, accum = Module(0.3, adam), AccumCallback()
    fit = trainer(accum, precision="64-true")
    fit.fit(resumed, Resumable(batches()), ckpt_path=path)
    assert accum.accum.micro_batches == 22
    assert fit.global_step == 6
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_other_batches_than_those_of_the_window_are_refused(tmp_path: Path) -> None:
    """The message says what to change."""
    path = tmp_path / "a.ckpt"
    trainer(AccumCallback(), SaveAt(path, 6)).fit(Module(), Resumable(batches()))
    fit = trainer(AccumCallback(), accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="accumulate_grad_batches = 4 to go on from, not 2"):
        fit.fit(Module(), Resumable(batches()), ckpt_path=path)


# -- what is refused -------------------------------------------------------------------------------


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Module):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "manual optimization"),
        (OwnBackward, "OwnBackward.backward"),
        (lambda: Module(0.0, lbfgs), "LBFGS"),
    ],
)
def test_what_a_window_can_t_be_kept_with_is_refused(module: Any, message: str) -> None:
    """When the fit begins."""
    steps = 1 if module is Manual else STEPS  # Lightning itself refuses more
    fit = trainer(AccumCallback(), gradient_clip_val=None, accumulate_grad_batches=steps)
    with pytest.raises(ValueError, match=message):
        fit.fit(module(), DataLoader(data(), BATCH))


@pytest.mark.parametrize("place", NEEDED, ids=lambda place: place.__name__)
def test_what_lightning_lacks_is_named(place: Any) -> None:
    """So it is when this Lightning moves it: the module could not be imported."""
    missing = "no_such_thing"
    with pytest.raises(ImportError, match=f"has a {place.__name__} without {missing}"):
        check_lightning({place: (missing,)})


# -- Fabric ----------------------------------------------------------------------------------------


def fabric_run(fabric: Any, kind: Any) -> nn.Module:
    torch.manual_seed(0)
    model = net().to(torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(data(16), BATCH))
    if kind is None:
        for number, (x, y) in enumerate(loader, start=1):
            loss = F.mse_loss(model(x.float()), y.float()) / STEPS
            fabric.backward(loss)
            if number % STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
    else:
        accum = kind(fabric, STEPS, optimizer=optimizer)
        for x, y in accum.batches(loader):
            with accum(model, weight=len(x)) as micro:
                backward = micro.backward if accum.updates else accum.backward
                backward(F.mse_loss(model(x.float()), y.float()))
        assert accum.updates == 2
    return model.module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_fabric_s_precisions_are_kept(precision: str) -> None:
    """Against Fabric's own loop, where that is right: full windows of equal batches."""
    torch.set_default_dtype(torch.float32)
    found = []
    for kind in (None, FabricAccumulator):
        plugin: dict[str, Any] = {"precision": precision}
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            plugin = {"plugins": [FabricMixed(precision, "cpu", scaler)]}
        fabric = Fabric(accelerator="cpu", devices=1, **plugin)
        fabric.launch()
        found.append(copy.deepcopy(fabric_run(fabric, kind)))
    assert apart(found[1], found[0]) <= 1e-5


# -- two ranks -------------------------------------------------------------------------------------

SCRIPT = """
import gc, os, sys, json, torch, warnings
warnings.simplefilter("ignore")
torch.set_default_dtype(torch.float64)
sys.path.insert(0, os.environ["TESTS"])
from integrations.test_lightning import *
import torch.distributed as dist

rank = int(os.environ["RANK"])
mine = [b for i, b in enumerate(DataLoader(data(22 * 2), BATCH)) if i % 2 == rank]
if rank == 1:
    mine = [(x[:1], y[:1]) for x, y in mine]  # half the rows
for job in sys.argv[1:]:
    module, accum = Module() if job == "exact" else Module(0.3, adam), AccumCallback()
    more = [SaveAt("a.ckpt", 6)] if job == "save" else []
    ddp = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    fit = trainer(accum, *more, precision="64-true", **ddp)
    assert fit.world_size == 2
    torch.manual_seed(rank)
    fit.fit(module, Resumable(mine), ckpt_path="a.ckpt" if job == "resume" else None)
    assert accum.accum.syncs == accum.accum.windows == 6 or job == "resume"
    torch.save([p.detach() for p in module.parameters()], f"{job}-{rank}.pt")
    del module, fit, accum
gc.collect()  # it is a cycle, and keeps the group
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have fitted, and gone on in new processes."""
    folder = tmp_path_factory.mktemp("ranks")
    folder.joinpath("run.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "TESTS": str(Path(__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    for jobs in (["exact", "save"], ["resume"]):
        done = subprocess.run(
            [*launcher, "--standalone", "run.py", *jobs],
            cwd=folder,
            env=environment,
            timeout=240,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


def weights_of(folder: Path, job: str) -> list[Any]:
    """The weights of each rank after a job of the script."""
    return [torch.load(folder / f"{job}-{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_ranks_have_the_mean_over_all_of_their_rows(folder: Path) -> None:
    """Rank 1 has half the rows of rank 0; the last window is a tail of 3."""
    loader = list(DataLoader(data(44), BATCH))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(2):
        for start in range(0, 22, 2 * STEPS):
            window = [
                (x[: 2 - i % 2], y[: 2 - i % 2])
                for i, (x, y) in enumerate(loader[start : start + 2 * STEPS])
            ]
            x, y = (torch.cat(side) for side in zip(*window, strict=True))
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    for weights in weights_of(folder, "exact"):
        for weight, right in zip(weights, model.parameters(), strict=True):
            assert float((weight - right).detach().norm() / right.detach().norm()) <= 1e-12


def test_two_ranks_go_on_inside_of_their_window(folder: Path) -> None:
    """Each with its own gradients and random numbers, from one checkpoint."""
    straight, resumed = weights_of(folder, "save"), weights_of(folder, "resume")
    for one, other in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
