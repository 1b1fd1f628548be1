"""benchmarks.clock: how many steps a setting may take."""

import pytest

from benchmarks.clock import affordable


@pytest.mark.parametrize("milliseconds", [0.0, 1.0, 99.0, 101.0, 340.0, 600.0, 999.0])
@pytest.mark.parametrize("warm_up", [0, 2])
def test_steps_stay_within_the_seconds_and_one_is_timed(milliseconds, warm_up):
    compiling, warming, timed = affordable(1.0, milliseconds, warm_up, 5)
    assert (compiling + warming + timed) * milliseconds <= 1000 and 1 <= timed <= 5
    full = (3 if warm_up else 0, warm_up, 5)
    assert ((compiling, warming, timed) == full) == (sum(full) * milliseconds <= 1000)


def test_a_step_that_is_too_long_is_left_out_and_without_a_limit_none_is():
    assert affordable(1.0, 1001.0, 2, 5) is None
    assert affordable(float("inf"), 1e9, 2, 5) == (3, 2, 5)
