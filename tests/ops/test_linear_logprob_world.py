"""Two and four tensor-parallel ranks over gloo: same bits on all, the oracle's values, one collective, gradients summed."""

import pytest
import torch
import torch.distributed as dist

from tests.ops.linear_calls import linear_logprob
from tests.ops.test_linear_logprob import linear_oracle, problem
from tests.ops.test_linear_loss import clipped_linear_loss, fields, two_steps
from tests.ops.test_top_k_ids import keep_some
from tests.ops.vocab_oracle import cut, oracle, shard_columns
from tests.worlds import spawn_world

VOCAB, TOKENS = 50, 40
CUTS = {
    2: {
        "even": cut(VOCAB, 25, 25),
        "uneven, padded": cut(VOCAB, 17, 33, padding=5),
        "pad-only shard": cut(VOCAB, 50, 0, padding=8),
    },
    4: {
        "even": cut(VOCAB, 13, 13, 12, 12),
        "uneven, padded": cut(VOCAB, 17, 5, 20, 8, padding=5),
        "pad-only shards": cut(VOCAB, 30, 20, 0, 0, padding=8),
    },
}
TEMPERATURE = 0.8
BONUS = 0.01
LINEAR = [(kind, sequence_parallel) for kind in ("linear", "kept", "ppo") for sequence_parallel in (False, True)]


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


def from_hidden(kind, h, w, target, group, where, g_lp, g_h):
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    with CountCollectives() as forward:
        if kind == "ppo":
            result = clipped_linear_loss(h, w, target, *fields(target), group, entropy_coef=BONUS, **where)
            tokens, loss = (result.logprob, result.entropy, result.loss.detach()), result.loss
            metrics = result.metrics
        else:
            logprob, entropy = linear_logprob(h, w, target, group, **where)
            tokens, loss = (logprob.detach(), entropy.detach()), (logprob * g_lp + entropy * g_h).sum()
            metrics = {}
    with CountCollectives() as backward:
        loss.backward()
    return {"tokens": tokens, "dhidden": h.grad, "dweight": w.grad, "calls": (forward.calls, backward.calls), "metrics": metrics}


def on_rank(rank, world_size):
    group = dist.new_group(list(range(world_size)))
    h, w, target, g_lp, g_h = (x.detach() for x in problem(TOKENS, VOCAB, padding=0))
    results = {}
    for name, shards in CUTS[world_size].items():
        shard = shards[rank]
        where = {"vocab_start": shard.start, "num_valid": shard.num_valid, "temperature": TEMPERATURE}
        own = shard_columns(w.t(), shard, junk=50.0).t().contiguous()
        for kind, sequence_parallel in LINEAR:
            rows = h.chunk(world_size)[rank] if sequence_parallel else h
            options = {**where, "sequence_parallel": sequence_parallel, "chunk_tokens": TOKENS if kind == "ppo" else 16}
            if kind == "kept":
                options["kept"] = keep_some(target)
            results[name, kind, sequence_parallel] = from_hidden(kind, rows, own, target, group, options, g_lp, g_h)
        if name == "even":
            # more chunks than one: as many gathers on the rank with the wide shard as on the others
            split = from_hidden("ppo", h, own, target, group, {**where, "chunk_tokens": 7}, g_lp, g_h)
            results["ppo in chunks"] = split
    outside = target.clamp(min=0) + VOCAB
    try:
        linear_logprob(h, w[:8], outside, group, vocab_start=8 * rank, num_valid=8)
    except ValueError as error:
        results["error"] = str(error)
    return results


@pytest.fixture(scope="module", params=[2, 4])
def world(request):
    return spawn_world(on_rank, request.param, request.param, timeout_s=180.0)


def cuts(world):
    return CUTS[len(world)].items()


@pytest.fixture(scope="module")
def truth():
    """kind -> (log-prob, entropy, dlogits, dhidden, dweight) of the whole vocabulary in fp64."""
    h, w, target, g_lp, g_h = problem(TOKENS, VOCAB, padding=0)
    answer, dh, dw = linear_oracle(h, w, target, VOCAB, TEMPERATURE, g_lp, g_h)
    whole = {"linear": (answer.logprob, answer.entropy, answer.dlogits, dh, dw)}

    logits = h.detach().double() @ w.detach().double().t()
    for row, ids in enumerate(keep_some(target).tolist()):
        listed = [i for i in ids if i >= 0]
        if listed:
            logits[row, [i for i in range(VOCAB) if i not in listed]] = -torch.inf
    kept = oracle(logits, target, TEMPERATURE, g_lp, g_h)
    d = kept.dlogits.nan_to_num(0.0)
    whole["kept"] = (kept.logprob, kept.entropy, d, d @ w.detach().double(), d.t() @ h.detach().double())

    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    where = {"vocab_start": 0, "num_valid": VOCAB, "temperature": TEMPERATURE}
    loss, logprob, entropy, metrics = two_steps(h64, w64, target, *(x.double() for x in fields(target)), BONUS, **where)
    dh, dw = torch.autograd.grad(loss, (h64, w64))
    whole["ppo"] = (logprob.detach(), entropy.detach(), None, dh, dw)
    whole["ppo loss"] = (loss.detach(), {name: value.detach() for name, value in metrics.items()})
    return whole


