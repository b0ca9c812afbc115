"""accum beside the loops it replaces: one command, one run, ratios of medians.

    python recipes/benchmark.py                 # 40 minutes on 2 cores
    python recipes/benchmark.py --sections cost tokens --repeats 3
    python recipes/benchmark.py --device cuda   # the same, and fp16 with the scaler

Methods take turns in each repeat, so that a machine whose speed drifts slows all of them alike;
what is printed are medians, the spread of the ratios, and ratios to the hand-written loop.
Writes benchmark.json and benchmark.png into --output-dir. Peers that are not installed
(`pip install -e ".[benchmark]"`) are named as absent.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from accumplug import Accumulator, Checkpointer

VOCABULARY, WIDTH, LAYERS = 50257, 768, 2  # 53 M parameters, the head tied to the embedding
Loop = Callable[[int], None]


class Block(nn.Module):
    """GPT-2's block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.attended = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.project(self.first(x)).view(b, t, 3, 12, WIDTH // 12).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Language(nn.Module):
    """GPT-2-like, loss inside, so that every loop can run it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten())}


class Tiny(nn.Module):
    """A 4x4 Linear: nothing but what the loop itself costs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, ids: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": self.linear(ids).square().mean()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def by_hand(model: nn.Module, make: Callable[[], Tensor], steps: int) -> Loop:
    optimizer = sgd(model)

    def loop(windows: int) -> None:
        for index in range(windows * steps):
            (model(make())["loss"] / steps).backward()
            if index % steps == steps - 1:
                optimizer.step()
                optimizer.zero_grad()

    return loop


def with_accum(model: nn.Module, make: Callable[[], Tensor], steps: int, **options: Any) -> Loop:
    accum = Accumulator(steps, optimizer=sgd(model), **options)

    def loop(windows: int) -> None:
        for _ in range(windows * steps):
            with accum(model):
                accum.backward(model(make())["loss"])

    return loop


def with_accelerate(model: nn.Module, make: Callable[[], Tensor], steps: int) -> Loop:
    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=DEVICE == "cpu")
    prepared, optimizer = accelerator.prepare(model, sgd(model))

    def loop(windows: int) -> None:
        for _ in range(windows * steps):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(make())["loss"])
                optimizer.step()  # as its documentation has it: nothing, until gradients are synced
                optimizer.zero_grad()

    return loop


def with_fabric(model: nn.Module, make: Callable[[], Tensor], steps: int) -> Loop:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=DEVICE, devices=1)
    wrapped, optimizer = fabric.setup(model, sgd(model))

    def loop(windows: int) -> None:
        for index in range(windows * steps):
            closes = index % steps == steps - 1
            with fabric.no_backward_sync(wrapped, enabled=not closes):
                fabric.backward(wrapped(make())["loss"] / steps)
            if closes:
                optimizer.step()
                optimizer.zero_grad()

    return loop


def with_trainer(model: nn.Module, make: Callable[[], Tensor], steps: int) -> Loop:
    from transformers import Trainer, TrainingArguments

    def loop(windows: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=windows,
                gradient_accumulation_steps=steps,
                per_device_train_batch_size=1,
                learning_rate=0.0,
                max_grad_norm=0.0,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=DEVICE == "cpu",
            )
            data = [{"ids": make()[0]} for _ in range(windows * steps)]
            Trainer(model, arguments, train_dataset=data, optimizers=(sgd(model), None)).train()

    return loop


LOOPS: dict[str, Callable[..., Loop]] = {
    "hand-written": by_hand,
    "accum": with_accum,
    "accum inplace": lambda *a: with_accum(*a, inplace=True),
    "Accelerate": with_accelerate,
    "Lightning Fabric": with_fabric,
    "Transformers Trainer": with_trainer,
}


