"""What holds still from one update to the next is linked, whatever a run does with its weights."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import difference

from accumplug import Accumulator, Checkpointer
from accumplug.checkpoint.export import export
from accumplug.storage.inspect import describe
from accumplug.storage.layout import faults, list_checkpoints, open_checkpoint, read_part

WIDE, RANK, STEPS = 48, 2, 2


class Adapter(nn.Module):
    """A frozen layer, and a change of low rank to it."""

    def __init__(self, wide: int = WIDE, rank: int = RANK) -> None:
        super().__init__()
        self.base = nn.Linear(wide, wide)
        self.down = nn.Linear(wide, rank, bias=False)
        self.up = nn.Linear(rank, wide, bias=False)
        self.drop = nn.Dropout(0.2)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + self.up(self.drop(self.down(x)))
        return x.tanh()


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """What a user gives to the optimizer."""
    return [p for p in model.parameters() if p.requires_grad]


class Run:
    """Two adapters in a row; `parameters` picks those that the optimizer holds."""

    def __init__(
        self,
        seed: int = 1,
        parameters: Callable[[nn.Module], Any] = adapters,
        optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
        wide: int = WIDE,
        rank: int = RANK,
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(Adapter(wide, rank), nn.BatchNorm1d(wide), Adapter(wide, rank))
        self.optimizer = optimizer(parameters(self.model))
        self.accum = Accumulator(STEPS, optimizer=self.optimizer)
        inputs = [torch.randn(wide, generator=torch.Generator().manual_seed(i)) for i in range(32)]
        self.loader = DataLoader(inputs, 2, shuffle=True)  # type: ignore[arg-type]

    def checkpoints(self, directory: Path, **options: Any) -> Checkpointer:
        return Checkpointer(directory, self.accum, model=self.model, loader=self.loader, **options)

    def train(self, until: int = 24, then: Callable[[Run], None] | None = None) -> Run:
        """Up to that micro-batch of the whole run; `then` is called after each."""
        while self.accum.micro_batches < until:
            for x in self.accum.batches(self.loader):
                with self.accum(self.model):
                    self.accum.backward(self.model(x).square().mean())
                if then is not None:
                    then(self)
                if self.accum.micro_batches >= until:
                    break
        return self

    def state(self) -> dict[str, Any]:
        """What another process has to arrive at."""
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "place": [self.accum.updates, self.accum.micro_batches],
        }


EVERY = {"every": 1, "keep": 99}
pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")


def resumes_as(directory: Path, expected: Any, **options: Any) -> None:
    """A new process goes on from the newest checkpoint to the state that is expected."""
    run = Run(seed=7, **options)
    with run.checkpoints(directory) as checkpoint:
        assert checkpoint.resume() is not None
        run.train()
    assert difference(run.state(), expected) is None


def written(path: Path) -> set[str]:
    """The parts with tensors that a save has written, not linked."""
    files = open_checkpoint(path).manifest.files
    names = {name.partition(".")[0] for name, entry in files.items() if not entry.linked}
    return {name for name in names if f"{name}.safetensors" in files}


def change_file(path: Path) -> None:
    """Turn a bit of its last byte."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def whole(directory: Path) -> None:
    """Every checkpoint in `directory` stands alone."""
    for path in list_checkpoints(directory):
        assert list(faults(open_checkpoint(path))) == []


