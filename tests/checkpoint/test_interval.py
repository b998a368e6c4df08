"""Young/Daly: the interval costs least, and the expected time between failures shrinks with the job."""

import pytest

from megappo.checkpoint.interval import LONGEST_S, best_interval_s, expected_mtbf_hours


def cost(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Share of the time lost to saves and to repeated work."""
    return save_s / interval_s + interval_s / (2 * mtbf_s)


@pytest.mark.parametrize("save_s, mtbf_hours", [(0.1, 24.0), (1.0, 24.0), (2.0, 1 / 12), (20.0, 20.0)])
def test_other_intervals_cost_more(save_s: float, mtbf_hours: float) -> None:
    best = best_interval_s(save_s, mtbf_hours)
    assert best < LONGEST_S
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert cost(best, save_s, 3600 * mtbf_hours) < cost(factor * best, save_s, 3600 * mtbf_hours)


def test_work_at_risk_is_bounded() -> None:
    assert best_interval_s(60.0, 20.0) == LONGEST_S
    # what the bound's comment says
    assert cost(49 * 60, 60.0, 20 * 3600) == pytest.approx(0.041, abs=5e-4)
    assert cost(LONGEST_S, 60.0, 20 * 3600) == pytest.approx(0.046, abs=5e-4)


def test_a_save_longer_than_the_time_between_failures_is_not_waited_for_longer() -> None:
    assert best_interval_s(400.0, 0.1) == 360.0


def test_one_that_is_given_counts_and_large_jobs_fail_more_often() -> None:
    assert expected_mtbf_hours(1) == pytest.approx(24, rel=0.01)
    assert expected_mtbf_hours(64) == pytest.approx(20)
    assert expected_mtbf_hours(1024) == pytest.approx(5.7, rel=0.01)
