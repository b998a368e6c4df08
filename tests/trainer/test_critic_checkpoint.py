"""`critic.checkpoint`: a run whose critic starts from another run's critic or policy, in another layout; runs that pretrain it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

# fp32 weights of order 0.1 - 1 do not move by a step of this size: what the run saves is what it started from.
STILL = {"critic.optimizer": {"lr": 1e-12}}
COMMON = {"rollout.engine": "megatron", "checkpoint.export_at_end": False}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("critics")


@pytest.fixture(scope="module")
def weights(folder) -> dict[str, Weights]:
    """ "run role" -> its weights, by canonical name."""
    write_small_task(folder)
    return spawn_world(runs_and_weights, 2, str(folder))[0]


def runs_and_weights(rank: int, folder: str) -> dict[str, Weights]:
    place = Path(folder)

    def config(name: str, steps: int = 1, **overrides: Any) -> dict[str, Any]:
        return small_config(place, name, steps=steps, **{**COMMON, **overrides})

    source, cp2, uneven = str(place / "runs" / "source"), {"cp": 2}, {"pp": 2, "layers_per_stage": [1, 1]}
    first = config("source")
    from_critic = config("from_critic", **{**STILL, "critic.checkpoint": source, "critic.parallel": cp2})
    body = {**STILL, "critic.checkpoint_role": "policy", "critic.value_head": "normal", "critic.parallel": uneven}
    from_policy = config("from_policy", **body, **{"critic.checkpoint": f"{source}/checkpoints/step-1"})
    # A resumed run takes its own critic: nobody looks for what the key names.
    resumed = config("from_policy", steps=2, **body, **{"critic.checkpoint": f"{source}/checkpoints/step-99"})
    # Any value explains more than that: the warm-up ends after the first step.
    pretrain = {"critic.warmup.steps": 3, "critic.warmup.lam": 1.0, "checkpoint.keep_last": 3, "checkpoint.save_every": 1}
    fitted = {**pretrain, "critic.warmup.explained_variance": -1e9}
    of_steps = {"telemetry.trajectories_every": 1, "telemetry.trajectories_per_step": 32, "data.shuffle": False}
    pretrained, early = config("pretrained", 3, **pretrain, **of_steps), config("early", 3, **fitted)
    # What samples or scores is not there: no prompts, no rewards, no engine of a rollout.
    mine = {"name": "mine", "path": "nowhere.py", "function": "score"}
    absent = {"data.train": "nowhere.jsonl", "data.eval": "nowhere.jsonl", "reward.parts": [mine]}
    of_records = {**pretrain, **of_steps, **absent, "critic.warmup.trajectories": str(place / "runs" / "pretrained")}
    recorded = config("recorded", 3, **of_records)
    begun = config("recorded_on", 2, **{**of_records, "critic.warmup.steps": 2, "critic.parallel": {"tp": 2}})
    goes_on = config("recorded_on", 3, **of_records)
    warm = config("warm", 4, **{**fitted, "critic.checkpoint": str(place / "runs" / "pretrained")})
    resumed_early = [(config("early", 3, **fitted), True), (config("warm", 5, **fitted), True)]
    run_many(
        rank,
        [
            *((one, False) for one in (first, from_critic, from_policy)),
            (resumed, True),
            *((one, False) for one in (pretrained, early, warm, recorded, begun)),
            (goes_on, True),
            *resumed_early,
        ],
    )
    wanted = ("source critic 1", "source policy 1", "from_critic critic 1", "from_policy critic 1", "from_policy critic 2")
    ends = ("pretrained critic 3", "early critic 1", "recorded critic 3", "recorded_on critic 3")
    return {name: weights_of(place, *name.split()) for name in (*wanted, *ends)}


def weights_of(place: Path, run: str, role: str, step: str) -> Weights:
    from megappo.checkpoint.store import CheckpointStore
    from megappo.config.role_sections import RoleConfig
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    path, groups = str(place / "model"), build_groups(ParallelLayout(dist.get_world_size()))
    head = "zero" if role == "critic" else None
    spec = EngineSpec(role, path, read_arch(path), RoleConfig(dtype="fp32"), value_head=head)
    engine = build_megatron(spec, groups, device=torch.device("cpu"))
    CheckpointStore(place / "runs" / run / "checkpoints", keep_last=1).load_weights(role, engine, int(step))
    return {name: parameter.detach() for name, parameter in engine.named_parameters().items()}


def differing(one: Weights, other: Weights) -> set[str]:
    return {name for name in one.keys() | other.keys() if name not in one or name not in other or not close(one[name], other[name])}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Two steps of Adam move a weight by at most 2e-12 and half a unit in the last place of a number below 2.
    return bool((one - other).abs().max() <= 2.5e-7)


def test_the_critic_of_another_run_with_its_head(weights) -> None:
    assert differing(weights["from_critic critic 1"], weights["source critic 1"]) == set()
    assert weights["source critic 1"]["value_head.weight"].abs().max() > 0


def test_the_policy_of_another_run_under_a_new_head(weights) -> None:
    started, source = weights["from_policy critic 1"], weights["source policy 1"]
    assert differing(started, source) == {"value_head.weight", "output_layer.weight"}
    hidden = started["value_head.weight"].numel()
    drawn = torch.randn(1, hidden, generator=torch.Generator().manual_seed(1)) * (hidden + 1) ** -0.5  # run.seed = 1
    assert close(started["value_head.weight"], drawn)


def test_a_resumed_run_takes_its_own_critic(weights) -> None:
    assert differing(weights["from_policy critic 2"], weights["from_policy critic 1"]) == set()


def test_the_sources_differ(weights) -> None:
    """Negative control: one step has moved policy and critic of the first run apart, layer by layer."""
    assert len(differing(weights["source critic 1"], weights["source policy 1"])) > 10


# ------------------------------------------------------------------------------------------------------------- pretraining


def steps_of(folder: Path, run: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "runs" / run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "critic/loss" in row]


def roles_at(folder: Path, run: str, step: int) -> list[str]:
    from megappo.checkpoint.manifest import models_of, read_manifest

    return sorted(models_of(read_manifest(folder / "runs" / run / "checkpoints" / f"step-{step}")))


def test_a_run_that_pretrains_the_critic_has_no_optimizer_of_the_policy(weights, folder) -> None:
    rows = steps_of(folder, "pretrained")
    assert len(rows) == 3 and not any("policy/lr" in row for row in rows)
    assert roles_at(folder, "pretrained", 3) == ["critic"]
    assert differing(weights["pretrained critic 3"], weights["early critic 1"]), "and it trains the critic, step by step"


def test_pretraining_ends_with_the_step_that_fits(weights, folder) -> None:
    assert len(steps_of(folder, "early")) == 1 and roles_at(folder, "early", 1) == ["critic"]
    assert json.loads((folder / "runs" / "early" / "ended.json").read_text())["step"] == 1


def test_the_policy_follows_when_the_warm_up_ends_early_and_after_a_resume(weights, folder) -> None:
    rows = steps_of(folder, "warm")
    assert ["policy/lr" in row for row in rows] == [False, True, True, True, True]
    # The critic starts from the pretrained one: its values before the first update are not 0, as a new head's are.
    assert rows[0]["critic/value_std"] > 0 and steps_of(folder, "pretrained")[0]["critic/value_std"] == 0


# ------------------------------------------------------------------------------------------------- recorded trajectories

OF_THE_CRITIC = (
    *(f"critic/{name}" for name in ("loss", "grad_norm", "explained_variance", "updates", "lr", "value_error_max")),
    *(f"critic/{what}_{of}" for what in ("value", "return") for of in ("mean", "std", "min", "max")),
    *("reward/score_mean", "lengths/response_mean", "lengths/truncated"),
)


@pytest.mark.parametrize("run", ["recorded", "recorded_on"])
def test_recorded_trajectories_train_the_critic_as_the_run_that_sampled_them(weights, folder, run) -> None:
    """The same targets, losses and weights, also where another layout begins and a resumed run goes on."""
    for mine, sampled in zip(steps_of(folder, run), steps_of(folder, "pretrained"), strict=True):
        # Records have five digits of a reward, here of a score of one digit, and of a KL that is 0 but for rounding.
        close = {"rel": 1e-6, "abs": 1e-9} if run == "recorded" else {"rel": 1e-5, "abs": 1e-6}
        assert {key: mine[key] for key in OF_THE_CRITIC} == pytest.approx({key: sampled[key] for key in OF_THE_CRITIC}, **close)
    one, other = weights[f"{run} critic 3"], weights["pretrained critic 3"]
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-4  # six updates move a weight by up to 6e-3


def test_a_run_on_recorded_trajectories_holds_the_critic_alone(weights, folder) -> None:
    assert roles_at(folder, "recorded", 3) == ["critic"]
    assert not any(name.startswith(("policy/", "kl/", "rollout/", "timing/generate")) for name in steps_of(folder, "recorded")[0])
    assert json.loads((folder / "runs" / "recorded" / "ended.json").read_text())["step"] == 3
