"""What the schedule promises: factors of two, bounds, patience, and a save that goes on."""

import json

import pytest

from accumplug.noise.scale import NoiseScale
from accumplug.noise.schedule import NoiseSchedule


def noise_of(scale, window):
    """A noise scale that is known exactly: |G|^2 = 1, trace = scale, and windows of one size."""
    noise = NoiseScale()
    for _ in range(3):
        noise.update(1 + scale, 1 + scale / window, 1, window)
    return noise


def test_the_schedule_waits_until_something_is_known():
    """Without a window it stays where it started."""
    schedule = NoiseSchedule(NoiseScale(), start=2, most=64, patience=1)
    assert [schedule(n) for n in (0, 1, 50)] == [2, 2, 2]


def test_the_schedule_doubles_within_its_bound_and_rests_between():
    """A noise scale far above the window: 2, 4, 8, then 12 stops it; 10 updates between."""
    schedule = NoiseSchedule(noise_of(1000, 8), start=2, most=12, patience=10)
    asked = (0, 9, 10, 11, 19, 20, 21, 30, 90)
    assert [schedule(n) for n in asked] == [2, 2, 4, 4, 4, 8, 8, 8, 8]


def test_the_schedule_halves_where_a_window_is_wasteful():
    """A noise scale far below the window: down to `least`, and a copy goes on from there."""
    noise = noise_of(1, 64)
    schedule = NoiseSchedule(noise, start=16, least=4, most=64, patience=5)
    assert [schedule(n) for n in (4, 5, 6, 10, 20)] == [16, 8, 8, 4, 4]
    copy = NoiseSchedule(noise, start=16, least=4, most=64, patience=5)
    copy.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert copy.state_dict() == schedule.state_dict() == {"steps": 4, "changed": 10}


@pytest.mark.parametrize("scale", [33, 64, 127])
def test_a_window_within_a_factor_of_two_is_left_alone(scale):
    """No change where the batch is near the noise scale, so steps do not flutter."""
    schedule = NoiseSchedule(noise_of(scale, 64), start=8, most=64, patience=1)
    assert [schedule(n) for n in range(1, 20)] == [8] * 19


def test_bounds_of_the_schedule_are_checked():
    """Numbers that contradict each other are refused, with the numbers."""
    with pytest.raises(ValueError, match="least=2, start=1, most=8"):
        NoiseSchedule(NoiseScale(), start=1, most=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": 4}, "noise must be a NoiseScale, got 4"),
        ({"start": 2.0}, "must be of type int, got 2.0, 2, 8, 50"),
        ({"most": "8"}, "must be of type int, got 2, 2, '8', 50"),
        ({"patience": None}, "must be of type int, got 2, 2, 8, None"),
        ({"least": True}, "must be of type int, got 2, True, 8, 50"),
    ],
)
def test_wrong_types_are_type_errors(change, message):
    """Each shows what came."""
    with pytest.raises(TypeError, match=message):
        NoiseSchedule(**{"noise": NoiseScale(), "start": 2, "most": 8, **change})
