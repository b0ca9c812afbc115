"""Random states of devices go to the device that the process uses, whatever its index."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accumplug.dataloading import rng


class Devices:
    """Stands for torch.cuda with some devices, of which the process uses `index`."""

    def __init__(self, count: int, index: int) -> None:
        self.states = [torch.full((4,), 10 * index + i) for i in range(count)]
        self.index = index

    def current_device(self) -> int:
        return self.index

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()


@pytest.mark.parametrize(
    ("saved", "here"),
    [((2, 0), (2, 1)), ((2, 1), (2, 0)), ((1, 0), (4, 3)), ((4, 3), (1, 0)), ((2, 1), (2, 1))],
)
def test_the_state_of_the_processs_own_device_goes_on_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch, saved: tuple[int, int], here: tuple[int, int]
) -> None:
    """A job is scheduled onto another GPU: dropout goes on from the same numbers."""
    before, after = Devices(*saved), Devices(*here)
    monkeypatch.setattr(rng, "_device_module", lambda: before)
    states = rng.capture()
    monkeypatch.setattr(rng, "_device_module", lambda: after)
    rng.restore(states)
    assert torch.equal(after.states[here[1]], before.states[saved[1]])
    if saved[0] == here[0]:
        assert sorted(s[0].item() for s in after.states) == sorted(
            s[0].item() for s in before.states
        )


def test_states_that_an_earlier_version_saved_go_to_the_same_indices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did not say which one was the process's own."""
    before, after = Devices(2, 0), Devices(2, 1)
    monkeypatch.setattr(rng, "_device_module", lambda: before)
    states: dict[str, Any] = rng.capture()
    del states["device"]
    monkeypatch.setattr(rng, "_device_module", lambda: after)
    rng.restore(states)
    assert all(map(torch.equal, after.states, before.states))
