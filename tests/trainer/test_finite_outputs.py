"""A NaN or an infinity among what models and sampler say of the sampled tokens is an error that names it."""

from __future__ import annotations

import pytest
import torch

from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.parallel.layout import ParallelLayout
from megappo.parallel.shares import Shares, shares_of
from megappo.rollout.types import SamplingParams
from megappo.runtime.ending import Unrecoverable
from megappo.trainer.experience.table import Owners
from megappo.trainer.model_outputs import NonFiniteOutput, computing_ranks, num_not_finite, require_finite_outputs
from megappo.trainer.sampler_check import compare_with_sampler
from tests.trainer.experiences import dealt
from tests.worlds import spawn_world

LENGTHS = torch.tensor([3, 4, 2, 5])
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
FIELDS = ("logprob", "value", "ref_logprob", "teacher_logprob", "rollout_logprob")
# A replica for each of the four samples, of lengths 3, 4, 2, 5: the longest goes to the first.
SHARES = dict.fromkeys(("policy", "critic", "reference", "teacher"), Shares.of_ranks([3, 1, 0, 2]))


def batch(field: str = "", places: tuple[int, ...] = (), wrong: float = torch.nan) -> PackedBatch:
    """Three of four responses are not cut, so that their bootstrap does not count."""
    tokens = {name: torch.zeros(14) for name in FIELDS} | {"entropy": torch.full((14,), torch.nan)}
    sequences = {
        "bootstrap": torch.tensor([torch.nan, 0.0, torch.inf, 0.0]),
        "truncated": torch.tensor([False, True, False, False]),
    }
    for place in places:
        ({**tokens, **sequences})[field][place] = wrong
    return PackedBatch(torch.zeros(14, dtype=torch.long), cu_seqlens_of(LENGTHS), {**tokens, "response_mask": MASK}, sequences)


CASES = [
    (
        "logprob",
        (1,),
        "logprob of the policy is NaN or infinite at a sampled token, the first of sample 0, computed by rank 0 ",
    ),
    (
        "value",
        (12, 5, 4),
        "value of the critic is NaN or infinite at 2 sampled tokens, the first of sample 1, computed by rank 1 ",
    ),
    ("ref_logprob", (8,), "ref_logprob of the reference is NaN or infinite at a sampled token, the first of sample 2, computed by"),
    (
        "teacher_logprob",
        (2,),
        "teacher_logprob of the teacher is NaN or infinite at a sampled token, the first of sample 0, computed",
    ),
    (
        "rollout_logprob",
        (13,),
        "rollout_logprob of vllm is NaN or infinite at a sampled token, the first of sample 3; no update is",
    ),
    (
        "bootstrap",
        (1,),
        "bootstrap of the critic is NaN or infinite at the end of a cut response, the first of sample 1, computed by rank 1 ",
    ),
]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("field", "places", "said"), CASES, ids=[case[0] for case in CASES])
def test_it_is_named(field: str, places: tuple[int, ...], said: str, wrong: float) -> None:
    experience = dealt(batch(field, places, wrong))
    assert num_not_finite(experience) == int(MASK[list(places)].sum() if field != "bootstrap" else 1)
    with pytest.raises(NonFiniteOutput) as caught:
        require_finite_outputs(experience, SHARES, "vllm", 7)
    assert str(caught.value).startswith(f"step 7: {said}")
    assert not isinstance(caught.value, Unrecoverable), "another start may get over it"


def test_tokens_and_fields_that_train_nothing_are_not_looked_at() -> None:
    """Prompts, entropies, and the value after a response that is whole."""
    for field in FIELDS:
        experience = dealt(batch(field, tuple((~MASK).nonzero().flatten().tolist())))
        require_finite_outputs(experience, SHARES, "vllm", 7)
        assert num_not_finite(experience) == 0


def test_the_ranks_are_those_that_hand_back_the_sample() -> None:
    """tp 2, dp 2, pp 2: the last stage of the replica that has the sample."""
    shares, whole = shares_of(ParallelLayout(8, tp=2, pp=2)), dealt(batch())
    said = [computing_ranks(whole, shares, sample) for sample in range(4)]
    owner = Owners.of_role(whole.table, shares).share.tolist()
    assert said == [["ranks 4-5 (stage 1)", "ranks 6-7 (stage 1)"][share] for share in owner] and set(owner) == {0, 1}


def other_rank(rank: int) -> tuple[int, int, str]:
    """Sample 1, of rank 1, is wrong: every rank says so. (number of this rank, of all, message)."""
    experience = dealt(batch("value", (5,)))
    own = num_not_finite(experience)
    of_all = compare_with_sampler(experience.batch, SamplingParams(8), own).num_bad
    try:
        require_finite_outputs(experience, SHARES, "vllm", 7)
    except NonFiniteOutput as error:
        return own, of_all, str(error)
    return own, of_all, ""


def test_every_rank_names_what_one_rank_has() -> None:
    first, second = spawn_world(other_rank, 2)
    assert sorted((first[0], second[0])) == [0, 1] and first[1] == second[1] == 1
    assert first[2] == second[2] and first[2].startswith(
        "step 7: value of the critic is NaN or infinite at a sampled token, the first of sample 1"
    )
