"""Lengths of the responses to every prompt so far, from which those to come are predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megappo.trainer.experience.table import SampleTable

MOST_PROMPTS = 1 << 18  # 2 MiB a rank; data with more prompts are hardly visited twice


class ResponseLengths:
    """Mean tokens of the last responses to each prompt, by its row in the data; equal on all ranks, as the table is.

    Not part of a checkpoint: it decides who draws a response and when, and nothing of it. A resumed run learns it anew. Memory of a
    rank does not grow with the data: of more than MOST_PROMPTS prompts some of those seen last are known.
    """

    def __init__(self, num_prompts: int) -> None:
        self._size = min(num_prompts, MOST_PROMPTS)
        # A prompt has one place, which it shares with others of large data: the last one seen is there.
        self._prompt = numpy.zeros(self._size, numpy.int32)  # its row + 1
        self._mean = numpy.zeros(self._size, numpy.float32)

    def observe(self, rows: Sequence[int], table: SampleTable) -> None:
        """Note a round's responses; samples of group i answer the prompt of `rows[i]`."""
        of_prompt = table.group >= 0
        group, tokens = table.group[of_prompt].long(), table.response[of_prompt].double()
        count = torch.bincount(group, minlength=len(rows))
        mean = torch.bincount(group, tokens, minlength=len(rows)) / count
        answered = (count > 0).numpy()
        seen = numpy.asarray(rows)[answered]
        self._prompt[seen % self._size] = seen + 1
        self._mean[seen % self._size] = mean.numpy()[answered]

    def predict(self, rows: Sequence[int], samples_per_prompt: int) -> list[float] | None:
        """Lengths [rows * samples_per_prompt] of the responses to these prompts; None before any of them was seen.

        A prompt that was not seen counts with the mean of those of its round that were.
        """
        asked = numpy.asarray(rows)
        mean, seen = self._mean[asked % self._size], self._prompt[asked % self._size] == asked + 1
        if not seen.any():
            return None
        return numpy.where(seen, mean, mean[seen].mean()).repeat(samples_per_prompt).tolist()
