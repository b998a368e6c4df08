"""`data.fit_batch`: what it lowers, never raises, and says."""

from __future__ import annotations

from math import lcm
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.commands.plan.run import plan_run
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config, validated
from megappo.config.schema import TrainConfig
from megappo.trainer.prepare.run import fit_batch
from tests.commands.plan.checkpoints import write_run


def config_of(prompts: int, samples: int, mini_batch: int, policy_tp: int = 1, critic_pp: int = 1) -> TrainConfig:
    return validated(
        {
            "policy": {"model": "m", "parallel": {"tp": policy_tp}},
            "critic": {"parallel": {"pp": critic_pp}},
            "rollout": {"samples_per_prompt": samples},
            "data": {"train": "t.jsonl", "prompts_per_step": prompts, "fit_batch": True},
            "algorithm": {"mini_batch_size": mini_batch},
        },
        TrainConfig,
    )


sizes = st.integers(1, 300)


@given(sizes, st.integers(1, 9), sizes, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([2, 4, 6, 8]), sizes)
def test_what_it_makes_fits_and_nothing_is_raised(prompts, samples, mini_batch, tp, pp, ranks, num_prompts):
    config = config_of(prompts, samples, mini_batch, tp, pp)
    fitted, notes = fit_batch(config, ranks, num_prompts)
    asked, size = fitted.data.prompts_per_step, fitted.algorithm.mini_batch_size
    assert 1 <= asked <= min(prompts, num_prompts) and 1 <= size <= mini_batch
    assert asked * samples % size == 0
    replicas = lcm(ranks // tp, ranks // pp)
    if min(prompts, num_prompts) >= replicas:
        assert asked * samples % replicas == 0 and asked > min(prompts, num_prompts) - replicas
    if mini_batch >= replicas and asked * samples % replicas == 0:
        assert size % replicas == 0
    assert fit_batch(fitted, ranks, num_prompts) == (fitted, ())
    assert len(notes) == (asked != prompts) + (size != mini_batch)


def test_what_fits_is_left_as_it_is():
    config = config_of(256, 4, 256)
    assert fit_batch(config, 8, 7473) == (config, ())
    assert fit_batch(config, 8, None) == (config, ())


@pytest.mark.parametrize(
    ("ranks", "num_prompts", "sizes", "note"),
    [
        (2, 100, (100, 100), "data.prompts_per_step 256 -> 100 (of 100 prompts on 2 data-parallel ranks)"),
        (3, 1000, (255, 255), "data.prompts_per_step 256 -> 255 (of 1,000 prompts on 3 data-parallel ranks)"),
        (3, None, (255, 255), "data.prompts_per_step 256 -> 255 (on 3 data-parallel ranks)"),
        (8, 5, (5, 5), "data.prompts_per_step 256 -> 5 (of 5 prompts on 8 data-parallel ranks)"),
    ],
)
def test_it_says_what_it_changed(ranks, num_prompts, sizes, note):
    fitted, notes = fit_batch(config_of(256, 1, 256), ranks, num_prompts)
    assert (fitted.data.prompts_per_step, fitted.algorithm.mini_batch_size) == sizes
    assert notes[0] == f"data.fit_batch: {note}"


def plan(folder: Path, *overrides: str, **options: Any):
    return plan_run(load_config(folder / "run.yaml", overrides), 2, "cpu", **options)


def test_a_plan_is_of_the_fitted_run(tmp_path):
    write_run(tmp_path)
    too_many = ("data.prompts_per_step=300", "algorithm.mini_batch_size=128")
    with pytest.raises(ConfigError):
        plan(tmp_path, *too_many)
    planned = plan(tmp_path, *too_many, "data.fit_batch=true")
    assert planned.data is not None and planned.data.loader.prompts_per_step == 100
    config = planned.plan.config
    assert (config.data.prompts_per_step, config.algorithm.mini_batch_size) == (100, 100)
    assert "note: data.fit_batch: data.prompts_per_step 300 -> 100" in planned.report()
    (tmp_path / "train.jsonl").unlink()  # shapes alone: the ranks count, the data are unknown
    assert plan(tmp_path, *too_many, "data.fit_batch=true", shapes_only=True).plan.config.data.prompts_per_step == 300
