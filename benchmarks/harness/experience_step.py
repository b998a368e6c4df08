"""One rank's host work of a PPO step around generation, passes and updates, phase by phase, with a count of the bytes it sends.

The calls are those of the loop (`trainer/ppo.py`). Models are left out: random numbers stand for their outputs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megappo.config.batch import shared_schedule
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch
from megappo.data.prompts import Prompt
from megappo.parallel.layout import ParallelLayout
from megappo.parallel.shares import Shares, shares_of
from megappo.rewards.compose import Scored
from megappo.rollout.types import Request, Response, SamplingParams, Segment
from megappo.trainer.advantages import advantages_of
from megappo.trainer.experience.collect import pack_experience
from megappo.trainer.experience.experience import Experience, rows_of
from megappo.trainer.experience.route import Route, Wire, places_of
from megappo.trainer.experience.table import Owners, SampleTable
from megappo.trainer.model_outputs import num_not_finite, results_of
from megappo.trainer.rounds import Rollout
from megappo.trainer.sampler_check import Agreement, compare_with_sampler
from megappo.trainer.step_record import StepRecord
from megappo.trainer.updates import READS, first_epoch, mini_batches, owners_of_epoch, update_reads

MINI_BATCHES = 8  # of an epoch
ROLES = ("policy", "critic", "reference")


@dataclass(frozen=True)
class Shape:
    """A step. samples, tokens: number of samples and their mean length. tp: of the roles, and of the replicas that draw."""

    world: int
    samples: int
    tokens: int
    tp: int = 1

    @property
    def own_tokens(self) -> float:
        """Tokens of the step for each rank of the world."""
        return self.samples * self.tokens / self.world

    def table(self) -> SampleTable:
        """Samples of 1/2 to 3/2 of the mean length, 1/16 of it the prompt."""
        generator = torch.Generator().manual_seed(0)
        length = torch.randint(self.tokens // 2, self.tokens * 3 // 2 + 1, (self.samples,), generator=generator).int()
        prompt = torch.full_like(length, self.tokens // 16)
        number, none = torch.arange(self.samples), torch.zeros_like(length)
        drawn_by = (number % self.world).int()
        truncated = (number % 8 == 0).int()
        return SampleTable(length, prompt, length - prompt, truncated, none, none, drawn_by, none, none, none, none - 1)


@dataclass
class CountingWire(Wire):
    """A wire that counts the bytes sent to others, and the processor seconds of this process (the backend's threads too) meanwhile.

    inner: None for a stand-in, which fills what arrives with what is sent: bytes, of which `_believable` makes fields.
    """

    rank: int
    ranks: Sequence[int]
    inner: Wire | None
    bytes_sent: int = 0
    processor_s: float = 0.0
    places: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.places = places_of(self.ranks)

    def all_to_all(self, received: Tensor, sent: Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]) -> None:
        assert received.numel() == sum(received_counts) and sent.numel() == sum(sent_counts), "counts are of the buffers"
        own = sent_counts[int(self.places[self.rank])]
        self.bytes_sent += (sent.numel() - own) * sent.element_size()
        start = time.process_time()
        if self.inner is not None:
            self.inner.all_to_all(received, sent, received_counts, sent_counts)
        elif not sent.numel():
            received.zero_()
        else:
            for part in received.split(sent.numel()):
                part.copy_(sent[: part.numel()])
        self.processor_s += time.process_time() - start


def planned_bytes(
    table: SampleTable, source: Owners, target: Owners, rank: int, wire: Wire, per_token: int, per_sample: int, ids: bool = True
) -> int:
    """Bytes that the owners make a rank send to others. per_token, per_sample: of the fields. ids: token ids go too."""
    route = Route.between(table.length, source, target, rank, wire)
    if route.is_still:
        return 0

    def elsewhere(counts: Tensor) -> int:
        return int(counts.sum() - counts[wire.places[rank]])

    tokens = 4 * elsewhere(route.sent_tokens.tokens) if ids else 0  # int32
    return tokens + per_token * elsewhere(route.sent.tokens) + per_sample * elsewhere(route.sent.samples)


@dataclass
class Meter:
    """Costs by phase: processor and wall seconds of this process, and processor seconds of its main thread alone. peak: bytes of
    resident memory above the start, of them all."""

    processor_s: dict[str, float] = field(default_factory=dict)
    main_s: dict[str, float] = field(default_factory=dict)
    wall_s: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    start: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if dist.is_initialized():
            dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size again
        wall, processor, main = time.perf_counter(), time.process_time(), time.thread_time()
        yield
        self.main_s[name] = time.thread_time() - main
        self.wall_s[name], self.processor_s[name] = time.perf_counter() - wall, time.process_time() - processor
        self.peak[name] = resident("VmHWM") - self.start


def resident(kind: str = "VmRSS") -> int:
    """Bytes of this process that are in memory; VmHWM: their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{kind}:"))) << 10


@dataclass(frozen=True)
class Cost:
    """Of a rank. sent, planned: bytes to others. wire_s: processor seconds of the wire, which the phases include."""

    meter: Meter
    sent: int
    planned: int
    wire_s: float


def responses_of(table: SampleTable, numbers: Tensor) -> tuple[list[Request], list[Response]]:
    """Requests and responses as the rollout engine gives them."""
    source, mine = numpy.random.default_rng(0), table.rows(numbers)
    requests, responses = [], []
    for number, prompt, sampled, cut in zip(*(x.tolist() for x in (numbers, mine.prompt, mine.sampled, mine.truncated))):
        ids = source.integers(0, 32_000, prompt + sampled, dtype=numpy.int32)
        logprobs = -source.random(sampled, dtype=numpy.float32)
        requests.append(Request(number, ids[:prompt], number))
        responses.append(Response(number, (Segment(ids[prompt:], logprobs, 0),), "length" if cut else "stop"))
    return requests, responses


def step(shape: Shape, rank: int, inner: Wire | None, seed: int = 0) -> Cost:
    """Do a step's host work of one rank. inner: wire of a real world; None for a rank alone, among ranks that do not exist.

    seed: of the order of mini-batches, another in every step of a run.
    """
    if inner is not None or shape.world == 1:
        return _step(shape, rank, inner, seed)
    # torch's exchanges return at once, and every path is that of a rank of such a world.
    dist.init_process_group("fake", rank=rank, world_size=shape.world, store=FakeStore())
    try:
        return _step(shape, rank, None, seed)
    finally:
        dist.destroy_process_group()


@contextmanager
def _rows_of_others(known: SampleTable, world: int) -> Iterator[None]:
    """Let a copy bring the rows of all ranks, as `totals.rows_of_ranks` exchanges them: with their numbers, or those first."""
    of_rank = known.owner.long()
    counts, order = of_rank.bincount(minlength=world), of_rank.argsort(stable=True)
    columns = [getattr(known, column.name) for column in fields(known)]
    rows = torch.stack([torch.arange(known.num_samples).int(), *columns], 1)[order]
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[of_rank[order]]

    def bring(received: Tensor, sent: Tensor, *sizes: Sequence[int]) -> None:
        if sizes:
            received.copy_(rows.flatten())
        elif sent.numel() == world:
            received.copy_(counts)
        else:
            of_ranks = received.view(world, -1, rows.shape[1])
            of_ranks[:, 0, 0] = counts
            fits = places + 1 < of_ranks.shape[1]
            of_ranks[of_rank[order][fits], 1 + places[fits]] = rows[fits]

    with mock.patch.object(dist, "all_to_all_single", bring):
        yield


def _step(shape: Shape, rank: int, inner: Wire | None, seed: int) -> Cost:
    meter, known = Meter(start=resident()), shape.table()
    wire = CountingWire(rank, range(shape.world), inner)
    shares = shares_of(ParallelLayout(shape.world, tp=shape.tp))
    algorithm = AlgorithmConfig(mini_batch_size=-(-shape.samples // MINI_BATCHES))
    numbers = (known.owner == rank).nonzero().flatten()
    requests, responses = responses_of(known, numbers)

    with meter.phase("pack"):
        drawn = pack_experience(requests, responses)
    others = _rows_of_others(known, shape.world) if inner is None and shape.world > 1 else nullcontext()
    with others, meter.phase("table"):
        versions = torch.zeros(len(numbers), dtype=torch.int32)
        table = SampleTable.agreed(numbers, rows_of(drawn, (versions, versions), rank), shape.samples)
    with meter.phase("spread"):
        experience = Experience(table, Owners.drawn(table, shape.world), drawn, rank, wire)
        experience = experience.redistribute(Owners.spread(table, shape.world))
    experience = experience if inner is not None else _believable(experience)
    with meter.phase("to roles"):
        share = experience.for_role(shares, ())
    found = _outputs(share.batch)
    with meter.phase("results back"):
        experience = experience.with_results(share, *results_of(ROLES), found)
    experience = experience if inner is not None else _believable(experience)
    with meter.phase("checks"):
        agreement = compare_with_sampler(experience.batch, SamplingParams(shape.tokens), num_not_finite(experience))
        assert not agreement.num_bad, "random numbers are finite"
    with meter.phase("advantages"):
        score = torch.rand(experience.batch.num_sequences)
        experience = experience.with_batch(advantages_of(experience.batch, score, 0.1, algorithm))
    with meter.phase("to updates"):
        reads = {*update_reads("policy", algorithm), *update_reads("critic", algorithm)}
        sent = first_epoch(experience, shares, reads, algorithm.mini_batch_size, seed)
    sent = sent if inner is not None else _believable(sent)
    with meter.phase("mini-batches"):
        for role in ("critic", "policy"):
            of_role = sent.only({*update_reads(role, algorithm), *READS})
            for _mini in mini_batches(of_role, shares, None, shared_schedule(algorithm), shape.tokens, seed):
                pass
    with meter.phase("metrics"):
        _ = _record(experience, agreement, score).totals  # computed when first read
    return Cost(meter, wire.bytes_sent, plan_of_step(table, shares, shape, rank, wire, algorithm, seed), wire.processor_s)


def plan_of_step(
    table: SampleTable, shares: Shares, shape: Shape, rank: int, wire: Wire, algorithm: AlgorithmConfig, seed: int
) -> int:
    """Bytes that a rank sends to others in `step`, from the table alone."""
    spread, role = Owners.spread(table, shape.world), Owners.of_role(table, shares)
    epoch = owners_of_epoch(table, shares, algorithm.mini_batch_size, seed)
    legs = (
        (Owners.drawn(table, shape.world), spread, 1 + 4, 1, True),  # response_mask, rollout_logprob; truncated
        (spread, role, 0, 0, True),
        (role, spread, 4 * 4, 4, False),  # logprob, entropy, value, ref_logprob; bootstrap
        (spread, epoch, 4 * 4 + 1, 0, True),  # logprob, advantage, value, returns, response_mask
    )
    return sum(planned_bytes(table, a, b, rank, wire, token, sample, ids) for a, b, token, sample, ids in legs)


def _believable(experience: Experience) -> Experience:
    """The experience of a rank alone with values that may be: what arrived there are any bytes."""
    batch, own = experience.batch, experience.table.rows(experience.numbers)
    places = torch.arange(batch.num_tokens) - batch.cu_seqlens[:-1].repeat_interleave(batch.lengths)
    sampled = places >= own.prompt.repeat_interleave(batch.lengths)

    def made(x: Tensor, flags: Tensor) -> Tensor:
        return flags.clone() if x.dtype == torch.bool else torch.full_like(x, -0.5)

    of_tokens = {name: made(x, sampled) for name, x in batch.token_fields.items()}
    return experience.with_fields(of_tokens, {k: made(x, own.truncated.bool()) for k, x in batch.sequence_fields.items()})


def _outputs(share: PackedBatch) -> dict[str, Tensor]:
    """Random outputs of all roles for a share."""
    names, _ = results_of(ROLES)
    values = -torch.rand(share.num_tokens)
    return {**dict.fromkeys(names, values), "bootstrap": torch.zeros(share.num_sequences)}


def _no_prompt(sample: int) -> Prompt:
    raise AssertionError(f"nothing asks for the prompt of sample {sample}")


def _record(experience: Experience, agreement: Agreement, score: Tensor) -> StepRecord:
    scored = Scored([], score.tolist(), {"exact_match": score.tolist()}, 0)
    rollout = Rollout(step=1, experience=experience, scored=scored, prompt_of=_no_prompt)
    return StepRecord(rollout=rollout, kl_coef=0.1, agreement=agreement)


def warm_up() -> None:
    """Load what a first step loads."""
    step(replace(Shape(1, 8, 64)), 0, None)
