"""Gradients added in place: the same as autograd's, without the copy, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrizations, parametrize
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from versions import needs_grad_dtype

from accumplug import Accumulator
from accumplug.inplace import InplaceGradients, sums

BOUND = {torch.float64: 1e-13, torch.float32: 1e-6}  # relative; what is promised


def serve_all(*models: nn.Module, **options: Any) -> InplaceGradients:
    """Serves small weights too."""
    return InplaceGradients(*models, smallest=0, **options)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: p.grad.to_dense() if p.grad.is_sparse else p.grad
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def assert_near(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Each within `bound` of the expected one's norm."""
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert got[name].dtype is grad.dtype
        distance = (got[name] - grad).norm() / grad.norm().clamp_min(1e-30)
        assert distance <= bound, f"{name}: {distance}"


def run(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], served: bool) -> Any:
    """Three micro-batches of a window; the losses, and the gradients."""
    serve = serve_all(model)
    losses = []
    for index in range(3):
        torch.manual_seed(index)
        if served:
            with serve.micro_batch():
                value = loss(model, index)
                value.backward()
        else:
            value = loss(model, index)
            value.backward()
        losses.append(value.detach())
    return losses, gradients(model), serve.report()


class Lambda(nn.Module):
    """A module with parts and a forward that is given as a function of both."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class Conv1D(nn.Module):
    """As in Transformers (pytorch_utils.py): a Linear with its weight the other way round."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.out = out
        self.weight = nn.Parameter(torch.randn(width, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.size()[:-1], self.out)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Tied(nn.Module):
    """An embedding whose weight is the head, by one of several ways to write it."""

    def __init__(self, head: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh(), self.embedding.weight)


def tied_linear() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11, bias=False))
    model[2].weight = model[0].weight
    return model


def attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


def hidden(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*(shape or (3, 5, 8)), requires_grad=True)


def tokens() -> Tensor:
    return torch.randint(0, 11, (3, 5))


