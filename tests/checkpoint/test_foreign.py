"""A run starts from what plain torch or Accelerate has saved, and goes on as that would have."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from training import difference

from accumplug import Accumulator, Checkpointer

STEPS = 2


def data() -> list[Tensor]:
    """Micro-batches of three, eight of them."""
    return list(torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(3)))


class Tied(nn.Module):
    """Two names for one weight, of which safetensors writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)).tanh())
        return result


class Plain:
    """The textbook loop, with everything that a run can have."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Tied()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def train(self) -> None:
        for i, x in enumerate(data(), 1):
            loss = self.model(x).square().mean() / STEPS
            self.scaler.scale(loss).backward()
            if i % STEPS == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.scheduler.step()

    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler")
        return copy.deepcopy({name: getattr(self, name).state_dict() for name in names})

    def accumulator(self) -> Accumulator:
        return Accumulator(
            STEPS, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler
        )


def go_on(run: Plain, directory: Path, source: Path, **options: Any) -> Any:
    """Start `run` from `source` and train it with accum; the position."""
    accum = run.accumulator()
    with Checkpointer(directory, accum, model=run.model, every=3, **options) as checkpoint:
        position = checkpoint.resume(start_from=source)
        for x in accum.batches(data()):
            with accum(run.model):
                accum.backward(run.model(x).square().mean())
    return position


pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")
NAMES = [
    ("model", "optimizer", "scheduler", "scaler"),
    ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "scaler_state_dict"),
    ("state_dict", "optimizer", "lr_scheduler", "grad_scaler"),
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_run_goes_on_from_a_dict_of_torch_as_plain_torch_does(
    names: tuple[str, ...], prefix: str, tmp_path: Path
) -> None:
    """Bit for bit, under the usual keys and with the names that wrappers give."""
    plain = Plain()
    plain.train()
    saved = dict(zip(names, plain.state().values(), strict=True))
    saved[names[0]] = {f"{prefix}{k}": v for k, v in saved[names[0]].items()}
    torch.save(saved | {"epoch": 3}, tmp_path / "old.pt")
    plain.train()
    run = Plain(seed=1)
    position = go_on(run, tmp_path / "new", tmp_path / "old.pt")
    assert position.path == tmp_path / "old.pt"
    assert (position.update, position.pending) == (0, 0)
    assert difference(run.state(), plain.state()) is None


@pytest.mark.parametrize("safe", [True, False])
def test_a_run_goes_on_from_a_directory_of_save_state(safe: bool, tmp_path: Path) -> None:
    """As the loop that saved it, in an accum that knows no Accelerator."""
    plain = Plain()
    del plain.scaler
    plain.scaler = torch.amp.GradScaler("cpu", enabled=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    prepared = accelerator.prepare(plain.model, plain.optimizer, plain.scheduler)
    plain.train()
    accelerator.save_state(str(tmp_path / "old"), safe_serialization=safe)
    del prepared
    plain.train()
    run = Plain(seed=1)
    accum = Accumulator(STEPS, optimizer=run.optimizer, scheduler=run.scheduler)
    with Checkpointer(tmp_path / "new", accum, model=run.model) as checkpoint:
        assert checkpoint.resume(start_from=tmp_path / "old") is not None
        for x in accum.batches(data()):
            with accum(run.model):
                accum.backward(run.model(x).square().mean())
    for name in ("model", "optimizer", "scheduler"):
        assert difference(run.state()[name], plain.state()[name]) is None


def test_its_own_checkpoint_comes_first(tmp_path: Path) -> None:
    """The same command starts a run and resumes it: then what it started from may be gone."""
    plain = Plain()
    torch.save(plain.state(), tmp_path / "old.pt")
    go_on(Plain(seed=1), tmp_path / "new", tmp_path / "old.pt")
    position = go_on(Plain(seed=2), tmp_path / "new", tmp_path / "gone.pt")
    assert position.path.parent == tmp_path / "new"
    with pytest.raises(FileNotFoundError):
        go_on(Plain(seed=2), tmp_path / "other", tmp_path / "gone.pt")


def test_an_optimizer_and_an_average_given_by_name_are_found_under_it(tmp_path: Path) -> None:
    """Where the loop steps by itself."""
    plain, run = Plain(), Plain(seed=1)
    plain.train()
    saved, average = plain.state(), torch.optim.swa_utils.AveragedModel(plain.model)
    torch.save(saved | {"ema": average.state_dict()}, tmp_path / "old.pt")
    ema = torch.optim.swa_utils.AveragedModel(run.model)
    named = {"optimizer": run.optimizer, "scheduler": run.scheduler, "scaler": run.scaler}
    accum = Accumulator(STEPS)
    with Checkpointer(tmp_path, accum, model=run.model, ema=ema, **named) as checkpoint:
        checkpoint.resume(start_from=tmp_path / "old.pt")
    assert difference(run.state(), saved) is None
    assert difference(ema.state_dict(), average.state_dict()) is None


def test_what_is_not_there_begins_anew_with_a_warning(tmp_path: Path) -> None:
    """The schedule and the scaler; weights and optimizer have to be there."""
    plain = Plain()
    state = plain.state()
    torch.save({"model": state["model"], "optimizer": state["optimizer"]}, tmp_path / "old.pt")
    run = Plain(seed=1)
    with (
        pytest.warns(UserWarning, match="has no scheduler, which begins anew"),
        pytest.warns(UserWarning, match="has no scaler, which begins anew"),
        Checkpointer(tmp_path, run.accumulator(), model=run.model) as checkpoint,
    ):
        checkpoint.resume(start_from=tmp_path / "old.pt")
    assert difference(run.state()["model"], state["model"]) is None


def files(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """By what is wrong with each: what stands in a file, or None for a directory."""
    half = {name: value.half() for name, value in state["model"].items()}
    return {
        "no model": ({"net": 1, "optimizer": state["optimizer"]}, r"'net', 'optim.*'model_state_d"),
        "no optimizer": (
            {"model": state["model"]},
            r"no state of the optimizer: it has 'model'",
        ),
        "weights alone": (state["model"], r"no state of the model: it has 'first.weight'"),
        "no state_dict": (state | {"optimizer": {"lr": 1}}, r"optimizer is \{'lr': 1\}"),
        "two models": (
            state | {"model": [state["model"]] * 2},
            r"2 states of model, this run",
        ),
        "another dtype": (
            state | {"model": half},
            r"first.weight is torch.float32 here",
        ),
        "a tensor": (torch.ones(2), r"has a Tensor; start_from= takes a dict"),
        "an object": (state | {"args": Path("x")}, r"more than tensors and plain values"),
        "no directory of save_state": (None, r"it has notes.txt, and no model.safetensors"),
    }


@pytest.mark.parametrize("kind", files(Path(), Plain().state()))
def test_what_can_not_be_started_from_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """The keys that were seen, and those that were looked for."""
    run = Plain()
    content, message = files(tmp_path, run.state())[kind]
    source = tmp_path / "old"
    if content is None:
        source.mkdir()
        (source / "notes.txt").write_text("")
    else:
        torch.save(content, source)
    with (
        Checkpointer(tmp_path / "new", run.accumulator(), model=run.model) as checkpoint,
        pytest.raises(ValueError, match=message),
    ):
        checkpoint.resume(start_from=source)


def test_a_directory_of_save_state_with_an_open_window_is_refused(tmp_path: Path) -> None:
    """Accelerate's load_state continues it."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accum = Accumulator(STEPS, accelerator=accelerator)
    with accum(model):
        accelerator.backward(model(torch.ones(1, 6)).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.save_state(str(tmp_path / "old"))
    run = Plain()
    with (
        Checkpointer(tmp_path / "new", run.accumulator(), model=run.model) as checkpoint,
        pytest.raises(ValueError, match=r"inside of a window .* accelerator\.load_state"),
    ):
        checkpoint.resume(start_from=tmp_path / "old")
