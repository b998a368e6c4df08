"""Policy and critic give the numbers of one rank in every layout, micro-batch split, order and padding."""

from __future__ import annotations

import re

import pytest
import torch

from megappo.commands.verify.compare import compare
from megappo.commands.verify.recording import RecordedTexts, record_rollouts
from tests.parity.matrix import (
    ALGORITHMS,
    FSDP2_LOSSES,
    LOSSES,
    MODELS,
    PLACED_LOSSES,
    PTX_TEXTS,
    RUN_TOGETHER,
    SEQUENCES,
    SHARDED,
    TWO_CRITICS,
    VARIED,
    VOCABULARY,
    title,
)

BASELINE = "tp1 pp1 dp1"
# Log-probs, values and losses of order 1 to 10 through four layers whose numbers have 8 bits; experts may be chosen differently.
BF16_BOUND = 0.2
LAYOUTS = [
    pytest.param(model, size, title(case, size), id=f"{model}-{title(case, size)}")
    for model, sizes in MODELS.items()
    for size, cases in sizes.items()
    for case in cases
]
VARIED_LAYOUTS = [
    pytest.param(model, size, f"{title(case, size)}, {variant}", id=f"{model}-{title(case, size)}-{variant}")
    for model, sizes in VARIED.items()
    for size, cases in sizes.items()
    for case in cases
    for variant in RUN_TOGETHER
    if variant != "bf16"
]
OTHER_LOSSES = [
    pytest.param(model, size, title(case, size), loss, id=f"{model}-{title(case, size)}-{loss}")
    for model, sizes in LOSSES.items()
    for size, cases in sizes.items()
    for case, names in cases
    for loss in names
    if size > 1
]
OTHER_LOSSES += [pytest.param("llama", 2, "fsdp2", name, id=f"llama-fsdp2-{name}") for name in FSDP2_LOSSES]
BF16_LAYOUTS = [
    pytest.param(model, size, title(case, size), id=f"{model}-{title(case, size)}")
    for model, sizes in VARIED.items()
    for size, cases in sizes.items()
    for case in cases
]


SHARDED_RUNS = [
    pytest.param(model, size, name, id=f"{model}-{size}-{name}")
    for model, sizes in SHARDED.items()
    for size, names in sizes.items()
    for name in names
    if "bf16" not in name
]


def disagreements(found, expected) -> list[str]:
    return [
        f"{d.role} {d.quantity} at {d.where}: {d.relative:.1e} > {d.tolerance:.0e}"
        for d in compare(found, expected)
        if not d.agrees
    ]


@pytest.mark.parametrize("model, size, name", LAYOUTS)
def test_every_layout_gives_the_numbers_of_one_rank(measured, model: str, size: int, name: str) -> None:
    assert disagreements(measured[size][model][name], measured[1][model][BASELINE]) == []


@pytest.mark.parametrize("model, size, name", [*SHARDED_RUNS, pytest.param("llama", 2, "mixed", id="llama-2-mixed")])
def test_fsdp2_gives_the_numbers_of_one_megatron_rank(measured, model: str, size: int, name: str) -> None:
    """Policy, critic and reference; or, mixed, the critic beside a policy of tp 2."""
    assert disagreements(measured[size][model][name], measured[1][model][BASELINE]) == []


@pytest.mark.parametrize("losses", ["", f", {PLACED_LOSSES}"])
def test_roles_on_ranks_of_their_own_give_the_numbers_of_one_rank(measured, losses: str) -> None:
    """Rank 0, which reports, has no policy."""
    found, alone = measured[4]["llama"][f"placed{losses}"], measured[1]["llama"][f"{BASELINE}{losses}"]
    assert disagreements(found, alone) == []
    parameters = found["policy"].parameters.tensors
    assert parameters and parameters.keys() == alone["policy"].parameters.tensors.keys()


@pytest.mark.parametrize("model, size, name", VARIED_LAYOUTS)
def test_micro_batches_recompute_and_offload_change_nothing(measured, model: str, size: int, name: str) -> None:
    assert disagreements(measured[size][model][name], measured[1][model][BASELINE]) == []


@pytest.mark.parametrize("model, size, name, variant", OTHER_LOSSES)
def test_other_losses_give_the_numbers_of_one_rank(measured, model: str, size: int, name: str, variant: str) -> None:
    alone = measured[1][model][f"{BASELINE}, {variant}"]
    assert disagreements(measured[size][model][f"{name}, {variant}"], alone) == []
    first, other = (found["policy"].values["loss"][0] for found in (measured[1][model][BASELINE], alone))
    assert float((first - other[: len(first)]).abs().max()) > 1e-3, "the change must change something"


