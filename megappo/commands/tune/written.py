"""`--as-is`: the step of a configuration as it is written, part by part, with what limits each, beside what a run took."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from megappo.commands.plan.estimate import Plan
from megappo.commands.runs.read import read_rows
from megappo.commands.tune.candidates import Choice, Machine
from megappo.commands.tune.cost import pictures_of, workload_of
from megappo.commands.tune.parts import by_stage, parts_of
from megappo.commands.tune.report import assumptions, overlap_lines, step_lines
from megappo.commands.tune.search import Search
from megappo.config.errors import ConfigError
from megappo.telemetry.hardware import Hardware
from megappo.telemetry.tables import figures, table_of


def measured_stages(run: Path) -> dict[str, float]:
    """Stage -> its usual seconds in the steps of a run but the first, which compiles and connects. ConfigError for a run without
    timings."""
    rows = list(read_rows(run).values())
    names = {name for row in rows for name in row if name.startswith("timing/") and name.endswith("_s") and name.count("/") == 1}
    rows = rows[1:] or rows
    seconds = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    # An evaluation every tenth step costs a tenth of its time per step.
    usual = {name: median(values) if 2 * len(values) > len(rows) else sum(values) / len(rows) for name, values in seconds.items()}
    found = {name.removeprefix("timing/").removesuffix("_s"): usual[name] for name, values in seconds.items() if values}
    if "step" not in found:
        raise ConfigError(f"--calibrate {run}: the run logged no timings (timing/step_s); name one that ended a step")
    return found


def factors(choice: Choice, measured: Mapping[str, float]) -> dict[str, float]:
    """Stage -> seconds that a run took by those predicted, for the stages that took time and whose parts are all known."""
    predicted = by_stage(parts_of(choice))
    return {stage: measured[stage] / seconds for stage, seconds in predicted.items() if seconds and measured.get(stage)}


def written_lines(search: Search, choice: Choice, measured: Mapping[str, float] | None = None) -> list[str]:
    """Table of a step as it is written. measured: stages of a run."""
    found = {} if measured is None else factors(choice, measured)
    return [
        *assumptions(search.workload, search.machine),
        "",
        *step_lines(search, choice, "as written", found),
        *([] if measured is None else _calibrated(choice, found, measured)),
    ]


def _calibrated(choice: Choice, found: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """The stages of a run beside the prediction, and the one in which the model is the most off."""
    rows = []
    for stage, factor in found.items():
        rows.append({"measured": stage, "s": figures(measured[stage]), "measured / predicted": f"{factor:.2f}"})
    lines = ["", *table_of(rows)] if rows else []
    step = sum(part.seconds * found.get(part.timing, 1.0) for part in parts_of(choice) if part.seconds is not None)
    if rows:
        worst = max(found, key=lambda stage: abs(measured[stage] - measured[stage] / found[stage]))
        off = measured[worst] - measured[worst] / found[worst]
        lines.append(f"  the model is off most in {worst}: {figures(abs(off))} s too {'little' if off > 0 else 'much'}")
    return [*lines, f"  with these factors {figures(step)} s; the run's steps took {figures(measured['step'])}"]


def written_facts(choice: Choice) -> dict[str, Any]:
    """The parts for JSON; null for seconds that are unknown."""
    return {"step_seconds": choice.total_s, "parts": [part._asdict() for part in parts_of(choice)]}


def lines_of_plan(plan: Plan, hardware: Hardware, unpassed: frozenset[str]) -> list[str]:
    """The step of a planned run in a few lines, and the smallest max_staleness that reaches the floor of an asynchronous one;
    responses, or examples, are all as long as allowed. unpassed: see `Workload`."""
    if not plan.samples and not plan.is_supervised:
        return ["unknown: the model of a step has a policy that samples, or examples"]
    machine = Machine(plan.world_size, hardware)
    pictures = pictures_of(plan.config, plan.archs, plan.shown)
    workload = replace(workload_of(plan.config), given=plan.is_supervised, unpassed=unpassed, pictures=pictures)
    choice = Search(plan.config, plan.archs, machine, workload, ()).as_written()
    said = (
        f"{part.name} {figures(part.seconds)}{f' ({part.limit})' if part.limit else ''}"
        if part.seconds is not None
        else f"{part.name} unknown"
        for part in parts_of(choice)
    )
    sentences = [f"about {figures(choice.total_s)} s a step: {', '.join(said)}", *map(str.strip, overlap_lines(choice))]
    return [line for one in sentences for line in textwrap.wrap(one, 110, break_on_hyphens=False)]
