"""TRL's trainers with accum's window: their updates, tails, two ranks, and windows saved.

Tiny random models and words made up here; nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="trl is not installed (pip install trl: 280 MB)")
datasets = pytest.importorskip("datasets")
fingerprint = pytest.importorskip("datasets.fingerprint")

from accumplug.integrations.transformers import AccumTrainerMixin  # noqa: E402

STEPS, BATCH = 4, 2
WORDS = [f"w{i}" for i in range(40)]

# TRL 1.16 gives the Trainer older names
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


class AccumSFT(AccumTrainerMixin, trl.SFTTrainer):
    pass


class AccumDPO(AccumTrainerMixin, trl.DPOTrainer):
    pass


class AccumGRPO(AccumTrainerMixin, trl.GRPOTrainer):
    pass


@pytest.fixture(autouse=True)
def _hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_hashes(monkeypatch.setattr)


def plain_hashes(replace: Any = setattr) -> None:
    """Data sets are named by a number: hashing a trainer's functions takes seconds."""
    count = itertools.count()
    named = classmethod(lambda cls, value: f"h{next(count)}")
    replace(fingerprint.Hasher, "hash", named)


def tokenizer() -> Any:
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokens = sys.modules["tokenizers"]  # transformers has brought it
    made = tokens.Tokenizer(tokens.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokens.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def llama(dropout: float = 0.0, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=43,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        attn_implementation="eager",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def text(generator: random.Random, low: int, high: int) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(low, high)))


def completions(count: int) -> Any:
    """Prompts and completions of uneven lengths, as numbers."""
    generator, rows = random.Random(0), {"input_ids": [], "labels": []}
    for _ in range(count):
        prompt, answer = generator.randint(1, 6), generator.randint(1, 8)
        ids = [generator.randint(3, 42) for _ in range(prompt + answer)]
        rows["input_ids"].append(ids)
        rows["labels"].append([-100] * prompt + ids[prompt:])
    return datasets.Dataset.from_dict(rows)


def preferences(count: int) -> Any:
    generator = random.Random(1)
    columns = {"prompt": (1, 6), "chosen": (1, 8), "rejected": (1, 8)}
    made: dict[str, list[str]] = {name: [] for name in columns}
    for _ in range(count):
        for name, (low, high) in columns.items():
            space = "" if name == "prompt" else " "
            made[name].append(space + text(generator, low, high))
    return datasets.Dataset.from_dict(made)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": STEPS,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return common | more


def sft(kind: type, folder: Path, rows: int, *, dropout: float = 0.0, **more: Any) -> Any:
    own = {name: more.pop(name) for name in ("checkpoint_window", "callbacks") if name in more}
    config = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    return kind(
        model=llama(dropout),
        args=trl.SFTConfig(**options(folder, **(config | more))),
        train_dataset=completions(rows),
        processing_class=tokenizer(),
        **own,
    )


def dpo(kind: type, folder: Path, rows: int, **more: Any) -> Any:
    own = {name: more.pop(name) for name in ("checkpoint_window", "callbacks") if name in more}
    return kind(
        model=llama(),
        ref_model=llama(seed=1),
        args=trl.DPOConfig(**options(folder, **more)),
        train_dataset=preferences(rows),
        processing_class=tokenizer(),
        **own,
    )


def grpo(kind: type, folder: Path, rows: int, **more: Any) -> Any:
    def many_distinct(completions: Any, **others: Any) -> list[float]:
        return [float(len(set(answer.split()))) for answer in completions]

    own = {name: more.pop(name) for name in ("checkpoint_window", "callbacks") if name in more}
    config = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
    generator = random.Random(2)
    prompts = [text(generator, 1, 5) for _ in range(rows)]
    return kind(
        model=llama(),
        reward_funcs=many_distinct,
        args=trl.GRPOConfig(**options(folder, **(config | more))),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        **own,
    )


def update(model: Any) -> torch.Tensor:
    """What training has added to the weights."""
    pairs = zip(model.parameters(), llama().parameters(), strict=True)
    return torch.cat([(now.detach() - then.detach()).double().flatten() for now, then in pairs])


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def logged(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def plain_sft(rows: int, window: int) -> tuple[torch.Tensor, list[float]]:
    """One row after the other: the mean over the completion tokens of a window."""
    model, losses = llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = list(completions(rows))
    for start in range(0, rows, window):
        total, count = torch.zeros(()), 0
        for row in data[start : start + window]:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            logits, labels = model(input_ids=ids).logits[0, :-1], labels[1:]
            total = total + F.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        (total / count).backward()
        losses.append(total.item() / count)
        optimizer.step()
        optimizer.zero_grad()
    return update(model), losses


@pytest.mark.parametrize("padding_free", [False, True])
def test_sft_has_the_mean_over_the_completion_tokens(padding_free: bool, tmp_path: Path) -> None:
    """Of windows of 4 and a tail of 3; rows padded, or packed one behind the other."""
    expected, losses = plain_sft(22, STEPS * BATCH)
    trainer = sft(AccumSFT, tmp_path, 22, padding_free=padding_free)
    trainer.train()
    assert trainer.state.global_step == 3
    if not padding_free:  # eager attention sees across packed rows
        assert off(update(trainer.model), expected) <= 1e-5
        assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-5)
    own = sft(trl.SFTTrainer, tmp_path, 22, padding_free=padding_free)
    own.train()
    assert off(update(trainer.model), update(own.model)) <= 1e-5
    assert logged(trainer, "loss") == pytest.approx(logged(own, "loss"), rel=1e-5)
    assert logged(trainer, "grad_norm") == pytest.approx(logged(own, "grad_norm"), rel=1e-5)


