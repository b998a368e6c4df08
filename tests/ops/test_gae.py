"""`gae`: padded input, episodes that end inside a sequence, long batches and borders of tiles, cu_seqlens that is not sound."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csrc.build import isas
from megappo.ops import dispatch
from megappo.ops.advantages import gae, token_advantages
from megappo.ops.whiten import whiten_apply
from tests.ops.advantages_oracle import (
    assert_moments,
    assert_rounded,
    batch,
    examples,
    gae_batch,
    lists,
    on,
    oracle,
    per_sequence,
)

NUMBERS = {"gamma": 0.98, "lam_policy": 0.9, "lam_value": 0.97}


def check(device, inputs, done=None, gamma=0.98, lam_policy=0.9, lam_value=0.97, call=gae):
    got = call(**on(device, inputs), **on(device, {"done": done, "lam_policy": lam_policy, "lam_value": lam_value}), gamma=gamma)
    advantage, returns, moments = (x.cpu() for x in got)
    count = inputs["cu_seqlens"].numel() - 1
    lams = per_sequence(lam_policy, count), per_sequence(lam_value, count)
    want = oracle(*lists(*inputs.values(), done), gamma, *lams)
    assert_rounded(advantage, want[0], inputs["response_mask"], "advantage")
    assert_rounded(returns, want[1], inputs["response_mask"], "returns")
    assert_moments(moments, advantage, inputs["response_mask"])
    return advantage, returns, moments


def some_done(total, seed, share=0.2):
    return torch.rand(total, generator=torch.Generator().manual_seed(seed)) < share


def test_any_lengths_masks_and_episodes(kernels, request):
    @settings(max_examples=examples(request), deadline=None)
    @given(
        st.lists(st.integers(0, 60), max_size=5),
        st.integers(0, 10**6),
        st.booleans(),
        st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        st.floats(0, 1),
        st.floats(0, 1),
    )
    def run(lengths, seed, with_bootstrap, share, gamma, lam_policy):
        inputs = gae_batch(lengths, seed, "mixed")
        if not with_bootstrap:
            inputs["bootstrap"] = None
        check(kernels, inputs, some_done(sum(lengths), seed, share), gamma=gamma, lam_policy=lam_policy)

    run()


@pytest.mark.parametrize("where", ["on a sampled token", "on a masked token", "on the last token", "behind the last sampled token"])
def test_an_episode_that_ends_lets_nothing_back(kernels, where):
    inputs = gae_batch([40], mask="all")
    inputs["response_mask"][20] = inputs["response_mask"][38:] = False
    at = {"on a sampled token": 19, "on a masked token": 20, "on the last token": 39, "behind the last sampled token": 38}[where]
    done = torch.arange(40) == at
    advantage, _, _ = check(kernels, inputs, done)
    # whatever comes after the end changes nothing before it
    behind = torch.arange(40) > at
    changed = {**inputs, "bootstrap": inputs["bootstrap"] + torch.nan}
    for name in ("reward", "value"):
        changed[name] = torch.where(behind, 1e6, inputs[name])
    again = gae(**on(kernels, changed), done=done.to(kernels), **NUMBERS)[0].cpu()
    assert torch.equal(advantage[: at + 1], again[: at + 1])


def test_no_episode_ends_is_no_done(kernels):
    inputs = on(kernels, gae_batch([40, 3, 0, 25], mask="mixed"))
    never = torch.zeros(68, dtype=torch.bool, device=kernels)
    assert all(torch.equal(a, b) for a, b in zip(gae(**inputs), gae(**inputs, done=never)))


def rows(packed, cu, place, length):
    """[B, length] with each sequence at `place` of its row ("left", "right", "spread") and garbage around it."""
    junk = torch.full((), torch.nan, device=packed.device) if packed.is_floating_point() else packed.new_zeros(())
    out = junk.to(packed.dtype).expand(len(cu) - 1, length).clone()
    for row, start, end in zip(out, cu, cu[1:]):
        at = {
            "left": torch.arange(end - start),
            "right": torch.arange(length - end + start, length),
            "spread": torch.arange(end - start) * (length // max(end - start, 1)),
        }[place]
        row[at] = packed[start:end]
    return out


@pytest.mark.parametrize("place", ["left", "right", "spread"])
def test_packed_equals_padded_bitwise(kernels, place):
    inputs = gae_batch([37, 1, 0, 40, 12], seed=3)
    done = some_done(90, 1, 0.1)
    cu = inputs["cu_seqlens"].tolist()
    packed = gae(**on(kernels, inputs), done=done.to(kernels), **NUMBERS)
    padded = {k: rows(inputs[k], cu, place, 80).to(kernels) for k in ("reward", "value", "response_mask")}
    masked = rows(torch.ones(90, dtype=torch.bool), cu, place, 80)
    advantage, returns, moments = gae(
        **padded, bootstrap=inputs["bootstrap"].to(kernels), done=rows(done, cu, place, 80).to(kernels), **NUMBERS
    )
    assert advantage.shape == returns.shape == (5, 80)
    for got, want in ((advantage, packed[0]), (returns, packed[1])):
        assert torch.equal(got.cpu()[masked], want.cpu()) and not got.cpu()[~masked].any()
    torch.testing.assert_close(moments, packed[2], rtol=1e-12, atol=1e-12)


def test_never_bootstraps_from_a_masked_slot(kernels):
    inputs = gae_batch([6, 30], mask="all")
    inputs["response_mask"][4:6] = inputs["response_mask"][20:] = False
    inputs["bootstrap"] = None
    loud = {**inputs, "value": torch.where(inputs["response_mask"], inputs["value"], 1e30)}
    results = [x.cpu() for x in gae(**on(kernels, loud), **NUMBERS)]
    assert all(torch.equal(a, b) for a, b in zip(check(kernels, inputs), results))
    advantage = results[0]
    assert advantage[3] == inputs["reward"][3] - inputs["value"][3]


def test_whitened_by_its_moments(kernels):
    inputs = on(kernels, gae_batch([60, 90, 2], mask="mixed"))
    advantage, _, moments = gae(**inputs)
    white = whiten_apply(advantage, inputs["response_mask"], moments)[inputs["response_mask"]].double()
    assert abs(float(white.mean())) < 1e-6 and float(white.std()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_no_tokens(kernels, shape):
    x = torch.zeros(shape, device=kernels)
    cu = torch.zeros(3 if len(shape) == 1 else 1, dtype=torch.int32, device=kernels)
    advantage, returns, moments = gae(x, x, x.bool(), cu if len(shape) == 1 else None)
    assert advantage.shape == returns.shape == shape and moments.tolist() == [0.0, 0.0, 0.0]


def size_for(kernels_name):
    """Tokens over every border the implementation has: tiles of 64 and 4 of them carried at once in the tests' Triton kernels,
    tiles of 2048 and groups of 32 of them in CUDA, blocks of 256 and tasks of 16384 in C++."""
    return {"triton": 64 * 9 + 5, "cuda_on_cpu": 2048 * 65 + 5}.get(kernels_name, 131072)


def test_one_long_sequence(kernels, request):
    """The returns add up rewards without decay, the advantages forget them."""
    total = size_for(request.node.callspec.params["kernels"])
    inputs = gae_batch([total])
    check(kernels, inputs, gamma=1.0, lam_policy=0.98, lam_value=1.0)


def test_borders_of_sequences_around_borders_of_tiles(kernels, request):
    tiles = {"triton": 64, "triton on a gpu": 1024, "cuda_on_cpu": 2048, "cuda on a gpu": 2048}
    tile = tiles.get(request.node.callspec.params["kernels"], 256)
    lengths = [tile - 1, 1, 1, tile, tile - 2, 3, 2 * tile, tile + 1, 0, 0, 7]
    inputs = gae_batch(lengths, mask="mixed")
    done = torch.zeros(sum(lengths), dtype=torch.bool)
    check(kernels, inputs, done)
    done[tile - 1 :: tile] = True
    check(kernels, inputs, done)


def test_many_short_sequences_in_a_tile(kernels):
    lengths = [1, 0, 2] * 50
    check(kernels, gae_batch(lengths), lam_policy=torch.linspace(0, 1, len(lengths), dtype=torch.float64))


def test_the_scan_is_more_exact_than_fp32():
    inputs = gae_batch([8192], mask="all")
    exact, _, _ = check("cpu", inputs, gamma=1.0, lam_policy=1.0)
    delta = inputs["reward"] + torch.cat((inputs["value"][1:], inputs["bootstrap"])) - inputs["value"]
    single = torch.from_numpy(np.cumsum(delta.flip(0).numpy(), dtype=np.float32)).flip(0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(single, exact, rtol=2**-23, atol=2**-40 * float(exact.abs().max()))


FOUR_MI = 1 << 22


@pytest.mark.parametrize("length", [FOUR_MI, 1], ids=["one sequence", "sequences of 1"])
def test_four_million_tokens(length):
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, FOUR_MI, generator=generator)
    mask = torch.ones(FOUR_MI, dtype=torch.bool)
    cu = torch.arange(0, FOUR_MI + 1, length)
    with dispatch.using("cpp"):
        advantage, returns, moments = gae(reward, value, mask, cu, gamma=1.0, lam_policy=1.0, lam_value=1.0)
    # at gamma = lambda = 1 the return is the reward still to come
    want = reward.double().flip(0).cumsum(0).flip(0) if length > 1 else reward.double()
    torch.testing.assert_close(returns.double(), want, rtol=1e-7, atol=1e-7 * float(want.abs().max()))
    torch.testing.assert_close(advantage.double(), want - value.double(), rtol=1e-6, atol=1e-7 * float(want.abs().max()))
    assert moments[0] == FOUR_MI


def test_the_number_of_threads_changes_no_bit():
    inputs = batch([30000, 5, 20000, 0, 1, 40000, 60000], seed=1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with dispatch.using("cpp"):
                results.append(token_advantages(**inputs, kl_coef=0.1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def of_instruction_set(isa, inputs, folder):
    """Starts a process that computes with it; returns the process and the file of results."""
    torch.save(inputs, folder / "inputs.pt")
    script = (
        "import sys, torch; from megappo.ops.advantages import token_advantages as f; from megappo.ops.dispatch import using\n"
        "with using('cpp'): torch.save(f(**torch.load(sys.argv[1]), kl_estimator='k3', kl_coef=0.1), sys.argv[2])"
    )
    command = [sys.executable, "-c", script, str(folder / "inputs.pt"), str(folder / isa)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, env={**os.environ, "MEGAPPO_CPU_ISA": isa, "PYTHONPATH": str(root)}), folder / isa


@pytest.mark.slow  # a process each, which imports torch
def test_every_instruction_set_computes_the_same(tmp_path):
    inputs = batch([3000, 0, 5, 700], seed=1)
    with dispatch.using("reference"):
        want = token_advantages(**inputs, kl_estimator="k3", kl_coef=0.1)
    # the last is the one that all other tests run
    for process, file in [of_instruction_set(isa, inputs, tmp_path) for isa in isas()[:-1]]:
        assert process.wait(120) == 0
        for got, expected in zip(torch.load(file), want):
            torch.testing.assert_close(got, expected, rtol=2**-23, atol=2**-40 * float(expected.abs().max()))


UNSOUND = [[1, 5, 8], [0, 5, 9], [0, 5, 7], [0, 7, 3, 8], [0, 9, 8], [-3, 4, 8], [0, 2**30, -(2**30), 8], [8, 5, 0]]


@pytest.mark.parametrize("cu", UNSOUND, ids=str)
def test_unsound_borders_give_nan_where_looking_would_wait(kernels, request, cu):
    """The op itself: the public function refuses them on the CPU."""
    reward, value = torch.randn(2, 8, device=kernels)
    mask = torch.ones(8, dtype=torch.bool, device=kernels)
    per_sequence = torch.zeros(len(cu) - 1, device=kernels)
    borders = torch.tensor(cu, dtype=torch.int32, device=kernels)
    calls = [
        lambda: torch.ops.megappo.gae(reward, value, mask, borders, per_sequence, None, 0.9, 0.9, 0.8, None, per_sequence.double()),
        lambda: torch.ops.megappo.token_advantages(
            reward, value, per_sequence, value, mask, borders, None, 0.9, 0.9, 0.8, None, None, "k1", 0.1, None, None, None, None
        ),
        lambda: torch.ops.megappo.token_advantages(
            reward, None, per_sequence, value, mask, borders, None, 0.9, 0.9, 0.8, None, None, "k1", 0.0, reward, mask, None, None
        ),
    ]
    for call in calls:
        if request.node.callspec.params["kernels"] == "cpp":
            with pytest.raises(RuntimeError, match="cu_seqlens must go from 0"):
                call()
        else:
            assert all(x.isnan().all() for x in call())


def test_compiles_without_a_break():
    padded = {k: v.view(4, 8) for k, v in gae_batch([32]).items() if k in ("reward", "value", "response_mask")}
    done = some_done(32, 0).view(4, 8)
    compiled = torch.compile(lambda **kw: gae(**kw, gamma=0.9), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(**padded, done=done), gae(**padded, done=done, gamma=0.9)))


PADDED = {"reward": torch.zeros(2, 4), "value": torch.zeros(2, 4), "response_mask": torch.ones(2, 4, dtype=torch.bool)}


@pytest.mark.parametrize(
    "change,text",
    [
        ({"value": torch.zeros(8)}, "without cu_seqlens must be .batch, time."),
        ({"reward": torch.zeros(8)}, "reward .8,. has not the shape of value .2, 4."),
        ({"done": torch.zeros(2, dtype=torch.bool)}, "done .2,. has not the shape"),
        ({"done": torch.zeros(2, 4)}, "done must be bool"),
        ({"bootstrap": torch.zeros(3)}, "bootstrap .3,. is not one value for each of 2 sequences"),
        ({"cu_seqlens": torch.tensor([0, 4, 8])}, "value .2, 4. must be .tokens."),
        ({"reward": torch.zeros(2, 4, dtype=torch.long)}, "reward must be floating-point"),
    ],
)
def test_wrong_arguments_are_named(change, text):
    with pytest.raises(ValueError, match=text):
        gae(**{**PADDED, **change})


# ------------------------------------------------------------------------------------------------------- negative controls


def ignores_done(done, **kw):
    return gae(**kw)


def done_stops_only_the_value(done, **kw):
    """The next value is dropped but the accumulated advantage is not: the fault of masking delta alone."""
    stopped = {**kw, "reward": kw["reward"] - torch.where(done, kw["gamma"] * kw["value"].roll(-1), 0.0)}
    return gae(**stopped)


@pytest.mark.parametrize("broken", [ignores_done, done_stops_only_the_value])
def test_an_injected_fault_is_noticed(broken):
    inputs, done = gae_batch([30], mask="all"), torch.arange(30) == 10
    check("cpu", inputs, done)
    with pytest.raises(AssertionError):
        check("cpu", inputs, done, call=broken)