def twice(model: Any, x: Tensor) -> Tensor:
    return model.a(model.a(x).tanh())


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], set[str]]] = {
    "linear": (lambda: nn.Linear(8, 4), hidden(5, 8), {"Linear"}),
    "linear of 3-D": (lambda: nn.Linear(8, 4), hidden(), {"Linear"}),
    "linear of 4-D, no bias": (lambda: nn.Linear(8, 4, bias=False), hidden(2, 3, 5, 8), {"Linear"}),
    "linear of a vector": (lambda: nn.Linear(8, 4), hidden(8), set()),
    "linear of nothing": (lambda: nn.Linear(8, 4), hidden(0, 8), {"Linear"}),
    "transposed input": (
        lambda: Lambda(lambda m, x: m.a(x.transpose(1, 2)), a=nn.Linear(5, 4)),
        hidden(),
        {"a"},
    ),
    "in-place activation": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
        hidden(),
        {"0", "2"},
    ),
    "twice in a forward": (lambda: Lambda(twice, a=nn.Linear(8, 8)), hidden(), {"a"}),
    "Conv1D": (
        lambda: nn.Sequential(Conv1D(8, 24), nn.Tanh(), Conv1D(24, 8)),
        hidden(),
        {"0", "2"},
    ),
    "embedding": (lambda: nn.Embedding(11, 8), tokens, {"Embedding"}),
    "padded embedding": (lambda: nn.Embedding(11, 8, padding_idx=3), tokens, {"Embedding"}),
    "padded from the end": (lambda: nn.Embedding(11, 8, padding_idx=-1), tokens, {"Embedding"}),
    "padded lookup from the end": (
        lambda: Lambda(lambda m, x: F.embedding(x, m.w, padding_idx=-2), w=torch.randn(11, 8)),
        tokens,
        {"Lambda"},
    ),
    "sparse embedding": (lambda: nn.Embedding(11, 8, sparse=True), tokens, set()),
    "max_norm": (lambda: nn.Embedding(11, 8, max_norm=0.5), tokens, set()),
    "scaled by frequency": (lambda: nn.Embedding(11, 8, scale_grad_by_freq=True), tokens, set()),
    "bag": (lambda: nn.EmbeddingBag(11, 8), tokens, set()),
    "tied modules": (tied_linear, tokens, {"0", "2"}),
    "tied by F.linear": (lambda: Tied(F.linear), tokens, {"embedding"}),
    "tied by @ T": (lambda: Tied(lambda h, w: h @ w.T), tokens, {"embedding"}),
    "tied by t()": (lambda: Tied(lambda h, w: torch.matmul(h, w.t())), tokens, {"embedding"}),
    "tied, a part": (lambda: Tied(lambda h, w: h @ w[2:9].transpose(0, 1)), tokens, {"embedding"}),
    "tied by einsum": (
        lambda: Tied(lambda h, w: torch.einsum("btd,vd->btv", h, w)),
        tokens,
        {"embedding"},
    ),
    "attention": (
        lambda: Lambda(lambda m, x: m.a(x, x, x)[0], a=attention()),
        hidden(),
        {"a", "a.out_proj"},
    ),
    "attention with fewer results": (
        lambda: Lambda(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=attention(bias=False)),
        hidden(),
        {"a", "a.out_proj"},
    ),
    "cross attention": (
        lambda: Lambda(lambda m, x: m.a(x, 2 * x[:, :2], 2 * x[:, :2])[0], a=attention()),
        hidden(),
        {"a", "a.out_proj"},
    ),
    "attention, one memory": (
        lambda: Lambda(lambda m, x: (lambda kv: m.a(x, kv, kv)[0])(2 * x[:, :2]), a=attention()),
        hidden(),
        {"a", "a.out_proj"},
    ),
    "attention of other widths": (
        lambda: Lambda(lambda m, x: m.a(x, x[..., :6], x[..., :4])[0], a=attention(kdim=6, vdim=4)),
        hidden(),
        {"a", "a.out_proj"},
    ),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        hidden(),
        {"self_attn", "self_attn.out_proj", "linear1", "linear2"},
    ),
    "decoder layer": (
        lambda: Lambda(lambda m, x: m.a(x, 2 * x), a=nn.TransformerDecoderLayer(8, 2, 16)),
        hidden(),
        {
            *("a.self_attn", "a.self_attn.out_proj", "a.multihead_attn"),
            *("a.multihead_attn.out_proj", "a.linear1", "a.linear2"),
        },
    ),
    "packed, in chunks": (
        lambda: Lambda(
            lambda m, x: sum(F.linear(x, w) for w in m.w.chunk(3)), w=torch.randn(24, 8)
        ),
        hidden(),
        {"Lambda"},
    ),
    "experts": (
        lambda: Lambda(lambda m, x: x[0] @ m.w[0] + x[1] @ m.w[1], w=torch.randn(2, 8, 4)),
        hidden(),
        {"Lambda"},
    ),
    "weight stored the other way": (
        lambda: Lambda(lambda m, x: F.linear(x, m.w), w=torch.randn(8, 4).t()),
        hidden(),
        {"Lambda"},
    ),
    "sparse input": (
        lambda: Lambda(lambda m, x: x.to_sparse() @ m.w, w=torch.randn(8, 4)),
        lambda: torch.eye(8),
        set(),
    ),
    "nested input": (
        lambda: Lambda(lambda m, x: m.a(x).to_padded_tensor(0.0), a=nn.Linear(8, 4)),
        lambda: torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)]),
        set(),
    ),
    "addmm with factors": (
        lambda: Lambda(
            lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=3.0),
            w=torch.randn(8, 4),
            b=torch.randn(4),
        ),
        hidden(5, 8),
        set(),
    ),
    "addmm of a matrix": (
        lambda: Lambda(
            lambda m, x: torch.addmm(m.b, x, m.w), w=torch.randn(8, 4), b=torch.randn(5, 4)
        ),
        hidden(5, 8),
        set(),
    ),
    "rows by a list": (
        lambda: Lambda(lambda m, x: F.linear(x, m.w[[0, 2]]), w=torch.randn(4, 8)),
        hidden(),
        set(),
    ),
    "one row": (
        lambda: Lambda(lambda m, x: F.linear(x, m.w[0]), w=torch.randn(4, 8)),
        hidden(),
        set(),
    ),
    "matmul of a batch": (
        lambda: Lambda(lambda m, x: x @ m.w, w=torch.randn(3, 8, 4)),
        hidden(),
        set(),
    ),
    "F.linear with names": (
        lambda: Lambda(
            lambda m, x: F.linear(input=x, weight=m.w, bias=m.w[:, 0]), w=torch.randn(4, 8)
        ),
        hidden(),
        {"Lambda"},
    ),
    "products with names": (
        lambda: Lambda(
            lambda m, x: (
                torch.addmm(input=m.b, mat1=x, mat2=m.w)
                + torch.matmul(input=x, other=torch.transpose(input=m.w.T, dim0=0, dim1=1))
            ),
            w=torch.randn(8, 4),
            b=torch.randn(4),
        ),
        hidden(5, 8),
        set(),
    ),
    "experts in a batch": (
        lambda: Lambda(lambda m, x: torch.bmm(x[:2], m.w), w=torch.randn(2, 8, 4)),
        hidden(),
        set(),
    ),
    "weight on the left": (
        lambda: Lambda(lambda m, x: m.w @ x.mT, w=torch.randn(4, 8)),
        hidden(),
        set(),
    ),
    "weight of a weight": (
        lambda: Lambda(lambda m, x: x @ (m.v @ m.w), v=torch.randn(8, 6), w=torch.randn(6, 4)),
        hidden(),
        set(),
    ),
    "other uses": (
        lambda: Lambda(lambda m, x: F.linear(x, m.w) * m.w.norm() + m.w[[0]].sum(), w=torch.eye(8)),
        hidden(),
        {"Lambda"},
    ),
    "LoRA": (Lora, hidden(), {"down", "up"}),
    "frozen": (lambda: Lora().base, hidden(), set()),
    "bilinear": (
        lambda: Lambda(lambda m, x: m.a(x, x), a=nn.Bilinear(8, 8, 4)),
        hidden(),
        set(),
    ),
    "LSTM": (lambda: Lambda(lambda m, x: m.a(x)[0], a=nn.LSTM(8, 8)), hidden(), set()),
    "convolution": (lambda: nn.Conv1d(5, 4, 2), hidden(), set()),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(8, 4)),
        hidden(),
        set(),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        hidden(),
        {"0", "2"},
    ),
}


