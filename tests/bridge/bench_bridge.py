"""Benchmark the checksums of a push over gloo: `python tests/bridge/bench_bridge.py [--mib 256] [--ranks 2]`.

A policy of tp shards is pushed into an engine of the same ranks that is cut otherwise (tp 1: every rank receives all), with
checksums and without, in turn: seconds of the slowest rank; from a bf16 policy, and from an fp32 policy into a bf16 engine. Beside
it the time of one copy of those bytes and of one reading of them, the limit of any checksum.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.model import Mistake
from megappo.bridge.destination import Destination
from megappo.bridge.sync import Route, WeightSync
from megappo.models.pieces import rectangle
from megappo.models.weight_map import local_shapes
from megappo.parallel.layout import ParallelLayout
from tests.bridge.engines import HeldPolicy, arch_like, engine_destination

REPETITIONS = 5
_LAYER_MIB = 32  # of the model below, in bf16


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


class PlainEngine:
    """An engine whose parameters are plain tensors."""

    def __init__(self, destination: Destination) -> None:
        self.receiver, self._destination = self, destination
        self.tensors = {name: torch.zeros(*shape, dtype=destination.dtype) for name, shape in destination.shapes.items()}

    def describe(self, tensors: Any) -> Destination:
        return self._destination

    @contextlib.contextmanager
    def session(self, moves: Any, inspect: Any) -> Iterator[Any]:
        yield lambda m, values: rectangle(self.tensors[m.target], m.d_slot, m.d_row, m.d_col, m.rows, m.cols).copy_(values)
        for name, tensor in self.tensors.items() if inspect else ():
            inspect(name, tensor)

    def weights_changing(self) -> None: ...

    def weights_changed(self, version: int) -> None: ...


def seconds(call: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def in_rank(rank: int, ranks: int, layers: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    sizes = dict(hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=64, ffn_size=4352, vocab_size=4096)
    arch, layout = arch_like("llama", num_layers=layers, max_positions=128, **sizes), ParallelLayout(ranks, tp=ranks)
    engine = PlainEngine(engine_destination(arch, 1, 0, torch.bfloat16))
    size = sum(tensor.nbytes for tensor in engine.tensors.values())
    for dtype in (torch.bfloat16, torch.float32):
        policy = HeldPolicy(arch, layout, {n: torch.randn(s).to(dtype) for n, s in local_shapes(arch, layout, rank).items()})
        sync = WeightSync(policy, engine, Route.colocated(policy, 1), torch.device("cpu"))
        sync.push(0)
        taken: dict[bool, list[float]] = {True: [], False: []}
        for version in range(2 * REPETITIONS):
            verify = bool(version % 2)
            taken[verify].append(seconds(lambda: sync.push(version, verify=verify)))
        without, checked = (statistics.median(taken[verify]) for verify in (False, True))
        if rank == 0:
            print(
                f"{str(dtype).removeprefix('torch.'):9} {size / 2**20:6.0f} {without:9.3f} {checked:9.3f} {checked - without:9.3f} "
                f"{100 * (checked - without) / without:6.0f} %",
                flush=True,
            )
    flat = torch.cat([tensor.view(-1) for tensor in engine.tensors.values()])[: size // 16 * 8]
    other = torch.empty_like(flat)
    copied = statistics.median(seconds(lambda: other.copy_(flat)) for _ in range(REPETITIONS))
    read = statistics.median(seconds(lambda: flat.view(torch.int64).sum()) for _ in range(REPETITIONS))
    if rank == 0:
        print(
            f"of as many bytes, all ranks at once: one copy {copied:.3f} s, one reading {read:.3f} s ({size / read / 1e9:.1f} GB/s)"
        )
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="of engine parameters on each rank")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4, 8))
    try:
        args = parser.parse_args(argv)
        if args.mib < _LAYER_MIB:
            raise Mistake(f"--mib {args.mib} is less than one layer of the model, {_LAYER_MIB}")
    except Mistake as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'policy':9} {'MiB':>6} {'without':>9} {'checked':>9} {'more s':>9} {'':>8}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(in_rank, (args.ranks, args.mib // _LAYER_MIB, folder), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