def race(loops: dict[str, Loop], windows: int, steps: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per micro-batch of each loop in each repeat; the loops take turns."""
    for loop in loops.values():
        loop(1)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, loop in loops.items():
            synchronize()
            start = time.perf_counter()
            loop(windows)
            synchronize()
            seconds[name].append((time.perf_counter() - start) / windows / steps)
    return seconds


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def build(model: nn.Module, make: Callable[[], Tensor], steps: int) -> dict[str, Loop]:
    """All loops whose library is installed, over one model."""
    found = {}
    for name, loop in LOOPS.items():
        try:
            found[name] = loop(model, make, steps)
        except ImportError as error:
            ABSENT.add(f"{name} ({error.name} is not installed)")
    return found


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Median of each, and of its ratio to `base` pair by pair, with the extremes."""
    rows = {}
    for name, own in seconds.items():
        pairs = [b / o for b, o in zip(seconds[base], own, strict=True)]
        rows[name] = {
            "median_ms": 1e3 * statistics.median(own),
            "speed": statistics.median(pairs),
            "lowest": min(pairs),
            "highest": max(pairs),
        }
    return rows


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Own cost per micro-batch on a 4x4 Linear: what is left after the bare backward."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(4, 4, device=DEVICE)
    loops = build(Tiny().to(DEVICE), lambda: x, 16)
    loops.pop("Transformers Trainer", None)  # its start dominates at this size
    loops.pop("accum inplace")
    seconds = race(loops, 20, 16, 5 * arguments.repeats)
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


def tokens(arguments: argparse.Namespace) -> dict[str, Any]:
    """Throughput at 64, 256 and 1024 tokens a micro-batch, 8 micro-batches a window."""
    model, rows = Language().to(DEVICE), {}
    for length in (64, 256, 1024):
        loops = build(model, lambda n=length: token_ids(n), 8)
        rows[length] = ratios(race(loops, 1, 8, arguments.repeats), "hand-written")
    return rows


def token_ids(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, length), device=DEVICE)


