"""transformers' Trainer with fsdp=, on two ranks: the mean, both ways to reduce, windows saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from accelerate.utils import FullyShardedDataParallelPlugin
from integrations.test_transformers import Small, arguments, texts

from accumplug.integrations.transformers import AccumTrainer

SCRIPT = """
import gc, json, os, sys, warnings
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
sys.path.insert(0, os.environ["TESTS"])
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from integrations.test_transformers import *
from versions import averaging

warnings.simplefilter("ignore")
rank, where = int(os.environ["RANK"]), Path(sys.argv[1])


class Sharding:
    # accelerate 1.15, state.py: only on a machine with accelerators the plugin decides
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True
        assert self.accelerator.is_fsdp2


class Theirs(Sharding, Trainer):
    pass


class Ours(Sharding, AccumTrainer):
    pass


def train(kind, folder, callbacks=(), resume=None, dropout=0.0, kept="FULL_STATE_DICT", **more):
    config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "version": 2,
              "cpu_ram_efficient_loading": False, "state_dict_type": kept}
    own = {"checkpoint_window": True} if "optim" in more else {}
    args = arguments(folder, fsdp=True, fsdp_config=config, **more)
    torch.manual_seed(7)
    trainer = kind(llama(dropout).float(), args, train_dataset=texts(44),
                   callbacks=list(callbacks), **own)
    trainer.train(resume_from_checkpoint=resume)
    assert any(isinstance(p, DTensor) for p in trainer.model.parameters())
    weights = [p.full_tensor().detach() for p in trainer.model.parameters()]
    return trainer, weights


def exact():
    start = llama().float()
    expected, losses, norms = plain(start, texts(44), True, window=2 * STEPS * BATCH)
    for name, kind, each in (("theirs", Theirs, False), ("last", Ours, False),
                             ("every", Ours, True)):
        config = {"gradient_accumulation_kwargs": {"sync_each_batch": each}}
        trainer, weights = train(kind, where, accelerator_config=config)
        pairs = zip(weights, expected.parameters(), strict=True)
        yield name, {
            "apart": max(float((a - b.detach()).norm() / b.detach().norm()) for a, b in pairs),
            "losses": [logged(trainer, "loss"), losses],
            "norms": [logged(trainer, "grad_norm"), norms],
            "syncs": trainer.accum.syncs if kind is Ours else None,
        }


def resume():
    hard = {"optim": "adamw_torch", "train_sampling_strategy": "random", "learning_rate": 0.01}
    straight, weights = train(Ours, where / "straight", dropout=0.2, **hard)
    for place, kept in ((2, "FULL_STATE_DICT"), (6, "FULL_STATE_DICT"), (8, "SHARDED_STATE_DICT"),
                        (9, "SHARDED_STATE_DICT")):
        folder, options = where / str(place), {"dropout": 0.2, "kept": kept, **hard}
        train(Ours, folder, [SaveAfter(place)], **options)
        resumed, again = train(Ours, folder, resume=True, **options)
        yield str(place), {
            "equal": all(map(torch.equal, again, weights)),
            "losses": [logged(resumed, "loss"), logged(straight, "loss")],
            "micro": resumed.accum.micro_batches,
        }
        del resumed
    del straight


with averaging():
    for job in (exact, resume):
        found = dict(job())
        if rank == 0:
            (where / f"{job.__name__}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.collect()  # a model keeps its group, whose threads must not outlive the interpreter
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where rank 0 has told of both jobs of the script, which torchrun has run."""
    folder = tmp_path_factory.mktemp("sharded")
    folder.joinpath("run.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "TESTS": str(Path(__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "--standalone", "run.py", str(folder)],
        cwd=folder,
        env=environment,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_a_sharded_window_is_the_mean_over_the_tokens_of_both_ranks(told: Path) -> None:
    """6 windows, of which 2 are tails of 3; reduced once each, or in each of 22 micro-batches."""
    found: dict[str, Any] = json.loads((told / "exact.json").read_text())
    assert {name: one["syncs"] for name, one in found.items()} == {
        "theirs": None,
        "last": 6,
        "every": 22,
    }
    whole = hasattr(torch.Tensor, "grad_dtype")  # torch 2.8: Trainer logs the norm of a shard
    for one in found.values():
        assert one["apart"] <= 1e-6
        for ours, expected in [one["losses"]] + [one["norms"]] * whole:
            assert ours == pytest.approx(expected, rel=1e-5)


def test_a_sharded_run_goes_on_inside_of_its_window(told: Path) -> None:
    """Before the first update, inside of later windows and between two, with whole and sharded
    state dicts: the bits of the run that was never stopped."""
    found: dict[str, Any] = json.loads((told / "resume.json").read_text())
    assert len(found) == 4
    for one in found.values():
        assert one["equal"]
        assert one["losses"][0] == one["losses"][1]
        assert one["micro"] == 22


def test_the_first_fsdp_is_refused(tmp_path: Path) -> None:
    """When the trainer is built."""

    class Own(AccumTrainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
            self.accelerator.state.fsdp_plugin = plugin

    with pytest.raises(ValueError, match='"version": 1'):
        Own(Small(), arguments(tmp_path), train_dataset=texts(4))
