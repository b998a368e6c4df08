"""FLOPs, rates and MFU of a step, against numbers written out by hand."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megappo.config.run_sections import TelemetryConfig
from megappo.data.images import IMAGE_BASE
from megappo.data.packing import PackedBatch, cu_seqlens_of, pack
from megappo.engine.base import PassResult, StepResult
from megappo.models.flops import forward_flops, generation_flops, tower_flops
from megappo.trainer.instruments import RoleModel, StepWork, peak_note, peak_tflops, tower_work
from megappo.trainer.roles import UpdateResult
from megappo.trainer.updates import MiniBatch, UpdateSummary, run_updates
from tests.models.test_flops import LLAMA_7B
from tests.models.vision_cases import images_of, vision_arch, write_questions, write_vision_checkpoint

CPU = torch.device("cpu")
RANKS = 2
BATCH = PackedBatch(torch.zeros(10, dtype=torch.long), cu_seqlens_of([4, 6]))
LENGTHS, RESPONSES = torch.tensor([4, 6]), torch.tensor([2, 3])
CRITIC = replace(LLAMA_7B, num_layers=2)
MODELS = {
    "policy": RoleModel(LLAMA_7B, False, "none", 100.0, range(RANKS)),
    "critic": RoleModel(CRITIC, True, "full", 50.0, range(RANKS)),
    "reference": RoleModel(LLAMA_7B, False, "none", 100.0, range(RANKS)),
}
SECONDS = {"generate": 4.0, "logprobs": 1.0, "update_critic": 0.5, "update_policy": 2.0}


def updates(*minis: torch.Tensor) -> UpdateSummary:
    return UpdateSummary(lengths=list(minis))


def figures(models=MODELS, critic=updates(LENGTHS), policy=updates(LENGTHS)) -> dict[str, float]:
    work = StepWork.of_step(models, LENGTHS, (LENGTHS - RESPONSES, RESPONSES), {"critic": critic}, policy, range(RANKS))
    return work.metrics(SECONDS, step_s=10.0)


def test_a_policy_that_trains_adapters_has_no_products_for_the_gradients_of_its_weights() -> None:
    one, found = (
        forward_flops(LLAMA_7B, LENGTHS, value_head=False),
        figures({**MODELS, "policy": replace(MODELS["policy"], frozen=True)}),
    )
    assert found["perf/work_tflop/update_policy/policy"] == (2 * one.total + one.attention) / 1e12
    assert found["perf/work_tflop/logprobs/policy"] == one.total / 1e12


def test_every_role_has_its_own_operations_in_every_stage() -> None:
    one = forward_flops(LLAMA_7B, LENGTHS, value_head=False)
    value = forward_flops(CRITIC, LENGTHS, value_head=True)
    found = figures()
    want = {
        "perf/work_tflop/generate/policy": generation_flops(LLAMA_7B, LENGTHS - RESPONSES, RESPONSES).total,
        "perf/work_tflop/logprobs/policy": one.total,
        "perf/work_tflop/logprobs/critic": value.total,
        "perf/work_tflop/logprobs/reference": one.total,
        "perf/work_tflop/update_critic/critic": 3 * value.total,
        "perf/work_tflop/update_policy/policy": 3 * one.total,
    }
    assert {name: value for name, value in found.items() if name.startswith("perf/work_tflop/")} == {
        name: flops / 1e12 for name, flops in want.items()
    }
    assert found["perf/tflops/update_policy"] == pytest.approx(3 * one.total / 1e12 / (2.0 * RANKS))
    assert found["perf/tflops/step"] == pytest.approx(sum(want.values()) / 1e12 / (10.0 * RANKS))


def test_a_tower_works_for_every_sequence_that_shows_an_image() -> None:
    """FLOPs of a forward pass, and of its product with the pixels, which has no gradient: the second sample shows images."""
    shown = dict.fromkeys(MODELS, torch.tensor([[0.0, 0.0], [700.0, 50.0]], dtype=torch.float64))
    models = {**MODELS, "policy": replace(MODELS["policy"], tower_trains=True)}
    one = replace(updates(LENGTHS, LENGTHS[1:]), samples=[torch.tensor([0, 1]), torch.tensor([1])])
    asked = (LENGTHS, (LENGTHS - RESPONSES, RESPONSES), {"critic": one}, one, range(RANKS), None)
    found, without = (StepWork.of_step(models, *asked, images).by_stage for images in (shown, {}))
    more = {
        (stage, role): work.flops - without[stage][role].flops for stage, roles in found.items() for role, work in roles.items()
    }
    trained, frozen = 2 * (3 * 700 - 50), 2 * 700  # in two mini-batches
    assert more == {
        ("generate", "policy"): 700,
        ("logprobs", "policy"): 700,
        ("logprobs", "critic"): 700,
        ("logprobs", "reference"): 700,
        ("update_critic", "critic"): frozen,
        ("update_policy", "policy"): trained,
    }


def test_the_images_of_every_sequence_are_found(tmp_path: Path) -> None:
    write_questions(tmp_path)
    write_vision_checkpoint(tmp_path / "model", "qwen3_vl")
    store = images_of(tmp_path / "model", tmp_path / "questions.jsonl", tmp_path / "cache").store
    vision = vision_arch("qwen3_vl").vision
    assert vision is not None
    first, second = ([IMAGE_BASE + number] * store.num_tokens(number) for number in (0, 2))
    batch = pack([[1, *first], [1, 2], [*second, *first, 3]])
    flops = [tower_flops(vision, store.grid(number)) for number in (0, 2)]
    both = [flops[0].total + flops[1].total, flops[0].embedding + flops[1].embedding]
    assert tower_work(vision, batch, store).tolist() == [list(flops[0]), [0, 0], both]


def test_a_reward_model_works_in_the_stage_of_the_scores() -> None:
    """On texts of its own: 3 and 8 tokens of two responses, by hand as in models/flops.py."""
    texts, judge = torch.tensor([3, 8]), replace(CRITIC, num_layers=1)
    model = RoleModel(judge, True, "none", 50.0, [1])
    weights = (
        judge.hidden_size * (2 * judge.num_heads + 2 * judge.num_kv_heads) * judge.head_dim + 3 * judge.hidden_size * judge.ffn_size
    )
    pairs = 3 * 4 // 2 + 8 * 9 // 2
    by_hand = 2 * weights * 11 + 4 * judge.num_heads * judge.head_dim * pairs + 2 * judge.hidden_size * 11
    models = {**MODELS, "reward_model": model}
    work = StepWork.of_step(
        models,
        LENGTHS,
        (LENGTHS - RESPONSES, RESPONSES),
        {"critic": updates(LENGTHS)},
        updates(LENGTHS),
        range(RANKS),
        model.forward(texts),
    )
    found, without = work.metrics({**SECONDS, "score": 0.5}, step_s=10.0), figures()
    assert found["perf/work_tflop/score/reward_model"] == by_hand / 1e12
    assert found["perf/tflops/score"] == pytest.approx(by_hand / 1e12 / 0.5), "of the one rank where it lives"
    assert found["perf/mfu/score"] == pytest.approx(by_hand / 50e12 / 0.5)
    assert found["perf/tokens_per_s/score"] == 11 / 0.5
    assert found["perf/tflops/step"] == pytest.approx(without["perf/tflops/step"] + by_hand / 1e12 / (10.0 * RANKS))
    assert "perf/work_tflop/logprobs/reward_model" not in found and "perf/tflops/score" not in without


def test_tokens_are_those_that_a_stage_passes_per_second_and_rank() -> None:
    found = figures(policy=updates(LENGTHS, LENGTHS[:1]))
    assert found["perf/tokens_per_s/logprobs"] == 10 / RANKS
    assert found["perf/tokens_per_s/update_policy"] == 14 / (2.0 * RANKS), "two passes over the first sequence"
    assert found["perf/tokens_per_s/generate"] == 10 / (4.0 * RANKS)


def test_mfu_is_without_recomputed_work_and_hfu_with_it() -> None:
    found, value = figures(), forward_flops(CRITIC, LENGTHS, value_head=True)
    assert found["perf/mfu/update_critic"] == pytest.approx(3 * value.total / 50e12 / (0.5 * RANKS))
    assert found["perf/hfu/update_critic"] == pytest.approx((4 * value.total - value.head) / 50e12 / (0.5 * RANKS))
    assert "perf/hfu/update_policy" not in found and "perf/hfu/logprobs" not in found, "nothing is recomputed"
    assert "perf/mfu/generate" not in found, "decoding is bound by memory"
    one = forward_flops(LLAMA_7B, LENGTHS, value_head=False)
    assert found["perf/mfu/logprobs"] == pytest.approx((2 * one.total / 100e12 + value.total / 50e12) / RANKS), "each at its peak"


def test_without_a_peak_there_is_no_mfu() -> None:
    found = figures({**MODELS, "reference": replace(MODELS["reference"], peak_tflops=None)})
    assert "perf/mfu/logprobs" not in found and "perf/mfu/update_policy" in found
    assert peak_tflops(TelemetryConfig(), CPU, "bf16") is None
    assert peak_tflops(TelemetryConfig(peak_tflops=0.1), CPU, "bf16") == 0.1


def test_a_step_of_the_critics_warm_up_has_no_work_of_the_policy() -> None:
    found = figures(policy=UpdateSummary())
    assert not [name for name in found if "update_policy" in name]


@pytest.mark.parametrize(
    "name, dtype, peak",
    [("NVIDIA H100 80GB HBM3", "bf16", 989.4), ("NVIDIA H100 80GB HBM3", "fp32", 66.9), ("NVIDIA T4", "bf16", None)],
)
def test_the_peak_of_a_gpu_is_that_of_its_profile(monkeypatch, name: str, dtype, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(TelemetryConfig(), torch.device("cuda", 0), dtype) == peak
    models = {"policy": replace(MODELS["policy"], peak_tflops=peak)}
    note = peak_note(TelemetryConfig(), torch.device("cuda", 0), models)
    assert name in note and (f"{peak:g} TFLOP/s" in note if peak else "telemetry.peak_tflops sets it" in note)


class Declines:
    """A policy that stops at its second mini-batch (target KL)."""

    class Modes:
        def train_mode(self):
            return nullcontext()

    engine = Modes()

    def __init__(self) -> None:
        self.calls = 0

    def update(self, mini: PackedBatch, denominator: float) -> UpdateResult:
        self.calls += 1
        losses = PassResult({}, {}, {}, 1)
        return UpdateResult(losses, None, None) if self.calls == 2 else UpdateResult(losses, StepResult(1.0, True), 1e-3)


def test_updates_that_end_early_have_done_the_passes_until_then() -> None:
    summary = run_updates(Declines(), [MiniBatch(BATCH, 1.0, lengths, lengths) for lengths in (LENGTHS, LENGTHS[1:], LENGTHS)])
    assert summary.num_updates == 1 and [lengths.tolist() for lengths in summary.lengths] == [[4, 6], [6]]
