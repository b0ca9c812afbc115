"""accumulate_dtype: the running sum is fp32 whatever the parameter's dtype."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from versions import needs_grad_dtype

from accumplug import Accumulator

pytestmark = needs_grad_dtype

STEPS = 256
SMALL = [1.0] + [2.0**-9] * 255
"""1 + 255 / 512 = 1.498046875, of which bf16 keeps the 1."""


class Weight(nn.Module):
    """One bf16 weight whose gradient is the input."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        """w times x."""
        return (self.w * x).sum()


def norm_of(values: Sequence[float], dtype: torch.dtype | None) -> float:
    """Norm of the finished gradient, times the micro-batches."""
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accum = Accumulator(len(values), optimizer=optimizer, accumulate_dtype=dtype)
    for value in values:
        with accum(model):
            accum.backward(model(value))
    assert accum.last is not None
    assert accum.last.grad_norm is not None
    return accum.last.grad_norm * len(values)


def test_small_contributions_are_not_lost() -> None:
    """The sum is exact in fp32; in the parameter's bf16 it stays at its first term."""
    assert norm_of(SMALL, torch.float32) == 1.498046875
    assert norm_of(SMALL, None) == 1.0


def test_a_thousand_ones_are_a_thousand() -> None:
    """bf16 has no 257, so a plain sum stays at 256."""
    assert norm_of([1.0] * 1024, torch.float32) == 1024.0
    assert norm_of([1.0] * 1024, None) == 256.0


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_any_optimizer_gets_the_sum_rounded_once(
    kind: type[torch.optim.Optimizer], options: dict[str, bool]
) -> None:
    """As if the fp32 gradient had been computed at once and cast for the optimizer."""
    ours, theirs = Weight(), Weight()
    optimizer = kind(ours.parameters(), lr=0.5, **options)  # type: ignore[call-arg]
    accum = Accumulator(STEPS, optimizer=optimizer, accumulate_dtype=torch.float32)
    for _ in range(2):
        for value in SMALL:
            with accum(ours):
                accum.backward(ours(value))
    reference = kind(theirs.parameters(), lr=0.5, **options)  # type: ignore[call-arg]
    for _ in range(2):
        theirs.w.grad = torch.tensor([sum(SMALL) / STEPS]).to(torch.bfloat16)
        reference.step()
    assert torch.equal(ours.w, theirs.w)


def test_the_clip_norm_is_taken_on_the_wide_sum() -> None:
    """Clipped to half of its exact norm, then rounded."""
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exact = sum(SMALL) / STEPS
    accum = Accumulator(
        STEPS, optimizer=optimizer, accumulate_dtype=torch.float32, max_grad_norm=exact / 2
    )
    for value in SMALL:
        with accum(model):
            accum.backward(model(value))
    # clip_grad_norm_ divides by norm + 1e-6
    clipped = torch.tensor(exact * (exact / 2 / (exact + 1e-6)))
    assert torch.equal(model.w.detach(), -clipped.to(torch.bfloat16).reshape(1))


def test_a_loop_that_steps_gets_its_own_dtype() -> None:
    """Wide while the window is open, the parameter's dtype when it closes."""
    model = Weight()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    accum = Accumulator(4, accumulate_dtype=torch.float32)
    for _ in range(2):
        for _ in range(4):
            with accum(model) as micro:
                accum.backward(model(1.0))
                assert model.w.grad is not None
                assert model.w.grad.dtype is (torch.bfloat16 if micro.closes else torch.float32)
                if micro.closes:
                    optimizer.step()
                    optimizer.zero_grad()
    assert accum.updates == 2


def test_nothing_wide_outlives_the_close() -> None:
    """After the close a parameter takes a gradient of its own dtype again."""
    model = Weight()
    accum = Accumulator(
        2,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        accumulate_dtype=torch.float32,
    )
    for _ in range(2):
        with accum(model):
            accum.backward(model(1.0))
    assert model.w.grad is None
    model(1.0).backward()
    assert model.w.grad is not None
    assert model.w.grad.dtype is torch.bfloat16


