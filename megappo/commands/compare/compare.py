"""`megappo compare`: the curves of several runs side by side, the differences of their settings, and limits for CI. Reads only the
files of the runs, also beside a live one. Imports no torch."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.commands.compare.curves import Curve, Difference, curve_of, difference, find_metrics, steps_to_show, usual_metrics
from megappo.commands.runs.read import BROKEN, Rows, Run, read_rows, read_run, step_text, value_text
from megappo.config.errors import ConfigError
from megappo.config.keys import leaves
from megappo.config.output_file import check_output_file
from megappo.config.redaction import redacted_values
from megappo.config.run_directory import CHECKPOINTS, LAUNCHES
from megappo.config.yaml_reader import parse_yaml
from megappo.runtime.ending import CONFIG
from megappo.telemetry.metrics import finite_or_none
from megappo.telemetry.plot import picture_of
from megappo.telemetry.tables import plain, table

ABSENT = "-"
UNKNOWN = "?"
OWN = ("run.name", "run.output_dir")  # keys that differ between any two runs
# Facts of a checkpoint (`trainer/run_facts.py`) that the configuration does not say.
_FACTS = ("versions", "commits", "tokenizer", "reference", "teacher", "reward_model", "data", "code")
_LAUNCH = ("revision", "python", "machine", "gpus", "packages", "environment")
# Variables of one job, which differ between any two.
_OF_A_JOB = re.compile(r"environment\.(SLURM|SBATCH|SRUN|MASTER|RANK|WORLD|LOCAL|HOSTNAME|TORCHELASTIC|MEGAPPO_LEASE)(_|$)")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Values = Mapping[str, str]  # dotted name -> value as text; empty if nothing is known


def settings_of(run_dir: Path) -> Values:
    """Read the resolved configuration, secrets hidden; empty if it cannot be read."""
    try:
        data, _ = parse_yaml((run_dir / CONFIG).read_text(encoding="utf-8"), CONFIG)
        return _texts(redacted_values(data))
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
                return {key: value for key, value in _texts(_part(facts, _FACTS)).items() if not key.endswith(".path")}
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
        return {key: value for key, value in _texts(_part(record, _LAUNCH)).items() if not _OF_A_JOB.match(key)}
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


def _texts(data: Any) -> dict[str, str]:
    """Map dotted names to values as texts; a SHA-256 is cut short."""
    texts = {key: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False, default=str) for key, one in leaves(data)}
    return {key: text[:12] if _SHA256.fullmatch(text) else text for key, text in texts.items()}


LONGEST_VALUE = 44  # characters of a setting in a column


@dataclass(frozen=True)
class Comparison:
    """The comparison of all runs, which the report and the JSON show."""

    runs: Mapping[str, Run]
    curves: Mapping[str, Mapping[str, Curve]]  # metric -> run -> curve
    differences: Mapping[str, Difference]
    limits: Sequence[tuple[str, float, str]]  # (metric, limit, why it is exceeded; empty if it is not)
    settings: Mapping[str, Sequence[str]]  # key -> value of each run, if they differ
    recorded: Mapping[str, Sequence[str]]  # key -> value of each run: versions, data and launches that differ
    notes: Sequence[str]  # what is not known


def compare_runs(args: argparse.Namespace) -> int:
    """Print and draw the comparison; return 1 if a limit is exceeded, else 0. Raises ConfigError, one line, for bad input."""
    target = None if args.plot is None else check_output_file("--plot", args.plot, (".png", ".svg", ".pdf"))
    found = _compare(args)
    print(json.dumps(_facts(found), indent=1) if args.json else "\n".join(_report(found, args)))
    if target is not None:
        try:
            title = f"means of {args.window} steps" if args.window > 1 else ""
            target.write_bytes(picture_of(found.curves, title, target.suffix[1:]))
        except OSError as error:
            raise ConfigError(f"--plot {target}: {error.strerror}") from None
        if not args.json:
            print(f"\n  picture: {target}")
    return int(any(reason for _, _, reason in found.limits))


def _compare(args: argparse.Namespace) -> Comparison:
    rows = {name: _rows(path, args.until) for name, path in _named(args.runs).items()}
    known = list(rows.values())
    asked = dict(args.max_difference)
    limits = {metric: most for pattern, most in asked.items() for metric in find_metrics([pattern], known, "--max-difference")}
    metrics = find_metrics(args.metric, known, "--metric") if args.metric else usual_metrics(known)
    curves = {
        metric: {name: curve_of(one, metric, args.window) for name, one in rows.items()}
        for metric in {**dict.fromkeys(metrics), **limits}
    }
    differences = {metric: difference(found, args.tolerance) for metric, found in curves.items()}
    runs = {name: read_run(path) for name, path in _named(args.runs).items()}
    roots = [run.path for run in runs.values()]
    settings, facts = [settings_of(root) for root in roots], [facts_of(root) for root in roots]
    unknown = {"has no config.yaml that can be read: its settings": settings}
    unknown["has no checkpoint that can be read: its versions and data"] = facts
    return Comparison(
        runs,
        curves,
        differences,
        [(metric, most, _excess(most, differences[metric])) for metric, most in limits.items()],
        differing(settings, without=OWN),
        differing(facts) | differing([launch_of(root) for root in roots]),
        [f"{name}: {what} are not known" for what, values in unknown.items() for name, one in zip(runs, values) if not one],
    )


def _named(folders: Sequence[str]) -> dict[str, Path]:
    """Map names to runs: the last parts of the paths, or the paths where two of those are equal."""
    if len(folders) < 2:
        raise ConfigError(f"compare: name two runs or more, not {len(folders)} ({' '.join(folders)})")
    paths = [Path(folder) for folder in folders]
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ConfigError(f"compare: {path} is named twice")
    names = [path.resolve().name for path in paths]
    return {plain(name): path for name, path in zip(names if len(set(names)) == len(names) else map(str, paths), paths)}


def _rows(path: Path, until: int | None) -> Rows:
    rows = read_rows(path)
    if until is not None and min(rows) > until:
        raise ConfigError(f"--until {until}: the first step of {path} is {min(rows)}")
    return {step: row for step, row in rows.items() if until is None or step <= until}


def _excess(most: float, found: Difference) -> str:
    """Say why a limit is exceeded; empty if it is not."""
    # A step that only some runs have logged is unknown, and unknown does not pass.
    if found.missing:
        return f"{found.missing}; --until N compares the steps up to N alone"
    if found.largest is None:
        return "no step has a finite value"
    if math.isinf(found.largest):
        return f"not finite in one run alone at step {found.at}"
    return f"{found.largest:.6g} at step {found.at}" if found.largest > most else ""


# ------------------------------------------------------------------------------------------------------------------ report


def _report(found: Comparison, args: argparse.Namespace) -> list[str]:
    rows = [[name, run.state, step_text(run), plain(run.path)] for name, run in found.runs.items()]
    lines = [*table(["run", "state", "step", "directory"], rows, left=4), "", *_metric_lines(found, args)]
    for title, different, same in (
        ("setting", found.settings, "all settings are equal, except names and directories"),
        ("recorded", found.recorded, "versions and data are equal as far as they were recorded"),
    ):
        cells = [[key, *(plain(value, LONGEST_VALUE) for value in values)] for key, values in different.items()]
        lines += ["", *(table([title, *found.runs], cells, left=1 + len(found.runs)) if cells else [f"  {same}"])]
    lines += [f"  {note}" for note in found.notes]
    if found.limits:
        failed = [f"  {metric} differs by more than {most:g}: {reason}" for metric, most, reason in found.limits if reason]
        lines += ["", *failed, f"  {len(found.limits) - len(failed)} of {len(found.limits)} limits hold"]
    return lines


def _metric_lines(compared: Comparison, args: argparse.Namespace) -> list[str]:
    steps = steps_to_show(compared.curves)
    head = ["metric", "run", *(f"step {step}" for step in steps), "last", "largest difference", "apart from"]
    rows: list[list[str]] = []
    for metric, of_metric in compared.curves.items():
        found = compared.differences[metric]
        largest = "-" if found.largest is None else f"{found.largest:.3g} at {found.at}"
        ends = [metric, largest, "-" if found.parts is None else f"step {found.parts}"]
        for name, curve in of_metric.items():
            values = [*(curve.get(step) for step in steps), list(curve.values())[-1] if curve else None]
            rows.append([ends[0], name, *map(value_text, values), *ends[1:]])
            ends = ["", "", ""]  # the name and the differences are the metric's, so they stand on its first row alone
    mean = f"means of {args.window} steps; " if args.window > 1 else ""
    counts = sorted({found.steps for found in compared.differences.values()})
    compared_steps = f"{counts[0]} steps" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} steps"
    note = f"{mean}{compared_steps} compared; apart: by more than {args.tolerance:g} of the largest value"
    return [*table(head, rows, left=2), "", f"  {note}"]


def _facts(found: Comparison) -> dict[str, Any]:
    def by_run(different: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
        return {key: dict(zip(found.runs, values)) for key, values in different.items()}

    return {
        "runs": {name: {"path": str(run.path), "state": run.state, "step": run.step} for name, run in found.runs.items()},
        # JSON has no infinity: null, whose step (`at`) is kept.
        "metrics": finite_or_none(
            {metric: {**asdict(found.differences[metric]), "runs": curves} for metric, curves in found.curves.items()}
        ),
        "settings": by_run(found.settings),
        "recorded": by_run(found.recorded),
        "notes": found.notes,
        "limits": [{"metric": metric, "most": most, "exceeded": reason or None} for metric, most, reason in found.limits],
    }
