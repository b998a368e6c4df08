"""Flat ranges as boxes, and equal shares of boxes, without ranks."""

from __future__ import annotations

import pytest
import torch

from megappo.checkpoint.state import StateBox
from megappo.engine.state_boxes import _share, flat_boxes


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (3, 4), (5, 2)])
def test_boxes_of_a_range_are_its_elements_in_order(shape):
    rows, cols = shape
    whole = torch.arange(rows * cols).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = flat_boxes(rows, cols, start, stop)
            values = [whole[box.r0 : box.r1, box.c0 : box.c1].flatten() for box in found]
            assert len(found) <= 3 and torch.equal(torch.cat([whole.new_empty(0), *values]), whole.flatten()[start:stop])


@pytest.mark.parametrize("number", [1, 2, 3, 5, 16])
def test_shares_are_the_boxes_and_about_equally_large(number):
    sizes, row_bytes = [(7, 3), (1, 16), (40, 2), (3, 1)], 64
    boxes = [StateBox(f"t{i}", 5, 0, torch.rand(size)) for i, size in enumerate(sizes)]
    shares = [list(_share(boxes, number, index)) for index in range(number)]
    found = {box.key: torch.full_like(box.values, torch.nan) for box in boxes}
    for share in shares:
        for key, row, col, values in share:
            assert col == 0 and found[key][row - 5 : row - 5 + len(values)].isnan().all(), "twice"
            found[key][row - 5 : row - 5 + len(values)] = values
    assert all(torch.equal(found[box.key], box.values) for box in boxes)
    total = [sum(box.values.nbytes for box in share) for share in shares]
    assert max(total) - min(total) <= 2 * row_bytes
