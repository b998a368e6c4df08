"""Checkpoint interval at which saving and repeating lost work together cost least (Young 1974, Daly 2006). Imports no torch. Saves
that hold training C seconds cost the share C/T; a failure every M seconds costs T/2M. The sum is least at T = sqrt(2 C M)."""

from __future__ import annotations

from math import sqrt

LONGEST_S = 1800.0
"""Most seconds of work that a failure may cost. At C = 60 s, M = 20 h the optimum, 49 min, costs 4.1 %, half an hour 4.6 %."""
SOFTWARE_HOURS = 24.0
"""Hours between faults that do not depend on a job's size: hangs, exhausted memory, a full disk, a preempted node."""
HARDWARE_GPU_HOURS = 64 * 5 * 24
"""GPU-hours between hardware faults, the low end of what is published: a job of 64 GPUs meets one every 5 to 33 days."""


def expected_mtbf_hours(num_ranks: int) -> float:
    """Return the expected mean time between failures of a job, in hours."""
    return 1 / (1 / SOFTWARE_HOURS + num_ranks / HARDWARE_GPU_HOURS)


def best_interval_s(save_s: float, mtbf_hours: float) -> float:
    """Return the seconds between checkpoints. save_s: seconds that a save holds training."""
    mtbf_s = 3600 * mtbf_hours
    # Beyond M/2 the formula's assumptions fail; Daly then uses M itself.
    return min(sqrt(2 * save_s * mtbf_s), mtbf_s, LONGEST_S)