def zoo_loss(x: Callable[[], Tensor]) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, index: int) -> Tensor:
        given = x()
        if given.dtype is torch.float32:
            given = given.to(next(model.parameters()).dtype)
        return model(given).sin().sum() / 4

    return loss


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_autograds_and_losses_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Over three micro-batches of a window; and what should be served is."""
    build, x, served = ZOO[name]
    model = build().to(dtype)
    plain = copy.deepcopy(model)
    expected_losses, expected, _ = run(plain, zoo_loss(x), served=False)
    losses, got, report = run(model, zoo_loss(x), served=True)
    assert all(map(torch.equal, losses, expected_losses))
    assert_near(got, expected, BOUND[dtype])
    assert set(report.served) == served
    assert not (served & report.others.keys())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(5, 16), (3, 5, 16), (2, 3, 5, 16), (1, 1, 16), (2, 16, 5), (2, 3, 16, 5), (0, 16)]
)
def test_a_forward_has_the_bits_and_strides_of_the_plain_one(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    """Whether torch fuses the bias depends on shape and strides; it shows in bf16."""
    model = nn.Linear(16, 8, bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    x = (x if shape[-1] == 16 else x.transpose(-1, -2)).requires_grad_()
    expected = model(x)
    model.weight.grad = torch.zeros_like(model.weight)
    with serve_all(model).micro_batch():
        y = model(x)
        assert torch.equal(y, expected)
        assert y.stride() == expected.stride()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_product_with_a_wide_matrix_is_done_in_pieces(
    monkeypatch: pytest.MonkeyPatch, rows: int, bias: bool
) -> None:
    """Of 4 columns for each thread, the last one with the rest; it is the same product."""
    monkeypatch.setattr("accumplug.inplace.products.WIDE", 16 * 70)
    monkeypatch.setattr("accumplug.inplace.products.COLUMNS", 4)
    name, pieces = "addmm" if bias else "mm", []
    product = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *a, out: pieces.append(product(*a, out=out)))
    model, x = nn.Linear(16, 70, bias=bias), torch.randn(rows, 16)
    expected = model(x)
    with serve_all(model).micro_batch():
        y = model(x)
        y.sin().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert y.stride() == expected.stride()
    columns = 4 * torch.get_num_threads()
    assert [p.shape[1] for p in pieces[:-1]] == [columns] * (70 // columns - 1)
    assert pieces[-1].shape[1] == columns + 70 % columns
    gradient = torch.autograd.grad(expected.sin().sum(), model.weight)[0]
    torch.testing.assert_close(model.weight.grad, gradient, rtol=1e-6, atol=1e-6)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation has newly made, and how many it was."""

    elements = times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.times += t.numel() == self.elements
                if t.numel() > self.elements:
                    self.elements, self.times = t.numel(), 1
        return result


def vocabulary(width: int = 16) -> tuple[nn.Module, Tensor]:
    """A tied model of which the weight is larger than anything that it computes."""
    model = nn.Sequential(nn.Embedding(500, width), nn.Linear(width, 500, bias=False))
    model[1].weight = model[0].weight
    return model, torch.randint(0, 500, (4,))


@pytest.mark.parametrize("low", [None, torch.float16], ids=str)
def test_no_temporary_has_the_size_of_the_weight(low: torch.dtype | None) -> None:
    """Autograd's own backward makes one of 500 x 16; here the largest is the logits, 4 x 500."""
    model, ids = vocabulary()
    model(ids).sum().backward()
    serve = serve_all(model)
    largest = []
    for block in (serve.micro_batch, torch.enable_grad):
        with block():
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                loss = model(ids).sum()
            with Largest() as mode:
                loss.backward()
        largest.append(mode.elements)
    assert largest == [largest[0], 8000]
    assert largest[0] <= 2000


def test_a_tied_weights_first_gradient_is_one_tensor() -> None:
    """Autograd makes one for each use, and one for what they add up to."""
    model, ids = vocabulary()
    times = []
    for block in (serve_all(model).micro_batch, torch.enable_grad):
        model.zero_grad()
        with block():
            loss = model(ids).sum()
            with Largest() as mode:
                loss.backward()
        assert mode.elements == 8000
        times.append(mode.times)
    assert times == [1, times[1]]
    assert times[1] >= 3


def test_half_precision_products_are_added_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """To an fp32 sum, a piece of 1600 elements at a time."""
    monkeypatch.setattr("accumplug.inplace.products.PIECE", 1600)
    model, ids = vocabulary()
    model(ids).sum().backward()
    with serve_all(model).micro_batch():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids).sum()
        with Largest() as mode:
            loss.backward()
    assert mode.elements == 1600


def test_a_first_gradient_is_added_to_zeros_laid_out_like_the_weight() -> None:
    """With the bits of the plain one; without a sum, or with one that the loop has zeroed."""
    for layout in (lambda w: w, lambda w: w.t().contiguous().t()):
        model = nn.Linear(300, 200)
        model.weight = nn.Parameter(layout(model.weight.detach()))
        x = torch.randn(7, 300)
        expected = torch.autograd.grad(model(x).sin().sum(), model.weight)[0]
        serve = serve_all(model)
        for zeroed in (True, False):
            model.zero_grad(set_to_none=zeroed)
            kept = model.weight.grad
            with serve.micro_batch():
                model(x).sin().sum().backward()
            assert torch.equal(model.weight.grad, expected)
            assert model.weight.grad.stride() == model.weight.stride()
            assert zeroed or model.weight.grad is kept
        assert serve.report().served == ("Linear",)
        assert not model.weight.grad.requires_grad


