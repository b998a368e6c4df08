"""`megappo compare`: the curves of several runs side by side, the differences of their settings, and limits for CI. Reads only the
files of the runs, also beside a live one. Imports no torch."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.commands.compare.curves import (
    Curve,
    Difference,
    curve_of,
    difference,
    find_metrics,
    steps_to_show,
    usual_metrics,
)
from megappo.commands.runs.read import BROKEN, Rows, Run, read_rows, read_run, value_text
from megappo.config.errors import ConfigError
from megappo.config.output_file import check_output_file
from megappo.config.redaction import redacted_values
from megappo.config.run_directory import CHECKPOINTS, LAUNCHES
from megappo.config.yaml_reader import parse_yaml
from megappo.runtime.ending import CONFIG
from megappo.telemetry.plot import picture_of
from megappo.telemetry.tables import plain, table

ABSENT = "-"
UNKNOWN = "?"
OWN = ("run.name", "run.output_dir")  # keys that differ between any two runs
# Facts of a checkpoint (`trainer/run_facts.py`) that the configuration does not say.
_FACTS = ("versions", "commits", "tokenizer", "reference", "reward_model", "data", "code")
_LAUNCH = ("revision", "python", "machine", "gpus", "packages", "environment")
# Variables of one job, which differ between any two.
_OF_A_JOB = re.compile(r"environment\.(SLURM|SBATCH|SRUN|MASTER|RANK|WORLD|LOCAL|HOSTNAME|TORCHELASTIC|MEGAPPO_LEASE)(_|$)")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Values = Mapping[str, str]  # dotted name -> value as text; empty if nothing is known


def settings_of(run_dir: Path) -> Values:
    """Read the resolved configuration, secrets hidden; empty if it cannot be read."""
    try:
        data, _ = parse_yaml((run_dir / CONFIG).read_text(encoding="utf-8"), CONFIG)
        return dict(_flat(redacted_values(data)))
    except (ConfigError, *BROKEN):
        return {}


def facts_of(run_dir: Path) -> Values:
    """Read versions and identities of data, models and reward code from the newest readable checkpoint; empty without one."""
    directory = CheckpointDirectory(run_dir / CHECKPOINTS)
    try:
        for step in directory.steps():
            try:
                facts = dict(directory.read(step).facts)
                facts["code"] = facts.get("reward", {}).get("code")
                # Paths differ between machines and do not identify the content.
                return {key: value for key, value in _flat(_part(facts, _FACTS)) if not key.endswith(".path")}
            except BROKEN:
                continue  # damaged, or removed by a live run; an older one says the same
    except BROKEN:
        pass  # same as having no checkpoint
    return {}


def launch_of(run_dir: Path) -> Values:
    """Read code, packages, machine and environment of the newest launch; empty if there is no record, as after `megappo train`."""
    try:
        newest = max((run_dir / LAUNCHES).glob("*/launch.json"), key=lambda path: path.stat().st_mtime)
        record = json.loads(newest.read_text(encoding="utf-8"))
        return {key: value for key, value in _flat(_part(record, _LAUNCH)) if not _OF_A_JOB.match(key)}
    except BROKEN:  # a ValueError if there is none
        return {}


def differing(runs: Sequence[Values], without: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return key -> value of each run for the keys whose values differ; ABSENT where a run lacks the key. A run of which nothing is
    known shows UNKNOWN and differs from none."""
    keys = dict.fromkeys(key for run in runs for key in run)
    values = {key: [run.get(key, ABSENT) if run else UNKNOWN for run in runs] for key in keys if key not in without}
    return {key: one for key, one in values.items() if len(set(one) - {UNKNOWN}) > 1}


def _part(data: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: data[key] for key in keys if key in data}


