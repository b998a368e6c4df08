"""What runs were made of: their resolved configurations, and the data, models, versions and environment that they recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.commands.runs.read import BROKEN
from megappo.config.errors import ConfigError
from megappo.config.redaction import redacted_values
from megappo.config.run_directory import CHECKPOINTS, LAUNCHES
from megappo.config.yaml_reader import parse_yaml
from megappo.runtime.ending import CONFIG

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
