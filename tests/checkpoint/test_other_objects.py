"""A checkpoint of other objects, or other data, than those that go on from it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accumplug import Accumulator, Checkpointer
from accumplug.errors import CheckpointError
from accumplug.storage.files import checksum
from accumplug.storage.json import dump_json
from accumplug.storage.layout import list_checkpoints


def run(directory: Path, samples: int, batch_size: int, until: int = 0) -> int:
    """How many samples were seen, from where the run was saved."""
    model = nn.Linear(1, 1)
    accum = Accumulator(4, optimizer=torch.optim.SGD(model.parameters(), 1e-3))
    data = [torch.tensor([float(i)]) for i in range(samples)]
    loader = DataLoader(data, batch_size, shuffle=True)  # type: ignore[arg-type]
    seen = 0
    with Checkpointer(directory, accum, model=model, loader=loader) as checkpoint:
        checkpoint.resume()
        for x in accum.batches(loader):
            with accum(model):
                accum.backward(model(x).mean())
            seen += len(x)
            if until and accum.micro_batches == until:
                checkpoint.save()
                break
    return seen


@pytest.mark.parametrize(
    ("samples", "batch_size", "message"),
    [(50, 8, "batch_size is 8 here, and 4"), (50, 2, "set batch_size=4"), (40, 4, "40 samples")],
)
def test_other_micro_batches_do_not_lose_the_place_in_a_pass(
    tmp_path: Path, samples: int, batch_size: int, message: str
) -> None:
    assert run(tmp_path, 50, 4, until=6) == 24
    with pytest.raises(ValueError, match=message):
        run(tmp_path, samples, batch_size)
    assert run(tmp_path, 50, 4) == 26


def test_after_the_last_item_the_micro_batches_may_become_others(tmp_path: Path) -> None:
    assert run(tmp_path, 50, 4, until=13) == 50
    assert run(tmp_path, 60, 10) == 0  # nothing is left of the pass


def save_and_resume(directory: Path, first: Any, second: Any, **others: Any) -> nn.Module:
    """Save a run of the optimizer `first`, and go on with `second` and `others` by name."""
    for kind, given in ((first, {}), (second, others)):
        model = nn.Linear(3, 1)
        accum = Accumulator(2, optimizer=kind(model.parameters(), 0.1))
        with Checkpointer(directory, accum, model=model, **given) as checkpoint:
            before = model.weight.detach().clone()
            try:
                checkpoint.resume()
            except CheckpointError:
                raise
            except ValueError:
                assert torch.equal(model.weight, before)
                raise
            with accum(model):
                accum.backward(model(torch.ones(1, 3)).sum())
            checkpoint.save()
    return model


def test_another_optimizer_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """Its first step would fail, or go on from moments of another meaning."""
    with pytest.raises(ValueError, match=r"optimizers: \['AdamW'\], this run has \['SGD'\]"):
        save_and_resume(tmp_path, torch.optim.AdamW, torch.optim.SGD)


def test_another_object_by_name_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """A loop that starts afresh then does not start from the weights of the checkpoint."""
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"objects by name: \[\], this run has \['ema'\]"):
        save_and_resume(tmp_path, torch.optim.SGD, torch.optim.SGD, ema=average)


@pytest.mark.parametrize("name", ["rank-0.json", "progress.json", "model.json"])
@pytest.mark.parametrize("text", [b"[]\n", b"null\n"])
def test_a_part_of_right_checksums_and_wrong_content_is_named(
    tmp_path: Path, name: str, text: bytes
) -> None:
    """Made by a stranger: one clear error with the checkpoint in it."""
    save_and_resume(tmp_path, torch.optim.SGD, torch.optim.SGD)
    newest = list_checkpoints(tmp_path)[-1]
    (newest / name).unlink()
    (newest / name).write_bytes(text)
    body = json.loads((newest / "manifest.json").read_bytes())
    body["files"][name] = {"size": len(text), "sums": checksum(memoryview(text))}
    del body["crc32"]
    body["crc32"] = f"{zlib.crc32(dump_json(body)):08x}"
    (newest / "manifest.json").write_bytes(dump_json(body, indent=1))
    with pytest.raises(CheckpointError, match=newest.name):
        save_and_resume(tmp_path, torch.optim.SGD, torch.optim.SGD)
