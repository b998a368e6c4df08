"""A resume that would take the prompts in another order is refused before a model is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.trainer.run_facts import require_same_order
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


def test_other_keys_may_change_and_older_checkpoints_lack_some(tmp_path: Path) -> None:
    now = facts(tmp_path, "run.seed=7")
    require_same_order(now, facts(tmp_path, "run.seed=7", "trainer.steps=9", "data.prompts_per_step=3"), "step-3")
    require_same_order({"config": "run: {name: old}"}, now, "step-3")