def test_sft_packs_as_trl_does(tmp_path: Path) -> None:
    """packing=True: rows cut and joined to sequences of 16."""
    generator, found = random.Random(0), []
    texts = datasets.Dataset.from_dict({"text": [text(generator, 2, 12) for _ in range(40)]})
    for kind in (AccumSFT, trl.SFTTrainer):
        args = options(tmp_path, packing=True, packing_strategy="wrapped", max_length=16)
        trainer = kind(
            model=llama(),
            args=trl.SFTConfig(**args),
            train_dataset=texts,
            processing_class=tokenizer(),
        )
        trainer.train()
        found.append((update(trainer.model), logged(trainer, "loss")))
    assert off(found[0][0], found[1][0]) <= 1e-5
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


def test_dpo_has_trl_s_update(tmp_path: Path) -> None:
    """A mean over pairs, whatever their tokens; windows of 4 and a tail of 3."""
    trainers = [dpo(kind, tmp_path, 22) for kind in (AccumDPO, trl.DPOTrainer)]
    for trainer in trainers:
        trainer.train()
    ours, own = trainers
    assert ours.state.global_step == 3
    assert off(update(ours.model), update(own.model)) <= 1e-5
    for name in ("loss", "grad_norm", "rewards/margins"):
        assert logged(ours, name) == pytest.approx(logged(own, name), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_grpo_has_trl_s_update(loss_type: str, tmp_path: Path) -> None:
    """It fetches prompts, and cuts what it has generated into the micro-batches of a window."""
    found = []
    for kind in (AccumGRPO, trl.GRPOTrainer):
        trainer = grpo(kind, tmp_path, 8, loss_type=loss_type)
        torch.manual_seed(5)
        trainer.train()
        found.append((update(trainer.model), logged(trainer, "loss"), logged(trainer, "grad_norm")))
    assert found[1][0].norm() > 0
    assert off(found[0][0], found[1][0]) <= 1e-5
    for ours, own in zip(found[0][1:], found[1][1:], strict=True):
        assert ours == pytest.approx(own, rel=1e-4, abs=1e-6)


def test_a_window_of_generated_micro_batches_is_not_saved(tmp_path: Path) -> None:
    """The trainer keeps them in memory; a resumed run would have others."""
    with pytest.raises(ValueError, match="generates its own micro-batches"):
        grpo(AccumGRPO, tmp_path, 8, checkpoint_window=True)


class SaveAfter(transformers.TrainerCallback):
    """Saves after a micro-batch, and ends the training there."""

    def __init__(self, place: int) -> None:
        self.place, self.count = place, 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1
        control.should_save = control.should_training_stop = self.count == self.place

    on_step_end = on_substep_end


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_run_goes_on_inside_of_its_window(make: Any, tmp_path: Path) -> None:
    """AdamW and shuffled rows: bit for bit the run that was never stopped."""
    kind = {sft: AccumSFT, dpo: AccumDPO}[make]
    more = {"optim": "adamw_torch", "learning_rate": 0.01, "train_sampling_strategy": "random"}
    more |= {"checkpoint_window": True} | ({"dropout": 0.2} if make is sft else {})
    straight = make(kind, tmp_path / "straight", 22, **more)
    straight.train()
    stopped = make(kind, tmp_path / "stopped", 22, callbacks=[SaveAfter(6)], **more)
    stopped.train()
    assert stopped.accum.pending == 2
    resumed = make(kind, tmp_path / "stopped", 22, **more)
    resumed.train(resume_from_checkpoint=True)
    for one, other in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert logged(resumed, "loss") == logged(straight, "loss")


SCRIPT = """
import gc, json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
sys.path.insert(0, os.environ["TESTS"])
from integrations import test_trl as t
t.plain_hashes()
where, found = Path(sys.argv[1]), {}
for name, make, kinds in (("sft", t.sft, (t.AccumSFT, t.trl.SFTTrainer)),
                          ("dpo", t.dpo, (t.AccumDPO, t.trl.DPOTrainer))):
    for kind in kinds:
        trainer = make(kind, where / f"{kind.__name__}-{os.environ['RANK']}", 44)
        assert trainer.args.world_size == 2
        trainer.train()
        key = name if kind is kinds[0] else name + "-own"
        found[key] = [t.update(trainer.model).tolist(), t.logged(trainer, "loss")]
if os.environ["RANK"] == "0":
    (where / "found.json").write_text(json.dumps(found))
del trainer
gc.collect()  # it is a cycle, and keeps the group
dist.destroy_process_group()
"""


def test_two_ranks_have_trl_s_updates(tmp_path: Path) -> None:
    """SFT also that of plain torch on one device."""
    (tmp_path / "run.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "TESTS": str(Path(__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "--standalone", "run.py", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    expected, losses = plain_sft(44, 2 * STEPS * BATCH)
    assert off(torch.tensor(found["sft"][0], dtype=torch.float64), expected) <= 1e-5
    assert found["sft"][1] == pytest.approx(losses, rel=1e-5)
    for name in ("sft", "dpo"):
        ours, own = (torch.tensor(found[key][0]) for key in (name, f"{name}-own"))
        assert off(ours, own) <= 1e-5
        assert found[name][1] == pytest.approx(found[f"{name}-own"][1], rel=1e-4)
