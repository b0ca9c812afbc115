"""The arithmetic of a window, without torch: counts, sums of weights, factors."""

from __future__ import annotations

import math
from dataclasses import asdict
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumplug.core.window import Window, check_steps, check_weight

positive = st.floats(1e-6, 1e6, allow_nan=False)


def add(window, weight):
    """Count one micro-batch of `weight`."""
    window.index += 1
    window.add_weight(weight)


def run(window, weights, total=None, ranks=1):
    """What each micro-batch's loss is multiplied by in the end, by the calls of a real window."""
    factors = []
    for place, weight in enumerate(weights):
        scale = window.refer(weight)
        add(window, weight)
        last = place == len(weights) - 1
        if last:
            scale *= window.settle(window.total if total is None else total, ranks)
        factors = [scale * f for f in factors]
        factors.append(1.0 / window.divisor(weight))
    return factors


@given(st.lists(positive, min_size=1, max_size=12), st.integers(0, 5))
def test_each_loss_counts_by_its_share_of_the_weight(weights, missing):
    """w / sum(w) for each micro-batch, in a full window or a tail that lacks some."""
    factors = run(Window(len(weights) + missing), weights)
    total = sum(map(Fraction, weights))
    for factor, weight in zip(factors, weights, strict=True):
        assert factor == pytest.approx(float(Fraction(weight) / total), rel=1e-14)


@given(st.lists(positive, min_size=1, max_size=6), st.integers(1, 8), positive)
def test_over_ranks_each_loss_counts_by_ranks_times_its_share(weights, ranks, elsewhere):
    """What DDP averages over W ranks has to be W * w / total."""
    total = sum(weights) + elsewhere * (ranks > 1)
    factors = run(Window(len(weights)), weights, total, ranks)
    for factor, weight in zip(factors, weights, strict=True):
        assert factor == pytest.approx(ranks * weight / total, rel=1e-14)


@pytest.mark.parametrize("weight", [1.0, 0.1, 3.0, 7.0, 1e-3, 1 / 3, 5000.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7, 10, 16, 49, 100])
def test_a_full_window_of_equal_weights_divides_by_steps_and_rescales_nothing(steps, weight):
    """Not nearly 1 and nearly steps: exactly, or the bits of the textbook loop are lost."""
    window = Window(steps)
    for _ in range(steps):
        assert window.refer(weight) == 1.0
        add(window, weight)
    assert window.settle(window.total, 1) == 1.0
    assert window.divisor(weight) == steps


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
@pytest.mark.parametrize("weight", [1.0, 0.1, 3.0, 7.0])
def test_equal_weights_on_several_ranks_rescale_nothing(ranks, weight):
    """The sum over ranks may be off in its last bit; the factor is 1 all the same."""
    window = Window(5)
    for _ in range(5):
        window.refer(weight)
        add(window, weight)
    total = 0.0
    for _ in range(ranks):
        total += window.total
    assert window.settle(total, ranks) == 1.0


@pytest.mark.parametrize("count", [10, 1000])
@pytest.mark.parametrize("weight", [0.1, 1 / 3, 7.3])
def test_equal_weights_sum_to_exactly_their_multiple(weight, count):
    """Ten times 0.1 by plain additions is 0.9999999999999999; the true sum rounds to 1.0."""
    window = Window(count)
    for _ in range(count):
        add(window, weight)
    assert window.total == float(count * Fraction(weight))


@given(st.lists(st.floats(0, 1e12, allow_nan=False), max_size=30))
def test_the_sum_of_weights_is_the_rounded_true_sum(weights):
    """math.fsum is correctly rounded; a compensated sum is within an ulp of it."""
    window = Window(1)
    for weight in weights:
        add(window, weight)
    assert window.total == pytest.approx(math.fsum(weights), rel=3e-16)
    assert window.index == len(weights)


@given(st.lists(positive, min_size=1, max_size=12))
def test_the_running_sum_only_moves_by_powers_of_two_before_the_end(weights):
    """A power of two changes no bit of a mantissa."""
    window = Window(len(weights))
    for weight in weights:
        mantissa, _ = math.frexp(window.refer(weight))
        assert mantissa == 0.5
        add(window, weight)


@given(st.lists(positive, min_size=1, max_size=12))
def test_what_is_back_propagated_has_the_magnitude_of_the_mean_loss(weights):
    """Before the close no loss is multiplied by more than 2 / steps, whatever the weights."""
    window = Window(len(weights))
    for weight in weights:
        window.refer(weight)
        assert 1.0 / window.divisor(weight) <= 2.0 / len(weights) * (1 + 1e-15)
        add(window, weight)


def test_the_reference_is_the_first_weight_that_is_not_zero():
    """Zero stands for nothing, so it can't stand for one."""
    window = Window(4)
    window.refer(0.0)
    assert window.reference is None
    window.refer(5.0)
    assert window.reference == 5.0
    window.refer(0.0)
    assert window.reference == 5.0


def test_a_window_that_had_no_weight_here_leaves_the_sum_alone():
    """A rank of several may have nothing; the others' total is not 0."""
    window = Window(4)
    assert window.settle(10.0, 2) == 1.0


def test_the_state_is_plain_numbers():
    """It is saved as JSON in the middle of a window."""
    window = Window(4)
    window.refer(3.0)
    add(window, 3.0)
    state = asdict(window)
    assert state["steps"] == 4
    assert state["index"] == 1
    assert Window(**state) == window
    assert all(v is None or isinstance(v, int | float) for v in state.values())


@pytest.mark.parametrize("steps", [0, -1, 2.0, "4", None, True])
def test_steps_that_count_nothing_are_refused(steps):
    """A window has at least one micro-batch, and a whole number of them."""
    with pytest.raises(ValueError, match=r"an int of at least 1; got"):
        check_steps(steps)


@pytest.mark.parametrize("weight", [-1, -0.5, float("nan"), float("inf")])
def test_weights_that_are_no_number_of_items_are_refused(weight):
    """A loss is a mean over a finite number of items, never fewer than none."""
    with pytest.raises(ValueError, match=r"finite and at least 0; got"):
        check_weight(weight)


@pytest.mark.parametrize("weight", [None, "3", [1, 2], (1,)])
def test_weights_of_another_kind_are_refused(weight):
    """The message says what was given and how to count."""
    with pytest.raises(ValueError, match=r"Count the items first: weight=mask.sum\(\)"):
        check_weight(weight)
