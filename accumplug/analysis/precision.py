"""The precision of a check: the coarsest number format in it, and torch's settings for float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from accumplug.analysis.comparison import Case, Gradients
from accumplug.analysis.coupling import record_modules

__all__ = ["Precision", "precision_of"]

FORMATS = {"tf32": ("TF32", 2.0**-10), "bf16": ("bfloat16", 2.0**-7)}  # of float32 products


@dataclass(frozen=True)
class Precision:
    """The coarsest number format of a check.

    Attributes:
        name: e.g. "bfloat16", "TF32", "float32".
        eps: its relative rounding, the distance from 1 to the next number.
        settings: torch's settings for TF32 and cuDNN, in words; empty on a CPU.
    """

    name: str
    eps: float
    settings: str


def precision_of(case: Case, reference: Gradients) -> Precision:
    """Find the coarsest format of gradients, of module outputs (autocast) and of products (TF32).

    Outputs are read from a forward pass; the products of float32 follow torch's settings.
    """
    dtypes = {gradient.dtype for gradient in reference.values() if gradient is not None}
    recorded = record_modules(case, case.batch).values()
    dtypes |= {output.dtype for _, outputs in recorded for output in outputs}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    name, eps = str(coarsest).removeprefix("torch."), torch.finfo(coarsest).eps
    device = next(case.model.parameters()).device
    if device.type != "cuda":
        return Precision(name, eps, "")
    products, settings = float32_products(case.model)
    if coarsest is torch.float32 and products in FORMATS:
        name, eps = FORMATS[products]
    return Precision(name, eps, settings)


def float32_products(model: nn.Module) -> tuple[str, str]:
    """Return the format of the model's float32 products on CUDA, and the settings in words."""
    cudnn = torch.backends.cudnn
    matmul, convolution = _mode(torch.backends.cuda.matmul), _mode(getattr(cudnn, "conv", cudnn))
    convolves = any(isinstance(module, _ConvNd) for module in model.modules())
    used = [matmul, convolution] if convolves else [matmul]
    coarsest = max(used, key=lambda mode: FORMATS.get(mode, ("", 0.0))[1])
    on = {True: "on", False: "off"}
    return coarsest, (
        f"TF32 in matrix products {on[matmul == 'tf32']}, in cuDNN convolutions "
        f"{on[convolution == 'tf32']}; cuDNN benchmark {on[cudnn.benchmark]}, deterministic "
        f"{on[cudnn.deterministic]}"
    )


def _mode(backend: object) -> str:
    """Read the precision of a backend: `fp32_precision` from torch 2.9 on, `allow_tf32` before.

    From 2.9 on, reading `allow_tf32` raises if the other one was set.
    """
    mode = getattr(backend, "fp32_precision", None)
    return str(mode or ("tf32" if getattr(backend, "allow_tf32", False) else "ieee"))
