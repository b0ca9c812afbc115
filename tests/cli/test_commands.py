"""What the command line promises: answers on stdout, one-line errors on stderr, exit codes."""

import argparse
import json
import subprocess
import sys

import pytest

from accumplug.cli.parser import main, make_parser

PARTS = """
import warnings
import torch
from torch import nn
import torch.nn.functional as F


def make(*middle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))
    return model, (torch.randn(12, 6), torch.randint(0, 3, (12,)))


def good():
    return *make(), nn.CrossEntropyLoss()


def batchnorm():
    return *make(nn.BatchNorm1d(8)), nn.CrossEntropyLoss()


def dropout():
    return *make(nn.Dropout(0.5), nn.Dropout(0.5)), nn.CrossEntropyLoss()


def summed():
    return *make(), nn.CrossEntropyLoss(reduction="sum")


def tokens():
    model, (x, y) = make()
    y[:5] = -100
    return model, (x, y), nn.CrossEntropyLoss(), lambda batch: int((batch[1] != -100).sum())


def terms():
    return *make(), {"main": nn.CrossEntropyLoss(), "size": lambda m, b: m(b[0]).square().mean()}


def warns():
    warnings.warn("mind the\\ngap")
    return *make(), nn.CrossEntropyLoss()


def wants(size):
    return make()


def uncounted():
    return *make(), nn.CrossEntropyLoss(), 4


def chatty():
    raise ValueError("long " * 1000)


def broken():
    def loss(model, batch):
        raise KeyError("labels")
    return *make(), loss


def five():
    def loss(model, batch):
        if len(batch[0]) > 5:
            raise torch.OutOfMemoryError("pretended")
        return F.cross_entropy(model(batch[0]), batch[1])
    return *make(), loss


def empty():
    model, (x, y) = make()
    return model, (x[:0], y[:0]), nn.CrossEntropyLoss()


def pair():
    return make()


def no_model():
    return "model", "batch", "loss"


number = 3
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A file of the user's, in the working directory."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: me')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_parts", None)
    return tmp_path


def run(capsys, *arguments):
    """Give the exit code, stdout and stderr of a command."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_plan_gives_the_steps(capsys):
    """256 items in micro-batches of 8 on 2 ranks."""
    code, out, err = run(capsys, "plan", "256", "8", "--world-size", "2")
    assert (code, err) == (0, "")
    assert out == "steps 16: 8 items x 16 micro-batches x 2 ranks = 256 items\n"


def test_plan_with_fit_finds_the_largest_micro_batch_that_runs(parts, capsys):
    """A model that holds 5 items: of the divisors of 16 it is 4, and the steps follow."""
    code, out, err = run(capsys, "plan", "16", "--fit", "my_parts:five", "--device", "cpu")
    assert (code, err) == (0, "")
    assert out == "steps 4: 4 items x 4 micro-batches x 1 rank = 16 items\n"
    code, out, _ = run(
        capsys, "plan", "16", "--fit", "my_parts:five", "--device", "cpu", "--world-size", "8"
    )
    assert out == "steps 1: 2 items x 1 micro-batch x 8 ranks = 16 items\n"


def test_check_sends_several_ranks_away(capsys, monkeypatch):
    """It compares in a single process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = run(capsys, "check")
    assert (code, out) == (2, "")
    assert err == "accumplug check: error: the check is for a single process; run it without " + (
        "torchrun\n"
    )


def test_plan_knows_the_ranks_of_a_launcher(capsys, monkeypatch):
    """As `--world-size` says that it does; the first rank prints."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run(capsys, "plan", "256", "8")[1].startswith("steps 8: ")
    assert run(capsys, "plan", "256", "8", "--world-size", "1")[1].startswith("steps 32: ")
    monkeypatch.setenv("RANK", "1")
    assert run(capsys, "plan", "256", "8") == (0, "", "")


def test_plan_scales_a_learning_rate_both_ways_and_names_its_sources(capsys):
    """4 times the batch: 4 times linear, twice by the square root."""
    code, out, _ = run(capsys, "plan", "128", "8", "--lr", "1e-3", "--tuned-batch", "32")
    assert code == 0
    linear, root = (line.split() for line in out.splitlines() if line.startswith("  "))
    assert linear[:2] == ["linear", "0.004"]
    assert root[:3] == ["square", "root", "0.002"]
    for source in ("Goyal et al. 2017", "Krizhevsky 2014", "Malladi et al. 2022", "Marek et al."):
        assert source in " ".join(out.split())
    assert "0.999 -> 0.996" in out


