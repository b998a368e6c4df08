"""Samples move between owners: every rank ends with exactly the samples that it is to hold, whole and in their order."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.packing import NO_ID, PackedBatch, Ragged, Spans, cu_seqlens_of
from megappo.parallel.layout import ParallelLayout
from megappo.parallel.shares import Shares, shares_of
from megappo.trainer.experience.experience import Experience, rows_of
from megappo.trainer.experience.route import Leg, world_wire
from megappo.trainer.experience.table import Owners, SampleTable
from tests.parallel.test_totals import reduced
from tests.trainer.experience.threads import world_of_threads
from tests.worlds import spawn_world

NAMES = ("logprob", "response_mask", "kept", "bootstrap")


def whole_batch(lengths: list[int], seed: int = 0) -> PackedBatch:
    """Sequences with a field of every kind; no two tokens are alike."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    width = torch.randint(0, 4, (total, 1), generator=generator)
    ids = torch.randint(0, 99, (total, 3), generator=generator, dtype=torch.int32)
    kept = torch.where(torch.arange(3) < width, ids, NO_ID)
    return PackedBatch(
        torch.arange(total) + 1000,
        cu_seqlens_of(torch.tensor(lengths, dtype=torch.long)),
        {
            "logprob": torch.randn(total, generator=generator),
            "response_mask": torch.rand(total, generator=generator) < 0.5,
        },
        {"bootstrap": torch.randn(len(lengths), generator=generator)},
        {"kept": Ragged.of_table(kept)},
    )


def table_of(lengths: list[int]) -> SampleTable:
    rows = torch.tensor(lengths, dtype=torch.int32)
    return replace(SampleTable(*[rows] * len(fields(SampleTable))), previous=torch.full_like(rows, -1))


def differs(found: PackedBatch, want: PackedBatch) -> list[str]:
    """Names that differ."""
    a, b = named(found), named(want)
    return [name for name in b if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


def named(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """All tensors of a batch with the fields of NAMES."""
    kept, flat = batch.ragged("kept"), [name for name in NAMES if name != "kept"]
    of_batch = {"tokens": batch.tokens, "cu_seqlens": batch.cu_seqlens, "ids": kept.ids, "counts": kept.counts}
    return of_batch | {name: batch[name] for name in flat}


OWNED = st.integers(1, 6).flatmap(
    lambda world: st.tuples(
        st.just(world),
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, world - 1), st.integers(0, world - 1)), max_size=12),
    )
)


@settings(max_examples=60, deadline=None)
@given(OWNED)
def test_every_rank_ends_with_its_samples(case: tuple[int, list[tuple[int, int, int]]]) -> None:
    world, samples = case
    lengths = [length for length, _, _ in samples]
    batch, table, shares = whole_batch(lengths), table_of(lengths), Shares.of_ranks(range(world))
    before, after = (Owners(torch.tensor([one[i] for one in samples], dtype=torch.long), shares) for i in (1, 2))

    def move(rank: int, wire: Any) -> tuple[PackedBatch, PackedBatch]:
        own = Experience(table, before, batch.select(before.numbers(rank)), rank, wire)
        there = own.redistribute(after)
        return there.batch, there.redistribute(before).batch

    for rank, (there, back) in enumerate(world_of_threads(range(world), move)):
        assert not differs(there, batch.select(after.numbers(rank)))
        assert not differs(back, batch.select(before.numbers(rank)))


