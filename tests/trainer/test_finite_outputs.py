"""A NaN or an infinity among what models and sampler say of the sampled tokens is an error that names it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.engine.megatron import MegatronEngine
from megappo.parallel.layout import ParallelLayout
from megappo.resilience.faults import Unrecoverable
from megappo.trainer.finite_outputs import NonFiniteOutput, require_finite_outputs

LENGTHS = torch.tensor([3, 4, 2, 5])
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
FIELDS = ("logprob", "value", "ref_logprob", "rollout_logprob")
ENGINES: Any = {role: SimpleNamespace(ranks_of=lambda batch, b: f"rank {b}") for role in ("policy", "critic", "reference")}


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
    ("logprob", (1,), "logprob of the policy is NaN or infinite at a sampled token, the first of sample 0, computed by rank 0"),
    ("value", (12, 5, 4), "value of the critic is NaN or infinite at 2 sampled tokens, the first of sample 1, computed by rank 1"),
    ("ref_logprob", (8,), "ref_logprob of the reference is NaN or infinite at a sampled token, the first of sample 2, computed by"),
    (
        "rollout_logprob",
        (13,),
        "rollout_logprob of vllm is NaN or infinite at a sampled token, the first of sample 3; no update is",
    ),
    (
        "bootstrap",
        (1,),
        "bootstrap of the critic is NaN or infinite at the end of a cut response, the first of sample 1, computed by rank 1",
    ),
]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("field", "places", "said"), CASES, ids=[case[0] for case in CASES])
def test_it_is_named(field: str, places: tuple[int, ...], said: str, wrong: float) -> None:
    with pytest.raises(NonFiniteOutput) as caught:
        require_finite_outputs(batch(field, places, wrong), ENGINES, "vllm", 7)
    assert str(caught.value).startswith(f"step 7: {said}")
    assert not isinstance(caught.value, Unrecoverable), "another start may get over it"


def test_tokens_and_fields_that_train_nothing_are_not_looked_at() -> None:
    """Prompts, entropies, and the value after a response that is whole."""
    for field in FIELDS:
        require_finite_outputs(batch(field, tuple((~MASK).nonzero().flatten().tolist())), ENGINES, "vllm", 7)


def test_the_ranks_are_those_that_hand_back_the_sequence() -> None:
    """tp 2, dp 2, pp 2: the last stage of the replica that has the sequence."""
    groups = SimpleNamespace(layout=ParallelLayout(8, tp=2, pp=2))
    engine: Any = SimpleNamespace(groups=groups, _micro_batch_tokens=5)
    engine._plan = partial(MegatronEngine._plan, engine)
    said = [MegatronEngine.ranks_of(engine, batch(), sequence) for sequence in range(4)]
    mine = {}
    for dp in range(2):
        groups.coordinates = SimpleNamespace(dp=dp)
        mine |= {sequence: dp for micro in MegatronEngine._my_sequences(engine, batch()) for sequence in micro}
    assert said == [["ranks 4-5 (stage 1)", "ranks 6-7 (stage 1)"][mine[sequence]] for sequence in range(4)]
    assert set(mine.values()) == {0, 1}