def _flat(data: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value as text) from nested mappings; a SHA-256 is cut short."""
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
        return
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, default=str)
    yield prefix, text[:12] if _SHA256.fullmatch(text) else text


LONGEST_VALUE = 44  # characters of a setting in a column


@dataclass(frozen=True)
class _Compared:
    """The runs by name and what their curves show."""

    runs: Mapping[str, Run]
    curves: Mapping[str, Mapping[str, Curve]]  # metric -> run -> curve
    differences: Mapping[str, Difference]
    limits: Mapping[str, float]


@dataclass(frozen=True)
class _Made:
    """What the runs were made of, as far as it differs: key -> value of each run."""

    settings: Mapping[str, Sequence[str]]
    recorded: Mapping[str, Sequence[str]]
    notes: Sequence[str]  # what is not known


@dataclass(frozen=True)
class _Limit:
    """A limit applied to the runs."""

    metric: str
    most: float
    reason: str  # why it is exceeded; empty if it is not


def compare_runs(args: argparse.Namespace) -> int:
    """Print and draw the comparison; return 1 if a limit is exceeded, else 0. Raises ConfigError, one line, for bad input."""
    target = None if args.plot is None else check_output_file("--plot", args.plot, (".png", ".svg", ".pdf"))
    compared = _compare(args)
    limits = [_hold(metric, most, compared.differences[metric]) for metric, most in compared.limits.items()]
    made = _made_of(compared.runs)
    if args.json:
        print(json.dumps(_facts(compared, made, limits), indent=1))
    else:
        print("\n".join(_report(compared, made, limits, args)))
    if target is not None:
        _draw(compared, target, args)
    return int(any(limit.reason for limit in limits))


def _made_of(runs: Mapping[str, Run]) -> _Made:
    roots = [run.path for run in runs.values()]
    settings = [settings_of(root) for root in roots]
    facts = [facts_of(root) for root in roots]
    launches = [launch_of(root) for root in roots]
    unknown = {"has no config.yaml that can be read: its settings": settings}
    unknown["has no checkpoint that can be read: its versions and data"] = facts
    notes = [f"{name}: {what} are not known" for what, known in unknown.items() for name, one in zip(runs, known) if not one]
    recorded = differing(facts) | differing(launches)
    return _Made(differing(settings, without=OWN), recorded, notes)


def _draw(compared: _Compared, target: Path, args: argparse.Namespace) -> None:
    title = f"means of {args.window} steps" if args.window > 1 else ""
    try:
        target.write_bytes(picture_of(compared.curves, title, target.suffix[1:]))
    except OSError as error:
        raise ConfigError(f"--plot {target}: {error.strerror}") from None
    if not args.json:
        print(f"\n  picture: {target}")


def _compare(args: argparse.Namespace) -> _Compared:
    if len(args.runs) < 2:
        raise ConfigError(f"compare: name two runs or more, not {len(args.runs)} ({' '.join(args.runs)})")
    paths = [Path(folder) for folder in args.runs]
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ConfigError(f"compare: {path} is named twice")
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    rows = {plain(name): _rows(path, args.until) for name, path in zip(names, paths)}
    known = list(rows.values())
    asked = dict(args.max_difference)
    limits = {metric: most for pattern, most in asked.items() for metric in find_metrics([pattern], known, "--max-difference")}
    metrics = find_metrics(args.metric, known, "--metric") if args.metric else usual_metrics(known)
    metrics = list(dict.fromkeys([*metrics, *limits]))
    found = {metric: {name: curve_of(one, metric, args.window) for name, one in rows.items()} for metric in metrics}
    differences = {metric: difference(curves, args.tolerance) for metric, curves in found.items()}
    return _Compared({name: read_run(path) for name, path in zip(rows, paths)}, found, differences, limits)


def _rows(path: Path, until: int | None) -> Rows:
    rows = read_rows(path)
    if until is None:
        return rows
    if min(rows) > until:
        raise ConfigError(f"--until {until}: the first step of {path} is {min(rows)}")
    return {step: row for step, row in rows.items() if step <= until}


def _hold(metric: str, most: float, found: Difference) -> _Limit:
    # A step that only some runs have logged is unknown, and unknown does not pass.
    if found.missing:
        return _Limit(metric, most, f"{found.missing}; --until N compares the steps up to N alone")
    if found.largest is None:
        return _Limit(metric, most, "no step has a finite value")
    if math.isinf(found.largest):
        return _Limit(metric, most, f"not finite in one run alone at step {found.at}")
    return _Limit(metric, most, f"{found.largest:.6g} at step {found.at}" if found.largest > most else "")


# ------------------------------------------------------------------------------------------------------------------ report


def _report(compared: _Compared, made: _Made, limits: Sequence[_Limit], args: argparse.Namespace) -> list[str]:
    rows = [[name, run.state, _step_text(run), plain(run.path)] for name, run in compared.runs.items()]
    lines = [*table(["run", "state", "step", "directory"], rows, left=4), "", *_metric_lines(compared, args)]
    names = list(compared.runs)
    for title, different in (("setting", made.settings), ("recorded", made.recorded)):
        cells = [[key, *(plain(value, LONGEST_VALUE) for value in values)] for key, values in different.items()]
        lines += ["", *(table([title, *names], cells, left=1 + len(names)) if cells else [f"  {_SAME[title]}"])]
    lines += [f"  {note}" for note in made.notes]
    if limits:
        failed = [limit for limit in limits if limit.reason]
        lines += ["", *(f"  {one.metric} differs by more than {one.most:g}: {one.reason}" for one in failed)]
        lines.append(f"  {len(limits) - len(failed)} of {len(limits)} limits hold")
    return lines


_SAME = {
    "setting": "all settings are equal, except names and directories",
    "recorded": "versions and data are equal as far as they were recorded",
}


def _metric_lines(compared: _Compared, args: argparse.Namespace) -> list[str]:
    steps = steps_to_show(compared.curves)
    head = ["metric", "run", *(f"step {step}" for step in steps), "last", "largest difference", "apart from"]
    rows: list[list[str]] = []
    for metric, of_metric in compared.curves.items():
        found = compared.differences[metric]
        for number, (name, curve) in enumerate(of_metric.items()):
            values = [value_text(curve.get(step)) for step in steps] + [value_text(_last(curve))]
            ends = [_largest_text(found), "-" if found.parts is None else f"step {found.parts}"] if number == 0 else ["", ""]
            rows.append([metric if number == 0 else "", name, *values, *ends])
    mean = f"means of {args.window} steps; " if args.window > 1 else ""
    counts = sorted({found.steps for found in compared.differences.values()})
    compared_steps = f"{counts[0]} steps" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} steps"
    note = f"{mean}{compared_steps} compared; apart: by more than {args.tolerance:g} of the largest value"
    return [*table(head, rows, left=2), "", f"  {note}"]


def _last(curve: Curve) -> float | None:
    return list(curve.values())[-1] if curve else None


def _largest_text(found: Difference) -> str:
    return "-" if found.largest is None else f"{found.largest:.3g} at {found.at}"


def _step_text(run: Run) -> str:
    return f"{'-' if run.step is None else run.step}" + ("" if run.total_steps is None else f"/{run.total_steps}")


def _facts(compared: _Compared, made: _Made, limits: Sequence[_Limit]) -> dict[str, Any]:
    names = list(compared.runs)
    metrics = {}
    for metric, curves in compared.curves.items():
        found = asdict(compared.differences[metric])
        # JSON has no infinity: null, whose step (`at`) is kept.
        found["largest"] = None if found["largest"] is None or math.isinf(found["largest"]) else found["largest"]
        metrics[metric] = {**found, "runs": {name: {str(step): value for step, value in curves[name].items()} for name in names}}
    return {
        "runs": {name: {"path": str(run.path), "state": run.state, "step": run.step} for name, run in compared.runs.items()},
        "metrics": metrics,
        "settings": {key: dict(zip(names, values)) for key, values in made.settings.items()},
        "recorded": {key: dict(zip(names, values)) for key, values in made.recorded.items()},
        "notes": list(made.notes),
        "limits": [{"metric": one.metric, "most": one.most, "exceeded": one.reason or None} for one in limits],
    }
