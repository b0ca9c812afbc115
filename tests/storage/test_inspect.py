"""What `accumplug inspect` says, and its exit code."""

import pytest
import torch

from accumplug import _version
from accumplug.storage.codec import encode
from accumplug.storage.commit import Job
from accumplug.storage.inspect import describe, inspect_command
from accumplug.storage.writer import Writer


def save(directory, update=12, **position):
    writer = Writer(directory, keep=9, background=False)
    position = {"update": update, "micro_batch": 195} | position
    writer.submit(Job(position, {"model": encode({"w": torch.zeros(1000)})}))
    return writer.last


def test_it_says_where_the_run_was_and_what_is_in_it(tmp_path):
    """Position, window, ranks, versions, each file with its size, and that the sizes agree."""
    path = save(tmp_path, epoch=3, pending=3, steps=16)
    text, code = inspect_command(path)
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    assert code == 0
    assert lines[0] == [str(path)]
    assert ["update", "12"] in lines
    assert ["micro_batch", "195"] in lines
    assert ["window", "3 of 16 micro-batches"] in lines
    assert ["epoch", "3"] in lines
    assert ["ranks", "1"] in lines
    assert ["written", f"by   accumplug {_version.__version__}, format 3"] in lines
    assert ["model.safetensors", "4.1 kB"] in lines
    assert lines[-1] == ["sizes", "agree (--verify checks every byte)"]
    assert "whole" not in text


def test_it_says_how_much_was_written_and_how_much_was_linked(tmp_path):
    """Files and bytes, and each file that is a link."""
    writer = Writer(tmp_path, keep=9, background=False)
    state = encode({"w": torch.zeros(1000)})
    writer.submit(Job({"update": 1, "micro_batch": 1}, {"model": state}))
    linked = {"link": ("model",), "link_from": writer.last}
    writer.submit(Job({"update": 1, "micro_batch": 2}, {"rank-0": encode([])}, **linked))
    lines = describe(writer.last).splitlines()
    sizes = {path.name: path.stat().st_size for path in writer.last.iterdir()}
    size = sizes["model.json"] + sizes["model.safetensors"]
    assert "  written      1, 3 B" in lines
    assert f"  linked       2, {size / 1000:.1f} kB, as they were in an earlier checkpoint" in lines
    assert [line.split()[0] for line in lines if line.endswith("  linked")] == [
        "model.json",
        "model.safetensors",
    ]


def test_between_windows_it_says_that_none_is_open(tmp_path):
    """pending 0: the checkpoint of an update."""
    assert "window       none is open" in describe(save(tmp_path, pending=0, steps=16))


def test_a_missing_file_is_named_and_the_code_is_1(tmp_path):
    """All that is wrong is listed, not the first alone."""
    path = save(tmp_path)
    (path / "model.json").unlink()
    (path / "model.safetensors").write_bytes(b"")
    text, code = inspect_command(path)
    assert code == 1
    assert "DAMAGED" in text
    assert "model.json: missing" in text
    assert "model.safetensors: 0 bytes, but the manifest says" in text


def test_verify_finds_a_changed_byte(tmp_path):
    """Without it the sizes still fit."""
    path = save(tmp_path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    assert inspect_command(path)[1] == 0
    text, code = inspect_command(path, verify=True)
    assert code == 1
    assert "model.safetensors: damaged between byte 0 and" in text


def test_verify_says_that_every_byte_was_checked(tmp_path):
    """So that it can't be taken for the quick look."""
    text, code = inspect_command(save(tmp_path), verify=True)
    assert text.endswith("whole (every byte checked)")
    assert code == 0


def test_a_directory_of_checkpoints_is_listed_with_the_newest_whole_one(tmp_path):
    """Each with its state, unfinished ones too; one damaged is enough for code 1."""
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    assert inspect_command(tmp_path)[1] == 0
    (bad / "manifest.json").unlink()
    (tmp_path / ".accumplug-writing-abc-000001").mkdir()
    text, code = inspect_command(tmp_path)
    assert code == 1
    assert text.index(good.name) < text.index(bad.name)
    assert f"{bad}\n  DAMAGED\n    {bad}/manifest.json: missing" in text
    assert ".accumplug-writing-abc-000001: unfinished" in text
    assert text.endswith(f"newest whose sizes agree: {good.name}")


@pytest.mark.parametrize("kind", ["empty", "missing", "file"])
def test_what_is_no_checkpoint_directory_is_code_2(tmp_path, kind):
    """One line that names it."""
    path = tmp_path if kind == "empty" else tmp_path / "x"
    if kind == "file":
        path.write_text("")
    text, code = inspect_command(path)
    assert code == 2
    assert text.startswith(str(path))
    assert "\n" not in text


def test_what_a_stranger_wrote_cannot_drive_the_terminal(tmp_path):
    """Escape sequences come out as text, a long value is cut."""
    text = describe(save(tmp_path, note="\x1b[2J\n\u202e", long="x" * 10_000))
    assert r"\u001b[2J\n\u202e" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 200