@pytest.fixture(params=[1, 10**6], ids=["slices", "index"])
def both_ways_to_gather(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are as short here as none of a run's that are gathered by slices."""
    monkeypatch.setattr("megappo.data.packing.LONG", request.param)


LAYOUTS = [
    (ParallelLayout(4, tp=2), (0, 1, 2, 3)),
    (ParallelLayout(4, pp=2), (0, 1, 2, 3)),
    (ParallelLayout(8, tp=2, pp=2), tuple(range(8))),
    (ParallelLayout(3, pp=3), (0, 2, 3)),
    (ParallelLayout(2, cp=2), (1, 4)),
    (ParallelLayout(1), (3,)),
]


@pytest.mark.usefixtures("both_ways_to_gather")
@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS, ids=lambda value: str(value))
@pytest.mark.parametrize("lengths", [[3, 1, 4, 1, 5, 9, 2, 6], [40], [1, 1, 200]], ids=["eight", "one", "a long one"])
def test_a_role_is_sent_what_its_ranks_read_and_its_results_come_back(
    layout: ParallelLayout, ranks: tuple[int, ...], lengths: list[int]
) -> None:
    """Holders get tokens and fields, readers tokens, other members lengths, all else nothing; reporters hand back results."""
    world = max(ranks) + 2  # the last rank has no part in the role
    batch, table, shares = whole_batch(lengths), table_of(lengths), shares_of(layout, ranks)
    owners = Owners.of_role(table, shares)

    def there_and_back(rank: int, wire: Any) -> tuple[Experience, Experience]:
        spread = Owners.spread(table, world)
        own = Experience(table, spread, batch.select(spread.numbers(rank)), rank, wire)
        share = own.for_role(shares, NAMES)
        results: dict[str, torch.Tensor] = {}
        if rank in ranks:
            value = share.batch.tokens.float() if rank in shares.reporters else torch.zeros(share.batch.num_tokens)
            results = {"value": value, "end": -share.batch.lengths.float()}
        return share, own.with_results(share, ("value",), ("end",), results)

    for rank, (share, back) in enumerate(world_of_threads(range(world), there_and_back)):
        assert torch.equal(back.batch["value"], back.batch.tokens.float()) and torch.equal(
            back.batch["end"], -back.batch.lengths.float()
        )
        index = shares.index_of(rank)
        want = batch.select(owners.numbers(rank))
        assert torch.equal(share.batch.cu_seqlens, want.cu_seqlens)
        if index is None:
            assert share.batch.num_sequences == 0
        elif rank in shares.holders[index]:
            assert not differs(share.batch, want)
        else:
            assert not share.batch.token_fields and not share.batch.sequence_fields and not share.batch.ragged_fields
            assert torch.equal(share.batch.tokens, want.tokens if rank in shares.readers[index] else torch.zeros_like(want.tokens))


