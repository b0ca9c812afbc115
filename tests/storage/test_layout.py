"""Whether a checkpoint is whole: every fault is found and named, none is followed."""

import builtins
import errno
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accumplug.errors import CheckpointError
from accumplug.storage import manifest
from accumplug.storage.codec import encode
from accumplug.storage.commit import Job
from accumplug.storage.files import checksum
from accumplug.storage.json import dump_json, parse_json
from accumplug.storage.layout import list_checkpoints, newest, open_checkpoint, read_part, verify
from accumplug.storage.manifest import Manifest, name_of, order_of
from accumplug.storage.writer import Writer

PARTS = ["model", "loader"]
FILES = ["manifest.json", "model.json", "model.safetensors", "loader.json"]


def save(directory, update):
    """A checkpoint of three files, whose tensor holds `update`."""
    writer = Writer(directory, keep=9, background=False)
    model = {"weight": torch.full((3, 50), float(update))}
    parts = {"model": encode(model), "loader": encode({"order": [1, 2]})}
    writer.submit(Job({"update": update, "micro_batch": 4 * update, "epoch": 0}, parts))
    return writer.close() or writer.last


@pytest.fixture
def two(tmp_path):
    """The paths of two whole checkpoints in one directory, older first."""
    return save(tmp_path, 1), save(tmp_path, 2)


def flip(path, position, bit):
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(data)


def replace_by(make):
    def damage(path):
        path.unlink()
        make(path)

    return damage


DAMAGE = {
    "missing": replace_by(lambda path: None),
    "empty": lambda path: path.write_bytes(b""),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a byte longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "first bit": lambda path: flip(path, 0, 0),
    "last bit": lambda path: flip(path, -1, 7),
    "a directory": replace_by(Path.mkdir),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".away"))),
    "a link to a device": replace_by(lambda path: path.symlink_to("/dev/zero")),
    "a pipe": replace_by(os.mkfifo),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(torch.Size([1]))),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_and_the_one_before_is_found(two, kind, file):
    """Every kind of damage to every file, the manifest included."""
    older, newer = two
    DAMAGE[kind](newer / file)
    with pytest.raises(CheckpointError, match=rf"{newer.name}/{file}: "):
        verify(newer)
    found = newest(newer.parent)
    assert found.checkpoint.path == older
    assert len(found.passed) == 1
    assert f"{newer.name}/{file}: " in found.passed[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save(tmp_path_factory.mktemp("whole"), 1)


@given(
    file=st.sampled_from(FILES),
    position=st.integers(0, 10**6),
    bit=st.integers(0, 7),
    mapped=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_flipped_bit_is_found_while_reading(whole, file, position, bit, mapped):
    """Also without a check before: no part with a wrong byte is ever handed out."""
    flip(whole / file, position, bit)
    try:
        with pytest.raises(CheckpointError, match=rf"{whole.name}/{file}: "):
            [read_part(open_checkpoint(whole), part, mapped=mapped) for part in PARTS]
    finally:
        flip(whole / file, position, bit)
    assert verify(whole)


def test_every_bit_of_the_manifest_counts(tmp_path):
    """None of its 4000 bits can change unnoticed, the spaces included."""
    path = save(tmp_path, 1) / "manifest.json"
    data = path.read_bytes()
    for position in range(len(data)):
        for bit in range(8):
            wrong = bytearray(data)
            wrong[position] ^= 1 << bit
            with pytest.raises(CheckpointError, match=r"manifest\.json: "):
                Manifest.parse(bytes(wrong), path)
    assert Manifest.parse(data, path).position == {"update": 1, "micro_batch": 4, "epoch": 0}


def test_a_manifest_cut_anywhere_is_refused(tmp_path):
    """No prefix of a manifest is a manifest."""
    path = save(tmp_path, 1) / "manifest.json"
    data = path.read_bytes()
    for end in range(len(data)):
        with pytest.raises(CheckpointError, match=r"manifest\.json: "):
            Manifest.parse(data[:end], path)


def forge(path, **changes):
    """Writes a manifest with a right checksum, as a stranger could."""
    body = json.loads((path / "manifest.json").read_bytes()) | changes
    body.pop("crc32")
    body["crc32"] = f"{zlib.crc32(dump_json(body)):08x}"
    (path / "manifest.json").write_bytes(dump_json(body, indent=1))


OUTSIDE = [
    *("../outside.json", "/etc/passwd", "..", ".", "", "sub/model.json", "sub\\model.json"),
    *(".hidden.json", "model.json\0", "model.json\n", "mod\u0435l.json", "model\u200b.json"),
    *("C:model.json", "~/model.json", "model.pkl", "model", "manifest.json", "a" * 300 + ".json"),
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path, name):
    """Before that file is looked at, even where it exists and fits."""
    data = b"{}"
    (tmp_path / "outside.json").write_bytes(data)
    path = save(tmp_path / "run", 1)
    forge(path, files={name: {"size": 2, "sums": checksum(memoryview(data))}})
    with pytest.raises(CheckpointError, match=r"manifest\.json: .*can't be a file"):
        verify(path)


ENTRY = {"size": 2, "sums": "00000000"}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "1"},
        {"format": None},
        {"accumplug": 1},
        {"world_size": 0},
        {"world_size": True},
        {"world_size": "2"},
        {"world_size": 10**17},
        {"world_size": 5},  # ranks with 4 files
        {"position": None},
        {"position": [1, 2]},
        {"position": {"update": 1}},
        {"position": {"update": 1.0, "micro_batch": 1}},
        {"position": {"update": -1, "micro_batch": 1}},
        {"files": []},
        {"files": None},
        {"files": {"a.json": None}},
        {"files": {"a.json": {"size": 2}}},
        {"files": {"a.json": ENTRY | {"more": 1}}},
        {"files": {"a.json": ENTRY | {"size": "2"}}},
        {"files": {"a.json": ENTRY | {"size": -2}}},
        {"files": {"a.json": ENTRY | {"size": 2**70}}},
        {"files": {"a.json": ENTRY | {"size": 5_000_000}}},
        {"files": {"a.json": ENTRY | {"sums": 0}}},
        {"files": {"a.json": ENTRY | {"sums": ""}}},
        {"files": {"A.json": ENTRY, "a.json": ENTRY}},
    ],
    ids=str,
)
def test_a_manifest_of_wrong_types_is_refused(tmp_path, changes):
    """With a right checksum: one clear error, no crash."""
    path = save(tmp_path, 1)
    forge(path, **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json: (malformed|not the manifest)"):
        open_checkpoint(path)


def test_a_manifest_with_more_in_it_is_refused(tmp_path):
    """What no version of this format writes means that something else wrote it."""
    path = save(tmp_path, 1)
    forge(path, more=1)
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        open_checkpoint(path)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "[1, NaN]", '{"a": 1, "a": 2}', "\xff", "01"])
def test_json_is_strict(text):
    """What other readers refuse or read differently is refused."""
    with pytest.raises(CheckpointError, match=r"^x\.json: not valid JSON"):
        parse_json(text.encode("latin-1"), Path("x.json"))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_called_so(two, make):
    """Not just of a wrong size."""
    path = two[1] / "model.json"
    path.unlink()
    make(path)
    with pytest.raises(CheckpointError, match=r"model\.json: not a regular file"):
        verify(two[1])


