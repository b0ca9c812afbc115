"""The order in which a sampler goes through its data, told so that another process can draw it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

State = dict[str, Any]
DISTRIBUTED = ("num_replicas", "shuffle", "seed", "drop_last")


def describe(sampler: Any, loader: Any) -> State:
    """What the order of a pass of `loader` that starts now follows from, if that can be told."""
    if isinstance(sampler, DistributedSampler):
        if type(sampler).__iter__ is DistributedSampler.__iter__:
            told = {name: getattr(sampler, name) for name in (*DISTRIBUTED, "epoch")}
            return {"kind": "distributed", "length": len(sampler.dataset), **told}  # type: ignore[arg-type]
    elif type(sampler) is SequentialSampler:
        return {"kind": "listed", "length": len(sampler)}
    elif isinstance(sampler, (list, tuple, range)) and all(type(i) is int for i in sampler):
        return {"kind": "listed", "indices": torch.tensor(sampler, dtype=torch.int64)}
    elif type(sampler) is RandomSampler or type(sampler).__name__ == "SeedableRandomSampler":
        told = {"replacement": sampler.replacement, "num_samples": sampler._num_samples}
        length = {"length": len(sampler.data_source)}
        return {"kind": "random", **length, **told, **_generators(sampler, loader)}
    elif type(sampler) is SubsetRandomSampler:
        indices = torch.tensor(sampler.indices, dtype=torch.int64)
        return {"kind": "subset", "indices": indices, **_generators(sampler, loader)}
    elif type(sampler) is WeightedRandomSampler:
        told = {"replacement": sampler.replacement, "num_samples": sampler.num_samples}
        return {
            "kind": "weighted",
            "weights": sampler.weights,
            **told,
            **_generators(sampler, loader),
        }
    return {"kind": "other", "name": type(sampler).__name__}


def distributed(told: State, rank: int) -> Iterable[int]:
    """What `rank` goes through in a pass with a DistributedSampler."""
    options = {name: told[name] for name in DISTRIBUTED}
    sampler: Any = DistributedSampler(range(told["length"]), rank=rank, **options)  # type: ignore[arg-type]
    sampler.set_epoch(told["epoch"])
    return list(sampler)


def order(told: State) -> list[int]:
    """What one process goes through, with any other sampler that could be described."""
    if told["kind"] == "listed":
        return list(told["indices"].tolist() if "indices" in told else range(told["length"]))
    own, other = _generator(told["own"]), _generator(told.get("other"))
    if own is not None:
        return list(_sampler(told, own))
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(told["torch"])
        if told["draws"]:
            iter(DataLoader(range(1), generator=other))  # type: ignore[arg-type]  # draws a seed
        return list(_sampler(told, other if told["shares"] else None))


def _sampler(told: State, generator: torch.Generator | None) -> Iterable[int]:
    if told["kind"] == "subset":
        return SubsetRandomSampler(told["indices"].tolist(), generator)
    if told["kind"] == "weighted":
        return WeightedRandomSampler(
            told["weights"], told["num_samples"], told["replacement"], generator
        )
    return RandomSampler(range(told["length"]), told["replacement"], told["num_samples"], generator)


def _generators(sampler: Any, loader: Any) -> State:
    """The states from which a sampler draws; those of one that the loader draws from, too."""
    if hasattr(sampler, "initial_seed"):  # accelerate 1.15, SeedableRandomSampler
        seed = sampler.initial_seed + getattr(loader, "iteration", sampler.epoch)
        return {"own": torch.Generator().manual_seed(seed).get_state()}
    base = getattr(loader, "base_dataloader", loader)
    own, other = sampler.generator, base.generator
    if own is not None and own is not other:
        return {"own": own.get_state()}
    return {
        "own": None,
        "shares": own is not None,
        "other": None if other is None else other.get_state(),
        "torch": torch.get_rng_state(),
        "draws": base._iterator is None,
    }


def _generator(state: Any) -> torch.Generator | None:
    return None if state is None else torch.Generator().set_state(state)
