"""Hardware profiles of one rank: GPUs from `hardware.yaml`, a user's file, or measured (`benchmarks/probe.py`). Data sheet rates
times a stated share give the rates reached, in bytes, FLOPs and seconds; the tuner uses those, MFU the peak."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
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
class Calibration:
    """Seconds that a run took by those predicted, for each stage of its `timing/`: factors of what is predicted with a profile."""

    generate: Rate = 1.0
    score: Rate = 1.0
    logprobs: Rate = 1.0
    update_critic: Rate = 1.0
    update_policy: Rate = 1.0
    push_weights: Rate = 1.0
    evaluate: Rate = 1.0

    def of(self, stage: str) -> float:
        return getattr(self, stage, 1.0)

    def named(self) -> dict[str, float]:
        """Return the factors that change anything."""
        return {stage: factor for stage, factor in asdict(self).items() if factor != 1.0}

    def times(self, factors: Mapping[str, float]) -> Calibration:
        """Return these factors times others, of some stages."""
        return Calibration(**{stage: factor * factors.get(stage, 1.0) for stage, factor in asdict(self).items()})


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
    attention_share: Share
    attention_half_tokens: Annotated[float, Field(ge=0)]
    attention_backward: Rate
    experts_share: Share
    memory_share: Share
    link_share: Share
    network_share: Share
    host_share: Share
    node_latency_us: Rate
    network_latency_us: Rate
    small_all_reduce_us: Rate
    layer_overhead_us: Rate
    sparse_layer_overhead_us: Annotated[float, Field(ge=0)]
    decode_overhead_us: Rate
    sequence_overhead_us: Annotated[float, Field(ge=0)]
    sample_overhead_us: Annotated[float, Field(ge=0)]
    step_overhead_s: Annotated[float, Field(ge=0)]
    push_gb_s: Rate
    source: str
    calibration: Calibration = Calibration()

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

    def attention_flops_per_s(self, dtype: Dtype, length: float) -> float:
        """Return FLOP/s reached by the forward kernel of causal attention over sequences of `length` tokens."""
        return self.peak_tflops(dtype) * 1e12 * self.attention_share * length / (length + self.attention_half_tokens)

    def experts_flops_per_s(self, dtype: Dtype) -> float:
        """Return FLOP/s reached by the grouped matrix products of experts."""
        return self.peak_tflops(dtype) * 1e12 * self.experts_share

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


def load_hardware(name: str, key: str = "--gpu") -> Hardware:
    """Load a profile by its name or from a YAML file. ConfigError, one line, if `name`, the value of `key`, is neither."""
    known = profiles(PROFILES)
    if name in known:
        return known[name]
    if Path(name).is_file():
        own = profiles(Path(name))
        if len(own) != 1:
            raise ConfigError(f"{key} {name}: the file holds {len(own)} profiles; give it one")
        return next(iter(own.values()))
    fix = f"use {', '.join(known)}, or a YAML file with one (benchmarks/probe.py prints one)"
    raise ConfigError(f"{key} {name}: no such profile; {fix}")


def profile_of(named: str | None, gpu: str | None) -> Hardware | None:
    """Return the profile of a rank: the one that `telemetry.hardware` names, or that of its GPU; None if there is none. gpu:
    torch's name for it, None on a CPU."""
    if named is not None:
        return load_hardware(named, "telemetry.hardware =")
    return None if gpu is None else hardware_of_gpu(gpu)


def hardware_of_gpu(device_name: str) -> Hardware | None:
    """Return the profile of a GPU by torch's name for it (`NVIDIA H100 80GB HBM3`); None if there is none."""
    words = re.split(r"[\s_/-]+", device_name.lower())
    if "pcie" in words or "nvl" in words:  # other clocks than the SXM boards of the data sheets
        return None
    return next((one for name, one in profiles(PROFILES).items() if one.is_gpu() and name in words), None)


def dump_hardware(hardware: Hardware) -> str:
    """Write a profile as YAML, to be saved and given to --gpu."""
    facts = {key: value for key, value in asdict(hardware).items() if key not in ("name", "calibration")}
    factors = {stage: float(f"{factor:.4g}") for stage, factor in hardware.calibration.named().items()}
    return yaml.safe_dump({hardware.name: facts | ({"calibration": factors} if factors else {})}, sort_keys=False)


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
        key = ".".join(map(str, (name, *first["loc"])))
        if first["type"] == "missing":
            raise ConfigError(f"{where}: {key} is missing; add it (megappo/telemetry/hardware.yaml says what it is)") from None
        raise ConfigError(f"{where}: {problem(key, first['input'], first['msg'])}") from None
    if found.headroom_gib >= found.memory_gib:
        raise ConfigError(f"{where}: {problem(f'{name}.headroom_gib', found.headroom_gib, 'must be less than memory_gib')}")
    return found
