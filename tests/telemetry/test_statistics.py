"""Block of statistics: moments of all samples of its steps, rates over their time, and what is printed."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.telemetry.metrics import MOMENTS
from megappo.telemetry.statistics import StatisticsBlock, block, pooled

RESPONSES = 8


def moments(prefix: str, values: torch.Tensor) -> dict[str, float]:
    found = (values.mean(), values.std(correction=0), values.min(), values.max())
    return {f"{prefix}{name}": float(value) for name, value in zip(MOMENTS, found)}


def steps(count: int, seed: int = 0) -> tuple[list[dict[str, float]], torch.Tensor, torch.Tensor]:
    """(metrics of steps, all scores, all advantages): as many responses in each step, but not as many tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows, scores, advantages = [], [], []
    for step in range(count):
        lengths = torch.randint(1, 20 * (step + 1), (RESPONSES,), generator=generator)
        scores.append(torch.randn(RESPONSES, generator=generator, dtype=torch.float64) + step)
        advantages.append(torch.randn(int(lengths.sum()), generator=generator, dtype=torch.float64) * (step + 1) - step)
        rows.append(
            {
                **moments("reward/score_", scores[-1]),
                **moments("lengths/response_", lengths.double()),
                **moments("policy/advantage_", advantages[-1]),
            }
        )
    return rows, torch.cat(scores), torch.cat(advantages)


@pytest.mark.parametrize("name", ["reward/score_", "policy/advantage_"])
def test_moments_are_those_of_all_samples_of_the_steps_together(name: str) -> None:
    rows, scores, advantages = steps(4)
    values, weights = (scores, [1.0] * 4) if "score" in name else (advantages, [row["lengths/response_mean"] for row in rows])
    found = pooled(rows, {moment: f"{name}{moment}" for moment in MOMENTS}, weights)
    assert found == pytest.approx(list(moments(name, values).values()))


def test_tokens_weighed_as_responses_are_would_be_another_mean() -> None:
    rows, _, advantages = steps(4)
    wrong = pooled(rows, {moment: f"policy/advantage_{moment}" for moment in MOMENTS}, [1.0] * 4)
    assert wrong is not None and abs(wrong[0] - float(advantages.mean())) > 0.1
    assert abs(wrong[1] - float(advantages.std(correction=0))) > 0.1


def test_a_step_without_a_sampled_token_is_left_out() -> None:
    rows, _, advantages = steps(2)
    nothing = {**dict.fromkeys((f"policy/advantage_{moment}" for moment in MOMENTS), math.nan), "lengths/response_mean": 0.0}
    weights = [row["lengths/response_mean"] for row in [*rows, nothing]]
    names = {moment: f"policy/advantage_{moment}" for moment in MOMENTS}
    found = pooled([*rows, nothing], names, weights)
    assert found is not None and found[0] == pytest.approx(float(advantages.mean()))
    assert pooled([nothing], names, [0.0]) is None


def a_row(**changes: float) -> dict[str, float]:
    row = {f"reward/{name}": value for name, value in zip(("score_mean", "score_std", "score_min", "score_max"), (0.5, 0.5, 0, 1))}
    row |= {"reward/mine.score": 0.25, "reward/mine.score/std": 0.1, "reward/mine.score/min": 0.0, "reward/mine.score/max": 0.75}
    row |= {"timing/generate_s": 1.0, "timing/update_policy_s": 0.5, "timing/step_s": 2.0}
    row |= {"perf/tflops/generate": 10.0, "perf/tokens_per_s/generate": 1500.0, "memory/generate_peak_gib": 7.5}
    row |= {"perf/tflops/update_policy": 200.0, "perf/mfu/update_policy": 0.2, "perf/hfu/update_policy": 0.25}
    row |= {"perf/work_tflop/generate/policy": 20.0, "perf/work_tflop/update_policy/policy": 200.0, "perf/tflops/step": 55.0}
    return row | changes


def test_the_block_is_one_aligned_table_after_another() -> None:
    slow = a_row(**{"timing/generate_s": 3.0, "perf/tflops/generate": 2.0, "memory/generate_peak_gib": 9.25, "timing/step_s": 4.0})
    assert block([a_row(), slow], 11, 12) == [
        "--- steps 11 to 12",
        "                mean  std  min   max",
        "  score          0.5  0.5    0     1",
        "    mine.score  0.25  0.1    0  0.75",
        "  stage          s/step   share  tok/s/rank  TFLOP/s/rank    MFU    HFU  peak GiB",
        "  generate         2.00   66.7%       1,500          4.00                    9.25",
        "  update_policy   0.500   16.7%                       200  20.0%  25.0%",
        "  whole step       3.00  100.0%                      55.0                    9.25",
        "---",
    ]


def test_a_stage_of_every_other_step_costs_half_of_its_time_and_keeps_its_rate() -> None:
    without = {name: value for name, value in a_row().items() if "update_policy" not in name}
    (line,) = [line for line in block([a_row(), without], 1, 2) if line.startswith("  update_policy")]
    assert line.split() == ["update_policy", "0.250", "12.5%", "200", "20.0%", "25.0%"]


def test_resident_memory_is_not_called_a_peak() -> None:
    row = {name.replace("peak_gib", "end_gib"): value for name, value in a_row().items()}
    assert "GiB at end" in "\n".join(block([row], 1, 1)) and "peak" not in "\n".join(block([row], 1, 1))


@pytest.mark.parametrize("factor, unit", [(1e3, "PFLOP"), (1.0, "TFLOP"), (1e-3, "GFLOP"), (1e-9, "MFLOP")])
def test_the_unit_fits_the_numbers(factor: float, unit: str) -> None:
    row = {
        name: value * (factor if name.startswith(("perf/tflops/", "perf/work_tflop/")) else 1.0) for name, value in a_row().items()
    }
    lines = "\n".join(block([row], 1, 1))
    assert f"{unit}/s/rank" in lines


def printed(every: int, first: int, last: int) -> list[str]:
    statistics = StatisticsBlock(every)
    lines = [line for step in range(first, last + 1) for line in statistics.add(a_row(), step, is_last=step == last)]
    return [line for line in lines if line.startswith("--- ")]


def test_a_block_comes_every_few_steps_and_at_the_end() -> None:
    assert printed(3, 1, 8) == ["--- steps 1 to 3", "--- steps 4 to 6", "--- steps 7 to 8"]
    assert printed(3, 5, 9) == ["--- steps 5 to 6", "--- steps 7 to 9"], "a resumed run"
    assert printed(0, 1, 8) == []
    assert printed(1, 1, 2) == ["--- step 1", "--- step 2"]