def test_a_weight_that_was_not_used_gets_no_gradient() -> None:
    """Not even zeros: an optimizer would decay what has had no part in the window."""
    model = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4), nn.Embedding(3, 2)])
    with serve_all(model).micro_batch():
        model[1](torch.ones(2, 8))
        model[0](torch.ones(2, 8)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None
    assert model[2].weight.grad is None


def traces(model: nn.Module) -> list[Any]:
    """What could be left behind on a model and in torch."""
    return [
        *((type(p), vars(p).copy(), p._backward_hooks) for p in model.parameters()),
        *((type(m), sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()),
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        F.linear,
        F.embedding,
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_model(fails: bool) -> None:
    """Not after an error either."""
    model = tied_linear()
    model.zero_grad(set_to_none=False)
    model[2].weight.note = "its own"
    model(tokens()).sum().backward()
    before = traces(model)
    try:
        with serve_all(model).micro_batch():
            assert traces(model) != before
            model(tokens()).sum().backward()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert traces(model) == before


def test_nothing_of_a_forward_is_kept_alive() -> None:
    """What it saved goes with its result, what it cast at the end of the block."""
    model = nn.Linear(8, 9)
    model.weight.grad = torch.zeros(9, 8)
    serve = serve_all(model)
    x = torch.randn(2, 8)
    gone = weakref.ref(x)
    gc.disable()
    try:
        with serve.micro_batch(), torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            del x, y
            assert gone() is None
        low = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype is torch.bfloat16]
        assert not [t for t in low if t.shape == (9, 8)]
    finally:
        gc.enable()


@contextmanager
def linear() -> Iterator[tuple[nn.Linear, Tensor, InplaceGradients]]:
    """A served Linear with a sum of ones, in its micro-batch, and an input."""
    model = nn.Linear(5, 4).double()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    serve = serve_all(model)
    with serve.micro_batch():
        yield model, torch.randn(3, 5, dtype=torch.double, requires_grad=True), serve


def test_autograd_grad_returns_the_gradient_and_adds_nothing() -> None:
    """torch.autograd.grad is no accumulation, whether it asks for the weight or for another."""
    with linear() as (model, x, serve):
        loss = model(x).square().sum()
        dy = 2 * model(x).detach()
        (dw,) = torch.autograd.grad(loss, model.weight, retain_graph=True)
        torch.testing.assert_close(dw, dy.T @ x)
        with Largest() as mode:
            (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(dx, dy @ model.weight)
        assert mode.elements == x.numel()  # the weight's gradient is not computed
        assert torch.equal(model.weight.grad, torch.ones(4, 5))
        assert not serve.report().served


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w.t()[:, 1:4]], ids=["t", "slice"])
def test_autograd_grad_returns_the_gradient_of_a_view(view: Callable[[Tensor], Tensor]) -> None:
    """As for the weight itself, and nothing is added."""
    model = nn.Linear(8, 5)
    x = torch.randn(3, 8)
    with serve_all(model).micro_batch():
        part = view(model.weight)
        (grad,) = torch.autograd.grad((x @ part).sum(), part)
    torch.testing.assert_close(grad, x.sum(0).unsqueeze(1).expand_as(grad))
    assert model.weight.grad is None


def test_backward_with_inputs_adds_to_these_only() -> None:
    """backward(inputs=...) accumulates, but not into what it does not name."""
    with linear() as (model, x, _):
        loss = model(x).sum()
        loss.backward(inputs=[x], retain_graph=True)
        assert torch.equal(model.weight.grad, torch.ones(4, 5))
        loss.backward(inputs=[model.weight])
        torch.testing.assert_close(model.weight.grad, 1 + x.detach().sum(0).expand(4, 5))
        assert torch.equal(model.bias.grad, torch.ones(4))


def test_two_backwards_of_a_graph_add_twice() -> None:
    """retain_graph=True."""
    with linear() as (model, x, serve):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        torch.testing.assert_close(model.weight.grad, 1 + 2 * x.detach().sum(0).expand(4, 5))
        assert serve.report().served == ("Linear",)


@pytest.mark.parametrize("low", [False, True])
def test_second_derivatives_are_autograds(low: bool) -> None:
    """A gradient penalty: create_graph=True leaves all to autograd."""

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = model(x).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return y + dx.square().sum()

    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(3, 5, requires_grad=True)
    model.zero_grad(set_to_none=False)
    model(x).sum().backward()
    plain = copy.deepcopy(model)
    for (_, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        p.grad = q.grad.clone()
    penalty(plain, x).backward()
    with serve_all(model).micro_batch():
        penalty(model, x).backward()
    assert_near(gradients(model), gradients(plain), 2**-8 if low else 1e-6)


def test_torchs_own_check_of_first_and_second_derivatives_passes() -> None:
    """gradcheck and gradgradcheck, by finite differences."""
    with linear() as (model, x, _):
        ids = torch.tensor([0, 2, 2, 1])

        def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y = F.linear(x, weight, bias).tanh() @ weight[:3].T.T[:, :4].T[:4]
            return y.sum() + F.embedding(ids, weight).tanh().sum()

        assert torch.autograd.gradcheck(function, (x, model.weight, model.bias))
        assert torch.autograd.gradgradcheck(function, (x, model.weight, model.bias))
        assert torch.equal(model.weight.grad, torch.ones(4, 5))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # once in a process
def test_backward_with_create_graph_gives_a_gradient_with_a_graph() -> None:
    """As autograd does, the sum is then a new tensor."""
    with linear() as (model, x, _):
        loss, old = model(x).square().sum(), model.weight.grad
        loss.backward(create_graph=True)
        assert torch.equal(old, torch.ones(4, 5))
        assert model.weight.grad.requires_grad
        dy = 2 * model(x).detach()
        torch.testing.assert_close(model.weight.grad.detach(), 1 + dy.T @ x)
        model.zero_grad()


@pytest.mark.parametrize("keep", [Tensor.retain_grad, lambda view: view.register_hook(torch.neg)])
def test_a_view_of_a_weight_with_a_hook_is_left_to_autograd(keep: Any) -> None:
    """It has to be given its gradient."""
    with linear() as (model, x, _):
        plain = copy.deepcopy(model)
        plain.weight.grad = torch.ones(4, 5).double()
        for each in (model, plain):
            view = each.weight.T
            keep(view)
            (x @ view).sum().backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("replaced", [None, 7.0])
def test_the_sum_is_looked_for_when_the_gradient_arrives(replaced: float | None) -> None:
    """.grad set to None, or to another tensor, between forward and backward."""
    with linear() as (model, x, _):
        y = model(x).sum()
        old = model.weight.grad
        model.weight.grad = None if replaced is None else torch.full_like(old, replaced)
        y.backward()
        expected = (replaced or 0) + x.detach().sum(0).expand(4, 5)
        torch.testing.assert_close(model.weight.grad, expected)
        assert torch.equal(old, torch.ones(4, 5))


def test_a_backward_after_the_block_goes_through_autograd() -> None:
    """Then nobody knows any more what the sum is for."""
    with linear() as (model, x, serve):
        y = model(x).sum()
    y.backward()
    torch.testing.assert_close(model.weight.grad, 1 + x.detach().sum(0).expand(4, 5))
    assert not serve.report().served


def test_a_view_that_outlives_the_block_is_an_ordinary_one() -> None:
    """A transpose that the model has kept is multiplied in the next, plain micro-batch."""
    with linear() as (model, x, serve):
        kept = model.weight.T
    (x @ kept).sum().backward()
    torch.testing.assert_close(model.weight.grad, 1 + x.detach().sum(0).expand(4, 5))
    assert not serve.report().served


def test_what_requires_no_gradient_at_backward_time_gets_none() -> None:
    """So one Accumulator keeps its backward out of the sums of another."""
    with linear() as (model, x, _):
        y = model(x).sum()
        model.weight.requires_grad_(False)
        y.backward()
        model(x).sum().backward()
        model.weight.requires_grad_(True)
    assert torch.equal(model.weight.grad, torch.ones(4, 5))


def test_hooks_on_a_weight_see_every_gradient() -> None:
    """A weight with a tensor hook or a post-accumulate hook is not served; its neighbour is."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    seen = []
    model[0].weight.register_hook(lambda grad: 2 * grad)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    plain = copy.deepcopy(model)
    plain[0].weight.register_hook(lambda grad: 2 * grad)
    expected = run(plain, zoo_loss(hidden(3, 4)), served=False)
    got = run(model, zoo_loss(hidden(3, 4)), served=True)
    assert_near(got[1], expected[1], 1e-6)
    assert len(seen) == 3
    assert torch.equal(seen[-1], model[1].weight.grad)
    assert got[2].served == ("2",)
    assert got[2].others == dict.fromkeys("01", "a hook on the weight has to see each gradient")


def test_a_hook_that_comes_after_the_forward_sees_the_gradient() -> None:
    """It is looked for again when the gradient arrives."""
    with linear() as (model, x, _):
        y = model(x).sum()
        model.weight.register_hook(lambda grad: 0 * grad)
        y.backward()
        assert torch.equal(model.weight.grad, torch.ones(4, 5))


def test_hooks_on_a_view_see_the_gradient_of_what_is_taken_of_it() -> None:
    """And a view that retains its gradient has one."""
    results = []
    for served in (True, False):
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(8, 6)), torch.randn(3, 6)
        model = nn.ParameterList([weight])
        with serve_all(model).micro_batch() if served else torch.enable_grad():
            hooked, kept = weight.t(), weight.t()
            hooked.register_hook(lambda grad: 2 * grad)
            kept.retain_grad()
            (x @ hooked[:, :4]).sin().sum().backward()
            (x @ kept[:, 2:]).sin().sum().backward()
        results.append((weight.grad, kept.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_the_place_of_a_view_is_that_at_its_making() -> None:
    """Though what it was indexed or split by has changed when the gradient comes."""
    results = []
    for served in (True, False):
        torch.manual_seed(0)
        experts, rows = nn.Parameter(torch.randn(3, 6, 6)), nn.Parameter(torch.randn(8, 6))
        model, y = nn.ParameterList([experts, rows]), torch.randn(2, 6)
        with serve_all(model).micro_batch() if served else torch.enable_grad():
            expert, sizes = torch.tensor(0), [2, 6]
            for _ in range(3):
                y = (y @ experts[expert]).tanh()
                expert += 1
            parts = rows.split(sizes)
            sizes.reverse()
            loss = y.sum() + sum(F.linear(y, part).sin().sum() for part in parts)
            loss.backward()
        results.append((experts.grad, rows.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_part_of_a_weight_whose_sum_lies_otherwise_in_memory_is_right() -> None:
    """The sum was set by hand, transposed."""
    weight, x = nn.Parameter(torch.randn(8, 6)), torch.randn(3, 6)
    weight.grad = torch.zeros(6, 8).t()
    with serve_all(nn.ParameterList([weight])).micro_batch():
        (x @ weight.t()[:, 2:5]).sum().backward()
    expected = torch.zeros(8, 6)
    expected[2:5] = x.sum(0)
    torch.testing.assert_close(weight.grad, expected)


def test_hooks_on_modules_run_as_always() -> None:
    """Forward, full backward and pre hooks; they are given what they are given otherwise."""

    def hooked(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        model.register_forward_hook(lambda m, args, y: seen.append(y.detach()))
        model.register_full_backward_hook(lambda m, dx, dy: seen.extend((*dx, *dy)))
        model.register_full_backward_pre_hook(lambda m, dy: seen.extend(dy))
        return seen

    model = nn.Linear(8, 8)
    plain = copy.deepcopy(model)
    expected, got = hooked(plain), hooked(model)
    run(plain, zoo_loss(hidden()), served=False)
    run(model, zoo_loss(hidden()), served=True)
    assert len(got) == len(expected) == 12
    assert all(map(torch.equal, got, expected))


class Checkpointed(nn.Module):
    """Two checkpointed parts with a weight in common, and a tied head."""

    def __init__(self, reentrant: bool, low: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
        self.second = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.reentrant, self.low = reentrant, low

    def forward(self, ids: Tensor) -> Tensor:
        def both(x: Tensor) -> Tensor:
            x = checkpoint(self.first, x, use_reentrant=self.reentrant)
            return self.second(self.first(x))

        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            x = checkpoint(both, self.embedding(ids), use_reentrant=self.reentrant)
            return F.linear(x, self.embedding.weight)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_served_too(reentrant: bool, low: bool) -> None:
    """Nested, with dropout, a weight used twice and a tied head; what is recomputed is added."""
    model = Checkpointed(reentrant, low)
    plain = copy.deepcopy(model)
    plain.reentrant = False  # torch 2.10 loses gradient in a reentrant one under autocast
    expected_losses, expected, _ = run(plain, zoo_loss(tokens), served=False)
    losses, got, report = run(model, zoo_loss(tokens), served=True)
    assert all(map(torch.equal, losses, expected_losses))
    # Under autocast the order of the bf16 roundings in the backward differs.
    assert_near(got, expected, 2**-7 if low else 1e-6)
    assert {"embedding", "first.0", "second.linear1", "second.self_attn"} <= set(report.served)


@contextmanager
def saved() -> Iterator[list[Any]]:
    """The shape, strides, dtype and value of each tensor that autograd saves."""
    seen: list[Any] = []

    def note(x: Tensor) -> Tensor:
        assert torch._C._is_torch_function_enabled()
        seen.append((x.shape, x.stride(), x.dtype, x.double().sum().item()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, note):
        yield seen


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "name", ["linear", "linear of 3-D", "transposed input", "Conv1D", "embedding"]
)
def test_the_same_tensors_are_saved_in_the_same_order(name: str, graph: bool, low: bool) -> None:
    """Checkpointing pairs a forward with its recomputation by it, served or not."""
    build, x, _ = ZOO[name]
    model = build()
    given = x()
    given = given if name == "embedding" else given.requires_grad_(graph)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        with saved() as expected:
            model(given).sum().backward()
        model.zero_grad(set_to_none=False)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with serve_all(model).micro_batch(), saved() as got:
            model(given).sum().backward()
    assert got == expected


def test_a_changed_input_or_weight_is_noticed() -> None:
    """Autograd's check of versions."""
    with linear() as (model, x, _):
        y = model(x * 1)
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        z = x * 1
        y = model(z)
        z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        assert torch.equal(model.weight.grad, torch.ones(4, 5))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_the_sum_is_fp32_and_as_good_as_autograds(low: torch.dtype) -> None:
    """Against fp64, over three micro-batches; the forward has the same bits."""

    def loss(model: nn.Module, index: int) -> Tensor:
        ids = tokens()
        with torch.autocast("cpu", low, enabled=next(model.parameters()).dtype is torch.float32):
            return model(ids).float().sin().sum()

    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 32), Conv1D(32, 8), nn.Linear(8, 11, bias=False)
    )
    model[3].weight = model[0].weight
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    losses, got, report = run(model, loss, served=True)
    expected_losses, expected, _ = run(plain, loss, served=False)
    _, truth, _ = run(exact, loss, served=False)
    assert all(map(torch.equal, losses, expected_losses))
    for name, grad in got.items():
        assert grad.dtype is torch.float32
        error, usual = ((g.double() - truth[name]).norm() for g in (grad, expected[name]))
        assert error <= 1.1 * usual, name
    assert report.served == ("0", "1", "2", "3")


