"""The ranks' part of `megappo eval`: load the weights, evaluate, and write the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from megappo.checkpoint.store import CheckpointStore
from megappo.config.evaluations import key_of
from megappo.engine.base import Engine
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend, EngineFactory
from megappo.parallel.device import select_device, start_distributed
from megappo.runtime.ending import input_accepted
from megappo.telemetry.console import configure_logging
from megappo.telemetry.jsonl import replace_file
from megappo.telemetry.metrics import finite_or_none
from megappo.telemetry.tables import table
from megappo.trainer.build_roles import build_role, spec_of_role
from megappo.trainer.evaluation import Evaluation, Evaluator, push_policy
from megappo.trainer.preflight import require_preflight
from megappo.trainer.prepare.evaluate import PlannedEvaluation
from megappo.trainer.reward_model import ModelScorer, model_scorer
from megappo.trainer.roles import RewardModel
from megappo.trainer.sampling import evaluators_of_run, rollout_of, sampling_params, scorer_of


def evaluate_checkpoint(planned: PlannedEvaluation, engines: EngineBackend = RoleEngines) -> list[Evaluation]:
    """Evaluate on this rank; all ranks return the results of all sets. engines: builds the model. Collective over the world, which
    is joined and left again unless it exists already."""
    config, data = planned.config, planned.data
    owns_world = not dist.is_initialized()
    device = select_device(config.run.device)
    start_distributed(device, config.run.timeouts)
    configure_logging(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(config.run.seed)
    require_preflight(config, data, resume=False)
    policy, score_model = _load_models(planned, engines, device)
    rollout = rollout_of(config, data, policy, device)
    evaluators = _evaluators(planned, score_model)
    with input_accepted():
        push_policy(rollout, policy, planned.source.step or 0)
        with ExitStack() as workers:
            for one in evaluators:
                workers.callback(one.scorer.close)
            results = [one.run(rollout, data.tokenizer) for one in evaluators]
        rollout.close()
        if owns_world:
            dist.destroy_process_group()
    return results


def _load_models(planned: PlannedEvaluation, engines: EngineBackend, device: torch.device) -> tuple[Engine, ModelScorer | None]:
    config, text = planned.config, planned.data.reward_text
    factory = engines(config.model, config.run.timeouts, device)
    factory.connect([config.policy, *([config.reward_model] if text is not None else [])])
    policy = _load_policy(planned, factory)
    model = cast("RewardModel | None", build_role(config, "reward_model", factory, None)) if text is not None else None
    return policy, model_scorer(model, model and model.engine.shares, text, config.reward_model)


def _load_policy(planned: PlannedEvaluation, factory: EngineFactory) -> Engine:
    source, images = planned.source, planned.data.images
    spec = replace(spec_of_role(planned.config, "policy", None), images=None if images is None else images.store)
    # The checkpoint replaces all weights, so the model's own need not be read.
    policy = factory.build(replace(spec, random_weights=source.directory is not None))
    assert policy is not None, "an evaluation has its roles on all ranks"
    if source.directory is not None:
        CheckpointStore(source.directory, keep_last=1).load_weights("policy", policy, source.step)
    return policy


def _evaluators(planned: PlannedEvaluation, score_model: ModelScorer | None) -> list[Evaluator]:
    config, data = planned.config, planned.data
    shares = any(one.reward is None for one in data.evaluations)
    scorer = scorer_of(config.reward, data.reward_parts, score_model=score_model) if shares else None
    return evaluators_of_run(config, data.evaluations, sampling_params(config.rollout, data.tokenizer), scorer, score_model)


# ----------------------------------------------------------------------------------------------------------------- results


def results_table(results: Sequence[Evaluation]) -> str:
    rows = [
        [key_of(result.name).removeprefix("evaluations.").removesuffix(".data") if place == 0 else "", figure, _number(value)]
        for result in results
        for place, (figure, value) in enumerate(result.all_figures().items())
    ]
    return "\n".join(table(["set", "figure", "value"], rows, left=2))


def _number(value: float) -> str:
    return f"{value:.6g}"


def report(planned: PlannedEvaluation, results: Sequence[Evaluation], output: Path | None) -> None:
    """Print the table and write the file. Only for rank 0."""
    if output is not None:  # before printing, which may fail
        record = finite_or_none(results_record(planned, results))
        replace_file(output, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    for note in planned.notes:
        print(f"note: {note}")
    print(f"{planned.source.path}\n{results_table(results)}")
    if output is not None:
        print(f"results: {output}")


def results_record(planned: PlannedEvaluation, results: Sequence[Evaluation]) -> dict[str, Any]:
    """Return results as JSON-compatible data: settings and figures of every set, and all metrics under the names of a run."""
    settings = {one.name: one for one in planned.data.evaluations}
    return {
        "checkpoint": str(planned.source.path),
        "step": planned.source.step,
        "seed": planned.config.run.seed,
        "sets": {
            key_of(result.name): {
                **settings[result.name].settings.model_dump(mode="json", exclude={"every", "before", "reward"}),
                "num_prompts": result.num_prompts,
                "sha256": settings[result.name].prompts.source_sha256,
                "figures": result.all_figures(),
            }
            for result in results
        },
        "metrics": {name: value for result in results for name, value in result.metrics().items()},
    }
