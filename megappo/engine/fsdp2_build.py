"""Build of an FSDP2 engine from a role's configuration: model, shards, weights, optimizer."""

from __future__ import annotations

import os
import shutil

import torch

from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import FrozenConfig, Offload, TrainableConfig, key_of_role
from megappo.engine.factory import EngineSpec
from megappo.engine.fsdp2 import Fsdp2Engine
from megappo.engine.fsdp2_model import build_sharded
from megappo.engine.fsdp2_optimizer import ShardedOptimizer
from megappo.engine.role_engine import EngineSettings
from megappo.parallel.device import DTYPES
from megappo.parallel.groups import ProcessGroups


def build_fsdp2(spec: EngineSpec, groups: ProcessGroups, device: torch.device) -> Fsdp2Engine:
    """Build the engine of a role. Collective over the role's ranks. ValueError if the model or the checkpoint does not fit.
    The section of a role that trains is a `TrainableConfig`."""
    section, trains, dtype = spec.section, spec.total_updates is not None, DTYPES[spec.section.dtype]
    if section.compile:
        _check_compiler(spec.role)
    model = build_sharded(spec, groups, dtype=dtype, device=device, trains=trains)
    reduce_once = isinstance(section, TrainableConfig) and section.reduce_once
    optimizer = None
    offload: tuple[Offload, ...] = section.offload if isinstance(section, FrozenConfig) else ()
    if spec.total_updates is not None:
        assert isinstance(section, TrainableConfig), f"{spec.role} has no optimizer to train with"
        optimizer = ShardedOptimizer(model.trained, model.copied, groups, section.optimizer, spec.total_updates, device)
        offload = section.offload
    settings = EngineSettings(device, section.micro_batch_tokens, offload, spec.frozen)
    engine = Fsdp2Engine(spec.role, model, spec.arch, groups, settings, dtype=dtype, optimizer=optimizer, reduce_once=reduce_once)
    engine.offload_idle()
    return engine


def _check_compiler(role: str) -> None:
    """Raise ConfigError without the C++ compiler that torch.compile calls for kernels on the CPU and launchers on a GPU."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        fix = f"torch.compile calls {compiler}, which is not on PATH; install it, name another one in CXX, or remove the key"
        raise ConfigError(problem(f"{key_of_role(role)}.compile", True, fix))
