"""vLLM in the trainer's process on one device, in a table: start, pushes with and without checksums, sleep and waking with the
memory given back, and log-probs before and after.

    python -m scripts.gpu_run.rollout MODEL PAGE [KEY=VALUE of the section rollout ...]      PAGE: Markdown, whole after every line
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
TOKENS = 40  # of a response, which fits the quickstart's model with its 64 positions
SAMPLING: Mapping[str, dict[str, Any]] = {"": {}, ", top-p 0.9 of 20": {"top_p": 0.9, "top_k": 20}}


class Page:
    """Table of figures, in a file as soon as each is known."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines = ["| what | seconds | GB/s | on the device, GiB | |", "|---|---:|---:|---:|---|"]

    def line(self, what: str, seconds: float, moved: int = 0, said: str = "") -> None:
        speed = f"{moved / seconds / 1e9:.3g}" if moved else ""
        self._lines.append(f"| {what} | {seconds:.3g} | {speed} | {taken_gib():.2f} | {said} |")
        print(self._lines[-1], flush=True)
        self._file.write_text("\n".join(self._lines) + "\n", encoding="utf-8")


def taken_gib() -> float:
    """Memory taken on the device by all, vLLM's own allocator included; 0 on the CPU."""
    import torch

    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return (total - free) / GIB


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    result = action()
    synchronize()
    return time.perf_counter() - start, result


def parts_of(action: Callable[[], Any]) -> tuple[float, int, str]:
    """(seconds, 0, what they went into: the longest operations on the device, on the CPU those of torch)."""
    import torch

    kinds = torch.profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_gpu else [])]) as profile:
        seconds, _ = timed(action)
    times = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.key) for e in profile.key_averages()]
    longest = [f"{re.sub(r'[<(|].*', '', name)[:40]} {us / 1e6:.2g} s" for us, name in sorted(times, reverse=True)[:6] if us > 0]
    return seconds, 0, ", ".join(longest)


def main(model: str, page: Page, overrides: Sequence[str]) -> None:
    from megappo.runtime.libraries import quiet_libraries

    quiet_libraries()  # before Megatron-core is imported
    import torch.distributed as dist
    import yaml

    from benchmarks.measure_agreement import engine_of, policy_of
    from megappo.config.schema import RolloutConfig
    from megappo.parallel.device import select_device, start_alone

    device = select_device("auto")
    start_alone(device)
    values = dict(override.split("=", 1) for override in overrides)
    config = RolloutConfig.model_validate({"sleep": "all", **{key: yaml.safe_load(value) for key, value in values.items()}})
    seconds, policy = timed(lambda: policy_of(model, "bf16", device))
    moved = sum(tensor.numel() * tensor.element_size() for tensor in policy.named_parameters().values())
    page.line("policy, read and built", seconds, moved)
    seconds, engine = timed(lambda: engine_of(model, "bf16", device, 20 + TOKENS, config))
    graphs = engine._llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    page.line("vLLM, started", seconds, said=f"CUDA graphs: {getattr(graphs, 'name', graphs)}")
    engine.connect(policy)
    for version in (1, 2, 3):
        seconds, found = timed(lambda version=version: engine.push_weights(version))
        page.line(f"push {version}", seconds, moved, "checksums equal" if found["verified"] else "not compared")
    seconds, _ = timed(lambda: engine._sync.push(4, verify=False))
    page.line("push without checksums", seconds, moved)
    page.line("traced push", *parts_of(lambda: engine.push_weights(5)))
    agreement(page, engine, policy)
    before = taken_gib()
    seconds, _ = timed(engine.sleep)
    given = before - taken_gib()
    page.line("sleep", seconds, int(given * GIB), f"{given:.2f} GiB given back")
    before = taken_gib()
    seconds, _ = timed(engine.weights_changing)
    taken = taken_gib() - before
    page.line("wake for the weights", seconds, int(taken * GIB), f"{taken:.2f} GiB taken again")
    seconds, found = timed(lambda: engine.push_weights(6))
    page.line("push into it", seconds, moved, "checksums equal" if found["verified"] else "not compared")
    agreement(page, engine, policy, " after sleep")
    engine.close()
    dist.destroy_process_group()


def agreement(page: Page, engine: Any, policy: Any, when: str = "") -> None:
    """Lines on |log-prob of vLLM - log-prob of the trainer| of what vLLM draws; ends the process if it is beyond bf16's."""
    from benchmarks.measure_agreement import distances

    for name, sampling in SAMPLING.items():
        seconds, found = timed(lambda sampling=sampling: distances(engine, policy, TOKENS, 64, ("fp32",), **sampling))
        d = found["fp32"]
        what = f"log-probs{name}{when}"
        page.line(what, seconds, said=f"difference: mean {d.mean():.1e}, 99 % {d.quantile(0.99):.1e}, most {d.max():.1e}")
        if not d.mean() < 0.01:
            sys.exit(f"{what}: sampler and trainer differ by {d.mean():.2g} on the mean, 0.01 is the most")


if __name__ == "__main__":
    main(sys.argv[1], Page(Path(sys.argv[2])), sys.argv[3:])