def test_a_discarded_window_leaves_nothing_wide() -> None:
    """discard gives the parameter back as it was."""
    model = Weight()
    accum = Accumulator(2, accumulate_dtype=torch.float32)
    with accum(model):
        accum.backward(model(1.0))
    accum.discard()
    assert model.w.grad is None
    model(1.0).backward()
    assert model.w.grad.dtype is torch.bfloat16


def test_wide_parameters_are_left_alone() -> None:
    """An fp64 parameter's sum stays fp64."""
    model = Weight(torch.float64)
    accum = Accumulator(2, accumulate_dtype=torch.float32)
    with accum(model):
        accum.backward(model(1.0))
    assert model.w.grad is not None
    assert model.w.grad.dtype is torch.float64


def test_fp16_parameters_work_with_a_scaler() -> None:
    """GradScaler refuses fp16 gradients; the wide sum is what it unscales."""
    model = Weight(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accum = Accumulator(
        4,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        scaler=scaler,
        accumulate_dtype=torch.float32,
    )
    for value in (1.0, 2.0, 3.0, 6.0):
        with accum(model):
            accum.backward(model(value))
    assert model.w.item() == -3.0


def test_a_narrow_accumulate_dtype_is_refused() -> None:
    """bf16 sums are what one wants to be rid of."""
    with pytest.raises(ValueError, match="float32"):
        Accumulator(2, accumulate_dtype=torch.bfloat16)


@pytest.mark.parametrize("close", [True, False])
def test_a_model_that_changes_its_dtype_gets_gradients_of_the_new_one(close: bool) -> None:
    """After a window, or one that was thrown away; as a model that was never summed widely."""
    model = nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accum = Accumulator(2, optimizer=optimizer, accumulate_dtype=torch.float32)
    x = torch.randn(3, 8)
    for _ in range(2 if close else 1):
        with accum(model):
            accum.backward(model(x.bfloat16()).sum())
    if not close:
        accum.discard()
    for dtype in (torch.float32, torch.float64):
        model.to(dtype).zero_grad()
        model(x.to(dtype)).sum().backward()
        assert model.weight.grad.dtype is dtype
        assert torch.equal(model.weight.grad, x.to(dtype).sum(0).expand(4, 8))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("how", ["a new one", "replaced", "assign=True", "unfrozen"])
def test_parameters_that_come_between_windows_are_summed_widely(how: str, inplace: bool) -> None:
    """From their first window on."""
    model = nn.ParameterDict({"a": torch.zeros(4, dtype=torch.bfloat16)})
    if how != "a new one":
        model["b"] = torch.zeros(4, dtype=torch.bfloat16)
        model["b"].requires_grad_(how != "unfrozen")
    accum = Accumulator(1, accumulate_dtype=torch.float32, inplace=inplace)
    with accum(model):
        accum.backward(model["a"].sum())
    model.zero_grad()
    if how == "unfrozen":
        model["b"].requires_grad_()
    elif how == "assign=True":
        state = {name: p.clone() for name, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        model["b"] = torch.zeros(4, dtype=torch.bfloat16)
    accum.steps = 1024
    for _ in range(1024):
        with accum(model):
            accum.backward(model["a"].sum() + model["b"].sum())
    assert model["a"].grad.tolist() == model["b"].grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_freezing_and_unfreezing_inside_of_a_window_is_summed_widely(
    kind: type[torch.optim.Optimizer],
) -> None:
    """What is frozen keeps its sum so far, rounded for the optimizer as the others are."""
    model = nn.ParameterList([torch.zeros(4, dtype=torch.bfloat16) for _ in range(2)])
    model[1].requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.0)
    accum, got = Accumulator(1024, optimizer=optimizer, accumulate_dtype=torch.float32), []
    accum.on_update(lambda: got.extend(p.grad.tolist() for p in model))
    for index in range(1024):
        if index == 512:
            model[0].requires_grad_(False)
            model[1].requires_grad_(True)
        with accum(model):
            accum.backward(model[index // 512].sum())
    assert got == [[0.5] * 4, [0.5] * 4]
    assert all(p.grad_dtype in (None, torch.bfloat16) for p in model)
