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
AWAY = ["parameters", "gradients", "optimizer"]
POLICIES: dict[str, dict[str, Any]] = {
    "megatron tp2": {"parallel": {"tp": 2}, "offload": AWAY},
    "megatron pp2, tied": {"parallel": {"pp": 2}},
    "megatron dp2 bf16": {"dtype": "bf16", "offload": AWAY},
    "megatron dp2 bf16, not sharded": {"dtype": "bf16", "optimizer": {"distributed": False}},
    "fsdp2 dp2": {"engine": "fsdp2", "offload": AWAY},
    "fsdp2 tp2": {"engine": "fsdp2", "parallel": {"tp": 2}},
}


# Sections of references that lie otherwise than the policies that they are refreshed from.
REFERENCES: dict[str, dict[str, Any]] = {
    "megatron tp2": {"parallel": {"pp": 2}, "offload": ["parameters"]},
    "megatron pp2, tied": {"engine": "fsdp2"},
    "fsdp2 dp2": {"parallel": {"tp": 2}},
    "fsdp2 tp2": {"dtype": "bf16"},
}


class Found(NamedTuple):
    """What one policy showed. average, loop: whole tensors after STEPS updates. waits: an update waits for a save's read. placed:
    whole tensors inside `in_place`. restored: after it, parameters are what they were, to the bit. num_bytes: of the average on
    this rank. references: of `references`; empty without an entry of REFERENCES.
    """

    average: dict[str, Tensor]
    loop: dict[str, Tensor]
    waits: bool
    placed: dict[str, Tensor]
    restored: bool
    num_bytes: int
    references: list[tuple[dict[str, Tensor], dict[str, Tensor]]]


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
        main = {name: copy.clone() for name, copy in engine.main_parameters()}
    return {name: values.float() for name, values in (weights_of(engine) | main).items()}


def average_of_updates(factory: Any, path: str, name: str) -> Found:
    keys = POLICIES[name]
    engine = policy_of(factory, path, keys)
    average = PolicyAverage(engine, DECAY)
    loop, read = fp32_of(engine), []
    first = {tensor: values.clone() for tensor, values in average.weights.items()}
    average.release_state(
        lambda: read.append(all(torch.equal(values, first[tensor]) for tensor, values in average.weights.items()))
    )
    for _ in range(STEPS):
        update(engine)
        average.update()
        loop = {tensor: DECAY * loop[tensor] + (1 - DECAY) * now for tensor, now in fp32_of(engine).items()}
    before = weights_of(engine)
    with average.in_place():
        placed = {
            tensor: values.float() for tensor, values in weights_of(engine).items()
        }  # which enters and leaves a mode, and so offloads
    after = weights_of(engine)
    num_bytes = sum(values.nbytes for values in average._values.values())
    restored = all(torch.equal(before[one], after[one]) for one in before)
    refreshed = references(factory, path, keys, REFERENCES[name], engine, average) if name in REFERENCES else []
    of_average, of_loop, in_place = (whole(engine, one) for one in (average._values, loop, placed))
    return Found(of_average, of_loop, read == [True], in_place, restored, num_bytes, refreshed)


def references(
    factory: Any, path: str, keys: dict[str, Any], section: dict[str, Any], policy: Engine, average: PolicyAverage
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(whole tensors of a reference, those that it should have) before a refresh, and after one from either source."""
    from megappo.config.role_sections import ReferenceConfig, RefreshConfig
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch
    from megappo.parallel.layout import layout_of
    from megappo.rollout.build import PolicyPlace
    from megappo.trainer.refresh import ReferenceRefresh, refresh_sync

    settings = ReferenceConfig(model=path, **{"dtype": "fp32", "micro_batch_tokens": 48, **section})
    arch, dtype = read_arch(path), torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    reference = factory.build(EngineSpec("reference", path, arch, settings, total_updates=None))
    layout = layout_of(PolicyConfig(model=path, parallel=keys.get("parallel", {})).parallel, 2)
    place = PolicyPlace(arch, layout, policy.placement, keys.get("engine", "megatron"))

    def pair(wanted: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        now = {name: values.float() for name, values in weights_of(reference).items()}
        rounded = {name: values.to(dtype).float() for name, values in wanted.items()}
        return whole(reference, now), whole(policy, rounded)

    of_policy = {name: values.float() for name, values in weights_of(policy).items()}
    found = [pair(of_policy)]
    for copied, source in ((None, "policy"), (average, "ema")):
        sync = refresh_sync(place, policy, copied, reference, reference.placement, torch.device("cpu"))
        chosen = RefreshConfig(source=source)
        ReferenceRefresh(chosen, policy, reference, average, sync, print).copy(step=1)
        found.append(pair(of_policy if copied is None else {name: values.clone() for name, values in average.weights.items()}))
    return found


def averages(rank: int, paths: dict[str, str]) -> dict[str, Found]:
    from megappo.engine.build import RoleEngines
    from megappo.parallel.cpu_patches import install

    install()
    factory = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    found = {}
    for name in POLICIES:
        path = paths["tied" if "tied" in name else "llama"]
        found[name] = average_of_updates(factory, path, name)
    factory.close()
    return found


def write_models(folder: Path) -> dict[str, str]:
    from tests.models.checkpoints import write_checkpoint

    cases = {"llama": "llama", "tied": "qwen2_tied"}
    for name, case in cases.items():
        write_checkpoint(folder / name, case)
    return {name: str(folder / name) for name in cases}
