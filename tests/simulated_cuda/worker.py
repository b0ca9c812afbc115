"""What a process with simulated devices does: as the ranks of tests/ranks, with these groups."""

from __future__ import annotations

from multiprocessing.connection import Connection

from simulated_cuda import device


def serve(pipe: Connection, port: int, library: str) -> None:
    """Load the devices, then torch, and do what is told."""
    device.load(library)
    from ranks import harness

    from simulated_cuda import group  # noqa: F401  registers the groups

    harness.serve(pipe, port)