def test_check_answers_on_the_built_in_example(capsys):
    """The first thing that a sceptic runs."""
    code, out, err = run(capsys, "check")
    assert (code, err) == (0, "")
    assert out.startswith("checked example: Sequential of ")
    assert "PASS: " in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["my_parts:good"], 0, "PASS: "),
        (["my_parts.py:good", "--splits", "3,9", "--splits", "6,6"], 0, "3 + 9"),
        (["my_parts:good", "--float64", "--bound", "1e-14"], 0, "float64 rounds to"),
        (["my_parts:batchnorm"], 1, "why: BatchNorm (1)"),
        (["my_parts:dropout"], 1, "why: dropout without a fixed seed in 1, 2"),
        (["my_parts:dropout", "--eval"], 0, "PASS: "),
        (["my_parts:summed"], 1, 'reduction="sum"'),
        (["my_parts:summed", "--sum"], 0, "PASS: "),
        (["my_parts:tokens"], 0, "PASS: "),
        (["my_parts:terms"], 0, "PASS: "),
    ],
)
def test_check_answers_on_ones_own_model(parts, capsys, arguments, code, said):
    """Exit 0 if it passed, 1 if it failed, the reason on stdout."""
    found, out, err = run(capsys, "check", *arguments)
    assert (found, err) == (code, "")
    assert said in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "100", "8"], "nearest effective batches: 96"),
        (["plan", "64"], "give either a micro-batch or --fit"),
        (["plan", "64", "8", "--fit", "my_parts:five"], "give either a micro-batch or --fit"),
        (
            ["plan", "64", "8", "--world-size", "0"],
            "world_size must be at least 1 and at most 1e+12, got 0",
        ),
        (["plan", "0", "8"], "effective_batch must be at least 1 and at most 1e+12, got 0"),
        (
            ["plan", "0", "--fit", "my_parts:five"],
            "effective_batch must be at least 1 and at most 1e+12, got 0",
        ),
        (["plan", "8", "--fit", "my_parts:five", "--world-size", "0"], "world_size must be at l"),
        (["plan", "8", "8", "--lr", "nan"], "lr must be a number above 0, got nan"),
        (["check", "my_parts:empty"], "at least 2 items to split, got 0"),
        (["sweep", "my_parts:empty"], "0 items holds no micro-batch of 8 items"),
        (["plan", "8", "--fit", "my_parts:empty"], "the batch has no items"),
        (["check", "my_parts:good", "--bound", "nan"], "bound must be a number of at least 0"),
        (["sweep", "my_parts:good", "--num-steps", "0"], "steps must be at least 1"),
        (["report", "."], "Is a directory"),
        (["plan", "many", "8"], "invalid int value: 'many'"),
        (["plan", "64", "8", "--lr", "-1"], "lr must be a number above 0, got -1.0"),
        (
            ["plan", "64", "8", "--lr", "1", "--tuned-batch", "-8"],
            "tuned_batch must be at least 1 and at most 1e+12, got -8",
        ),
        (["check", "my_parts"], "'my_parts' is not of the form module:function"),
        (["check", "nowhere.at.all:parts"], "there is no module nowhere.at.all"),
        (["check", "nowhere.py:parts"], "there is no file nowhere.py"),
        (["check", "my_parts:nothing"], "my_parts has no function 'nothing'"),
        (["check", "my_parts:number"], "my_parts has no function 'number'"),
        (["check", "my_parts:pair"], "must return (model, batch, loss), got 2 values"),
        (["check", "my_parts:no_model"], "must return a torch model first, got a str"),
        (["check", "my_parts:broken"], "KeyError: 'labels' ("),
        (["check", "my_parts:wants"], "my_parts:wants must take no arguments"),
        (["check", "my_parts:uncounted"], "counts the items of a batch, got 4"),
        (["check", "my_parts:chatty"], "ValueError: long long "),
        (["check", "script.py:main"], "script.py ends the process when it is imported"),
        (["check", "my_parts:good", "--bound", "-1"], "bound must be a number of at least 0"),
        (["check", "my_parts:good", "--splits", "13,-1"], "needs at least 1 item"),
        (["plan", "64", "8", "--tuned-batch", "8"], "--tuned-batch goes with --lr"),
        (["plan", "64", "8", "--device", "cpu"], "--device goes with --fit"),
        (["check", "my_parts:good", "--splits", "5,5"], "do not add up to the batch's 12 items"),
        (["check", "my_parts:good", "--splits", "a"], "'a' is not a list of integers"),
        (["sweep", "my_parts:good", "--micro-batch", "13"], "12 items holds no micro-batch of 13"),
        (["sweep", "my_parts:good", "--micro-batch", "0"], "12 items holds no micro-batch of 0"),
        (["sweep", "my_parts:good", "--steps", "0,1"], "steps must be at least 1"),
        (["report", "nothing.jsonl"], "No such file or directory: 'nothing.jsonl'"),
        (["inspect", "nothing"], "accumplug inspect: error: nothing: no checkpoint here"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "required: command"),
    ],
)
def test_wrong_input_is_one_line_on_stderr_and_exit_2(parts, capsys, arguments, message):
    """The line names the command and what was seen; nothing is left behind."""
    before = {path.name for path in parts.iterdir()}
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert {path.name for path in parts.iterdir()} <= before | {"__pycache__"}


