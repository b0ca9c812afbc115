"""Ranks on several machines that train on CPUs, as `accelerate launch` starts them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import get_cpu_distributed_information


def learn_rank_from_launcher() -> None:
    """Set RANK and WORLD_SIZE if `accelerate launch --num_machines N` has kept them to itself.

    On GPUs it starts torchrun, which tells each process its rank. On CPUs accelerate 1.15 starts
    one bare process a machine, which is told where rank 0 is (MASTER_ADDR) but not which rank it
    is: each would train alone and never say so. The launcher is this process's parent, and its
    command line has the numbers.

    Raises:
        ValueError: it was asked for several processes a machine, which it doesn't start, or for
            several machines without a --machine_rank.
    """
    by_accelerate = {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys()
    if not by_accelerate or get_cpu_distributed_information().world_size > 1:
        return
    machines, processes, rank = launcher_numbers(psutil.Process(os.getppid()).cmdline())
    if machines == processes == 1:
        return
    if machines != processes or rank is None:
        raise ValueError(
            f"accelerate launch starts one process a machine on CPUs, and was asked for "
            f"--num_machines {machines}, --num_processes {processes}, --machine_rank {rank}; "
            f"use torchrun --nproc_per_node {processes}"
        )
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(machines))


def launcher_numbers(command: Sequence[str]) -> tuple[int, int, int | None]:
    """Machines, processes and this machine's rank of an `accelerate launch` command line, or of
    the configuration that it reads."""
    names = ("launch", "accelerate-launch", "accelerate.commands.launch")
    places = [i for i, word in enumerate(command) if os.path.basename(word) in names]
    if not places:
        return 1, 1, None
    launch = launch_command_parser().parse_args(command[places[0] + 1 :])
    given = {k: v for k, v in vars(launch).items() if v is not None}
    if launch.config_file or (os.path.isfile(default_config_file) and not launch.cpu):
        given = {**vars(load_config_from_file(launch.config_file)), **given}
    machines = given.get("num_machines", 1)
    return machines, given.get("num_processes", machines), given.get("machine_rank")