def test_a_manifest_with_a_file_twice_is_refused(tmp_path):
    """JSON readers differ in which of the two they take."""
    path = save(tmp_path, 1)
    text = (path / "manifest.json").read_text()
    start = text.index('  "loader.json": {')
    end = text.index("},", start) + 2
    (path / "manifest.json").write_text(text[:end] + text[start:end] + text[end:])
    with pytest.raises(CheckpointError, match="a key stands twice"):
        open_checkpoint(path)


def test_a_newer_format_is_refused_with_what_to_do(tmp_path):
    """The message has both versions."""
    path = save(tmp_path, 1)
    forge(path, format=4, accumplug="9.1")
    with pytest.raises(CheckpointError, match=r"format 4 of accumplug '9.1'.*install a newer one"):
        open_checkpoint(path)


def test_a_release_that_reads_format_2_refuses_this_one_by_name(tmp_path, monkeypatch):
    """It would miss the weights that are in a part of their own since then."""
    path = save(tmp_path, 1)
    monkeypatch.setattr(manifest, "FORMAT", 2)
    with pytest.raises(CheckpointError, match=r"format 3 .* reads up to 2: install a newer one"):
        open_checkpoint(path)


def test_a_pickle_under_a_safetensors_name_is_not_opened(two, monkeypatch):
    """Nothing in reading asks pickle for anything, whatever the file holds."""

    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    for name in ("eval", "exec"):
        monkeypatch.setattr(builtins, name, refuse)
    older, newer = two
    data = pickle.dumps({"weight": [1.0]})
    (newer / "model.safetensors").write_bytes(data)
    files = json.loads((newer / "manifest.json").read_bytes())["files"]
    files["model.safetensors"] = {"size": len(data), "sums": checksum(memoryview(data))}
    forge(newer, files=files)
    assert verify(newer)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        read_part(open_checkpoint(newer), "model")
    assert torch.equal(read_part(verify(older), "model")["weight"], torch.full((3, 50), 1.0))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_part_is_read_back(two, mapped):
    """Tensors and plain values, each of the right checkpoint."""
    checkpoint = newest(two[0].parent).checkpoint
    assert checkpoint.parts == ["loader", "model"]
    assert checkpoint.manifest.position["update"] == 2
    weight = read_part(checkpoint, "model", mapped=mapped)["weight"]
    assert torch.equal(weight, torch.full((3, 50), 2.0))
    assert read_part(checkpoint, "loader") == {"order": [1, 2]}


