"""What `plan` promises: steps that make up the batch, or an error that says which would."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumplug.analysis.plan import largest_micro_batch, plan, scale_learning_rate


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 16))
def test_steps_times_micro_batch_times_ranks_is_the_effective_batch(steps, micro, ranks):
    """plan inverts effective batch = micro-batch x steps x ranks."""
    assert plan(steps * micro * ranks, micro, ranks) == steps


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 16))
def test_every_size_named_in_an_error_divides(effective, micro, ranks):
    """Whatever an error offers can be passed back in, and gives the steps it was offered with."""
    try:
        plan(effective, micro, ranks)
    except ValueError as error:
        batches, micros = re.split(r"nearest effective batches: ", str(error))[1].split(";", 1)
        offered = re.findall(r"(\d+) \(steps (\d+)\)", batches)
        assert offered
        assert all(plan(int(b), micro, ranks) == int(s) for b, s in offered)
        offered = re.findall(r"(\d+) \(steps (\d+)\)", micros)
        assert bool(offered) == (effective % ranks == 0)
        assert all(plan(effective, int(m), ranks) == int(s) for m, s in offered)


def test_an_error_names_the_nearest_sizes_on_both_sides():
    """100 items in micro-batches of 8 on 2 ranks: 96 or 112 items, or micro-batches of 5 or 10."""
    with pytest.raises(
        ValueError, match=r"8 x 2 ranks = 16; .*: 96 \(steps 6\) or 112 \(steps 7\)"
    ):
        plan(100, 8, 2)
    with pytest.raises(ValueError, match=r"micro-batches: 5 \(steps 10\) or 10 \(steps 5\)"):
        plan(100, 8, 2)


def test_a_batch_that_the_ranks_do_not_divide_is_said_to_fit_no_micro_batch():
    """10 items on 3 ranks: no micro-batch can help."""
    with pytest.raises(ValueError, match="no micro-batch is possible: 3 ranks do not divide 10"):
        plan(10, 2, 3)


@pytest.mark.parametrize("name", ["effective_batch", "micro_batch", "world_size"])
def test_only_integers_of_at_least_one_are_accepted(name):
    """Another type is a TypeError, a number below 1 a ValueError; both name the argument."""
    sizes = {"effective_batch": 8, "micro_batch": 8, "world_size": 1}
    for bad in (2.5, True, "8", None, [8]):
        with pytest.raises(TypeError, match=f"^{name} must be an int, got {re.escape(repr(bad))}"):
            plan(**{**sizes, name: bad})
    for bad in (0, -8, 10**12 + 1, 10**30):
        with pytest.raises(
            ValueError, match=f"^{name} must be at least 1 and at most .*, got {bad}"
        ):
            plan(**{**sizes, name: bad})


def test_the_largest_sizes_are_answered_at_once():
    """The nearest divisors of 10^12 - 1, and of the prime below it."""
    for effective in (10**12 - 1, 999_999_999_989):
        with pytest.raises(ValueError, match="nearest micro-batches: "):
            plan(effective, 8)


def test_learning_rate_scales_by_the_factor_and_by_its_root():
    """4 times the batch: 4 times the rate (linear), twice the rate (square root)."""
    scaled = scale_learning_rate(1e-3, tuned_batch=64, effective_batch=256)
    assert scaled.factor == 4
    assert scaled.linear == pytest.approx(4e-3)
    assert scaled.square_root == pytest.approx(2e-3)
    assert scaled.adam_beta(0.999) == pytest.approx(0.996)
    assert scaled.adam_beta(0.5) == 0.0


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_a_learning_rate_that_is_none_is_refused(lr):
    """A rate has to be a finite number above 0."""
    with pytest.raises(ValueError, match="lr must be a number above 0"):
        scale_learning_rate(lr, tuned_batch=1, effective_batch=1)


@given(st.integers(1, 2000), st.integers(1, 4), st.integers(1, 600))
def test_the_largest_micro_batch_is_the_largest_divisor_that_fits(per_rank, ranks, limit):
    """Against trying every size, and no size beyond about twice what fits is ever tried."""
    tried = []

    def fits(size):
        tried.append(size)
        return size <= limit

    found = largest_micro_batch(fits, per_rank * ranks, ranks)
    assert found == max(s for s in range(1, min(per_rank, limit) + 1) if per_rank % s == 0)
    assert len(tried) == len(set(tried))
    too_large = [size for size in tried if size > limit]
    assert all(size <= limit for size in tried[: tried.index(too_large[0])]) if too_large else True


def test_ranks_take_the_smallest_answer_and_nothing_that_fits_is_an_error():
    """`agree` is handed this rank's size, 0 where not even one item fits."""
    handed = []
    assert largest_micro_batch(lambda n: n <= 8, 32, 2, agree=lambda n: handed.append(n) or 4) == 4
    assert handed == [8]
    with pytest.raises(ValueError, match="not even a micro-batch of 1 item fits"):
        largest_micro_batch(lambda n: False, 32, agree=lambda n: handed.append(n) or n)
    assert handed == [8, 0]
