"""transformers' Trainer with accum's window. The only file that knows the methods of Trainer.

Read from transformers 5.24. `Trainer._run_epoch` asks `get_batch_samples` for the micro-batches of
an update, calls `training_step` for each of them, and clips, steps, logs and saves by itself when
its own count is full. So the window is made in these two methods: the first hands out one
micro-batch at a time, the second runs each in a block of accum. Everything else stays Trainer's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import save_fsdp_model
from torch import Tensor, nn
from transformers import Trainer

from accumplug.accumulator import Accumulator
from accumplug.checkpoint.coordination import RankStore, SharedRequest
from accumplug.checkpoint.signals import Signals
from accumplug.integrations import accelerate_state
from accumplug.integrations.accelerate_buckets import PreparedBuckets
from accumplug.parallel.group import DataParallelGroup
from accumplug.parallel.private import require

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

NEEDED = {
    "get_batch_samples": "hands out the micro-batches of an update",
    "training_step": "runs one micro-batch",
    "floating_point_ops": "counts the operations of a micro-batch",
    "_run_epoch": "asks for one update after the other",
    "_init_training_state": "says where a resumed run starts",
    "_save_checkpoint": "writes checkpoint-N",
    "_save_optimizer_and_scheduler": "writes the optimizer",
    "_save_rng_state": "writes the random state",
    "_load_rng_state": "reads the random state",
    "_get_output_dir": "says where checkpoint-N belongs",
    "_prepare_inputs": "moves a micro-batch to the device",
    "_get_train_sampler": "draws the order of the data",
    "_track_num_input_tokens": "counts the tokens of a micro-batch",
    "get_tp_size": "says how many ranks share a tensor",
    "get_cp_size": "says how many ranks share a context",
    "get_sp_size": "says how many ranks share a sequence",
}
"""The methods of Trainer that are overridden or called here, and what each does."""
IN_A_STEP = ("current_gradient_accumulation_steps", "_loss_shifts_labels")
IN_A_RUN = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""What Trainer has of itself in a step and in a training: what a loss is divided by, whether labels
are shifted; the loss that is to be logged, that has been, and when."""

Weigh = Callable[[dict[str, Any]], int]


def check_trainer(trainer: type) -> None:
    """Raise ImportError if `trainer` lacks a method that the window hangs on."""
    missing = [f"{name} ({what})" for name, what in NEEDED.items() if not hasattr(trainer, name)]
    if missing:
        import transformers

        raise ImportError(
            f"transformers {transformers.__version__} has a Trainer without {', '.join(missing)}; "
            f"accumplug.integrations.transformers was written for transformers 5.24 and needs it"
        )


check_trainer(Trainer)


class Filler(dict[str, Any]):
    """An empty micro-batch that only moves Trainer's own count on; nothing is run for it."""


