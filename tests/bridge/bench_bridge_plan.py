"""Benchmark planning a push of weights on one rank of a large world: `python tests/bridge/bench_bridge_plan.py [--trainers 256]`.

For the geometries of Qwen3-235B and DeepSeek-V3 (tests/bridge/geometries.py), on trainers in a layout that fits them and replicas
of 32 engine ranks, colocated and on ranks of their own: processor seconds and rise of resident memory of planning (description of
the engine as templates, moves, rounds, entries of the checksums), of a sample of ranks, each in a process of its own, and the worst
of them. This rank's own answers stand in for what others would agree to. Beside it, the time of all ranks together: what planning
the whole transfer on every rank would cost.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.model import Mistake
from megappo.bridge.plan import Ends, RankPlan, plan_rank
from megappo.bridge.sync import BUCKET_BYTES, collections_paused
from megappo.bridge.target import Target
from megappo.bridge.transfer import agree_rounds
from megappo.bridge.verify import Checksums
from megappo.models.arch import ModelArch
from megappo.parallel.layout import ParallelLayout
from tests.bridge.engines import engine_destination
from tests.bridge.geometries import DEEPSEEK_V3, QWEN3_235B, large_ends

ENGINE_TP = 32
# Layouts of 256 ranks; of another number, dp changes. Stages of the first layers hold one layer more.
GEOMETRIES = {
    "Qwen3-235B": (QWEN3_235B, dict(tp=2, pp=8, ep=32, layers_per_stage=(12,) * 6 + (11,) * 2)),
    "DeepSeek-V3": (DEEPSEEK_V3, dict(pp=16, ep=16, layers_per_stage=(4,) * 13 + (3,) * 3)),
}


class Cost(NamedTuple):
    """Of one rank. described, planned: processor seconds. growth: bytes of resident memory. gigabytes: sent over the wire."""

    rank: int
    described: float
    planned: float
    growth: int
    moves: int
    rounds: int
    gigabytes: float


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


class _Alone:
    """`bridge.wire.Wire` of a rank whose peers answer as it does."""

    def __init__(self, rank: int, peers: Sequence[int]) -> None:
        self.rank, self.peers, self.device, self.group = rank, list(peers), torch.device("cpu"), None

    def reduce(self, values: Sequence[int], op: Any) -> list[int]:
        return list(values)


def measure(arch: ModelArch, ends: Ends, encoded: list[bytes], rank: int) -> Cost:
    """Plan as `bridge.sync.WeightSync` does, with the engine's descriptions as they arrive."""
    wire: Any = _Alone(rank, sorted({*ends.sources, *ends.destinations}))
    destination, described = None, 0.0
    if rank in ends.destinations:
        destination = engine_destination(arch, ENGINE_TP, ends.destinations.index(rank) % ENGINE_TP, torch.bfloat16)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with collections_paused():
        if destination is not None:
            Target.of(destination, ends.pieces).encode()
            described = time.process_time() - started
        ends = replace(ends, targets=tuple(map(Target.decode, encoded)))
        plan: RankPlan = plan_rank(ends, rank)
        rounds = agree_rounds(plan, BUCKET_BYTES, wire)
        Checksums(ends, plan, destination, wire)
    seconds = time.process_time() - started
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    sent = 2e-9 * sum(move.numel for move in plan.outgoing)
    return Cost(rank, described, seconds - described, growth, len(plan.incoming) + len(plan.outgoing), len(rounds), sent)


def costs(arch: ModelArch, ends: Ends, ranks: Sequence[int]) -> list[Cost]:
    """Each rank in a process of its own, one after the other."""
    encoded = [target.encode() for target in ends.targets]
    found = []
    for rank in ranks:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found.append(pool.apply(measure, (arch, ends, encoded, rank)))
    return found


def report(name: str, ends: Ends, found: Sequence[Cost]) -> str:
    worst = max(found, key=lambda cost: cost.described + cost.planned)
    largest, world = max(cost.growth for cost in found), len({*ends.sources, *ends.destinations})
    mean = sum(cost.planned for cost in found) / len(found)
    return (
        f"{name:12} {'colocated' if ends.sources == ends.destinations else 'own ranks':10} "
        f"{worst.described:9.2f} {worst.planned:8.2f} {largest / 2**20:8.0f} {max(cost.moves for cost in found):9,} "
        f"{max(cost.rounds for cost in found):7} {max(cost.gigabytes for cost in found):9.1f} {mean * world:12.0f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trainers", type=int, default=256, help="a multiple of 256")
    parser.add_argument("--sample", type=int, default=8, help="ranks to measure")
    try:
        args = parser.parse_args(argv)
        if args.trainers < 256 or args.trainers % 256:
            raise Mistake(f"--trainers {args.trainers} is no multiple of 256, the size of the layouts")
        if args.sample < 1:
            raise Mistake(f"--sample {args.sample} measures no rank; at least 1")
    except Mistake as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    replicas = args.trainers // ENGINE_TP
    print(f"{args.trainers} trainers, {replicas} replicas of {ENGINE_TP}; worst of {args.sample} ranks; whole: all ranks, s")
    print(f"{'':23} {'described':>9} {'planned':>8} {'MiB':>8} {'moves':>9} {'rounds':>7} {'GB sent':>9} {'whole':>12}")
    for name, (arch, sizes) in GEOMETRIES.items():
        layout = ParallelLayout(args.trainers, **sizes)
        for apart in (False, True):
            ends = large_ends(arch, layout, ENGINE_TP, apart)
            world = sorted({*ends.sources, *ends.destinations})
            ranks = sorted({world[i * (len(world) - 1) // max(1, args.sample - 1)] for i in range(args.sample)})
            print(report(name, ends, costs(arch, ends, ranks)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
