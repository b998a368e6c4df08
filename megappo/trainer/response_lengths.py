"""Lengths of the responses to every prompt so far, from which those to come are predicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megappo.experience.table import SampleTable


class ResponseLengths:
    """Mean tokens of the last responses to each prompt, by its row in the data; equal on all ranks, as the table is.

    Not part of a checkpoint: it decides who draws a response and when, and nothing of it. A resumed run learns it anew.
    """

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}

    def observe(self, rows: Sequence[int], table: SampleTable) -> None:
        """Note a round's responses; samples of group i answer the prompt of `rows[i]`."""
        of_prompt = table.group >= 0
        group, tokens = table.group[of_prompt].long(), table.response[of_prompt].double()
        count = torch.bincount(group, minlength=len(rows))
        mean = torch.bincount(group, tokens, minlength=len(rows)) / count
        self._mean.update((row, length) for row, length, n in zip(rows, mean.tolist(), count.tolist()) if n)

    def predict(self, rows: Sequence[int], samples_per_prompt: int) -> list[float] | None:
        """Lengths [rows * samples_per_prompt] of the responses to these prompts; None before any of them was seen.

        A prompt that was not seen counts with the mean of those of its round that were.
        """
        seen = [self._mean[row] for row in rows if row in self._mean]
        if not seen:
            return None
        usual = sum(seen) / len(seen)
        return [self._mean.get(row, usual) for row in rows for _ in range(samples_per_prompt)]
