"""The loops that benchmark.py compares, the models that they train, and how they are timed."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from accumplug import Accumulator

Loop = Callable[[int], None]  # trains so many windows
Batch = Callable[[], Tensor]


@dataclass
class Settings:
    """The options of the command line; `absent` collects the packages that are not installed."""

    device: str
    repeats: int
    output_dir: Path
    smoke: bool
    absent: set[str] = field(default_factory=set)

    @property
    def vocabulary(self) -> int:
        return 512 if self.smoke else 50257

    @property
    def width(self) -> int:
        return 96 if self.smoke else 768

    def model(self) -> Language:
        """53 M parameters, with the head tied to the embedding."""
        return Language(self.vocabulary, self.width).to(self.device)

    def token_ids(self, length: int) -> Tensor:
        return torch.randint(0, self.vocabulary, (1, length), device=self.device)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def in_child(self, name: str, *options: str) -> Any:
        """Run a function of the benchmark in a process of its own; return its result."""
        command = [sys.executable, str(Path(__file__).with_name("benchmark.py"))]
        command += ["--device", self.device, "--output-dir", str(self.output_dir)]
        command += ["--smoke"] * self.smoke + ["--child", name, *options]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        return json.loads(run.stdout.splitlines()[-1])


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.project(self.first(x)).view(b, t, 3, 12, w // 12).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Language(nn.Module):
    """A GPT-2-like model that returns its loss, so that every loop can run it."""

    def __init__(self, vocabulary: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten())}


class Tiny(nn.Module):
    """A 4x4 Linear: what is measured is the cost of the loop itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, ids: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": self.linear(ids).square().mean()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def by_hand(settings: Settings, model: nn.Module, batch: Batch, steps: int) -> Loop:
    optimizer = sgd(model)

    def loop(windows: int) -> None:
        for index in range(windows * steps):
            (model(batch())["loss"] / steps).backward()
            if index % steps == steps - 1:
                optimizer.step()
                optimizer.zero_grad()

    return loop


def with_accum(
    settings: Settings, model: nn.Module, batch: Batch, steps: int, **options: Any
) -> Loop:
    accum = Accumulator(steps, optimizer=sgd(model), **options)

    def loop(windows: int) -> None:
        for _ in range(windows * steps):
            with accum(model):
                accum.backward(model(batch())["loss"])

    return loop


def with_inplace(settings: Settings, model: nn.Module, batch: Batch, steps: int) -> Loop:
    return with_accum(settings, model, batch, steps, inplace=True)


def with_accelerate(settings: Settings, model: nn.Module, batch: Batch, steps: int) -> Loop:
    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=settings.device == "cpu")
    prepared, optimizer = accelerator.prepare(model, sgd(model))

    def loop(windows: int) -> None:
        for _ in range(windows * steps):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(batch())["loss"])
                optimizer.step()  # as in its documentation: no effect until gradients are synced
                optimizer.zero_grad()

    return loop


def with_fabric(settings: Settings, model: nn.Module, batch: Batch, steps: int) -> Loop:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=settings.device, devices=1)
    wrapped, optimizer = fabric.setup(model, sgd(model))

    def loop(windows: int) -> None:
        for index in range(windows * steps):
            closes = index % steps == steps - 1
            with fabric.no_backward_sync(wrapped, enabled=not closes):
                fabric.backward(wrapped(batch())["loss"] / steps)
            if closes:
                optimizer.step()
                optimizer.zero_grad()

    return loop


def with_trainer(settings: Settings, model: nn.Module, batch: Batch, steps: int) -> Loop:
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
                use_cpu=settings.device == "cpu",
            )
            data = [{"ids": batch()[0]} for _ in range(windows * steps)]
            Trainer(model, arguments, train_dataset=data, optimizers=(sgd(model), None)).train()

    return loop


LOOPS: dict[str, Callable[[Settings, nn.Module, Batch, int], Loop]] = {
    "hand-written": by_hand,
    "accum": with_accum,
    "accum inplace": with_inplace,
    "Accelerate": with_accelerate,
    "Lightning Fabric": with_fabric,
    "Transformers Trainer": with_trainer,
}


def build(settings: Settings, model: nn.Module, batch: Batch, steps: int) -> dict[str, Loop]:
    """All loops whose package is installed, over one model."""
    found = {}
    for name, loop in LOOPS.items():
        try:
            found[name] = loop(settings, model, batch, steps)
        except ImportError as error:
            settings.absent.add(f"{name} ({error.name} is not installed)")
    return found


def race(
    settings: Settings, loops: dict[str, Loop], windows: int, steps: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds per micro-batch of each loop in each repeat; the loops take turns."""
    for loop in loops.values():
        loop(1)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, loop in loops.items():
            settings.synchronize()
            start = time.perf_counter()
            loop(windows)
            settings.synchronize()
            seconds[name].append((time.perf_counter() - start) / windows / steps)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """The median of each, and of its ratio to `base` pair by pair, with the extremes."""
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


def peak_bytes(device: str, reset: bool = False) -> int:
    """The peak memory since the last reset: of torch's CUDA allocator, or of this process.

    `resource` would count the peak of the parent process too, so it is only used where there is no
    /proc.
    """
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return peak
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(n for n in status.read_text().splitlines() if n.startswith("VmHWM"))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) * 1024