def test_two_critics_are_compared(measured) -> None:
    """Guards the variant with two: each has values, updates and weights of its own, and learns from its own samples."""
    found = measured[1]["llama"][f"{BASELINE}, {TWO_CRITICS}"]
    first, second = found["critic"], found["critic_b"]
    assert first.values.keys() == second.values.keys() == {"values", "bootstrap values", "loss", "gradient norm"}
    assert float((first.values["values"][0] - second.values["values"][0]).abs().max()) > 0.1
    updates = SEQUENCES // 2 // (SEQUENCES // 4)  # of half of the samples, in mini-batches of half the size
    assert first.values["loss"][0].shape == second.values["loss"][0].shape == (updates,)
    assert second.gradients.tensors.keys() == first.gradients.tensors.keys() and second.parameters.tensors
    compared = {(d.role, d.quantity) for d in compare(measured[2]["llama"][f"fsdp2, {TWO_CRITICS}"], found)}
    assert {("critic_b", "gradients"), ("critic_b", "parameters"), ("experience", "returns.b")} <= compared


def test_bounds_of_the_samplers_ratio_cut_some_tokens_and_keep_others(measured) -> None:
    """Guards the variants with a correction: with log-probs far from the model's all tokens would be cut, or none."""
    found = {name: measured[1]["llama"][f"{BASELINE}, {name}"] for name in ALGORITHMS}
    (dis,) = (one["policy"].metrics for name, one in found.items() if "dis" in name)
    cut = dis["clip_low_sum"][0] + dis["clip_high_sum"][0]
    assert bool((dis["clip_low_sum"][0] > 0).any() and (dis["clip_high_sum"][0] > 0).any() and (cut < dis["tokens_sum"][0]).all())
    (dropped,) = (one["policy"].metrics for name, one in found.items() if "icepop" in name)
    # Both are divided by the denominator of the update, and the tokens of its texts are known.
    share, texts, size = dropped["tokens_sum"][0] / dropped["ptx_tokens_sum"][0], RecordedTexts(VOCABULARY), PTX_TEXTS
    of_texts = [int(texts.lengths(range(size * update, size * (update + 1))).sum()) - size for update in range(2)]
    kept = sum(float(share[update]) * count for update, count in enumerate(of_texts))
    (batch,) = record_rollouts(1, sequences=SEQUENCES, vocab_size=VOCABULARY)
    assert 0 < kept < int(batch["response_mask"].sum()) - 1


@pytest.mark.parametrize("model, size, name", BF16_LAYOUTS)
def test_bf16_errs_no_more_than_rounding_does(measured, model: str, size: int, name: str) -> None:
    """Root mean square of log-probs and values against fp32: at most twice that of one rank, and below the documented bound."""
    exact = measured[1][model][BASELINE]
    check_rounding(measured[size][model][f"{name}, bf16"], exact, measured[1][model][f"{BASELINE}, bf16"])


def test_bf16_under_fsdp2_errs_no_more_than_rounding_does(measured) -> None:
    alone = measured[1]["llama"]
    check_rounding(measured[2]["llama"]["fsdp2, bf16"], alone[BASELINE], alone[f"{BASELINE}, bf16"])


def check_rounding(measured_bf16, exact, alone_bf16) -> None:
    for role, quantity in (("policy", "logprobs"), ("critic", "values")):
        here, alone = (
            rms(found[role].values[quantity][0], exact[role].values[quantity][0]) for found in (measured_bf16, alone_bf16)
        )
        assert here < 2 * alone and alone < BF16_BOUND, (role, quantity)
    losses = (measured_bf16, exact)
    bf16, fp32 = (found["critic"].values["loss"][0][0] for found in losses)
    assert abs(float(bf16 - fp32)) < BF16_BOUND * float(fp32)


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean().sqrt())


IDLE_EXPERTS = {"mixtral": 1, "glm4_moe": 2, "deepseek_v3": 1}
"""Experts that no token of the baseline chooses: random corrections crowd the others."""


@pytest.mark.parametrize("model", MODELS)
def test_everything_is_compared(measured, model: str) -> None:
    """Guards the comparison itself: the quantities that the claim names, for both roles, and every tensor of the model."""
    size = min(MODELS[model])
    first = title(MODELS[model][size][0], size)
    compared = {(d.role, d.quantity) for d in compare(measured[size][model][first], measured[1][model][BASELINE])}
    both = {"loss", "gradient norm", "metrics", "gradients", "gradients, copies", "parameters", "parameters, copies"}
    expected = {(role, quantity) for role in ("policy", "critic") for quantity in both}
    expected |= {("policy", "logprobs"), ("policy", "entropies"), ("reference", "logprobs"), ("critic", "values")}
    expected |= {("critic", "bootstrap values")} | {("experience", name) for name in ("rewards", "advantages", "returns")}
    assert compared == expected
    gradients = measured[1][model][BASELINE]["policy"].gradients.tensors
    without = [name for name, tensor in gradients.items() if not tensor.any()]  # these compare nothing
    idle = {re.sub(r"(\.experts\.\d+)\..*", r"\1", name) for name in without}
    assert all(".experts." in name for name in idle) and len(idle) == IDLE_EXPERTS.get(model, 0), without
