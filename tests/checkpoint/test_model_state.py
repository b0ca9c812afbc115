"""What a forward changes and no state_dict shows is saved inside of a window as well."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accumplug import Accumulator, Checkpointer
from accumplug.checkpoint import model_state
from accumplug.storage.layout import list_checkpoints, open_checkpoint


class Experts(nn.Module):
    """Counts which expert is used, as load balancing does, and biases the choice at an update."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)
        self.register_buffer("counts", torch.zeros(4), persistent=False)
        self.register_buffer("seen", None, persistent=False)
        self.register_buffer("bias", torch.zeros(4))
        self.history = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.bias
        self.counts += nn.functional.one_hot(output.argmax(1), 4).sum(0)  # type: ignore[operator]
        self.seen = x.detach().clone() if self.seen is None else torch.cat([self.seen, x])
        self.history.append(output.abs().max().item())
        return output

    def get_extra_state(self) -> Any:
        return {"pickled": pickle.dumps(self.history), "plain": [tuple(self.history), None]}

    def set_extra_state(self, state: Any) -> None:
        assert state["plain"][0] == tuple(pickle.loads(state["pickled"]))
        self.history = list(state["plain"][0])


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Experts(), nn.Linear(4, 1))
        self.experts: Any = self.model[0]
        self.accum = Accumulator(3, optimizer=torch.optim.SGD(self.model.parameters(), 0.1))
        self.accum.on_update(self.balance)

    def balance(self) -> None:
        self.experts.bias += 0.05 * (self.experts.counts.argmin() == torch.arange(4))
        self.experts.counts.zero_()

    def train(self, until: int) -> None:
        while self.accum.micro_batches < until:
            generator = torch.Generator().manual_seed(self.accum.micro_batches)
            x = torch.randn(3, 2, generator=generator)
            with self.accum(self.model):
                self.accum.backward(self.model(x).square().mean())

    def state(self) -> list[Any]:
        experts = self.experts
        return [experts.counts, experts.bias, experts.seen, torch.tensor(experts.history)]


@pytest.mark.parametrize("until", range(1, 8))
def test_buffers_in_no_state_dict_and_extra_states_go_on_at_any_micro_batch(
    until: int, tmp_path: Path
) -> None:
    """Expert counts, a buffer that was None and grows, the history of an fp8 scale (bytes)."""
    quiet, saved, resumed = Run(), Run(), Run()
    quiet.train(9)
    with Checkpointer(tmp_path, saved.accum, model=saved.model, every=1) as checkpoint:
        saved.train(until)
    with Checkpointer(tmp_path, resumed.accum, model=resumed.model) as checkpoint:
        assert checkpoint.resume() is not None
        resumed.train(9)
    for one, other in zip(quiet.state(), resumed.state(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(quiet.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_large_table_is_saved_once_it_was_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A causal mask is the same for whoever builds the model, and need not be in each save."""
    monkeypatch.setattr(model_state, "LARGE", 64)
    run = Run()
    run.experts.register_buffer("mask", torch.arange(64.0), persistent=False)

    def size() -> int:
        run.train(run.accum.micro_batches + 1)
        path = list_checkpoints(tmp_path)[-1]
        return open_checkpoint(path).manifest.files["rank-0.safetensors"].size

    with Checkpointer(tmp_path, run.accum, model=run.model, every=1, background=False):
        before = size()
        run.experts.mask[3] = 7
        assert size() >= before + 64 * 4
    again = Run()
    again.experts.register_buffer("mask", torch.ones(64), persistent=False)
    with Checkpointer(tmp_path, again.accum, model=again.model) as checkpoint:
        checkpoint.resume()
    assert torch.equal(again.experts.mask, run.experts.mask)


def test_an_extra_state_that_can_not_be_held_is_named(tmp_path: Path) -> None:
    """With the module and what it is, and nothing is pickled."""

    class Strange(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": object()}

    model = nn.Sequential(Strange(1, 1))
    accum = Accumulator(2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    checkpoint = Checkpointer(tmp_path, accum, model=model)
    with pytest.raises(TypeError, match=r"scale is a builtins\.object"):
        checkpoint.save()
    checkpoint.close()
