"""Comparison of two measurements of `measure.py`: the largest difference of every quantity, and its tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.commands.verify.gather import Gathered
from megappo.commands.verify.measure import Measured

# fp32 rounding of a few hundred additions in another order, of numbers of order 1 (tensors: relative to the largest element).
TOLERANCE = 1e-5
# Ten times looser: Adam amplifies the rounding of small gradients to fractions of a step, and the steps add up.
PARAMETER_TOLERANCE = 1e-4

GRADIENTS, PARAMETERS = "gradients", "parameters"


@dataclass(frozen=True)
class Difference:
    """Largest difference of one quantity."""

    role: str
    quantity: str
    where: str
    """Its step and entry, metric, or tensor."""
    absolute: float
    relative: float
    """|a - b| / max(1, |b|) of the worst number; for gradients and parameters max |a - b| / max |b| of the worst tensor. NaN if
    either measurement has one."""
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.relative <= self.tolerance


def compare(
    measured: Measured, baseline: Measured, tolerance: float = TOLERANCE, parameter_tolerance: float = PARAMETER_TOLERANCE
) -> list[Difference]:
    """Compare each quantity of each role of `baseline`, in its order. Both measurements are of the same rollouts. Gradients and
    parameters are compared if both have them, together with the copies on several ranks of `measured`."""
    differences: list[Difference] = []
    for role, expected in baseline.items():
        found = measured[role]
        for quantity, steps in expected.values.items():
            differences.append(_of_numbers(role, quantity, {"": found.values[quantity]}, {"": steps}, tolerance))
        if expected.metrics:
            unlike = found.metrics.keys() ^ expected.metrics.keys()
            assert not unlike, f"{role}: metrics {unlike} on one side only"
            differences.append(_of_numbers(role, "metrics", found.metrics, expected.metrics, tolerance))
        differences += _of_tensors(role, GRADIENTS, found.gradients, expected.gradients, tolerance)
        differences += _of_tensors(role, PARAMETERS, found.parameters, expected.parameters, parameter_tolerance)
    return differences


def worst(differences: Sequence[Difference]) -> Difference:
    """The difference furthest beyond (or nearest to) its tolerance. NaN is beyond any."""
    return max(differences, key=lambda d: math.inf if math.isnan(d.relative) else d.relative / d.tolerance)


def _of_numbers(
    role: str, quantity: str, found: Mapping[str, Sequence[Tensor]], expected: Mapping[str, Sequence[Tensor]], tolerance: float
) -> Difference:
    """Largest difference over named series of steps, each a tensor of numbers of order 1."""
    candidates = [
        _of_step(role, quantity, f"{name} step {step}".strip(), a, b, tolerance)
        for name, steps in expected.items()
        for step, (a, b) in enumerate(zip(found[name], steps, strict=True), 1)
    ]
    return worst(candidates)


def _of_step(role: str, quantity: str, where: str, a: Tensor, b: Tensor, tolerance: float) -> Difference:
    assert a.shape == b.shape, f"{role} {quantity}, {where}: {tuple(a.shape)} and {tuple(b.shape)}"
    absolute = (a.double() - b.double()).abs().flatten()
    relative = absolute / b.double().abs().flatten().clamp(min=1.0)
    index = int(relative.argmax())  # argmax treats NaN as the largest
    place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(index), a.shape))
    return Difference(role, quantity, f"{where} [{place}]", float(absolute[index]), float(relative[index]), tolerance)


def _of_tensors(
    role: str, quantity: str, found: Gathered | None, expected: Gathered | None, tolerance: float
) -> Iterator[Difference]:
    if found is None or expected is None:
        return
    by_name = {name: float((found.tensors[name] - b).abs().max()) for name, b in expected.tensors.items()}
    for what, absolute in ((quantity, by_name), (f"{quantity}, copies", found.spread)):
        ratios = {name: _ratio(size, expected.tensors[name]) for name, size in absolute.items()}
        yield worst([Difference(role, what, name, size, ratios[name], tolerance) for name, size in absolute.items()])


def _ratio(size: float, tensor: Tensor) -> float:
    """`size` relative to the largest element of the tensor."""
    largest = float(tensor.abs().max())
    if math.isnan(size) or math.isnan(largest):
        return math.nan
    # A tensor of zeros (an expert that no token reached) must stay zeros.
    return 0.0 if size == 0 else (size / largest if largest else math.inf)
