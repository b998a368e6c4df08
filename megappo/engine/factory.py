"""Specification of a role's engine, and the interface of the factory that builds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megappo.config.role_sections import ModelConfig, RoleConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.data.images import ImageStore
from megappo.engine.base import Engine
from megappo.models.arch import ModelArch
from megappo.models.freeze import frozen_of

ValueHead = Literal["zero", "normal", "checkpoint"]


@dataclass(frozen=True)
class EngineSpec:
    """Model of a role, and the role's section of the configuration: its layout, ranks, micro-batches and optimizer."""

    role: str
    model: str
    """Directory of a Hugging Face checkpoint."""
    arch: ModelArch
    section: RoleConfig
    value_head: ValueHead | None = None
    """Initial weights of a value model's head; None for a language model."""
    total_updates: int | None = None
    """Optimizer steps of the whole run, for the schedule; None for a frozen model."""
    seed: int = 0  # of a random head, and of adapters
    random_weights: bool = False
    """Small random matrices in place of the checkpoint's, for timing: only config.json is read."""

    images: ImageStore | None = None
    """Images that the tokens of a vision-language model name."""

    @property
    def frozen(self) -> frozenset[str]:
        """Hugging Face names of the weights that the section freezes; none if the model does not train."""
        if self.total_updates is None:
            return frozenset()
        return frozen_of(self.section, self.arch, value_head=self.value_head is not None)


class EngineFactory(Protocol):
    """Builds engines on the ranks of the world. Every method but `describe` is collective over the world.
    Ranks that a role does not live on take part in making its groups."""

    def describe(self, section: RoleConfig) -> str:
        """Name the layers of a role with this section, in a word or two for the log."""
        ...

    def connect(self, sections: Iterable[RoleConfig]) -> None:
        """Connect the ranks of these roles before they load models, which takes each a different time."""

    def build(self, spec: EngineSpec) -> Engine | None:
        """Build the engine, offloaded as its section says; None on ranks that the role does not live on. ValueError if it does not
        fit."""
        ...

    def settle(self) -> None:
        """Limit exchanges to `run.timeouts.pass_s` from here on; every kind of pass has run once."""

    def close(self) -> None:
        """Free the process groups of the layouts, after the engines are gone."""


EngineBackend = Callable[[ModelConfig, TimeoutsConfig, torch.device], EngineFactory]
"""(section `model`, time limits of exchanges, the rank's device) -> the factory."""
