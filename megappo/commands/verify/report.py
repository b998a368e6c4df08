"""Table of differences as text, and the first thing to try if numbers differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megappo.commands.verify.compare import GRADIENTS, Difference, worst
from megappo.commands.verify.features import DISTRIBUTED
from megappo.config.role_sections import key_of_role
from megappo.telemetry.tables import table

LEGEND = "[n]: token, sample (bootstrap values, scores) or mini-batch (loss, gradient norm, metrics) of the step, counted from 0"

# By stage: a wrong result of one stage makes the results of all later stages wrong.
_FORWARD = ("logprobs", "entropies", "values", "bootstrap values", "scores")
_EXPERIENCE = ("rewards", "advantages", "returns")

# Settings that turn a feature off, in the order in which to try them: the rarer a feature, the likelier its fault.
_WITHOUT: Mapping[str, str] = {
    "engine": "{role}.engine=megatron",
    "ranks": "{role}.ranks=all",
    "etp": "{role}.parallel.etp=1",
    "ep": "{role}.parallel.ep=1",
    "cp": "{role}.parallel.cp=1",
    "vpp": "{role}.parallel.vpp=1",
    "sequence_parallel": "{role}.parallel.sequence_parallel=false",
    "pp": "{role}.parallel.pp=1",
    "tp": "{role}.parallel.tp=1",
    DISTRIBUTED: "{role}.optimizer.distributed=false",
    "compile": "{role}.compile=false",
    "reduce_once": "{role}.reduce_once=false",
    "recompute": "{role}.recompute=none",
    "offload": "{role}.offload=[]",
    "micro_batch_tokens": "{role}.micro_batch_tokens=1000000",
}


def difference_table(differences: Sequence[Difference]) -> str:
    rows = [("role", "quantity", "largest difference at", "absolute", "relative", "tolerance", "")]
    for d in differences:
        numbers = (f"{d.absolute:.1e}", f"{d.relative:.1e}", f"{d.tolerance:.0e}")
        rows.append((d.role, d.quantity, d.where, *numbers, "ok" if d.agrees else "DIFFERS"))
    return "\n".join(table(rows[0], rows[1:], left=len(rows[0])))


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
    return "\n".join(table(["feature alone", "against one rank without it"], rows, left=2))


def verdict(
    cause: Difference | None,
    compared: int,
    used: Mapping[str, Sequence[str]],
    alone: Mapping[str, Difference | None],
    *,
    in_smaller_layouts: bool,
) -> str:
    """Verdict and advice in one line. used: role -> its features (`features.features`). alone: first difference with one feature,
    if measured. in_smaller_layouts: an axis did not fit on the available ranks, so agreement says nothing about it."""
    breaking = [feature for feature, found in alone.items() if found is not None]
    if cause is None:
        agreed = f"all {compared} quantities agree with those of one rank"
        limit = ", in smaller layouts than the run's (see the notes above)" if in_smaller_layouts else ""
        return f"DIFFERS: {agreed}, but not with {', '.join(breaking)} alone" if breaking else f"ok: {agreed}{limit}"
    return f"DIFFERS: {describe(cause)}; {_next_step(cause, used, alone, breaking)}"


def _next_step(
    cause: Difference, used: Mapping[str, Sequence[str]], alone: Mapping[str, Difference | None], breaking: Sequence[str]
) -> str:
    if breaking:
        return f"so it does with {', '.join(breaking)} alone"
    if alone:
        return "no feature alone does that: try two at a time"
    computing = "critic" if "critic" in used else "policy"  # advantages and returns come from its values or log-probs
    role = cause.role if cause.role in used else computing
    candidates = [override for feature, override in _WITHOUT.items() if feature in used[role]]
    first = f"try first {candidates[0].format(role=key_of_role(role))}, or " if candidates else ""
    return f"{first}--bisect for each feature alone"


def describe(difference: Difference) -> str:
    return (
        f"{difference.role} {difference.quantity} at {difference.where}: "
        f"{difference.relative:.1e} relative (tolerance {difference.tolerance:.0e})"
    )