def test_a_save_after_an_update_writes_at_most_1_1_times_what_trains(tmp_path: Path) -> None:
    """Weights and moments of the adapters; the rest is one file for all checkpoints."""
    run = Run(wide=512, rank=64)
    with run.checkpoints(tmp_path, every_updates=1, keep=99) as checkpoint:
        run.train(8)
        checkpoint.wait()
    size = 3 * sum(p.nbytes for p in adapters(run.model))
    first, *others = list_checkpoints(tmp_path)
    for path in others:
        files = open_checkpoint(path).manifest.files
        assert sum(e.size for e in files.values() if not e.linked) <= 1.1 * size
        assert (path / "frozen.safetensors").samefile(first / "frozen.safetensors")
    assert len(others) == 3
    assert open_checkpoint(first).manifest.files["frozen.safetensors"].size > 1.3 * size


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_each_checkpoint_of_an_adapter_stands_alone(stop: int, tmp_path: Path) -> None:
    """The others may be gone: a new process ends with the bits of the run that never stopped."""
    quiet = Run().train().state()
    run = Run()
    with run.checkpoints(tmp_path, **EVERY):
        run.train(stop)
    whole(tmp_path)
    for path in list_checkpoints(tmp_path)[:-1]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    resumes_as(tmp_path, quiet)


def test_weights_that_no_optimizer_has_are_linked_too(tmp_path: Path) -> None:
    """Whether they require a gradient or not, and whether the optimizer is known by name alone."""

    def base_too(model: nn.Module) -> list[nn.Parameter]:
        mine = adapters(model)
        model.requires_grad_(True)
        return mine

    run = Run(parameters=base_too)
    with run.checkpoints(tmp_path / "one", **EVERY):
        run.train(6)
    assert [written(p) & {"model", "frozen"} for p in list_checkpoints(tmp_path / "one")] == [
        {"model", "frozen"}, {"model"}, set(), {"model"}, set(), {"model"},
    ]  # fmt: skip
    run = Run()
    run.accum = Accumulator(STEPS)
    with run.checkpoints(tmp_path / "two", every=1, keep=99, optimizer=run.optimizer):

        def step(run: Run) -> None:
            if run.accum.pending == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()

        run.train(6, step)
    assert {len(written(p) & {"frozen"}) for p in list_checkpoints(tmp_path / "two")[1:]} == {0}


def freeze(run: Run) -> None:
    """The first adapter, in mid-run; the optimizer goes on holding it."""
    if run.accum.micro_batches == 6:
        run.model[0].requires_grad_(False)


def test_moments_of_weights_that_were_frozen_are_linked(tmp_path: Path) -> None:
    """The optimizer has them, and no step changes them."""
    quiet = Run().train(then=freeze).state()
    run = Run()
    with run.checkpoints(tmp_path, **EVERY):
        run.train(12, freeze)
    found = [written(path) & {"moments", "frozen"} for path in list_checkpoints(tmp_path)]
    assert found == [{"frozen"}, *[set()] * 5, {"moments", "frozen"}, *[set()] * 5]
    whole(tmp_path)
    run = Run(seed=5)
    run.model[0].requires_grad_(False)
    with run.checkpoints(tmp_path, **EVERY) as checkpoint:
        checkpoint.resume()
        run.train()
    assert difference(run.state(), quiet) is None
    assert "moments" not in written(list_checkpoints(tmp_path)[-1])


@pytest.mark.parametrize("moment", [4, 5])
def test_a_weight_that_is_unfrozen_and_frozen_again_is_in_each_checkpoint(
    moment: int, tmp_path: Path
) -> None:
    """At the end of a window and inside of it; every one is resumed."""

    def thaw(run: Run) -> None:
        if run.accum.micro_batches in (moment, moment + 3):
            run.model[0].base.requires_grad_(run.accum.micro_batches == moment)  # type: ignore[union-attr]

    options = {"parameters": lambda model: model.parameters()}
    run, states = Run(**options), {}  # type: ignore[var-annotated]

    def note(run: Run) -> None:
        states[run.accum.micro_batches] = run.state()["model"]
        thaw(run)

    with run.checkpoints(tmp_path, **EVERY):
        run.train(12, note)
    whole(tmp_path)
    for path in list_checkpoints(tmp_path):
        other = Run(seed=7, **options)
        alone = tmp_path / f"{path.name} alone"
        alone.mkdir()
        path.rename(alone / path.name)
        with other.checkpoints(alone) as checkpoint:
            checkpoint.resume()
        assert difference(other.state()["model"], states[other.accum.micro_batches]) is None


