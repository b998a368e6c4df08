"""`token_advantages` over long batches, at borders of tiles, by every instruction set and number of threads, and with cu_seqlens
that is not sound."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from csrc.build import isas
from megappo.ops import advantages as op
from megappo.ops import dispatch
from megappo.ops.advantages import Discount, Rewards
from tests.ops.advantages_oracle import SMALL_TILES, batch, check, rewards_batch, token_advantages, with_tokens

INTERPRETED_WITH = SMALL_TILES


def tile_of(kernels_name):
    """Tokens of a tile, in C++ of a block."""
    if kernels_name.startswith("triton"):
        return importlib.import_module("megappo.ops.triton.advantages").BLOCK
    return 2048 if kernels_name.startswith("cuda") else 256


def size_for(kernels_name):
    """Tokens over every border the implementation has: 4 tiles carried at once in the tests' Triton kernels, groups of 32 tiles in
    CUDA, tasks of 16384 tokens in C++."""
    tiles = {"triton": 9, "cuda_on_cpu": 65}.get(kernels_name)
    return tiles * tile_of(kernels_name) + 5 if tiles else 131072


def test_one_long_sequence(kernels, request):
    """The returns add up rewards without decay, the advantages forget them."""
    total = size_for(request.node.callspec.params["kernels"])
    for inputs in (batch([total]), rewards_batch([total])):
        check(kernels, inputs, gamma=1.0, lam_policy=0.98, lam_value=1.0)


def test_borders_of_sequences_around_borders_of_tiles(kernels, request):
    tile = tile_of(request.node.callspec.params["kernels"])
    lengths = [tile - 1, 1, 1, tile, tile - 2, 3, 2 * tile, tile + 1, 0, 0, 7]
    inputs = batch(lengths, mask="mixed")
    check(kernels, inputs)
    check(kernels, with_tokens(inputs))


def test_the_scan_is_more_exact_than_fp32():
    inputs = rewards_batch([8192], mask="all")
    _, exact, _, _ = check("cpu", inputs, gamma=1.0, lam_policy=1.0)
    delta = inputs["token_reward"] + torch.cat((inputs["value"][1:], inputs["bootstrap"])) - inputs["value"]
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
    rewards = Rewards(value, None, torch.zeros(len(cu) - 1), reward)
    with dispatch.using("cpp"):
        _, advantage, returns, moments = op.token_advantages(rewards, value, mask, cu, None, Discount(1.0, 1.0, 1.0))
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
        "import sys, torch; from tests.ops.advantages_oracle import token_advantages as f; from megappo.ops.dispatch import using\n"
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


def test_unsound_borders_give_nan_where_looking_would_wait(kernels, request):
    """The op itself: the public function refuses them on the CPU."""
    reward, value = torch.randn(2, 8, device=kernels)
    mask = torch.ones(8, dtype=torch.bool, device=kernels)
    for cu in UNSOUND:
        per_sequence = torch.zeros(len(cu) - 1, device=kernels)
        borders, lam = torch.tensor(cu, dtype=torch.int32, device=kernels), per_sequence.double()
        shared = per_sequence, value, mask, borders, per_sequence, 0.9, 0.9, 0.8, None, lam, "k1", 0.1
        for call in ((reward, value, *shared, None, None, None, None), (reward, None, *shared, reward, mask, None, None)):
            if request.node.callspec.params["kernels"] == "cpp":
                with pytest.raises(RuntimeError, match="cu_seqlens must go from 0"):
                    torch.ops.megappo.token_advantages(*call)
            else:
                assert all(x.isnan().all() for x in torch.ops.megappo.token_advantages(*call)), cu
