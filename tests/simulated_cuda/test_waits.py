"""How often the host waits for the device: once at most in a window, and never in a micro-batch
that does not close it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ranks.harness import Ranks

from simulated_cuda.training import Case, train

GROUPS = {"1 rank": (1, None), "NCCL": (2, "simulated_nccl"), "mixed": (2, "simulated_mixed")}
EXTRAS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "clip": {"options": {"max_grad_norm": 1e9}},
    "scaler": {"scaler": True},
    "scaler and clip": {"scaler": True, "options": {"max_grad_norm": 1e9}},
    "noise scale": {"noise": True},
    "raise": {"options": {"nonfinite": "raise"}},
    "fp32 sums": {
        "dtype": torch.bfloat16,
        "options": {"accumulate_dtype": torch.float32},
    },
}
WEIGHTS = ("none", "numbers", "cpu", "device")
"""No weights, Python numbers, 0-dim tensors in host memory or on the device."""


def counts(gpus: Ranks, name: str, case: Case) -> dict[str, tuple[int, int]]:
    """The most waits of a micro-batch of each kind, by the kind of weights and of the loop."""
    world, backend = GROUPS[name]
    found = {}
    for weights in WEIGHTS:
        for batches in (False, True):
            each = dataclasses.replace(case, weights=weights, batches=batches)
            reports = gpus.run(world, train, each, backend=backend)
            most = max(report.most(case.steps) for report in reports)
            found[f"{weights}, batches" if batches else weights] = most
            bound = 1e-12 if case.dtype is torch.float64 else 3e-2  # a few bits of bf16
            assert max(e for r in reports for e in r.errors) < bound
    return found


def everywhere(inner: int, close: int) -> dict[str, tuple[int, int]]:
    """The same counts for all weights, with `batches` and without."""
    return {f"{w}{b}": (inner, close) for w in WEIGHTS for b in ("", ", batches")}


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", GROUPS)
def test_accum_waits_once_at_a_close_and_nowhere_else(
    gpus: Ranks, name: str, extra: str, sync: str
) -> None:
    """For the norm, the scaler's flags and the total weight together."""
    if extra == "noise scale" and sync == "every":
        pytest.skip("the noise scale is refused there")
    options = {"sync": sync, **EXTRAS[extra].get("options", {})}
    case = Case(**{**EXTRAS[extra], "options": options})
    assert counts(gpus, name, case) == everywhere(0, 1)


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("name", GROUPS)
def test_a_loop_that_steps_is_not_waited_in_at_all(gpus: Ranks, name: str, sync: str) -> None:
    """What `accum.last` tells is read when it is asked for."""
    case = Case(loop_steps=True, options={"sync": sync})
    assert counts(gpus, name, case) == everywhere(0, 0)


@pytest.mark.parametrize("name", GROUPS)
def test_a_loop_that_steps_with_a_scaler_waits_once(gpus: Ranks, name: str) -> None:
    """To see whether the scaler has skipped the step."""
    assert counts(gpus, name, Case(loop_steps=True, scaler=True)) == everywhere(0, 1)


@pytest.mark.parametrize("name", GROUPS)
def test_batches_begins_without_a_wait(gpus: Ranks, name: str) -> None:
    """The ranks tell each other in host memory whether they have data."""
    world, backend = GROUPS[name]
    reports = gpus.run(world, train, Case(batches=True), backend=backend)
    assert [len(report.start) for report in reports] == [0] * world