def assign(weight: nn.Parameter) -> None:
    """Another tensor takes its place."""
    weight.data = weight.data.clone() * 2


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: weight.detach()[0, 0].add_(1),
    "by .data": lambda weight: weight.data.mul_(1.001),
    "by NumPy": lambda weight: weight.detach().numpy().__imul__(1.001),
    "assigned": assign,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", [4, 5])
def test_a_frozen_weight_that_is_changed_by_hand_is_written_anew(
    change: str, moment: int, tmp_path: Path
) -> None:
    """Between two windows and inside of one; the bits of the last one count."""
    run = Run()

    def write(run: Run) -> None:
        if run.accum.micro_batches == moment:
            checkpoint.wait()  # a save in flight would be given up
            CHANGES[change](run.model[0].base.weight)  # type: ignore[union-attr, arg-type]

    with run.checkpoints(tmp_path / "quiet") as checkpoint:
        quiet = run.train(then=write).state()
    run = Run()
    with run.checkpoints(tmp_path, **EVERY) as checkpoint:
        run.train(8, write)
    found = [i for i, path in enumerate(list_checkpoints(tmp_path), 1) if "frozen" in written(path)]
    assert found == [1, moment + 1]
    resumes_as(tmp_path, quiet)


def test_with_copy_a_write_into_one_frozen_element_is_saved(tmp_path: Path) -> None:
    """No counter and no sample sees it, so such a loop has all written at each update."""
    run = Run()

    def write(run: Run) -> None:
        run.model[0].base.weight.detach().numpy()[1, 1] += 1  # type: ignore[union-attr, operator]

    with run.checkpoints(tmp_path, copy=True, every_updates=1, keep=99):
        run.train(6, write)
    assert all("frozen" in written(path) for path in list_checkpoints(tmp_path))


def test_frozen_weights_are_checked_before_they_are_linked_after_a_resume(tmp_path: Path) -> None:
    """And written from memory if the file is damaged by then."""
    quiet = Run().train().state()
    first = Run()
    with first.checkpoints(tmp_path, every=4):
        first.train(4)
    second = Run(seed=2)
    with second.checkpoints(tmp_path, **EVERY) as checkpoint:
        checkpoint.resume()
        for name in ("model", "frozen"):
            change_file(list_checkpoints(tmp_path)[-1] / f"{name}.safetensors")
        second.train(8)
    assert [written(path) & {"frozen"} for path in list_checkpoints(tmp_path)[1:]] == [
        {"frozen"}, *[set()] * 3,
    ]  # fmt: skip
    others = list_checkpoints(tmp_path)[1:]
    assert [list(faults(open_checkpoint(path))) for path in others] == [[]] * 4
    resumes_as(tmp_path, quiet)


def test_a_whole_frozen_file_is_linked_after_a_resume(tmp_path: Path) -> None:
    """Across updates too, where the trained weights have to be written."""
    first = Run()
    with first.checkpoints(tmp_path, every=4):
        first.train(4)
    second = Run(seed=2)
    with second.checkpoints(tmp_path, every_updates=1, keep=99) as checkpoint:
        checkpoint.resume()
        second.train(10)
    files = [path / "frozen.safetensors" for path in list_checkpoints(tmp_path)]
    assert len(files) == 4
    assert all(file.samefile(files[0]) for file in files)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_run_that_freezes_other_weights_than_the_one_before_loses_none(
    frozen: bool, tmp_path: Path
) -> None:
    """The older checkpoint is divided in another way, so nothing of it is linked."""

    def build(seed: int, frozen: bool) -> Run:
        run = Run(seed, parameters=lambda model: model.parameters())
        for base in (run.model[0].base, run.model[2].base):
            base.requires_grad_(not frozen)  # type: ignore[union-attr, operator]
        return run

    run = build(1, frozen)
    with run.checkpoints(tmp_path, every=3):
        run.train(3)
    second = build(2, not frozen)
    with second.checkpoints(tmp_path, keep=1) as checkpoint:
        checkpoint.resume()
        checkpoint.save()
    third = build(3, not frozen)
    with third.checkpoints(tmp_path) as checkpoint:
        checkpoint.resume()
    assert difference(third.state(), run.state()) is None


