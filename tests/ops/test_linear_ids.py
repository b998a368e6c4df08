"""Log-probs of several ids of a token, against softmax over the whole vocabulary. Shards: tests/trainer/test_supervised.py."""

import pytest
import torch

from megappo.ops import linear_ids
from megappo.ops.linear_ids import linear_logprobs_at
from megappo.ops.linear_logprob import LinearOptions

VOCAB, PADDED, TEMPERATURE = 20, 23, 0.7


def inputs(dtype):
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(dtype) for n in (7, PADDED))
    return hidden, weight / 2, torch.randint(0, VOCAB, (7, 5), generator=generator), torch.randn(7, 5, generator=generator)


def run(hidden, weight, ids, upstream, **options):
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    how = LinearOptions(vocab_start=0, num_valid=VOCAB, temperature=TEMPERATURE, want_entropy=False, **options)
    found = linear_logprobs_at(hidden, weight, ids, None, how)
    (found * upstream).sum().backward()
    return found.detach(), hidden.grad, weight.grad


def by_definition(hidden, weight, ids, upstream, dtype):
    hidden, weight = (x.detach().clone().to(dtype).requires_grad_() for x in (hidden, weight))
    found = torch.log_softmax(hidden @ weight[:VOCAB].t() / TEMPERATURE, -1).gather(1, ids)
    (found.double() * upstream).sum().backward()
    return found.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_they_are_those_of_the_softmax_with_its_gradients(dtype, block, monkeypatch):
    monkeypatch.setitem(linear_ids.BLOCK_BYTES, "cpu", block)
    given = inputs(dtype)
    exact, plain = by_definition(*given, torch.float64), by_definition(*given, dtype)
    for name, found, right, rounded in zip(("log-probs", "hidden", "weight"), run(*given), exact, plain):
        bound = 2 * float((rounded.double() - right).abs().max()) + 1e-6
        assert float((found.double() - right).abs().max()) <= bound, name
    shifted = run(given[0], given[1], (given[2] + 1) % VOCAB, given[3])
    assert all(float((found.double() - right).abs().max()) > 0.1 for found, right in zip(shifted, exact)), "other ids"


def test_the_weights_gradient_is_added_to_its_accumulator():
    hidden, weight, ids, upstream = inputs(torch.float32)
    _, of_hidden, of_weight = run(hidden, weight, ids, upstream)
    leaf, hidden = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    leaf.main_grad = torch.ones_like(weight)
    how = LinearOptions(0, VOCAB, temperature=TEMPERATURE, want_entropy=False, into_main_grad=True)
    (linear_logprobs_at(hidden, leaf, ids, None, how) * upstream).sum().backward()
    torch.testing.assert_close(leaf.main_grad, of_weight + 1.0)
    torch.testing.assert_close(hidden.grad, of_hidden)
    assert leaf.grad_added_to_main_grad
