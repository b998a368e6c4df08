"""A resume that would take the prompts in another order, or train other models, is refused before a model is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.trainer.run_facts import changed_schedules, require_same_models, require_same_order
from tests.config.examples import train_config


def facts(folder: Path, *overrides: str) -> dict[str, str]:
    return {"config": dump_yaml(train_config(folder, list(overrides)))}


@pytest.mark.parametrize(
    "override, text",
    [
        ("run.seed=7", "run.seed was 0 at step-3, and is 7: the prompts would come in another order; restore it"),
        ("data.shuffle=false", "data.shuffle was True at step-3, and is False"),
        ("data.weight_key=w", "data.weight_key was None at step-3, and is w"),
    ],
)
def test_another_order_of_the_prompts_is_refused(tmp_path: Path, override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        require_same_order(facts(tmp_path), facts(tmp_path, override), "step-3")


def test_other_keys_may_change(tmp_path: Path) -> None:
    now = facts(tmp_path, "run.seed=7")
    require_same_order(now, facts(tmp_path, "run.seed=7", "trainer.steps=9", "data.prompts_per_step=3"), "step-3")


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        (
            ("trainer.steps=4",),
            ("trainer.steps=9",),
            ["policy.optimizer.lr_schedule is cosine, and trainer.steps was 4 at step-3, and is 9"],
        ),
        (
            ("trainer.steps=null",),
            ("trainer.epochs=2", "trainer.steps=null"),
            ["policy.optimizer.lr_schedule is cosine, and trainer.epochs was"],
        ),
        (("trainer.steps=4",), ("trainer.steps=4", "run.name=other"), []),
        (("trainer.steps=4",), ("trainer.steps=9", "policy.optimizer.lr_schedule=constant"), []),
    ],
)
def test_a_learning_rate_that_jumps_with_the_length_of_the_run_is_told(
    tmp_path: Path, then: tuple[str, ...], now: tuple[str, ...], told: list[str]
) -> None:
    usual = ("policy.optimizer.lr_schedule=cosine", "critic.optimizer.lr_schedule=constant")
    old, new = ({**facts(tmp_path, *usual, *keys), "critics": ["critic"]} for keys in (then, now))
    found = changed_schedules(old, new, "step-3")
    assert len(found) == len(told) and all(line.startswith(start) for line, start in zip(found, told))


ALONE = ("trainer.steps=4", "critic.warmup.steps=4")


@pytest.mark.parametrize(
    "held, overrides, text",
    [
        (
            {"critic"},
            (),
            "step-3 is of a run that trains the critic alone, and this one would train policy and critic; start a new",
        ),
        (
            {"policy", "critic"},
            ALONE,
            "step-3 is of a run that trains policy and critic, and this one would train the critic alone",
        ),
    ],
)
def test_a_critic_alone_and_a_whole_run_do_not_go_on_as_each_other(
    tmp_path: Path, held: set[str], overrides: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        require_same_models(held, train_config(tmp_path, list(overrides)), "step-3")


def test_the_same_models_go_on(tmp_path: Path) -> None:
    require_same_models({"policy", "critic", "ema"}, train_config(tmp_path), "step-3")
    require_same_models({"policy"}, train_config(tmp_path, ["algorithm.estimator=rloo"]), "step-3")
    require_same_models({"critic"}, train_config(tmp_path, list(ALONE)), "step-3")
