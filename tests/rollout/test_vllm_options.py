"""Options of vLLM: every switch of the configuration arrives, and what cannot work where a rank sees one GPU is off.

That vLLM makes of it what is meant on a GPU is checked with its own GPU wheel (scripts/check_gpu_stack.sh).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import RolloutConfig
from megappo.config.vllm_args import OWN, names_of_vllm
from megappo.models.hf_config import read_arch
from megappo.rollout.vllm_options import VllmModel, see_each_other, vllm_environment, vllm_options
from megappo.rollout.vllm_process import require_vllm
from tests.commands.plan.checkpoints import write_checkpoint
from tests.models.checkpoints import write_checkpoint as write_random
from tests.models.fp8_checkpoints import quantise_checkpoint

SYMMETRIC = "VLLM_ALLREDUCE_USE_SYMM_MEM"


@pytest.fixture
def options(tmp_path):
    path = str(write_checkpoint(tmp_path / "model", weights=False, tokenizer=False))
    model = VllmModel(path, read_arch(path), torch.bfloat16, max_model_len=96, seed=3)

    def of(
        device_type: str = "cuda", peers_visible: bool = True, timeouts: TimeoutsConfig = TimeoutsConfig(), **settings: Any
    ) -> dict[str, Any]:
        return vllm_options(
            RolloutConfig(**settings),
            model,
            device_type=device_type,
            executor="uni",
            peers_visible=peers_visible,
            timeouts=timeouts,
        )

    return of


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, dict(enable_sleep_mode=False, kv_cache_memory_bytes=None)),
        (dict(vllm_args=dict(enforce_eager=True, async_scheduling=False)), dict(enforce_eager=True, async_scheduling=False)),
        (dict(sleep="cache"), dict(enable_sleep_mode=True)),
        (dict(sleep="all"), dict(enable_sleep_mode=True)),
        (dict(tp=4, max_num_seqs=7, memory_share=0.6), dict(tensor_parallel_size=4, max_num_seqs=7, gpu_memory_utilization=0.6)),
        (dict(kv_cache_gib=2.0), dict(kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.01)),
    ],
)
def test_settings_arrive(options, settings, expected):
    told = options(**settings)
    assert {name: told[name] for name in expected} == expected
    assert not {"worker_cls", "enable_chunked_prefill", "disable_custom_all_reduce"} & told.keys()


def test_the_groups_of_vllm_have_the_runs_limits_in_whole_seconds(options):
    told = options(timeouts=TimeoutsConfig(start_s=30.5, meeting_s=90))
    assert (told["distributed_timeout_seconds"], told["cpu_distributed_timeout_seconds"]) == (31, 90)
    assert (options()["distributed_timeout_seconds"], options()["cpu_distributed_timeout_seconds"]) == (600, 3600)


def test_a_cpu_runs_eagerly_whole_prompts_and_sleeps_by_a_worker_of_our_own(options):
    told = options("cpu", sleep="all")
    assert told["enforce_eager"] and told["enable_chunked_prefill"] is False and told["enable_sleep_mode"] is False
    assert told["worker_cls"].endswith("SleepingCpuWorker") and told["kv_cache_memory_bytes"] == 1 << 28
    assert "worker_cls" not in options("cpu")


def test_a_cpu_rotates_the_queries_of_latent_attention_without_vllms_kernel():
    """Which turns them wrongly (by 5 of numbers around 1) where many heads have one key; the user's own switches stay."""
    path = "configs/models/DeepSeek-V3"
    model = VllmModel(path, read_arch(path), torch.bfloat16, max_model_len=96)
    own = RolloutConfig(vllm_args={"compilation_config": {"custom_ops": ["none"], "mode": 0}})
    for config, switches in ((RolloutConfig(), ["all"]), (own, ["none"])):
        told = vllm_options(config, model, device_type="cpu", executor="uni", peers_visible=True, timeouts=TimeoutsConfig())
        assert told["attention_config"] == {"backend": "CPU_MLA"}
        assert told["compilation_config"]["custom_ops"] == [*switches, "-rotary_embedding"]
    assert told["compilation_config"]["mode"] == 0


@pytest.mark.slow
def test_the_names_of_vllms_arguments_are_those_of_the_tested_version(options):
    from vllm.engine.arg_utils import EngineArgs

    assert {field.name for field in fields(EngineArgs) if not field.name.startswith("_")} == names_of_vllm()
    assert options().keys() <= OWN.keys() <= names_of_vllm()


def test_ranks_that_do_not_see_each_others_gpus_reduce_by_nccl(options):
    told, variables = options(peers_visible=False, tp=2), vllm_environment("cuda", peers_visible=False)
    assert told["disable_custom_all_reduce"] and told["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    assert variables[SYMMETRIC] == "0" and set(variables.values()) == {"0"} and len(variables) == 3


@pytest.mark.parametrize(
    "tp, places, together",
    [
        (2, [("a", 0), ("a", 1), ("a", 2), ("a", 3)], True),
        (2, [("a", 0), ("a", 0), ("a", 0), ("a", 0)], False),  # Slurm's --gpus-per-task
        (1, [("a", 0), ("a", 0)], True),
        (2, [("a", 0), ("b", 0)], True),  # two nodes: vLLM sees that by itself
        (4, [("a", 0), ("a", 1), ("b", 0), ("b", 1)], True),
        (2, [("a", 0), ("a", 1), ("b", 0), ("b", 0)], False),  # one replica is enough: all ranks decide alike
    ],
)
def test_ranks_of_a_host_on_one_device_number_see_different_gpus(tp, places, together):
    assert see_each_other(tp, places) is together


def test_a_vllm_that_would_take_over_the_process_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT is set.*unset it"):
        require_vllm()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    require_vllm()


@pytest.mark.slow
def test_vllm_builds_no_fp8_layers_for_a_release_in_fp8(tmp_path):
    """vLLM itself reads the options. Without the override it would quantise: the negative control."""
    from vllm.engine.arg_utils import EngineArgs

    write_random(tmp_path, "llama")
    quantise_checkpoint(tmp_path, (32, 32))
    model = VllmModel(str(tmp_path), read_arch(tmp_path), torch.float32, max_model_len=96, seed=3)
    told = vllm_options(RolloutConfig(), model, device_type="cpu", executor="uni")
    assert EngineArgs(**told).create_model_config().quantization is None
    told.pop("hf_overrides")
    assert EngineArgs(**told).create_model_config().quantization == "fp8"
