"""`--measure K`: short trials of the best layouts of every role, here or on a job's nodes, and the ranking by measured times.

`OUTPUT_DIR/tuning` has NAME.json for each trial and NAME.result.json for its outcome. NAME has the role and a digest of model,
settings, batch, world and machine. A trial with an outcome is not run again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import megappo
from megappo.commands.tune.candidates import ROLLOUT, Candidate, Choice
from megappo.commands.tune.cost import Workload
from megappo.commands.tune.report import name_of
from megappo.commands.tune.search import Search
from megappo.commands.tune.trials import (
    Failed,
    Measured,
    Outcome,
    Trial,
    nodes_of_job,
    outcome_file,
    ranks_here,
    ranks_of_job,
    read_outcome,
    run_trials,
    write_trial,
)
from megappo.config.batch import text_arithmetic
from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import with_sections
from megappo.telemetry.tables import figures, table_of


@dataclass(frozen=True)
class Tried:
    """A candidate with the outcome of its trial."""

    candidate: Candidate
    outcome: Outcome
    phases: Mapping[str, float] | None
    """Seconds of its passes and updates in a whole step, as in `RoleCost`; None if the trial failed."""
    file: Path

    @property
    def measured_s(self) -> float | None:
        """Seconds of all phases; None if the trial failed."""
        return None if self.phases is None else sum(self.phases.values())

    @property
    def total_s(self) -> float:
        """Seconds with predicted generation, which no trial measures; infinite if the trial failed."""
        return float("inf") if self.measured_s is None else self.measured_s + self.candidate.generate_s


Measurement = Mapping[str, Sequence[Tried]]
"""Role -> candidates tried, the fastest first, failed ones last."""


def check_measurable(search: Search, *, in_job: bool) -> None:
    """Raise ConfigError if no tuned role can be tried, or if the job of Slurm that this process is in has too few nodes."""
    if set(search.tuned) <= {ROLLOUT}:
        raise ConfigError(f"--measure: trials are of models, not of --roles {ROLLOUT}")
    if in_job and (have := nodes_of_job()) < (nodes := -(-search.machine.world_size // search.machine.hardware.gpus_per_node)):
        need = f"{search.machine.world_size} ranks are {nodes} nodes of {search.machine.hardware.gpus_per_node}"
        raise ConfigError(f"--slurm: {need} (--gpus, --gpus-per-node), and this job has {have}; salloc --nodes {nodes} gives them")


def measure(search: Search, choice: Choice, most: int, *, in_job: bool = False) -> Measurement:
    """Try the best `most` layouts of every tuned role beside `choice`, here or on the nodes of this job. ConfigError if the ranks
    cannot be started here, or end outside of a trial."""
    roles = {role: search.beside(choice, role)[:most] for role in choice.roles if role in search.tuned}
    candidates = {trial_name(search, one): one for found in roles.values() for one in found}
    folder = Path(search.config.run.output_dir).absolute() / "tuning"
    missing = [name for name in candidates if read_outcome(folder, name) is None]
    if missing:
        if not in_job:
            _require_gpus(search)
        _make_folder(folder, search.config.run.output_dir)
        for name in missing:
            write_trial(folder, name, trial_of(search, candidates[name]))
        _run(search, folder, missing, in_job=in_job)
        print()
    tried = [_tried(one, folder, name, search.workload) for name, one in candidates.items()]
    ranked = sorted(tried, key=lambda one: one.total_s)
    return {role: [one for one in ranked if one.candidate.role == role] for role in roles}


def trial_of(search: Search, one: Candidate) -> Trial:
    """Trial of a candidate: one update of one mini-batch of sequences of the mean length."""
    shape = search.workload.update(one.role)
    run = search.config.run.model_copy(update={"device": search.machine.device})
    return Trial(
        config=with_sections(search.config, {one.role: one.settings, "run": run}),
        role=one.role,
        label=f"{one.role} {name_of(one)}",
        samples=shape.samples,
        prompt_tokens=max(1, round(shape.prompt_tokens)),
        response_tokens=max(1, round(shape.response_tokens)),
    )


def trial_name(search: Search, one: Candidate) -> str:
    """Name of a trial, `policy-1f0c...`, with a digest of everything that its time depends on."""
    trial, machine = trial_of(search, one), search.machine
    facts = {
        "arch": asdict(search.archs[one.role]),
        "settings": one.settings.model_dump(mode="json", exclude={"model"}),
        "logits": trial.config.policy.logits_dtype,
        "implementation": search.implementation(one.role),
        "kernels": trial.config.kernels,
        "batch": [trial.samples, trial.prompt_tokens, trial.response_tokens],
        "texts": list(text_arithmetic(trial.config, one.role)),
        "world": machine.world_size,
        "ranks of a node": machine.hardware.gpus_per_node,
        "machine": _machine_name(search),
        "measured": list(Measured.model_fields),  # runs a trial again for a version that measures other quantities
        "versions": [megappo.__version__, torch.__version__],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{one.role}-{digest[:16]}"


def _machine_name(search: Search) -> str:
    """The kind of GPU; for CPUs this host or the job's partition."""
    if search.machine.hardware.is_gpu():
        return search.machine.hardware.name
    return os.environ.get("SLURM_JOB_PARTITION") or f"{platform.node()}, {os.cpu_count()} cores"


