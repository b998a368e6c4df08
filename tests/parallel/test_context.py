"""The zig-zag cut of packed sequences and what travels between context-parallel ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megappo.data.packing import cu_seqlens_of
from megappo.parallel.context import context_shard, zigzag_index
from tests.worlds import spawn_world

# (cp, lengths): multiples of 2 cp, with an empty sequence, one alone, and none.
CASES = [(1, (2, 4, 0, 6)), (2, (4, 12, 0, 8)), (3, (6, 18)), (4, (8,)), (4, (40, 8, 16, 0)), (2, ())]


@pytest.mark.parametrize("cp, lengths", CASES)
def test_the_ranks_hold_every_token_once_and_equally_many_of_each_sequence(cp, lengths) -> None:
    cu_seqlens = cu_seqlens_of(torch.tensor(lengths, dtype=torch.long))
    parts = [zigzag_index(cu_seqlens, cp, rank) for rank in range(cp)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(sum(lengths)))
    for part in parts:
        assert part.dtype == torch.int64 and torch.equal(part, part.sort().values)
        for length, start, end in zip(lengths, cu_seqlens[:-1], cu_seqlens[1:]):
            assert ((part >= start) & (part < end)).sum() == length // cp


@pytest.mark.parametrize("cp, lengths", CASES)
def test_a_causal_mask_gives_every_rank_the_same_work(cp, lengths) -> None:
    """Work of a token: the tokens that it sees. Plain halves would give the last rank (2 cp - 1) times the first one's."""
    cu_seqlens = cu_seqlens_of(torch.tensor(lengths, dtype=torch.long))
    seen = torch.cat([torch.arange(1, n + 1) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.long)
    work = [int(seen[zigzag_index(cu_seqlens, cp, rank)].sum()) for rank in range(cp)]
    assert len(set(work)) == 1, work


def test_the_order_is_that_of_transformer_engine() -> None:
    """The example in the documentation of its context parallelism: lengths 8 and 4 on two ranks, positions in each sequence."""
    cu_seqlens = torch.tensor([0, 8, 12])
    assert zigzag_index(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 8 + 0, 8 + 3]
    assert zigzag_index(cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 8 + 1, 8 + 2]


@pytest.mark.parametrize("cp, length", [(2, 6), (2, 2), (3, 9), (4, 12)])
def test_lengths_that_do_not_split_are_refused(cp, length) -> None:
    with pytest.raises(AssertionError, match=f"multiple of {2 * cp} tokens"):
        zigzag_index(torch.tensor([0, 2 * cp, 2 * cp + length]), cp, 0)


LENGTHS = (8, 0, 4, 12)


def exchange(rank: int) -> dict:
    """Results of gather, the head exchange and their gradients on this rank. Two ranks, and every rank alone."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    cu_seqlens = cu_seqlens_of(LENGTHS)
    shard = context_shard(cu_seqlens, dist.group.WORLD, torch.device("cpu"))
    whole = torch.arange(24.0)
    mine = shard.take(whole).requires_grad_()
    gathered = shard.gather(mine)
    (gathered * whole).sum().backward()
    summed = torch.autograd.grad((all_gather_that_sums(mine, shard) * whole).sum(), mine)[0]

    heads = torch.arange(24 * 4 * 3.0).view(24, 4, 3)
    local = shard.take(heads).requires_grad_()
    exchanged = shard.heads_from_tokens(local)
    back = shard.tokens_from_heads(exchanged)
    (back * shard.take(heads)).sum().backward()
    rows = shard.gather(torch.stack([mine.detach(), -mine.detach()], dim=1))
    return {
        "alone": context_shard(cu_seqlens, alone, torch.device("cpu")) is None,
        "gathered": gathered.detach(),
        "rows": rows,
        "index": shard.index,
        "gradient": mine.grad,
        "summed": summed,
        "heads": exchanged.detach(),
        "back": back.detach(),
        "heads_gradient": local.grad,
    }


def all_gather_that_sums(x, shard):
    """The usual all-gather, whose backward is a reduce-scatter: right only where every rank's loss is a part of the whole."""
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(x, group=shard.group))[shard.order]


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return spawn_world(exchange, 2)


def test_gather_undoes_take_on_every_rank(ranks) -> None:
    whole = torch.arange(24.0)
    for result in ranks:
        assert torch.equal(result["gathered"], whole)
        assert torch.equal(result["rows"], torch.stack([whole, -whole], dim=1))


def test_the_gradient_of_gather_is_the_slice_and_not_the_sum(ranks) -> None:
    """Every rank computes the same loss from the whole. Negative control: a summing backward counts it once for each rank."""
    for result in ranks:
        expected = torch.arange(24.0)[result["index"]]
        assert torch.equal(result["gradient"], expected)
        assert torch.equal(result["summed"], 2 * expected)


def test_tokens_are_exchanged_for_heads_and_back(ranks) -> None:
    heads = torch.arange(24 * 4 * 3.0).view(24, 4, 3)
    for rank, result in enumerate(ranks):
        assert torch.equal(result["heads"], heads[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(result["back"], heads[result["index"]])
        assert torch.equal(result["heads_gradient"], heads[result["index"]])


def test_a_group_of_one_rank_has_no_shard(ranks) -> None:
    assert all(result["alone"] for result in ranks)