def test_json_too_long_to_be_read_safely_is_refused(two, monkeypatch):
    """Manifest, tree and header of a tensor file: by the size of the file, before it is read."""
    monkeypatch.setattr("accumplug.storage.json.MAX_JSON", 10)
    with pytest.raises(CheckpointError, match=r"loader\.json: \d+ bytes of JSON, more than 10"):
        read_part(open_checkpoint(two[0]), "loader")
    monkeypatch.setattr("accumplug.storage.layout.MAX_JSON", 10)
    with pytest.raises(CheckpointError, match=r"manifest\.json: \d+ bytes of JSON, more than 10"):
        open_checkpoint(two[0])


def test_a_file_cut_while_it_is_read_is_named(two, monkeypatch):
    """After its size was looked at; no endless wait for the rest."""
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: 0)
    with pytest.raises(CheckpointError, match=r"loader\.json: ends at byte 0 while"):
        read_part(open_checkpoint(two[0]), "loader")


def test_a_disk_that_fails_to_read_is_named(two, monkeypatch):
    """An error of the system is a fault of the checkpoint: the one before may be readable."""

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read \(Input/output"):
        open_checkpoint(two[0])


def test_a_part_that_is_not_there_is_named_with_those_that_are(two):
    """So that a typing error is seen at once."""
    with pytest.raises(CheckpointError, match="no part 'ema', only loader, model"):
        read_part(open_checkpoint(two[0]), "ema")


def test_without_the_full_check_the_search_reads_no_data(two):
    """Sizes are right, so it is found; reading finds the flipped bit; `skip` goes on from there."""
    older, newer = two
    flip(newer / "model.safetensors", -1, 0)
    found = newest(older.parent, full=False)
    assert found.checkpoint.path == newer
    with pytest.raises(CheckpointError, match=r"damaged between byte 0 and"):
        read_part(found.checkpoint, "model")
    assert newest(older.parent, full=False, skip=[newer.name]).checkpoint.path == older


def test_where_nothing_was_saved_nothing_is_found(tmp_path):
    """A fresh start: a directory that is not there, or has other things in it."""
    assert newest(tmp_path / "fresh").checkpoint is None
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / ".accumplug-writing-abc-000001").mkdir()
    assert newest(tmp_path) == newest(tmp_path / "fresh")


def test_a_link_to_a_checkpoint_is_not_followed(two, tmp_path):
    """A stranger's directory leads nowhere else."""
    away = tmp_path / "elsewhere" / name_of(9, 9)
    shutil.copytree(two[1], away)
    (tmp_path / name_of(9, 9)).symlink_to(away)
    assert newest(tmp_path).checkpoint.path == two[1]


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path):
    """Starting afresh there would be worse."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: cannot be read"):
        newest(tmp_path / "file")


positions = st.tuples(st.integers(0, 10**12), st.integers(0, 10**14), st.integers(0, 99))


@given(positions, positions)
@example((9, 99, 0), (10, 0, 0))
@example((1, 1, 9), (1, 1, 10))
def test_names_order_checkpoints_like_positions(a, b):
    """Update first, then micro-batch, then the saves of one position."""
    assert (order_of(name_of(*a)) < order_of(name_of(*b))) == (a < b)


@given(st.integers(0, 10**10 - 1), st.integers(0, 10**12 - 1), st.integers(0, 10**10 - 1))
def test_names_sort_as_text(update, micro_batch, later):
    """`ls` shows them in order."""
    assert name_of(update, micro_batch) < name_of(update, micro_batch, 1)
    assert (name_of(update, micro_batch) < name_of(later, 0)) == (update < later)


def test_the_list_is_in_order_of_position(tmp_path):
    """Not of time, nor of the directory."""
    for update in (10, 9, 11):
        save(tmp_path, update)
    assert [order_of(path.name)[0] for path in list_checkpoints(tmp_path)] == [9, 10, 11]
