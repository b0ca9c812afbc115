"""A checkpoint is whole or absent: after any crash, on a full disk, with several ranks."""

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from accumplug.errors import CheckpointError
from accumplug.storage import files, retention
from accumplug.storage.codec import encode
from accumplug.storage.commit import Destination, Job
from accumplug.storage.layout import list_checkpoints, newest, open_checkpoint, read_part, verify
from accumplug.storage.manifest import name_of, order_of
from accumplug.storage.writer import Writer


def job(update, micro_batch=None, parts=("model", "gradients"), **linked):
    value = encode({"x": torch.full((300,), float(update))})
    position = {"update": update, "micro_batch": 4 * update if micro_batch is None else micro_batch}
    return Job(position, dict.fromkeys(parts, value), **linked)


def writer(directory, **options):
    return Writer(directory, background=False, **options)


def save(directory, update, keep=9, **more):
    inline = writer(directory, keep=keep)
    inline.submit(job(update, **more))
    return inline.last


def updates(directory):
    return [order_of(path.name)[0] for path in list_checkpoints(directory)]


def value_of(checkpoint, part="model"):
    return read_part(checkpoint, part)["x"][0].item()


# Crashes. The script is a process of its own, so that its children can be killed at will.

CRASHES = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from accumplug.storage.writer import Writer
from accumplug.storage.codec import encode
from accumplug.storage.layout import list_checkpoints, newest, read_part, verify
from accumplug.storage.retention import remove_leftovers
from accumplug.storage.commit import Job

directory, mode, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])

def save(writer, update, linked):
    old = newest(directory).checkpoint
    state = encode({"x": torch.full((5000,), float(update))})
    if linked and old:  # a save inside a window
        here = {"update": update, "micro_batch": update, "model": old.manifest.position["model"]}
        job = Job(here, {"gradients": state}, link=("model",), link_from=old.path)
    else:
        here = {"update": update, "micro_batch": update, "model": update}
        job = Job(here, {"model": state, "gradients": state})
    writer.submit(job)

def found():
    for path in list_checkpoints(directory):
        verify(path)  # also one that was being removed: whole, or not there
    checkpoint = newest(directory).checkpoint
    if checkpoint is None:
        return 0
    here = checkpoint.manifest.position
    assert read_part(checkpoint, "gradients")["x"].eq(here["update"]).all()
    assert read_part(checkpoint, "model")["x"].eq(here["model"]).all()
    return here["update"]

def die_at(moment):
    def dying(name):
        call = getattr(os, name)
        def wrapped(*args, **kwargs):
            nonlocal moment
            moment -= 1
            if moment < 0:
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            # A killed process needs no fsync, only a machine without power does.
            return None if name == "fsync" else call(*args, **kwargs)
        return wrapped
    for name in ("mkdir", "write", "fsync", "rename", "link", "unlink", "rmdir"):
        setattr(os, name, dying(name))

def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid

def every_call():
    moment, alive = 0, 0
    while alive < 2:
        alive = 0
        for linked in (False, True):
            last = found()
            if linked:  # else the dying one sweeps up first, and dies of that too
                remove_leftovers(Path(directory), "another")
            def work():
                die_at(moment)
                save(Writer(directory, background=False), last + 1, linked)
            status = os.waitpid(child(work), 0)[1]
            assert found() in ((last, last + 1) if status else (last + 1,)), (moment, linked)
            alive += not status
        moment += 1
    return moment

def storm():
    moments = random.Random(seed)
    def work():
        writer = Writer(directory)
        update = found()
        while True:
            update += 1
            save(writer, update, update % 3)
    start = time.monotonic()
    os.waitpid(child(lambda: save(Writer(directory, background=False), 1, False)), 0)
    pace = min(time.monotonic() - start, 0.2)
    for kill in range(20):
        last = found()
        pid = child(work)
        time.sleep(moments.uniform(0, 3 * pace))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert found() >= last, (kill, last)
    return found()

