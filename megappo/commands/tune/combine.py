"""Combinations of one candidate for every role that fit together, the fastest found by branch and bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megappo.commands.tune.candidates import Candidate, Need, Timetable
from megappo.parallel.layout import ParallelLayout


def pareto(
    needs: Sequence[Need],
    communicators: Callable[[ParallelLayout], int],
    times: Sequence[tuple[float, ...]] | None = None,
) -> list[int]:
    """Indices of the needs that no earlier one undercuts in every respect. communicators: bytes of a layout's own communicators.
    times: seconds that count as well; None if earlier needs are faster in every respect."""
    # Roles with the same layout share communicators. That is ignored: combining all layouts that could be shared takes too long.
    front: list[tuple[float, ...]] = []
    places = []
    for place, need in enumerate(needs):
        own = need.resident + communicators(need.layout), need.training, need.pushed, *(times[place] if times is not None else ())
        if not any(all(a <= b for a, b in zip(other, own)) for other in front):
            front.append(own)
            places.append(place)
    return places


def combinations(
    fronts: Mapping[str, Sequence[Candidate]], fits: Callable[[Mapping[str, Need]], bool], timetable: Timetable, limit_s: float
) -> Iterator[dict[str, Candidate]]:
    """Yield combinations of one candidate per role that fit together, each faster than those before. fits: takes a subset of the
    roles; once false, more roles do not fit either. limit_s: bound on generation by a role, passes and updates."""
    best = limit_s
    roles = list(fronts)
    # Lower bound of a step: each role's fastest pass and fastest updates, even of different candidates.
    least = {
        role: {phase: min(one.cost.phases[phase] for one in front) for phase in front[0].cost.phases}
        for role, front in fronts.items()
    }
    generating = {role: min(one.generate_s for one in front) for role, front in fronts.items()}

    def extend(chosen: dict[str, Candidate]) -> Iterator[dict[str, Candidate]]:
        nonlocal best
        if len(chosen) == len(roles):
            best = _seconds(chosen, least, generating, timetable)
            yield chosen
            return
        role = roles[len(chosen)]
        for one in fronts[role]:
            more = {**chosen, role: one}
            # Cut this branch if even the fastest candidates of the open roles would not beat the best combination so far.
            if _seconds(more, least, generating, timetable) < best and fits({name: it.need for name, it in more.items()}):
                yield from extend(more)

    return extend({})


def _seconds(
    chosen: Mapping[str, Candidate],
    least: Mapping[str, Mapping[str, float]],
    generating: Mapping[str, float],
    timetable: Timetable,
) -> float:
    """Lower bound of the seconds of a step with these candidates."""
    phases = {role: chosen[role].cost.phases if role in chosen else least[role] for role in least}
    return timetable.step_s(phases) + sum(chosen[role].generate_s if role in chosen else generating[role] for role in least)
