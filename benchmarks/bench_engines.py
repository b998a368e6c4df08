"""Benchmark the engines side by side: `python benchmarks/bench_engines.py [--ranks 1 2] [--dtypes fp32 bf16] [--device cuda]`.

The same policy (a Qwen3 of random weights, given by --layers, --hidden, --vocabulary) under engine megatron and engine fsdp2, data
parallel over gloo or NCCL, on the same sequences. Tokens of all ranks per second of the slowest rank: of a pass without gradients
(log-probs and entropies), and of an update (forward, backward, reduction, optimizer step). Medians of rounds in which the engines
take turns; TFLOP/s: of the model, by a rank in an update; spread: the slowest update to the fastest. Memory of a rank: bytes that
are held between passes (weights, gradients and optimizer, which `megappo plan` counts), and the most that is alive beside them in
forward and backward (which it estimates), each beside the plan's figure; counted by the tensors, so that the allocator and other
processes do not matter.
"""

from __future__ import annotations

import argparse
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.alive import alive_peak, bytes_behind
from benchmarks.harness.model import Mistake, Parser
from megappo.algo.aggregation import token_weights
from megappo.commands.plan.estimate import memory_of_stages
from megappo.config.loading import validated
from megappo.config.schema import TrainConfig
from megappo.data.packing import pack
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineSpec
from megappo.engine.whole_batch import sequences_of_share
from megappo.models.flops import forward_flops
from megappo.models.hf_config import read_arch
from megappo.parallel import cpu_patches
from megappo.parallel.layout import ParallelLayout
from megappo.trainer.roles import Policy

ENGINES = ("megatron", "fsdp2")
PROMPT_SHARE = 4  # of a sequence one part in four is prompt
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """samples, length: of sequences over all ranks. budget: tokens of a micro-batch."""

    model: str
    ranks: int
    dtype: str
    samples: int
    length: int
    budget: int
    rounds: int
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    def config(self, engine: str) -> TrainConfig:
        prompt = self.length // PROMPT_SHARE
        policy = {"model": self.model, "engine": engine, "dtype": self.dtype, "micro_batch_tokens": self.budget}
        return validated(
            {
                "run": {"device": self.device},
                "policy": policy,
                "data": {"train": "none", "max_prompt_tokens": prompt, "prompts_per_step": self.samples},
                "rollout": {"engine": "megatron", "max_response_tokens": self.length - prompt, "samples_per_prompt": 1},
                "algorithm": {"mini_batch_size": self.samples},
            },
            TrainConfig,
        )


@dataclass(frozen=True)
class Figures:
    """Seconds of every round, and bytes of the fullest rank: between passes, and added at the peak of a training pass."""

    forward_s: list[float]
    update_s: list[float]
    held: int
    added: int
    planned_held: int
    planned_added: int
    flops: int
    """Of an update, over all ranks; recomputed work is not among them."""


class Work:
    """The policy of one engine on this rank, with its share of the batch."""

    def __init__(self, case: Case, engine: str) -> None:
        config, arch = case.config(engine), read_arch(case.model)
        device = torch.device(case.device, dist.get_rank() if case.device == "cuda" else None)
        factory = RoleEngines(config.model, config.run.timeouts, device)
        spec = EngineSpec("policy", case.model, arch, config.policy, total_updates=10**6, random_weights=True)
        built = factory.build(spec)
        assert built is not None, "the policy lives on all ranks"
        self.engine: Any = built
        self.role = Policy(self.engine, 1.0, config.algorithm)
        self.planned = memory_of_stages(config, "policy", arch, ParallelLayout(case.ranks), [0], case.device)[0]
        self.flops = forward_flops(arch, torch.full((case.samples,), case.length), value_head=False).training
        generator = torch.Generator().manual_seed(0)
        batch = pack(torch.randint(0, arch.vocab_size, (case.samples, case.length), generator=generator).tolist())
        mask = (torch.arange(batch.num_tokens) % case.length) >= case.length // PROMPT_SHARE
        weight = token_weights("token-mean", mask, batch.cu_seqlens).weight
        near = torch.full((batch.num_tokens,), -torch.log(torch.tensor(float(arch.vocab_size))).item())
        advantage = torch.randn(batch.num_tokens, generator=generator)
        batch = batch.with_fields({"response_mask": mask, "weight": weight, "logprob": near, "advantage": advantage})
        self.batch, self.count = batch.select(sequences_of_share(self.engine, batch)), float(mask.sum())

    def forward(self) -> None:
        self.role.logprobs(self.batch, want_entropy=True)

    def update(self) -> None:
        with self.engine.train_mode():
            self.role.update(self.batch, self.count)

    def memory(self) -> tuple[int, int]:
        """(bytes held between passes, most bytes alive beside them in forward and backward) of this rank."""
        self.engine.optimizer_zero_grad()
        held = [
            *self.engine.named_parameters().values(),
            *self.engine.named_gradients().values(),
            *self.engine._optimizer.tensors(),
        ]

        def train() -> None:
            with self.engine.train_mode():
                reads = self.batch.token_fields
                self.engine.forward_backward(self.batch, self.role._loss_of, reads=reads, denominator=self.count)

        # gloo sums Megatron's gradients through copies of the whole buffer, NCCL in place.
        with mock.patch("megappo.engine.megatron.finalize_model_grads"):
            return bytes_behind(held), alive_peak(train, held)


