"""Checkpoints that a resume passes over: those from which three attempts failed (`commands/launch/restart.py`). Imports no
torch."""

from __future__ import annotations

import os

# Steps, separated by commas, from the launcher or the job script to the ranks; not for users, hence no option.
SKIP_STEPS = "MEGAPPO_SKIP_STEPS"


def steps_to_skip() -> frozenset[int]:
    """Steps that this attempt must not resume from."""
    return frozenset(int(step) for step in os.environ.get(SKIP_STEPS, "").split(",") if step)
