"""Comparison of two measurements of `measure.py`: the largest difference of every quantity, and its tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.commands.verify.measure import Gathered, Measured
from megappo.telemetry.tables import table

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
    """Place of the largest difference: step and index, metric, or tensor."""
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
            # Engine fsdp2 counts no tokens of experts.
            unlike = {name for name in found.metrics.keys() ^ expected.metrics.keys() if not name.startswith("router_")}
            assert not unlike, f"{role}: metrics {unlike} on one side only"
            shared = {name: steps for name, steps in expected.metrics.items() if name in found.metrics}
            differences.append(_of_numbers(role, "metrics", found.metrics, shared, tolerance))
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


LEGEND = "[n]: token, sample (bootstrap values, scores) or mini-batch (loss, gradient norm, metrics) of the step, counted from 0"

# By stage: a wrong result of one stage makes the results of all later stages wrong.
_FORWARD = ("logprobs", "entropies", "values", "bootstrap values", "scores")
_EXPERIENCE = ("rewards", "advantages", "returns")


def difference_table(differences: Sequence[Difference]) -> str:
    rows = [("role", "quantity", "largest difference at", "absolute", "relative", "tolerance", "")]
    for d in differences:
        numbers = (f"{d.absolute:.1e}", f"{d.relative:.1e}", f"{d.tolerance:.0e}")
        rows.append((d.role, d.quantity, d.where, *numbers, "ok" if d.agrees else "DIFFERS"))
    return _without_indent(rows)


def _without_indent(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(line[2:] for line in table(rows[0], rows[1:], left=len(rows[0])))


def first_cause(*steps: Sequence[Difference]) -> Difference | None:
    """The difference beyond its tolerance from which the others may follow; None if all agree. Earlier steps come first; within a
    step forward passes, then advantages, then gradients, then results of optimizer steps."""
    for differences in steps:
        differing = [d for d in differences if not d.agrees]
        if differing:
            earliest = min(map(_stage, differing))
            return worst([d for d in differing if _stage(d) == earliest])
    return None


def _stage(difference: Difference) -> int:
    if difference.quantity in _FORWARD:
        return 0
    if difference.quantity in _EXPERIENCE:
        return 1
    return 2 if difference.quantity.startswith(GRADIENTS) else 3


def bisection(alone: Mapping[str, Difference | None]) -> str:
    rows = [(feature, "ok" if cause is None else f"DIFFERS: {describe(cause)}") for feature, cause in alone.items()]
    return _without_indent([("feature alone", "against one rank without it"), *rows])


def verdict(cause: Difference | None, compared: int, alone: Mapping[str, Difference | None], *, in_smaller_layouts: bool) -> str:
    """Verdict and advice in one line. alone: first difference with one feature, if measured. in_smaller_layouts: an axis did not
    fit on the available ranks, so agreement says nothing about it."""
    breaking = [feature for feature, found in alone.items() if found is not None]
    if cause is None:
        agreed = f"all {compared} quantities agree with those of one rank"
        limit = ", in smaller layouts than the run's (see the notes above)" if in_smaller_layouts else ""
        return f"DIFFERS: {agreed}, but not with {', '.join(breaking)} alone" if breaking else f"ok: {agreed}{limit}"
    advice = "no feature alone does that: try two at a time" if alone else "--bisect measures each feature alone"
    if breaking:
        advice = f"so it does with {', '.join(breaking)} alone"
    return f"DIFFERS: {describe(cause)}; {advice}"


def describe(difference: Difference) -> str:
    return (
        f"{difference.role} {difference.quantity} at {difference.where}: "
        f"{difference.relative:.1e} relative (tolerance {difference.tolerance:.0e})"
    )
