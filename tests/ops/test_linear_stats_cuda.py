"""The WGMMA kernel of linear statistics (csrc/linear_stats) against fp64: on the CPU, where cuda_on_cpu/hopper.h plays Hopper's
copies, barriers and matrix products, and, marked gpu, on a Hopper GPU.

The emulated machine has two clusters, so that 513 tokens (3 pairs of token tiles) take several rounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.ops import dispatch, implementations
from megappo.ops.cuda import linear_stats as cuda_linear_stats
from megappo.ops.linear_blocks import LinearLogits
from megappo.ops.vocab_stats import Upstream

IGNORE = -100
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Kernel:
    native: Any
    device: torch.device

    @property
    def op(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self.native.linear_stats_wgmma

    @property
    def dlogits(self) -> Callable[..., Tensor]:
        return self.native.linear_dlogits_wgmma


@pytest.fixture(params=["cuda_on_cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "gpu":
        dispatch.implementation("vocab_stats", (torch.empty(1, 1, device="cuda"),))  # loads the library
        return Kernel(torch.ops.megappo_native, torch.device("cuda"))
    namespace = getattr(torch.ops, request.getfixturevalue("cuda_on_cpu"))
    return Kernel(namespace, torch.device("cpu"))


@dataclass
class Problem:
    hidden: Tensor
    weight: Tensor
    target: Tensor
    vocab_start: int
    num_valid: int
    inv_temp: float = 1.0
    row_inv_temp: Tensor | None = None
    bf16_logits: bool = False

    def run(self, kernel: Kernel, want_entropy: bool = True, invariant: bool = False) -> Tensor:
        return self.run_keeping(kernel, False, want_entropy, invariant)[0]

    def run_keeping(
        self, kernel: Kernel, keep_logits: bool = True, want_entropy: bool = True, invariant: bool = False
    ) -> tuple[Tensor, Tensor]:
        tensors = [x.to(kernel.device) for x in (self.hidden, self.weight, self.target)]
        rows = None if self.row_inv_temp is None else self.row_inv_temp.to(kernel.device)
        scale = self.vocab_start, self.num_valid, self.inv_temp, rows
        stats, logits = kernel.op(*tensors, *scale, IGNORE, want_entropy, self.bf16_logits, keep_logits, invariant)
        return stats.cpu(), logits.cpu()

    def gradient(self, kernel: Kernel, *upstream: Tensor | None) -> Tensor:
        """dlogits [T, num_valid]. upstream: lse, entropy, g_logprob, g_entropy."""
        tensors = [self.hidden, self.weight[: self.num_valid], self.target, *upstream]
        inputs = [None if x is None else x.to(kernel.device) for x in tensors]
        rows = None if self.row_inv_temp is None else self.row_inv_temp.to(kernel.device)
        return kernel.dlogits(*inputs, self.vocab_start, self.inv_temp, rows, IGNORE, self.bf16_logits).cpu()

    def scaled_logits(self) -> Tensor:
        x = self.hidden.double() @ self.weight[: self.num_valid].double().t()
        if self.bf16_logits:
            x = x.to(BF16).double()
        return x * (self.inv_temp if self.row_inv_temp is None else self.row_inv_temp.double()[:, None])


def problem(num_tokens: int, hidden_size: int, vocab: int, num_valid: int, vocab_start: int = 0, seed: int = 0) -> Problem:
    """Logits of deviation 3; targets in and around the shard; rows of padding that would be noticed."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=g).to(BF16)
    weight = (torch.randn(vocab, hidden_size, generator=g) * 3 / math.sqrt(hidden_size)).to(BF16)
    weight[num_valid:] = torch.nan
    target = torch.randint(vocab_start - 9, vocab_start + vocab + 9, (num_tokens,), generator=g)
    target[::7] = IGNORE
    return Problem(hidden, weight, target, vocab_start, num_valid)


