"""Cost of the guards of a run beside a step of the quickstart's size: watchdog, schedule agreement, comparison of copies.

python benchmarks/bench_overhead.py [--rounds 20] [--prompts 128] [--idle 10]

Two ranks run the log-probs, values and updates of one PPO step with random weights, without generation: a real step is longer.
Rounds with and without the guards alternate in the same processes. They differ by less than a busy machine's noise, so processor
time of the ranks is compared as well, and each guard is timed alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megappo.commands.launch.local import HOST, loopback_store
from megappo.runtime.libraries import quiet_libraries
from scripts.quickstart_model import VOCAB_SIZE, llama_config

RANKS = 2
TOKENS = (10, 15)  # of a prompt and its response
STEPS_PER_ROUND = 2
MEETINGS, CHECKS = 300, 5


class Spent(NamedTuple):
    """Seconds of one step: by the clock, and of processor time of rank 0."""

    wall: float
    processor: float


class Cost(NamedTuple):
    """Seconds that a guard takes of one step. details: how it was counted."""

    guard: str
    seconds: float
    details: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Cost of watchdog, schedule agreement and comparison of copies.")
    parser.add_argument("--rounds", type=int, default=20, help="rounds with and without the guards, each")
    parser.add_argument("--prompts", type=int, default=128, help="of a step, with 4 samples each; the quickstart has 128")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds in which the watchdog's threads are watched alone")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="overhead") as folder:
        config = llama_config()
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        store = loopback_store()  # a free port
        mp.spawn(_rank_main, args=(folder, store.port, args.rounds, args.prompts, args.idle), nprocs=RANKS)
        print(report(torch.load(Path(folder, "found.pt"), weights_only=True)))
    return 0


def _rank_main(rank: int, folder: str, port: int, rounds: int, prompts: int, idle_s: float) -> None:
    torch.set_num_threads(1)
    quiet_libraries()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    from megappo.config.loading import load_config
    from megappo.engine.build import RoleEngines
    from megappo.parallel.device import start_distributed
    from megappo.parallel.groups import AgreedPass, ProcessGroups
    from megappo.telemetry.timers import StageTimers
    from megappo.trainer.build_roles import build_roles
    from megappo.trainer.preflight import watched
    from megappo.trainer.replicas import ReplicaCheck

    sizes = [f"data.prompts_per_step={prompts}", f"algorithm.mini_batch_size={prompts}"]
    config = load_config(str(ROOT / "configs/quickstart.yaml"), [f"policy.model={folder}", *sizes])
    start_distributed(torch.device("cpu"), config.run.timeouts)
    factory = RoleEngines(config.model, config.run.timeouts, torch.device("cpu"))
    roles = build_roles(config, factory, {"policy": 100, "critic": 100}, random_weights=True)
    experience = _experience(config)
    agree, meetings = ProcessGroups.agree, [0]

    def counted(self: ProcessGroups, *point: Any) -> AgreedPass:
        meetings[0] += 1
        return agree(self, *point)

    def unasked(self: ProcessGroups, work: str, number: int, lengths: torch.Tensor, micro_batches: int) -> AgreedPass:
        return AgreedPass(micro_batches, lengths.numel())

    def steps(observer: Any) -> Spent:
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(STEPS_PER_ROUND):
            _step(config, roles, experience, StageTimers(observer=observer))
        return Spent((time.perf_counter() - wall) / STEPS_PER_ROUND, (time.process_time() - processor) / STEPS_PER_ROUND)

    @contextmanager
    def guarded(on: bool) -> Iterator[Any]:
        setattr(ProcessGroups, "agree", counted if on else unasked)
        with watched(config.run.timeouts, Path(folder)) if on else nullcontext() as watchdog:
            yield watchdog.of_step(1) if watchdog is not None else None
        setattr(ProcessGroups, "agree", agree)

    times: dict[bool, list[Spent]] = {True: [], False: []}
    for turn in range(rounds + 1):
        for on in (True, False) if turn % 2 else (False, True):
            with guarded(on) as observer:
                spent = steps(observer)
            if turn:  # the first round warms up
                times[on].append(spent)
    per_step = meetings[0] / (rounds + 1) / STEPS_PER_ROUND
    step_s = statistics.median(spent.wall for spent in times[False])
    costs = [_agreement(roles.by_name["policy"].engine.groups, per_step), _watchdog(config, folder, watched, idle_s, step_s)]
    costs.append(_copies(ReplicaCheck(roles.engines), config.run.replica_check_every))
    if rank == 0:
        rounds_of = {name: [tuple(spent) for spent in times[on]] for name, on in (("guarded", True), ("plain", False))}
        torch.save({**rounds_of, "costs": [tuple(cost) for cost in costs]}, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


def _experience(config: Any) -> Any:
    from megappo.algo.alignment import first_token_mask
    from megappo.data.packing import pack
    from megappo.trainer.experience.experience import Experience

    generator = torch.Generator().manual_seed(0)
    count = config.data.prompts_per_step * config.rollout.samples_per_prompt
    lengths = torch.randint(*TOKENS, (count,), generator=generator).tolist()
    batch = pack([torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths])
    mask = ~first_token_mask(batch.num_tokens, batch.cu_seqlens)
    noise = torch.randn(batch.num_tokens, generator=generator) * mask
    fields = {"response_mask": mask, "advantage": noise, "returns": noise}
    return Experience.of_whole(batch.with_fields(fields, {"truncated": torch.zeros(count, dtype=torch.bool)}))


def _step(config: Any, roles: Any, experience: Any, timers: Any) -> None:
    from megappo.trainer.model_outputs import add_model_outputs
    from megappo.trainer.updates import Updates

    with timers.stage("logprobs"):
        full = add_model_outputs(experience, roles)
    names = ("critic", "policy")
    updates = Updates(full, roles, names, config, seed=0)
    for name in names:
        with timers.stage(f"update_{name}"):
            updates.run(name)


def _agreement(groups: Any, per_step: float) -> Cost:
    lengths = torch.full((64,), TOKENS[1])
    one = _median(lambda: groups.agree("the benchmark", 1, lengths, 4), MEETINGS)
    return Cost("schedule agreement", per_step * one, f"{per_step:.0f} passes of {1e6 * one:.0f} us")


def _watchdog(config: Any, folder: str, watched: Any, idle_s: float, step_s: float) -> Cost:
    """Processor time of the threads while the main thread sleeps, less that of the process without them (gloo's own threads)."""

    def busy() -> float:
        dist.barrier()
        before = time.process_time()
        time.sleep(idle_s)
        return (time.process_time() - before) / idle_s

    alone = busy()
    with watched(config.run.timeouts, Path(folder)):
        share = busy() - alone
    return Cost("watchdog", share * step_s, f"{1e3 * share:.2f} ms of processor time per second")


def _copies(check: Callable[[], None], every: int) -> Cost:
    one = _median(check, CHECKS)
    return Cost("comparison of copies", one / every, f"{1e3 * one:.0f} ms every {every} steps")


def _median(action: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def report(found: dict[str, Any]) -> str:
    """Table of the guards' shares of a step."""
    guarded, plain = ([Spent(*spent) for spent in found[name]] for name in ("guarded", "plain"))
    step_s = statistics.median(spent.wall for spent in plain)
    lines = [f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, {RANKS} ranks; step {1e3 * step_s:.0f} ms"]
    lines.append(f"{'guard':<24}{'ms of a step':>14}{'share':>9}")
    costs = [Cost(*cost) for cost in found["costs"]]
    for cost in costs:
        lines.append(f"{cost.guard:<24}{1e3 * cost.seconds:>14.3f}{cost.seconds / step_s:>9.2%}  {cost.details}")
    total = sum(cost.seconds for cost in costs)
    lines.append(f"{'together':<24}{1e3 * total:>14.3f}{total / step_s:>9.2%}")
    lines.append(f"interleaved, {len(plain)} rounds, clock: {_difference([a.wall / b.wall for a, b in zip(guarded, plain)])}")
    lines.append(f"  processor time of rank 0: {_difference([a.processor / b.processor for a, b in zip(guarded, plain)])}")
    return "\n".join(lines)


def _difference(ratios: Sequence[float]) -> str:
    """Of rounds with the guards to the rounds beside them, so that a drift of the machine affects both."""
    ordered = sorted(ratio - 1 for ratio in ratios)
    low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    return f"median {middle:+.2%}, quartiles {low:+.2%} .. {high:+.2%}"


if __name__ == "__main__":
    sys.exit(main())
