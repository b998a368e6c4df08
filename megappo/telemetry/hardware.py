"""Hardware profiles of one rank: GPUs from `hardware.yaml`, a user's file, or measured (`benchmarks/probe.py`). Data sheet rates
times a stated share give the rates reached, in bytes, FLOPs and seconds; the tuner uses those, MFU the peak."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megappo.config.errors import ConfigError, problem
from megappo.config.yaml_reader import read_yaml
from megappo.telemetry.tables import GIB

PROFILES = Path(__file__).with_name("hardware.yaml")
Dtype = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Hardware:
    """One rank's share of a machine. Fields are those of `hardware.yaml`, which documents their meaning and sources."""

    name: str
    memory_gib: float
    headroom_gib: float
    bf16_tflops: float
    fp32_tflops: float
    processors: int
    memory_tb_s: float
    node_link_gb_s: float
    network_gb_s: float
    host_link_gb_s: float
    gpus_per_node: int
    matmul_share: float
    memory_share: float
    link_share: float
    host_share: float
    node_latency_us: float
    network_latency_us: float
    layer_overhead_us: float
    decode_overhead_us: float
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

    @property
    def layer_overhead_s(self) -> float:
        """Host seconds of one layer's forward: kernel launches, Python."""
        return self.layer_overhead_us * 1e-6

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


def dump_hardware(hardware: Hardware) -> str:
    """Write the profile as YAML, to be saved and given to --gpu."""
    lines = [f"{hardware.name}:"]
    for key, value in asdict(hardware).items():
        if key != "name":
            lines.append(f"  {key}: {value:.6g}" if isinstance(value, float) else f"  {key}: {value}")
    return "\n".join(lines) + "\n"


def profiles(path: Path) -> dict[str, Hardware]:
    return {name: hardware_of(name, values, str(path)) for name, values in read_yaml(path).data.items()}


def hardware_of(name: str, values: Any, where: str) -> Hardware:
    """Make a profile from plain data. ConfigError names missing and unknown keys and values that are not positive numbers."""
    wanted = {field.name: field.type for field in fields(Hardware) if field.name != "name"}
    if not isinstance(values, Mapping) or set(values) != set(wanted):
        given = set(values) if isinstance(values, Mapping) else set()
        wrong = sorted(set(wanted) ^ given)
        what = "missing" if wrong[0] in wanted else "not a key of a profile"
        raise ConfigError(f"{where}: profile {name}: {wrong[0]} is {what}")
    numbers: dict[str, Any] = {}
    for key, kind in wanted.items():
        value = values[key]
        if kind == "str":
            numbers[key] = str(value)
            continue
        least, bound = (0.0, ">= 0") if key == "headroom_gib" else (math.ulp(0.0), "> 0")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
            raise ConfigError(f"{where}: {problem(f'{name}.{key}', value, f'must be a number {bound}')}")
        if key.endswith("_share") and value > 1:
            fix = "is a share of what the hardware could do; must be <= 1"
            raise ConfigError(f"{where}: {problem(f'{name}.{key}', value, fix)}")
        if kind == "int" and value != int(value):
            raise ConfigError(f"{where}: {problem(f'{name}.{key}', value, 'must be an integer')}")
        numbers[key] = int(value) if kind == "int" else float(value)
    if numbers["headroom_gib"] >= numbers["memory_gib"]:
        raise ConfigError(f"{where}: {problem(f'{name}.headroom_gib', numbers['headroom_gib'], 'must be less than memory_gib')}")
    return Hardware(name, **numbers)
