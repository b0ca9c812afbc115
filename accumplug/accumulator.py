"""The public face of a window: options in, one object out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from accumplug.core.gradients import GradientBuffer
from accumplug.core.host import Host
from accumplug.core.noise_probe import NoiseProbe
from accumplug.core.options import NonFinite, Options, Reduction, Sync, Tail
from accumplug.core.result import WindowResult
from accumplug.core.state import BlockState, LoopState, PassObserver
from accumplug.core.window import Weight, check_steps, check_weight
from accumplug.dataloading.batches import Batches
from accumplug.dataloading.contrastive import Embed, contrastive
from accumplug.dataloading.split import split
from accumplug.inplace import InplaceReport
from accumplug.loop.lifecycle import Lifecycle
from accumplug.loop.micro_batch import MicroBatch
from accumplug.loop.models import Models
from accumplug.noise.scale import NoiseScale
from accumplug.parallel.group import DataParallelGroup

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


class Handle(Generic[F]):
    """What a callback is registered by. Called, it is the callback, so that it may decorate one."""

    def __init__(self, functions: list[Any], function: F) -> None:
        self._functions = functions
        self._function = function
        functions.append(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def remove(self) -> None:
        """Let the callback run no more. Removing twice is fine."""
        if self._function in self._functions:
            self._functions.remove(self._function)


class Accumulator:
    """Exact gradient accumulation for a training loop that already exists.

    Each window becomes one update with the gradient of ``sum(w * l) / sum(w)`` over its
    micro-batches on all ranks, where ``l`` is a loss that is a mean over ``w`` items.

    >>> accum = Accumulator(steps=4, optimizer=optimizer)
    >>> for x, y in accum.batches(loader):
    ...     with accum(model):
    ...         accum.backward(loss_fn(model(x), y))

    Args:
        steps: micro-batches in a window on one rank, or a function of the number of updates
            so far. Settable; a new value holds from the next window on. None: a window is open
            until `flush()`, until a block says so (`accum(model, closes=True)`), or until the last
            part of an item (`split`).
        accelerator: an `accelerate.Accelerator`, for a loop that has one. Every other line of
            the loop stays; `with accum(model)` takes the place of `accelerator.accumulate`.
        optimizer: one or several. If given, accum takes the step when the closing block ends:
            unscale, clip, step, scaler, scheduler, zero. If not, the loop does, in or after
            the block whose `micro.closes` is true.
        scheduler: one or several; ticks once for each update that really happened.
        scaler: a `torch.amp.GradScaler` (or one like it). Its scale is constant in a window.
        max_grad_norm: clip the finished gradient to this 2-norm.
        tail: what becomes of a window that the data ends before it is full: "flush" (an
            update on what is there), "drop", or "carry" (into the next pass).
        sync: "last" (one reduction over the ranks in a window) or "every" (one in each
            micro-batch).
        accumulate_dtype: torch.float32: the running sum, its reduction and the clip are in fp32
            where parameters are bf16 or fp16; the optimizer gets it rounded once.
        inplace: add the gradient of large Linear and Embedding weights straight into `.grad`;
            `inplace_report()` says which ones.
        nonfinite: "skip_window" (no update on a non-finite gradient; with a scaler, its own
            rule), "skip_micro_batch" (leave out the micro-batch and its weight; waits for the
            device in each), or "raise".
        process_group: the data-parallel ranks; all of them by default.
        models: modules, as wrapped for the ranks, that blocks will run. Only needed on a rank
            that may have no data in its first pass, so that its part in the others' reductions
            goes through DistributedDataParallel's own buckets and hooks.

    Attributes:
        windows: closed so far, updates or not.
        updates: windows that became an update.
        skipped: windows closed without one: a gradient that was not finite, or no weight at all.
        micro_batches: that counted on this rank.
        epoch: finished passes through the data.
        position: items of this pass, from `batches`, that were trained on.
        syncs: gradient reductions over the ranks that really ran on this rank.
        parts: what this object is made of, for code that extends it (a Checkpointer, a trainer).

    Raises:
        ValueError: options that are unknown, contradict each other or would be ignored.
        TypeError: an argument of a wrong type.
    """

    _micro_batch: ClassVar[type[MicroBatch]] = MicroBatch

    def __init__(
        self,
        steps: int | Callable[[int], int] | None,
        *,
        accelerator: Any = None,  # an accelerate.Accelerator, which is imported only if used
        optimizer: Any = None,  # one or several, as they are or prepared
        scheduler: Any = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        tail: Tail = "flush",
        sync: Sync = "last",
        accumulate_dtype: torch.dtype | None = None,
        inplace: bool = False,
        nonfinite: NonFinite = "skip_window",
        process_group: torch.distributed.ProcessGroup | None = None,
        models: Sequence[nn.Module] = (),
    ) -> None:
        self._state = state = LoopState()
        self.steps = steps
        options = Options.check(
            optimizer,
            scheduler,
            scaler,
            max_grad_norm,
            tail,
            sync,
            nonfinite,
            accumulate_dtype,
        )
        host = Host(bool(options.optimizers))
        if accelerator is not None:
            from accumplug.integrations.accelerate import AccelerateHost
            from accumplug.integrations.accelerate_state import register_hooks

            host = AccelerateHost(accelerator, self.backward, options, state.steps)
            scaler = accelerator.scaler if scaler is None else scaler
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        group = DataParallelGroup(process_group)
        gradients = GradientBuffer(options.optimizers, host.models)
        known = Models(gradients, group, options, host, inplace, models)
        self.parts = Lifecycle(state, options, group, host, gradients, known, scaler)
        if accelerator is not None:
            register_hooks(self.parts, accelerator)

    def __repr__(self) -> str:
        window = self._state.window
        torn = ", torn" if window is not None and window.torn is not None else ""
        return f"<Accumulator: {self.updates} updates, {self.pending} pending{torn}>"

    # -- what it tells ---------------------------------------------------------------------------

    @property
    def steps(self) -> int | None:
        """Micro-batches in the next window; None if their number is open."""
        return None if self._state.steps is None else self._state.next_steps()

    @steps.setter
    def steps(self, steps: int | Callable[[int], int] | None) -> None:
        self._state.steps = steps if steps is None or callable(steps) else check_steps(steps)

    @property
    def takes_step(self) -> bool:
        """Whether accum steps the optimizers; else the loop does."""
        return bool(self.parts.options.optimizers)

    @property
    def pending(self) -> int:
        """Micro-batches in the open window; 0 between windows."""
        return self._state.pending

    @property
    def last(self) -> WindowResult | None:
        """The last closed window, or None. Reading it may wait for the device."""
        return self._state.last

    @property
    def windows(self) -> int:
        """Windows closed so far, updates or not."""
        return self._state.windows

    @property
    def updates(self) -> int:
        """Windows that became an update."""
        return self._state.updates

    @property
    def skipped(self) -> int:
        """Windows closed without an update: a gradient that was not finite, or no weight at all."""
        return self._state.skipped

    @property
    def micro_batches(self) -> int:
        """Micro-batches that counted on this rank."""
        return self._state.micro_batches

    @property
    def epoch(self) -> int:
        """Finished passes through the data."""
        return self._state.epoch + self._state.is_between_passes

    @property
    def position(self) -> int:
        """Items of this pass, from `batches`, that were trained on; 0 between passes."""
        return 0 if self._state.is_between_passes else self._state.position

    @property
    def syncs(self) -> int:
        """Gradient reductions over the ranks that really ran on this rank."""
        return self._state.syncs

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Set it to a `NoiseScale()` to have each window record two norms; None by default.

        The small batch is the window's first micro-batch, the large one its sum. Needs windows of
        two micro-batches or more, and sync="last". Each window then waits once more for the device.
        """
        probe = self.parts.noise_probe
        return None if probe is None else probe.noise

    @noise_scale.setter
    def noise_scale(self, noise: NoiseScale | None) -> None:
        own = self.parts
        if noise is not None and own.options.sync == "every":
            raise ValueError(
                'the noise scale compares one micro-batch with the window; under sync="every" the '
                "sum is over the ranks from the first micro-batch on"
            )
        own.noise_probe = None if noise is None else NoiseProbe(noise, own.gradients)

    def inplace_report(self) -> InplaceReport:
        """Which modules `inplace=True` has served so far, and why it has not served the others."""
        server = self.parts.models.inplace
        return InplaceReport() if server is None else server.report()

    # -- the loop --------------------------------------------------------------------------------

    def __call__(
        self, model: nn.Module, *models: nn.Module, weight: Weight = 1, closes: bool = False
    ) -> MicroBatch:
        """The context of one micro-batch.

        Args:
            model: what runs forward in it, as wrapped for the ranks; several are given one by one.
            weight: how many items (tokens, samples) the loss is a mean over: a number, or a
                0-dim tensor, which costs no wait for the device. The number 0 adds nothing at
                all, even if the loss is NaN.
            closes: end the window with this micro-batch, e.g. at a token budget. All ranks have
                to end it with one of theirs.

        Raises:
            ValueError: a weight or a model that can't be made right.
            TornWindowError, RuntimeError: on entry, if the window is torn or a block is open.
        """
        block = BlockState((model, *models), check_weight(weight))
        block.closes_early = closes
        return self._micro_batch(self.parts, block)

    def backward(
        self,
        loss: Tensor,
        weight: Weight | None = None,
        reduction: Reduction = "mean",
        *,
        extra: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Back-propagate `loss`, weighted, into the running sum.

        Args:
            loss: one element, divided by nothing but its own number of items.
            weight: that of the block if not given. A micro-batch has one weight: two backwards
                in one block add two terms of the same objective.
            reduction: "mean", or "sum" if `loss` is a sum over `weight` items.
            extra: a second term, one element, to be averaged over micro-batches instead of items.
                Only under `batches(loader, weigh=...)`, where the size of the window is known.
            retain_graph: as in `torch.Tensor.backward`.
            create_graph: as in `torch.Tensor.backward`.

        Raises:
            RuntimeError: outside of a block, or a second one where the first was reduced.
            ValueError: a loss of several elements, or without a graph.
        """
        block = self._state.block
        if block is None:
            raise RuntimeError("backward outside of a block; it belongs into `with accum(...):`")
        self.parts.backward(block, loss, weight, reduction, extra, retain_graph, create_graph)

    def batches(
        self, loader: Iterable[T], weigh: Callable[[T], Weight] | None = None
    ) -> Batches[T]:
        """One pass through `loader`, of whatever kind; it yields the loader's items.

        It knows the last item (one item of look-ahead, never `len`), so that a tail can be
        flushed, and counts the position. The loop may read ahead: a block is the last one of the
        pass if it leaves no item without a block. Ranks whose data end early take part with weight
        0 until all have ended. With `weigh`, a function from an item to its weight, it looks one
        window ahead instead of one item, so that the total weight is known from the window's
        first micro-batch on. It has a length where `loader` has one.

        Raises:
            RuntimeError: ranks have different numbers of items and this one can't take the steps
                of the loop (neither `optimizer` nor `accelerator` was given).
        """
        self.parts.before_pass()
        return Batches(self.parts, self._state, loader, self.parts.data_pass.batches(loader, weigh))

    def split(self, batch: T, size: int) -> Iterator[T]:
        """The parts of one item, `size` rows each but the last: one block a part.

        Parts count like any micro-batch, and the last part of the last item closes a tail. With
        `steps=None` the last part closes the window: one batch, one update. Under
        `batches(..., weigh=)` a window is `steps` whole items, and each part is weighed by itself.
        A process that resumes inside of an item is given it again, and `split` leaves out the
        parts that were trained on.

        Args:
            batch: a tensor, or tuples, lists, dicts and dataclasses of them; tensors are cut
                along their first dimension, which all of them share; anything else goes to all.
            size: rows of a part.

        Raises:
            ValueError: no tensor to cut, tensors of different lengths, or another size than the
                run that is resumed had.
        """
        stops = self.parts.data_pass.stops_before_part
        return split(self._state, self.parts.group, batch, size, stops)

    def contrastive(
        self,
        model: nn.Module | Sequence[nn.Module],
        batch: Any,  # as in split
        size: int,
        loss: Callable[..., Tensor],
        embed: Embed | None = None,
    ) -> Tensor:
        """Train on a loss over all rows of a large batch (in-batch negatives), exactly.

        Each part of `size` rows is a block, as with `split`, and runs forward twice: once without
        a graph to embed its rows, once to train. Both draw the same random numbers. The loss sees
        the embeddings of all rows of all ranks. With `steps=None` a batch is a window.

        >>> for batch in accum.batches(loader):
        ...     accum.contrastive(model, batch=batch, size=32, loss=clip_loss)

        Args:
            model: what embeds, as wrapped for the ranks, or several of them in a list.
            batch: as in `split`.
            size: rows of a part.
            loss: a mean over rows, as a function of what `embed` returns, for all rows. What else
                it has a gradient for, such as a temperature, is trained as well.
            embed: from a part to its embeddings, a tensor of rows or several. By default the
                model is called with the part (with its values, if it is a tuple or a dict).

        Returns:
            The loss, without a graph; `accum.last.loss` is the same for a window of one batch.

        Raises:
            ValueError: embeddings or a loss of another shape.
        """
        group = self.parts.group
        models = (model,) if isinstance(model, nn.Module) else tuple(model)
        return contrastive(self, group, models, batch, size, loss, embed)

    def flush(self) -> bool:
        """Close a started window now, reducing over the ranks; all of them have to call it.

        Returns whether there was one on any rank. If the loop takes the steps, it has to take
        one then.
        """
        return self.parts.flush()

    def discard(self) -> None:
        """Throw the open window away, torn or not: its micro-batches, its gradients.

        Under `weigh=`, which has counted the window as a whole, `batches` goes on with the next.
        A block that is still open ends here.
        """
        self.parts.discard()

    def close(self) -> None:
        """Throw an open window away and let go of all callbacks, hooks and observers."""
        self.parts.close()

    # -- who wants to know -----------------------------------------------------------------------

    def on_update(self, function: F) -> Handle[F]:
        """Let `function()` run after each real update, never after a skipped one.

        The gradients are still there. In a loop that takes the steps itself it runs when the
        closing block ends, so step inside of the block. May be used as a decorator; `remove()` of
        what it returns ends it.
        """
        return Handle(self.parts.after_update, function)

    def on_window(self, function: F) -> Handle[F]:
        """Let `function(result)` run after each closed window, a skipped one too.

        `result` is the window's `WindowResult`; reading it waits for the device once a window.
        """
        return Handle(self.parts.after_window, function)

    def on_block_start(self, function: F) -> Handle[F]:
        """Let `function()` run before each block."""
        return Handle(self.parts.before_block, function)

    def on_block_end(self, function: F) -> Handle[F]:
        """Let `function()` run after each block that has ended well, and what it closed."""
        return Handle(self.parts.after_block, function)

    def observe_pass(self, observer: PassObserver | None) -> None:
        """Let `observer` see each pass of `batches`: open it, stop it, count its items."""
        self._state.observer = observer

    # -- saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counters and the open window, as JSON scalars and 0-dim tensors.

        The running sum itself is in the gradients; a `Checkpointer` saves both.

        Raises:
            RuntimeError: inside of a block, in a torn window, or between the scaler's `unscale_`
                and update, where a save could not be resumed.
        """
        return self.parts.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave; an open window of this object is thrown away."""
        self.parts.load_state_dict(saved)
