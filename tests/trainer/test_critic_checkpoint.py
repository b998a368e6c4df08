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
    return spawn_world(runs_and_weights, 2, str(folder), timeout_s=500)[0]


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
    pretrain = {"critic.warmup_steps": 3, "critic.warmup_lam": 1.0, "checkpoint.keep_last": 3, "checkpoint.save_every": 1}
    fitted = {**pretrain, "critic.warmup_explained_variance": -1e9}
    pretrained, early = config("pretrained", 3, **pretrain), config("early", 3, **fitted)
    warm = config("warm", 4, **{**fitted, "critic.checkpoint": str(place / "runs" / "pretrained")})
    resumed_early = [(config("early", 3, **fitted), True), (config("warm", 5, **fitted), True)]
    run_many(
        rank,
        [
            *((one, False) for one in (first, from_critic, from_policy)),
            (resumed, True),
            *((one, False) for one in (pretrained, early, warm)),
            *resumed_early,
        ],
    )
    wanted = ("source critic 1", "source policy 1", "from_critic critic 1", "from_policy critic 1", "from_policy critic 2")
    return {name: weights_of(place, *name.split()) for name in (*wanted, "pretrained critic 3", "early critic 1")}


def weights_of(place: Path, run: str, role: str, step: str) -> Weights:
    from megappo.checkpoint.store import CheckpointStore
    from megappo.config.role_sections import RoleConfig
    from megappo.engine.build import build_frozen
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    path, groups = str(place / "model"), build_groups(ParallelLayout(dist.get_world_size()))
    head = "zero" if role == "critic" else None
    spec = EngineSpec(role, path, read_arch(path), RoleConfig(dtype="fp32"), value_head=head)
    engine = build_frozen(spec, groups, device=torch.device("cpu"))
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
    from megappo.checkpoint.manifest import read_manifest
    from megappo.prepare.checkpoint_source import roles_of

    return roles_of(read_manifest(folder / "runs" / run / "checkpoints" / f"step-{step}"))


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
