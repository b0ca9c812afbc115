"""accum beside the loops that it replaces: one command, one run, ratios of medians.

    python recipes/benchmark.py                      # 40 minutes on 2 cores
    python recipes/benchmark.py --only cost tokens --repeats 3
    python recipes/benchmark.py --only checkpoint    # saves and resumes
    python recipes/benchmark.py --device cuda        # all of it, autocast and host waits

Methods take turns in each repeat, so that a machine whose speed varies slows all of them alike.
Medians, the spread of the ratios, and ratios to the hand-written loop are printed, and written to
benchmark.json and benchmark.png in --output-dir. Packages that are not installed
(`pip install -e ".[benchmark]"`) are listed as absent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import benchmark_checkpoints
import torch
from benchmark_loops import (
    LOOPS,
    Loop,
    Settings,
    Tiny,
    build,
    peak_bytes,
    race,
    ratios,
    sgd,
    with_accum,
)
from torch import Tensor, nn

from accumplug import Accumulator


def cost(settings: Settings) -> dict[str, Any]:
    """Own cost per micro-batch on a 4x4 Linear: the time beyond the bare backward."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(4, 4, device=settings.device)
    loops = build(settings, Tiny().to(settings.device), lambda: x, 16)
    loops.pop("Transformers Trainer", None)  # its start dominates at this size
    loops.pop("accum inplace")
    seconds = race(settings, loops, 20, 16, 5 * settings.repeats)
    torch.set_num_threads(threads)
    bare = seconds["hand-written"]
    own = {
        name: statistics.median([1e6 * (a - b) for a, b in zip(times, bare, strict=True)])
        for name, times in seconds.items()
    }
    return {
        "bare_us": 1e6 * statistics.median(bare),
        "own_us": own,
        "accum_to_accelerate": own["accum"] / own["Accelerate"],
    }


def tokens(settings: Settings) -> dict[str, Any]:
    """Throughput at 64, 256 and 1024 tokens a micro-batch, 8 micro-batches a window."""
    model, rows = settings.model(), {}
    for length in (64,) if settings.smoke else (64, 256, 1024):
        loops = build(settings, model, lambda n=length: settings.token_ids(n), 8)
        rows[length] = ratios(race(settings, loops, 1, 8, settings.repeats), "hand-written")
    return rows


