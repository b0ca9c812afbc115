"""What is promised on CUDA, asked of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.harness import Ranks
from torch import Tensor, nn

from accumplug import Accumulator, Checkpointer

SIZES = (3, 1, 2, 4)
WEIGHTS = ("numbers", "cpu", "cuda")


def network(dtype: torch.dtype, device: str = "cuda") -> nn.Sequential:
    """The same in each call, with dropout where it does nothing."""
    generator = torch.Generator("cpu").manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).to("cpu", dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.to(device)


def data(sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Micro-batches in host memory."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(n, 8, generator=generator, dtype=dtype, device="cpu") for n in sizes]


def weight(kind: str, size: int) -> Any:
    return size if kind == "numbers" else torch.tensor(size, device=kind)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().cpu().flatten() for t in tensors])


def big_batch(batches: list[Tensor]) -> Tensor:
    """The gradient of the mean over all rows, on the CPU."""
    model = network(torch.float64, "cpu")
    model(torch.cat(batches)).square().mean().backward()
    return flat(p.grad for p in model.parameters())


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """A wait of the host is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_window_is_one_big_batch(kind: str) -> None:
    """In fp64, to rounding."""
    model, batches = network(torch.float64), data(SIZES, torch.float64)
    accum = Accumulator(4, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    found: list[Tensor] = []
    accum.on_update(lambda: found.append(flat(p.grad for p in model.parameters())))
    for x in batches:
        with accum(model, weight=weight(kind, len(x))):
            accum.backward(model(x.cuda()).square().mean())
    expected = big_batch(batches)
    assert float((found[0] - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_weights_have_the_textbook_loops_bits(dtype: torch.dtype) -> None:
    """The same kernels in the same order."""
    ends = []
    for ours in (True, False):
        model = network(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accum = Accumulator(3, optimizer=optimizer) if ours else None
        for index, x in enumerate(data((4,) * 6, dtype)):
            if accum is not None:
                with accum(model):
                    accum.backward(model(x.cuda()).square().mean())
                continue
            (model(x.cuda()).square().mean() / 3).backward()
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(flat(model.parameters()))
    assert torch.equal(*ends)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"scaler": True}], ids=str)
def test_a_micro_batch_that_does_not_close_does_not_wait(kind: str, options: Any) -> None:
    """In three windows."""
    if options.get("scaler"):
        options = {"scaler": torch.amp.GradScaler("cuda", init_scale=4.0)}
    model = network(torch.float32)
    accum = Accumulator(4, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)
    items = [(x.cuda(), weight(kind, len(x))) for x in data(SIZES * 3, torch.float32)]
    for index, (x, w) in enumerate(items):
        with no_waits() if index % 4 < 3 else contextlib.nullcontext(), accum(model, weight=w):
            accum.backward(model(x).square().mean())
    assert accum.updates == 3


@pytest.mark.usefixtures("cuda_build")  # the simulation's operators have temporaries of their own
def test_inplace_saves_the_largest_weight() -> None:
    """At the peak of a second micro-batch."""
    peaks = []
    for inplace in (False, True):
        model = nn.Linear(1024, 8192, bias=False).to("cuda", torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        accum = Accumulator(3, optimizer=optimizer, inplace=inplace)
        for _ in range(3):
            with accum(model):
                accum.backward(
                    model(torch.ones(4, 1024, device="cuda", dtype=torch.float32)).mean()
                )
            if accum.pending == 1:
                torch.cuda.reset_peak_memory_stats()
            elif accum.pending == 2:
                peaks.append(torch.cuda.max_memory_allocated())
        size = model.weight.numel() * 4
        del model, optimizer, accum
    assert peaks[0] - peaks[1] >= 0.9 * size


def test_a_save_holds_its_moment_while_the_loop_goes_on(tmp_path: Path) -> None:
    """A run that goes on from a save in the middle of a window ends with the same weights."""

    def run(resumes: bool) -> Tensor:
        model = network(torch.float32)
        big = torch.randn(1024, 1024, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accum = Accumulator(4, optimizer=optimizer)
        batches = data(SIZES * 4, torch.float32)
        with Checkpointer(tmp_path, accum, model=model, loader=batches) as checkpoint:
            if resumes:
                assert checkpoint.resume()
            for x in accum.batches(batches):
                for _ in range(20):  # the device is behind the host
                    big = (big @ big).tanh()
                with accum(model):
                    accum.backward(model(x.cuda(non_blocking=True)).square().mean())
                if not resumes and accum.micro_batches == 6:
                    checkpoint.save(wait=False)
        return flat(model.parameters())

    assert torch.equal(run(False), run(True))


def over_ranks(rank: int, sizes: list[tuple[int, ...]], kind: str) -> tuple[Tensor, int]:
    """The gradient of the first window, with ranks whose data end early."""
    torch.cuda.set_device(rank)
    ddp = nn.parallel.DistributedDataParallel(network(torch.float64, f"cuda:{rank}"))
    accum = Accumulator(4, optimizer=torch.optim.SGD(ddp.parameters(), lr=0.0))
    found: list[Tensor] = []
    accum.on_update(lambda: found.append(flat(p.grad for p in ddp.parameters())))
    kind = f"cuda:{rank}" if kind == "cuda" else kind
    for x in accum.batches(data(sizes[rank], torch.float64, rank)):
        with accum(ddp, weight=weight(kind, len(x))):
            accum.backward(ddp(x.to(f"cuda:{rank}")).square().mean())
    return found[0], accum.updates


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("everyone", [False, True], ids=["1 GPU", "all GPUs"])
def test_ranks_over_nccl_are_one_big_batch(
    nccl: tuple[Ranks, str, int], everyone: bool, kind: str
) -> None:
    """The second rank has one micro-batch, the first one two windows."""
    ranks, backend, most = nccl
    world = most if everyone else 1
    sizes = [(3, 1, 2, 4) * 2, (5,), *[(2, 2, 1)] * world][:world]
    expected = big_batch(
        [x for rank in range(world) for x in data(sizes[rank], torch.float64, rank)[:4]]
    )
    for found, updates in ranks.run(world, over_ranks, sizes, kind, backend=backend, timeout=60):
        assert updates == 2
        assert float((found - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize("how", ["compiled", "graphed"])
def test_a_compiled_or_graphed_model_has_the_gradients_of_a_plain_one(how: str) -> None:
    """torch.compile, and graphs of forward and backward (torch.cuda.make_graphed_callables)."""
    found: list[Tensor] = []
    batches = data((4,) * 4, torch.float32)
    for plain in (True, False):
        model: Any = network(torch.float32)
        run = model
        if not plain and how == "compiled":
            run = torch.compile(model)
        elif not plain:
            run = torch.cuda.make_graphed_callables(model, (batches[0].cuda(),))
            model.zero_grad()
        accum = Accumulator(4, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        accum.on_update(lambda m=model: found.append(flat(p.grad for p in m.parameters())))
        for x in batches:
            with accum(run):
                accum.backward(run(x.cuda()).square().mean())
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-5
