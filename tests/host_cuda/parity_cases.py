"""A slice of the parity matrix on the host's CUDA device: layouts that take other paths there than on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megappo.commands.verify.measure import Measured, measure
from megappo.commands.verify.recording import record_rollouts
from megappo.ops import dispatch
from tests.parity.matrix import SEQUENCES, SP, VARIANTS, VOCABULARY, Case, config_of, engines_in, roles_of

# model -> name -> (layout of policy and critic on two ranks, changes of the configuration)
CASES: dict[str, dict[str, tuple[Case, Mapping[str, Any]]]] = {
    "llama": {
        "tp2 sp / pp2": ((SP, {"pp": 2}), {}),
        "pp2 vpp2 / cp2": (({"pp": 2, "vpp": 2}, {"cp": 2}), {}),
        "cp2 / tp2, offload": (({"cp": 2}, {"tp": 2}), VARIANTS["offload"]),
        "dp2, recompute full": ({}, VARIANTS["recompute full"]),
        "tp2 sp / pp2, bf16": ((SP, {"pp": 2}), VARIANTS["bf16"]),
    },
    "qwen3_moe": {
        "ep2": ({"ep": 2}, {}),
        "tp2 sp ep2 / pp2": (({**SP, "ep": 2}, {"pp": 2}), {}),
    },
}
ALONE = {"": {}, "bf16": VARIANTS["bf16"]}


def measured(folder: str, case: Case, changes: Mapping[str, Any], device: torch.device) -> Measured:
    """As the parity matrix measures a case, on a device. Collective."""
    rollouts = record_rollouts(1, sequences=SEQUENCES, vocab_size=VOCABULARY)
    with roles_of(case) as roles:
        engines = engines_in(roles, device)
        return measure(config_of(Path(folder), **changes), rollouts, engines, gradients=True, parameters=True)


def on_the_device(rank: int, folder: str, model: str, name: str) -> Measured:
    dispatch.select("reference", "cuda")  # Triton's interpreter takes minutes; test_ppo.py runs the kernels
    case, changes = CASES[model][name]
    return measured(folder, case, changes, torch.device("cuda", rank))


def without_sums(rank: int, folder: str) -> Measured:
    """llama on two data-parallel ranks that do not sum their gradients, as where megappo forgot to."""
    dispatch.select("reference", "cuda")
    with mock.patch("megappo.engine.megatron._sum_gradients", lambda *args, **kwargs: None):
        return measured(folder, {}, {}, torch.device("cuda", rank))


def on_the_cpu(rank: int, folders: dict[str, str]) -> dict[str, dict[str, Measured]]:
    """One rank: model -> variant -> Measured."""
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    device = torch.device("cpu")
    return {
        model: {name: measured(folder, {}, changes, device) for name, changes in ALONE.items() if not name or model == "llama"}
        for model, folder in folders.items()
    }
