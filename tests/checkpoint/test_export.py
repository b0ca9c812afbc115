"""The weights of a checkpoint, as files that other libraries load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from training import Run, Setup

from accumplug import Accumulator, Checkpointer
from accumplug.checkpoint.export import export
from accumplug.cli.parser import main
from accumplug.errors import CheckpointError
from accumplug.storage.codec import Encoded, encode
from accumplug.storage.commit import Job
from accumplug.storage.layout import list_checkpoints
from accumplug.storage.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees micro-batches")


def saved(directory: Path, *models: nn.Module) -> dict[str, Tensor]:
    """Save models after an update; the state of the first."""
    parameters = [p for model in models for p in model.parameters()]
    accum = Accumulator(1, optimizer=torch.optim.SGD(parameters, 0.1))
    with Checkpointer(directory, accum, model=models) as checkpoint:
        with accum(*models):
            outputs = [model(torch.ones(2, 4)).sum() for model in models]
            accum.backward(torch.stack(outputs).sum())
        checkpoint.save()
    return models[0].state_dict()


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(one[name].dtype == other[name].dtype for name in one)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("index", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.low.float().sum()


def test_the_safetensors_library_reads_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tied ones under both names; with the metadata that transformers asks for."""
    expected = saved(tmp_path / "run", Tied())
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "model.safetensors"
    assert capsys.readouterr().out == f"{file}\n"
    assert_equal(load_file(file), dict(expected))
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_inside_of_a_window_the_buffers_are_those_of_the_save(tmp_path: Path) -> None:
    """BatchNorm's have moved since the update whose weights are linked."""
    run = Run(Setup())
    with run.checkpoints(tmp_path, every=1, keep=9):
        run.train(until=5)
    paths = list_checkpoints(tmp_path)
    (file,) = export(paths[-1], tmp_path / "out")
    assert_equal(load_file(file), run.model.state_dict())
    (before,) = export(paths[-2], tmp_path / "before")
    name = "1.running_mean"
    assert not torch.equal(load_file(file)[name], load_file(before)[name])
    assert torch.equal(load_file(file)["0.weight"], load_file(before)["0.weight"])


def test_large_models_are_split_with_an_index(tmp_path: Path) -> None:
    """No file is larger, but for a single tensor; the index finds each of them."""
    model = nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 20), nn.Linear(20, 1))
    expected = saved(tmp_path / "run", model)
    *files, index = export(tmp_path / "run", tmp_path / "out", shard=1200)
    assert index.name == "model.safetensors.index.json"
    assert [file.name for file in files] == [
        f"model-0000{i + 1}-of-0000{len(files)}.safetensors" for i in range(len(files))
    ]
    content = json.loads(index.read_text())
    assert content["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    loaded = {k: load_file(tmp_path / "out" / n)[k] for k, n in content["weight_map"].items()}
    assert_equal(loaded, dict(expected))
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in files]
    assert [size for size in sizes if size > 1200] == [expected["1.weight"].nbytes]


def test_transformers_loads_what_was_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    accum = Accumulator(1, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    tokens = torch.arange(8)[None]
    with Checkpointer(tmp_path / "run", accum, model=model) as checkpoint:
        with accum(model):
            accum.backward(model(tokens, labels=tokens).loss)
        checkpoint.save()
    export(tmp_path / "run", tmp_path / "out")
    config.save_pretrained(tmp_path / "out")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_several_models_get_a_directory_each(tmp_path: Path) -> None:
    models = nn.Linear(4, 1), nn.Linear(4, 2)
    saved(tmp_path / "run", *models)
    files = export(tmp_path / "run", tmp_path / "out")
    assert [file.relative_to(tmp_path / "out").parts[0] for file in files] == ["0", "1"]
    for file, model in zip(files, models, strict=True):
        assert_equal(load_file(file), model.state_dict())


def sharded(directory: Path, rows: list[tuple[int, int]]) -> Tensor:
    """Write a checkpoint of two ranks with a part of the rows of a weight each."""
    weight = torch.arange(20.0).view(5, 4)
    parts: dict[str, Any] = {}
    for rank, (start, end) in enumerate(rows):
        shard = {
            "local": weight[start:end].clone(),
            "offsets": [start, 0],
            "global_shape": [5, 4],
            "placements": [0],
        }
        tree, tensors = encode({"weight": shard, "bias": torch.ones(2)})
        tree["weight"] = {"$shard": tree["weight"]}
        parts[f"model-{rank}"] = Encoded(tree, tensors)
        parts[f"rank-{rank}"] = encode({"forward": [{"buffers": {}, "extra": {}}]})
    zero, one = (Writer(directory, rank=rank, world_size=2, token="t") for rank in range(2))
    for writer, rank in ((one, 1), (zero, 0)):
        own = {name: part for name, part in parts.items() if name.endswith(f"-{rank}")}
        writer.submit(Job({"update": 1, "micro_batch": 1}, own))
    one.close()
    zero.close()
    return weight


def test_the_parts_of_all_ranks_are_put_together(tmp_path: Path) -> None:
    weight = sharded(tmp_path / "run", [(0, 3), (3, 5)])
    (file,) = export(tmp_path / "run", tmp_path / "out")
    assert_equal(load_file(file), {"weight": weight, "bias": torch.ones(2)})


def test_a_part_that_is_missing_is_an_error(tmp_path: Path) -> None:
    sharded(tmp_path / "run", [(0, 3), (4, 5)])
    with pytest.raises(CheckpointError, match="4 values of a sharded tensor"):
        export(tmp_path / "run", tmp_path / "out")


def test_what_cannot_be_exported_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", nn.Linear(4, 1))
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "no whole checkpoint here" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "model.safetensors is there already" in capsys.readouterr().err
