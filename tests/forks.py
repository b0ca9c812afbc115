"""New processes that cost no imports: forked from one that has imported, and done nothing else."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

TESTS = Path(__file__).parent
PLACES = [str(path) for path in (TESTS, TESTS / "checkpoint", TESTS.parent / "recipes")]
IMPORTED = ["pytest", "matplotlib.backends.backend_agg", "train", "train_ddp", "training"]
IMPORTED += ["torch._dynamo"]  # by the first optimizer, in a second


def fork(function: Callable[..., Any], *args: Any, **options: Any) -> BaseProcess:
    """Call `function`, which is one of a module's own, in a new process with one thread."""
    context = multiprocessing.get_context("forkserver")
    path = os.pathsep.join([*PLACES, *sys.path])
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()  # Python 3.11 doesn't tell it sys.path
    process = context.Process(target=run, args=(function, *args), kwargs=options)
    process.start()
    return process


def run(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """What the new process does."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of its own children, as by default
    sys.path[:0] = [place for place in PLACES if place not in sys.path]
    function(*args, **options)
