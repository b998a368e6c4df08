"""Engines as values to build: what a role asks for, and the interface of whoever builds it.

A run takes one `EngineBackend` (by default `build.MegatronEngines`): another engine changes that argument and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megappo.config.schema import ModelConfig, ParallelConfig, RoleConfig, TimeoutsConfig
from megappo.engine.base import Engine
from megappo.models.arch import ModelArch

ValueHead = Literal["zero", "normal", "checkpoint"]


@dataclass(frozen=True)
class EngineSpec:
    """The model of a role and the section of the configuration that says how it is laid out, split and trained.

    role: its name. model: directory of a Hugging Face checkpoint. value_head: how the head of a value model starts; None is a
    language model. total_updates: optimizer steps of the whole run, for the schedule; None does not train. seed: of a random
    head. random_weights: small random matrices in place of the checkpoint's, for timing: only config.json is read.
    """

    role: str
    model: str
    arch: ModelArch
    section: RoleConfig
    value_head: ValueHead | None = None
    total_updates: int | None = None
    seed: int = 0
    random_weights: bool = False


class EngineFactory(Protocol):
    """Builds engines over all ranks of the world, which exists. Every method but `describe` is collective."""

    def describe(self, section: RoleConfig) -> str:
        """The layers of a role with this section, in a word or two for the log."""
        ...

    def connect(self, parallels: Iterable[ParallelConfig]) -> None:
        """Connect the ranks of these layouts while they are together: loading takes them different times."""

    def build(self, spec: EngineSpec) -> Engine:
        """The engine, with everything offloaded that its section offloads. ValueError where the model does not fit."""
        ...

    def settle(self) -> None:
        """Every kind of pass has run once: from here on an exchange may take `run.timeouts.pass_s`."""

    def close(self) -> None:
        """Free what was made for the layouts; the engines are gone."""


EngineBackend = Callable[[ModelConfig, TimeoutsConfig, torch.device], EngineFactory]
"""(how layers are built, limits of exchanges, the rank's device) -> the factory."""
