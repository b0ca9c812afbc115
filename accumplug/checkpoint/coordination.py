"""How ranks agree on where they save, without a collective: through the process group's store.

Between two sync points (a window that closes, a pass that begins) nothing of one rank reaches
another. So any positions of the ranks between the same two sync points form a consistent
checkpoint, and two rules are enough:

* All ranks have made the same number of saves when they reach a sync point. A rank whose data end
  early cannot know how many saves the others make in the window, so it waits for them
  (`SaveCounts`).
* A save that one rank asks for (a signal, a clock) is made by all of them at one micro-batch: they
  wait for each other at the end of a block, and the furthest rank sets the target
  (`SharedRequest`). It sets the number of that save as well: a rank that runs no more micro-batches
  before the sync point first makes the saves that it lacks. A rank stops waiting after a short
  time, since another rank may be in a collective that needs this one, and tries again after the
  next block.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accumplug.parallel.group import DataParallelGroup, timeout_of
from accumplug.parallel.private import require

PURPOSE = "what ranks tell each other about checkpoints"
LOOK = 0.05  # seconds between two looks at the store for what others ask; one costs about 0.1 ms
LEAVING = 60.0  # seconds that rank 0 waits at the end for the others to end as well
PATIENCE = 0.5  # seconds that a rank waits for the others at the end of a block, and 2 blocks more


class RankStore:
    """A part of the process group's store for one Checkpointer on all its ranks."""

    def __init__(self, ranks: DataParallelGroup) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        # torch 2.13: there is no public name for the store of the default group
        require(dist.distributed_c10d, ["_get_default_store"], PURPOSE)
        store = dist.distributed_c10d._get_default_store()
        members = dist.get_process_group_ranks(ranks.group)
        name = f"accumplug/{zlib.crc32(f'{members}'.encode()):08x}"
        built = store.add(f"{name}/{self.rank}", 1)  # the same on all ranks
        self.timeout = _timeout_of(ranks.group)
        """Seconds that a rank waits for another one, whatever for."""
        self._shared = 0
        self._left = False
        self._store = dist.distributed_c10d.PrefixStore(f"{name}/{built}", store)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str, rank: int) -> str:
        """The value of `key`, once `rank` has set it.

        Raises:
            RuntimeError: it has not, within the group's timeout.
        """
        self.wait_until(lambda: [] if self.has(key) else [rank])
        return str(self._store.get(key).decode())

    def wait_until(self, missing: Callable[[], list[int]], timeout: float | None = None) -> None:
        """Wait until `missing`, the ranks that this one waits for, is empty.

        Raises:
            RuntimeError: it is not, within the group's timeout.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline, pause = time.monotonic() + timeout, 0.001
        while ranks := missing():
            if time.monotonic() > deadline:
                raise self.gave_up(ranks, timeout)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def gave_up(self, ranks: list[int], timeout: float) -> RuntimeError:
        """The error of a rank that has waited long enough."""
        names = ", ".join(map(str, ranks))
        return RuntimeError(
            f"rank {self.rank} of {self.size} waited {timeout:g} s for rank {names} at a "
            f"checkpoint; it has ended or hangs. A longer wait is a longer timeout of the process "
            f"group (init_process_group(timeout=...))"
        )

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def add(self, key: str) -> int:
        return int(self._store.add(key, 1))

    def first(self, key: str, value: str) -> str:
        """`value` if nobody has set `key` before, else what was set."""
        return str(self._store.compare_set(key, "", value).decode())

    def share(self, value: str) -> str:
        """The `value` of rank 0. All ranks call it in the same order."""
        self._shared += 1
        key = f"shared/{self._shared}"
        if self.rank == 0:
            self.set(key, value)
            others = range(1, self.size)
            # Rank 0 serves the store: it must not end before the others have read.
            self.wait_until(lambda: [r for r in others if not self.has(f"{key}/{r}")])
        else:
            value = self.get(key, 0)
            self.set(f"{key}/{self.rank}", "read")
        return value

    def share_all(self, value: str) -> list[str]:
        """The `value` of each rank. All ranks call it in the same order.

        Rank 0 returns last, as it serves the store and may be about to end.
        """
        self._shared += 1
        key = f"shared/{self._shared}"
        self.set(f"{key}/{self.rank}", value)
        values = [self.get(f"{key}/{rank}", rank) for rank in range(self.size)]
        self.set(f"{key}/{self.rank}/read", "read")
        if self.rank == 0:
            others = range(1, self.size)
            self.wait_until(lambda: [r for r in others if not self.has(f"{key}/{r}/read")])
        return values

    def leave(self) -> None:
        """This rank uses the store no more. Rank 0, which serves it, waits for the others to leave.

        Raises:
            RuntimeError: on rank 0: some have not left, after a while.
        """
        if self._left:
            return
        self._left = True
        if self.rank:
            try:
                self.set(f"left/{self.rank}", "left")
            except RuntimeError:  # rank 0 has ended
                return
        else:
            others = range(1, self.size)
            self.wait_until(
                lambda: [r for r in others if not self.has(f"left/{r}")],
                min(self.timeout, LEAVING),
            )

    def compare(self, options: dict[str, Any]) -> None:
        """Raise ValueError, on all ranks, for an option that is not the same on all of them."""
        self.set(f"options/{self.rank}", json.dumps(options, sort_keys=True))
        first = json.loads(self.get("options/0", 0))
        for rank in range(1, self.size):
            other = json.loads(self.get(f"options/{rank}", rank))
            for name in first:
                if first[name] != other[name]:
                    raise ValueError(
                        f"{name} is {first[name]!r} on rank 0 and {other[name]!r} on rank {rank}; "
                        f"give all ranks the same"
                    )


def _timeout_of(group: Any) -> float:
    """Seconds after which a collective of `group` fails."""
    group = dist.group.WORLD if group is None else group
    cpu = "cpu" in dist.get_backend_config(group)
    device = torch.device("cpu") if cpu else torch.accelerator.current_accelerator()
    return timeout_of(group, device).total_seconds()


class SaveCounts:
    """Makes all ranks reach a sync point with the same number of saves."""

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._passed = 0
        self.saves = 0
        """Saves of this rank so far."""
        self._arrived = False
        self._publish()

    def saved(self) -> None:
        """This rank has made one more save."""
        self.saves += 1
        self._publish()

    def reach_sync_point(self) -> None:
        """A sync point comes next; until then this rank saves only in `catch_up`."""
        self._arrived = True
        self._publish()

    def catch_up(self, save: Callable[[], object], meanwhile: Callable[[], bool]) -> bool:
        """Make the saves that other ranks make while this one waits for them at a sync point.

        Returns whether all ranks have reached it; False as soon as `meanwhile()` is true.
        """
        others = [rank for rank in range(self._store.size) if rank != self._store.rank]
        before: list[tuple[int, int]] = []
        deadline = 0.0
        while others:
            told = [self._read(rank) for rank in others]
            if told != before:
                before, deadline = told, time.monotonic() + self._store.timeout
            if max(saves for _, saves in told) > self.saves:
                save()
                continue
            others = [r for r, (met, _) in zip(others, told, strict=True) if met <= self._passed]
            if others and meanwhile():
                return False
            if others and time.monotonic() > deadline:
                raise self._store.gave_up(others, self._store.timeout)
            if others:
                time.sleep(0.002)
        return True

    def pass_sync_point(self) -> None:
        """The ranks are at the sync point."""
        self._passed += 1
        self._arrived = False

    def _publish(self) -> None:
        met = self._passed + self._arrived
        self._store.set(f"saves/{self._store.rank}", f"{met} {self.saves}")

    def _read(self, rank: int) -> tuple[int, int]:
        met, saves = self._store.get(f"saves/{rank}", rank).split()
        return int(met), int(saves)


class SharedRequest:
    """A request of one rank that all of them carry out at one micro-batch of the same window."""

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._done = 0
        self._round = 0
        self.target: int | None = None
        """The micro-batch, counted from the last sync point, that the ranks have agreed on."""
        self.saves = 0
        """Saves that all ranks have made before that."""
        self._looked = 0.0
        self._left = time.monotonic()
        self._block = 0.0
        self.known: str | None = None
        """The request, as soon as this rank knows of it."""

    def ask(self, what: str) -> None:
        """Ask for `what`; another request that is open is carried out first."""
        self.known = self._store.first(f"ask/{self._done}", what)

    def is_time(self, index: int, saves: int, meets: bool) -> bool:
        """Whether `known` is to be carried out now.

        `index`: micro-batches of this rank since the last sync point. `saves`: its saves so far.
        `meets`: a sync point comes next, so it is carried out here at the latest.
        """
        now = time.monotonic()
        self._block, self._left = now - self._left, now
        if self.known is None and (meets or now - self._looked >= LOOK):
            self._looked = now
            if self._store.has(f"ask/{self._done}"):
                self.known = self._store.get(f"ask/{self._done}", 0)
        if self.known is None:
            return False
        if self.target is None:
            self._agree_on_target(index, saves)
            self._left = time.monotonic()
        return self.target is not None and (meets or index >= self.target)

    def done(self) -> None:
        """It has been carried out."""
        self._done += 1
        self._round, self.target, self.known = 0, None, None

    def _agree_on_target(self, index: int, saves: int) -> None:
        """Wait for the other ranks; if all are here, set the target."""
        deadline = time.monotonic() + PATIENCE + min(2 * self._block, 30.0)
        while True:
            at = f"{self._done}/{self._round}"
            if not self._store.has(f"verdict/{at}"):
                break
            if self._store.get(f"verdict/{at}", 0) == "all":
                break
            self._round += 1  # a rank stopped waiting before this one came
        self._store.set(f"place/{at}/{self._store.rank}", f"{index} {saves}")
        verdict = ""
        if self._store.add(f"count/{at}") == self._store.size:
            verdict = self._store.first(f"verdict/{at}", "all")
        while not verdict:
            if self._store.has(f"verdict/{at}"):
                verdict = self._store.get(f"verdict/{at}", 0)
            elif time.monotonic() > deadline:
                verdict = self._store.first(f"verdict/{at}", "not all")
            else:
                time.sleep(0.002)
        if verdict == "all":
            places = [self._store.get(f"place/{at}/{r}", r) for r in range(self._store.size)]
            self.target, self.saves = (
                max(numbers) for numbers in zip(*(map(int, p.split()) for p in places), strict=True)
            )
        else:
            self._round += 1