def test_a_second_epoch_exchanges_within_the_role() -> None:
    """Stages that hold no fields take part: the wire counts on both ends, field by field."""
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    batch, table, ranks = whole_batch(lengths), table_of(lengths), (0, 1, 2, 3)
    shares = shares_of(ParallelLayout(4, pp=2), ranks)
    first, second = (Owners(torch.arange(8) // divisor % 2, shares) for divisor in (1, 4))

    def move(rank: int, wire: Any) -> Experience:
        spread = Owners.spread(table, 4)
        own = Experience(table, spread, batch.select(spread.numbers(rank)), rank, wire)
        return own.redistribute(first, NAMES).redistribute(second)

    for rank, found in enumerate(world_of_threads(ranks, move)):
        want = batch.select(second.numbers(rank))
        if rank in (2, 3):
            assert not differs(found.batch, want)
        else:
            assert torch.equal(found.batch.tokens, want.tokens) and not found.batch.token_fields
            assert not found.batch.ragged_fields


@pytest.mark.parametrize("end", ["sent", "received"])
def test_a_sample_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    right = getattr(Leg, end).__func__

    def shifted(cls: Any, *arguments: Any) -> Leg:
        leg = right(cls, *arguments)
        spans = Spans(leg.spans.starts.roll(1), leg.spans.lengths)
        return replace(leg, spans=spans) if len(leg.rows) > 1 else leg

    monkeypatch.setattr(Leg, end, classmethod(shifted))
    with pytest.raises(AssertionError):
        test_a_role_is_sent_what_its_ranks_read_and_its_results_come_back(*LAYOUTS[0], [3, 3, 3, 3, 3, 3, 3, 3])


def test_only_what_is_read_goes_over_the_wire() -> None:
    lengths = [64] * 8
    batch, table, shares = whole_batch(lengths), table_of(lengths), Shares.of_ranks(range(2))
    before, after = Owners(torch.arange(8) % 2, shares), Owners(torch.arange(8) // 4, shares)

    def sent(rank: int, wire: Any) -> int:
        Experience(table, before, batch.select(before.numbers(rank)), rank, wire).redistribute(after, ("logprob",))
        return wire.bytes_sent

    assert world_of_threads(range(2), sent) == [2 * 64 * 8] * 2, "two of four samples, 4 bytes a token and 4 of its field"


TEXTS = ["Ja, 42", "", "\u0663 \U0001f600", "42", "\udcff", "no"]
"""Of three prompts: an empty one, of several bytes a character, one that is no UTF-8."""


def texts_of_prompts(rank: int) -> Any:
    """Owners of two samples for each of three prompts, and the texts that come to a rank; all are of rank 1 before."""
    table, shares = table_of([3, 1, 4, 1, 5, 9]), Shares.of_ranks(range(2))
    own = Owners(torch.ones(6, dtype=torch.long), shares)
    experience = Experience(table, own, whole_batch([]), rank, world_wire())
    owners = Owners.of_prompts(table, 2, 2)
    return owners.share.tolist(), experience.texts([TEXTS[number] for number in own.numbers(rank)], owners)


def drawn_world(rank: int) -> list[Any]:
    """What two ranks drew, put together; samples that nobody drew, or both."""
    lengths = [4, 2, 7, 3, 5]
    batch = whole_batch(lengths).with_fields(sequence_fields={"truncated": torch.tensor([True, False, True, False, True])})
    found: list[Any] = []
    for mine in ([0, 3] if rank == 0 else [1, 2, 4], [] if rank == 0 else [0, 1, 2, 3, 4]):
        numbers = torch.tensor(mine, dtype=torch.long)
        versions = torch.full((len(mine),), 7, dtype=torch.int32)
        experience = Experience.of_drawn(numbers, batch.select(numbers), 5, (versions, versions))
        everywhere = experience.everywhere()
        found.append((experience.table, experience.numbers.tolist(), differs(everywhere, batch), everywhere["truncated"].tolist()))
    for mine in ([0, 1] if rank == 0 else [3], [0, 1, 2, 3, 4]):
        numbers = torch.tensor(mine, dtype=torch.long)
        versions = torch.zeros(len(mine), dtype=torch.int32)
        try:
            Experience.of_drawn(numbers, batch.select(numbers), 5, (versions, versions))
        except RuntimeError as error:
            found.append(str(error))
    return [*found, texts_of_prompts(rank), reduced(rank)]


def test_the_table_is_agreed_and_samples_are_spread() -> None:
    first, second = spawn_world(drawn_world, 2)
    for (table, numbers, wrong, cut), (other, others, *_) in zip(first[:2], second[:2]):
        assert all(torch.equal(getattr(table, f.name), getattr(other, f.name)) for f in fields(SampleTable))
        assert sorted(numbers + others) == [0, 1, 2, 3, 4] and abs(len(numbers) - len(others)) <= 1
        assert not wrong and cut == [True, False, True, False, True]
        assert table.length.tolist() == [4, 2, 7, 3, 5] and table.truncated.tolist() == [1, 0, 1, 0, 1]
        assert table.newest.tolist() == [7] * 5
    assert first[0][0].owner.tolist() == [0, 1, 1, 0, 1] and first[1][0].owner.tolist() == [1] * 5
    assert first[2] == second[2] == "sample 2 was drawn by no ranks (2 such of 5 in all)"
    assert first[3] == second[3] == "sample 0 was drawn by 2 ranks (5 such of 5 in all)"
    # A text goes to the rank of its prompt alone; prompts are balanced by tokens: 14 against 5 and 4.
    assert first[4] == ([1, 1, 1, 1, 0, 0], TEXTS[4:]) and second[4] == ([1, 1, 1, 1, 0, 0], TEXTS[:4])
    # Small vectors go to all ranks at once, larger ones along a ring; few rows that were expected in one exchange, others in two.
    sums, rows = {"a": [2.0, -5.0, 9.0], "b": [2.0], "c": [-0.5, 3.0, 0.0]}, [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert first[5] == second[5] == [[[[3, 14]], 0.0, [], sums, [rows] * 4]] * 2


def test_rows_of_the_table_follow_the_mask() -> None:
    """A tool's output between sampled tokens belongs to the response; a sample may have no sampled token."""
    mask = torch.tensor([0, 0, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
    batch = PackedBatch(
        torch.arange(8), cu_seqlens_of([5, 2, 1]), {"response_mask": mask}, {"truncated": torch.tensor([True, False, False])}
    )
    table = Experience.of_whole(batch).table
    assert (table.length.tolist(), table.prompt.tolist(), table.sampled.tolist()) == ([5, 2, 1], [2, 2, 0], [2, 0, 1])
    assert table.truncated.tolist() == [1, 0, 0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=9), st.integers(1, 7))
def test_rows_of_the_table_are_those_of_the_loop(masks: list[list[bool]], chunk: int) -> None:
    """However many tokens are looked at together."""
    flat = torch.tensor([one for mask in masks for one in mask], dtype=torch.bool)
    cut = torch.zeros(len(masks), dtype=torch.bool)
    lengths = torch.tensor([len(mask) for mask in masks], dtype=torch.long)
    batch = PackedBatch(
        torch.zeros_like(flat, dtype=torch.long), cu_seqlens_of(lengths), {"response_mask": flat}, {"truncated": cut}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megappo.algo.aggregation.TOKENS", chunk)
        table = rows_of(batch, (cut.int(), cut.int()), 0)
    assert table.sampled.tolist() == [sum(mask) for mask in masks]
    assert table.prompt.tolist() == [mask.index(True) if any(mask) else len(mask) for mask in masks]