def oracle(p: Problem) -> Tensor:
    """[T, 4] fp64."""
    x = p.scaled_logits()
    m = x.amax(1)
    d = x - m.masked_fill(m == -torch.inf, 0.0)[:, None]
    e = d.exp()
    local = p.target - p.vocab_start
    owned = (local >= 0) & (local < p.num_valid) & (p.target != IGNORE)
    z = x.gather(1, local.clamp(0, p.num_valid - 1)[:, None])[:, 0].masked_fill(~owned, -torch.inf)
    stats = torch.stack((m, e.sum(1), (e * d.masked_fill(e == 0, 0.0)).sum(1), z), 1)
    stats[p.target == IGNORE] = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf], dtype=stats.dtype)
    return stats


def assert_matches(stats: Tensor, p: Problem) -> None:
    """A logit is a sum of H products: its rounding errors add like sqrt(H) steps of half a unit of the largest logit, and four
    times that is a generous tail. An error of x multiplies e^x; 2^-21 is 2 units of the fast exponential and of the sums."""
    want = oracle(p)
    logits = p.scaled_logits()
    largest = float(logits[logits.isfinite()].abs().amax()) if logits.isfinite().any() else 1.0
    unit = 4 * math.sqrt(p.hidden.shape[1]) * 2**-24 * max(1.0, largest)
    got = stats.double()
    torch.testing.assert_close(got[:, [0, 3]], want[:, [0, 3]], rtol=0, atol=unit, equal_nan=True)
    torch.testing.assert_close(got[:, 1], want[:, 1], rtol=2 * unit + 2**-21, atol=0, equal_nan=True)
    # t = sum e d moves by (1 + |d|) times the error of d; |d| e averages to entropy-like sizes below log V + 1
    atol = (2 * unit + 2**-21) * float((want[:, 1] * (2 + math.log(max(p.num_valid, 2)))).nan_to_num().amax())
    torch.testing.assert_close(got[:, 2], want[:, 2], rtol=0, atol=atol, equal_nan=True)


def assert_keeps_and_differentiates(kernel: Kernel, p: Problem) -> None:
    """The logits in memory are those whose statistics were taken, and change none of their bits; the gradient is fp64's, rounded to
    bf16 once, but for the logits' own errors times its slope."""
    stats, logits = p.run_keeping(kernel)
    assert torch.equal(stats, p.run(kernel))
    scale = p.inv_temp if p.row_inv_temp is None else p.row_inv_temp.double()[:, None]
    x = p.scaled_logits()
    error = 4 * math.sqrt(p.hidden.shape[1]) * 2**-24 * max(1.0, float(x.abs().amax()))
    assert logits.dtype == (BF16 if p.bf16_logits else torch.float32)
    torch.testing.assert_close(logits.double() * scale, x, rtol=0, atol=error)

    g = torch.randn(2, p.hidden.shape[0], generator=torch.Generator().manual_seed(20))
    g[:, 3::5] = 0.0
    log_p = x.log_softmax(1)
    lse, entropy = x.logsumexp(1), -(log_p.exp() * log_p).sum(1)
    local = p.target - p.vocab_start
    mine = (local[:, None] == torch.arange(p.num_valid)) & (p.target != IGNORE)[:, None]
    counts = ((p.target != IGNORE) & (g[0] != 0))[:, None]
    for g_h in (None, g[1]):
        bonus = torch.zeros_like(g[0]) if g_h is None else g_h
        of_lp, of_h = g[0].double()[:, None], bonus.double()[:, None]
        want = scale * (of_lp * (mine.double() - log_p.exp()) - of_h * log_p.exp() * (log_p + entropy[:, None])) * counts
        slope = scale * log_p.exp() * (of_lp.abs() + of_h.abs() * (log_p.abs() + entropy[:, None] + 1))
        got = p.gradient(kernel, lse.float(), entropy.float(), g[0], g_h)
        assert got.dtype == BF16 and got.shape == want.shape and not got[~counts[:, 0]].any()
        assert ((got.double() - want).abs() <= 2**-8 * want.abs() + (2 * error + 2**-20) * slope + 1e-37).all()