def test_autocast_leaves_fp64_as_it_is() -> None:
    """And so does a weight that is served."""
    with linear() as (model, x, _), torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        assert y.dtype is torch.float64
        y.sum().backward()
        torch.testing.assert_close(model.weight.grad, 1 + x.detach().sum(0).expand(4, 5))


@pytest.mark.parametrize("change", ["in .data", "another .data", "a fused step"])
def test_a_weight_that_changes_after_a_backward_is_cast_anew(change: str) -> None:
    """In ways that count no version; a loop that looks a step ahead (SAM) does."""
    losses = []
    for served in (True, False):
        torch.manual_seed(0)
        model, x = nn.Linear(16, 8), torch.randn(4, 16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
        with serve_all(model).micro_batch() if served else torch.enable_grad():
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).square().mean()
                loss.backward()
                if change == "a fused step":
                    optimizer.step()
                elif change == "in .data":
                    model.weight.data.add_(0.5)
                else:
                    model.weight.data = model.weight.data + 0.5
        losses.append(loss.detach())
    assert torch.equal(*losses)


def test_a_weight_is_cast_once_in_a_micro_batch() -> None:
    """As autocast's own cache does; a weight that changed is cast again."""
    model = nn.Linear(8, 8)
    model.weight.grad = torch.zeros(8, 8)
    with serve_all(model).micro_batch(), torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(2, 8, requires_grad=True)
        first, second = model(x), model(x)
        one, two = (y.grad_fn.saved_tensors[1] for y in (first, second))
        assert one.data_ptr() == two.data_ptr()
        with torch.no_grad():
            model.weight.mul_(2)
        third = model(x)
        assert torch.equal(third.grad_fn.saved_tensors[1], 2 * one)