def _require_gpus(search: Search) -> None:
    world, gpus = search.machine.world_size, torch.cuda.device_count()
    if search.machine.hardware.is_gpu() and gpus < world:
        why = f"{world} ranks need a GPU each and this machine has {gpus}"
        raise ConfigError(f"--measure: {why}; in a job of Slurm (salloc) --slurm runs the trials on its nodes")


def _make_folder(folder: Path, output_dir: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}; name another one"
        raise ConfigError(problem("run.output_dir", output_dir, why)) from None


def _run(search: Search, folder: Path, names: Sequence[str], *, in_job: bool) -> None:
    world, per_node = search.machine.world_size, search.machine.hardware.gpus_per_node
    where = "the nodes of this job" if in_job else "this machine"
    print(f"{len(names)} trials on {world} ranks of {where}; results in {folder}", flush=True)
    code = run_trials(folder, names, ranks_of_job(world, per_node) if in_job else ranks_here(world))
    if code != 0:
        kept = f"what it said is above; what was measured is kept in {folder}"
        raise ConfigError(f"--measure: the ranks ended with exit code {code}, and not in a trial; {kept}")


def _tried(one: Candidate, folder: Path, name: str, workload: Workload) -> Tried:
    outcome = read_outcome(folder, name)
    assert outcome is not None, "every trial has run"
    phases = None if isinstance(outcome, Failed) else phases_of(outcome, one.role, workload)
    return Tried(one, outcome, phases, outcome_file(folder, name))


def phases_of(measured: Measured, role: str, workload: Workload) -> dict[str, float]:
    """Seconds of `role` in a whole step: one pass over all samples (`forward`) and all updates (`update`)."""
    passes = workload.passes(role)
    # Each phase moves offloaded parts once, whatever its number of passes.
    phases = {"forward": (measured.forward_s - measured.load_s) * passes + measured.load_s}
    if measured.update_s is None:
        return phases
    return phases | {"update": measured.update_s * workload.updates(role) + measured.trip_s}


def measured_lines(measurement: Measurement) -> list[str]:
    lines: list[str] = []
    for role, tried in measurement.items():
        rows, generates = [], any(one.candidate.generate_s > 0 for one in tried)
        for one in tried:
            if one.measured_s is not None:
                predicted = one.candidate.cost.total_s
                row = {f"{role}, measured": name_of(one.candidate), "step s": figures(one.measured_s)}
                row |= {"predicted": figures(predicted), "ratio": f"{one.measured_s / predicted:.2f}"}
                rows.append(row | ({"with generation, predicted": figures(one.total_s)} if generates else {}))
        failed = [one for one in tried if one.measured_s is None]
        lines += [
            *table_of(rows),
            *(f"  {name_of(one.candidate)}: {one.outcome} (delete {one.file} to try it again)" for one in failed),
            "",
        ]
    return lines


def measured_facts(measurement: Measurement) -> dict[str, Any]:
    return {role: [_facts(one) for one in tried] for role, tried in measurement.items()}


def _facts(one: Tried) -> dict[str, Any]:
    return {
        "layout": name_of(one.candidate),
        "overrides": one.candidate.overrides(),
        "seconds": one.measured_s,
        "predicted_seconds": one.candidate.cost.total_s,
        **one.outcome.model_dump(),
    }


def best_measured(search: Search, choice: Choice, measurement: Measurement) -> Choice:
    """The fastest combination by measured times that fits. Roles that are not tuned stay. ConfigError if none is left."""
    working = {role: [one for one in found if one.measured_s is not None] for role, found in measurement.items()}
    for role, found in measurement.items():
        if not working[role]:
            fix = f"try more of them (--measure {2 * len(found)}), or a profile with a larger headroom_gib (--gpu FILE)"
            raise ConfigError(f"--measure: all {len(found)} layouts of the {role} failed, see above; {fix}")
    best, fastest = None, float("inf")
    for combination in product(*working.values()):
        roles = {**choice.roles, **{one.candidate.role: one.candidate for one in combination}}
        seconds = _seconds(search, roles, combination)
        # Each fits beside the predicted best of the other roles, but together they may not.
        if seconds < fastest and search.fits({role: one.need for role, one in roles.items()}, choice.rollout):
            best, fastest = roles, seconds
    if best is None:
        raise ConfigError("--measure: no combination of the layouts that were measured fits; measure more of them")
    return search.choice(best, choice.rollout)


def _seconds(search: Search, roles: Mapping[str, Candidate], tried: Sequence[Tried]) -> float:
    """Measured seconds of a step without vLLM and the push. Roles that were not tried count as predicted."""
    measured = {one.candidate.role: one.phases for one in tried if one.phases is not None}
    phases = {role: measured.get(role, one.cost.phases) for role, one in roles.items()}
    return search.timetable.step_s(phases) + roles["policy"].generate_s
