"""What a process with simulated devices does: as the ranks of tests/ranks, with these groups.

torch is imported by no line at the top: the devices come first.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from simulated_cuda import device


def serve(pipe: Connection, port: int, library: str) -> None:
    """Load the devices, then torch, and do what is told."""
    faulthandler.enable()  # a process that dies says where
    device.load(library)
    from ranks import harness

    from simulated_cuda import group  # noqa: F401  registers the groups

    harness.serve(pipe, port)


def on_own_device(rank: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a rank's function with its device as torch's default; what it returns is moved back."""
    import torch
    from torch.utils._pytree import tree_map_only

    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
    try:
        result = function(rank, *args, **options)
        with device.silence():
            return tree_map_only(torch.Tensor, lambda t: t.cpu(), result)
    finally:
        torch.set_default_device(None)
