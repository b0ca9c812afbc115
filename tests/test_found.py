"""What attacks on the loop have found."""

from __future__ import annotations

from typing import Any

import pytest

from accumplug import Accumulator


@pytest.mark.parametrize("empty", [[], ()])
def test_no_optimizer_among_those_given_is_refused(empty: Any) -> None:
    """Else nobody would step: the loop trusts accum, and accum leaves it to the loop."""
    with pytest.raises(ValueError, match="optimizer= is empty"):
        Accumulator(steps=2, optimizer=empty)
