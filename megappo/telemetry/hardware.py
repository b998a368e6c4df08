"""Hardware profiles of one rank: GPUs from `hardware.yaml`, a user's file, or measured (`benchmarks/probe.py`). Data sheet rates
times a stated share give the rates reached, in bytes, FLOPs and seconds; the tuner uses those, MFU the peak."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from megappo.config.errors import ConfigError, problem
from megappo.config.yaml_reader import read_yaml
from megappo.telemetry.tables import GIB

PROFILES = Path(__file__).with_name("hardware.yaml")
Dtype = Literal["bf16", "fp32"]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
"""Part of what the hardware could do."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hardware:
    """One rank's share of a machine. Fields are those of `hardware.yaml`, which documents their meaning and sources."""

    name: str
    memory_gib: Rate
    headroom_gib: Annotated[float, Field(ge=0)]
    bf16_tflops: Rate
    fp32_tflops: Rate
    processors: Count
    memory_tb_s: Rate
    node_link_gb_s: Rate
    network_gb_s: Rate
    host_link_gb_s: Rate
    gpus_per_node: Count
    matmul_share: Share
    memory_share: Share
    link_share: Share
    host_share: Share
    node_latency_us: Rate
    network_latency_us: Rate
    layer_overhead_us: Rate
    decode_overhead_us: Rate
    source: str

    @property
    def memory_bytes(self) -> int:
        """All of the device's memory, as given to `megappo plan --gpu-memory-gib`."""
        return int(self.memory_gib * GIB)

    @property
    def usable_bytes(self) -> int:
        """Bytes that the plan's peak may reach; the peak includes the CUDA context and NCCL's buffers."""
        return int((self.memory_gib - self.headroom_gib) * GIB)

    def peak_tflops(self, dtype: Dtype) -> float:
        """Return TFLOP/s of the data sheet."""
        return self.bf16_tflops if dtype == "bf16" else self.fp32_tflops

    def flops_per_s(self, dtype: Dtype) -> float:
        """Return FLOP/s reached by matrix products."""
        return self.peak_tflops(dtype) * 1e12 * self.matmul_share

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes/s reached by kernels that only read and write."""
        return self.memory_tb_s * 1e12 * self.memory_share

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes/s between the device and host memory, one direction."""
        return self.host_link_gb_s * 1e9 * self.host_share

    def is_gpu(self) -> bool:
        return not self.name.startswith("cpu")


def load_hardware(name: str) -> Hardware:
    """Load a profile by its name or from a YAML file. ConfigError, one line, if `name` is neither."""
    known = profiles(PROFILES)
    if name in known:
        return known[name]
    if Path(name).is_file():
        own = profiles(Path(name))
        if len(own) != 1:
            raise ConfigError(f"--gpu {name}: the file holds {len(own)} profiles; give it one")
        return next(iter(own.values()))
    fix = f"use {', '.join(known)}, or a YAML file with one (benchmarks/probe.py prints one)"
    raise ConfigError(f"--gpu {name}: no such profile; {fix}")


def hardware_of_gpu(device_name: str) -> Hardware | None:
    """Return the profile of a GPU by torch's name for it (`NVIDIA H100 80GB HBM3`); None if there is none."""
    words = re.split(r"[\s_/-]+", device_name.lower())
    if "pcie" in words or "nvl" in words:  # other clocks than the SXM boards of the data sheets
        return None
    return next((one for name, one in profiles(PROFILES).items() if one.is_gpu() and name in words), None)


def profiles(path: Path) -> dict[str, Hardware]:
    return {name: hardware_of(name, values, str(path)) for name, values in read_yaml(path).data.items()}


def hardware_of(name: str, values: Any, where: str) -> Hardware:
    """Make a profile from plain data. ConfigError names a key that is missing, unknown or of a wrong value."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: profile {name} is no mapping of keys to values")
    try:
        found = Hardware(**{**values, "name": name})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = first["loc"][0]
        raise ConfigError(f"{where}: {problem(f'{name}.{key}', values.get(key), first['msg'])}") from None
    if found.headroom_gib >= found.memory_gib:
        raise ConfigError(f"{where}: {problem(f'{name}.headroom_gib', found.headroom_gib, 'must be less than memory_gib')}")
    return found
