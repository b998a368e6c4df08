"""One rank of megappo against the step written out in fp64 with transformers: the anchor of the whole matrix.

That all layouts agree with each other would not show a mistake that all of them share, such as a missing right shift.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.parity.conftest import samples
from tests.parity.matrix import MODELS, PLACED_LOSSES
from tests.parity.oracle import Outcome

# fp32 against fp64 through four layers: some hundred roundings of 6e-8 each.
TOLERANCE = 1e-5
# The step of Adam divides by |g| + eps, see matrix.config_of.
PARAMETER_TOLERANCE = 1e-4


# quantity of the oracle -> role and quantity of the measurement
FIELDS = {
    "logprobs": ("policy", "logprobs"),
    "entropies": ("policy", "entropies"),
    "reference logprobs": ("reference", "logprobs"),
    "values": ("critic", "values"),
    "rewards": ("experience", "rewards"),
    "advantages": ("experience", "advantages"),
    "returns": ("experience", "returns"),
}


def differences(found: Any, expected: Outcome) -> Iterator[tuple[str, float]]:
    """(quantity, largest difference): relative to max(1, |b|), of tensors to their largest element."""
    for name, (role, quantity) in FIELDS.items():
        yield name, relative(found[role].values[quantity][0], torch.cat(expected.fields[name]))
    yield "bootstrap values", relative(found["critic"].values["bootstrap values"][0], torch.tensor(expected.bootstrap))
    for role in ("policy", "critic"):
        yield f"{role} loss", relative(found[role].values["loss"][0], torch.tensor(expected.losses[role]))
        yield f"{role} gradient norm", relative(found[role].values["gradient norm"][0], torch.tensor(expected.grad_norms[role]))
        yield f"{role} gradients", worst_tensor(found[role].gradients.tensors, expected.gradients[role])
        yield f"{role} parameters", worst_tensor(found[role].parameters.tensors, expected.parameters[role])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a.double() - b.double()).abs() / b.double().abs().clamp(min=1.0)).max())


def worst_tensor(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30)) for name, tensor in expected.items())


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_gives_the_numbers_of_the_step_written_out(measured, expected, model: str) -> None:
    found = dict(differences(measured[1][model]["tp1 pp1 dp1"], expected[model]))
    allowed = {name: PARAMETER_TOLERANCE if name.endswith("parameters") else TOLERANCE for name in found}
    assert {name: size for name, size in found.items() if not size <= allowed[name]} == {}


def test_a_teachers_log_probs_are_those_of_transformers_and_enter_the_rewards(measured, expected) -> None:
    """The teacher has the weights of the oracle's reference."""
    found, fields, rows = measured[1]["llama"][f"tp1 pp1 dp1, {PLACED_LOSSES}"], expected["llama"].fields, samples()
    policy, teacher = (torch.cat(fields[name]) for name in ("logprobs", "reference logprobs"))
    assert relative(found["teacher"].values["logprobs"][0], teacher) <= TOLERANCE

    def rewards(teacher: torch.Tensor) -> torch.Tensor:
        last = torch.cat([(s.sampled.flip(0).cumsum(0).flip(0) == 1) & s.sampled for s in rows])
        scores = torch.cat([torch.full(s.tokens.shape, s.score) for s in rows])
        kl = torch.where(torch.cat([s.sampled for s in rows]), policy - teacher, 0.0)
        return last * scores - 0.5 * kl

    assert relative(found["experience"].values["rewards"][0], rewards(teacher)) <= TOLERANCE
    assert relative(found["experience"].values["rewards"][0], rewards(teacher.roll(1))) > 0.1, "those of the neighbours"


@pytest.mark.parametrize("model", MODELS)
def test_the_step_written_out_takes_every_turn(expected, model: str) -> None:
    """The comparison would be weak if nothing were clipped, cut, multi-turn or a single token."""
    rows = samples()
    assert any(int(s.sampled.sum()) == 1 for s in rows) and any(s.truncated for s in rows)
    assert any(int(s.sampled.diff().sum()) > 1 or bool((~s.sampled[int(s.sampled.nonzero()[0]) :]).any()) for s in rows)
    assert max(expected[model].grad_norms["policy"]) > 0.1
