"""The writer's thread: the loop goes on, and no failure is lost."""

import errno
import os
import signal
import threading

import pytest
import torch

from accumplug.storage.codec import encode
from accumplug.storage.commit import Job
from accumplug.storage.layout import list_checkpoints, newest, read_part
from accumplug.storage.writer import Writer


def job(update, tensor=None):
    tensor = torch.full((10,), float(update)) if tensor is None else tensor
    return Job({"update": update, "micro_batch": update}, {"model": encode({"x": tensor})})


@pytest.fixture
def gate(monkeypatch):
    """Holds every fsync until it is set; never longer than the test."""
    gate = threading.Event()
    fsync = os.fsync

    def held(file):
        assert gate.wait(20)
        fsync(file)

    monkeypatch.setattr(os, "fsync", held)
    yield gate
    gate.set()


@pytest.fixture
def broken(monkeypatch):
    """A disk that fails."""

    def fail(file):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", fail)
        yield context


def test_the_loop_goes_on_while_the_disk_works(tmp_path, gate):
    """submit returns before anything is on disk; wait returns the finished checkpoint."""
    writer = Writer(tmp_path)
    writer.submit(job(1))
    assert writer.busy
    assert newest(tmp_path).checkpoint is None
    writer.check()
    gate.set()
    assert writer.wait() == newest(tmp_path).checkpoint.path
    assert not writer.busy


def test_at_most_one_write_is_in_flight(tmp_path, gate):
    """The next submit waits for the one before, so memory for one copy is enough."""
    writer = Writer(tmp_path)
    writer.submit(job(1))
    threading.Timer(0.2, gate.set).start()
    writer.submit(job(2))
    assert gate.is_set()
    assert writer.last in list_checkpoints(tmp_path)  # the second one may be there already
    writer.close()
    assert len(list_checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("call", ["check", "submit", "wait", "close"])
def test_a_failure_is_raised_by_the_next_call_and_once(tmp_path, broken, call):
    """Whichever comes next; with the checkpoint's name, its reason, and the error as its cause."""
    writer = Writer(tmp_path)
    writer.submit(job(1))
    writer._thread.join()
    broken.undo()
    with pytest.raises(RuntimeError, match=r"update-0000000001-.* was not .*output") as e:
        getattr(writer, call)(*([job(2)] if call == "submit" else []))
    assert e.value.__cause__.errno == errno.EIO
    writer.check()
    assert writer.wait() is None


def test_after_a_failure_the_next_save_works(tmp_path, broken):
    """A disk that was full for a while."""
    writer = Writer(tmp_path)
    writer.submit(job(1))
    with pytest.raises(RuntimeError, match="was not written"):
        writer.wait()
    broken.undo()
    writer.submit(job(2))
    writer.close()
    assert read_part(newest(tmp_path).checkpoint, "model")["x"][0] == 2


def test_without_a_thread_the_failure_is_raised_where_it_happens(tmp_path, broken):
    """background=False: submit has written it, or says why not."""
    writer = Writer(tmp_path, background=False)
    with pytest.raises(RuntimeError, match="was not written"):
        writer.submit(job(1))
    broken.undo()
    writer.submit(job(2))
    assert writer.last == newest(tmp_path).checkpoint.path


def test_close_waits_and_ends_it(tmp_path):
    """What was submitted is on disk; nothing more is taken; a second close is harmless."""
    writer = Writer(tmp_path)
    writer.submit(job(1))
    writer.close()
    writer.close()
    assert writer.last == newest(tmp_path).checkpoint.path
    with pytest.raises(RuntimeError, match="is closed"):
        writer.submit(job(2))


def test_a_program_that_just_ends_still_writes_its_last_checkpoint(tmp_path, gate):
    """Python waits at its end for threads that are not daemons."""
    writer = Writer(tmp_path)
    writer.submit(job(1))
    assert not writer._thread.daemon
    gate.set()
    writer.close()


@pytest.mark.parametrize("call", ["wait", "submit", "close"])
def test_a_wait_that_is_interrupted_does_not_end_the_write(tmp_path, gate, call):
    """Ctrl-C: the job's tensors are still being read, so the next save has to wait for it."""

    def interrupt(*_):
        raise KeyboardInterrupt

    writer = Writer(tmp_path)
    writer.submit(job(1))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            getattr(writer, call)(*([job(2)] if call == "submit" else []))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert writer.busy
    assert list_checkpoints(tmp_path) == []
    threading.Timer(0.2, gate.set).start()
    assert writer.wait() == list_checkpoints(tmp_path)[0]
    assert not writer.busy


def test_a_thread_that_cannot_be_started_is_an_error_and_the_next_one_is_tried(
    tmp_path, monkeypatch
):
    writer = Writer(tmp_path)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer.submit(job(1))
    assert not writer.busy
    assert writer.wait() is None
    writer.submit(job(2))
    assert writer.wait() == list_checkpoints(tmp_path)[0]


def test_a_finished_write_holds_no_tensor(tmp_path):
    """The copy's memory belongs to the caller again."""
    writer = Writer(tmp_path)
    mine = job(1)
    writer.submit(mine)
    writer.wait()
    assert writer._thread is None
    assert mine not in vars(writer).values()


def test_several_ranks_need_a_token_from_the_caller(tmp_path):
    """One each would never meet."""
    with pytest.raises(ValueError, match="2 ranks need one token"):
        Writer(tmp_path, world_size=2)


def test_building_a_writer_touches_nothing(tmp_path):
    """The directory is made by the first save, with its parents."""
    writer = Writer(tmp_path / "runs" / "a")
    assert os.listdir(tmp_path) == []
    writer.submit(job(1))
    writer.close()
    assert newest(tmp_path / "runs" / "a").checkpoint
