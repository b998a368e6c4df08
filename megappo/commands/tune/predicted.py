"""The prediction of a run that starts, for the log of its ranks (`telemetry/predicted.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megappo.commands.plan.run import PlannedRun
from megappo.commands.tune.candidates import Machine
from megappo.commands.tune.cost import pictures_of, workload_of
from megappo.commands.tune.lengths import SPREAD, Lengths
from megappo.commands.tune.parts import by_stage, parts_of
from megappo.commands.tune.search import Search
from megappo.config.keys import replaced
from megappo.config.run_directory import PREDICTED
from megappo.telemetry.hardware import PROFILES, Hardware, profile_of, profiles
from megappo.telemetry.jsonl import replace_file
from megappo.trainer.prepare.data import RunData

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of the longest response: means for which a run is priced


def record_prediction(planned: PlannedRun, run_dir: Path, gpus: Iterable[Hardware] | None = None) -> None:
    """Write what a step takes on these GPUs into the directory of a run; on CPUs by a profile of such alone. gpus: by default the
    one that `telemetry.hardware` names, or all known ones."""
    path = run_dir / PREDICTED
    path.unlink(missing_ok=True)  # of an earlier start, on other GPUs or with another configuration
    if gpus is None:
        named = profile_of(planned.plan.config.telemetry.hardware, None)
        gpus = [one for one in profiles(PROFILES).values() if one.is_gpu()] if named is None else (named,)
    known = [one for one in gpus if one.is_gpu() == (planned.plan.device == "cuda")]
    if not planned.plan.samples or not known:
        return
    try:
        found = {hardware.name: prediction(planned, hardware) for hardware in known}
    except Exception as error:  # two columns of a log are no reason to end a run
        print(f"note: no prediction of the step's time: {type(error).__name__}: {error}", flush=True)
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(found, indent=1).encode())


def prediction(planned: PlannedRun, hardware: Hardware) -> dict[str, Any]:
    """Seconds of the stages of a step for several mean lengths of its responses, without evaluations, which few steps have."""
    plan, prompt = planned.plan, None
    config = replaced(plan.config, ["data", "eval"], None).model_copy(update={"evaluations": {}})
    if isinstance(planned.data, RunData):
        prompt = sum(len(one.tokens) for one in planned.data.train.prompts) / len(planned.data.train)
    longest, machine = float(config.rollout.max_response_tokens), Machine(plan.world_size, hardware)
    works = [workload_of(config, prompt, share * longest, Lengths(share * longest, longest, SPREAD)) for share in SHARES]
    pictures = pictures_of(config, plan.archs, plan.shown)
    works = [replace(work, pictures=pictures) for work in works]
    search = Search(config, plan.archs, machine, works[0], ())
    choices = [search.with_work(work).as_written() for work in works]
    every = [by_stage(parts_of(one)) for one in choices]
    stages = {stage: None if any(one[stage] is None for one in every) else [one[stage] for one in every] for stage in every[0]}
    step = None if None in stages.values() else [one.total_s for one in choices]
    return {"responses": [share * longest for share in SHARES], "stages": stages, "step": step}