def seconds(work: Callable[[], None]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    taken = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def in_rank(rank: int, cases: Sequence[Case], folder: str) -> None:
    """Measure every case; rank 0 writes {case: {engine: figures}}."""
    torch.set_num_threads(1)
    on_gpu = cases[0].device == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        cpu_patches.install()
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=cases[0].ranks)
    found: dict[Case, dict[str, Figures]] = {}
    for case in cases:
        works = {engine: Work(case, engine) for engine in ENGINES}
        memory = {engine: fullest(work.memory()) for engine, work in works.items()}
        times: dict[tuple[str, str], list[float]] = {(engine, what): [] for engine in ENGINES for what in ("forward", "update")}
        for round_number in range(case.rounds + 1):
            # The engine that begins changes, so that what grows or cools within a round is nobody's advantage.
            for engine in ENGINES if round_number % 2 else reversed(ENGINES):
                for what in ("forward", "update"):
                    times[engine, what].append(seconds(getattr(works[engine], what)))
        found[case] = {
            engine: Figures(
                times[engine, "forward"][1:],  # the first allocates
                times[engine, "update"][1:],
                *memory[engine],
                work.planned.held,
                work.planned.activations,
                work.flops,
            )
            for engine, work in works.items()
        }
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def fullest(sizes: tuple[int, int]) -> tuple[int, int]:
    """The largest over ranks of each."""
    most = torch.tensor(sizes)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    held, added = most.tolist()
    return held, added


def rows_of(case: Case, found: dict[str, Figures]) -> list[str]:
    """Lines of the table."""
    lines = []
    for engine, one in found.items():
        speed = [f"{case.tokens / statistics.median(taken):,.0f}" for taken in (one.forward_s, one.update_s)]
        spread = f"{max(one.update_s) / min(one.update_s):.2f}"
        speed.append(f"{one.flops / statistics.median(one.update_s) / 10**12 / case.ranks:.2g}")
        bytes_ = [f"{size / MIB:.1f}" for size in (one.held, one.added)]
        off = [f"{100 * (a - b) / b:+.1f} %" for a, b in ((one.held, one.planned_held), (one.added, one.planned_added))]
        cells = [str(case.ranks), case.dtype, engine, *speed, spread, bytes_[0], off[0], bytes_[1], off[1]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


HEADER = [
    "| ranks | dtype | engine | forward, tok/s | update, tok/s | TFLOP/s | spread | held, MiB | to plan | passes, MiB | to plan |",
    "|" + "---|" * 11,
]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=32, help="sequences of a pass, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch")
    args = parser.parse_args(argv)
    for name in ("rounds", "layers", "vocabulary", "budget"):
        if getattr(args, name) < 1:
            raise Mistake(f"--{name} {getattr(args, name)} is too few; at least 1")
    if args.hidden < 64 or args.hidden % 64:
        raise Mistake(f"--hidden {args.hidden} is no multiple of 64, the size of a head")
    if args.length < 2 * PROMPT_SHARE:
        raise Mistake(f"--length {args.length} is too short; at least {2 * PROMPT_SHARE}")
    for ranks in args.ranks:
        if ranks < 1 or args.samples % ranks:
            raise Mistake(f"--ranks {ranks} does not divide the {args.samples} sequences (--samples)")
    return args


def write_model(folder: Path, args: argparse.Namespace) -> str:
    """config.json of the model; nobody reads weights."""
    heads = args.hidden // 64
    config = transformers.Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        max_position_embeddings=args.length,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    return str(folder)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parsed(argv)
    except Mistake as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    before, lines = os.getloadavg()[0], list(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), args)
        for ranks in args.ranks:
            sizes = (args.samples, args.length, args.budget, args.rounds, args.device)
            cases, place = [Case(model, ranks, dtype, *sizes) for dtype in args.dtypes], Path(folder, str(ranks))
            place.mkdir()
            mp.spawn(in_rank, (cases, str(place)), nprocs=ranks)
            for case, found in pickle.loads((place / "found").read_bytes()).items():
                lines += rows_of(case, found)
    shape = f"{args.layers} layers, hidden {args.hidden}, vocabulary {args.vocabulary:,}"
    print(
        f"Qwen3 of {shape}; {args.samples} sequences of {args.length} tokens, micro-batches of {args.budget}, {args.rounds} rounds"
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    if args.device == "cuda":
        machine = f"{torch.cuda.get_device_name()}, {machine}"
    print(f"{machine}, one thread a rank; load {before:.1f} before and {os.getloadavg()[0]:.1f} after\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
