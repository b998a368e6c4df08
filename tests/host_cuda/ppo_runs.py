"""PPO runs on a device, as scenarios: the same function runs them on the CPU in a gloo world."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.trainer.small_run import small_config

VOLATILE = ("time", "timing/", "throughput/", "memory/", "rollout/push_seconds", "rollout/push_verified")


def config_of(folder: Path, name: str, steps: int, device: str, **overrides: Any) -> dict[str, Any]:
    """The small run with what this device can do: policy tp 2, critic pp 2, local layers, Megatron's rollout."""
    common = {"rollout.engine": "megatron", "model.impl": "local", "kernels": "reference", "trainer.eval_every": 0}
    return small_config(folder, name, steps=steps, **{**common, "run.device": device, **overrides})


def offloading() -> dict[str, Any]:
    return {f"{role}.offload.{what}": True for role in ("policy", "critic") for what in ("parameters", "gradients", "optimizer")}


def train_once(rank: int, config: dict[str, Any], resume: bool) -> list[int]:
    """Train on run.device; returns the bytes that this rank's device holds at the end of each step."""
    import torch.distributed as dist

    from megappo.config.loading import load_config
    from megappo.plan.run import plan_run
    from megappo.trainer import main
    from megappo.trainer.ppo import PPO

    held = []

    class WeighedPPO(PPO):
        def step(self) -> Any:
            result = super().step()
            gc.collect()
            held.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
            return result

    path = Path(config["run"]["output_dir"]).parent / f"{config['run']['name']}.{rank}.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_config(str(path), [])
    main.PPO = WeighedPPO
    try:
        main.train(loaded, plan_run(loaded, dist.get_world_size(), config["run"]["device"], resume=resume).data, resume=resume)
    finally:
        main.PPO = PPO
    return held


def counters_of(rank: int) -> dict[str, int]:
    """Of this rank's device, up to now."""
    from host_cuda import runtime

    return runtime.counters(rank)


def metrics_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each step, what does not depend on the clock."""
    path = Path(config["run"]["output_dir"]) / config["run"]["name"] / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(VOLATILE)} for row in rows if "policy/loss" in row]
