"""Responses as values: what follows from their segments."""

from __future__ import annotations

import numpy

from megappo.rollout.types import KeptIds, Response
from tests.rollout.responses import answered, kept_of, plain, segment


def test_a_response_of_several_segments_tells_sampled_from_given_tokens():
    answer = Response(3, (segment((8, 9), (-0.5, -1.5), 4), segment((1, 2, 3), None, 5), segment((7,), (-2.0,), 6)), "length")
    assert answer.tokens.tolist() == [8, 9, 1, 2, 3, 7] and answer.tokens.dtype == numpy.int32
    assert answer.logprobs.tolist() == [-0.5, -1.5, 0.0, 0.0, 0.0, -2.0] and answer.logprobs.dtype == numpy.float32
    assert answer.sampled.tolist() == [True, True, False, False, False, True] and answer.num_sampled == 3
    assert (answer.oldest_version, answer.newest_version) == (4, 6)


def test_a_response_without_a_token_has_empty_arrays():
    nothing = answered(())
    assert nothing.tokens.dtype == numpy.int32 and nothing.logprobs.dtype == numpy.float32 and nothing.sampled.dtype == bool
    assert len(nothing.tokens) == len(nothing.logprobs) == len(nothing.sampled) == nothing.num_sampled == 0


def test_one_segment_is_not_copied():
    whole = answered((1, 2, 3))
    assert whole.tokens is whole.segments[0].tokens and whole.logprobs is whole.segments[0].logprobs


def test_kept_ids_are_counts_and_ids():
    table = numpy.array([[8, 1, 5], [9, 2, 6], [4, 3, 7]], numpy.int32)
    kept = KeptIds.where(table, numpy.array([[True, True, False], [False, False, False], [True, False, True]]))
    assert kept.counts.tolist() == [2, 0, 2] and kept.ids.tolist() == [8, 1, 4, 7] and kept.counts.dtype == numpy.int32
    assert [(one.counts.tolist(), one.ids.tolist()) for one in map(kept.first, range(4))] == [
        ([], []),
        ([2], [8, 1]),
        ([2, 0], [8, 1]),
        ([2, 0, 2], [8, 1, 4, 7]),
    ]
    assert plain([answered((8, 9, 4), kept=[[8, 1], [], [4, 7]])])[0]["kept"] == (kept.counts.tolist(), kept.ids.tolist())
    assert len(kept_of([]).ids) == 0
