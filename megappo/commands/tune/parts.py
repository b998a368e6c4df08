"""The parts of a step in their order (trainer/ppo.py, stages 2 to 8), and what limits each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megappo.commands.plan.phases import pass_name
from megappo.commands.tune.candidates import Choice
from megappo.commands.tune.cost import stage_of
from megappo.commands.tune.generation import evaluated
from megappo.config.schema import TrainConfig

# Cause of seconds in a role's phase -> what limits it.
LIMITS = {
    **dict.fromkeys(("matmul", "attention", "head", "tower"), "compute"),
    **dict.fromkeys(("memory", "optimizer"), "memory"),
    **dict.fromkeys(("tp", "cp", "ep", "pp", "dp"), "links"),
    **dict.fromkeys(("host", "offload"), "host"),
    "bubble": "pipeline",
}


class Part(NamedTuple):
    """A part of a step."""

    name: str
    timing: str
    """Stage of a run's `timing/` that it is counted in; empty if in none."""
    seconds: float | None
    """None if the model does not know it."""
    limit: str = ""
    """What most of its seconds wait for."""
    share: float = 0.0
    """Share of its seconds that do."""
    begin: float = 0.0
    """Seconds from the begin of the step."""
    role: str | None = None
    """The role that works."""


def parts_of(choice: Choice) -> list[Part]:
    """Parts of the step of a run that take time, in their order, and those that the model does not know."""
    config, cost = choice.plan.config, choice.rollout.cost
    causes: Mapping[str, float] = {"compute": choice.generate_s}
    if cost is not None:
        causes = {**cost.limits, "compute": cost.limits.get("compute", 0.0) + cost.prefill_s}
    found = [_part("generate", "generate", choice.generate_s, causes)]
    trained = choice.generate_s if choice.overlap is None else 0.0  # an asynchronous run trains beside its generation
    for work in choice.timetable.works({role: one.cost.phases for role, one in choice.roles.items()}):
        limits: dict[str, float] = defaultdict(float)
        for cause, seconds in choice.roles[work.role].cost.causes(work.phase).items():
            limits[LIMITS[cause]] += seconds
        name = pass_name(config, work.role) if work.phase == "forward" else f"{work.role} update"
        part = _part(name, stage_of(work.role, work.phase), work.seconds, limits)
        found.append(part._replace(begin=trained + work.begin, role=work.role))
    end = trained + choice.training_s
    found.append(_part("push weights", "push_weights", choice.push_s, {"host": choice.push_s})._replace(begin=end))
    end += choice.push_s
    if evaluated(config):
        found.append(Part("evaluations", "evaluate", choice.rollout.evaluate_s, begin=end))
    end += choice.rollout.evaluate_s or 0.0
    found.append(_part("the rest", "", choice.rest_s, {"host": choice.rest_s})._replace(begin=end))
    unknown = [Part(name, stage, None) for name, stage in _unknown(config, choice.knows_turns)]
    if config.rollout.shown_images:  # how many an environment shows is not known
        seeing = [part for part in found if part.name == "generate" or part.role is not None]
        unknown += [Part(f"vision tower, {part.name}", part.timing, None) for part in seeing]
    return [*(part for part in found if part.seconds is None or part.seconds > 0), *unknown]


def _part(name: str, timing: str, seconds: float, limits: Mapping[str, float]) -> Part:
    if seconds <= 0:
        return Part(name, timing, seconds)
    first = max(limits, key=lambda limit: limits[limit])
    return Part(name, timing, seconds, first, min(1.0, limits[first] / seconds))


def _unknown(config: TrainConfig, known_turns: bool) -> Iterator[tuple[str, str]]:
    """Parts of a step whose time no model of hardware knows: (name, stage). known_turns: a run has shown the environment's."""
    if config.rollout.environment is not None and not known_turns:
        yield "environment", "generate"
    kinds = {part.kind for _, part in config.reward.all_parts.values()} - {"name", "model"}
    if kinds:
        yield f"reward ({', '.join(sorted(kinds))})", "score"


def by_stage(parts: Iterable[Part]) -> dict[str, float | None]:
    """Stage of `timing/` -> seconds; None if one of its parts is unknown."""
    found: dict[str, list[float | None]] = defaultdict(list)
    for part in parts:
        if part.timing:
            found[part.timing].append(part.seconds)
    return {stage: None if None in seconds else sum(one or 0.0 for one in seconds) for stage, seconds in found.items()}
