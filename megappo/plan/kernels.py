"""Refuses kernels that cannot run where the run is."""

from __future__ import annotations

from megappo.config.checks import Device
from megappo.config.errors import ConfigError, problem
from megappo.ops.kernels import Kernels, missing


def check_kernels(kernels: Kernels, device: Device) -> None:
    """ConfigError where the implementation that `kernels` names is missing on this kind of device."""
    if (reason := missing(kernels, device)) is not None:
        raise ConfigError(problem("kernels", kernels, f"{reason}; set kernels=auto, or reference"))
