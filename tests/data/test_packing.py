"""Padding of packed batches: every token and field survives at the place that the index names, and the sizes come out even."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.data.packing import PackedBatch, Spans, pack, token_positions
from tests.data.test_ragged import ragged, rows_of


def batch_of(lengths: list[int]) -> PackedBatch:
    """Tokens, a field and a mask that are nowhere what padding is."""
    total = sum(lengths)
    batch = pack([[7] * n for n in lengths])
    fields = {"value": torch.arange(1.0, total + 1), "mask": torch.ones(total, dtype=torch.bool)}
    return batch.with_fields(fields, {"score": torch.arange(1.0, len(lengths) + 1)})


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 8), st.integers(1, 12))
def test_sizes_come_out_even_and_tokens_stand_where_the_index_says(lengths, sequence_multiple, total_multiple) -> None:
    batch = batch_of(lengths)
    padded, index = batch.padded(sequence_multiple, total_multiple)
    assert padded.num_tokens > 0 and padded.num_tokens % total_multiple == 0
    assert not (padded.lengths % sequence_multiple).any() and padded.cu_seqlens[-1] == padded.num_tokens
    assert padded.cu_seqlens.dtype == torch.int32 and padded.num_sequences - batch.num_sequences in (0, 1)
    assert torch.equal(padded.tokens[index], batch.tokens)
    for name in ("value", "mask"):
        assert padded[name].dtype == batch[name].dtype and torch.equal(padded[name][index], batch[name])
        everything_else = padded[name].clone()
        everything_else[index] = 0
        assert not everything_else.any()
    # Sequences begin where they began, measured from their own first token, and the extra one has fields of zeros.
    starts = padded.cu_seqlens[: batch.num_sequences].long().repeat_interleave(batch.lengths)
    own_starts = batch.cu_seqlens[:-1].long().repeat_interleave(batch.lengths)
    assert torch.equal(index - starts, torch.arange(batch.num_tokens) - own_starts)
    assert torch.equal(padded["score"][: batch.num_sequences], batch["score"])
    assert not padded["score"][batch.num_sequences :].any()


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 8), st.integers(1, 12))
def test_no_more_is_padded_than_needed(lengths, sequence_multiple, total_multiple) -> None:
    padded, _ = batch_of(lengths).padded(sequence_multiple, total_multiple)
    within_sequences = sum(lengths) + len(lengths) * (sequence_multiple - 1)
    assert padded.num_tokens <= max(1, within_sequences) + sequence_multiple * total_multiple - 1


@pytest.mark.parametrize("lengths, sequence_multiple, total_multiple", [([4, 8], 4, 2), ([3, 5], 1, 1), ([6, 6], 1, 12)])
def test_what_is_even_already_is_handed_back(lengths, sequence_multiple, total_multiple) -> None:
    batch = batch_of(lengths)
    padded, index = batch.padded(sequence_multiple, total_multiple)
    assert padded is batch and torch.equal(index, torch.arange(sum(lengths)))


def test_padding_has_no_ids_and_rows_stay_whole() -> None:
    rows = [[6], [], [7, 8, 9], [4, 5]]
    batch = batch_of([3, 1]).with_fields(ragged_fields={"kept": ragged(rows)})
    padded, index = batch.padded(4, 16)
    found = rows_of(padded.ragged("kept"))
    assert [found[i] for i in index.tolist()] == rows and sum(map(len, found)) == 6 and len(found) == 16
    assert rows_of(batch.select([1]).ragged("kept")) == [[4, 5]]
    assert rows_of(batch.select([1, 0]).ragged("kept")) == [[4, 5], [6], [], [7, 8, 9]]


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_micro_batch_gets_one_sequence_of_padding(lengths) -> None:
    padded, index = batch_of(lengths).padded(4, 8)
    assert padded.lengths.tolist() == [*lengths, 8] and index.numel() == 0 and not padded["mask"].any()


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=20))
def test_positions_of_spans_are_those_of_the_loop(spans: list[tuple[int, int]]) -> None:
    """Spans in any order, that may overlap or be empty."""
    starts, lengths = (torch.tensor([span[column] for span in spans], dtype=torch.long) for column in (0, 1))
    found = token_positions(starts, lengths)
    assert found.dtype == torch.long
    assert found.tolist() == [start + offset for start, length in spans for offset in range(length)]
    values = torch.arange(60).int() * 3
    for long in (1, 10**6):  # by slices, and by an index
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megappo.data.packing.LONG", long)
            gathered = Spans(starts, lengths).of(values)
        assert gathered.dtype == torch.int32 and gathered.tolist() == [3 * position for position in found.tolist()]


@pytest.mark.parametrize("chosen", [[], [1], [1, 1], [3, 0, 2], [2, 1, 3, 1], torch.tensor([3, 1, 0])])
def test_selected_sequences_have_their_tokens_and_fields(chosen) -> None:
    """Sequence 1 is empty."""
    rows = [[1, 2], [], [3, 4, 5], [6]]
    batch = pack(rows).with_fields({"square": torch.arange(1, 7) ** 2, "ids": torch.arange(12).view(6, 2)})
    batch = batch.with_fields({}, {"number": torch.arange(4)})
    selected, wanted = batch.select(chosen), [token for row in map(rows.__getitem__, chosen) for token in row]
    assert selected.tokens.tolist() == wanted and selected["square"].tolist() == [token**2 for token in wanted]
    assert selected["ids"].tolist() == [[2 * token - 2, 2 * token - 1] for token in wanted]
    assert selected["number"].tolist() == list(chosen) and selected.lengths.tolist() == [len(rows[i]) for i in chosen]