def close(got, want, atol):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", LINEAR)
def test_ranks_agree_bitwise_and_match_the_oracle(world, truth, kind):
    want = truth[kind[0]]
    for name, _ in cuts(world):
        first, *others = (results[name, *kind]["tokens"] for results in world)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other))
        close(first[0], want[0], 6e-6)
        close(first[1], want[1], 2e-5)


def check_dhidden(world, truth, name, kind):
    want = truth[kind][3]
    close(torch.cat([results[name, kind, True]["dhidden"] for results in world]), want, 6e-5)
    for results in world:
        close(results[name, kind, False]["dhidden"], want, 6e-5)


@pytest.mark.parametrize("kind", ["linear", "kept", "ppo"])
def test_hidden_gradient_is_summed_over_the_shards(world, truth, kind):
    for name, _ in cuts(world):
        check_dhidden(world, truth, name, kind)


def test_a_hidden_gradient_that_is_not_summed_would_be_noticed(world, truth):
    w = problem(TOKENS, VOCAB, padding=0)[1].detach().double()
    partial = truth["linear"][2][:, :13] @ w[:13]
    broken = [{**results, ("even", "linear", False): {"dhidden": partial}} for results in world]
    with pytest.raises(AssertionError):
        check_dhidden(broken, truth, "even", "linear")


@pytest.mark.parametrize("kind,sequence_parallel", LINEAR)
def test_weight_gradient_is_that_of_the_shard(world, truth, kind, sequence_parallel):
    for name, shards in cuts(world):
        for results, shard in zip(world, shards):
            close(results[name, kind, sequence_parallel]["dweight"], shard_columns(truth[kind][4].t(), shard).t(), 6e-5)


def test_ppo_loss_and_metrics_are_the_same_on_every_rank(world, truth):
    want, metrics = truth["ppo loss"]
    for name, _ in cuts(world):
        for results in world:
            found = results[name, "ppo", True]
            close(found["tokens"][2], want, 2e-5)
            assert found["metrics"].keys() == metrics.keys()
            for key, value in metrics.items():
                torch.testing.assert_close(found["metrics"][key].double(), value.double(), rtol=1e-5, atol=1e-5)
                assert torch.equal(found["metrics"][key], world[0][name, "ppo", True]["metrics"][key])


def test_ppo_in_several_chunks_gives_the_same(world, truth):
    for results in world:
        close(results["ppo in chunks"]["tokens"][2], truth["ppo loss"][0], 2e-5)
        close(results["ppo in chunks"]["dhidden"], truth["ppo"][3], 6e-5)
        gathers = -(-TOKENS // 7)
        assert results["ppo in chunks"]["calls"] == (["all_gather_into_tensor"] * gathers + ["all_reduce"], [])


def test_one_collective_for_the_log_probs(world):
    gather, two = ["all_gather_into_tensor"], ["all_gather_into_tensor"] * 2
    for results in world:
        for name, _ in cuts(world):
            assert results[name, "linear", False]["calls"] == (gather, ["all_reduce"])
            # the hidden states besides, in the backward again
            assert results[name, "linear", True]["calls"] == (two, [*gather, "reduce_scatter_tensor"])
            assert results[name, "ppo", False]["calls"] == ([*gather, "all_reduce"], [])
            assert results[name, "ppo", True]["calls"] == ([*two, "reduce_scatter_tensor"], [])


def test_a_target_outside_the_vocabulary_raises_on_all_ranks(world):
    assert len({results["error"] for results in world}) == 1 and "outside the vocabulary" in world[0]["error"]


def test_the_oracle_itself_depends_on_temperature():
    h, w, target, g_lp, g_h = problem(TOKENS, VOCAB, padding=0)
    logits = h.detach() @ w.detach().t()
    plain, scaled = (oracle(logits, target, t, g_lp, g_h).logprob for t in (1.0, TEMPERATURE))
    assert not torch.allclose(plain, scaled)