class AccumTrainerMixin(Base):  # type: ignore[misc]
    """Gives a Trainer, or a subclass of it, accum's window of `gradient_accumulation_steps`.

    >>> class MyTrainer(AccumTrainerMixin, SFTTrainer): ...
    >>> MyTrainer(model, args, train_dataset=data, checkpoint_window=True).train()

    Args:
        weight: a function of a micro-batch's inputs: the number of items that its loss is a mean
            over. By default its target tokens: labels other than -100, without the first of each
            row where the model shifts them; its rows if there are no labels.
        checkpoint_window: let `checkpoint-N` hold an open window. A callback that sets
            `control.should_save` in `on_substep_end` saves after that micro-batch, and a signal
            saves after the one that is under way and ends the training.
        signals: those that do so.

    Attributes:
        accum: the Accumulator of the training under way (or of the last one).
        interrupted: whether a signal has ended the training, and it was saved.

    Raises:
        ValueError: arguments that can't be kept in a window; the message names them.
    """

    control: Any  # as Trainer has it
    accum: Accumulator | None = None
    interrupted: bool = False

    def __init__(
        self,
        *args: Any,
        weight: Weigh | None = None,
        checkpoint_window: bool = False,
        signals: Sequence[int] = (signal.SIGTERM,),
        **kwargs: Any,
    ) -> None:
        self._accum_weight = weight
        self._accum_signals = tuple(signals) if checkpoint_window else ()
        self.checkpoint_window = checkpoint_window
        self._accum_watch: _SignalWatch | None = None
        self._accum_epoch: _Epoch | None = None
        self._accum_resume: Path | None = None
        self._accum_whole: Path | None = None
        super().__init__(*args, **kwargs)
        _refuse(self)

    # -- the life of a training ------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The same as Trainer's."""
        self.interrupted = False
        try:
            return super().train(*args, **kwargs)
        finally:
            self._accum_epoch = None
            # left inside of a window it is False, for all Accelerators of this process, and the
            # step by which torch fills a sharded optimizer's state would do nothing
            self.accelerator.gradient_state._set_sync_gradients(True)
            if self._accum_watch is not None:
                self._accum_watch.signals.restore()
                self._accum_watch = None

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Where the training starts: after the micro-batches of the window that was saved, too."""
        self.accum = self._accum_epoch = self._accum_resume = self._accum_whole = None
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        folder = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        if folder is not None and (window := find_window(folder)) is not None:
            told = _read_told(self, window)
            self.state.num_input_tokens_seen = told["num_input_tokens_seen"]
            self.state.total_flos = told["total_flos"]
            self._accum_resume, batches = window, batches + told["pending"]
            if self.checkpoint_window:
                self._accum_whole = folder.resolve()
        return epochs, batches

    def _accum_begin(self) -> Accumulator:
        """Build the Accumulator, as soon as model and optimizer are prepared."""
        require(self, IN_A_RUN, "the loss that is logged", "transformers")
        each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        accum = Accumulator(
            self.args.gradient_accumulation_steps,
            accelerator=self.accelerator,
            sync="every" if each else "last",
        )
        self._accum_buckets = PreparedBuckets(accum.parts)
        if self._accum_resume is not None:
            accelerate_state.load_window(accum.parts, self._accum_resume, 0, self._accum_buckets)
            told = _read_told(self, self._accum_resume)
            self._tr_loss += told["loss_since_log"]
            self._total_loss_scalar -= told["loss_since_log"]
            self._globalstep_last_logged = told["logged_at"]
        if self.checkpoint_window:
            folder = Path(self.args.output_dir)
            self._accum_watch = _SignalWatch(self._accum_signals, folder)
        return accum

    # -- one update ------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[Any, None]:
        """The micro-batches of one update, one at a time, where Trainer fetches all of them."""
        if self.accum is None:
            self.accum = self._accum_begin()
        epoch = self._accum_epoch
        if epoch is None or epoch.source is not epoch_iterator:
            self._accum_epoch = None  # ends the pass before another one begins
            if self._accum_resume is None:
                self.accum.discard()  # a window that a callback has left with its epoch
            self._accum_epoch = epoch = _Epoch(self.accum, epoch_iterator)
        return _Update(self, epoch, num_batches), None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one micro-batch in a block; the window's loss when it closes, else 0."""
        require(self, IN_A_STEP, "the mean of a micro-batch's loss", "transformers")
        accum, closed = self.accum, torch.zeros((), device=self.args.device)
        if isinstance(inputs, Filler) or accum is None:
            return closed
        self._accum_resume = None
        items = self._accum_items(inputs)
        weight = self._accum_weigh(inputs, items)
        number = None if items is None else torch.tensor(max(items, 1), device=self.args.device)
        steps_now = self.accelerator.sync_gradients  # as Trainer has set it
        windows, across = accum.windows, self.args.average_tokens_across_devices
        # what compute_loss gets is the number of this micro-batch, so that any loss is a mean of it
        self.current_gradient_accumulation_steps = 1
        self.args.average_tokens_across_devices = False
        try:
            with accum(model, weight=weight) as micro:
                super().training_step(model, inputs, number)
        finally:
            self.args.average_tokens_across_devices = across
        closes = accum.windows > windows
        _refuse_other_count(micro.index, closes, steps_now)
        if closes and accum.last is not None and accum.last.weight:
            closed += accum.last.loss
        return closed

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """The same as Trainer's; none for a micro-batch that only fills."""
        return 0 if isinstance(inputs, Filler) else int(super().floating_point_ops(inputs))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if not isinstance(inputs, Filler):
            super()._track_num_input_tokens(inputs)

    def _accum_items(self, inputs: dict[str, Any]) -> int | None:
        """The target tokens of a micro-batch; None if it has no labels."""
        if not isinstance(inputs, Mapping):  # GRPO: prompts that it generates answers to
            return None
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor):
            return None
        if "shift_labels" not in inputs and self._loss_shifts_labels:
            labels = labels[..., 1:]
        return int((labels != -100).sum())

    def _accum_weigh(self, inputs: dict[str, Any], items: int | None) -> int:
        if self._accum_weight is not None:
            return self._accum_weight(inputs)
        if items is not None:
            return items
        if not isinstance(inputs, Mapping):  # its micro-batches are of equal rows
            return 1
        rows = [
            len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()
        ]
        return rows[0] if rows else 1

    # -- checkpoints inside of a window ----------------------------------------------------------

    def _accum_after_micro_batch(self, meets: bool) -> bool:
        """Save what is asked for; whether the training ends here.

        `meets`: the ranks wait for each other in the next micro-batch.
        """
        watch, accum = self._accum_watch, self.accum
        if watch is None or accum is None:
            return False
        stops = watch.must_stop(accum.pending, meets)
        if stops or (accum.pending and self.control.should_save):
            self._save_checkpoint(self.model_wrapped, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if stops:
            self.interrupted = self.control.should_training_stop = True
        return stops

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write checkpoint-N and, in it, the window: window-0 between two of them.

        Inside of a window weights and moments hold still: if this run has written them already,
        only the window is written.
        """
        if not self.checkpoint_window or self.accum is None:
            super()._save_checkpoint(model, trial)
            return
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        pending = self.accum.pending
        if not pending or folder.resolve() != self._accum_whole:
            if self.args.should_save:
                drop_windows(folder)  # of another run
            super()._save_checkpoint(model, trial)
            self._accum_whole = folder.resolve()
        self._accum_save_window(folder, pending)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The same as Trainer's; before the first update of a sharded model only its weights, as
        torch can't save such an optimizer without a step. A resumed run begins with a new one."""
        if self.state.global_step or not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        plugin = self.accelerator.state.fsdp_plugin
        save_fsdp_model(plugin, self.accelerator, self.model, output_dir, adapter_only=True)

    def _accum_save_window(self, folder: Path, pending: int) -> None:
        assert self.accum is not None
        self.store_flos()
        written = folder / f"window-{pending}.partial"
        if self.args.should_save:
            shutil.rmtree(written, ignore_errors=True)
            written.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        accelerate_state.save_window(self.accum.parts, written, 0, self._accum_buckets)
        self._save_rng_state(os.fspath(written))
        told = {
            "global_step": self.state.global_step,
            "pending": pending,
            "steps": self.args.gradient_accumulation_steps,
            "ranks": self.args.world_size,
            "num_input_tokens_seen": self.state.num_input_tokens_seen,
            "total_flos": self.state.total_flos,
            "loss_since_log": float(self._tr_loss),
            "logged_at": self._globalstep_last_logged,
        }
        if self.args.should_save:
            (written / TOLD).write_text(json.dumps(told, indent=2))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            shutil.rmtree(folder / f"window-{pending}", ignore_errors=True)
            written.rename(folder / f"window-{pending}")
            drop_windows(folder, but=pending)
        self.accelerator.wait_for_everyone()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The random state of the window, if one was saved."""
        window = self._accum_resume
        super()._load_rng_state(checkpoint if window is None else os.fspath(window))


class AccumTrainer(AccumTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer with accum's window. See `AccumTrainerMixin`."""


class _Epoch:
    """One pass through the data, which knows its last micro-batch. One item is looked ahead."""

    def __init__(self, accum: Accumulator, source: Iterator[Any]) -> None:
        self.source = source
        self._pass = accum.batches(source)

    def next(self) -> Any | None:
        """The next micro-batch; None after the last one."""
        return next(self._pass, None)

    @property
    def at_end(self) -> bool:
        return bool(getattr(self._pass, "end_of_dataloader", False))


class _Update:
    """The micro-batches of one update, in the place of the list that Trainer makes of them.

    Trainer takes the last one to be the one that the ranks reduce, by `len`. Here each is the last
    so far, so that Trainer enters no no_sync of its own: accum knows which one closes.
    """

    def __init__(self, trainer: AccumTrainerMixin, epoch: _Epoch, count: int) -> None:
        self._trainer, self._epoch, self._count = trainer, epoch, count
        self._first = epoch.next()  # before Trainer brings the random state of a checkpoint back
        self._given = 0

    def __len__(self) -> int:
        return self._given

    def __iter__(self) -> Iterator[Any]:
        trainer, epoch = self._trainer, self._epoch
        accum = trainer.accum
        assert accum is not None
        windows, item = accum.windows, self._first
        self._first = None
        while item is not None:
            if epoch.at_end:  # a tail that Trainer could not foresee: let its count be full
                for _ in range(self._count - accum.pending - 1):
                    self._given += 1
                    yield Filler()
            self._given += 1
            yield item
            item = None
            if accum.windows > windows:
                if epoch.at_end:
                    epoch.next()  # counts the pass
                trainer._accum_after_micro_batch(meets=False)
                return
            item = epoch.next()
            closes = epoch.at_end or accum.pending + 1 == accum.steps
            if trainer._accum_after_micro_batch(meets=closes):
                return


class _SignalWatch:
    """Whether a signal came, and on several ranks whether all are where they save for it."""

    def __init__(self, kinds: Sequence[int], folder: Path) -> None:
        self.signals = Signals(kinds)
        self.signals.install()
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._request = SharedRequest(RankStore(DataParallelGroup(None))) if several else None

    def must_stop(self, index: int, meets: bool) -> bool:
        """Between two micro-batches, `index` of the window after the last meeting of the ranks."""
        if (request := self._request) is None:
            return self.signals.arrived
        if request.known is None and self.signals.arrived:
            request.ask("stop")
        return request.is_time(index, 0, meets)


TOLD = "window.json"


def find_window(folder: Path) -> Path | None:
    """The newest open window in `checkpoint-N`, or None."""
    found = [path for path in folder.glob("window-*") if path.suffix != ".partial"]
    return max(found, key=lambda path: int(path.name.removeprefix("window-")), default=None)


def drop_windows(folder: Path, but: int | None = None) -> None:
    for path in folder.glob("window-*"):
        if path.name != f"window-{but}":
            shutil.rmtree(path, ignore_errors=True)


def _read_told(trainer: AccumTrainerMixin, window: Path) -> dict[str, Any]:
    """What `window.json` says; ValueError for a run that can't go on from it."""
    told: dict[str, Any] = json.loads((window / TOLD).read_text())
    args = trainer.args
    for name, saved, now in (
        ()
        if told["pending"] == 0
        else (
            ("gradient_accumulation_steps", told["steps"], args.gradient_accumulation_steps),
            ("the number of ranks", told["ranks"], args.world_size),
            ("ignore_data_skip", False, args.ignore_data_skip),
        )
    ):
        if saved != now:
            raise ValueError(
                f"{window} was saved {told['pending']} micro-batches into a window, which takes "
                f"{name} = {saved} to go on from, not {now}; change it, or delete {window.name} to "
                f"start from update {told['global_step']}"
            )
    return told


def _refuse_other_count(index: int, closes: bool, steps_now: bool) -> None:
    if closes != steps_now:
        raise RuntimeError(
            f"Trainer {'takes' if steps_now else 'does not take'} its step after micro-batch "
            f"{index} of this window, where accum's window "
            f"{'ends' if closes else 'goes on'}: the training data have more micro-batches "
            f"than len() of their loader says, or gradient_accumulation_steps was changed"
        )


def _generates(trainer: AccumTrainerMixin) -> bool:
    """Whether `trainer` makes its micro-batches from prompts, as TRL's online trainers do."""
    return all(
        getattr(type(trainer), name) is not getattr(Trainer, name)
        for name in ("_prepare_inputs", "_get_train_sampler")
    )


def _refuse(trainer: AccumTrainerMixin) -> None:
    """Raise ValueError for arguments that a window can't be kept with."""
    args = trainer.args
    sizes = [getattr(trainer, name)() for name in ("get_tp_size", "get_cp_size", "get_sp_size")]
    optim = str(getattr(args.optim, "value", args.optim))
    window = trainer.checkpoint_window
    accelerator, several = trainer.accelerator, args.world_size > 1
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    for refused, why in (
        (trainer.is_deepspeed_enabled, "DeepSpeed, whose engine has its own: use Trainer itself"),
        (
            fsdp is not None and fsdp.fsdp_version != 2,
            'fsdp_config={"version": 1}, whose sums can\'t be reached: use version 2',
        ),
        (
            accelerator.mixed_precision == "fp16" and accelerator.scaler is None,
            "fp16=True on this device, where Trainer silently trains in fp32: use bf16=True",
        ),
        (
            several and not args.average_tokens_across_devices,
            "average_tokens_across_devices=False: its mean is that over the tokens of all ranks",
        ),
        (
            several and args.ddp_static_graph and args.gradient_accumulation_steps > 1,
            "ddp_static_graph=True, by which DDP reduces in each micro-batch",
        ),
        (
            not accelerator.gradient_state.sync_with_dataloader,
            "sync_with_dataloader=False: a pass ends its last window",
        ),
        (
            args.n_gpu > 1,
            f"{args.n_gpu} GPUs in one process (nn.DataParallel): start with torchrun",
        ),
        (max(sizes) > 1, f"tensor, context and sequence parallel sizes {sizes}: only 1 was tried"),
        (
            getattr(trainer, "is_distributed_loading_by_transformers", False),
            "a model that from_pretrained has sharded: shard it by fsdp= instead",
        ),
        ("lomo" in optim, f"optim={optim!r} steps inside of backward, and a window has several"),
        (
            window and args.save_only_model,
            "checkpoint_window=True with save_only_model=True, which leaves the optimizer out",
        ),
        (
            window and getattr(args, "enable_jit_checkpoint", False),
            "checkpoint_window=True with enable_jit_checkpoint=True, which throws the window away; "
            "signals= saves it",
        ),
        (
            window and _generates(trainer),
            f"checkpoint_window=True in {type(trainer).__name__}, which generates its own "
            f"micro-batches and has them in memory only",
        ),
    ):
        if refused:
            raise ValueError(f"AccumTrainerMixin can't keep its window with {why}")