SHAPES = {  # tokens, hidden, rows of the weight, of which valid
    "one token": (1, 64, 256, 256),
    "less than a tile": (5, 72, 300, 290),
    "one more than a tile": (129, 64, 257, 257),
    "second block of the cluster has no token": (128, 64, 40, 31),
    "more columns than the ring has stages": (70, 64 * 9, 300, 300),
    "hidden ends within a stage": (33, 64 * 5 + 8, 260, 259),
    "several rounds": (513, 64, 1300, 1281),
    "a last group of one pair of token tiles": (2300, 64, 300, 290),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_statistics_are_those_of_fp64_logits(kernel, shape):
    p = problem(*shape, vocab_start=1000)
    assert_matches(p.run(kernel), p)
    assert_keeps_and_differentiates(kernel, p)


@pytest.mark.parametrize("inv_temp,rows", [(1.7, False), (0.0, False), (1.0, True)])
def test_temperature_scales_logits(kernel, inv_temp, rows):
    p = problem(140, 64, 300, 290, seed=1)
    p.inv_temp = inv_temp
    p.row_inv_temp = torch.linspace(0.3, 2.5, 140) if rows else None
    assert_matches(p.run(kernel), p)
    assert_keeps_and_differentiates(kernel, p)


def test_logits_can_be_rounded_to_bf16_before_the_temperature(kernel):
    """Products of small integers: the sums are exact in fp32, so that all round alike."""
    g = torch.Generator().manual_seed(11)
    hidden, weight = (torch.randint(-9, 10, size, generator=g).to(BF16) for size in ((130, 64), (300, 64)))
    p = Problem(hidden, weight / 128, torch.arange(130), 0, 300, inv_temp=1.3)
    plain = p.run(kernel)
    p.bf16_logits = True
    rounded = p.run(kernel)
    assert_matches(rounded, p)
    assert (rounded[:, 3] != plain[:, 3]).any()
    assert_keeps_and_differentiates(kernel, p)


def test_invariant_bits_do_not_depend_on_the_other_tokens(kernel):
    p = problem(300, 64, 1300, 1290, seed=12)
    whole = p.run(kernel, invariant=True)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(13))
    q = Problem(p.hidden[order], p.weight, p.target[order], 0, 1290)
    assert torch.equal(q.run(kernel, invariant=True), whole[order])
    few = Problem(p.hidden[77:90], p.weight, p.target[77:90], 0, 1290)
    assert torch.equal(few.run(kernel, invariant=True), whole[77:90])
    upstream = torch.randn(4, 300, generator=torch.Generator().manual_seed(14))
    assert torch.equal(few.gradient(kernel, *upstream[:, 77:90]), p.gradient(kernel, *upstream)[77:90])
    if kernel.device.type == "cpu":  # 132 multiprocessors divide as little as this alike
        assert not torch.equal(few.run(kernel), p.run(kernel)[77:90]), "the division of the work makes no difference here"


def test_every_column_is_counted_once_and_padding_never(kernel):
    """Equal logits: s is the number of columns, exactly."""
    for num_valid in (1, 255, 256, 257, 700):
        p = problem(3, 64, 700, num_valid)
        p.hidden, p.target = torch.zeros_like(p.hidden), torch.zeros(3, dtype=torch.int64)
        stats = p.run(kernel)
        assert stats[:, 1].tolist() == [num_valid] * 3 and not stats[:, [0, 2]].any()


