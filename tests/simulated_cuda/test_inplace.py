"""The gradient of a wide weight on a device: one GEMM that adds to the running sum."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from ranks.harness import Ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accumplug import Accumulator
from accumplug.inplace import products

GEMMS = ("aten.mm", "aten.addmm", "aten.addmm_")
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func).rsplit(".", 1)[0]] += 1
        return func(*args, **(kwargs or {}))


def added(
    rank: int, rows: int, dtype: torch.dtype, wide: torch.dtype, able: bool
) -> tuple[dict[str, int], float]:
    """Add a head's gradient to a sum; the operators, and the error in roundings of the sum."""
    if not able:
        products._widens = lambda *_: False
    generator = torch.Generator().manual_seed(1)
    sizes = {"total": (rows, 768), "left": (rows, 4), "right": (4, 768)}
    host = {n: torch.randn(s, generator=generator, dtype=torch.float32) for n, s in sizes.items()}
    total = host["total"].to("cuda:0", wide)
    left, right = host["left"].to("cuda:0", dtype), host["right"].to("cuda:0", dtype)
    products.add_product(total, left, right)  # asks once for what the device can
    exact = host["total"].to(wide).double() + 2 * left.cpu().double() @ right.cpu().double()
    with Calls() as calls:
        products.add_product(total, left, right)
    error = (total.cpu().double() - exact).abs().max() / exact.abs().max()
    products._widens = WIDENS
    return dict(calls.seen), float(error) / torch.finfo(wide).eps


WIDENS = products._widens


@pytest.mark.parametrize(("dtype", "wide"), DTYPES, ids=str)
def test_a_heads_gradient_is_one_gemm(gpus: Ranks, dtype: torch.dtype, wide: torch.dtype) -> None:
    """Of 50257 x 768, and nothing else; products of half precision are not rounded in between."""
    [(calls, error)] = gpus.run(1, added, 50257, dtype, wide, True, backend=None)
    assert sum(calls.values()) == sum(calls.get(name, 0) for name in GEMMS) == 1
    assert error <= 2  # a rounding in each of the two additions


def test_without_such_a_gemm_the_pieces_are_few(gpus: Ranks) -> None:
    """Three of at most 2**24 elements, not 50 that fit into a CPU's cache."""
    args = (50257, torch.bfloat16, torch.float32, False)
    [(calls, error)] = gpus.run(1, added, *args, backend=None)
    assert (calls["aten.mm"], calls["aten.add_"]) == (3, 3)
    assert error <= 2 * torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps


def trained(rank: int, inplace: bool, how: str) -> tuple[list[torch.Tensor], int]:
    """Gradients of a window of 4 of a model with a head that is served; and how many were."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 1024)).float().to("cuda:0")
    options: dict[str, Any] = {}
    if how == "fp32 sums":
        model, options = model.bfloat16(), {"accumulate_dtype": torch.float32}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accum = Accumulator(4, optimizer=optimizer, inplace=inplace, **options)
    found: list[torch.Tensor] = []
    accum.on_update(lambda: found.extend(p.grad.detach().cpu() for p in model.parameters()))  # type: ignore[union-attr]
    for _ in range(4):
        x = torch.randn(8, 16, dtype=torch.float32).to("cuda:0", model[0].weight.dtype)
        with accum(model):
            with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
                loss = model(x).float().square().mean()
            accum.backward(loss)
    served = accum.inplace_report()
    return found, len(served.served)


@pytest.mark.parametrize("how", ["fp32", "autocast", "fp32 sums"])
def test_a_window_with_inplace_has_the_gradients_of_one_without(gpus: Ranks, how: str) -> None:
    """To the rounding of a product in bf16, where there is one."""
    [(ours, served)] = gpus.run(1, trained, True, how, backend=None)
    [(plain, none)] = gpus.run(1, trained, False, how, backend=None)
    assert (served, none) == (1, 0)
    bound = 1e-6 if how == "fp32" else 1e-2
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype is other.dtype
        assert float((one - other).norm() / other.norm()) <= bound
