"""Lengths of the responses to every prompt so far, from which those to come are predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megappo.experience.table import SampleTable


class ResponseLengths:
    """Mean tokens of the last responses to each prompt, by its row in the data; equal on all ranks, as the table is.

    Not part of a checkpoint: it decides who draws a response and when, and nothing of it. A resumed run learns it anew. 4 bytes for
    each prompt of the data.
    """

    def __init__(self, num_prompts: int) -> None:
        self._mean = numpy.full(num_prompts, numpy.nan, numpy.float32)  # NaN: not seen

    def observe(self, rows: Sequence[int], table: SampleTable) -> None:
        """Note a round's responses; samples of group i answer the prompt of `rows[i]`."""
        of_prompt = table.group >= 0
        group, tokens = table.group[of_prompt].long(), table.response[of_prompt].double()
        count = torch.bincount(group, minlength=len(rows))
        mean = torch.bincount(group, tokens, minlength=len(rows)) / count
        answered = (count > 0).numpy()
        self._mean[numpy.asarray(rows)[answered]] = mean.numpy()[answered]

    def predict(self, rows: Sequence[int], samples_per_prompt: int) -> list[float] | None:
        """Lengths [rows * samples_per_prompt] of the responses to these prompts; None before any of them was seen.

        A prompt that was not seen counts with the mean of those of its round that were.
        """
        mean = self._mean[numpy.asarray(rows)]
        seen = ~numpy.isnan(mean)
        if not seen.any():
            return None
        return numpy.where(seen, mean, mean[seen].mean()).repeat(samples_per_prompt).tolist()
