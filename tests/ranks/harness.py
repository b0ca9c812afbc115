"""Runs a function on several ranks: processes on this machine, gloo on loopback.

Importing torch takes seconds, so the processes stay and each run gets a process group of its
own. After a run that hung or died all of them are killed, and the next run starts new ones.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankError(AssertionError):
    """A rank raised, died or did not end in time; the message says which, and where it stood."""


class Ranks:
    """As many processes as were asked for so far; `run` uses the first few of them.

    `places` is an empty directory, for where a rank stood when its time was over; `target` is
    what each process does, `serve` if it is not given.
    """

    def __init__(
        self, places: Path, target: Callable[[Connection, int], None] | None = None
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: dict[int, tuple[Any, Any]] = {}
        self._runs = 0
        self._places = places
        self._target = target or serve

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 30,
        backend: str | None = "gloo",
        **options: Any,
    ) -> Any:
        """Call `function(rank, *args, **options)` on `world` ranks; return what each has returned.

        `function` is one of a module's own. It finds a process group of `world` ranks, float64 as
        the default dtype, warnings as errors. What it returns is pickled. With `backend` None it
        finds no process group.
        """
        self._start(world)
        self._runs += 1
        places = [self._places / f"{self._runs}.{rank}" for rank in range(world)]
        for rank in range(world):
            call = partial(function, rank, *args, **options)
            job = (call, rank, world, self._runs, timeout, places[rank], backend)
            self._workers[rank][1].send(job)
        for rank in range(world):
            self._expect(rank, "started")
        answers = self._collect(world, timeout, places)
        wrong = [f"rank {r}: {answers[r][1]}" for r in range(world) if not answers[r][0]]
        if wrong:
            raise RankError("\n".join(wrong))
        return [pickle.loads(answers[rank][1]) for rank in range(world)]

    def stop(self) -> None:
        """End all processes."""
        for rank in list(self._workers):
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        process, pipe = self._workers.pop(rank)
        process.kill()
        process.join()
        pipe.close()

    def _start(self, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in set(range(world)) - set(self._workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=self._target, args=(theirs, self._store.port), daemon=True
            )
            process.start()
            theirs.close()
            self._workers[rank] = process, ours
        for rank in range(world):
            self._expect(rank, "ready")

    def _expect(self, rank: int, word: str) -> None:
        pipe = self._workers[rank][1]
        assert pipe.poll(120), f"rank {rank} is not {word} after 120 s"
        assert pipe.recv() == word

    def _collect(self, world: int, timeout: float, places: list[Path]) -> dict[int, Any]:
        pipes = {self._workers[rank][1]: rank for rank in range(world)}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout + 2
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                rank = pipes.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    self._kill(rank)
                    answers[rank] = False, "the process died"
        for rank in pipes.values():
            self._kill(rank)
            where = places[rank].read_text() if places[rank].exists() else ""
            answers[rank] = False, f"did not end within {timeout} s\n{where}"
        return answers


def serve(pipe: Connection, port: int) -> None:
    """What each process does: run what it is told, with a new process group each time."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else Accelerate warns that it sets it
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        pipe.send("ready")
        call, rank, world, run, timeout, place, backend = pipe.recv()
        pipe.send("started")
        with open(place, "w") as file:
            faulthandler.dump_traceback_later(timeout, file=file)
            answer = _answer(call, rank, world, dist.PrefixStore(str(run), store), backend)
            faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


def _answer(
    call: Callable[[], Any], rank: int, world: int, store: Any, backend: str | None
) -> tuple[bool, Any]:
    if backend is not None:
        limit = timedelta(seconds=600)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        store.set(f"connected/{rank}", "")  # who ends at once must not leave another connecting
        store.wait([f"connected/{other}" for other in range(world)], limit)
    gc.freeze()  # torch's own objects: collecting them takes most of a second
    try:
        assert backend is None or dist.get_world_size() == world
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer = True, pickle.dumps(call())
    except BaseException as error:
        answer = False, "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)
    gc.collect()  # a DistributedDataParallel that outlives its process group hangs
    if backend is not None:
        dist.destroy_process_group()
    return answer