def test_a_bf16_weight_is_served_in_products_and_not_in_lookups() -> None:
    """A product is rounded once; rows one after another would be rounded each."""
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8)).bfloat16()
    _, got, report = run(model, zoo_loss(tokens), served=True)
    assert got["1.weight"].dtype is torch.bfloat16
    assert report.served == ("1",)
    assert report.others == {
        "0": "an embedding whose sum in torch.bfloat16 would round at each row"
    }


def test_a_sparse_lookup_keeps_its_sparse_gradient() -> None:
    """Even beside a dense sum, which may be gone when the gradient arrives."""
    model = nn.Embedding(11, 8, sparse=True)
    model.weight.grad = torch.zeros(11, 8)
    serve = serve_all(model)
    with serve.micro_batch():
        y = model(tokens()).sum()
        model.weight.grad = None
        y.backward()
        assert model.weight.grad.is_sparse
    model.weight.grad = None
    reason = "an embedding with max_norm, scale_grad_by_freq or sparse"
    assert serve.report().others == {"Embedding": reason}


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_a_lookup_of_nothing_adds_nothing(shape: tuple[int, ...]) -> None:
    """A ragged micro-batch, or an expert that no token was sent to."""
    model = nn.Embedding(10, 4)
    with serve_all(model).micro_batch():
        model(torch.zeros(shape, dtype=torch.long)).sum().backward()
    assert torch.equal(model.weight.grad, torch.zeros(10, 4))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 8), (3, 8), (3, 1)], ids=str)
def test_a_bias_that_broadcasts_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], wide: bool
) -> None:
    """Of the shapes that torch takes, one is usual."""
    monkeypatch.setattr("accumplug.inplace.products.WIDE", 0 if wide else 2**22)
    monkeypatch.setattr("accumplug.inplace.products.COLUMNS", 2)
    model = nn.ParameterList([torch.randn(8, 6), torch.randn(shape)])
    plain, x = copy.deepcopy(model), torch.randn(3, 6)
    F.linear(x, *plain).sin().sum().backward()
    with serve_all(model).micro_batch():
        F.linear(x, *model).sin().sum().backward()
        torch.addmm(model[1], x, model[0].t())
    assert_near(gradients(model), gradients(plain), 1e-6)


