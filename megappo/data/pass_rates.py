"""Pass rates of prompts as a run has seen them, and the chance that they give a prompt to be visited."""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

KIND = "<i4"  # of the counts in a checkpoint


class PassRates:
    """Responses and passes of N prompts so far. A response passes if its score is at least pass_score.

    A prompt of pass rate p is visited with chance max(min_chance, 4 p (1 - p)), one that was never seen always. min_chance: in
    (0, 1], so that a visit comes after 1 / min_chance prompts in the mean. skipped: prompts passed over so far.
    """

    def __init__(self, num_prompts: int, pass_score: float, min_chance: float, seed: int) -> None:
        self.pass_score, self.min_chance, self._seed = pass_score, min_chance, seed
        self.responses = numpy.zeros(num_prompts, numpy.int32)
        self.passes = numpy.zeros(num_prompts, numpy.int32)
        self.skipped = 0

    @property
    def num_seen(self) -> int:
        """Prompts with a response."""
        return int((self.responses > 0).sum())

    def observe(self, rows: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        """Count the scores of the responses to these prompts; a prompt may be there several times."""
        for row, found in zip(rows, scores, strict=True):
            self.responses[row] += len(found)
            self.passes[row] += sum(score >= self.pass_score for score in found)

    def chance(self, row: int) -> float:
        """Chance of a prompt to be visited at its turn."""
        if not self.responses[row]:
            return 1.0
        rate = float(self.passes[row]) / float(self.responses[row])
        return max(self.min_chance, 4.0 * rate * (1.0 - rate))

    def takes(self, row: int, epoch: int, index: int) -> bool:
        """Decide whether a prompt is visited at this place of the epoch; a prompt that is not is counted. Seeded by the place."""
        taken = random.Random(f"curriculum {self._seed} {epoch} {index}").random() < self.chance(row)
        self.skipped += not taken
        return taken

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible: the counts as compressed bytes, which are small where few prompts were seen."""
        counts = numpy.stack([self.responses, self.passes]).astype(KIND).tobytes()
        return {"skipped": self.skipped, "counts": base64.b64encode(zlib.compress(counts, 1)).decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of as many prompts."""
        counts = numpy.frombuffer(zlib.decompress(base64.b64decode(state["counts"])), KIND).reshape(2, len(self.responses))
        self.responses, self.passes = (row.astype(numpy.int32) for row in counts)
        self.skipped = state["skipped"]
