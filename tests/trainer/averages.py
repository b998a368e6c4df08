"""Policies of both engines in one world of two ranks, their moving averages, and the plain loop that these are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megappo.config.role_sections import ModelConfig, OptimizerConfig, PolicyConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.engine.base import Engine
from megappo.trainer.average import PolicyAverage
from tests.engine.runs import recorded_batch
from tests.engine.test_conformance import negative_logprob, weights_of, whole

STEPS, DECAY = 3, 0.75
AWAY = {"parameters": True, "gradients": True, "optimizer": True}
POLICIES: dict[str, dict[str, Any]] = {
    "megatron tp2": {"parallel": {"tp": 2}, "offload": AWAY},
    "megatron pp2, tied": {"parallel": {"pp": 2}},
    "megatron dp2 bf16": {"dtype": "bf16", "offload": AWAY},
    "megatron dp2 bf16, not sharded": {"dtype": "bf16", "optimizer": {"distributed": False}},
    "fsdp2 dp2": {"engine": "fsdp2", "offload": AWAY},
    "fsdp2 tp2": {"engine": "fsdp2", "parallel": {"tp": 2}},
}


class Found(NamedTuple):
    """What one policy showed. average, loop: whole tensors after STEPS updates. placed: whole tensors inside `in_place`. restored:
    after it, parameters are what they were, to the bit. num_bytes: of the average on this rank."""

    average: dict[str, Tensor]
    loop: dict[str, Tensor]
    placed: dict[str, Tensor]
    restored: bool
    num_bytes: int


def policy_of(factory: Any, path: str, keys: dict[str, Any]) -> Engine:
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch

    optimizer = OptimizerConfig(**{"lr": 1e-2, "eps": 1e-5, "clip_grad": 0.0, **keys.get("optimizer", {})})
    section = PolicyConfig(model=path, **{"dtype": "fp32", "micro_batch_tokens": 48, **keys, "optimizer": optimizer})
    return factory.build(EngineSpec("policy", path, read_arch(path), section, total_updates=10))


def update(engine: Engine) -> None:
    from tests.engine.whole import Whole

    with engine.train_mode():
        engine.optimizer_zero_grad()
        Whole(engine).forward_backward(recorded_batch(), negative_logprob, reads=("weight",), denominator=10.0)
        engine.lr_scheduler_step()
        assert engine.optimizer_step().applied


def fp32_of(engine: Engine) -> dict[str, Tensor]:
    """Whole weights as the optimizer has them, where every rank has them whole; else as the model has them."""
    with engine.eval_mode():
        main = {name: copy.clone() for name, copy in engine.main_parameters().items()}
    return {name: values.float() for name, values in (weights_of(engine) | main).items()}


def average_of_updates(factory: Any, path: str, keys: dict[str, Any], keep_on: str) -> Found:
    engine = policy_of(factory, path, keys)
    average = PolicyAverage(engine, DECAY, keep_on)  # type: ignore[arg-type]
    loop = fp32_of(engine)
    for _ in range(STEPS):
        update(engine)
        average.update()
        loop = {name: DECAY * loop[name] + (1 - DECAY) * now for name, now in fp32_of(engine).items()}
    before = weights_of(engine)
    with average.in_place():
        placed = {
            name: values.float() for name, values in weights_of(engine).items()
        }  # which enters and leaves a mode, and so offloads
    after = weights_of(engine)
    num_bytes = sum(values.nbytes for values in average._values.values())
    restored = all(torch.equal(before[name], after[name]) for name in before)
    return Found(*(whole(engine, one) for one in (average._values, loop, placed)), restored, num_bytes)


def averages(rank: int, paths: dict[str, str]) -> dict[str, Found]:
    from megappo.engine.build import RoleEngines
    from megappo.platform.cpu import install

    install()
    factory = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    found = {}
    for name, keys in POLICIES.items():
        path = paths["tied" if "tied" in name else "llama"]
        found[name] = average_of_updates(factory, path, keys, "device" if "tp2" in name else "host")
    factory.close()
    return found


def write_models(folder: Path) -> dict[str, str]:
    from tests.models.checkpoints import write_checkpoint

    cases = {"llama": "llama", "tied": "qwen2_tied"}
    for name, case in cases.items():
        write_checkpoint(folder / name, case)
    return {name: str(folder / name) for name in cases}
