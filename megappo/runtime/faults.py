"""Faults of a run that come back when it is started again. Imports no torch."""

from __future__ import annotations


class Unrecoverable(RuntimeError):
    """A fault that the same start would meet again: weights or gradients that are not finite, replicas that differ.

    The command ends with exit code 17. A launcher or a job script that reads 17 neither restarts nor requeues the run: a person has
    to look at the cause first.
    """


class ReplicaDrift(Unrecoverable):
    """Ranks that must hold the same weights hold different ones; the message names role, parameter and ranks."""
