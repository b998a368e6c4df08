"""Logs samples of a step in full: chooses them and makes their records (`telemetry/trajectories/files.py`)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megappo.data.prompts import Prompt
from megappo.data.token_texts import response_text, special_ids, token_texts
from megappo.data.tokenizers import Tokenizer
from megappo.parallel.consensus import gathered_at
from megappo.parallel.totals import place_in_world
from megappo.telemetry.trajectories.files import FORMAT, TOKEN_FIELDS, rounded
from megappo.trainer.report import StepRecord


def draw_samples(num_samples: int, samples_per_prompt: int, count: int, run_seed: int, step: int) -> list[int]:
    """Return ascending indices of min(count, num_samples) samples of a step, the same in every layout and after a resume.
    Prompts are drawn with all their adjacent samples, whose differences PPO learns from; the last prompt may be cut by `count`."""
    order = list(range(num_samples // samples_per_prompt))
    # Seeded by the whole text; random.Random keeps its sequence across Python versions.
    random.Random(f"trajectories {run_seed} {step}").shuffle(order)
    drawn = [prompt * samples_per_prompt + sample for prompt in order for sample in range(samples_per_prompt)]
    return sorted(drawn[:count])


def trajectories_of(
    record: StepRecord, prompt_of: Callable[[int], Prompt], drawn: Sequence[int], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return the records of the drawn samples by number on rank 0, nothing elsewhere. Collective over the world.
    prompt_of: sample number -> prompt."""
    places = {number: place for place, number in enumerate(record.experience.numbers.tolist())}
    rows = [_row(record, prompt_of(number), number, places[number], tokenizer) for number in drawn if number in places]
    if place_in_world()[1] == 1:
        return rows
    return sorted((row for theirs in gathered_at(0, rows) for row in theirs), key=lambda row: row["sample"])


def _row(record: StepRecord, prompt: Prompt, number: int, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the record of a sample. index: its position in this rank's batch."""
    batch = record.batch
    begin, end = batch.cu_seqlens[index].item(), batch.cu_seqlens[index + 1].item()
    tokens, mask = batch.tokens[begin:end].tolist(), batch["response_mask"][begin:end]
    table = record.experience.table
    start, goes_on = int(table.prompt[number] - table.earlier[number]), bool(table.unfinished[number])
    texts = token_texts(tokens, tokenizer)
    return {
        "format": FORMAT,
        "sample": number,
        "id": prompt.id,
        "prompt": prompt.text,
        "response": response_text(tokens[start:], tokenizer) if goes_on else record.scored.texts[index],
        "answer": prompt.answer,
        "score": record.scored.total[index],
        # NaN: another recipe's part, or a response that goes on
        "parts": {name: values[index] for name, values in record.scored.parts.items() if not math.isnan(values[index])},
        "recipe": record.scored.labels[index] if record.scored.labels else "",
        "finish": "window" if goes_on else "length" if batch["truncated"][index] else "stop",
        "version": int(table.oldest[number]),
        "kl_coef": record.kl_coef,
        "prompt_tokens": tokens[:start],
        "prompt_texts": texts[:start],
        "response_tokens": tokens[start:],
        "response_texts": texts[start:],
        "special_tokens": special_ids(tokens, tokenizer),
        "response_mask": mask[start:].int().tolist(),
        **{
            name: rounded(torch.where(mask, batch[name][begin:end], torch.nan)[start:].tolist())
            for name in TOKEN_FIELDS
            if name in batch
        },
    }