print((every_call if mode == "every call" else storm)())
"""


def crashes(directory, mode, seed=0):
    command = [sys.executable, "-c", CRASHES, str(directory), mode, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def leftovers(directory):
    return [name for name in os.listdir(directory) if name.startswith(".")]


def test_killed_at_any_call_to_the_system_the_newest_is_whole(tmp_path):
    """SIGKILL before each call of a save (half-way through a write), one save after the other.

    The one before is found, or the new one, with the values that belong to it, and never a
    damaged one; what the dead have left is gone once a save has gone through.
    """
    assert crashes(tmp_path, "every call") > 20
    assert leftovers(tmp_path) == []
    assert len(list_checkpoints(tmp_path)) == 2


def test_a_storm_of_kills_never_loses_a_checkpoint(tmp_path):
    """20 SIGKILLs at random moments of a process that does nothing but save in the background."""
    seed = random.randrange(2**32)
    assert crashes(tmp_path, "storm", seed) > 0, seed
    assert save(tmp_path, 10**6, keep=2)
    assert leftovers(tmp_path) == []


def full_disk(monkeypatch, room):
    """Makes os.write take `room` bytes in all, the last of them in a short write."""
    write = os.write

    def limited(file, data):
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(file, data[:room])
        room -= done
        return done

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("room", [0, 1, 50, 100, 1000, 2000, 2900, 3100])
def test_a_full_disk_leaves_the_one_before(tmp_path, monkeypatch, room):
    """Wherever the disk is full: said at once, nothing left over, the next save works."""
    save(tmp_path, 1)
    with monkeypatch.context() as context:
        full_disk(context, room)
        with pytest.raises(RuntimeError, match=r"update-0000000002.* was not written: .*No space"):
            save(tmp_path, 2)
    assert os.listdir(tmp_path) == [name_of(1, 4)]
    assert value_of(newest(tmp_path).checkpoint) == 1
    assert value_of(verify(save(tmp_path, 3))) == 3


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_failing_call_leaves_the_one_before(tmp_path, monkeypatch, call):
    """An error of the disk at any fsync counts: what it did not keep is not a checkpoint."""

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    save(tmp_path, 1)
    with monkeypatch.context() as context:
        context.setattr(os, call, fail)
        with pytest.raises(RuntimeError, match=r"was not written: .*Input/output error"):
            save(tmp_path, 2)
    assert os.listdir(tmp_path) == [name_of(1, 4)]


def test_files_are_on_disk_before_the_name_is(tmp_path, monkeypatch):
    """fsync of every file, manifest last, then of the directory, then the rename, then above."""
    calls = []

    def recorded(name, path_of):
        call = getattr(os, name)

        def wrapped(*args, **kwargs):
            calls.append((name, Path(path_of(args[0])).name))
            return call(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapped)

    inline = writer(tmp_path)
    inline.submit(job(1))  # which looks at the file system first
    recorded("fsync", lambda file: os.readlink(f"/proc/self/fd/{file}"))
    recorded("rename", str)
    inline.submit(job(2))
    path = inline.last
    work = calls[-2][1]
    assert work.startswith(retention.WRITING)
    assert sorted(calls[:4]) == sorted(
        ("fsync", name) for name in os.listdir(path) if name != "manifest.json"
    )
    assert calls[4:] == [
        ("fsync", "manifest.json"),
        ("fsync", work),
        ("rename", work),
        ("fsync", tmp_path.name),
    ]


def test_the_oldest_goes_only_after_the_newest_is_whole(tmp_path, monkeypatch):
    """Also with keep=1: at no moment is there none."""
    seen = []
    remove = retention._remove

    def watched(path, grave):
        seen.append((order_of(path.name)[0], newest(tmp_path).checkpoint.manifest.position))
        remove(path, grave)

    monkeypatch.setattr(retention, "_remove", watched)
    inline = writer(tmp_path, keep=1)
    for update in (1, 2, 3):
        inline.submit(job(update))
    assert [(old, new["update"]) for old, new in seen] == [(1, 2), (2, 3)]
    assert os.listdir(tmp_path) == [name_of(3, 12)]


def test_keep_counts_whole_checkpoints(tmp_path):
    """A damaged one does not push a whole one out; it goes when it is older than those kept."""
    for update in (1, 2, 3):
        damaged = save(tmp_path, update)
    (damaged / "model.json").unlink()
    save(tmp_path, 4, keep=2)
    assert updates(tmp_path) == [2, 3, 4]
    save(tmp_path, 5, keep=2)
    assert updates(tmp_path) == [4, 5]


def test_what_is_later_than_the_one_just_written_stays(tmp_path):
    """A run that goes on from further back never removes its own newest, nor another's."""
    save(tmp_path, 50)
    for update in (1, 2, 3):
        path = save(tmp_path, update, keep=1)
        assert path.is_dir()
    assert updates(tmp_path) == [3, 50]


def test_saving_one_position_twice_keeps_both(tmp_path):
    """Nothing is overwritten; the later save is the newer."""
    save(tmp_path, 1)
    second = save(tmp_path, 1)
    assert second.name == f"{name_of(1, 4)}-1"
    assert newest(tmp_path).checkpoint.path == second


