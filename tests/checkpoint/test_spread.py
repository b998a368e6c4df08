"""Every data-parallel rank writes its part of a checkpoint, in little memory. `spread.py` has the cases, for one rank and four."""

from __future__ import annotations

import pytest

from tests.checkpoint.spread import CASES, memory_main, world_main
from tests.worlds import spawn_world

SCALARS = 1024  # bytes: step numbers and the like


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return spawn_world(world_main, 4, str(tmp_path_factory.mktemp("four")))


@pytest.fixture(scope="module", params=[1, 4])
def dp(request, tmp_path_factory):
    return spawn_world(memory_main, request.param, str(tmp_path_factory.mktemp("dp")))


@pytest.mark.parametrize("name", CASES)
def test_another_layout_and_the_same_one_read_it_to_the_bit(four, name):
    for rank in four:
        result = rank[name]
        assert result["wrong"] == [] and result["resumed"] == []
        assert {"model", "optimizer"} <= set(result["fresh"])


@pytest.mark.parametrize("name", CASES)
def test_ranks_of_a_stage_write_equally_much(four, name):
    """At dp 2 and 4; the optimizer's buffers are padded. Two stages hold different weights, and of what all tp ranks hold only the
    first one's copy is written.
    """
    sizes = four[0][name]["bytes"]
    assert all(rank[name]["bytes"] == sizes for rank in four) and min(sizes) > 0
    for peers in peers_of(name):
        group = [sizes[rank] for rank in peers]
        assert max(group) - min(group) <= 0.1 * max(group), (name, sizes)


def peers_of(name):
    """Ranks that hold copies of the same weights: tp varies fastest, then dp, then pp."""
    layout = CASES[name][1]
    if layout.startswith("tp2"):
        return [[0, 2], [1, 3]]
    return [[0, 1], [2, 3]] if layout.startswith("pp2") else [[0, 1, 2, 3]]


def test_a_first_rank_that_writes_for_all_is_noticed(four):
    sizes = four[0]["written by mains"]["bytes"]
    assert sizes[0] > 0 and sizes[1:] == [0, 0, 0]
    assert four[0]["written by mains"]["wrong"] == [], "whole tensors are read as well"


def test_the_cases_hold_what_is_hard(four):
    """Ranges that begin inside a row, and tensors of which a rank holds nothing."""
    hard = [four[0][name] for name in ("bf16 critic, fp32 head", "bf16, tied")]
    assert all(result["inside a row"] > 0 for result in hard)
    assert all(1 in result["writers"] and max(result["writers"]) > 1 for result in hard)
    assert four[0]["written by mains"]["inside a row"] == 0


def test_a_save_makes_no_more_than_the_tensor_that_it_writes(dp):
    for rank in dp:
        assert rank["save"] <= rank["largest"] < rank["share"]
    assert max(rank["save of copies"] for rank in dp) > dp[0]["largest"], "negative control"


def test_the_plan_knows_what_a_rank_writes_and_so_holds_of_a_snapshot(dp):
    for rank in dp:
        # Within the padding of the optimizer's buffers, at which ranks divide them.
        assert rank["planned"] == pytest.approx(rank["written"], rel=0.02)


def test_a_load_makes_no_more_than_the_tensor_that_it_reads(dp):
    for rank in dp:
        assert rank["load"] <= rank["largest"] + SCALARS
        assert rank["load into copies"] > max(0.9 * rank["share"], rank["largest"] + SCALARS), "negative control"