def test_without_hard_links_each_checkpoint_has_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is called a link."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    quiet, run = Run().train().state(), Run()
    with pytest.warns(UserWarning, match="no hard links"), run.checkpoints(tmp_path, **EVERY):
        run.train(5)
    whole(tmp_path)
    for path in list_checkpoints(tmp_path):
        assert {file.stat().st_nlink for file in path.iterdir()} == {1}
        assert not any(entry.linked for entry in open_checkpoint(path).manifest.files.values())
    resumes_as(tmp_path, quiet)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(int(sys.argv[3]))  # or other bits
sys.path.insert(0, {tests!r})
from test_frozen import Run
link, left = os.link, [int(sys.argv[2])]
def dies(*args, **kwargs):
    link(*args, **kwargs)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
os.link = dies
run = Run()
with run.checkpoints(Path(sys.argv[1]), every=1, keep=99):
    run.train(8)
"""


@pytest.mark.parametrize("links", [2, 3, 6])  # the first one asks whether there are links
def test_a_kill_between_two_links_leaves_the_checkpoint_before(links: int, tmp_path: Path) -> None:
    """Whole, and a new process goes on from it."""
    code = KILLED.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), f"{links}"]
    command.append(f"{torch.get_num_threads()}")
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    whole(tmp_path)
    assert len(list_checkpoints(tmp_path)) < 8
    resumes_as(tmp_path, Run().train().state())


def test_lbfgs_and_several_optimizers_are_resumed_as_before(tmp_path: Path) -> None:
    """LBFGS keeps all it has under its first parameter, which may be frozen meanwhile."""

    def build(seed: int) -> Run:
        run = Run(seed)
        run.optimizer = torch.optim.LBFGS(adapters(run.model), max_iter=2)
        run.accum = Accumulator(STEPS)
        return run

    def step(run: Run) -> None:
        if run.accum.pending == 0:
            run.model[0].down.requires_grad_(False)  # type: ignore[union-attr]
            run.optimizer.step(lambda: 1.0)  # type: ignore[arg-type]
            run.optimizer.zero_grad()

    quiet = build(1).train(then=step).state()
    run = build(1)
    with run.checkpoints(tmp_path, optimizer=run.optimizer, every=1):
        run.train(9, step)
    other = build(2)
    other.model[0].down.requires_grad_(False)  # type: ignore[union-attr]
    with other.checkpoints(tmp_path, optimizer=other.optimizer) as checkpoint:
        checkpoint.resume()
        other.train(then=step)
    assert difference(other.state(), quiet) is None


SKIP = {"frozen": "skip"}


def with_base(seed: int, base: int = 1, **options: Any) -> Run:
    """A run of that seed on the frozen weights of another one."""
    run = Run(seed, **options)
    weights = Run(base).model.state_dict()
    frozen = {name: value for name, value in weights.items() if "base" in name}
    run.model.load_state_dict(frozen, strict=False)
    return run


def test_left_out_weights_are_in_no_file_and_the_resume_is_exact(tmp_path: Path) -> None:
    """Inside of a window too; the buffers and the trained weights are there."""
    quiet, run = Run().train().state(), Run()
    with run.checkpoints(tmp_path, **EVERY, **SKIP):
        run.train(5)
    newest = list_checkpoints(tmp_path)[-1]
    files = open_checkpoint(newest).manifest.files
    assert "frozen.safetensors" not in files
    assert not any("base" in name for name in read_part(open_checkpoint(newest), "model"))
    assert files["base.json"].linked
    assert "frozen       left out" in describe(newest)
    second = with_base(2)
    with second.checkpoints(tmp_path, **EVERY, **SKIP) as checkpoint:
        checkpoint.resume()
        second.train(9)
    assert open_checkpoint(list_checkpoints(tmp_path)[-1]).manifest.files["base.json"].linked
    whole(tmp_path)
    third = with_base(3)
    with third.checkpoints(tmp_path, **SKIP) as checkpoint:
        checkpoint.resume()
        third.train()
    assert difference(third.state(), quiet) is None


@pytest.mark.parametrize("frozen", ["link", "skip"])
def test_a_resume_on_other_frozen_weights_is_refused_by_name(frozen: str, tmp_path: Path) -> None:
    """Before anything is loaded."""
    run = Run()
    with run.checkpoints(tmp_path, every=3, **SKIP):
        run.train(3)
    other = Run(seed=2)
    before = other.state()
    message = r"0\.base\.weight is .* here and .* the checkpoint"
    with (
        other.checkpoints(tmp_path, frozen=frozen) as checkpoint,
        pytest.raises(ValueError, match=message),
    ):
        checkpoint.resume()
    assert difference(other.state(), before) is None


def test_a_frozen_weight_that_has_changed_is_not_left_out(tmp_path: Path) -> None:
    """By hand, or as it was trained for a while: the model that is built again has it no more."""

    def write(run: Run) -> None:
        count = run.accum.micro_batches
        first, last = run.model[0].base, run.model[2].base  # type: ignore[union-attr]
        if count == 2:
            first.weight.detach()[0, 0].add_(1)  # type: ignore[union-attr, operator]
        if count in (2, 4):
            last.requires_grad_(count == 2)  # type: ignore[union-attr, operator]

    held = {"parameters": lambda model: model.parameters()}
    quiet, run = Run(**held).train(then=write).state(), Run(**held)
    with run.checkpoints(tmp_path, every=5, **SKIP):
        run.train(5, write)
    (path,) = list_checkpoints(tmp_path)
    assert read_part(open_checkpoint(path), "frozen").keys() == {
        "0.base.weight", "2.base.weight", "2.base.bias",
    }  # fmt: skip
    second = with_base(2, **held)
    with second.checkpoints(tmp_path, every=3, keep=1, **SKIP) as checkpoint:
        checkpoint.resume()
        second.train(8, write)
    third = with_base(3, **held)
    with third.checkpoints(tmp_path, **SKIP) as checkpoint:
        checkpoint.resume()
        third.train(then=write)
    assert difference(third.state(), quiet) is None


def test_left_out_weights_can_be_taken_in_again_and_then_exported(tmp_path: Path) -> None:
    """An export refuses a checkpoint without them and says what to do."""
    run = Run()
    with run.checkpoints(tmp_path, every=3, **SKIP):
        run.train(3)
    with pytest.raises(ValueError, match=r'frozen="skip": 4 weights \(0\.base\.weight, 0\.base\.b'):
        export(tmp_path, tmp_path / "out")
    second = with_base(2)
    with second.checkpoints(tmp_path) as checkpoint:
        checkpoint.resume()
        checkpoint.save()
    (file,) = export(tmp_path, tmp_path / "out")
    found = load_file(file)
    assert found.keys() == run.model.state_dict().keys()
    assert all(torch.equal(found[name], run.model.state_dict()[name]) for name in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"frozen": "drop"}, 'frozen is "link" or "skip"'), (SKIP | {"copy": True}, 'give frozen="l')],
)
def test_options_for_frozen_weights_that_can_not_be_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Before the directory is touched."""
    with pytest.raises(ValueError, match=message):
        Run().checkpoints(tmp_path / "none", **options)
    assert not (tmp_path / "none").exists()