def test_only_what_dead_writers_left_is_swept_up(tmp_path):
    """Names of this package alone, however alike others look."""
    names = [".accumplug-writing-abc-000001", ".accumplug-removing-abc-x", ".git", "accumplug"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    save(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == sorted([".git", "accumplug", name_of(1, 4)])


def test_an_unchanged_part_is_linked_and_stands_alone(tmp_path):
    """No byte of it is written again, and it is still there when the other directory is gone."""
    first = save(tmp_path, 1)
    second = save(tmp_path, 2, parts=("gradients",), link=("model",), link_from=first)
    for name in ("model.json", "model.safetensors"):
        assert (first / name).samefile(second / name)
        assert (
            open_checkpoint(first).manifest.files[name]
            == (open_checkpoint(second).manifest.files[name])
        )
    assert not (first / "gradients.safetensors").samefile(second / "gradients.safetensors")
    shutil.rmtree(first)
    assert value_of(verify(second)) == 1
    assert value_of(verify(second), "gradients") == 2


def test_the_manifest_says_which_files_are_links(tmp_path, monkeypatch):
    """A copy is none, where the file system has no links."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    first = save(tmp_path, 1)
    found = []
    for update in (2, 3):
        save(tmp_path, update, parts=("gradients",), link=("model",), link_from=first)
        files = open_checkpoint(list_checkpoints(tmp_path)[-1]).manifest.files
        found.append([name for name, entry in files.items() if entry.linked])
        monkeypatch.setattr(os, "link", refuse)
    assert found == [["model.json", "model.safetensors"], []]


def test_a_linked_part_is_not_read(tmp_path, monkeypatch):
    """Its checksum is taken over, not computed again: a save costs what it writes."""
    first = save(tmp_path, 1)
    (first / "model.safetensors").chmod(0o644)
    written = []
    real = files.write_file

    def counted(path, pieces):
        written.append(path.name)
        return real(path, pieces)

    for module in ("commit", "safetensors_io"):
        monkeypatch.setattr(f"accumplug.storage.{module}.write_file", counted)
    save(tmp_path, 2, parts=("gradients",), link=("model",), link_from=first)
    assert written == ["gradients.json", "gradients.safetensors", "manifest.json"]


def test_where_the_file_system_cannot_link_it_is_copied(tmp_path, monkeypatch):
    """FAT, some network and user-space file systems; the copy is a file of its own."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    first = save(tmp_path, 1)
    monkeypatch.setattr(os, "link", refuse)
    second = save(tmp_path, 2, parts=("gradients",), link=("model",), link_from=first)
    assert not (first / "model.safetensors").samefile(second / "model.safetensors")
    assert value_of(verify(second)) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"manifest\.json: missing"),
        (lambda path: (path / "model.json").unlink(), r"model\.json: missing"),
        (lambda path: os.truncate(path / "model.safetensors", 9), r"safetensors: 9 bytes, but"),
    ],
)
def test_linking_from_what_is_not_whole_fails_by_name(tmp_path, damage, message):
    """Damage is not handed on."""
    first = save(tmp_path, 1)
    damage(first)
    with pytest.raises(RuntimeError, match=message):
        save(tmp_path, 2, parts=("gradients",), link=("model",), link_from=first)


def test_linking_a_part_that_is_not_there_fails_by_name(tmp_path):
    """The message names the part."""
    first = save(tmp_path, 1)
    with pytest.raises(RuntimeError, match="has no part 'ema' to link"):
        save(tmp_path, 2, parts=("gradients",), link=("ema",), link_from=first)


def in_threads(*calls):
    """Runs the calls at once; their exceptions, in order."""
    errors = [None] * len(calls)

    def run(index, call):
        try:
            call()
        except Exception as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def ranks(directory, size, **options):
    return [
        writer(directory, rank=rank, world_size=size, token="run1", **options)
        for rank in range(size)
    ]


def share(rank, update):
    return job(update, parts=(f"gradients-{rank:05d}", *(("model",) if rank == 0 else ())))


def test_the_ranks_files_make_one_checkpoint(tmp_path):
    """Three ranks, several saves, no collective; rank 0 makes it whole."""
    group = ranks(tmp_path, 3)

    def saves(one):
        return lambda: [one.submit(share(one.destination.rank, update)) for update in (1, 2, 3)]

    assert in_threads(*map(saves, group)) == [None] * 3
    assert updates(tmp_path) == [2, 3]
    assert leftovers(tmp_path) == []
    checkpoint = verify(group[0].last)
    assert checkpoint.manifest.world_size == 3
    assert checkpoint.parts == [*(f"gradients-0000{rank}" for rank in range(3)), "model"]
    assert sorted(os.listdir(checkpoint.path)) == sorted(
        ["manifest.json", *checkpoint.manifest.files]
    )
    assert value_of(checkpoint, "gradients-00002") == 3