def curve(settings: Settings) -> dict[str, Any]:
    """Throughput against steps at 64 tokens a micro-batch, as a share of the limit.

    The limit is one forward and backward that adds to existing gradients, and nothing else.
    """
    model = settings.model()

    def bare(windows: int, steps: int) -> None:
        for _ in range(windows * steps):
            model(settings.token_ids(64))["loss"].backward()

    def accum(steps: int, **options: Any) -> Loop:
        loop = with_accum(settings, model, lambda: settings.token_ids(64), steps, **options)

        def run(windows: int) -> None:
            model.zero_grad()  # those of the limit
            loop(windows)

        return run

    rows = {}
    for steps in (1, 2) if settings.smoke else (1, 2, 4, 8, 16, 32, 64):
        loops = {
            "limit": lambda windows, n=steps: bare(windows, n),
            "accum": accum(steps),
            "accum inplace": accum(steps, inplace=True),
        }
        repeats = max(2, settings.repeats // 2)
        seconds = race(settings, loops, max(1, 8 // steps), steps, repeats)
        rows[steps] = {
            name: statistics.median([a / b for a, b in zip(seconds["limit"], own, strict=True)])
            for name, own in seconds.items()
        }
    return rows


def memory(settings: Settings) -> dict[str, Any]:
    """Peak memory in processes of their own: against the plain loop, and against steps."""
    cases = [(n, s) for n in ("hand-written", "accum", "accum inplace") for s in (2, 16)]
    return {f"{n}, {steps} steps": settings.in_child("peak", n, str(steps)) for n, steps in cases}


def peak(settings: Settings, name: str, steps: str) -> dict[str, float]:
    """In a child: MiB above the model's at the peak of three windows."""
    model = settings.model()
    loop = LOOPS[name](settings, model, lambda: settings.token_ids(64), int(steps))
    peak_bytes(settings.device, reset=True)
    before = peak_bytes(settings.device)
    loop(3)
    above = (peak_bytes(settings.device) - before) / 2**20
    largest = settings.vocabulary * settings.width * 4 / 2**20
    return {"mib_above_model": above, "largest_weight_mib": largest}


def sums(settings: Settings) -> dict[str, Any]:
    """A bf16 model summed in bf16 and in fp32: error against fp64, and time."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    model = layers.to(settings.device, torch.bfloat16)
    options = {"device": settings.device, "dtype": torch.bfloat16}
    inputs = [torch.randn(8, 512, **options) for _ in range(256)]
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for x in inputs:
        grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        for total, grad in zip(exact, grads, strict=True):
            total += grad.double() / len(inputs)
    rows = {}
    for name, dtype in (("bf16 sums", None), ("fp32 sums", torch.float32)):
        accum = Accumulator(len(inputs), optimizer=sgd(model), accumulate_dtype=dtype)
        found: list[Tensor] = []

        def keep(found: list[Tensor] = found) -> None:
            found.extend(p.grad.double() for p in model.parameters())

        accum.on_update(keep)
        start = time.perf_counter()
        for x in inputs:
            with accum(model):
                accum.backward(model(x).square().mean())
        settings.synchronize()
        error = [(a - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
        ms = 1e3 * (time.perf_counter() - start) / len(inputs)
        rows[name] = {"relative_error": float(max(error)), "ms": ms}
    return rows


def ranks(settings: Settings) -> dict[str, Any]:
    """Ranks (2, or one on each GPU): reductions and bytes of one window of 8 micro-batches."""
    count = max(2, torch.cuda.device_count()) if settings.device == "cuda" else 2
    command = ["--nproc_per_node", str(count), __file__, "--device", settings.device]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command]
    run += ["--child", "window_of_ranks"]
    out = subprocess.run(run, capture_output=True, text=True, timeout=300, check=True).stdout
    return json.loads(out.splitlines()[-1])


def window_of_ranks(settings: Settings) -> dict[str, Any] | None:
    """In each rank, with a DDP hook that counts; the first one returns the rows.

    Over NCCL where each rank has a GPU, else over gloo.
    """
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    rank, device = int(os.environ["LOCAL_RANK"]), torch.device("cpu")
    if settings.device == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows: dict[str, Any] = {"group": dist.get_backend()}
    for name in ("each micro-batch reduced", "accum"):
        ddp, seen = DistributedDataParallel(nn.Linear(512, 512).to(device)), []

        def hook(state, bucket):  # DDP accepts no other annotations than its own
            state.append(bucket.buffer().numel() * 4)
            return allreduce_hook(None, bucket)

        ddp.register_comm_hook(seen, hook)
        accum = Accumulator(8, optimizer=sgd(ddp))
        x = torch.randn(4, 512, device=device)
        for _ in range(8):
            if name == "accum":
                with accum(ddp):
                    accum.backward(ddp(x).square().mean())
            else:
                (ddp(x).square().mean() / 8).backward()
        rows[name] = {"reductions": len(seen), "mib": sum(seen) / 2**20}
        del ddp, accum
    dist.barrier()
    dist.destroy_process_group()
    return rows if rank == 0 else None


def mixed(settings: Settings) -> dict[str, Any]:
    """Autocast, fp16 with the scaler and bf16: the textbook loop against accum, 256 tokens."""
    return {
        "fp16": autocast_loops(settings, torch.float16),
        "bf16": autocast_loops(settings, torch.bfloat16),
    }


def autocast_loops(settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """In fp16 each loop has a scaler of its own; in bf16 it is switched off."""
    model, device = settings.model(), settings.device
    x = settings.token_ids(256)
    scalers = [
        torch.amp.GradScaler(device, 1024.0, enabled=dtype is torch.float16) for _ in range(3)
    ]

    def forward() -> Tensor:
        with torch.autocast(device, dtype):
            return model(x)["loss"]

    def textbook(windows: int, steps: int = 8) -> None:
        for index in range(windows * steps):
            scalers[0].scale(forward() / steps).backward()
            if index % steps == steps - 1:
                scalers[0].step(optimizer)
                scalers[0].update()
                optimizer.zero_grad()

    def ours(scaler: torch.amp.GradScaler, **options: Any) -> Loop:
        accum = Accumulator(8, optimizer=sgd(model), scaler=scaler, **options)

        def loop(windows: int) -> None:
            for _ in range(windows * 8):
                with accum(model):
                    accum.backward(forward())

        return loop

    optimizer = sgd(model)
    loops = {
        "hand-written": textbook,
        "accum": ours(scalers[1]),
        "accum inplace": ours(scalers[2], inplace=True),
    }
    return ratios(race(settings, loops, 1, 8, settings.repeats), "hand-written")


def waits(settings: Settings) -> dict[str, Any]:
    """Host waits in a window of 8 micro-batches, counted by torch's sync debug mode."""
    x = torch.randn(4, 4, device=settings.device)
    loops = build(settings, Tiny().to(settings.device), lambda: x, 8)
    found = {}
    for name in ("hand-written", "accum", "Accelerate"):
        loops[name](2)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            loops[name](1)
            torch.cuda.set_sync_debug_mode("default")
        found[name] = sum("synchronizing" in str(warning.message) for warning in seen)
    return found


SECTIONS: dict[str, Callable[[Settings], Any]] = {
    "cost": cost,
    "tokens": tokens,
    "curve": curve,
    "memory": memory,
    "sums": sums,
    "ranks": ranks,
    "checkpoint": benchmark_checkpoints.checkpoint,
    "mixed": mixed,
    "waits": waits,
}
ON_CUDA = {"mixed", "waits"}  # fp16 and bf16 are slow on CPUs, which have nothing to wait for
IN_CHILD: dict[str, Callable[..., Any]] = {
    "peak": peak,
    "window_of_ranks": window_of_ranks,
    "memory_of_a_save": benchmark_checkpoints.memory_of_a_save,
    "resume": benchmark_checkpoints.resume,
    "load_state": benchmark_checkpoints.load_state,
    "load_dcp": benchmark_checkpoints.load_dcp,
}


def table(results: dict[str, Any]) -> str:
    """Each number in a line of its own."""
    lines = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict) and value.keys() == {"median", "lowest", "highest"}:
            median, lowest, highest = (f"{number:.4g}" for number in value.values())
            lines.append(f"{path:<72} {median:>12} ({lowest} to {highest})")
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{path} {key}".strip(), inner)
        elif isinstance(value, float):
            lines.append(f"{path:<72} {value:>12.4g}")
        else:
            lines.append(f"{path:<72} {value!s:>12}")

    walk("", results)
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Throughput by tokens, and the share of the limit by steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    marks = ["o-", "s--", "^-", "v:", "d-.", "x--"]
    rows = results.get("tokens", {})
    names = list(next(iter(rows.values()), {}))
    for mark, name in zip(marks, names, strict=False):
        speeds = [rows[n][name]["speed"] for n in rows]
        left.plot([str(n) for n in rows], speeds, mark, label=name)
    left.set(xlabel="tokens in a micro-batch", ylabel="speed, hand-written loop = 1")
    rows = results.get("curve", {})
    for mark, name in zip(marks, next(iter(rows.values()), {}), strict=False):
        right.plot(list(rows), [rows[n][name] for n in rows], mark, label=name)
    if rows:
        right.set_xscale("log", base=2)
    right.set(xlabel="micro-batches in a window (steps)", ylabel="share of the limit")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="sections to run")
    parser.add_argument("--repeats", type=int, default=5, help="turns that each method takes")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    parser.add_argument("--smoke", action="store_true", help="a tiny model: runs, measures nothing")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "waits" in (options.only or ()) and options.device != "cuda":
        parser.error("waits are counted with --device cuda")
    settings = Settings(options.device, options.repeats, options.output_dir, options.smoke)
    warnings.filterwarnings("ignore")  # of the other packages
    if options.child:
        name, *values = options.child
        if (found := IN_CHILD[name](settings, *values)) is not None:
            print(json.dumps(found))
        return 0
    if settings.device == "cuda" and not torch.cuda.is_available():
        print("benchmark: --device cuda, but torch sees no GPU", file=sys.stderr)
        return 2
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    usual = [name for name in SECTIONS if name not in ON_CUDA or settings.device == "cuda"]
    for name in options.only or usual:
        print(f"# {name}: {SECTIONS[name].__doc__.splitlines()[0]}", flush=True)
        results[name] = SECTIONS[name](settings)
        print(table({name: results[name]}), flush=True)
    facts = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "absent": sorted(settings.absent),
    }
    for absent in facts["absent"]:
        print(f"absent: {absent}")
    written = settings.output_dir / "benchmark.json"
    written.write_text(json.dumps({"schema": "benchmark.v1", **facts, **results}, indent=1))
    draw(results, settings.output_dir / "benchmark.png")
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
