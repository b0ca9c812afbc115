"""Ranks that end: whoever waits for one stops waiting, says for whom, and can end as well."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accumplug import Accumulator, Checkpointer

from .checkpointing import Uneven
from .harness import Ranks

TIMEOUT = 2.0


def run_without_rank_1(
    rank: int, directory: Path, sizes: tuple[int, ...], act: str
) -> tuple[str, float]:
    """Rank 1 is gone after its first micro-batch; what rank 0 is told, and after how long."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    replica = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accum = Accumulator(3, optimizer=optimizer, process_group=group)
    loader = Uneven(rank, sizes)
    options: dict[str, Any] = {"signals": (signal.SIGUSR1,)} if act == "signal" else {"every": 1}
    checkpoint = Checkpointer(directory, accum, model=replica, loader=loader, **options)
    start = time.monotonic()
    try:
        for x, y in accum.batches(loader):
            with accum(replica):
                accum.backward((replica(x) - y).square().mean())
            if rank == 1:
                return "", 0.0  # as if it were dead
            start = time.monotonic()
            if act == "save":
                checkpoint.save()
            if act == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
    except RuntimeError as error:
        told = str(error), time.monotonic() - start
        with pytest.raises(ValueError, match="the loop's own"), checkpoint:
            raise ValueError("the loop's own") from None  # it can leave its block at once
        return told
    finally:
        checkpoint._policy.signals.restore()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("act", ["wait", "save", "signal"])
def test_a_dead_rank_is_named_when_the_groups_timeout_is_over(
    ranks: Ranks, act: str, tmp_path: Path
) -> None:
    """Rank 0 waits for its saves, or for its part of one, or to agree on a signal: not for ever."""
    sizes = (1, 5) if act != "save" else (5, 5)
    told, seconds = ranks.run(2, run_without_rank_1, tmp_path, sizes, act)[0]
    assert "rank 1" in told or "ranks [1]" in told
    assert f"{TIMEOUT:g} s" in told
    assert seconds < 4 * TIMEOUT


SCRIPT = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from accumplug import Accumulator, Checkpointer
from accumplug.checkpoint.coordination import RankStore

rank, port, directory, slow = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
    timeout=timedelta(seconds=60),
)
model = nn.Linear(2, 1)
replica = DistributedDataParallel(model)
accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
checkpoint = Checkpointer(directory, accum, model=replica)
for _ in range(2):
    with accum(replica):
        accum.backward(replica(torch.ones(1, 2)).sum())
get = RankStore.get
def late(store, key, rank):
    time.sleep(1.0)
    return get(store, key, rank)
if rank == 1 and slow == "save":
    RankStore.get = late
checkpoint.save()
if rank == 1 and slow == "close":
    time.sleep(1.0)
    checkpoint._store.has("anything")
checkpoint.close()
del replica, model
"""


@pytest.mark.parametrize("slow", ["save", "close"])
def test_rank_0_which_serves_the_store_does_not_end_before_the_others(
    slow: str, tmp_path: Path
) -> None:
    """Else they die of "Connection reset by peer", and the job counts as failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port), str(tmp_path), slow],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    for process in processes:
        _, text = process.communicate(timeout=60)
        assert process.returncode == 0, text


ALONE = """
import sys, torch
from pathlib import Path
from accumplug.storage import rank_reports
from accumplug.storage.codec import encode
from accumplug.storage.commit import Job
from accumplug.storage.writer import Writer

rank_reports.GRACE = 1.0
writer = Writer(sys.argv[1], world_size=2, token="t", timeout=600.0)
writer.submit(Job({"update": 1, "micro_batch": 1}, {"model": encode({"x": torch.ones(2)})}))
"""


def test_a_process_that_waits_for_a_dead_ranks_files_can_end(tmp_path: Path) -> None:
    """The thread that writes is finished when a program ends, but not for another rank's sake."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], check=True, timeout=60)
    assert time.monotonic() - start < 45
