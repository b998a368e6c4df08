"""Restriction of the vocabulary to the ids that the sampler kept, on one rank."""

import pytest
import torch

from tests.ops.linear_calls import linear_logprob
from tests.ops.test_linear_logprob import problem
from tests.ops.vocab_oracle import IGNORE, forward_tolerance, oracle

VOCAB = 50


def keep_some(target, num_top_k_ids=7, seed=3):
    """[T, K + 2]: distinct ids with the target among them, gaps of -1, and every fifth row unrestricted."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(target.shape[0], VOCAB, generator=generator).argsort(1)[:, :num_top_k_ids]
    kept[:, 2] = torch.where(target == IGNORE, kept[:, 2], target)
    kept = torch.cat((kept[:, :3], torch.full((target.shape[0], 2), -1), kept[:, 3:]), 1)
    kept[::5] = -1
    return kept


def restricted(logits, kept):
    """fp64 logits of the vocabulary, -inf outside the listed ids, built row by row."""
    out = logits.double().clone()
    for row, ids in enumerate(kept.tolist()):
        listed = [i for i in ids if i >= 0]
        if listed:
            out[row, [i for i in range(VOCAB) if i not in listed]] = -torch.inf
    return out


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_kept_ids_have_probability_and_gradient(dtype):
    h, w, target, g_lp, g_h = problem()
    kept = keep_some(target)
    logits = (h @ w.t()).detach()
    where = {"vocab_start": 0, "num_valid": VOCAB, "temperature": 0.8, "kept": kept.to(dtype)}
    logprob, entropy = linear_logprob(h, w, target, None, chunk_tokens=10, **where)
    (logprob * g_lp + entropy * g_h).sum().backward()

    allowed = restricted(logits[:, :VOCAB], kept)
    want = oracle(allowed, target, 0.8, g_lp, g_h)
    dlogits = want.dlogits.nan_to_num(0.0)
    tolerance = forward_tolerance(logits, 0.8)
    torch.testing.assert_close(logprob.detach().double(), want.logprob, rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy.detach().double(), want.entropy, rtol=4e-6, atol=8 * tolerance)
    w64 = w.detach().double()[:VOCAB]
    torch.testing.assert_close(h.grad.double(), dlogits @ w64, rtol=0, atol=32 * tolerance)
    torch.testing.assert_close(w.grad[:VOCAB].double(), dlogits.t() @ h.detach().double(), rtol=0, atol=32 * tolerance)


def test_rows_without_entries_are_as_without_kept():
    h, w, target, _, _ = problem()
    where = {"vocab_start": 0, "num_valid": VOCAB}
    nothing = torch.full((37, 3), -1)
    for kept in (nothing, nothing[:, :0]):
        for got, want in zip(linear_logprob(h, w, target, None, kept=kept, **where), linear_logprob(h, w, target, None, **where)):
            assert torch.equal(got, want)


def test_listing_the_whole_vocabulary_restricts_nothing():
    h, w, target, _, _ = problem()
    where = {"vocab_start": 0, "num_valid": VOCAB}
    everything = torch.arange(VOCAB).expand(37, -1)
    listed, plain = (linear_logprob(h, w, target, None, kept=kept, **where) for kept in (everything, None))
    for got, want in zip(listed, plain):
        assert torch.equal(got, want)


def test_a_target_outside_its_kept_ids_is_named():
    h, w, _, _, _ = problem(3)
    kept = torch.tensor([[1, 2], [4, -1], [-1, -1]])
    with pytest.raises(ValueError, match="target 3 of token 1 is .*not among its kept ids"):
        linear_logprob(h, w, torch.tensor([1, 3, 9]), None, vocab_start=0, num_valid=VOCAB, kept=kept)


@pytest.mark.parametrize("kept", [torch.zeros(2, 4, dtype=torch.long), torch.zeros(3, dtype=torch.long), torch.zeros(3, 4)])
def test_kept_of_another_shape_or_type_is_refused(kept):
    h, w, _, _, _ = problem(3)
    with pytest.raises(ValueError, match=r"kept .*want int32 or int64 ids \[3, K\]"):
        linear_logprob(h, w, torch.tensor([1, 3, 9]), None, vocab_start=0, num_valid=VOCAB, kept=kept)
