"""Compiles the simulated CUDA device."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

SOURCE = Path(__file__).with_name("device.cpp")


def compiler() -> str | None:
    """The C++ compiler: $CXX, or g++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build(folder: Path) -> Path:
    """Compile the library into `folder`, unless it is there already. Takes half a minute."""
    folder.mkdir(parents=True, exist_ok=True)
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"simulated_cuda_{version}.so"
    if library.exists():
        return library
    torch_libraries = Path(torch.__file__).with_name("lib")
    new = library.with_suffix(f".{os.getpid()}")
    command = [str(compiler()), "-std=c++20", "-O1", "-w", "-fPIC", "-shared"]
    command += [f"-I{path}" for path in include_paths()]
    command += [
        str(SOURCE),
        "-o",
        str(new),
        f"-L{torch_libraries}",
        f"-Wl,-rpath,{torch_libraries}",
    ]
    command += ["-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    new.rename(library)
    return library