def test_a_rank_ahead_does_not_mix_two_saves(tmp_path):
    """Rank 1 may have written its third share before rank 0 begins, at the same position too."""
    zero, one = ranks(tmp_path, 2)
    for update in (1, 1, 2):
        one.submit(share(1, update))
    for update in (1, 1, 2):
        zero.submit(share(0, update))
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        f"{name_of(1, 4)}-1",
        name_of(2, 8),
    ]
    assert value_of(verify(zero.last), "gradients-00001") == 2


def test_a_rank_that_does_not_deliver_is_named(tmp_path):
    """After `timeout`; the checkpoint before stays, the half one goes."""
    zero, one, _ = ranks(tmp_path, 3, timeout=0.2)
    one.submit(share(1, 1))
    with pytest.raises(RuntimeError, match=r"ranks \[2\] of 3 did not write.* within 0\.2 s"):
        zero.submit(share(0, 1))
    assert os.listdir(tmp_path) == []


def test_a_rank_that_fails_is_named_at_once_with_its_reason(tmp_path, monkeypatch):
    """Rank 0 does not wait for its timeout."""
    zero, one = ranks(tmp_path, 2, timeout=60)
    with monkeypatch.context() as context:
        full_disk(context, 100)
        with pytest.raises(RuntimeError, match="No space left"):
            one.submit(share(1, 1))
    with pytest.raises(RuntimeError, match=r"rank 1 could not write its part: .*No space left"):
        zero.submit(share(0, 1))
    assert os.listdir(tmp_path) == []


def test_two_ranks_cannot_write_one_part(tmp_path):
    """One of them learns that the file is there already."""
    zero, one = ranks(tmp_path, 2, timeout=0.2)
    one.submit(job(1, parts=("model",)))
    with pytest.raises(RuntimeError, match=r"File exists.*model\.json"):
        zero.submit(job(1, parts=("model",)))


def test_a_part_is_written_or_linked_not_both(tmp_path):
    """By whichever ranks."""
    first = save(tmp_path, 1, parts=("model",))
    zero, one = ranks(tmp_path, 2)
    one.submit(job(2, parts=("model",)))
    with pytest.raises(RuntimeError, match=r"model\.json, model\.safetensors: given by two ranks"):
        zero.submit(job(2, parts=(), link=("model",), link_from=first))
    assert updates(tmp_path) == [1]


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "manifest", "Manifest", "é", "a" * 101])
def test_a_part_has_a_plain_name(name):
    """It becomes a file's name, which every reader will check."""
    with pytest.raises(ValueError, match="can't name a part"):
        job(1, parts=(name,))


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ({"update": 1}, "without update and micro_batch"),
        ({"update": 1, "micro_batch": -1}, "without update and micro_batch"),
        ({"update": 1, "micro_batch": 1, "loss": float("nan")}, "not JSON compliant"),
    ],
)
def test_a_position_is_json_and_says_where(position, message):
    """Refused when the job is made, not in the background."""
    with pytest.raises(ValueError, match=message):
        Job(position, {})


def test_a_part_given_and_linked_is_refused():
    """When the job is made."""
    with pytest.raises(ValueError, match="'model' is both written and linked"):
        job(1, parts=("model",), link=("model",), link_from=Path("x"))
    with pytest.raises(ValueError, match="needs link_from"):
        job(1, parts=(), link=("model",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of 2 ranks"),
        ({"keep": 0}, "keep=0: the newest is always kept"),
        ({"token": "../x"}, "1 to 64 letters and digits"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(tmp_path, options, message):
    """With the numbers seen."""
    with pytest.raises(ValueError, match=message):
        Destination(tmp_path, **({"token": "a"} | options))


@pytest.mark.parametrize("module", ["commit", "safetensors_io"])
def test_what_could_not_be_read_again_is_not_written(tmp_path, monkeypatch, module):
    """A tree, or the names of the tensors, longer than what a reader takes."""
    monkeypatch.setattr(f"accumplug.storage.{module}.MAX_JSON", 10)
    with pytest.raises(RuntimeError, match=r"bytes of JSON: put|header of \d+ bytes, more than 10"):
        save(tmp_path, 1)


def test_a_checkpoint_error_is_a_value_error():
    """What code that already guards against bad files catches."""
    assert issubclass(CheckpointError, ValueError)
