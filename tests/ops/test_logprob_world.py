"""Two tensor-parallel ranks over gloo: same bits on both, the oracle's values, one collective, gradients summed."""

import pytest
import torch
import torch.distributed as dist

from megappo.ops.logprob import linear_logprob, vocab_parallel_logprob
from tests.ops.test_logprob import linear_oracle, problem
from tests.ops.vocab_oracle import cut, oracle, shard_columns
from tests.worlds import spawn_world

VOCAB, TOKENS = 50, 38
CUTS = {
    "even": cut(VOCAB, 25, 25),
    "uneven, padded": cut(VOCAB, 17, 33, padding=5),
    "pad-only shard": cut(VOCAB, 50, 0, padding=8),
}
TEMPERATURE = 0.8


class CountCollectives:
    """Counts calls of every collective of torch.distributed that this layer could make."""

    names = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_gather", "broadcast")

    def __enter__(self):
        self.calls, self.real = [], {name: getattr(dist, name) for name in self.names}
        for name in self.names:
            setattr(dist, name, self.wrap(name))
        return self

    def wrap(self, name):
        def counted(*args, **kwargs):
            self.calls.append(name)
            return self.real[name](*args, **kwargs)

        return counted

    def __exit__(self, *_):
        for name, function in self.real.items():
            setattr(dist, name, function)


def on_rank(rank):
    group = dist.new_group([0, 1])
    h, w, target, g_lp, g_h = problem(TOKENS, VOCAB, padding=0)
    h, w = h.detach(), w.detach()
    results = {}
    for name, shards in CUTS.items():
        shard = shards[rank]
        where = {"vocab_start": shard.start, "num_valid": shard.num_valid, "temperature": TEMPERATURE}

        logits = shard_columns(h @ w.t(), shard, junk=50.0).requires_grad_()
        with CountCollectives() as forward:
            logprob, entropy = vocab_parallel_logprob(logits, target, group, **where)
        with CountCollectives() as backward:
            (logprob * g_lp + entropy * g_h).sum().backward()
        results[name, "logits"] = (logprob.detach(), entropy.detach(), logits.grad, forward.calls, backward.calls)

        own = shard_columns(w.t(), shard, junk=50.0).t().contiguous()
        for sequence_parallel in (False, True):
            local_h = (h.chunk(2)[rank] if sequence_parallel else h).clone().requires_grad_()
            local_w = own.clone().requires_grad_()
            with CountCollectives() as forward:
                logprob, entropy = linear_logprob(
                    local_h, local_w, target, group, sequence_parallel=sequence_parallel, chunk_tokens=16, **where
                )
            (logprob * g_lp + entropy * g_h).sum().backward()
            results[name, "linear", sequence_parallel] = (
                logprob.detach(), entropy.detach(), local_h.grad, local_w.grad, forward.calls
            )
    try:
        vocab_parallel_logprob(torch.zeros(TOKENS, 25), target.clamp(min=0) + VOCAB, group, vocab_start=25 * rank, num_valid=25)
    except ValueError as error:
        results["error"] = str(error)
    return results


@pytest.fixture(scope="module")
def world():
    return spawn_world(on_rank, 2, timeout_s=60.0)


@pytest.fixture(scope="module")
def truth():
    h, w, target, g_lp, g_h = problem(TOKENS, VOCAB, padding=0)
    return linear_oracle(h, w, target, VOCAB, TEMPERATURE, g_lp, g_h)


CASES = [(name, kind) for name in CUTS for kind in (("logits",), ("linear", False), ("linear", True))]


@pytest.mark.parametrize("name,kind", CASES)
def test_ranks_agree_bitwise_and_match_the_oracle(world, truth, name, kind):
    (lp0, h0, *_), (lp1, h1, *_) = (results[name, *kind] for results in world)
    assert torch.equal(lp0, lp1) and torch.equal(h0, h1)
    torch.testing.assert_close(lp0.double(), truth[0].logprob, rtol=0, atol=6e-6)
    torch.testing.assert_close(h0.double(), truth[0].entropy, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CUTS)
def test_every_rank_has_the_gradient_of_its_columns(world, truth, name):
    for rank, shard in enumerate(CUTS[name]):
        grad = world[rank][name, "logits"][2]
        torch.testing.assert_close(grad.double(), shard_columns(truth[0].dlogits, shard), rtol=0, atol=2e-5)
        assert not grad[:, shard.num_valid :].any()


def check_dhidden(world, truth, name, gather):
    full = gather([results[name, "linear", True][2] for results in world])
    torch.testing.assert_close(full.double(), truth[1], rtol=0, atol=6e-5)
    for results in world:
        torch.testing.assert_close(results[name, "linear", False][2].double(), truth[1], rtol=0, atol=6e-5)


@pytest.mark.parametrize("name", CUTS)
def test_hidden_gradient_is_summed_over_the_shards(world, truth, name):
    check_dhidden(world, truth, name, torch.cat)


def test_a_hidden_gradient_that_is_not_summed_would_be_noticed(world, truth):
    h, w, target, g_lp, g_h = problem(TOKENS, VOCAB, padding=0)
    partial = truth[0].dlogits[:, :25] @ w.detach().double()[:25]
    broken = [{**results, ("even", "linear", False): (None, None, partial)} for results in world]
    with pytest.raises(AssertionError):
        check_dhidden(broken, truth, "even", torch.cat)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_gradient_is_that_of_the_shard(world, truth, name, sequence_parallel):
    for rank, shard in enumerate(CUTS[name]):
        want = shard_columns(truth[2].t(), shard).t()
        torch.testing.assert_close(world[rank][name, "linear", sequence_parallel][3].double(), want, rtol=0, atol=6e-5)


def test_one_collective_forward_and_none_backward(world):
    for results in world:
        for name in CUTS:
            assert results[name, "logits"][3:] == (["all_gather_into_tensor"], [])
            assert results[name, "linear", False][4] == ["all_gather_into_tensor"]
            assert results[name, "linear", True][4] == ["all_gather_into_tensor"] * 2  # the hidden states, and the statistics


def test_a_target_outside_the_vocabulary_raises_on_all_ranks(world):
    assert world[0]["error"] == world[1]["error"] and "outside the vocabulary" in world[0]["error"]


def test_the_oracle_itself_depends_on_temperature():
    h, w, target, g_lp, g_h = problem(TOKENS, VOCAB, padding=0)
    logits = h.detach() @ w.detach().t()
    plain, scaled = (oracle(logits, target, t, g_lp, g_h).logprob for t in (1.0, TEMPERATURE))
    assert not torch.allclose(plain, scaled)
