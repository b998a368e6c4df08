"""Ragged rows of ids, against lists of lists."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.data.packing import NO_ID, Ragged, Spans

ROWS = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=9)


def ragged(rows: list[list[int]]) -> Ragged:
    ids = torch.tensor([one for row in rows for one in row], dtype=torch.int32)
    return Ragged(ids, torch.tensor([len(row) for row in rows], dtype=torch.int32))


def rows_of(found: Ragged) -> list[list[int]]:
    assert found.ids.dtype == found.counts.dtype == torch.int32
    return [part.tolist() for part in found.ids.split(found.counts.tolist())]


@given(ROWS)
def test_a_table_has_the_rows_and_then_no_id(rows: list[list[int]]) -> None:
    width = max(map(len, rows), default=0)
    table = ragged(rows).padded()
    assert table.dtype == torch.int32 and table.shape == (len(rows), width)
    assert table.tolist() == [row + [NO_ID] * (width - len(row)) for row in rows]
    wider = torch.nn.functional.pad(table, (0, 3), value=NO_ID)
    for one in (table, wider):
        assert rows_of(Ragged.of_table(one)) == rows


@given(ROWS, st.data())
def test_spans_are_those_of_the_list(rows: list[list[int]], data: st.DataObject) -> None:
    """In any order, that may overlap or be empty."""
    starts = data.draw(st.lists(st.integers(0, len(rows)), max_size=5))
    lengths = [data.draw(st.integers(0, len(rows) - start)) for start in starts]
    found = ragged(rows).select(Spans(torch.tensor(starts, dtype=torch.long), torch.tensor(lengths, dtype=torch.long)))
    assert rows_of(found) == [row for start, length in zip(starts, lengths) for row in rows[start : start + length]]


@given(ROWS, st.data())
def test_rows_move_apart(rows: list[list[int]], data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    index = [i + sum(gaps[: i + 1]) for i in range(len(rows))]
    found = rows_of(ragged(rows).spread(torch.tensor(index, dtype=torch.long), len(rows) + sum(gaps) + 2))
    assert [found[i] for i in index] == rows and sum(map(len, found)) == sum(map(len, rows))


def test_the_sizes_of_rows_stay_on_the_host() -> None:
    """Reading it there would wait for the device."""
    there = ragged([[1], [2, 3, 4], []]).to("meta")
    assert there.width == 3 and there.ids.device.type == "meta" and there.counts.device.type == "cpu"
