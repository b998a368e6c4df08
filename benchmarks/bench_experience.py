"""Benchmark the distributed experience on the host: `python benchmarks/bench_experience.py [--worlds 1 2 4 8] [--alone 64 512
4096]`.

Prints the tables that docs/layouts.md sums up. All of a rank's work on samples in a step but texts, rewards and models
(benchmarks/harness/experience_step.py). Worlds: real ones over gloo, of processes on this machine, once with a share of samples for
each rank (--rank-samples; 16 of 8,192 tokens are those of a rank of 512 in a step of 67 M) and once with a batch that the ranks
divide (--world-samples). Beside: as many processes with the same share at once, each a world of its own: how much of it is the
machine's, whose cores and caches the ranks share. Alone: rank 0 of larger worlds, once with that share for each rank and once with
a batch that they divide (--samples); exchanges of torch return at once (its "fake" backend), the table's rows come by a copy, and
samples that others would send are a copy of what is sent. Per phase nanoseconds of processor time, all threads of the process, per
own token (tokens of the step / world), of the rank with the largest sum; the best of some repetitions. wire: its part inside the
exchanges (over gloo: copies to and from sockets). backend: its part in threads other than the main one, which are gloo's. peak:
rise of resident memory (VmHWM), the responses included, in the first repetition. old: what every rank did when it had the
responses of all, measured on a few samples.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.experience_step import Cost, Shape, resident, responses_of, step, warm_up
from benchmarks.harness.model import Mistake, Parser
from megappo.parallel.device import world_group
from megappo.runtime.libraries import keep_freed_memory
from megappo.trainer.experience.route import Wire

TOKENS_IN_ALL = 6 << 20  # of the repetitions: at least FEWEST, at most MOST
FEWEST, MOST = 3, 40
LIMIT_NS, LIMIT_S, LIMIT_MIB = 120, 1.0, 1024
OLD_SAMPLES = 64


def _start() -> None:
    """As a rank of a run starts."""
    torch.set_num_threads(1)
    keep_freed_memory()
    warm_up()


def of_world(rank: int, shape: Shape, folder: str) -> None:
    """Write the costs of a rank of a real world to the folder."""
    _start()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=shape.world)
    wire = Wire(world_group())
    found = [step(shape, rank, wire, seed) for seed in range(repetitions(shape))]
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def alone(number: int, shape: Shape, folder: str) -> None:
    """Write the costs of rank 0 of a world, without the others, to the folder. number: of several such worlds at once."""
    _start()
    found = [step(shape, 0, None, seed) for seed in range(repetitions(shape))]
    Path(folder, str(number)).write_bytes(pickle.dumps(found))


def repetitions(shape: Shape) -> int:
    """More of small shares, which a disturbance of the machine changes most."""
    return int(min(MOST, max(FEWEST, TOKENS_IN_ALL / shape.own_tokens)))


def measured(work: Callable[[int, Shape, str], None], shape: Shape, ranks: int) -> Cost:
    """Costs of the rank with the largest sum, in processes of their own. RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=work, args=(rank, shape, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"a rank of {shape.world} failed; its error is above")
        return max((best_of(pickle.loads(Path(folder, str(rank)).read_bytes())) for rank in range(ranks)), key=processor_s)


def best_of(found: Sequence[Cost]) -> Cost:
    """The repetition of the least processor time, with the peaks of the first: later ones reuse its memory."""
    best = min(found, key=processor_s)
    best.meter.peak = found[0].meter.peak
    return best


def processor_s(cost: Cost) -> float:
    return sum(cost.meter.processor_s.values())


def backend_s(cost: Cost) -> float:
    return processor_s(cost) - sum(cost.meter.main_s.values())


def wall_s(cost: Cost) -> float:
    return sum(cost.meter.wall_s.values())