def test_every_row_and_column_of_a_tile_has_its_place(kernel):
    """hidden picks one column of weight, which counts the ids: the target's logit is its id, wherever rows and columns lie."""
    num_tokens, vocab = 256, 512
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(2))[:num_tokens]
    hidden, weight = torch.zeros(num_tokens, 64), torch.zeros(vocab, 64)
    hidden[:, 3] = hidden[:, 60] = 1.0
    weight[:, 3], weight[:, 60] = torch.arange(vocab) // 16 * 16, torch.arange(vocab) % 16  # both exact in bf16
    hidden[:, 3] *= torch.arange(num_tokens) % 2 + 1.0
    p = Problem(hidden.to(BF16), weight.to(BF16), ids, 0, vocab)
    stats = p.run(kernel)
    want = (ids // 16 * 16).double() * (torch.arange(num_tokens) % 2 + 1) + ids % 16
    assert torch.equal(stats[:, 3].double(), want)
    assert torch.equal(stats[:, 0].double(), oracle(p)[:, 0])


@pytest.mark.parametrize("offset", [0.0, 30.0, -150.0, 1e4, -1e4])
def test_common_offset_leaves_s_and_t(kernel, offset):
    """The logits are multiples of 1/8 below 2^14 + 8, which fp32 holds exactly, whatever the offset."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.zeros(4, 64)
    hidden[:, 0], hidden[:, 1] = 1.0, torch.tensor([1.0, 2.0, 4.0, 8.0])
    weight = torch.zeros(300, 64)
    weight[:, 1] = torch.randint(-8, 9, (300,), generator=g) / 8
    p = Problem(hidden.to(BF16), weight.to(BF16), torch.arange(4), 0, 300)
    at_zero = p.run(kernel)
    p.weight[:, 0] = offset  # bf16 rounds 1e4 to 9984
    stats = p.run(kernel)
    assert torch.equal(stats[:, 1:3], at_zero[:, 1:3])
    assert torch.equal(stats[:, [0, 3]] - float(p.weight[0, 0]), at_zero[:, [0, 3]])


def test_minus_infinity_contributes_nothing_and_nan_stays_in_its_row(kernel):
    p = problem(150, 64, 600, 600, seed=4)
    p.target.clamp_(min=0)
    p.hidden[:, 0] = 1.0
    p.weight[1::2, 0] = -torch.inf
    p.hidden[17, 5] = torch.nan
    stats = p.run(kernel)
    others = torch.arange(150) != 17
    assert stats[17, :3].isnan().all() and not stats[others].isnan().any()
    ones = torch.ones(150)
    gradient = p.gradient(kernel, stats[:, 0], ones, ones, ones)
    assert gradient[17].isnan().all() and not gradient[others].isnan().any()
    assert not gradient[others][:, 1::2][p.target[others] % 2 == 0].any(), "a column of -inf has no gradient"
    assert not p.gradient(kernel, stats[:, 0], ones, others.float(), others.float())[17].any(), "a row without upstream is 0"
    p.hidden[17, 5] = 0.0
    assert_matches(torch.cat((stats[:17], p.run(kernel)[17:18], stats[18:])), p)
    p.weight[:, 0] = -torch.inf
    stats = p.run(kernel)
    assert (stats[:, [0, 3]] == -torch.inf).all() and not stats[:, 1:3].any()


def test_extreme_logits_do_not_overflow(kernel):
    hidden, weight = torch.zeros(2, 64), torch.zeros(600, 64)
    hidden[0, 0], hidden[1, 0] = 1.0, -1.0
    weight[:, 0] = -60.0
    weight[555, 0] = 60.0
    p = Problem(hidden.to(BF16), weight.to(BF16), torch.tensor([555, 555]), 0, 600)
    stats = p.run(kernel)
    assert stats[0].tolist() == [60.0, 1.0, 0.0, 60.0]
    assert stats[1].tolist() == [60.0, 599.0, 0.0, -60.0]


def test_ignored_and_foreign_targets_have_no_logit(kernel):
    p = problem(8, 64, 300, 290, vocab_start=1000, seed=5)
    p.target = torch.tensor([IGNORE, 999, 1000, 1289, 1290, 1299, 2**40, -(2**40)])
    p.hidden[0] = torch.nan
    for start in (1000, -200):  # from -200 on the ignored id would be a column
        p.vocab_start = start
        stats = p.run(kernel)
        assert stats[0].tolist() == [-torch.inf, 0.0, 0.0, -torch.inf] and stats[1:, :3].isfinite().all()
        assert stats[:, 3].isfinite().tolist() == [False, False, start > 0, start > 0] + [False] * 4


def test_entropy_can_be_left_out(kernel):
    p = problem(130, 64, 600, 590, seed=6)
    with_t, without = p.run(kernel), p.run(kernel, want_entropy=False)
    assert torch.equal(with_t[:, [0, 1, 3]], without[:, [0, 1, 3]])
    assert not without[:, 2].any() and with_t[p.target != IGNORE, 2].all()


def test_equal_calls_give_equal_bits_and_inputs_stay(kernel):
    p = problem(300, 128, 700, 690, seed=7)
    before = p.hidden.clone(), p.weight.clone().nan_to_num(), p.target.clone()
    assert torch.equal(p.run(kernel), p.run(kernel))
    upstream = torch.randn(4, 300, generator=torch.Generator().manual_seed(15))
    assert torch.equal(p.gradient(kernel, *upstream), p.gradient(kernel, *upstream))
    assert all(torch.equal(a, b) for a, b in zip(before, (p.hidden, p.weight.nan_to_num(), p.target)))


def test_strided_and_misaligned_inputs(kernel):
    p = problem(20, 64, 300, 290, seed=8)
    dense = p.run(kernel)
    shifted = torch.empty(20 * 64 + 1, dtype=BF16, device=kernel.device)[1:].view(20, 64)  # an odd address
    shifted.copy_(p.hidden)
    strided = torch.empty(300, 128, dtype=BF16, device=kernel.device)[:, ::2]
    strided.copy_(p.weight)
    target = torch.stack((p.target, p.target), 1).to(kernel.device)[:, 0]
    rest = (IGNORE, True, False, False, False)
    assert torch.equal(kernel.op(shifted, strided, target, 0, 290, 1.0, None, *rest)[0].cpu(), dense)


def test_nothing_to_do(kernel):
    p = problem(3, 64, 40, 0)
    assert torch.equal(p.run(kernel), torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 3))
    p = problem(3, 64, 40, 40)
    p.hidden, p.target = p.hidden[:0], p.target[:0]
    none = torch.zeros(0)
    assert p.run(kernel).shape == (0, 4) and p.gradient(kernel, none, none, none, none).shape == (0, 40)


BAD = {
    "hidden must be bf16": lambda p: setattr(p, "hidden", p.hidden.half()),
    "weight must be bf16": lambda p: setattr(p, "weight", p.weight.float()),
    "weight must have 64 columns": lambda p: setattr(p, "weight", p.weight[:, :56]),
    "multiple of 8 columns": lambda p: (setattr(p, "hidden", p.hidden[:, :60]), setattr(p, "weight", p.weight[:, :60])),
    "num_valid must be 0 to 300": lambda p: setattr(p, "num_valid", 301),
    "target must be int64": lambda p: setattr(p, "target", p.target.int()),
    "target must have one value for each of 4": lambda p: setattr(p, "target", p.target[:3]),
    "row_inv_temp must have one value for each of 4": lambda p: setattr(p, "row_inv_temp", torch.ones(3)),
}


@pytest.mark.parametrize("text", BAD)
def test_what_the_kernel_does_not_take_is_refused(kernel, text):
    p = problem(4, 64, 300, 300)
    BAD[text](p)
    with pytest.raises(RuntimeError, match=text):
        p.run(kernel)
    if "num_valid" not in text:
        ones = torch.ones(4)
        with pytest.raises(RuntimeError, match=text):
            p.gradient(kernel, ones, ones, ones, ones)


@pytest.mark.parametrize(
    "archs,capability,want",
    [
        ("8.0;9.0a", (9, 0), True),
        ("8.0;9.0a", (8, 0), False),
        ("9.0a", (10, 0), False),
        ("8.0;9.0", (9, 0), False),
    ],
)
def test_only_a_build_for_hopper_on_hopper_has_the_kernel(tmp_path, monkeypatch, archs, capability, want):
    tmp_path.joinpath("library.json").write_text(json.dumps({"cuda": True, "cuda_archs": archs}))
    monkeypatch.setattr(implementations, "LIBRARY", tmp_path / "library.so")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda_linear_stats.usable() is want
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a CUDA torch on a machine without a GPU
    assert cuda_linear_stats.usable() is False


CALLS = {  # changes to a call of the op; whether the kernel takes it
    "bf16": ({}, True),
    "rounded": ({"bf16_logits": True}, True),
    "invariant": ({"invariant": True}, True),
    "without entropy": ({"want_entropy": False}, True),
    "temperature of each row": ({"row_inv_temp": torch.linspace(0.5, 2.0, 40)}, True),
    "logits wanted": ({"keep_logits": True}, True),
    "restricted": ({"kept": torch.arange(0, 296, 2).expand(40, -1).contiguous()}, False),
    "fp32": ({"hidden": torch.float32, "weight": torch.float32}, False),
    "rows of 14 bytes": ({"columns": 7}, False),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_op_takes_the_kernel_where_it_applies_and_blocks_elsewhere(cuda_on_cpu, monkeypatch, call):
    """The Python side, on CPU tensors: the op's arguments arrive in their places, and the answer is that of the reference."""
    changes, taken = dict(CALLS[call][0]), CALLS[call][1]
    p = problem(40, 64, 300, 290, seed=14)
    p.weight = p.weight.nan_to_num()
    width = changes.pop("columns", 64)
    hidden, weight = (x[:, :width].to(changes.pop(name, BF16)) for name, x in (("hidden", p.hidden), ("weight", p.weight)))
    arguments = {
        "hidden": hidden,
        "weight": weight,
        "target": p.target,
        "vocab_start": 0,
        "num_valid": 290,
        "inv_temp": 0.7,
        "row_inv_temp": None,
        "ignore_index": IGNORE,
        "kept": None,
        "bf16_logits": False,
        "invariant": False,
        "want_entropy": True,
        "keep_logits": False,
        "chunk_tokens": 16,
    }
    arguments |= changes
    with dispatch.using("reference"):
        want = torch.ops.megappo.linear_stats(*arguments.values())
    calls = []
    native = getattr(torch.ops, cuda_on_cpu)
    monkeypatch.setattr(cuda_linear_stats, "native_op", lambda name: lambda *a: calls.append(name) or getattr(native, name)(*a))
    with dispatch.using("reference"):
        *given, want_entropy, keep_logits, chunk_tokens = arguments.values()
        got = cuda_linear_stats.linear_stats(LinearLogits(*given), want_entropy, keep_logits, chunk_tokens)
    assert calls == ["linear_stats_wgmma"] * taken
    assert got[1].shape == want[1].shape and got[1].dtype == want[1].dtype
    # bf16 rounds a logit of 16 by up to 2^-5 when the two sums that are rounded differ in their last bit
    rtol, atol = (0.05, 0.04) if arguments["bf16_logits"] else (1e-5, 1e-4)
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(got[1], want[1], rtol=rtol, atol=atol)

    lse, g = want[0][:, 0] + want[0][:, 1].log(), torch.randn(3, 40, generator=torch.Generator().manual_seed(16))
    all_rows = LinearLogits(*given)._replace(weight=arguments["weight"][:290], vocab_start=5)
    upstream = Upstream(lse.clamp(min=0), *g)
    calls.clear()
    with dispatch.using("reference"):
        want, got = torch.ops.megappo.linear_dlogits(*all_rows, *upstream), cuda_linear_stats.linear_dlogits(all_rows, upstream)
    assert calls == ["linear_dlogits_wgmma"] * taken and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2**-7 + rtol, atol=1e-4 + atol)


