"""Which samples of a step are written, and what their records hold."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.data.tokenizers import load_tokenizer
from megappo.rewards.compose import Scored
from megappo.telemetry.jsonl import dump_line
from megappo.telemetry.trajectories.files import FORMAT, TOKEN_FIELDS
from megappo.trainer.extras import draw_samples, trajectories_of
from tests.data.tokenizer_files import write_hf_tokenizer
from tests.trainer.experiences import dealt
from tests.trainer.test_step_record import PROMPTS, changed, record


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_hf_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_whole_prompts_are_drawn_by_seed_and_step():
    first = draw_samples(64, 4, 8, run_seed=1, step=10)
    assert first == sorted(first) and len(set(first)) == 8
    assert Counter(index // 4 for index in first).most_common() == [(first[0] // 4, 4), (first[4] // 4, 4)]
    assert first == draw_samples(64, 4, 8, run_seed=1, step=10), "a resumed run draws the same"
    others = [draw_samples(64, 4, 8, run_seed=1, step=step) for step in range(11, 20)]
    assert first not in others and len({tuple(one) for one in others}) > 5
    assert draw_samples(64, 4, 8, run_seed=2, step=10) != first


def test_the_draw_is_even_over_the_prompts_of_a_step():
    counts = Counter(index // 2 for step in range(1, 2001) for index in draw_samples(20, 2, 4, 7, step))
    # 400 expected for each of ten prompts, twice for its samples; the standard deviation is 2 sqrt(2000 * 0.2 * 0.8) = 36
    assert set(counts) == set(range(10)) and all(abs(count - 800) < 5 * 36 for count in counts.values())


@pytest.mark.parametrize("num_samples, per_prompt, count, want", [(8, 4, 12, 8), (8, 4, 6, 6), (8, 4, 2, 2), (3, 1, 2, 2)])
def test_counts_that_do_not_fit_the_prompts(num_samples, per_prompt, count, want):
    drawn = draw_samples(num_samples, per_prompt, count, 0, 1)
    assert len(drawn) == want and set(drawn) <= set(range(num_samples))


def test_records_hold_the_sampled_tokens_and_their_numbers(tokenizer):
    first, second = trajectories_of(record(), PROMPTS.__getitem__, [0, 1], tokenizer)
    assert (first["format"], first["sample"], first["id"], first["response"], first["score"]) == (FORMAT, 0, "f#0", "r0", 1.0)
    assert (first["version"], first["kl_coef"], first["finish"], second["finish"]) == (2, 0.02, "stop", "length")
    assert (second["prompt_tokens"], second["response_tokens"]) == ([4], [5, 6, 7])
    assert second["value"] == [0.3, 0.4, 0.5] and second["parts"] == {"exact_match": 0.0}
    assert second["response_mask"] == [1, 1, 1] and first["special_tokens"] == [0, 1, 2, 3]
    assert trajectories_of(record(), PROMPTS.__getitem__, [1], tokenizer) == [second]
    for row in (first, second):
        lists = [row[name] for name in TOKEN_FIELDS if name in row]
        assert len(lists) == 7 and {len(one) for one in lists} == {len(row["response_tokens"])}


def test_texts_join_to_the_text(tokenizer):
    ids = tokenizer.encode_prompt("2+2 = ") + tokenizer.encode("né 😀\n</s>")
    one = record()
    batch = PackedBatch(
        torch.tensor(ids),
        cu_seqlens_of([len(ids)]),
        {"response_mask": torch.arange(len(ids)) > 5, "logprob": torch.full((len(ids),), -1 / 3)},
        {"truncated": torch.tensor([False])},
    )
    one = changed(one, experience=dealt(batch), scored=Scored(["né 😀\n"], [1.0], {}))
    (row,) = trajectories_of(one, PROMPTS.__getitem__, [0], tokenizer)
    assert "".join(row["prompt_texts"] + row["response_texts"]) == "<s>2+2 = né 😀\n</s>"
    assert len(row["response_texts"]) == len(row["response_tokens"]) and row["response_texts"][-1] == "</s>"
    assert row["special_tokens"] == [1, 2]
    assert set(row["logprob"]) == {-0.33333}, "five digits"


def test_tokens_that_the_policy_did_not_sample_have_no_numbers(tokenizer):
    """The output of a tool between two sampled spans is part of the response and is masked."""
    whole = record()
    mask = torch.tensor([False, True, False, True, False, True, True, True])
    batch = replace(whole.batch, token_fields=whole.batch.token_fields | {"response_mask": mask})
    row = trajectories_of(changed(whole, experience=dealt(batch, 2)), PROMPTS.__getitem__, [0], tokenizer)[0]
    assert (row["prompt_tokens"], row["response_tokens"], row["response_mask"]) == ([0], [1, 2, 3], [1, 0, 1])
    assert row["logprob"][0] == 99.0 and math.isnan(row["logprob"][1]) and row["logprob"][2] == -2.0
    assert json.loads(dump_line(row))["value"] == [99.0, None, 0.2]


def test_a_record_has_the_parts_of_its_recipe_alone(tokenizer):
    scored = Scored(["r0", "r1"], [1.0, 0.5], {"math": [1.0, math.nan], "code": [math.nan, 0.5]}, labels=["gsm8k", "apps"])
    first, second = trajectories_of(changed(record(), scored=scored), PROMPTS.__getitem__, [0, 1], tokenizer)
    assert (first["recipe"], first["parts"], second["recipe"], second["parts"]) == ("gsm8k", {"math": 1.0}, "apps", {"code": 0.5})


def test_a_response_without_a_sampled_token_is_a_record(tokenizer):
    whole = record()
    batch = replace(whole.batch, token_fields=whole.batch.token_fields | {"response_mask": torch.zeros(8, dtype=torch.bool)})
    row = trajectories_of(changed(whole, experience=dealt(batch, 2)), PROMPTS.__getitem__, [1], tokenizer)[0]
    assert row["prompt_tokens"] == [4, 5, 6, 7] and row["response_tokens"] == row["value"] == []
