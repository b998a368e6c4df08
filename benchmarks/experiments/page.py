"""docs/experiments.md and its pictures, from benchmarks/experiments.md.in and docs/experiments.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.arms import ARMS, BASELINE, EXPERIMENTS, GROUP, UPDATES
from benchmarks.experiments.picture import Panel, draw_bands
from benchmarks.experiments.results import LAST, SMOOTHED, Results, Spread, curve, missing, summary
from benchmarks.experiments.tasks import COMMON, ROOT, TASKS

TEMPLATE = ROOT / "benchmarks" / "experiments.md.in"
FIGURES = ROOT / "docs" / "experiments.json"
PAGE = ROOT / "docs" / "experiments.md"
IMAGES = ROOT / "docs" / "images"
HEAD = ("task", "arm", "step at the goal", f"reward, last {LAST} steps", "held-out", "explained variance")


def render(template: str, figures: Mapping[str, Any]) -> str:
    """The page. figures: content of docs/experiments.json. ValueError if the template names something unknown."""
    results = figures["results"]
    texts = {
        "machine": figures["machine"],
        "seeds": ", ".join(map(str, figures["seeds"])),
        "missing": missing_text(results, figures["seeds"]),
        "smoothed": str(SMOOTHED),
        "steps": str(COMMON["trainer.steps"]),
        "updates": str(UPDATES),
        "tasks": markdown(("task", "", "responses of a step", "goal", "keys"), list(task_rows())),
        "arms": markdown(("arm", "keys over the baseline's"), list(arm_rows())),
        "baseline": markdown(HEAD, list(result_rows(results, [BASELINE]))),
        **{name: section(results, experiment.arms) for name, experiment in EXPERIMENTS.items()},
    }
    for name, text in texts.items():
        template = template.replace("{{" + name + "}}", text)
    if "{{" in template:
        raise ValueError(f"the template asks for {template.split('{{')[1].split('}}')[0]}, which is no figure")
    return template


def missing_text(results: Results, seeds: Sequence[int]) -> str:
    """One sentence."""
    left = missing(results, seeds)
    parts = [
        f"{task}: " + ", ".join(f"{ARMS[arm].title} (seed {', '.join(map(str, of_arm))})" for arm, of_arm in arms.items())
        for task, arms in left.items()
    ]
    return f"Runs that are missing: {'; '.join(parts)}." if parts else "No run is missing."


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join((first, "|" + "---|" * len(head), *others))


def section(results: Results, arms: Sequence[str]) -> str:
    """The arms but the baseline, which has a table of its own; one alone needs no name."""
    rows = [row for row in result_rows(results, arms) if row[1] != ARMS[BASELINE].title]
    if len(arms) == 2:
        return markdown((HEAD[0], *HEAD[2:]), [[row[0], *row[2:]] for row in rows])
    return markdown(HEAD, rows)


def result_rows(results: Results, arms: Sequence[str]) -> Iterator[list[str]]:
    """A row for each task and arm with a run. A mark stands where the range of the seeds lies beside the baseline's."""
    for task, of_task in TASKS.items():
        found = {arm: summary(results[task][arm], of_task.goal) for arm in arms if results.get(task, {}).get(arm)}
        for arm, one in found.items():
            base = found.get(BASELINE) if arm != BASELINE else None
            yield [
                task,
                ARMS[arm].title,
                marked(one.to_goal, base and base.to_goal, 0),
                marked(one.reward, base and base.reward, 3),
                marked(one.held_out, base and base.held_out, 3),
                "-" if one.explained is None else marked(one.explained, base and base.explained, 2),
            ]


def marked(one: Spread, base: Spread | None, digits: int) -> str:
    """`<` or `>`: all seeds are below, or above, all of the baseline's."""
    sign = "" if base is None else {"within": "", "lower": " <", "higher": " >"}[one.against(base)]
    return f"{one.text(digits)}{sign}"


def task_rows() -> Iterator[list[str]]:
    for name, task in TASKS.items():
        yield [name, task.title, str(task.samples), f"{task.goal:g}", keys_text(task.keys)]


def arm_rows() -> Iterator[list[str]]:
    for arm in ARMS.values():
        samples = f"`rollout.samples_per_prompt={arm.group}`, {GROUP // arm.group} times the prompts" if arm.group != GROUP else ""
        unshifted = "" if arm.shifted else "values stay at the token whose output they are: no key, a function is replaced"
        yield [arm.title, ", ".join(filter(None, (keys_text(arm.keys), samples, unshifted))) or "-"]


def keys_text(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={value_text(value)}`" for key, value in keys.items())


def value_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_text(one)}" for key, one in value.items()) + "}"
    if (
        isinstance(value, list) and value and isinstance(value[0], dict)
    ):  # parts of the reward: paths differ from machine to machine
        return "[" + ", ".join(str(one.get("function", one.get("name"))) for one in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------------------- pictures


def draw(results: Results, name: str, images: Path = IMAGES) -> Path:
    """Draw an experiment: a column for each task, reward above explained variance."""
    rows = [[panel(results, task, EXPERIMENTS[name].arms, metric) for task in TASKS] for metric in ("reward", "explained")]
    draw_bands(rows, path := images / f"experiment_{name}.svg")
    return path


def panel(results: Results, task: str, arms: Sequence[str], metric: str) -> Panel:
    """Curves of all seeds that have the metric."""
    lines = {}
    for arm in arms:
        curves = [curve(record, metric) for record in results.get(task, {}).get(arm, {}).values()]
        lines[ARMS[arm].title] = [one for one in curves if any(value is not None for value in one.values())]
    return Panel(f"{task}: {'reward' if metric == 'reward' else 'explained variance'}", lines)
