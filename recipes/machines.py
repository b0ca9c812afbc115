"""Ranks on several machines that train on CPUs, as `accelerate launch` starts them."""

from __future__ import annotations

import os

import psutil
from accelerate.commands.launch import launch_command_parser


def learn_rank_from_launcher() -> None:
    """Set RANK and WORLD_SIZE if `accelerate launch --num_machines N` has kept them to itself.

    On GPUs it starts torchrun, which tells each process its rank. On CPUs accelerate 1.15 starts
    one bare process a machine, which is told where rank 0 is (MASTER_ADDR) but not which rank it
    is: each would train alone and never say so. The launcher is this process's
    parent, and its command line has the numbers.

    Raises:
        ValueError: it was asked for several processes a machine, which it doesn't start.
    """
    if "RANK" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    parent = psutil.Process(os.getppid()).cmdline()
    if "launch" not in parent:
        return
    launch = launch_command_parser().parse_args(parent[parent.index("launch") + 1 :])
    machines = launch.num_machines or 1
    processes = launch.num_processes or machines
    if processes != machines or (machines > 1 and launch.machine_rank is None):
        raise ValueError(
            f"accelerate launch starts one process a machine on CPUs, but "
            f"--num_machines is {machines}, --num_processes {processes} and --machine_rank "
            f"{launch.machine_rank}; use `torchrun --nproc_per_node {processes}`"
        )
    os.environ.update(RANK=str(launch.machine_rank), WORLD_SIZE=str(machines))
