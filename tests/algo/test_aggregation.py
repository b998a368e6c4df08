import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.algo.aggregation import AGGREGATIONS, sums_per_sequence, token_weights, tokens_per_sequence

MASKS = st.lists(st.lists(st.booleans(), max_size=6), max_size=6)


def packed(masks):
    flat = torch.tensor([x for m in masks for x in m], dtype=torch.bool)
    return flat, torch.tensor([0, *torch.tensor([len(m) for m in masks], dtype=torch.long).cumsum(0).tolist()], dtype=torch.int32)


def oracle(mode, losses, masks, max_tokens):
    """Loss by its definition, from lists of lists."""
    kept = [[x for x, keep in zip(values, mask) if keep] for values, mask in zip(losses, masks)]
    kept = [values for values in kept if values]
    if not kept:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, kept)) / sum(map(len, kept))
    if mode == "seq-mean-token-mean":
        return sum(sum(v) / len(v) for v in kept) / len(kept)
    return sum(map(sum, kept)) / len(kept) / (max_tokens if mode == "fixed-length" else 1)


def losses_like(masks):
    values = iter(range(1, 1000))
    return [[float(next(values)) for _ in m] for m in masks]


@given(MASKS, st.sampled_from(AGGREGATIONS))
def test_weights_and_count_give_the_definition(masks, mode):
    mask, cu = packed(masks)
    losses = losses_like(masks)
    weight, count = token_weights(mode, mask, cu, max_tokens=7)
    got = float((weight.double() * torch.tensor([x for v in losses for x in v], dtype=torch.float64)).sum() / max(count, 1.0))
    assert got == pytest.approx(oracle(mode, losses, masks, 7), rel=1e-6)


@given(MASKS, st.integers(0, 6), st.sampled_from(AGGREGATIONS))
def test_a_split_into_micro_batches_changes_nothing(masks, at, mode):
    whole = token_weights(mode, *packed(masks), max_tokens=7)
    parts = [token_weights(mode, *packed(part), max_tokens=7) for part in (masks[:at], masks[at:])]
    assert torch.equal(torch.cat([p.weight for p in parts]), whole.weight)
    assert float(sum(p.count for p in parts)) == float(whole.count)


def test_mean_of_micro_batch_means_is_another_number():
    masks = [[True], [True] * 5]
    losses = losses_like(masks)
    means = [oracle("token-mean", losses[i : i + 1], masks[i : i + 1], 7) for i in range(2)]
    assert sum(means) / 2 != pytest.approx(oracle("token-mean", losses, masks, 7))


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("long", [1, 2048], ids=["one by one", "running"])
def test_sums_per_sequence_go_on_over_chunks(monkeypatch, chunk, long):
    monkeypatch.setattr("megappo.algo.aggregation.TOKENS", chunk)
    monkeypatch.setattr("megappo.algo.aggregation.LONG", long)
    values, cu = torch.arange(1.0, 10.0), torch.tensor([0, 0, 2, 2, 7, 9, 9], dtype=torch.int32)
    found = sums_per_sequence(values, cu, torch.float64)
    assert found.dtype == torch.float64 and found.tolist() == [0.0, 3.0, 0.0, 25.0, 17.0, 0.0]


def test_tokens_per_sequence_counts_empty_ones():
    mask, cu = packed([[], [True, False, True], [], [False]])
    assert tokens_per_sequence(mask, cu).tolist() == [0, 2, 0, 0]


@pytest.mark.parametrize("mode,text", [("mean", "token-mean, seq-mean"), ("fixed-length", "max_tokens")])
def test_wrong_modes_are_named(mode, text):
    with pytest.raises(ValueError, match=text):
        token_weights(mode, torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]))
