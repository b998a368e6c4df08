"""Content of the device when vLLM starts: it takes what it finds free, so that everything that stays has to be there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.trainer.small_run import small_config, write_small_task
from tests.worlds import spawn_world

MOMENTS = {"exp_avg", "exp_avg_sq"}


class Started(Exception):
    """The rollout engine was about to be built."""


def seen_by_the_rollout(rank: int, folder: Path, offload: bool) -> dict[str, Any]:
    """Moments of the policy's optimizer and bytes behind its state, at the moment when vLLM would be started."""
    import yaml

    from megappo.commands.plan.run import plan_run
    from megappo.config.loading import load_config
    from megappo.trainer import main, sampling

    found: dict[str, Any] = {}

    def build_rollout(config: Any, engine: Any, **_: Any) -> None:
        inner = [one.optimizer for one in engine._optimizer._chained()]
        states = [state for one in inner for state in one.state.values()]
        found["updated"] = sum(len(group["params"]) for one in inner for group in one.param_groups)
        found["with moments"] = sum(state.keys() >= MOMENTS for state in states)
        found["bytes"] = sum(state[name].untyped_storage().nbytes() for state in states for name in MOMENTS)
        found["zero"] = offload or all(not torch.any(state[name]) for state in states for name in MOMENTS)
        raise Started

    config = small_config(folder, f"offload_{offload}", steps=1, **{"policy.offload": ["optimizer"] if offload else []})
    path = folder / f"config.{offload}.{rank}.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_config(str(path), [])
    with mock.patch.object(sampling, "build_rollout", build_rollout), pytest.raises(Started):
        main.train(loaded, plan_run(loaded, 2, "cpu", resume=False).data, resume=False)
    return found


@pytest.mark.parametrize("offload", [False, True])
def test_moments_exist_or_are_parked_before_the_rollout_engine_is_built(tmp_path, offload: bool) -> None:
    write_small_task(tmp_path)
    for found in spawn_world(seen_by_the_rollout, 2, tmp_path, offload):
        assert found["with moments"] == found["updated"] > 0 and found["zero"]
        assert (found["bytes"] == 0) == offload