def test_an_error_in_ones_own_code_names_the_line_and_can_be_seen_in_full(parts, capsys):
    """File and line in the one line; --traceback raises it."""
    _, _, err = run(capsys, "check", "my_parts:broken")
    line = PARTS.splitlines().index('        raise KeyError("labels")') + 1
    assert f"my_parts.py:{line}; --traceback" in err
    with pytest.raises(KeyError, match="labels"):
        main(["check", "my_parts:broken", "--traceback"])


@pytest.mark.parametrize("name", ["types.py", "json.py", "my-run.v2.py"])
def test_a_file_is_that_file_whatever_its_name(parts, capsys, name):
    """Named as a module that is loaded already, or as none can be; a file beside it is found."""
    known = sys.modules.get(name.removesuffix(".py"))
    (parts / "place").mkdir()
    (parts / "place" / "beside_it.py").write_text("from my_parts import good\n")  # in the cwd
    (parts / "place" / name).write_text("from beside_it import good as mine\n")
    for _ in range(2):
        code, out, err = run(capsys, "check", f"place/{name}:mine")
        assert (code, err) == (0, "")
        assert out.startswith(f"checked place/{name}:mine: Sequential of 83 parameters\nPASS")
    assert sys.modules.get(name.removesuffix(".py")) is known
    sys.modules.pop("beside_it")


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line_too(parts, capsys):
    """No line of code behind them; what warns is not at fault."""
    code, out, err = run(capsys, "check", "my_parts:warns")
    assert (code, err) == (0, "accumplug check: warning: mind the gap\n")
    assert "PASS" in out


def test_an_interrupt_ends_it_in_one_line(capsys, monkeypatch):
    """Ctrl-C: the shell's exit code for it, no traceback."""

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("accumplug.cli.parser.commands.run_plan", interrupt)
    assert run(capsys, "plan", "8", "8") == (130, "", "accumplug plan: interrupted\n")


def test_sweep_writes_the_curve_and_its_picture_and_says_where(parts, capsys):
    """Table, sentence, the two paths."""
    arguments = ["--micro-batch", "2", "--steps", "1,2", "--num-steps", "4", "--output-dir", "out"]
    code, out, err = run(capsys, "sweep", "my_parts:good", *arguments)
    assert (code, err) == (0, "")
    curve = json.loads((parts / "out" / "accum-curve.json").read_text())
    assert [row["effective_batch"] for row in curve["rows"]] == [2, 4]
    assert curve["sentence"] in out
    assert out.splitlines()[-2:] == ["out/accum-curve.json", "out/accum-curve.png"]
    assert (parts / "out" / "accum-curve.png").stat().st_size > 1000
    code, out, _ = run(capsys, "sweep", "my_parts:good", *arguments[:-1], "json", "--no-picture")
    assert code == 0
    assert [path.name for path in (parts / "json").iterdir()] == ["accum-curve.json"]


def test_report_draws_a_log_and_says_where(parts, capsys):
    """Beside the log, or where it is asked for."""
    (parts / "metrics.jsonl").write_text('{"update": 1, "loss": 2.0}\n{"update": 2, "loss": 1.0}\n')
    assert run(capsys, "report", "metrics.jsonl") == (0, "report.png\n", "")
    assert run(capsys, "report", "metrics.jsonl", "--output", "a/b.png") == (0, "a/b.png\n", "")
    assert (parts / "a" / "b.png").stat().st_size > 1000


def test_help_names_every_command_and_the_exit_codes(capsys):
    """What a newcomer reads first."""
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for word in ("plan", "check", "sweep", "inspect", "report", "exit codes: 0 good, 1 the check"):
        assert word in out
    for command in ("plan", "check", "sweep", "inspect", "report"):
        code, out, _ = run(capsys, command, "--help")
        assert code == 0
        assert f"usage: accumplug {command}" in out


def test_the_module_is_the_command():
    """`python -m accumplug` in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-m", "accumplug", "plan", "100", "8"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("accumplug plan: error: an effective batch of 100")


def parsers():
    """The parser of each command, by its name."""
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {"": parser, **commands.choices}


@pytest.mark.parametrize("command", parsers())
def test_every_option_has_a_word_of_help(command):
    """A few words, each another text; and a default that is named where there is one."""
    actions = [a for a in parsers()[command]._actions if a.dest != "command"]
    for action in actions:
        assert len(str(action.help or "").split()) >= 2, action.dest
        if action.default not in (None, False, argparse.SUPPRESS):
            assert "(" in action.help or "efault" in action.help, action.dest
    assert len({action.help for action in actions}) == len(actions)


def test_report_names_the_keys_that_a_log_needs_and_those_that_it_has(parts, capsys):
    """A log of one's own, with other names."""
    (parts / "mine.jsonl").write_text('{"step": 1, "train_loss": 2.0}\n' * 3)
    code, out, err = run(capsys, "report", "mine.jsonl")
    assert (code, out) == (2, "")
    assert "a number for update and for one of loss, lr, grad_norm, noise_scale, seconds" in err
    assert err.endswith("its keys are step, train_loss\n")
