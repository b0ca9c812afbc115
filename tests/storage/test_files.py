"""Files are written past the page cache, where the file system lets them, and are the same."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from accumplug.storage.files import BLOCK, checksum, read_file, verify_file, write_file

DIRECT = getattr(os, "O_DIRECT", 0)
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4096]


def pieces(size: int) -> Iterator[memoryview]:
    """Random bytes in pieces that start and end anywhere."""
    data = memoryview(os.urandom(size))
    for start in range(0, size, 3_000_001):
        yield data[start : start + 3_000_001]


@pytest.fixture
def writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The bytes of each write, and whether it went past the page cache."""
    if not DIRECT or not os.major(tmp_path.stat().st_dev):
        pytest.skip("no O_DIRECT, or no disk below the temporary directory")
    write, seen = os.write, []

    def recorded(file: int, data: memoryview) -> int:
        done = write(file, data)
        seen.append((done, bool(fcntl.fcntl(file, fcntl.F_GETFL) & DIRECT)))
        return done

    monkeypatch.setattr(os, "write", recorded)
    return seen


def assert_is(path: Path, data: bytes) -> None:
    assert path.read_bytes() == data


@pytest.mark.parametrize("size", SIZES)
def test_whole_blocks_go_past_the_page_cache(
    size: int, tmp_path: Path, writes: list[tuple[int, bool]]
) -> None:
    given = list(pieces(size))
    entry = write_file(tmp_path / "f", given)
    assert_is(tmp_path / "f", b"".join(given))
    assert entry.size == size
    assert read_file(tmp_path / "f", entry) == b"".join(given)
    rest = [(size % BLOCK, False)] if size % BLOCK else []
    assert writes == [(BLOCK, True)] * (size // BLOCK) + rest


def test_a_file_system_without_direct_writes_gets_the_same_file(
    tmp_path: Path, writes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may refuse them when they are asked for, or at the first write."""
    given, call, recorded = list(pieces(3 * BLOCK + 5)), fcntl.fcntl, os.write

    def refuse(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(file, command, flags)

    def refuse_late(file: int, data: memoryview) -> int:
        if call(file, fcntl.F_GETFL) & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return recorded(file, data)

    with monkeypatch.context() as context:
        context.setattr(fcntl, "fcntl", refuse)
        early = write_file(tmp_path / "early", given)
    monkeypatch.setattr(os, "write", refuse_late)
    late = write_file(tmp_path / "late", given)
    assert early == late
    assert_is(tmp_path / "early", b"".join(given))
    assert_is(tmp_path / "late", b"".join(given))
    assert writes == 2 * [*[(BLOCK, False)] * 3, (5, False)]


def test_a_file_system_that_has_no_device_is_written_through_the_page_cache(
    tmp_path: Path, writes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "major", lambda device: 0)
    write_file(tmp_path / "f", pieces(BLOCK + 1))
    assert writes == [(BLOCK, False), (1, False)]


@pytest.mark.parametrize("taken", [1, 4096, 5000, BLOCK - 1])
def test_a_short_write_past_the_page_cache_is_continued(
    taken: int, tmp_path: Path, writes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the block may start anywhere in a page."""
    recorded, shortened = os.write, []

    def short(file: int, data: memoryview) -> int:
        if len(data) == BLOCK and not shortened:
            shortened.append(taken)
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~DIRECT)
            done = os.pwrite(file, data[:taken], 0)
            os.lseek(file, done, os.SEEK_SET)
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
            return done
        return recorded(file, data)

    monkeypatch.setattr(os, "write", short)
    given = list(pieces(3 * BLOCK + 5))
    entry = write_file(tmp_path / "f", given)
    assert shortened
    assert_is(tmp_path / "f", b"".join(given))
    verify_file(tmp_path / "f", entry)


def test_another_error_of_a_direct_write_is_not_tried_again(
    tmp_path: Path, writes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int, data: memoryview) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_file(tmp_path / "f", pieces(BLOCK))


def test_the_checksums_are_those_of_the_blocks(tmp_path: Path) -> None:
    given = list(pieces(2 * BLOCK + 77))
    data = memoryview(b"".join(given))
    sums = "".join(checksum(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))
    assert write_file(tmp_path / "f", given).sums == sums
