"""The parity matrix: which layouts are measured against one rank, on which model, and the runs that measure them.

`test_layouts.py` asserts on it and `scripts/parity.py` prints it. Everything is replayed through the trainer's own stages by
`megappo.verify.measure`; every layout is that of policy, critic and reference alike unless the table says otherwise.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from megappo.config.schema import TrainConfig
from megappo.parallel.layout import ParallelLayout
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

# Sizes of ParallelLayout; a pair of them is policy and critic. Four layers, 4 heads, 4 KV heads; 8 experts of which 3 are chosen.
Sizes = Mapping[str, Any]
Case = Sizes | tuple[Sizes, Sizes]

SP = {"tp": 2, "sequence_parallel": True}
DENSE: dict[int, list[Case]] = {
    2: [
        {}, {"tp": 2}, SP, {"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "layers_per_stage": (3, 1)}, {"cp": 2}, ({"tp": 2}, {"pp": 2}),
    ],
    4: [
        {"tp": 4}, {**SP, "tp": 4}, {"pp": 4}, {"cp": 4}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2, "pp": 2}, {**SP, "pp": 2},
        {"tp": 2, "cp": 2}, {**SP, "cp": 2}, {"cp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {**SP, "pp": 2, "vpp": 2},
        {"cp": 2, "pp": 2, "vpp": 2}, {"pp": 2, "vpp": 2, "layers_per_stage": (1, 1, 1, 1)}, ({**SP, "cp": 2}, {"pp": 4}),
    ],
}  # fmt: skip
EXPERTS: dict[int, list[Case]] = {
    2: [
        {}, {"ep": 2}, SP, {**SP, "ep": 2}, {**SP, "etp": 2}, {"pp": 2}, {"cp": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "vpp": 2},
        ({"ep": 2}, {"pp": 2}),
    ],
    4: [
        {"ep": 2}, {"ep": 4}, {"ep": 2, "pp": 2}, {"ep": 2, "etp": 2}, {**SP, "ep": 2}, {**SP, "ep": 4}, {**SP, "ep": 2, "etp": 2},
        {**SP, "ep": 2, "pp": 2}, {"cp": 2, "ep": 4}, {"cp": 2, "ep": 2, "pp": 2}, {"ep": 2, "pp": 2, "vpp": 2},
        ({**SP, "ep": 2, "etp": 2}, {"cp": 2, "ep": 2, "pp": 2}),
    ],
}  # fmt: skip
MODELS: dict[str, dict[int, list[Case]]] = {"llama": DENSE, "qwen3_moe": EXPERTS}

SEQUENCES = 8


def layouts_of(case: Case, world_size: int) -> tuple[ParallelLayout, ParallelLayout]:
    """(policy's, critic's)"""
    policy, critic = case if isinstance(case, tuple) else (case, case)
    return ParallelLayout(world_size, **policy), ParallelLayout(world_size, **critic)


def title(case: Case, world_size: int) -> str:
    policy, critic = layouts_of(case, world_size)
    return str(policy) if policy == critic else f"{policy} / critic {critic}"


def write_models(folder: Path, model: str) -> None:
    """Policy, and a reference that is not the policy."""
    for name, seed in (("policy", 0), ("reference", 1)):
        write_checkpoint(folder / name, model, seed=seed, num_hidden_layers=4, num_key_value_heads=4)


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """One PPO step with everything on that can differ: temperature, entropy bonus, KL in the reward, value clip, bootstrap, experts.

    changes: `section.key` with dots written as __, for example policy__micro_batch_tokens=1.
    """
    role = {
        "dtype": "fp32", "micro_batch_tokens": 48, "router_aux_coef": 0.01 if "moe" in str(folder) else 0.0,
        # Adam divides by |g| + eps: with the usual 1e-8 a weight whose gradient is rounding noise would move by a full step of random sign.
        "optimizer": {"lr": 3e-4, "eps": 1e-5, "weight_decay": 0.01, "distributed": False},
    }  # fmt: skip
    tree: dict[str, Any] = {
        "policy": {**role, "model": str(folder / "policy")},
        "critic": {**role, "value_head": "normal"},
        "reference": {"model": str(folder / "reference"), "dtype": "fp32", "micro_batch_tokens": 48},
        "rollout": {"sampling": {"temperature": 0.7}, "max_response_tokens": 64},
        "data": {"train": "none.jsonl", "prompts_per_step": SEQUENCES},
        "algorithm": {
            "entropy_coef": 0.01, "mini_batch_size": SEQUENCES // 2, "ppo_epochs": 2, "kl": {"coef": 0.05}, "bootstrap_truncated": True,
            "gamma": 0.99,
        },
    }  # fmt: skip
    for key, value in changes.items():
        *path, last = key.split("__")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return TrainConfig.model_validate(tree)


def run_cases(
    rank: int, folder: str, cases: Sequence[Case], changes: Mapping[str, Mapping[str, Any]], rollouts: Optional[Sequence] = None
) -> dict[str, Any]:
    """{title: Measured} with gradients, and {f"{title} {variant}"} for each variant of `changes` ({"": {}} is the plain run)."""
    from megappo.platform import cpu

    cpu.install()
    from megappo.parallel.groups import build_groups
    from megappo.verify.measure import measure
    from megappo.verify.recording import record_rollouts

    groups, measured = {}, {}
    rollouts = rollouts or record_rollouts(1, sequences=SEQUENCES, vocab_size=131)
    for case in cases:
        policy, critic = layouts_of(case, dist.get_world_size())
        for layout in (policy, critic):
            if layout not in groups:
                groups[layout] = build_groups(layout)
        roles = {"policy": groups[policy], "critic": groups[critic], "reference": groups[policy]}
        for variant, keys in changes.items():
            start = time.perf_counter()
            config = config_of(Path(folder), **keys)
            found = measure(config, rollouts, roles, device=torch.device("cpu"), gradients=True)
            measured[f"{title(case, dist.get_world_size())} {variant}".strip()] = found
            if rank == 0:
                print(f"{folder.split('/')[-1]} {title(case, dist.get_world_size())} {variant}: {time.perf_counter() - start:.1f} s", flush=True)
    return measured


def baseline(folder: Path, changes: Mapping[str, Mapping[str, Any]] = {"": {}}) -> dict[str, Any]:
    return spawn_world(run_cases, 1, str(folder), [{}], changes)[0]