def curve(arguments: argparse.Namespace) -> dict[str, Any]:
    """Throughput against steps at 64 tokens a micro-batch, as a share of the limit.

    The limit is one forward and backward into gradients that are there, with nothing around it.
    """
    model = Language().to(DEVICE)

    def bare(windows: int, steps: int) -> None:
        for _ in range(windows * steps):
            model(token_ids(64))["loss"].backward()

    def accum(steps: int, **options: Any) -> Loop:
        loop = with_accum(model, lambda: token_ids(64), steps, **options)

        def run(windows: int) -> None:
            model.zero_grad()  # what the limit has left
            loop(windows)

        return run

    rows = {}
    for steps in (1, 2, 4, 8, 16, 32, 64):
        loops = {
            "limit": lambda windows, n=steps: bare(windows, n),
            "accum": accum(steps),
            "accum inplace": accum(steps, inplace=True),
        }
        seconds = race(loops, max(1, 8 // steps), steps, max(2, arguments.repeats // 2))
        rows[steps] = {
            name: statistics.median([a / b for a, b in zip(seconds["limit"], own, strict=True)])
            for name, own in seconds.items()
        }
    return rows


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak memory in processes of their own: against the plain loop, and against steps."""
    cases = [(n, s) for n in ("hand-written", "accum", "accum inplace") for s in (2, 16)]
    return {f"{name}, {steps} steps": _child("peak", name, str(steps)) for name, steps in cases}


def peak(name: str, steps: str) -> dict[str, float]:
    """In a child: MiB above the model's at the peak of three windows."""
    model = Language().to(DEVICE)
    loop = LOOPS[name](model, lambda: token_ids(64), int(steps))
    before = peak_kib(reset=True)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() // 1024
    loop(3)
    after = peak_kib()
    if DEVICE == "cuda":
        after = torch.cuda.max_memory_allocated() // 1024
    weight = VOCABULARY * WIDTH * 4 / 2**20
    return {"mib_above_model": (after - before) / 1024, "largest_weight_mib": weight}


def peak_kib(reset: bool = False) -> int:
    """The most memory that this process has had, on Linux since the last reset.

    `resource` would give a child the peak of the process that has started it.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(n for n in status.read_text().splitlines() if n.startswith("VmHWM"))
    return int(line.split()[1])


def sums(arguments: argparse.Namespace) -> dict[str, Any]:
    """A bf16 model summed in bf16 and in fp32: error against fp64, and time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(DEVICE)
    half, exact = model.bfloat16(), None
    inputs = [torch.randn(8, 512, device=DEVICE, dtype=torch.bfloat16) for _ in range(256)]
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in half.parameters()]
    for x in inputs:
        grads = torch.autograd.grad(half(x).square().mean(), list(half.parameters()))
        for total, grad in zip(exact, grads, strict=True):
            total += grad.double() / len(inputs)
    rows = {}
    for name, dtype in (("bf16 sums", None), ("fp32 sums", torch.float32)):
        accum = Accumulator(len(inputs), optimizer=sgd(half), accumulate_dtype=dtype)
        found: list[Tensor] = []

        def keep(found: list[Tensor] = found) -> None:
            found.extend(p.grad.double() for p in half.parameters())

        accum.on_update(keep)
        start = time.perf_counter()
        for x in inputs:
            with accum(half):
                accum.backward(half(x).square().mean())
        synchronize()
        error = [(a - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
        ms = 1e3 * (time.perf_counter() - start) / len(inputs)
        rows[name] = {"relative_error": float(max(error)), "ms": ms}
    return rows


def ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Two ranks: reductions and bytes of one window of 8 micro-batches, by a DDP hook."""
    command = ["--nproc_per_node", "2", __file__, "--child", "window_of_two_ranks"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command]
    out = subprocess.run(run, capture_output=True, text=True, timeout=300, check=True).stdout
    return json.loads(out.splitlines()[-1])


def window_of_two_ranks() -> None:
    """In each rank."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rows = {}
    for name in ("each micro-batch reduced", "accum"):
        ddp, seen = DistributedDataParallel(nn.Linear(512, 512)), []

        def hook(state, bucket):  # DDP takes no other annotations than its own
            state.append(bucket.buffer().numel() * 4)
            return allreduce_hook(None, bucket)

        ddp.register_comm_hook(seen, hook)
        accum = Accumulator(8, optimizer=sgd(ddp))
        for _ in range(8):
            loss = lambda model=ddp: model(torch.randn(4, 512)).square().mean()  # noqa: E731
            if name == "accum":
                with accum(ddp):
                    accum.backward(loss())
            else:
                (loss() / 8).backward()
        rows[name] = {"reductions": len(seen), "mib": sum(seen) / 2**20}
        del ddp, accum, loss
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def checkpoints(arguments: argparse.Namespace) -> dict[str, Any]:
    """Stall, bytes and resume inside a window beside Accelerate's save_state and torch's DCP."""
    import torch.distributed.checkpoint as dcp

    accelerator = Accelerator(cpu=DEVICE == "cpu")
    model = Language().to(DEVICE)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    accum = Accumulator(2, accelerator=accelerator, optimizer=optimizer)

    def micro_batch() -> None:
        with accum(model):
            accelerator.backward(model(token_ids(32))["loss"])

    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory(dir=arguments.output_dir) as folder:
        here = Path(folder)
        for _ in range(4):
            timed("micro-batch", micro_batch)
        checkpoint = Checkpointer(here / "own", accum, model=model)
        for _ in range(max(3, arguments.repeats)):
            while accum.pending or not accum.updates:
                micro_batch()
            full = new_bytes(checkpoint)
            micro_batch()
            inside = new_bytes(checkpoint)
            timed("accelerator.save_state", lambda: accelerator.save_state(here / "theirs"))
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            timed("torch DCP save", lambda s=state: dcp.save(s, checkpoint_id=here / "dcp"))
            timed("resume", checkpoint.resume)
            timed("accelerator.load_state", lambda: accelerator.load_state(here / "theirs"))
            timed("torch DCP load", lambda s=state: dcp.load(s, checkpoint_id=here / "dcp"))
        checkpoint.close()
        accum.steps = 64
        while accum.pending:
            micro_batch()
        with Checkpointer(here / "periodic", accum, model=model, every=1) as periodic:
            for _ in range(2 + max(3, arguments.repeats)):
                timed("micro-batch that saves", micro_batch)
                periodic.wait()
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "seconds": median,
        "stall_to_save_state": (median["micro-batch that saves"] - median["micro-batch"])
        / median["accelerator.save_state"],
        "resume_to_load_state": median["resume"] / median["accelerator.load_state"],
        "bytes_in_window_to_weights_and_moments": inside / full,
        "bytes_in_window_to_all": inside / (full + inside),
    }


def new_bytes(checkpoint: Checkpointer, save: bool = True) -> int:
    """Bytes that the newest checkpoint has written itself: files that are linked nowhere else."""
    if save:
        checkpoint.save()
    path = checkpoint.wait()
    files = [f.stat() for f in path.rglob("*") if f.is_file()]
    return sum(f.st_size for f in files if f.st_nlink == 1)


def scaled(arguments: argparse.Namespace) -> dict[str, Any]:
    """fp16 with the scaler: the textbook loop against accum, at 256 tokens a micro-batch."""
    model = Language().to(DEVICE)
    x = token_ids(256)

    def forward() -> Tensor:
        with torch.autocast(DEVICE, torch.float16):
            return model(x)["loss"]

    def textbook(windows: int, steps: int = 8) -> None:
        for index in range(windows * steps):
            scaler.scale(forward() / steps).backward()
            if index % steps == steps - 1:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    def ours(accum: Accumulator) -> Loop:
        def loop(windows: int) -> None:
            for _ in range(windows * 8):
                with accum(model):
                    accum.backward(forward())

        return loop

    optimizer, scaler = sgd(model), torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    plain = Accumulator(8, optimizer=sgd(model), scaler=torch.amp.GradScaler(DEVICE, 1024.0))
    inplace = Accumulator(
        8, optimizer=sgd(model), scaler=torch.amp.GradScaler(DEVICE, 1024.0), inplace=True
    )
    loops = {"hand-written": textbook, "accum": ours(plain), "accum inplace": ours(inplace)}
    return ratios(race(loops, 1, 8, arguments.repeats), "hand-written")


SECTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "cost": cost,
    "tokens": tokens,
    "curve": curve,
    "memory": memory,
    "sums": sums,
    "ranks": ranks,
    "checkpoints": checkpoints,
    "scaled": scaled,
}


def _child(name: str, *options: str) -> Any:
    command = [sys.executable, __file__, "--device", DEVICE, "--child", name, *options]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    return json.loads(out.splitlines()[-1])


def table(results: dict[str, Any]) -> str:
    """Everything measured, a line each."""
    lines = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{path} {key}".strip(), inner)
        elif isinstance(value, float):
            lines.append(f"{path:<62} {value:>12.4g}")
        else:
            lines.append(f"{path:<62} {value!s:>12}")

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
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--repeats", type=int, default=5, help="turns that each method takes")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    DEVICE = arguments.device
    warnings.filterwarnings("ignore", category=UserWarning)
    if arguments.child:
        name, *options = arguments.child
        found = {"peak": peak, "window_of_two_ranks": window_of_two_ranks}[name](*options)
        if found is not None:
            print(json.dumps(found))
        return 0
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("benchmark: --device cuda, but torch sees no GPU", file=sys.stderr)
        return 2
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    usual = [n for n in SECTIONS if n != "scaled" or DEVICE == "cuda"]  # fp16 is slow on CPUs
    for name in arguments.sections or usual:
        print(f"# {name}: {SECTIONS[name].__doc__}", flush=True)
        results[name] = SECTIONS[name](arguments)
        print(table({name: results[name]}), flush=True)
    facts = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "absent": sorted(ABSENT),
    }
    for absent in facts["absent"]:
        print(f"absent: {absent}")
    written = arguments.output_dir / "benchmark.json"
    written.write_text(json.dumps({"schema": "benchmark.v1", **facts, **results}, indent=1))
    draw(results, arguments.output_dir / "benchmark.png")
    print(written)
    return 0


DEVICE = "cpu"
ABSENT: set[str] = set()

if __name__ == "__main__":
    sys.exit(main())
