"""Interval between checkpoints after which saving and repeating lost work together cost least (Young 1974, Daly 2006).

A save that holds training for C seconds, every T seconds, costs the share C/T; a failure costs half an interval of work, the share
T/2M at one failure in M seconds. Their sum is least at T = sqrt(2 C M). Imports no torch.
"""

from __future__ import annotations

from math import sqrt

LONGEST_S = 1800.0
"""Most work that a failure may cost. At C = 60 s and M = 20 h the optimum is 49 min and costs 4.1 %, half an hour costs 4.6 %."""
SOFTWARE_HOURS = 24.0
"""Hours between faults that do not depend on a job's size: hangs, exhausted memory, a full disk, a preempted node."""
HARDWARE_GPU_HOURS = 64 * 5 * 24
"""GPU-hours between hardware faults, the low end of what is published: a job of 64 GPUs meets one every 5 to 33 days."""


def expected_mtbf_hours(num_ranks: int) -> float:
    """Mean time between failures, in hours, that the number of ranks of a job lets expect."""
    return 1 / (1 / SOFTWARE_HOURS + num_ranks / HARDWARE_GPU_HOURS)


def best_interval_s(save_s: float, mtbf_hours: float) -> float:
    """Seconds between checkpoints. save_s: seconds that a save holds training."""
    mtbf_s = 3600 * mtbf_hours
    # Beyond M/2 the formula's assumptions end; Daly then takes the time between failures itself.
    return min(sqrt(2 * save_s * mtbf_s), mtbf_s, LONGEST_S)
