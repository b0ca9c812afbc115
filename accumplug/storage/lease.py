"""One run writes into a directory at a time: a file in it names the process that does.

A dead owner's lease is taken over at once on its own host, where a process can be looked for.
From another host it is taken over when the file has not been touched for `EXPIRES` seconds: its
owner touches it every `TOUCH` seconds, in a thread, whatever the loop does meanwhile. Times are
those of the file system, so that the hosts' clocks need not agree. Reading needs no lease.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from pathlib import Path
from typing import Any

from accumplug.errors import CheckpointError, LeaseHeldError
from accumplug.storage.json import dump_json, parse_json

LEASE = ".accumplug-lease"
TOUCH = 10.0
EXPIRES = 120.0


class Lease:
    """The right to write into `directory`, until `release` or the end of the process.

    Raises:
        LeaseHeldError: another run has it, and lives; the message names its host and process.
    """

    def __init__(self, directory: Path, token: str) -> None:
        self.path = directory / LEASE
        self._owner = {"token": token, "host": _host(), **_process(os.getpid())}
        self._data = dump_json(self._owner)
        self._take()
        self._ended = threading.Event()
        thread = threading.Thread(
            target=_keep_touched, args=(self.path, self._ended), name="lease", daemon=True
        )
        thread.start()
        weakref.finalize(self, self._ended.set)

    def check(self) -> None:
        """Raise LeaseHeldError if another run has taken it over: this one was taken for dead."""
        data = _read(self.path)
        if data is None:  # somebody has cleared the directory
            self._take()
        elif data != self._data:
            raise LeaseHeldError(f"{self.path.parent}: this run has lost it to {_name(data)}")

    def release(self) -> None:
        """Let another run have the directory."""
        self._ended.set()
        if os.getpid() == self._owner["pid"] and _read(self.path) == self._data:
            self.path.unlink(missing_ok=True)

    def _take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            self._remove_dead()

    def _create(self) -> bool:
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(file, "wb") as lease:
            lease.write(self._data)
        return True

    def _remove_dead(self) -> None:
        data = _read(self.path)
        if data is None:
            return
        if not self._is_dead(data):
            raise LeaseHeldError(
                f"{self.path.parent} belongs to another run that lives, {_name(data)}; end that "
                f"run or give another directory. (Reading is always possible: inspect, resume. "
                f"The lease of a dead process on another host expires after {EXPIRES:g} s)"
            )
        aside = self.path.with_name(f"{LEASE}-{self._owner['token']}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return  # a third run was quicker
        if _read(aside) != data:
            aside.rename(self.path)  # it was, and this is its lease
        else:
            aside.unlink()

    def _is_dead(self, data: bytes) -> bool:
        owner = _parse(data, self.path)
        if owner.get("host") == self._owner["host"] and type(owner.get("pid")) is int:
            pid = owner["pid"]
            return pid == os.getpid() or _process(pid) != {"pid": pid, "start": owner.get("start")}
        probe = self.path.with_name(f"{LEASE}-{self._owner['token']}")
        probe.touch()
        try:
            return probe.stat().st_mtime - self.path.stat().st_mtime > EXPIRES
        except FileNotFoundError:
            return False  # it was released just now
        finally:
            probe.unlink()


def _keep_touched(path: Path, ended: threading.Event) -> None:
    while not ended.wait(TOUCH):
        try:
            os.utime(path)
        except OSError:
            pass  # a disk that fails for a while; `check` tells if the lease is lost


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        owner = parse_json(data, path)
    except CheckpointError:
        return {}  # not yet written, or damaged: judged by its age
    return owner if isinstance(owner, dict) else {}


def _name(data: bytes) -> str:
    owner = _parse(data, Path(LEASE))
    return f"process {owner.get('pid')!r:.20} on {str(owner.get('host')).split(' ')[0]!r:.80}"


def _host() -> str:
    """This machine, since its last start, and the processes that are visible on it."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # not Linux
        pass
    return " ".join(parts)


def _process(pid: int) -> dict[str, Any]:
    """A process by its number and its start, as numbers are given anew; empty if there is none."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return {}
    except PermissionError:
        pass
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {"pid": pid, "start": None}
    return {} if status[0] in "ZX" else {"pid": pid, "start": int(status[19])}
