"""`--measure K`: short trials of the best layouts of every role, on the ranks of this machine, and the ranking by what was
measured.

Trials and results lie in `OUTPUT_DIR/tuning`, next to the run's directory: NAME.json says what is run and NAME.result.json what
it took, where NAME names the role and digests model, settings, batch, world and machine. What is there already is not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Mapping, Optional, Sequence

import torch

from megappo.config.errors import ConfigError
from megappo.launch.local import start_ranks
from megappo.plan.tables import figures, table
from megappo.tune.cost import Workload
from megappo.tune.report import name_of
from megappo.tune.search import Candidate, Choice, Search, peak
from megappo.tune.trials import Measured, Trial, read_measured, write_trial


@dataclass(frozen=True)
class Tried:
    """A candidate with what its trial took. total_s: of its passes and updates in a whole step, like `Candidate.total_s`."""

    candidate: Candidate
    measured: Measured
    total_s: float


def measure_best(search: Search, choice: Choice, most: int) -> Choice:
    """Try the best `most` layouts of every tuned role beside `choice`, print the tables, and return the best that was measured.

    ConfigError where the ranks cannot be started here; it says how to start them where they can.
    """
    roles = {role: search.beside(choice, role)[:most] for role in choice.roles if role in search.tuned}
    folder = Path(search.config.run.output_dir) / "tuning"
    folder.mkdir(parents=True, exist_ok=True)
    names = {role: [trial_name(search, one) for one in found] for role, found in roles.items()}
    missing = _write_missing(search, folder, roles, names)
    if missing:
        _run(search, folder, missing)
    tried = {
        role: [_tried(one, read_measured(folder, name), search.workload) for one, name in zip(found, names[role])]
        for role, found in roles.items()
    }
    print("\n\n".join("\n".join(_lines(role, found)) for role, found in tried.items()), end="\n\n")
    return _best(search, choice, tried)


def trial_of(search: Search, one: Candidate) -> Trial:
    """One update of one mini-batch, of sequences of the mean length."""
    workload = search.workload
    run = search.config.run.model_copy(update={"device": search.machine.device})
    return Trial(
        config=search.config.model_copy(update={one.role: one.settings, "run": run}), role=one.role,
        samples=min(workload.samples, workload.mini_batch), prompt_tokens=max(1, round(workload.prompt_tokens)),
        response_tokens=max(1, round(workload.response_tokens)),
    )  # fmt: skip


def trial_name(search: Search, one: Candidate) -> str:
    """`policy-1f0c...`: everything that the time depends on."""
    trial, hardware = trial_of(search, one), search.machine.hardware
    own = f"{platform.node()}, {os.cpu_count()} cores" if not hardware.is_gpu() else hardware.name
    facts = {
        "arch": asdict(search.archs[one.role]), "settings": one.settings.model_dump(mode="json", exclude={"model"}),
        "batch": [trial.samples, trial.prompt_tokens, trial.response_tokens], "kernels": trial.config.kernels,
        "world": search.machine.world_size, "machine": own, "torch": torch.__version__,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{one.role}-{digest[:16]}"


def _write_missing(
    search: Search, folder: Path, roles: Mapping[str, Sequence[Candidate]], names: Mapping[str, Sequence[str]]
) -> list[str]:
    """Names of the trials that were not run yet."""
    missing: dict[str, None] = {}
    for role, found in roles.items():
        for one, name in zip(found, names[role]):
            if read_measured(folder, name) is None:
                write_trial(folder, name, trial_of(search, one))
                missing[name] = None
    return list(missing)


def _run(search: Search, folder: Path, names: Sequence[str]) -> None:
    world, gpus = search.machine.world_size, torch.cuda.device_count()
    if search.machine.hardware.is_gpu() and gpus < world:
        per_node = search.machine.hardware.gpus_per_node
        srun = f"srun --nodes {-(-world // per_node)} --ntasks-per-node {min(world, per_node)}"
        command = f"{srun} python -m megappo.tune.rank {folder} {' '.join(names)}"
        why = f"{world} ranks need a GPU each and this machine has {gpus}"
        raise ConfigError(f"--measure: {why}; run `{command}` there and ask again")
    print(f"trials: {len(names)} on {world} ranks, results in {folder}", flush=True)
    code = start_ranks(world, [str(folder), *names], module="megappo.tune.rank")
    if code != 0:
        kept = f"its message is above; those before it are kept in {folder}"
        raise ConfigError(f"--measure: a trial ended with exit code {code}, {kept}")


def _tried(one: Candidate, measured: Optional[Measured], workload: Workload) -> Tried:
    assert measured is not None, "every trial has run"
    passes = max(1.0, workload.samples / workload.mini_batch)
    return Tried(one, measured, measured.forward_s * passes + (measured.update_s or 0.0) * workload.updates)


def _lines(role: str, tried: Sequence[Tried]) -> list[str]:
    rows = []
    for one in sorted(tried, key=lambda tried: tried.total_s):
        predicted = one.candidate.cost.total_s
        rows.append([name_of(one.candidate), figures(one.total_s), figures(predicted), f"{one.total_s / predicted:.2f}"])
    return table([f"{role}, measured", "step s", "predicted", "ratio"], rows, left=1)


def _best(search: Search, choice: Choice, tried: Mapping[str, Sequence[Tried]]) -> Choice:
    """The combination that fits and is fastest by what was measured; roles that are not tuned stay."""
    room = search.machine.hardware.usable_bytes
    best, fastest = choice, float("inf")
    for combination in product(*tried.values()):
        roles = {**choice.roles, **{one.candidate.role: one.candidate for one in combination}}
        seconds = sum(one.total_s for one in combination)
        if seconds < fastest and peak(roles.values(), choice.rollout) <= room:
            best, fastest = Choice(roles, choice.rollout, choice.push_s), seconds
    return best
