"""Measure this machine (matrix products, copies, an all-reduce, a layer's launches) and print its profile for `megappo tune`:

python benchmarks/probe.py > here.yaml
megappo tune CONFIG --gpu here.yaml
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megappo.commands.launch.local import start_ranks
from megappo.commands.plan.memory import GIB
from megappo.config.schema import TrainConfig
from megappo.runtime.libraries import quiet_libraries
from megappo.telemetry.console import keep_console
from megappo.telemetry.hardware import PROFILES, Hardware, dump_hardware, hardware_of, load_hardware

RANKS = 2  # at once, if there is room: ranks share a machine's memory and cores, and a profile has the rates of one beside another
# On a busy machine calls are seldom undisturbed: even the fastest of eight may take twice its time.
FEWEST, LEAST_S, OVERHEAD_REPEATS = 8, 1.0, 50
# Layers so small that their time is launches and Python.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


def probe() -> Hardware:
    """Measure the profile `cpu-here` or `gpu-here`. ValueError if the ranks fail, after their own output. Network and decoding
    cannot be measured and come from the nearest profile."""
    gpus = torch.cuda.device_count()
    ranks = min(RANKS, gpus) if gpus else min(RANKS, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="megappo-probe-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        code = start_ranks(ranks, [name], module="benchmarks.probe")
        if code != 0:
            raise ValueError(f"a rank ended with exit code {code}; what it said is above")
        rates = json.loads((folder / "rates.json").read_text(encoding="utf-8"))
    base = load_hardware("h100" if gpus else "cpu")
    here = f"{platform.node()}, {platform.machine()}, {'' if gpus else f'{os.cpu_count()} cores, '}torch {torch.__version__}"
    cores = os.cpu_count() or 1
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else psutil.virtual_memory().total / cores
    measured = {
        **rates,
        "memory_gib": memory / GIB,
        "gpus_per_node": gpus or cores,
        # Measured rates are reached in full: take no share of them.
        "matmul_share": 1.0,
        "attention_share": min(1.0, base.attention_share / base.matmul_share),
        "experts_share": base.experts_share / base.matmul_share,
        "memory_share": 1.0,
        "link_share": 1.0,
        "source": f"measured by benchmarks/probe.py with {ranks} ranks on {here}",
    }
    if gpus:
        measured["processors"] = torch.cuda.get_device_properties(0).multi_processor_count
    name = "gpu-here" if gpus else "cpu-here"
    facts = {key: value for key, value in asdict(replace(base, name=name)).items() if key not in ("name", "calibration")}
    return hardware_of(name, {**facts, **measured}, str(PROFILES))


def measure_rates(device: torch.device, folder: str) -> dict[str, float]:
    """Measure the rates of one rank, together with the others of the world. Keys are fields of `Hardware`. Collective."""
    import torch.distributed as dist

    size = 8192 if device.type == "cuda" else 768
    rates: dict[str, float] = {}
    for name, dtype in (("fp32_tflops", torch.float32), ("bf16_tflops", torch.bfloat16)):
        a = torch.randn(size, size, device=device).to(dtype)
        rates[name] = 2 * size**3 / _undisturbed_s(lambda a=a: a @ a) / 1e12
    # 1 GiB on a GPU, 64 MiB on the CPU: more than its caches hold.
    x = torch.zeros((1 << 30 if device.type == "cuda" else 1 << 26) // 4, device=device)
    y = torch.empty_like(x)
    rates["memory_tb_s"] = 2 * x.numel() * 4 / _undisturbed_s(lambda: y.copy_(x)) / 1e12  # fp32, read and written
    if dist.get_world_size() > 1:
        small, large = x[:64].clone(), x[: 1 << 22].clone()
        # A pass makes hundreds of small all-reduces, so their usual latency counts, not the shortest.
        latency = median(_times(lambda: dist.all_reduce(small), 100))
        seconds = min(_times(lambda: dist.all_reduce(large), 30))
        # An all-reduce of two ranks has two steps; in each a rank sends and receives half of the data, and waits once.
        rates["node_latency_us"] = latency / 2 * 1e6
        rates["node_link_gb_s"] = link_gb_s(large.numel() * 4, seconds, latency)
    rates["layer_overhead_us"] = _layer_overhead_s(folder, device) * 1e6
    return rates


def link_gb_s(size: int, seconds: float, latency: float) -> float:
    """GB/s of a link between two ranks whose all-reduce takes `seconds` for `size` bytes, and `latency` for a small message."""
    # On a busy machine `latency` may exceed `seconds`: at least half of `seconds` counts as data.
    return size / max(seconds - latency, seconds / 2) / 1e9


def _undisturbed_s(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of as many calls as fit into LEAST_S. The calls must not be collective."""
    found = _times(work, FEWEST)
    end = time.perf_counter() + LEAST_S
    while time.perf_counter() < end:
        found += _times(work, FEWEST)
    return min(found)


def _times(work: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of several calls, after one that is not counted."""
    from megappo.telemetry.timers import wait_for_device

    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        wait_for_device()
        times.append(time.perf_counter() - start)
    return times[1:]


def _layer_overhead_s(folder: str, device: torch.device) -> float:
    """Host seconds of one layer, from a pass over a model of tiny layers."""
    from megappo.commands.tune.trial import run_trial
    from megappo.commands.tune.trials import Trial

    config = TrainConfig.model_validate(
        {"run": {"device": device.type}, "policy": {"model": folder}, "data": {"train": "none"}}
        | {"reference": {"dtype": "fp32", "micro_batch_tokens": 8}}
    )
    trial = Trial(
        config=config,
        role="reference",
        label="probe",
        samples=8,
        prompt_tokens=4,
        response_tokens=4,
        repeats=OVERHEAD_REPEATS,
    )
    import torch.distributed as dist

    micro_batches = trial.samples // dist.get_world_size()
    # + 1: a micro-batch costs one layer more (`commands/tune/work.py`).
    return run_trial(trial, device).forward_s / micro_batches / (TINY["num_hidden_layers"] + 1)


def _measure_as_rank(folder: str) -> None:
    """The program of one rank: measure, and leave rank 0's rates in the folder."""
    keep_console()
    quiet_libraries()  # before Megatron-core is imported
    import torch.distributed as dist

    from megappo.parallel.device import select_device, start_distributed
    from megappo.trainer.kernel_selection import choose_kernels

    device = select_device("auto")
    start_distributed(device)
    choose_kernels("auto", device)
    rates = measure_rates(device, folder)
    if dist.get_rank() == 0:
        Path(folder, "rates.json").write_text(json.dumps(rates), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _measure_as_rank(sys.argv[1])
    else:
        print(dump_hardware(probe()), end="")
