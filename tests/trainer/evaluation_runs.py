"""PPO runs on two ranks with named evaluations, and evaluations of their checkpoints, all in one world."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch.distributed as dist
import yaml

from megappo.checkpoint.store import SaveFailed
from megappo.commands.eval.evaluate import evaluate_checkpoint, results_record
from megappo.config.loading import load_config
from megappo.config.run_sections import CheckpointConfig, TimeoutsConfig
from megappo.rewards.compose import Scored
from megappo.runtime.ending import StopRequest
from megappo.runtime.sections import AwakeClock, Sections
from megappo.trainer.checkpoints import Checkpoints, Contents, RunAround
from megappo.trainer.evaluation import Evaluation, Evaluator
from megappo.trainer.experience.collect import make_requests
from megappo.trainer.prepare.evaluate import plan_evaluation
from megappo.trainer.save_schedule import BestCheckpoint
from megappo.trainer.state import TrainerState
from tests.rollout.responses import generate_all
from tests.trainer.experiences import part_means, score
from tests.trainer.small_run import run_many, small_config

STEPS, HALF = 6, 3


def config(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Sampled by the policy itself; the longest answers are the best ones, and lengths change from step to step."""
    held_out = str(folder / "data" / "eval.jsonl")
    keys = {
        "rollout.engine": "megatron",
        "data.prompts_per_step": 8,
        "trainer.eval_every": 1,
        "trainer.keep_best": "eval/sampled/length",
        "checkpoint.save_every": 2,
        "checkpoint.keep_last": 1,
    }
    made = small_config(folder, name, **{"steps": STEPS, **keys, **changes})
    made["evaluations"] = {
        "short": {"data": held_out, "prompts": 7, "max_response_tokens": 3, "before": False},
        "sampled": {
            "data": held_out,
            "n": 4,
            "temperature": 1.0,
            "top_p": 0.9,
            "correct_score": 0.5,
            "reward": {"parts": [{"name": "exact_match"}, {"name": "has_eos"}]},
        },
    }
    return made


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    whole, halves = config(folder, "whole"), config(folder, "halves")
    with beside_the_old_one() as seen:
        run_many(rank, [(whole, False)])
    results: dict[str, Any] = {"old": seen}
    run_many(rank, [(config(folder, "halves", steps=HALF), False), (halves, True)])
    shorter = config(folder, "halves", steps=STEPS + 1, **{"trainer.keep_best": "min eval/sampled/length"})
    run = folder / "runs" / "whole"
    best = run / "checkpoints" / (run / "checkpoints" / "BEST").read_text().strip()
    results["last"] = evaluated(rank, whole, run)
    results["best"] = evaluated(rank, whole, best)
    results["export"] = evaluated(rank, whole, run / "export")
    results["tp1"] = evaluated(rank, config(folder, "whole", **{"policy.parallel.tp": 1}), run)
    results["pp2"] = evaluated(rank, config(folder, "whole", **{"policy.parallel": {"pp": 2}}), run)
    results["seed"] = evaluated(rank, config(folder, "whole", **{"run.seed": 2}), run)
    results["vllm"] = evaluated(rank, config(folder, "whole", **{"rollout.engine": "vllm"}), run, only=["short"])
    run_many(rank, [(shorter, True)])
    results["failed saves"] = best_of_failed_saves()
    return results


def evaluated(rank: int, settings: dict[str, Any], checkpoint: Path, only: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of `megappo eval`, as it writes them."""
    path = Path(settings["run"]["output_dir"]).parent / f"evaluate.{rank}.yaml"
    path.write_text(yaml.safe_dump(settings))
    planned = plan_evaluation(load_config(path), str(checkpoint), only, 2, "cpu")
    record = results_record(planned, evaluate_checkpoint(planned))
    return json.loads(json.dumps(record))["metrics"]


class beside_the_old_one:
    """Record at each evaluation of `data.eval` what the code before named sets gives: [(old, new)]."""

    def __enter__(self) -> list[tuple[dict[str, float], dict[str, float]]]:
        seen: list[tuple[dict[str, float], dict[str, float]]] = []
        run = Evaluator.run

        def both(self: Evaluator, rollout: Any, tokenizer: Any) -> Evaluation:
            result = run(self, rollout, tokenizer)
            if not self.name:
                seen.append((old_evaluate(self.prompts, rollout, self.sampling, tokenizer, self.scorer), result.metrics()))
            return result

        self._patch = mock.patch.object(Evaluator, "run", both)
        self._patch.start()
        return seen

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def old_evaluate(prompts: Any, rollout: Any, sampling: Any, tokenizer: Any, scorer: Any) -> dict[str, float]:
    """`trainer.evaluation.evaluate` and `runlog.evaluation_metrics` as they were before `evaluations`."""
    requests = make_requests([p.tokens for p in prompts], samples_per_prompt=1, run_seed=0, step=0)
    responses = generate_all(rollout, requests, replace(sampling, temperature=0.0, top_p=1.0, top_k=-1))
    scored = of_all_ranks(score(prompts, responses, tokenizer, scorer, sampling.stop))
    count = len(prompts)
    return {
        "eval/score": sum(scored.total) / count,
        "eval/length": sum(len(r.tokens) for r in responses) / count,
        "eval/truncated": sum(r.finish == "length" for r in responses) / count,
        **{f"eval/{name}": value for name, value in part_means(scored).items()},
    }


def of_all_ranks(mine: Scored) -> Scored:
    """Scores of all samples, in their order."""
    world_size = dist.get_world_size()
    parts: list = [None] * world_size
    dist.all_gather_object(parts, mine)
    places = [divmod(i, world_size) for i in range(sum(len(part.total) for part in parts))]
    columns = {name: [parts[rank].parts[name][at] for at, rank in places] for name in mine.parts}
    return replace(mine, total=[parts[rank].total[at] for at, rank in places], parts=columns)


def best_of_failed_saves() -> list[tuple[int, Any, Any]]:
    """(step, best step that the save holds, best step in the state after it); the saves of steps 1 and 3 fail."""
    events: list[tuple[int, Any, Any]] = []
    state = TrainerState()

    class Disk:
        pending = None

        def save(self, step: int, models: Any, components: Any, facts: Any, files: Any) -> None:
            held = facts.get("best", {}).get("step")
            if step in (1, 3):
                raise SaveFailed("No space left on device")
            events.append((step, held, None))

    log: Any = SimpleNamespace(note=lambda text: None)
    settings = CheckpointConfig(asynchronous=False, save_every=0)
    sections = Sections(TimeoutsConfig(), AwakeClock(1.0))
    best = BestCheckpoint("eval/a", "max", state)
    contents, run = Contents({}, state, {}, {}), RunAround(StopRequest(), log, sections, lambda: 0)
    checkpoints = Checkpoints(cast(Any, Disk()), settings, {}, contents, run, best=best)
    for step, value in enumerate([9.0, 2.0, 7.0, 5.0, 4.0], start=1):
        state.step = step
        checkpoints.end_of_step(step, is_last=step == 5, evaluated={"eval/a": value})
        events.append((step, None, state.best and state.best["step"]))
    return events