@pytest.mark.parametrize("fault", ["no_swizzle", "no_wait", "rows_swapped", "half_weight"])
def test_a_machine_that_differs_is_noticed(cuda_on_cpu, monkeypatch, fault):
    """hopper.h with one fault: a kernel that disagrees with the machine about layout or order does not pass the tests above."""
    p = problem(140, 64, 300, 290, seed=9)
    kernel = Kernel(getattr(torch.ops, cuda_on_cpu), torch.device("cpu"))
    assert_matches(p.run(kernel), p)
    monkeypatch.setenv("MEGAPPO_ON_CPU_FAULT", fault)
    for check in (lambda: assert_matches(p.run(kernel), p), lambda: assert_keeps_and_differentiates(kernel, p)):
        with pytest.raises(AssertionError):
            check()


@pytest.mark.gpu
def test_at_full_size_it_is_as_exact_as_an_fp32_product():
    p = problem(512, 4096, 151936, 151700, seed=10)
    kernel = Kernel(torch.ops.megappo_native, torch.device("cuda"))
    want, got = oracle(p), p.run(kernel).double()
    plain = torch.mm(p.hidden.cuda(), p.weight[: p.num_valid].cuda().t(), out_dtype=torch.float32).cpu().double()
    counts = p.target != IGNORE  # the others have statistics of no column
    exact, plain = (want[:, 0] + want[:, 1].log())[counts], plain.logsumexp(1)[counts]
    worst = max(float((plain - exact).abs().amax()), 2e-6)
    assert float(((got[:, 0] + got[:, 1].log())[counts] - exact).abs().amax()) <= 3 * worst
