"""Weights of prompts from a field of their records."""

from __future__ import annotations

import math
from array import array

import numpy

from megappo.data.cache import Cache
from megappo.data.prompts import Prompt, PromptSet, record_field
from megappo.data.token_rows import write_rows


def weights_of(prompts: PromptSet, key: str, cache: Cache) -> numpy.ndarray:
    """[N] fp64 weights in the field `key` of the prompts' records; read once for each file, choice of prompts and key.

    ValueError, one line: a record without the field, a weight that is no number of 0 or more, or nothing but zeros.
    """

    def read() -> array:
        weights = array("d", (_weight(prompt, key) for prompt in prompts.prompts))
        if not any(weights):
            raise ValueError(f"data.weight_key={key}: all {len(weights):,} prompts have weight 0, so none would be drawn")
        return weights

    if not prompts.fingerprint:
        return numpy.array(read())
    entry = {"weights": key, "prompts": prompts.fingerprint}
    # Rows are of 32-bit integers: a weight is two of them.
    rows = cache.rows(entry, lambda folder: write_rows(folder, [array("i", read().tobytes())]))
    return rows.read_array(0).view(numpy.float64)


def _weight(prompt: Prompt, key: str) -> float:
    value = record_field(prompt.record, key, "data.weight_key", prompt.place)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"data.weight_key={key}: {prompt.place} holds {value!r:.80}, not a finite number of 0 or more")
    return float(value)
