"""Runs of the experiments: each is a process of its own, forked from one that has imported torch, Megatron and vLLM.

A start from nothing would take as long as a third of the steps.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.experiments.arms import ARMS, keys_of, overrides, unshifted
from benchmarks.experiments.tasks import ROOT, TASKS, prepare
from megappo.commands.runs.read import read_run

if TYPE_CHECKING:
    from megappo.rollout.types import RolloutEngine

TIMEOUT_S = 1800.0


def directory(folder: Path, task: str, arm: str, seed: int) -> Path:
    return folder / "runs" / f"{task}-{arm}-{seed}"


def is_finished(run_dir: Path) -> bool:
    return run_dir.exists() and read_run(run_dir).state == "finished"


def train(folder: Path, task: str, arm: str, seed: int) -> None:
    """Train, unless the run has finished; one that was ended begins anew."""
    from tests.worlds import spawn_world

    run_dir = directory(folder, task, arm, seed)
    if is_finished(run_dir):
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    num_ranks = keys_of(task, arm)["run.num_ranks"]
    spawn_world(_train_rank, num_ranks, run_dir, prepare(folder, task), task, arm, seed, timeout_s=TIMEOUT_S)


def _train_rank(rank: int, run_dir: Path, files: Path, task: str, arm: str, seed: int) -> None:
    from megappo.commands.plan.run import plan_run
    from megappo.config.loading import load_config
    from megappo.trainer import main, roles

    warnings.filterwarnings("ignore", category=FutureWarning)  # Megatron's use of torch, hundreds of lines a run
    if not ARMS[arm].shifted:
        roles.align_values = unshifted
    places = {
        "run.output_dir": run_dir.parent,
        "run.name": run_dir.name,
        "run.seed": seed,
        "policy.model": files / "sft" / "export",
        "data.train": files / "data" / "train.jsonl",
        "data.eval": files / "data" / "eval.jsonl",
        "data.tokenizer": files / "model" / "tokenizer.model",
    }
    config = load_config(ROOT / "configs" / "quickstart.yaml", list(overrides({**keys_of(task, arm), **places})))
    planned = plan_run(config, keys_of(task, arm)["run.num_ranks"], "cpu")
    assert planned.data is not None, "only a plan of shapes has no data"
    wrap, tokenizer = TASKS[task].wrap, planned.data.tokenizer

    def wrapped(engine: RolloutEngine) -> RolloutEngine:
        return engine if wrap is None else wrap(engine, files / "data", tokenizer)

    main.train(planned.plan.config, planned.data, resume=False, wrap_rollout=wrapped)
