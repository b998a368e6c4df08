import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.algo.alignment import IGNORE_INDEX, align_values, next_token_targets, shift_left, shift_right

LENGTHS = st.lists(st.integers(0, 5), max_size=7)


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()], dtype=torch.int32)


def oracle_values(output, lengths):
    values, bootstrap, start = [], [], 0
    for n in lengths:
        own = output[start : start + n]
        values += [0.0, *own[:-1]] if n else []
        bootstrap.append(own[-1] if n else 0.0)
        start += n
    return values, bootstrap


def check_values(lengths, align):
    output = torch.arange(1.0, sum(lengths) + 1)
    value, bootstrap = align(output, offsets(lengths))
    assert (value.tolist(), bootstrap.tolist()) == oracle_values(output.tolist(), lengths)


@given(LENGTHS)
def test_values_stand_one_token_to_the_right(lengths):
    check_values(lengths, align_values)


@given(LENGTHS)
def test_targets_are_the_next_token_of_the_same_sequence(lengths):
    tokens = torch.arange(100, 100 + sum(lengths))
    want, start = [], 100
    for n in lengths:
        want += [*range(start + 1, start + n), IGNORE_INDEX] if n else []
        start += n
    assert next_token_targets(tokens, offsets(lengths)).tolist() == want


@given(LENGTHS, st.integers(0, 3))
def test_rows_of_a_token_stand_at_the_output_about_it(lengths, width):
    """Fields of several numbers per token, as they are and as the targets of the first column are."""
    tokens = torch.arange(100, 100 + sum(lengths))
    rows = tokens[:, None] * 10 + torch.arange(width)
    shifted = shift_left(rows, offsets(lengths), -1)
    targets = next_token_targets(tokens, offsets(lengths))
    want = torch.where((targets == IGNORE_INDEX)[:, None], -1, targets[:, None] * 10 + torch.arange(width))
    assert torch.equal(shifted, want)


@given(LENGTHS)
def test_shift_undoes_next_token_targets(lengths):
    tokens = torch.arange(1, 1 + sum(lengths))
    back = shift_right(next_token_targets(tokens, offsets(lengths)), offsets(lengths))
    first = torch.zeros(sum(lengths), dtype=torch.bool)
    first[[start for start, n in zip(offsets(lengths).tolist(), lengths) if n]] = True
    assert torch.equal(back, torch.where(first, 0, tokens))


def test_gradient_goes_back_to_the_output_and_nan_does_not_cross_sequences():
    output = torch.tensor([1.0, 2.0, torch.nan, 4.0, 5.0], requires_grad=True)
    value, bootstrap = align_values(output, offsets([3, 2]))
    assert value[3] == 0.0
    (value[1:3].sum() * 2 + value[4] + bootstrap[1] * 3).backward()
    assert output.grad.tolist() == [2.0, 2.0, 0.0, 1.0, 3.0]


def no_shift(output, cu_seqlens):
    return output, align_values(output, cu_seqlens)[1]


def roll_over_the_whole_batch(output, cu_seqlens):
    value = output.roll(1)
    value[0] = 0.0
    return value, align_values(output, cu_seqlens)[1]


@pytest.mark.parametrize("broken", [no_shift, roll_over_the_whole_batch])
def test_a_missing_shift_is_noticed(broken):
    with pytest.raises(AssertionError):
        check_values([3, 2], broken)
