"""transformers' Trainer with accum's window: any loss, tails, its own habits, windows saved."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from accumplug.integrations.transformers import (  # noqa: E402
    NEEDED,
    AccumTrainer,
    AccumTrainerMixin,
    check_trainer,
)

WORDS, STEPS, BATCH = 29, 4, 2


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=dropout,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).double()


class Small(nn.Module):
    """A model of somebody's own: it takes no number of items and returns a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.head(self.words(input_ids))
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


def texts(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows of 9 words, of which the first 1 to 9 are targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = torch.randint(WORDS, (9,), generator=generator)
        labels, targets = ids.clone(), int(torch.randint(1, 10, (), generator=generator))
        labels[targets:] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": STEPS,
        "num_train_epochs": 2,
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**(options | more))


def logged(trainer: Trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def token_sum(
    model: nn.Module, rows: list[dict[str, Any]], shift: bool, smooth: float = 0.0
) -> Any:
    """The summed loss of `rows` and their number of targets, in plain torch."""
    ids = torch.stack([row["input_ids"] for row in rows])
    labels = torch.stack([row["labels"] for row in rows])
    logits = model(input_ids=ids)["logits"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.flatten(0, 1), labels.flatten()
    total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smooth)
    return total, int((labels != -100).sum())


def plain(
    model: nn.Module,
    rows: list[dict[str, Any]],
    shift: bool,
    epochs: int = 2,
    window: int = STEPS * BATCH,
    smooth: float = 0.0,
) -> tuple[nn.Module, list[float], list[float]]:
    """One large batch for each window: the weights, the losses and the norms."""
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    losses, norms = [], []
    for _ in range(epochs):
        for start in range(0, len(rows), window):
            total, count = token_sum(model, rows[start : start + window], shift, smooth)
            (total / count).backward()
            losses.append(total.item() / count)
            norms.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return model, losses, norms


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(
        float((a - b).detach().norm() / b.detach().norm().clamp(min=1e-30)) for a, b in pairs
    )


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# -- the loss may come from anywhere ---------------------------------------------------------------


def of_the_model(folder: Path, rows: Any, kind: type = AccumTrainer) -> Trainer:
    return kind(llama(), arguments(folder), train_dataset=rows)


def of_a_model_without_kwargs(folder: Path, rows: Any, kind: type = AccumTrainer) -> Trainer:
    return kind(Small(), arguments(folder), train_dataset=rows)


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs["logits"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_a_function_that_ignores_the_number(
    folder: Path, rows: Any, kind: type = AccumTrainer
) -> Trainer:
    args = arguments(folder)
    return kind(Small(), args, train_dataset=rows, compute_loss_func=mean_loss)


def sum_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs["logits"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


def of_a_function_that_divides(folder: Path, rows: Any, kind: type = AccumTrainer) -> Trainer:
    args = arguments(folder)
    return kind(Small(), args, train_dataset=rows, compute_loss_func=sum_loss)


def of_a_subclass(folder: Path, rows: Any, kind: type = AccumTrainer) -> Trainer:
    class Own(kind):  # type: ignore[misc,valid-type]
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            logits = model(input_ids=inputs["input_ids"])["logits"][:, :-1]
            labels = inputs["labels"][:, 1:]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Own(llama(), arguments(folder), train_dataset=rows)


def of_the_label_smoother(folder: Path, rows: Any, kind: type = AccumTrainer) -> Trainer:
    args = arguments(folder, label_smoothing_factor=0.1)
    return kind(llama(), args, train_dataset=rows)


LLAMA = 1e-6  # its norms and its loss are computed in fp32 whatever the weights are
SOURCES = {
    of_the_model: (llama, True, 0.0),
    of_a_model_without_kwargs: (Small, False, 0.0),
    of_a_function_that_ignores_the_number: (Small, False, 0.0),
    of_a_function_that_divides: (Small, False, 0.0),
    of_a_subclass: (llama, True, 0.0),
    of_the_label_smoother: (llama, True, 0.1),
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_each_update_is_the_mean_over_the_window_s_tokens(source: Any, tmp_path: Path) -> None:
    """Weights, logged losses and norms; 11 micro-batches a pass, so each pass has a tail of 3."""
    build, shift, smooth = SOURCES[source]
    rows = texts(22)
    expected, losses, norms = plain(build(), rows, shift, smooth=smooth)
    trainer = source(tmp_path, rows)
    trainer.train()
    assert trainer.state.global_step == 6
    assert apart(trainer.model, expected) <= (1e-13 if build is Small else LLAMA)
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-6)  # Trainer logs in fp32
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_lora_adapter_is_trained_as_plain_torch_would(tmp_path: Path) -> None:
    """PEFT's wrapper hides what the model accepts."""
    peft = pytest.importorskip("peft")
    rows = texts(22)

    def build() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        torch.manual_seed(3)
        model = peft.get_peft_model(llama(), config).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model

    expected, losses, _ = plain(build(), rows, True)
    trainer = AccumTrainer(build(), arguments(tmp_path), train_dataset=rows)
    trainer.train()
    assert apart(trainer.model, expected) <= LLAMA
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-6)


def test_rows_are_the_weight_where_there_are_no_labels(tmp_path: Path) -> None:
    """A last micro-batch of one row counts for one row."""

    class Own(AccumTrainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(inputs["x"]).square().mean()

    rows = [{"x": torch.randn(5, generator=torch.Generator().manual_seed(i))} for i in range(7)]
    args = arguments(tmp_path, num_train_epochs=1, remove_unused_columns=False, max_grad_norm=0.0)
    model = nn.Linear(5, 1)
    expected = copy.deepcopy(model)
    trainer = Own(model, args, train_dataset=rows)
    trainer.train()
    expected(torch.stack([row["x"] for row in rows])).square().mean().backward()
    torch.optim.SGD(expected.parameters(), lr=0.3).step()
    assert apart(trainer.model, expected) <= 1e-13


def test_a_function_can_say_the_weight(tmp_path: Path) -> None:
    """`weight=` gets the inputs of a micro-batch."""
    rows = texts(8)
    args = arguments(tmp_path, num_train_epochs=1)
    trainer = AccumTrainer(Small(), args, train_dataset=rows, weight=lambda inputs: 3)
    trainer.train()
    assert trainer.accum.last.weight == 3 * STEPS


def test_a_micro_batch_without_targets_adds_nothing(tmp_path: Path) -> None:
    """Its mean is 0 / 0; the others' update is what it would have been without it."""
    rows = texts(6)
    empty = [{**row, "labels": torch.full((9,), -100)} for row in texts(2, seed=5)]
    expected, losses, _ = plain(Small(), rows, False, epochs=1)
    args = arguments(tmp_path, num_train_epochs=1)
    trainer = AccumTrainer(Small(), args, train_dataset=rows[:2] + empty + rows[2:])
    trainer.train()
    assert apart(trainer.model, expected) <= 1e-13
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-6)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_data_without_a_length_have_their_tail_too(tmp_path: Path) -> None:
    """Trainer can't foresee it: two passes of 11 micro-batches are 6 updates."""
    rows = texts(22)
    expected, losses, _ = plain(Small(), rows, False)
    trainer = AccumTrainer(Small(), arguments(tmp_path, max_steps=6), train_dataset=Stream(rows))
    trainer.train()
    assert apart(trainer.model, expected) <= 1e-13
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-6)


def test_micro_batches_are_fetched_as_they_are_trained(tmp_path: Path) -> None:
    """Two are looked ahead, one by Accelerate and one by accum, and no window is collected."""
    fetched = 0
    ahead = []

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            nonlocal fetched
            fetched += 1
            return rows[index]

    class Own(AccumTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            ahead.append(fetched // BATCH - self.accum.micro_batches)
            return super().compute_loss(*args, **kwargs)

    rows = texts(24)
    args = arguments(tmp_path, num_train_epochs=1, gradient_accumulation_steps=6)
    Own(Small(), args, train_dataset=Rows()).train()
    assert len(ahead) == 12
    assert max(ahead) == 3


# -- Trainer's own habits --------------------------------------------------------------------------


class Events(TrainerCallback):
    """Writes down what happens, and where."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def saw(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append((name, state.global_step, state.epoch))

        return saw


def test_callbacks_schedules_and_evaluation_are_trainer_s(tmp_path: Path) -> None:
    """The same events at the same steps, learning rates, evaluations and checkpoints."""
    seen, rates, evaluations, saved = [], [], [], []
    for kind in (Trainer, AccumTrainer):
        events = Events()
        args = arguments(
            tmp_path / kind.__name__,
            lr_scheduler_type="linear",
            warmup_steps=2,
            max_steps=8,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            save_steps=2,
            logging_steps=2,
        )
        data = {"train_dataset": texts(22), "eval_dataset": texts(4, seed=2)}
        trainer = kind(llama(), args, callbacks=[events], **data)
        trainer.train()
        seen.append(events.seen)
        rates.append(logged(trainer, "learning_rate"))
        evaluations.append(logged(trainer, "eval_loss"))
        saved.append(sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*")))
    assert seen[0] == seen[1]
    assert len([name for name, *_ in seen[1] if name == "on_substep_end"]) == 8 * 3 - 2 * 1
    assert rates[0] == rates[1]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-6)
    assert saved[0] == saved[1]


def test_full_windows_of_equal_weights_are_trainer_s_own(tmp_path: Path) -> None:
    """Where Trainer is right, its numbers are accum's."""
    rows = [{**row, "labels": row["input_ids"]} for row in texts(16)]
    ours = of_the_model(tmp_path, rows)
    theirs = of_the_model(tmp_path, rows, Trainer)
    ours.train()
    theirs.train()
    assert apart(ours.model, theirs.model) <= 1e-13
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-6)


def test_nothing_is_imported_that_is_not_used() -> None:
    """`import accumplug` brings no trainer along."""
    code = "import accumplug, sys; assert not {'transformers', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEEDED)
def test_a_trainer_without_a_method_is_named(name: str) -> None:
    """So it is when this transformers moves one: the module itself could not be imported."""
    others = {other: None for other in NEEDED if other != name}
    with pytest.raises(ImportError, match=rf"transformers .* without {name} \("):
        check_trainer(type("Trainer", (), others))


@pytest.mark.parametrize(
    ("options", "window", "message"),
    [
        ({"optim": "lomo"}, False, "steps inside of backward"),
        ({"save_only_model": True}, True, "leaves the optimizer out"),
        ({"enable_jit_checkpoint": True}, True, "throws the window away"),
    ],
)
def test_what_a_window_can_t_be_kept_with_is_refused(
    options: Any, window: bool, message: str, tmp_path: Path
) -> None:
    """At once, by the name of the argument."""
    before = signal.getsignal(signal.SIGTERM)
    args = arguments(tmp_path, **options)
    try:
        with pytest.raises(ValueError, match=message):
            AccumTrainer(Small(), args, train_dataset=texts(4), checkpoint_window=window)
    finally:
        signal.signal(signal.SIGTERM, before)  # Trainer's own callback has taken it


def test_a_window_of_generated_micro_batches_is_not_saved(tmp_path: Path) -> None:
    """A trainer that draws prompts and makes its inputs of them has these in memory only; one that
    only prepares its inputs has not."""

    class Prepares(AccumTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return super()._prepare_inputs(inputs)

    class Generates(Prepares):
        def _get_train_sampler(self, *args: Any) -> Any:
            return super()._get_train_sampler(*args)

    options = {"train_dataset": texts(4), "checkpoint_window": True}
    Prepares(Small(), arguments(tmp_path), **options)
    with pytest.raises(ValueError, match="in Generates, which generates its own micro-batches"):
        Generates(Small(), arguments(tmp_path), **options)


def test_a_loader_that_understates_its_length_is_refused(tmp_path: Path) -> None:
    """Trainer would step in the middle of accum's window."""

    class Wrong(Stream):
        def __len__(self) -> int:
            return 10

    args = arguments(tmp_path, num_train_epochs=1)
    trainer = AccumTrainer(Small(), args, train_dataset=Wrong(texts(16)))
    with pytest.raises(RuntimeError, match=r"more micro-batches than len\(\)"):
        trainer.train()


# -- checkpoints inside of a window ----------------------------------------------------------------


class SaveAfter(TrainerCallback):
    """Asks for a save after some micro-batches, and for the end after the last of them."""

    def __init__(self, *places: int, stops: bool = True) -> None:
        self.places, self.stops, self.count = places, stops, 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended(control)

    def ended(self, control: Any) -> None:
        self.count += 1
        control.should_save = self.count in self.places
        control.should_training_stop |= self.stops and self.count == max(self.places)


class Terminate(SaveAfter):
    """Sends SIGTERM to this process after some micro-batches."""

    def ended(self, control: Any) -> None:
        self.count += 1
        if self.count in self.places:
            os.kill(os.getpid(), signal.SIGTERM)


def run(folder: Path, callback: Any = None, resume: Any = None, **more: Any) -> Trainer:
    """Dropout, AdamW, a shuffled order: what makes it hard to go on exactly."""
    torch.manual_seed(7)
    options = {"optim": "adamw_torch", "train_sampling_strategy": "random", "learning_rate": 0.01}
    trainer = AccumTrainer(
        llama(dropout=0.2),
        arguments(folder, **(options | {"lr_scheduler_type": "cosine"} | more)),
        train_dataset=texts(22),
        checkpoint_window=True,
        callbacks=[] if callback is None else [callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((SaveAfter, place) for place in (1, 4, 9, 11)),
        *((Terminate, place) for place in (3, 12, 18)),
    ],
)
def test_a_run_goes_on_inside_of_its_window(kind: Any, place: int, tmp_path: Path) -> None:
    """Weights and logs are those of the run that was never stopped, bit for bit."""
    straight = run(tmp_path / "straight")
    before = signal.getsignal(signal.SIGTERM)
    stopped = run(tmp_path / "stopped", kind(place))
    assert signal.getsignal(signal.SIGTERM) == before
    assert stopped.accum.micro_batches == place
    assert stopped.interrupted == (kind is Terminate)
    resumed = run(tmp_path / "stopped", resume=True)
    assert same(resumed.model, straight.model)
    assert logged(resumed, "loss") == logged(straight, "loss")
    assert logged(resumed, "grad_norm") == logged(straight, "grad_norm")
    assert resumed.accum.micro_batches == straight.accum.micro_batches


def test_a_run_may_be_stopped_again_and_again(tmp_path: Path) -> None:
    """After each few micro-batches, twice in one window."""
    straight = run(tmp_path / "straight", logging_steps=2)
    resumed = run(tmp_path / "often", Terminate(2), logging_steps=2)
    while resumed.interrupted:
        resumed = run(tmp_path / "often", Terminate(3), resume=True, logging_steps=2)
    assert same(resumed.model, straight.model)
    assert logged(resumed, "loss") == logged(straight, "loss")


def test_saves_inside_of_a_window_do_not_change_the_run(tmp_path: Path) -> None:
    """Nor do they write the weights twice: they hold still."""
    straight = run(tmp_path / "straight")
    saver = SaveAfter(4, 5, 6, 7, stops=False)
    trainer = run(tmp_path / "saved", saver)
    assert same(trainer.model, straight.model)
    first = tmp_path / "saved" / "checkpoint-1"
    windows = sorted(path.name for path in first.glob("window-*"))
    assert windows == ["window-3"]
    weights = (first / "model.safetensors").stat()
    assert weights.st_mtime_ns <= (first / "window-3" / "window.json").stat().st_mtime_ns
    assert not list((first / "window-3").glob("*model*"))
    resumed = run(tmp_path / "saved", resume=str(first))
    assert same(resumed.model, straight.model)


def test_weights_that_hold_still_are_written_once(tmp_path: Path) -> None:
    """The second save of a window leaves the files of the first as they are."""
    times = []

    class Looks(SaveAfter):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "optimizer.pt"
            times.append(path.stat().st_mtime_ns)

    run(tmp_path, Looks(5, 6, 7, stops=False))
    assert len(times) == 3
    assert len(set(times)) == 1


def test_a_window_of_another_run_is_not_gone_on_from(tmp_path: Path) -> None:
    """A run that writes checkpoint-1 anew takes the window that lay in it away."""
    run(tmp_path, SaveAfter(6))
    assert (tmp_path / "checkpoint-1" / "window-2").is_dir()
    run(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    assert (tmp_path / "checkpoint-1").is_dir()
    assert not (tmp_path / "checkpoint-1" / "window-2").exists()


def test_other_steps_than_those_of_the_window_are_refused(tmp_path: Path) -> None:
    """The message says which number to change."""
    run(tmp_path, SaveAfter(6))
    with pytest.raises(ValueError, match="gradient_accumulation_steps = 4 to go on from, not 2"):
        run(tmp_path, resume=True, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="ignore_data_skip = False"):
        run(tmp_path, resume=True, ignore_data_skip=True)


def test_a_plain_trainer_goes_on_from_the_update_before(tmp_path: Path) -> None:
    """checkpoint-N stays a checkpoint of Trainer's."""
    run(tmp_path, SaveAfter(6))
    args = arguments(tmp_path, optim="adamw_torch", max_steps=2)
    trainer = Trainer(llama(), args, train_dataset=texts(22))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


def test_the_mixin_serves_a_subclass_of_trainer(tmp_path: Path) -> None:
    """As it would SFTTrainer or DPOTrainer."""

    class Theirs(Trainer):
        steps_seen = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps_seen += 1
            return super().training_step(*args, **kwargs)

    class Own(AccumTrainerMixin, Theirs):
        pass

    rows = texts(22)
    expected, *_ = plain(Small(), rows, False)
    trainer = Own(Small(), arguments(tmp_path), train_dataset=rows)
    trainer.train()
    assert trainer.steps_seen == 22
    assert apart(trainer.model, expected) <= 1e-13


# -- several ranks ---------------------------------------------------------------------------------

SCRIPT = """
import gc, json, os, sys
from pathlib import Path
import torch
torch.set_default_dtype(torch.float64)
import torch.distributed as dist
sys.path.insert(0, os.environ["TESTS"])
from integrations.test_transformers import *

rank, job, where = int(os.environ["RANK"]), sys.argv[1], Path(sys.argv[2])


class OnOne(Terminate):
    def ended(self, control):
        if rank == 1:
            super().ended(control)


def with_dropout(folder, *callbacks):
    torch.manual_seed(7)
    options = {"train_sampling_strategy": "random", "learning_rate": 0.01}
    args = arguments(folder, optim="adamw_torch", **options)
    return AccumTrainer(llama(dropout=0.2), args, train_dataset=texts(44), checkpoint_window=True,
                        callbacks=list(callbacks))


def train(trainer, folder, resume=None):
    assert trainer.args.world_size == 2
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.accum.syncs <= trainer.accum.windows
    out = {"loss": logged(trainer, "loss"), "norm": logged(trainer, "grad_norm"),
           "micro": trainer.accum.micro_batches, "interrupted": trainer.interrupted}
    folder.mkdir(exist_ok=True)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(out))
    torch.save([p.detach() for p in trainer.model.parameters()], folder / f"rank-{rank}.pt")


if job == "exact":
    for source in ON_RANKS:
        folder = where / source.__name__
        train(source(folder, texts(44)), folder)
elif job == "stop":
    train(with_dropout(where / "run", OnOne(6)), where / "run")
else:
    train(with_dropout(where / "run"), where / "run", resume=True)
    train(with_dropout(where / "straight"), where / "straight")
gc.collect()  # a trainer is a cycle, and keeps the group
dist.destroy_process_group()
"""


def on_two_ranks(folder: Path, job: str) -> None:
    """Run a job of the script under torchrun."""
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
        [*launcher, "--standalone", "run.py", job, str(folder)],
        cwd=folder,
        env=environment,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def told(folder: Path) -> list[dict[str, Any]]:
    """What each rank told of the training there."""
    found = []
    for rank in range(2):
        one = json.loads((folder / f"rank-{rank}.json").read_text())
        one["weights"] = torch.load(folder / f"rank-{rank}.pt", weights_only=True)
        found.append(one)
    return found


ON_RANKS = (of_the_model, of_a_model_without_kwargs, of_a_function_that_divides)


def test_two_ranks_have_the_mean_over_all_of_their_tokens(tmp_path: Path) -> None:
    """A window is 4 micro-batches of 2 rows on each of 2 ranks, the tail 3: 11 in a pass."""
    on_two_ranks(tmp_path, "exact")
    for source in ON_RANKS:
        build, shift, _ = SOURCES[source]
        expected, losses, norms = plain(build(), texts(44), shift, window=2 * STEPS * BATCH)
        for one in told(tmp_path / source.__name__):
            for weight, right in zip(one["weights"], expected.parameters(), strict=True):
                right = right.detach()
                assert float((weight - right).norm() / right.norm()) <= (
                    1e-12 if build is Small else LLAMA
                )
            if one["loss"]:  # rank 0 logs
                assert one["loss"] == pytest.approx(losses, rel=1e-6)
                assert one["norm"] == pytest.approx(norms, rel=1e-6)


def test_a_signal_to_one_of_two_ranks_saves_the_window_of_both(tmp_path: Path) -> None:
    """And both go on from it as if nothing had been."""
    on_two_ranks(tmp_path, "stop")
    stopped = told(tmp_path / "run")
    assert [one["interrupted"] for one in stopped] == [True, True]
    assert stopped[0]["micro"] == stopped[1]["micro"] < 22
    assert list((tmp_path / "run").glob("checkpoint-*"))
    on_two_ranks(tmp_path, "resume")
    for one, other in zip(told(tmp_path / "straight"), told(tmp_path / "run"), strict=True):
        assert one["loss"] == other["loss"]
        assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
