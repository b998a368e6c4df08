"""Work beside the training that may fail: logs, curves, sample trajectories, the console. A full disk, dead writer or closed
console costs records, not the run: the first loss of a kind is a warning with its reason, every loss is counted, and the next
record is tried."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)


class SideWork:
    """Runs actions of named kinds (`metrics.jsonl`, `console`). lost: kind -> actions that failed."""

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()

    def run(self, kind: str, action: Callable[[], object]) -> bool:
        """Run the action; True if it succeeded. An exception is counted, and logged if it is the first of its kind."""
        try:
            action()
        # Any exception: libraries raise what they like for a full disk (TensorBoard passes on its thread's), and training is worth
        # more than any record of it.
        except Exception as error:
            self.lose(kind, error)
            return False
        return True

    def lose(self, kind: str, error: Exception) -> None:
        """Count a lost record; log it if it is the first of its kind."""
        self.lost[kind] += 1
        if self.lost[kind] == 1:
            # A disk fault is one line; any other may be megappo's own mistake, and its traceback is needed.
            expected = isinstance(error, (OSError, ValueError))
            logger.warning(
                "%s: a record is lost (%s); training goes on, and telemetry/lost_records counts them (said once)",
                kind,
                _reason(error),
                exc_info=None if expected else error,
            )

    @property
    def num_lost(self) -> int:
        return sum(self.lost.values())

    def summary(self) -> str:
        """Return `3 records were lost: 2 of metrics.jsonl, 1 of console`; empty if none was."""
        if not self.lost:
            return ""
        return f"{self.num_lost} records were lost: {', '.join(f'{count} of {kind}' for kind, count in self.lost.items())}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