def old_path(tokens: int) -> tuple[float, float]:
    """(ns, bytes) per token of the whole batch that unpickling and packing lists took on every rank."""
    shape = Shape(1, OLD_SAMPLES, tokens)
    table = shape.table()
    answers = [
        (request.prompt.tolist(), tuple(response.tokens.tolist()), tuple(response.logprobs.tolist()))
        for request, response in zip(*responses_of(table, torch.arange(OLD_SAMPLES)))
    ]
    gathered = pickle.dumps(answers)
    del answers
    before, start = resident(), time.process_time()
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    received = pickle.loads(gathered)
    for prompt, response, drawn in received:
        ids += [*prompt, *response]
        mask += [False] * len(prompt) + [True] * len(response)
        logprobs += [0.0] * len(prompt) + list(drawn)
    packed = torch.tensor(ids), torch.tensor(mask), torch.tensor(logprobs)
    count = len(packed[0])
    return 1e9 * (time.process_time() - start) / count, (resident() - before) / count


def table_of(costs: Mapping[Shape, Cost]) -> str:
    """A line for each phase, a column for each world, in Markdown."""
    phases = list(next(iter(costs.values())).meter.processor_s)

    def line(name: str, value: Callable[[Shape, Cost], Any], figure: str) -> str:
        return f"| {name} | " + " | ".join(f"{value(*item):{figure}}" for item in costs.items()) + " |"

    return "\n".join(
        [
            line("ranks", lambda shape, _: shape.world, ",d"),
            "|---" * (len(costs) + 1) + "|",
            line("tp of the roles", lambda shape, _: shape.tp, "d"),
            line("own tokens", lambda shape, _: shape.own_tokens, ",.0f"),
            *(line(name, lambda s, c, name=name: 1e9 * c.meter.processor_s[name] / s.own_tokens, ".1f") for name in phases),
            line("sum, ns", lambda shape, cost: 1e9 * processor_s(cost) / shape.own_tokens, ".1f"),
            line("of it the wire, ns", lambda shape, cost: 1e9 * cost.wire_s / shape.own_tokens, ".1f"),
            line("of it the backend, ns", lambda shape, cost: 1e9 * backend_s(cost) / shape.own_tokens, ".1f"),
            line("wall, ns", lambda shape, cost: 1e9 * wall_s(cost) / shape.own_tokens, ".1f"),
            line("processor s", lambda _, cost: processor_s(cost), ".3f"),
            line("wall s", lambda _, cost: wall_s(cost), ".3f"),
            line("peak MiB", lambda _, cost: max(cost.meter.peak.values()) / 2**20, ".0f"),
            line("sent, bytes", lambda _, cost: cost.sent, ",d"),
            line("planned, bytes", lambda _, cost: cost.planned, ",d"),
        ]
    )


def against_limit(costs: Mapping[Shape, Cost]) -> str:
    """Processor time of each real world against the limit, and what of it is not the rank's own work."""
    lines = []
    for shape, cost in costs.items():
        ns, wire, threads = (1e9 * seconds / shape.own_tokens for seconds in (processor_s(cost), cost.wire_s, backend_s(cost)))
        lines.append(
            f"{shape.world} ranks on {os.cpu_count()} cores: {ns:.0f} ns of processor time per own token (limit {LIMIT_NS}), "
            f"{wire:.0f} of them the wire; {threads:.0f} in gloo's threads and {ns - threads:.0f} in the main one"
        )
    return "\n".join(lines)