def test_complex_numbers_and_the_meta_device_are_left_to_autograd() -> None:
    """The gradient of a complex product is conjugated; there is no autocast on meta."""
    model = nn.Linear(6, 4, dtype=torch.complex64)
    plain, x = copy.deepcopy(model), torch.randn(3, 6, dtype=torch.complex64)
    plain(x).abs().sum().backward()
    serve = serve_all(model)
    with serve.micro_batch():
        model(x).abs().sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert serve.report().others == {"Linear": "its weight is torch.complex64"}
    nowhere = nn.Linear(6, 4, device="meta")
    with serve_all(nowhere).micro_batch():
        nowhere(torch.empty(3, 6, device="meta")).sum().backward()
    assert nowhere.weight.grad.is_meta


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection_still_finds_a_nan_in_a_weights_gradient() -> None:
    """It looks at what autograd is handed."""
    model, infinite = nn.Linear(6, 4), torch.full((2, 6), torch.inf)
    nan = pytest.raises(RuntimeError, match="returned nan values")
    with serve_all(model).micro_batch(), torch.autograd.detect_anomaly(), nan:
        (model(infinite) * 0).nan_to_num().sum().backward()


def test_a_backward_that_is_compiled_loses_no_gradient() -> None:
    """What a traced backward does to `.grad` by itself would be lost."""
    from torch._dynamo import compiled_autograd

    model, x = nn.Linear(6, 4), torch.randn(3, 6)
    with serve_all(model).micro_batch():
        loss = model(x).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(4, 6))


def test_selective_checkpointing_that_saves_everything_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It refuses what is written to after it was made, as the pieces of a wide product are."""
    monkeypatch.setattr("accumplug.inplace.products.WIDE", 0)
    monkeypatch.setattr("accumplug.inplace.products.COLUMNS", 2)
    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE
    )
    model, x = nn.Linear(6, 40), torch.randn(3, 6, requires_grad=True)
    with serve_all(model).micro_batch():
        checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()
    torch.testing.assert_close(model.weight.grad, x.detach().sum(0).expand(40, 6))


def test_a_wrong_padding_index_is_refused_as_always() -> None:
    """By F.embedding, in its words."""
    with linear() as (model, _, _), pytest.raises(AssertionError, match="within num_embeddings"):
        F.embedding(torch.tensor([0]), model.weight, padding_idx=4)


@needs_grad_dtype
def test_fp32_sums_of_bf16_weights_are_served() -> None:
    """Tensor.grad_dtype: the sum of 1 and 255 times 2^-9 is exact, in bf16 it stays 1."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1, bias=False)).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
        torch.nn.init.ones_(parameter)
    serve = serve_all(model)
    for index in range(256):
        factor = 1.0 if index == 0 else 2.0**-9
        with serve.micro_batch():
            (model(torch.tensor([1])) * factor).sum().backward()
    total = 1 + 255 / 512
    assert torch.equal(model[0].weight.grad, torch.tensor([[0.0] * 2, [total] * 2, [0.0] * 2]))
    assert torch.equal(model[1].weight.grad, torch.tensor([[total, total]]))
    assert serve.report().served == ("0", "1")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_and_forward_mode_are_left_alone() -> None:
    """vmap, grad and functional_call of torch.func, and dual numbers, of a served weight."""
    with linear() as (model, x, _):
        one = torch.func.vmap(lambda rows: F.linear(rows, model.weight))(x.expand(2, 3, 5))
        torch.testing.assert_close(one, (x @ model.weight.T).expand(2, 3, 4))
        dw = torch.func.grad(lambda w: F.linear(x, w).sum())(model.weight)
        torch.testing.assert_close(dw, x.sum(0).expand(4, 5))
        parameters = {name: 2 * p for name, p in model.named_parameters()}
        torch.testing.assert_close(torch.func.functional_call(model, parameters, x), 2 * model(x))
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(y).tangent
        torch.testing.assert_close(tangent, model.weight.sum(1).expand(3, 4))
        assert torch.equal(model.weight.grad, torch.ones(4, 5))


def test_evaluation_inside_of_a_micro_batch_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """no_grad and inference_mode cost what they always do; eval alone is served."""
    with linear() as (model, x, _):
        with monkeypatch.context() as patch:
            patch.setattr("accumplug.inplace.calls.Product", None)
            with torch.no_grad():
                assert not model(x).requires_grad
            with torch.inference_mode():
                assert torch.equal(model(x), model(x))
        with torch.no_grad():
            view = model.weight.T
        (x @ view).sum().backward()
        assert torch.equal(model.weight.grad, torch.ones(4, 5))
        model.eval()
        model(x).sum().backward()
        torch.testing.assert_close(model.weight.grad, 1 + x.detach().sum(0).expand(4, 5))


