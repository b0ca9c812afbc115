"""README.md keeps its word: its commands are there, its code runs, its tree is the tree."""

from __future__ import annotations

import copy
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from documents import ROOT, Document
from textbook import big_batch, data, mean_loss, network, same
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from accumplug import Accumulator, Checkpointer
from accumplug.cli.parser import main

README = Document("README.md")
TESTED = {
    ("The loop, before and after", 0),
    ("The loop, before and after", 1),
    ("Weights", 0),
    ("Weights", 1),
    ("What it tells", 0),
    ("What it tells", 1),
    ("Checkpoints inside a window", 0),
    ("Is a larger batch worth it?", 0),
    ("The command line", 0),
    ("FSDP2", 0),  # in test_loops.py, on two ranks
}
"""What the tests below run; what is under "Beside others" is in test_loops.py."""


def given(batches):
    """What the loops take as known: a model, its data, an optimizer that hides nothing."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {
        "torch": torch,
        "F": F,
        "nn": nn,
        "Accumulator": Accumulator,
        "model": model,
        "loader": batches,
        "optimizer": optimizer,
        "scheduler": StepLR(optimizer, 1, gamma=0.9),
        "loss_fn": F.mse_loss,
    }


class Tokens(Dataset):
    """Rows of token ids whose targets are partly ignored, other numbers in each row."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randint(5, (rows, 6), generator=generator)
        self.targets = torch.randint(5, (rows, 6), generator=generator)
        for row in range(rows):
            self.targets[row, : row % 6] = -100

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, row):
        return self.inputs[row], self.targets[row]


def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def test_every_block_of_code_is_run_by_a_test():
    """Outside of the section that test_loops.py runs, there is no block without a test."""
    assert README.python(before="## Beside others") == TESTED


def test_before_and_after_have_the_same_bits_in_full_windows():
    """The loop that is shown as the old one and the new one end with equal weights."""
    before, after = given(data([4] * 48)), given(data([4] * 48))
    README.run("The loop, before and after", 0, **before)
    README.run("The loop, before and after", 1, **after)
    assert same(before["model"], after["model"])
    assert before["scheduler"].last_epoch == after["scheduler"].last_epoch == 3


def test_after_closes_the_tail_that_before_leaves_over():
    """20 micro-batches in windows of 16: the new loop makes a second update, of a mean over 4."""
    batches = data([4] * 20)
    before, after = given(batches), given(batches)
    README.run("The loop, before and after", 0, **before)
    accum = README.run("The loop, before and after", 1, **after)["accum"]
    assert (before["scheduler"].last_epoch, accum.updates, accum.last.micro_batches) == (1, 2, 4)


def test_token_weights_give_the_mean_over_all_tokens_of_the_window():
    """The window of the shown loop has the gradient of one batch of all rows."""
    model, rows = token_model(), Tokens(12)
    accum = Accumulator(steps=4)
    README.run("Weights", 0, F=F, accum=accum, model=model, loader=DataLoader(rows, 3))
    targets = rows.targets.flatten()
    loss = F.cross_entropy(model(rows.inputs).flatten(0, 1), targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-15)
    assert accum.last.weight == int((targets != -100).sum())


def test_a_second_term_is_a_mean_over_micro_batches():
    """Tokens weigh the first term, and each micro-batch counts alike in the second."""
    model, rows = token_model(), Tokens(12)
    loader = DataLoader(rows, 3)
    README.run("Weights", 1, F=F, accum=Accumulator(steps=4), model=model, loader=loader)
    first = F.cross_entropy(model(rows.inputs).flatten(0, 1), rows.targets.flatten())
    second = sum(0.01 * model(inputs).square().mean() for inputs, _ in loader) / 4
    expected = torch.autograd.grad(first + second, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-15)


def test_what_it_tells_is_printed_once_for_a_window(capsys):
    """Two windows: two lines with the loss that plain torch gives, and two moves of the average."""
    names = given(data([4] * 8))
    start = copy.deepcopy(names["model"])
    average = AveragedModel(names["model"])
    accum = Accumulator(steps=4, optimizer=names["optimizer"])
    README.run("What it tells", 0, accum=accum, average=average, **names)
    lines = capsys.readouterr().out.splitlines()
    first = sum(mean_loss(start, batch).item() for batch in names["loader"][:4]) / 4
    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert float(lines[0].split()[1]) == pytest.approx(first, rel=1e-12)
    assert int(average.n_averaged) == 2


def test_a_loop_may_take_its_own_steps():
    """It has the weights of plain torch on one large batch for each window, the tail included."""
    batches = data([4] * 20)
    names, reference = given(batches), network()
    accum = README.run("What it tells", 1, **names)["accum"]
    optimizer = SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for window in (batches[:16], batches[16:]):
        for parameter, grad in zip(
            reference.parameters(), big_batch(reference, window), strict=True
        ):
            parameter.grad = grad
        optimizer.step()
    pairs = zip(names["model"].parameters(), reference.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in pairs)
    assert accum.updates == 2


