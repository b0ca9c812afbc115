"""Lightning with accum's window: a callback for its Trainer, an Accumulator for Fabric.

The only file that knows Lightning. Read from lightning 2.6: in automatic optimization its Trainer
calls `training_step` and `LightningModule.backward` for each batch, with the loss divided by
`accumulate_grad_batches` and scaled, and steps behind the batch that its own count closes. So
a block of accum lasts from `on_train_batch_start` to the end of `backward`; unscaling, clipping,
stepping, schedules, counting and saving stay Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import lightning.fabric.wrappers as fabric_wrappers
import torch
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision as FabricMixed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from accumplug.accumulator import Accumulator
from accumplug.dataloading import rng
from accumplug.errors import MovedError
from accumplug.loop.micro_batch import MicroBatch
from accumplug.parallel.private import require

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback as Base
else:
    Base = Callback

NEEDED = {
    Trainer: ("is_last_batch", "num_training_batches", "strategy", "precision_plugin"),
    Callback: (
        *("on_train_batch_start", "on_after_backward", "on_before_optimizer_step"),
        "state_dict",
    ),
    LightningModule: ("backward", "automatic_optimization"),
    fabric_wrappers: ("_in_fabric_backward",),
}
"""What is used of Lightning here, beside what every program uses."""


def check_lightning(needed: Mapping[Any, tuple[str, ...]] = NEEDED) -> None:
    """Raise ImportError if Lightning lacks something that the window hangs on."""
    for place, names in needed.items():
        if missing := [name for name in names if not hasattr(place, name)]:
            import lightning

            raise ImportError(
                f"lightning {lightning.__version__} has a {place.__name__} without "
                f"{', '.join(missing)}; accumplug.integrations.lightning was written for lightning "
                f"2.6 and needs it"
            )


check_lightning()

Weigh = Callable[[Any], Any]


class AccumCallback(Base):  # type: ignore[misc]
    """Gives Lightning's automatic optimization accum's window of `accumulate_grad_batches`.

    >>> trainer = Trainer(accumulate_grad_batches=16, callbacks=[AccumCallback()])

    Args:
        weight: a function of a batch: the number of items that the loss of `training_step` is a
            mean over. By default the rows of its first tensor.
        sync: as in `Accumulator`.

    Attributes:
        accum: the Accumulator of the fit under way (or of the last one); `accum.last` is the last
            window: its loss over all ranks, its weight.

    Raises:
        ValueError: when the fit begins, what a window can't be kept with; the message names it.
    """

    def __init__(self, weight: Weigh | None = None, sync: str = "last") -> None:
        self.accum: Accumulator | None = None
        self._model: Any = None
        self._weight, self._sync = weight, sync
        self._data = _Data()
        self._pass: Iterator[None] | None = None
        self._block: MicroBatch | None = None
        self._scaler: Any = None
        self._loaded: dict[str, Any] | None = None
        self._random: rng.State | None = None

    # -- the life of a fit -----------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the Accumulator; go on from a window that a checkpoint has brought."""
        _refuse(trainer, pl_module)
        self._scaler = _scaler_of(trainer.precision_plugin)
        steps, sync = trainer.accumulate_grad_batches, cast(Any, self._sync)
        self.accum = accum = Accumulator(steps, scaler=self._scaler, sync=sync)
        self._model = trainer.strategy.model
        self._pass = self._block = None
        pl_module.backward = lambda loss, *args, **kwargs: self._backward(trainer, loss, **kwargs)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            _refuse_other_run(loaded, trainer)
            own = loaded["ranks"][trainer.global_rank]
            accum.load_state_dict(own["accum"])
            accum.parts.gradients.restore(self._model, own["sums"])
            self._random = _with_numpy(own["random"])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the module its own backward back."""
        vars(pl_module).pop("backward", None)
        self._leave(RuntimeError("the fit has ended"))
        self._pass = self._model = None

    # -- one batch -------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Open the block of a micro-batch."""
        accum = self.accum
        assert accum is not None
        if self._pass is None:
            self._data = _Data()
            self._pass = iter(accum.batches(self._data))
            if accum.pending and batch_idx % trainer.accumulate_grad_batches == 0:
                accum.discard()  # a window that training_step has left with its epoch
        accum.steps = trainer.accumulate_grad_batches
        last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        self._data.end_of_dataloader = last
        next(self._pass)
        weight = rows(batch) if self._weight is None else self._weight(batch)
        self._block = accum(trainer.strategy.model, weight=weight)
        self._block.__enter__()
        if self._random is not None:
            rng.restore(self._random)
            self._random = None

    def _backward(self, trainer: Any, loss: Tensor, **options: Any) -> None:
        """The backward of the module: `loss` is that of training_step, divided and scaled."""
        assert self.accum is not None
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        try:
            self.accum.backward(loss * (trainer.accumulate_grad_batches / scale), **options)
        except BaseException as error:
            self._leave(error)
            raise
        self._leave()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Raise MovedError if the backward was not the module's, so not of the block."""
        if self._block is not None:
            raise MovedError(
                "LightningModule.backward", "the backward of a micro-batch", "lightning"
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Finish the sum if training_step returned None in the batch that closes."""
        self._skip()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """The same in another batch."""
        self._skip()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The pass is over: the next batch begins another."""
        self._leave(RuntimeError("on_train_batch_start returned -1"))
        if self._pass is not None and self._data.end_of_dataloader:
            self._data.ended = True
            next(self._pass, None)
        self._pass = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """A block that an exception has ended does not count."""
        self._leave(exception)

    def _skip(self) -> None:
        if self._block is not None:
            self._block.skip()
            self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None if error is None else type(error), error, None)

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The open window of every rank, for Lightning's checkpoint. All ranks call it."""
        if self.accum is None or self._block is not None:
            return {}
        sums = self.accum.parts.gradients.named(self._model) if self.accum.pending else {}
        own = {
            "accum": self.accum.state_dict(),
            "sums": {name: grad.detach().cpu().clone() for name, grad in sums.items()},
            "random": _without_numpy(rng.capture()),
        }
        ranks = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [{}] * dist.get_world_size()
            dist.gather_object(own, ranks if dist.get_rank() == 0 else None)
        return {"steps": self.accum.steps, "pending": self.accum.pending, "ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the window until the fit begins."""
        self._loaded = state_dict or None


class _FabricMicroBatch(MicroBatch):
    def backward(self, *args: Any, **kwargs: Any) -> None:
        with in_fabric_backward():
            super().backward(*args, **kwargs)


class FabricAccumulator(Accumulator):
    """An Accumulator for a loop with Fabric, in each precision.

    >>> accum = FabricAccumulator(fabric, steps=16, optimizer=optimizer, max_grad_norm=1.0)
    >>> for x, y in accum.batches(loader):
    ...     with accum(model):
    ...         accum.backward(loss_fn(model(x), y))

    accum.backward takes the place of fabric.backward, and accum takes the step. The other options
    are those of `Accumulator`.

    Raises:
        ValueError: a strategy that a window can't be kept with.
    """

    _micro_batch = _FabricMicroBatch

    def __init__(self, fabric: Fabric, steps: Any, *, optimizer: Any, **options: Any) -> None:
        _refuse_strategy(fabric.strategy, "Fabric")
        several = isinstance(optimizer, (list, tuple))
        bare = [getattr(o, "optimizer", o) for o in (optimizer if several else [optimizer])]
        scaler = _scaler_of(fabric.strategy.precision)
        super().__init__(steps, optimizer=bare, scaler=scaler, **options)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """The same as `Accumulator.backward`."""
        with in_fabric_backward():
            super().backward(*args, **kwargs)


@contextmanager
def in_fabric_backward() -> Iterator[None]:
    """Fabric's outputs refuse a backward outside of this: it would not be scaled."""
    wrappers: Any = fabric_wrappers
    before, wrappers._in_fabric_backward = wrappers._in_fabric_backward, True
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before


class _Data:
    """Stands for the batches that Lightning fetches: they only have an end."""

    def __init__(self) -> None:
        self.end_of_dataloader = self.ended = False

    def __iter__(self) -> Iterator[None]:
        while not self.ended:
            yield None


def rows(batch: Any) -> int:
    """The length of the first tensor in a batch; 1 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, (Mapping, list, tuple)):
        for part in parts:
            if isinstance(part, (Tensor, Mapping, list, tuple)):
                return rows(part)
    return 1


def _scaler_of(precision: Any) -> Any:
    """The GradScaler of a precision plugin, or None."""
    if isinstance(precision, (MixedPrecision, FabricMixed)):
        require(precision, ["scaler"], "the scale of a loss", "lightning")
    return getattr(precision, "scaler", None)


def _without_numpy(state: rng.State) -> rng.State:
    """A random state of numbers, strings and tensors alone, as torch.load likes it."""
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        state = {**state, "numpy": [name, torch.tensor(keys.tolist()), *rest]}
    return state


def _with_numpy(state: rng.State) -> rng.State:
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        state = {**state, "numpy": (name, keys.tolist(), *rest)}
    return state


def _refuse(trainer: Any, module: Any) -> None:
    """Raise ValueError for a fit that a window can't be kept in."""
    _refuse_strategy(trainer.strategy, "Trainer")
    optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
    for refused, why in (
        (
            not module.automatic_optimization,
            "manual optimization: use an Accumulator in training_step instead",
        ),
        (len(optimizers) != 1, f"{len(optimizers)} optimizers in automatic optimization"),
        (
            any(isinstance(o, torch.optim.LBFGS) for o in optimizers),
            "LBFGS, which runs a batch several times",
        ),
        (
            type(module).backward is not LightningModule.backward,
            f"{type(module).__name__}.backward, as accum's takes its place",
        ),
    ):
        if refused:
            raise ValueError(f"AccumCallback can't keep its window with {why}")


def _refuse_strategy(strategy: Any, where: str) -> None:
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingle

    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy, FabricDDP, FabricSingle)):
        raise ValueError(
            f"accum can't keep its window in {where} with {type(strategy).__name__}: one device "
            f'or strategy="ddp" were tried'
        )


def _refuse_other_run(loaded: dict[str, Any], trainer: Any) -> None:
    if not loaded["pending"]:
        return
    for name, saved, now in (
        ("accumulate_grad_batches", loaded["steps"], trainer.accumulate_grad_batches),
        ("the number of ranks", len(loaded["ranks"]), trainer.world_size),
    ):
        if saved != now:
            raise ValueError(
                f"the checkpoint was saved {loaded['pending']} micro-batches into a window, which "
                f"takes {name} = {saved} to go on from, not {now}"
            )