def test_another_tensor_subclass_decides_for_itself() -> None:
    """Its own __torch_function__ sees the call, and the gradient is right."""
    calls = []

    class Logged(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    with linear() as (model, x, serve):
        y = model(x.as_subclass(Logged))
        assert type(y) is Logged
        assert F.linear in calls
        y.sum().backward()
        torch.testing.assert_close(model.weight.grad, 1 + x.detach().sum(0).expand(4, 5))
        assert not serve.report().served


def test_copies_made_inside_of_a_micro_batch_are_ordinary() -> None:
    """deepcopy (an EMA), torch.save and state_dict."""
    with linear() as (model, _, _):
        model.weight.note = 3
        clone = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        state = model.state_dict()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (clone, loaded):
        assert type(other.weight) is nn.Parameter
        assert torch.equal(other.weight, model.weight)
    assert vars(loaded.weight) == {"note": 3}
    assert type(state["weight"]) is Tensor


def test_an_optimizer_that_steps_inside_finds_ordinary_parameters() -> None:
    """torch chooses foreach by their exact class; afterwards they are watched again."""
    with linear() as (model, x, _):
        kinds = []
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        sgd.register_step_pre_hook(lambda *_: kinds.append(type(model.weight)))
        sgd.step()
        assert kinds == [nn.Parameter]
        assert type(model.weight) is not nn.Parameter
        model(x).sum().backward()
        torch.testing.assert_close(model.weight.grad, 1 + x.detach().sum(0).expand(4, 5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_fall_back_and_say_so() -> None:
    """torch.compile from outside, inside, and Module.compile; what is beside them is served."""
    for build in (
        lambda a: torch.compile(a, backend="eager"),
        lambda a: (a.compile(backend="eager"), a)[1],
    ):
        model = nn.Sequential(build(nn.Linear(8, 8)), nn.Linear(8, 8))
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        plain.load_state_dict(
            dict(zip(plain.state_dict(), model.state_dict().values(), strict=True))
        )
        expected = run(plain, zoo_loss(hidden()), served=False)
        _, got, report = run(model, zoo_loss(hidden()), served=True)
        assert_near(dict(zip(expected[1], got.values(), strict=True)), expected[1], 1e-6)
        assert report.served == ("1",)
        assert set(report.others.values()) == {"compiled"}
    assert set(serve_all(torch.compile(plain)).report().others.values()) == {"compiled"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_served_weight_in_a_compiled_function_is_right() -> None:
    """One that nobody could know of; without a break in its graph."""
    with linear() as (model, x, _):
        function = torch.compile(
            lambda x: F.linear(x, model.weight).sin() @ model.weight,
            backend="eager",
            fullgraph=True,
        )
        plain = copy.deepcopy(model)
        function(x).sum().backward()
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    (F.linear(x, plain.weight).sin() @ plain.weight).sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


def test_on_another_stream_it_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waits for it; here the streams are numbers."""
    streams = iter([1, 2])
    monkeypatch.setattr(sums, "_stream", lambda weight: next(streams))
    with linear() as (model, x, serve):
        model(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, 1 + x.detach().sum(0).expand(4, 5))
    assert not serve.report().served


@pytest.mark.parametrize(
    ("grad", "reason"),
    [
        (torch.zeros(4, 8).to_sparse(), "torch.sparse_coo"),
        pytest.param(
            torch.zeros(4, 8, dtype=torch.float64),
            "torch.float64, the weight torch.float32",
            marks=needs_grad_dtype,
        ),
        (torch.zeros(4, 8, requires_grad=True), "part of a graph"),
    ],
    ids=["sparse", "dtype", "graph"],
)
def test_a_sum_that_does_not_fit_is_not_added_to(grad: Tensor, reason: str) -> None:
    """And the report says in which way."""
    model = nn.Linear(8, 4)
    model.weight.grad_dtype = None  # any
    model.weight.grad = grad
    serve = serve_all(model)
    with serve.micro_batch():
        assert type(model.weight) is nn.Parameter
    assert reason in serve.report().others["Linear"]


def test_the_report_names_each_module_and_the_reason() -> None:
    """By the kinds of reasons there are."""

    class Quantized(nn.Parameter):
        pass

    model = nn.ModuleDict(
        {
            "served": nn.Linear(8, 8),
            "unused": nn.Linear(8, 8),
            "small": nn.Linear(2, 2),
            "norm": nn.LayerNorm(8),
            "convolution": nn.Conv1d(8, 8, 2),
            "frozen": nn.Linear(8, 8).requires_grad_(False),
            "quantized": nn.Linear(8, 8),
            "parametrized": nn.Linear(8, 8),
        }
    )
    model["quantized"].weight = Quantized(torch.randn(8, 8))
    parametrize.register_parametrization(model["parametrized"], "weight", nn.Tanh())
    serve = InplaceGradients(model, smallest=9)
    assert not serve.report().served
    assert serve.report().others["served"] == "no micro-batch has run yet"
    with serve.micro_batch():
        model["served"](torch.ones(1, 8)).sum().backward()
        assert serve.report().served == ("served",)
    report = serve.report()
    assert report.served == ("served",)
    assert report.others == {
        "unused": "no product with its weight, and no lookup in it, was seen",
        "small": "fewer than 9 elements, where autograd is as quick",
        "norm": "vectors only",
        "convolution": "a convolution, whose gradient kernels can't add to a sum",
        "frozen": "frozen",
        "quantized": "its weight is a Quantized",
        "parametrized": "vectors only",
        "parametrized.parametrizations.weight": "parametrized",
    }
    assert str(report).startswith("in place: 1 module (served)\n")
    assert "not: 2 modules (norm, parametrized): vectors only" in str(report)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_and_sharded_modules_fall_back_and_say_so() -> None:
    """With all that is inside of them."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))
    sharded = nn.Sequential(nn.Linear(8, 8))
    sharded.__class__ = type("Sharded", (FSDPModule, nn.Sequential), {})
    assert serve_all(scripted).report().others == {"0": "scripted"}
    assert serve_all(sharded).report().others == {"0": "sharded"}


def test_several_models_are_told_apart() -> None:
    """By their number."""
    serve = serve_all(nn.Linear(8, 8), nn.Linear(8, 8))
    assert list(serve.report().others) == ["0.Linear", "1.Linear"]


def test_a_weight_that_replaces_another_is_served_and_the_old_one_let_go() -> None:
    """From its first window on; as where nothing is added in place, it is not kept alive."""
    for inplace in (True, False):
        model = nn.Sequential(nn.Linear(800, 700), nn.Linear(700, 2))
        accum, x = Accumulator(1, inplace=inplace), torch.randn(3, 800)
        for size in (800, 900):
            old = weakref.ref(model[0].weight)
            model[0], x = nn.Linear(size, 700), torch.randn(3, size)
            with accum(model):
                accum.backward(model(x).sum())
            model.zero_grad()
            assert accum.inplace_report().served == (("0",) if inplace else ())
        gc.collect()
        assert old() is None