def test_a_run_that_is_stopped_and_started_again_ends_as_one_that_never_was(tmp_path, monkeypatch):
    """The shown loop, told to stop in mid-window and run again, has the bits of a whole run."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole, _ = checkpointed()
    monkeypatch.chdir(tmp_path / "stopped")
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        stopped, found = checkpointed(stop_after=53)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found["checkpoint"].interrupted
    assert found["accum"].pending == 53 - 40
    assert not same(stopped, whole)
    again, found = checkpointed()
    assert found["position"].pending == 53 - 40
    assert same(again, whole)


def checkpointed(stop_after=None):
    """Run the shown loop over two passes of 40; a signal arrives in one of the micro-batches."""
    torch.manual_seed(5)
    names = given(DataLoader([(x[0], y[0]) for x, y in data([1] * 40)], 1, shuffle=True))
    names["model"].append(nn.Dropout(0.2))
    calls = iter(range(1, 1000))

    def loss_fn(output, target):
        if next(calls) == stop_after:
            signal.raise_signal(signal.SIGTERM)
        return F.mse_loss(output, target)

    names = names | {"loss_fn": loss_fn, "epochs": 2}
    return names["model"], README.run("Checkpoints inside a window", **names)


def test_the_noise_scale_says_a_sentence(capsys):
    """The shown loop prints what the estimate means for this effective batch."""
    names = given(data([2] * 64))
    README.run(
        "Is a larger batch worth it?",
        accum=Accumulator(steps=4, optimizer=names["optimizer"]),
        **names,
    )
    assert capsys.readouterr().out.startswith("Gradient noise scale: ")


def commands():
    """The lines of the README's block of commands."""
    return README.find("The command line", language="bash").text.splitlines()


@pytest.mark.parametrize("line", commands())
def test_the_commands_run(line, tmp_path, monkeypatch, capsys):
    """Each command of the README says something and exits with 0, with what it names in place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    target = README.find("The command line").text
    (tmp_path / "train.py").write_text(f"import torch\nfrom torch import nn\n\n\n{target}\n")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    log = '{"update": 1, "loss": 2.0, "lr": 0.1}\n{"update": 2, "loss": 1.0, "lr": 0.1}\n'
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text(log)
    if line.startswith("accumplug inspect"):
        save(tmp_path / "runs" / "a")
    program, *arguments = shlex.split(line)
    assert program == "accumplug"
    monkeypatch.delitem(sys.modules, "train", raising=False)
    try:
        assert main(arguments) == 0
    finally:
        sys.modules.pop("train", None)
    assert capsys.readouterr().out


def save(directory):
    """A checkpoint in mid-window, as the README's loop leaves them."""
    names = given(data([4] * 8))
    accum = Accumulator(steps=16, optimizer=names["optimizer"])
    with Checkpointer(directory, accum, model=names["model"], every=5):
        for x, y in accum.batches(names["loader"]):
            with accum(names["model"]):
                accum.backward(F.mse_loss(names["model"](x), y))


@pytest.mark.parametrize("name", ["run", "test"])
def test_ci_finds_the_two_commands(name):
    """The line that .ci/run takes out of README.md is one command that installs, then runs."""
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^readme_command\(\) .*$", script, re.MULTILINE)[0]
    found = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{function}\nreadme_command {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout
    extra, command = {
        "run": ("recipes", "accelerate launch recipes/train.py"),
        "test": ("test", "python -m pytest -q -n 2"),
    }[name]
    assert found == f'pip install -q -e ".[{extra}]" -c constraints.txt && {command}\n'


def test_the_tree_shows_each_room_and_nothing_that_is_not_there():
    """Each path of the annotated tree exists, and each folder of the package is in it."""
    folder, shown = "", set()
    for line in README.find("Files", language="").text.splitlines():
        if not line.startswith(" "):
            folder = line.split()[0] if "/ " in line else ""
            shown.add(line.split()[0])
        shown |= {folder + name for name in re.findall(r"(?<= )[a-z_]+(?:\.py|/(?= ))", line)}
    gone = [path for path in shown if not (ROOT / path).exists()]
    assert not gone
    modules = {
        f"{f}/{p.name}" for f in ("accumplug", "recipes") for p in (ROOT / f).glob("[!_]*.py")
    }
    there = modules | {f"accumplug/{p.parent.name}/" for p in ROOT.glob("accumplug/*/__init__.py")}
    untold = there - shown
    assert not untold


def test_links_within_the_document_arrive():
    """Each link to a heading has that heading, in the form that renderers give it."""
    titles = [re.sub(r"^#+ ", "", line) for line in README.lines if line.startswith("#")]
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(#([^)]*)\)", "\n".join(README.lines))
    assert links
    assert set(links) <= anchors
