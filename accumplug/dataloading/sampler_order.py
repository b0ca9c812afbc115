"""Describes a sampler's order so that another process can reproduce it."""

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
    """What determines the order of a pass of `loader` that starts now, if the sampler is known."""
    if isinstance(sampler, DistributedSampler):
        if type(sampler).__iter__ is DistributedSampler.__iter__:
            options = {name: getattr(sampler, name) for name in (*DISTRIBUTED, "epoch")}
            return {"kind": "distributed", "length": len(sampler.dataset), **options}  # type: ignore[arg-type]
    elif type(sampler) is SequentialSampler:
        return {"kind": "listed", "length": len(sampler)}
    elif isinstance(sampler, (list, tuple, range)) and all(type(i) is int for i in sampler):
        return {"kind": "listed", "indices": torch.tensor(sampler, dtype=torch.int64, device="cpu")}
    elif type(sampler) is RandomSampler or type(sampler).__name__ == "SeedableRandomSampler":
        return {
            "kind": "random",
            "length": len(sampler.data_source),
            "replacement": sampler.replacement,
            "num_samples": sampler._num_samples,
            **_generator_states(sampler, loader),
        }
    elif type(sampler) is SubsetRandomSampler:
        indices = torch.tensor(sampler.indices, dtype=torch.int64, device="cpu")
        return {"kind": "subset", "indices": indices, **_generator_states(sampler, loader)}
    elif type(sampler) is WeightedRandomSampler:
        return {
            "kind": "weighted",
            "weights": sampler.weights,
            "replacement": sampler.replacement,
            "num_samples": sampler.num_samples,
            **_generator_states(sampler, loader),
        }
    return {"kind": "other", "name": type(sampler).__name__}


def indices_of_rank(order: State, rank: int) -> Iterable[int]:
    """The indices of `rank` in a pass with a DistributedSampler."""
    options = {name: order[name] for name in DISTRIBUTED}
    sampler: Any = DistributedSampler(range(order["length"]), rank=rank, **options)  # type: ignore[arg-type]
    sampler.set_epoch(order["epoch"])
    return list(sampler)


def indices(order: State) -> list[int]:
    """The indices of one process in a pass with any other sampler that could be described."""
    if order["kind"] == "listed":
        return list(order["indices"].tolist() if "indices" in order else range(order["length"]))
    own, other = _generator(order["own"]), _generator(order.get("other"))
    if own is not None:
        return list(_sampler(order, own))
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(order["torch"])
        if order["draws"]:
            iter(DataLoader(range(1), generator=other))  # type: ignore[arg-type]  # draws a seed
        return list(_sampler(order, other if order["shares"] else None))


def _sampler(order: State, generator: torch.Generator | None) -> Iterable[int]:
    if order["kind"] == "subset":
        return SubsetRandomSampler(order["indices"].tolist(), generator)
    if order["kind"] == "weighted":
        return WeightedRandomSampler(
            order["weights"], order["num_samples"], order["replacement"], generator
        )
    return RandomSampler(
        range(order["length"]), order["replacement"], order["num_samples"], generator
    )


def _generator_states(sampler: Any, loader: Any) -> State:
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
