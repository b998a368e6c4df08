"""Adapters in a configuration: what is refused at its key, and a section that is null."""

from __future__ import annotations

import pytest

from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from tests.config.examples import train_config

# override -> the message
REFUSED = [
    ("policy.lora.rank=0", "policy.lora.rank = 0: must be >= 1"),
    ("policy.lora.alpha=0", "policy.lora.alpha = 0: must be > 0"),
    ("critic.lora.dropout=1.0", "critic.lora.dropout = 1.0: must be < 1"),
    ("policy.lora.targets=[]", "policy.lora.targets = []: must be 'all-linear', or must have at least 1 entry"),
    ("policy.lora.targets=linear", "policy.lora.targets = \"linear\": must be 'all-linear', or must be a list"),
    ("reference.lora.rank=4", "reference.lora.rank = 4: unknown key; the reference trains nothing that an adapter could learn"),
    ("policy.lora.use_rslora=true", "unknown key; TRL has it; no equivalent here: alpha / sqrt(rank) is policy.lora.alpha = "),
    ("reward_model.lora={rank: 4}", "has it; the reward_model trains nothing"),
]


@pytest.mark.parametrize("override, words", REFUSED)
def test_what_an_adapter_cannot_be(tmp_path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_config(tmp_path, [override])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_section_may_be_null_and_comes_back_as_it_was(tmp_path) -> None:
    for override in ("policy.lora=null", "policy.lora.targets=[q_proj, v_proj]"):
        config = train_config(tmp_path, [override])
        assert (config.policy.lora is None) == override.endswith("null") and config.critic.lora is None
        written = tmp_path / "resolved.yaml"
        written.write_text(dump_yaml(config), encoding="utf-8")
        assert load_config(written, []) == config
