"""Arguments of transformers' Trainer beside the window: each does what it does in a Trainer whose
batch is the whole window."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from integrations.test_transformers import (  # noqa: E402
    BATCH,
    LLAMA,
    STEPS,
    WORDS,
    Small,
    Stream,
    apart,
    arguments,
    llama,
    logged,
    plain,
    same,
    texts,
)
from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from accumplug.integrations.transformers import AccumTrainer, AccumTrainerMixin  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use_reentrant"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
]


@pytest.fixture(autouse=True)
def _double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


WHOLE = {"per_device_train_batch_size": BATCH * STEPS, "gradient_accumulation_steps": 1}
"""The window as one batch."""


def trained(kind: Any, rows: Any = None, build: Callable[[], Any] = llama, **options: Any) -> Any:
    """A trainer of `kind` after its training."""
    own = {name: options.pop(name) for name in ("eval_dataset", "callbacks") if name in options}
    if "callbacks" in own:
        own["callbacks"] = [make() for make in own["callbacks"]]
    args = arguments(Path(tempfile.mkdtemp()), **options)
    model = build()
    torch.manual_seed(3)
    trainer = kind(model, args, train_dataset=texts(22) if rows is None else rows, **own)
    trainer.train()
    return trainer


def agree(ours: Any, theirs: Any, bound: float = LLAMA) -> None:
    """The same weights, logs, steps, counts and checkpoints."""
    assert apart(ours.model, theirs.model) <= bound
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=2e-6), name
    for name in ("global_step", "num_input_tokens_seen", "total_flos", "best_global_step"):
        assert getattr(ours.state, name) == getattr(theirs.state, name), name
    saved = [sorted(p.name for p in Path(t.args.output_dir).iterdir()) for t in (ours, theirs)]
    assert saved[0] == saved[1]


HELD_OUT = {"eval_dataset": texts(4, seed=2)}
CASES: dict[str, dict[str, Any]] = {
    "steps of one": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
    "no clipping": {"max_grad_norm": 0.0},
    "warmup, linear": {"warmup_steps": 2, "lr_scheduler_type": "linear"},
    "warmup, cosine": {"warmup_steps": 0.3, "lr_scheduler_type": "cosine", "num_train_epochs": 4},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "eval_strategy": "epoch",
        "num_train_epochs": 4,
        **HELD_OUT,
    },
    **{
        name: {"optim": name, "learning_rate": 0.01}
        for name in ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop")
    },
    "activation checkpointing": {"activation_checkpointing": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "reentrant": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "evaluation, saves, a limit, the best": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "num_train_epochs": 3,
        **HELD_OUT,
    },
    "early stopping": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "num_train_epochs": 9,
        "learning_rate": 9.0,
        "callbacks": [lambda: EarlyStoppingCallback(2)],
        **HELD_OUT,
    },
    "evaluation first": {"eval_on_start": True, "eval_strategy": "epoch", **HELD_OUT},
    "tokens seen": {"include_num_input_tokens_seen": "all"},
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "an epoch and a half": {"num_train_epochs": 1.5},
    "max_steps": {"max_steps": 4},
    "a log for each epoch": {"logging_strategy": "epoch"},
    "a log of three, over epochs": {"logging_steps": 3, "num_train_epochs": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "a short data set": {"rows": texts(5)},
}


@pytest.mark.parametrize("case", CASES)
def test_an_argument_does_what_it_does_for_one_large_batch(case: str) -> None:
    """Weights to 1e-6 (a Llama's loss and norms are in fp32), 1e-5 where RMSprop divides."""
    options = CASES[case]
    known = inspect.signature(TrainingArguments).parameters.keys() | {
        "rows",
        *HELD_OUT,
        "callbacks",
    }
    if missing := sorted(options.keys() - known):
        pytest.skip(f"this version of transformers has no {', '.join(missing)}")
    ours, theirs = trained(AccumTrainer, **options), trained(Trainer, **options | WHOLE)
    agree(ours, theirs, 1e-5 if case == "rmsprop" else LLAMA)


def without_targets() -> dict[str, Any]:
    return {**texts(1)[0], "labels": torch.full((9,), -100)}


@pytest.mark.parametrize("place", ["window", "tail", "only", "first", "last"])
def test_a_window_without_targets_is_no_update(place: str) -> None:
    """Trainer counts a step, and the weights are those of before."""
    rows = [row for row in texts(40) if (row["labels"][1:] != -100).any()]
    empty = [without_targets()] * 2
    data, trained_on = {
        "window": (rows[:8] + empty * 4 + rows[8:12], rows[:12]),
        "tail": (rows[:8] + empty, rows[:8]),
        "only": (empty, []),
        "first": (empty + rows[:8], empty + rows[:8]),
        "last": (rows[:6] + empty + rows[6:10], rows[:6] + empty + rows[6:10]),
    }[place]
    ours = trained(AccumTrainer, data, num_train_epochs=1)
    expected, *_ = plain(llama(), trained_on, True, epochs=1)
    assert apart(ours.model, expected) <= LLAMA
    assert ours.state.global_step == -(-len(data) // (BATCH * STEPS))
    assert ours.accum.skipped == (place in ("window", "tail", "only"))
    assert all(torch.isfinite(torch.tensor(logged(ours, "loss"))))


def test_a_pass_of_a_stream_counts_its_tokens_once() -> None:
    """Trainer's own count is moved on behind a tail; nothing is counted for that."""
    options = {"max_steps": 6, "include_num_input_tokens_seen": "all"}
    trainer = trained(AccumTrainer, Stream(texts(22)), **options)
    assert trainer.state.num_input_tokens_seen == 2 * 22 * 9


def test_bf16_has_the_bits_of_trainer_s_own_windows_where_they_are_right() -> None:
    """Full windows of equal weights; a loss per micro-batch in autocast, sums in fp32."""
    torch.set_default_dtype(torch.float32)
    rows = [{**row, "labels": row["input_ids"]} for row in texts(16)]
    kinds = (AccumTrainer, Trainer)
    found = [trained(kind, rows, lambda: llama().float(), bf16=True) for kind in kinds]
    assert same(found[0].model, found[1].model)
    assert logged(found[0], "loss") == pytest.approx(logged(found[1], "loss"), rel=1e-6)


def test_bf16_is_as_near_to_fp64_as_trainer_s_own_sum() -> None:
    """Uneven windows: another order of roundings, and no larger ones."""
    exact = trained(Trainer, **WHOLE).model
    start = llama().float()
    kinds = (AccumTrainer, Trainer)
    ours, theirs = (
        apart(trained(kind, build=lambda: llama().float(), bf16=True).model.double(), exact)
        for kind in kinds
    )
    assert apart(start.double(), exact) > 10 * theirs  # the training is larger than its roundings
    assert ours <= 1.5 * theirs


def test_rows_that_are_grouped_by_length_come_in_trainer_s_order() -> None:
    """The same micro-batches, and the mean over their tokens."""
    rows = [
        {name: values[: 3 + place % 6] for name, values in row.items()}
        for place, row in enumerate(texts(24))
    ]
    orders: list[list[Any]] = []

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        orders[-1].append([row["input_ids"].tolist() for row in batch])
        lines = {name: [row[name] for row in batch] for name in ("input_ids", "labels")}
        pad = {"input_ids": 0, "labels": -100}
        return {
            name: nn.utils.rnn.pad_sequence(lines[name], batch_first=True, padding_value=pad[name])
            for name in lines
        }

    found = []
    for kind in (AccumTrainer, Trainer):
        orders.append([])
        args = arguments(Path(tempfile.mkdtemp()), train_sampling_strategy="group_by_length")
        torch.manual_seed(3)
        trainer = kind(llama(), args, train_dataset=rows, data_collator=collate)
        trainer.train()
        found.append(trainer)
    assert orders[0] == orders[1]
    assert apart(found[0].model, found[1].model) <= LLAMA


def test_a_batch_size_that_was_found_starts_with_a_new_window(tmp_path: Path) -> None:
    """Memory ends in the third micro-batch: smaller ones are trained from the first row on."""
    calls = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        calls.append(len(labels))
        if calls == [4, 4, 4]:
            raise RuntimeError("CUDA out of memory.")
        return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    more = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    args = arguments(tmp_path, **more)
    trainer = AccumTrainer(Small(), args, train_dataset=texts(22), compute_loss_func=loss)
    trainer.train()
    size = calls[3]
    assert size < 4
    expected, losses, _ = plain(Small(), texts(22), False, window=STEPS * size)
    assert apart(trainer.model, expected) <= 1e-13
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-6)


def test_noise_on_embeddings_is_trainer_s() -> None:
    """NEFTune: the same bits in windows of one micro-batch, and taken off at the end."""
    options = {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 1}
    ours, theirs = trained(AccumTrainer, **options), trained(Trainer, **options)
    assert same(ours.model, theirs.model)
    assert not ours.model.get_input_embeddings()._forward_hooks


def test_a_trainer_may_train_twice() -> None:
    """The second training has a window of its own."""
    ours, theirs = trained(AccumTrainer), trained(Trainer, **WHOLE)
    for trainer in (ours, theirs):
        torch.manual_seed(3)
        trainer.train()
    assert apart(ours.model, theirs.model) <= LLAMA
    assert ours.accum.updates == 6


def test_an_encoder_decoder_is_trained_and_generates(tmp_path: Path) -> None:
    """Seq2SeqTrainer with predict_with_generate; its labels are not shifted."""

    class Own(AccumTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]
        pass

    torch.set_default_dtype(torch.float32)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=WORDS, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    found = []
    for kind, size in ((Own, BATCH), (Seq2SeqTrainer, BATCH * STEPS)):
        torch.manual_seed(0)
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=BATCH * STEPS // size,
            num_train_epochs=2,
            learning_rate=0.3,
            optim="sgd",
            train_sampling_strategy="sequential",
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            predict_with_generate=True,
            generation_max_length=6,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        model = T5ForConditionalGeneration(config)
        trainer = kind(
            model,
            args,
            train_dataset=texts(22),
            eval_dataset=texts(4, seed=2),
            compute_metrics=lambda told: {"words": float(told.predictions.sum())},
        )
        trainer.train()
        found.append(trainer)
    assert apart(found[0].model, found[1].model) <= 1e-6
    assert logged(found[0], "loss") == pytest.approx(logged(found[1], "loss"), rel=1e-5)
    assert logged(found[0], "eval_words") == logged(found[1], "eval_words") != []


# -- what is refused -------------------------------------------------------------------------------


def test_fp16_where_trainer_makes_none_is_refused(tmp_path: Path) -> None:
    """On a CPU it would train in fp32, silently."""
    args = arguments(tmp_path, fp16=True)
    with pytest.raises(ValueError, match="fp16=True on this device.* use bf16=True"):
        AccumTrainer(Small(), args, train_dataset=texts(4))


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    """By name, before its engine is built."""

    class Engine(AccumTrainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.is_deepspeed_enabled = True  # as with deepspeed= in the arguments

    with pytest.raises(ValueError, match="can't keep its window with DeepSpeed"):
        Engine(Small(), arguments(tmp_path), train_dataset=texts(4))


def test_a_pass_that_carries_its_window_on_is_refused(tmp_path: Path) -> None:
    """Trainer ends it with its pass, whatever the Accelerator was told."""
    config = {"gradient_accumulation_kwargs": {"sync_with_dataloader": False}}
    args = arguments(tmp_path, accelerator_config=config)
    with pytest.raises(ValueError, match="sync_with_dataloader=False"):
        AccumTrainer(Small(), args, train_dataset=texts(4))


@pytest.mark.parametrize(
    ("name", "value"), [("average_tokens_across_devices", False), ("ddp_static_graph", True)]
)
def test_what_several_ranks_can_t_keep_is_refused(name: str, value: bool, tmp_path: Path) -> None:
    """One rank has it without harm."""
    args = arguments(tmp_path, **{name: value})
    AccumTrainer(Small(), args, train_dataset=texts(4))
    two = mock.PropertyMock(return_value=2)
    with (
        mock.patch.object(TrainingArguments, "world_size", two),
        pytest.raises(ValueError, match=f"can't keep its window with {name}={value}"),
    ):
        AccumTrainer(Small(), args, train_dataset=texts(4))
