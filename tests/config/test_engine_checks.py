"""Keys of Megatron's engine are refused under fsdp2, by name, value and fix, and pass under megatron."""

from __future__ import annotations

import pytest

from megappo.config.checks import problems
from megappo.config.errors import ConfigError
from tests.config.examples import sft_config, train_config

ROLES = ("policy", "critic", "reference")
# overrides that a role with engine fsdp2 refuses -> the beginning of the message and its fix; ranks of the run
REFUSED = [
    (["critic.parallel.pp=2"], "critic.parallel.pp = 2: critic.engine is fsdp2, which has no pipeline; set pp to 1, or"),
    (["policy.parallel.pp=2", "policy.parallel.vpp=2"], "policy.parallel.vpp = 2: policy.engine is fsdp2"),
    (["policy.parallel.ep=2"], "policy.parallel.ep = 2: policy.engine is fsdp2"),
    (["policy.parallel.etp=2"], "policy.parallel.etp = 2: policy.engine is fsdp2"),
    (
        ["policy.parallel.pp=2", "policy.parallel.layers_per_stage=[3, 1]"],
        "policy.parallel.layers_per_stage = [3, 1]: policy.engine",
    ),
    (["policy.router_bias_rate=0.1"], "policy.router_bias_rate = 0.1: policy.engine is fsdp2, which does not balance experts"),
    (["policy.router_aux_coef=0.1"], "policy.router_aux_coef = 0.1: policy.engine is fsdp2, which does not balance experts"),
    (["critic.optimizer.distributed=false"], "critic.optimizer.distributed = false: critic.engine is fsdp2, which always shards"),
]


@pytest.mark.parametrize("overrides, wanted", REFUSED)
def test_what_fsdp2_does_not_have_is_refused(tmp_path, overrides, wanted: str) -> None:
    role = overrides[0].split(".")[0]
    there = list(problems(train_config(tmp_path, [*overrides, f"{role}.engine=fsdp2"]), frozenset(), 4))
    assert any(message.startswith(wanted) and message.endswith(f"or set {role}.engine to megatron") for message in there), there
    with_megatron = list(problems(train_config(tmp_path, overrides), frozenset(), 4))
    assert not any("engine" in message for message in with_megatron)


def test_a_role_without_such_keys_may_run_under_fsdp2(tmp_path) -> None:
    recompute = ["policy.recompute=full", "critic.recompute=selective"]
    ppo = train_config(tmp_path, [*(f"{role}.engine=fsdp2" for role in ROLES), *recompute])
    sizes = ["policy.parallel.tp=2", "policy.parallel.sequence_parallel=true", "critic.parallel.cp=2", "reference.parallel.tp=4"]
    cut = train_config(tmp_path, [*(f"{role}.engine=fsdp2" for role in ROLES), *sizes])
    for config in (ppo, cut, sft_config(tmp_path, ["policy.engine=fsdp2"])):
        assert list(problems(config, frozenset(), 4)) == []


COMPILED = [
    (["policy.compile=true"], "policy.compile = true: policy.engine is megatron, whose layers are not compiled; remove it, or set"),
    (
        ["critic.compile=true", "critic.engine=fsdp2", "critic.parallel.tp=2", "critic.parallel.pp=1"],
        "critic.compile = true: torch.compile does not take DTensors whose number of tokens changes, as under critic.parallel.tp 2",
    ),
    (["reference.compile=true", "reference.engine=fsdp2"], None),
]


AWAY = [
    ([], "policy.engine is megatron, which keeps activations on the device; use full, or set policy.engine to fsdp2"),
    (["policy.engine=fsdp2"], None),
]


@pytest.mark.parametrize("overrides, wanted", AWAY)
def test_activations_leave_the_device_under_fsdp2(tmp_path, overrides, wanted: str | None) -> None:
    config = train_config(tmp_path, [*overrides, "policy.recompute=offload"])
    there = [message for message in problems(config, frozenset(), 4) if "activations" in message]
    assert len(there) == (wanted is not None) and all(f'policy.recompute = "offload": {wanted}' in one for one in there), there


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_a_base_in_8_bits_is_of_both_engines_and_every_layout(tmp_path, engine: str) -> None:
    overrides = [f"policy.engine={engine}", "policy.parallel.tp=2", "policy.parallel.cp=2", "policy.lora.base_bits=8"]
    assert not [message for message in problems(train_config(tmp_path, overrides), frozenset(), 4) if "bits" in message]


def test_megatron_reduces_gradients_once_anyway(tmp_path) -> None:
    there = list(problems(train_config(tmp_path, ["critic.reduce_once=true"]), frozenset(), 4))
    assert there == ["critic.reduce_once = true: critic.engine is megatron, which always reduces gradients once a pass; remove it"]
    assert (
        list(
            problems(
                train_config(tmp_path, ["policy.reduce_once=true", "policy.engine=fsdp2", "policy.parallel.tp=1"]), frozenset(), 4
            )
        )
        == []
    )


@pytest.mark.parametrize("overrides, wanted", COMPILED)
def test_layers_are_compiled_under_fsdp2_without_tp(tmp_path, overrides, wanted: str | None) -> None:
    there = [message for message in problems(train_config(tmp_path, overrides), frozenset(), 4) if "compile" in message]
    assert len(there) == (wanted is not None) and all(message.startswith(wanted) for message in there), there


def test_an_engine_that_does_not_exist_is_refused_at_its_key(tmp_path) -> None:
    with pytest.raises(ConfigError, match="policy.engine"):
        train_config(tmp_path, ["policy.engine=fsdp"])