def compared(costs: Mapping[Shape, Cost], old: tuple[float, float], here: Cost, here_tokens: float) -> str:
    """Each rank alone against the limits and against the old path, whose other phases were at least those of all tokens now."""
    lines = []
    phases = ("checks", "advantages", "mini-batches", "metrics")
    ns = old[0] + sum(1e9 * here.meter.processor_s[name] for name in phases) / here_tokens
    for shape, cost in costs.items():
        all_tokens = shape.samples * shape.tokens
        peak, own_ns = max(cost.meter.peak.values()) / 2**20, 1e9 * processor_s(cost) / shape.own_tokens
        lines.append(
            f"{shape.world:,} ranks, tp {shape.tp}: {own_ns:.0f} ns per own token (limit {LIMIT_NS}), {processor_s(cost):.3f} s "
            f"(limit {LIMIT_S:g}), {peak:.0f} MiB (limit {LIMIT_MIB:,}); old, extrapolated from {OLD_SAMPLES} samples: {ns:.0f} ns "
            f"per token of all, {1e-9 * ns * all_tokens:.1f} s, {old[1] * all_tokens / 2**30:.1f} GiB without its fields"
        )
    return "\n".join(lines)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4, 8], help="real worlds")
    parser.add_argument("--alone", type=int, nargs="*", default=[64, 512, 4096], help="worlds of which one rank runs")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 8], help="of the roles of larger worlds; real ones have 1")
    parser.add_argument("--tokens", type=int, default=8192, help="mean length of a sample")
    parser.add_argument("--samples", type=int, default=8192, help="of larger worlds, divided by their ranks")
    parser.add_argument("--world-samples", type=int, default=256, help="of real worlds, divided by their ranks")
    parser.add_argument("--rank-samples", type=int, default=16, help="of each rank")
    args = parser.parse_args(argv)
    for name, least in (("samples", 8), ("world_samples", 8), ("rank_samples", 8), ("tokens", 16)):
        if getattr(args, name) < least:
            raise Mistake(f"--{name.replace('_', '-')} {getattr(args, name)} is too few; at least {least}")
    for name in ("worlds", "alone"):
        if wrong := [number for number in getattr(args, name) if number < 1]:
            raise Mistake(f"--{name} {wrong[0]} has no rank; at least 1")
    for world in args.alone:
        if wrong := [tp for tp in args.tp if tp < 1 or world % tp]:
            raise Mistake(f"--tp {wrong[0]} does not divide a world of {world} (--alone)")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parsed(argv)
    except Mistake as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    found: list[tuple[Shape, Cost]] = []
    of_each, large = args.rank_samples, [(world, tp) for tp in args.tp for world in args.alone]
    for work, kind, shapes in (
        (of_world, "real worlds over gloo, for each rank", [Shape(n, n * of_each, args.tokens) for n in args.worlds]),
        (of_world, "real worlds over gloo, for all ranks", [Shape(n, args.world_samples, args.tokens) for n in args.worlds]),
        (alone, "rank 0 alone, for each rank", [Shape(world, world * of_each, args.tokens, tp) for world, tp in large]),
        (alone, "rank 0 alone, for all ranks", [Shape(world, args.samples, args.tokens, tp) for world, tp in large]),
    ):
        if not shapes:
            continue
        before = os.getloadavg()[0]
        costs = {shape: measured(work, shape, shape.world if work is of_world else 1) for shape in shapes}
        load = f"{os.cpu_count()} cores, load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
        samples = of_each if "each" in kind else shapes[0].samples
        print(f"{kind}, {samples:,} samples of about {args.tokens:,} tokens; {load}\n")
        print(f"{table_of(costs)}\n", flush=True)
        found += costs.items()
        if work is alone:
            whole = Shape(1, OLD_SAMPLES, args.tokens)
            print(f"{compared(costs, old_path(args.tokens), measured(alone, whole, 1), whole.own_tokens)}\n")
        else:
            print(f"{against_limit(costs)}\n")
        if work is of_world and "each" in kind:
            share = Shape(1, of_each, args.tokens)
            at_once = {world: processor_s(measured(alone, share, world)) for world in args.worlds}
            ns = ", ".join(f"{world}: {1e9 * seconds / share.own_tokens:.0f}" for world, seconds in at_once.items())
            print(f"beside, as many worlds of one rank with that share at once, ns per own token: {ns}\n", flush=True)
    if wrong := [shape for shape, cost in found if cost.sent != cost.planned]:
        print(f"error: {wrong[0]} sent other bytes than planned", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
