"""A state (nested containers of tensors and plain values) as JSON and named tensors, and back.

What comes back equals what was given, types included: tuples, dicts with integer keys (as in
`optimizer.state_dict()`), infinities, tensors that share memory. JSON has no word for these; they
are written as an object whose only or first key starts with "$". Whatever is neither a tensor
nor such a value is refused when it is saved, so that nothing needs pickle.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accumplug.errors import CheckpointError
from accumplug.storage.aliases import VIEWED, TensorRef, find, place
from accumplug.storage.safetensors_io import METADATA

MAX_DEPTH = 64  # containers in containers; far from the depth at which json gives up


class Encoded(NamedTuple):
    """A state in two halves: what JSON can hold, and the tensors that it refers to by name."""

    tree: Any
    tensors: dict[str, torch.Tensor]


def encode(state: Any, name: str = "state") -> Encoded:
    """Takes `state` apart. No tensor is copied: the result refers to the same memory.

    The tensors are named after their path ("state.0.exp_avg"), a model's after its parameters.
    Raises TypeError naming the path (from `name` on) of what can't be saved.
    """
    encoder = _Encoder(name)
    tree = encoder.value(state, ())
    return Encoded(tree, place(encoder.refs))


class _Encoder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.refs: list[TensorRef] = []
        self.names = {METADATA}

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise ValueError(f"{self.at(path)} is nested more than {MAX_DEPTH} deep")
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if kind is list:
            return self.sequence(value, path)
        if kind in (tuple, torch.Size):
            return {"$tuple": self.sequence(value, path)}
        if kind is dict:
            return self.mapping(value, path)
        if kind is Counter:  # the milestones of MultiStepLR
            return {"$counter": self.pairs(value, path)}
        if kind is OrderedDict:
            return self.ordered(value, path)
        if kind.__module__ == "numpy" and isinstance(plain := _item(value), bool | int | float):
            return self.value(plain, path)
        raise TypeError(
            f"{self.at(path)} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds "
            "tensors, numbers, strings, lists, tuples and dicts (no pickle): give one of those"
        )

    def sequence(self, values: Iterable[Any], path: tuple[Any, ...]) -> list[Any]:
        return [self.value(value, (*path, index)) for index, value in enumerate(values)]

    def mapping(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        return {"$dict": self.pairs(value, path)}

    def pairs(self, value: dict[Any, Any], path: tuple[Any, ...]) -> list[list[Any]]:
        pairs = []
        for key, item in value.items():
            if not _is_key(key):
                raise TypeError(f"{self.at(path)} has a {type(key).__qualname__} as a key")
            pairs.append([self.value(key, (*path, key)), self.value(item, (*path, key))])
        return pairs

    def ordered(self, value: OrderedDict[Any, Any], path: tuple[Any, ...]) -> Any:
        result = {"$ordered": self.mapping(value, path)}
        # A model's state_dict carries the version of each module here; without it a module
        # that migrates old states in load_state_dict would migrate a new one.
        if metadata := getattr(value, "_metadata", None):
            result["metadata"] = self.value(metadata, (*path, "_metadata"))
        return result

    def tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        kind = type(value)
        if kind not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{self.at(path)} is a {kind.__qualname__}: give its local tensor")
        if value.layout is not torch.strided or value.is_meta or value.dtype not in VIEWED:
            raise TypeError(
                f"{self.at(path)} is a tensor of {value.dtype}, {value.layout}, on "
                f"{value.device}; a checkpoint holds plain dense tensors"
            )
        name = ".".join(map(str, path)) or self.name
        while name in self.names:
            name += "_"
        self.names.add(name)
        node: dict[str, Any] = {}
        self.refs.append(TensorRef(node, name, value.detach().resolve_conj().resolve_neg()))
        return node

    def at(self, path: tuple[Any, ...]) -> str:
        return self.name + "".join(f".{k}" if type(k) is str else f"[{k!r}]" for k in path)


def _is_key(key: Any) -> bool:
    """Plain values, and tuples of them, are equal to what is read back; a tensor would not be."""
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, int, float, str)


def _item(value: Any) -> Any:
    """A NumPy scalar as a Python number; None for an array."""
    return value.item() if getattr(value, "shape", None) == () else None


def decode(tree: Any, tensors: dict[str, torch.Tensor], where: Path) -> Any:
    """Puts together what `encode` took apart; `where` is the file to name in a CheckpointError."""
    try:
        return _decode(tree, dict(tensors), 0)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except RuntimeError as error:  # torch has no such tensor; or out of memory
        raise CheckpointError(f"{where}: {error}") from error


def _decode(tree: Any, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise CheckpointError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(tree, list):
        return [_decode(item, tensors, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    marker = next((key for key in tree if key.startswith("$")), None)
    if marker is None:
        return {key: _decode(item, tensors, depth + 1) for key, item in tree.items()}
    if marker == "$tensor":
        return find(tree, tensors)
    content = tree[marker]
    if marker == "$ordered" and tree.keys() <= {"$ordered", "metadata"}:
        ordered = OrderedDict(_dict(_decode(content, tensors, depth)))
        if "metadata" in tree:
            ordered._metadata = _decode(tree["metadata"], tensors, depth + 1)  # type: ignore[attr-defined]
        return ordered
    if len(tree) == 1:
        if marker == "$float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if marker == "$tuple" and isinstance(content, list):
            return tuple(_decode(item, tensors, depth + 1) for item in content)
        if marker == "$dict":
            return _pairs(content, tensors, depth)
        if marker == "$counter":
            return Counter(_pairs(content, tensors, depth))
    raise CheckpointError(f"not a value that was saved: {tree!r:.200}")


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise CheckpointError(f"not a dict: {value!r:.200}")
    return value


def _pairs(content: Any, tensors: dict[str, torch.Tensor], depth: int) -> dict[Any, Any]:
    result = {}
    for pair in content if isinstance(content, list) else [content]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CheckpointError(f"not a dict: {content!r:.200}")
        key = _decode(pair[0], tensors, depth + 1)
        if not _is_key(key):
            raise CheckpointError(f"not a key: {pair[0]!r:.200}")
        result[key] = _decode(pair[1], tensors, depth + 1)
    if len(result) != len(content):
        raise CheckpointError(f"a dict with a key twice: {content!r:.200}")
    return result
