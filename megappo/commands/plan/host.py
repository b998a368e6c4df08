"""Host work of one rank through a PPO step: seconds of one core, and the most host memory that experience takes in each phase.

Stages 2 to 8 of trainer/ppo.py, with every sequence at its longest. Three counts of tokens decide: those that a rank drew, its
own (all over the ranks of the world: scoring, advantages, metrics) and a role's share (all over its dp). Only the rows of the
table grow with the world. Not counted: vLLM's own loop, rules that compute, a reward model's texts, those of `algorithm.ptx`,
offloaded parts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from megappo.commands.plan.estimate import Plan, values_read
from megappo.config.batch import update_schedule
from megappo.config.layout_checks import trained_sections
from megappo.config.schema import TrainConfig
from megappo.parallel.shares import Shares, shares_of
from megappo.trainer.critics import BONUS, DISAGREEMENT, fields_of
from megappo.trainer.experience.route import MOST_BYTES_AT_ONCE
from megappo.trainer.model_outputs import outputs_of
from megappo.trainer.reweighting import REJECTED
from megappo.trainer.roles import NLL_WEIGHT, PTX_WEIGHT
from megappo.trainer.updates import READS, update_reads

# Nanoseconds of one core, for which `benchmarks/bench_experience.py` measures the phases, processor time of all threads, on two
# busy # cores of a server. Of a token:
PACK_NS = 4.0  # responses to packed tokens, mask and log-probs, and their sums for the table
INDEX_NS = 1.0  # place of a token in the batch, at either end of an exchange
FIELD_NS = 0.6  # a field gathered or placed, at either end
TEXT_NS = 900.0  # two texts by a fast BPE tokenizer of `transformers` (454 and 419) and the list of ids (33)
AGREEMENT_NS = 11.0  # comparison with the sampler
ADVANTAGES_NS = 6.0
METRICS_NS = 22.0
# Of something else:
KEPT_NS = 0.6  # a kept id copied: joined, gathered or placed
WIRE_NS = 1.0  # a byte sent or received over gloo
ROW_NS = 40.0  # a sample in the table, or in a plan of owners

# Bytes of a token, as the tensors are made.
TOKEN, INDEX, FIELD, MASK = 8, 8, 4, 1
RESPONSE = 8  # ids and log-probs of a response, which lives until the next generation
UNFINISHED = 19  # the same of a response that goes on, and once more as text (4 / 3) for checkpoints
PACKING = 6  # the ids as int32 and two masks, until they are packed
TEXT = 48  # an int object and its place in a tuple, and 4 characters in each of two texts
AGREEMENT, METRICS = 72, 40  # fp64 columns
ID = 4  # a kept id
KEPT_ROW = 12  # number of a token's ids, and where they start
KEPT_PACKING = 12  # the places of sampled tokens, and the numbers of their ids once more
# Bytes of a sample: the table's 11 columns, and one column for each set of owners.
ROW, OWNER = 44, 8


class Work(NamedTuple):
    """bytes: most at once, of what only this work needs. ns: of one core."""

    bytes: float = 0.0
    ns: float = 0.0

    def then(self, other: Work) -> Work:
        """One after the other."""
        return Work(max(self.bytes, other.bytes), self.ns + other.ns)


@dataclass(frozen=True)
class HostPhase:
    """A phase on one rank. bytes: of experience in its fullest moment. seconds: of one core."""

    name: str
    bytes: int
    seconds: float


class Part(NamedTuple):
    """A rank's part in a division of a batch among a role's replicas, as `parallel.shares` names it."""

    holds: bool
    reads: bool
    reports: bool


class Place(NamedTuple):
    """All that host work of a rank depends on. draws: it answers for samples. parts: its part in every division, in the order of
    `HostWork._divisions`."""

    draws: bool
    parts: tuple[Part, ...]


class HostWork:
    """Host work of the ranks of a plan."""

    def __init__(self, plan: Plan) -> None:
        config, step = plan.config, plan.step
        self._plan, self._samples, self._longest = plan, step.samples, step.max_sequence_tokens
        self._most_kept, _ = values_read(config, "policy")
        # Ids of a token at most, on average: those of prompts have none.
        self._kept = self._most_kept * config.rollout.drawn_tokens / self._longest
        shares = {
            role: shares_of(plan.layouts[role], plan.placements[role].ranks)
            for role in plan.layouts
            if outputs_of(role) is not None
        }
        self._shares, self._trained = shares, [role for role in shares if role in trained_sections(config)]
        self._divisions = tuple(dict.fromkeys(shares.values()))
        self._spread = Shares.of_world(plan.world_size)
        self._own = self._tokens_each(plan.world_size)
        drawing = plan.world_size if plan.rollout is None else plan.replicas * config.rollout.tp
        self._drawn, self._responses = self._tokens_each(drawing), ceil(step.samples / drawing) * config.rollout.drawn_tokens
        self._fields = {"response_mask", "rollout_logprob", *self._existing({"kept"})}
        if config.rollout.window_tokens is not None:
            self._fields |= {"whole_mask"}
        self._outputs = {name for role in shares for name in outputs_of(role).tokens}
        self._shaped = _shaped_fields(config)

    @cached_property
    def fullest_rank(self) -> int:
        """The first rank whose fullest phase is the largest; of equals, one that works longest."""
        first = {self._place(rank): rank for rank in reversed(range(self._plan.world_size))}

        def size(rank: int) -> tuple[int, float, int]:
            found = self.phases(rank)
            return max(phase.bytes for phase in found), sum(phase.seconds for phase in found), -rank

        return max(first.values(), key=size)

    @property
    def own_tokens(self) -> int:
        """Tokens of a rank's own samples at most: of the phases score, advantages and metrics."""
        return self._own

    def phases(self, rank: int) -> list[HostPhase]:
        """Phases of a world rank in the order of a step."""
        draws, parts = self._place(rank)
        fields = self._fields | self._outputs
        found = {
            "generate": self._generate(draws),
            "exchange": self._exchange(draws),
            "score": self._score(),
            "log-probs, values": self._passes(parts),
            "advantages": Work(self._of_own(fields | self._shaped), ADVANTAGES_NS * self._own),
            "updates": self._updates(parts),
            "metrics": Work(self._of_own(fields | self._shaped) + METRICS * self._own, METRICS_NS * self._own),
        }
        if not self._plan.samples:  # the trajectories are recorded, with their rewards
            found = {name: work for name, work in found.items() if name not in ("generate", "exchange", "score")}
        rest = self._at_rest(draws)
        return [HostPhase(name, round(rest + work.bytes), work.ns * 1e-9) for name, work in found.items()]

    def _place(self, rank: int) -> Place:
        plan = self._plan
        draws = plan.rollout is None or plan.generates(rank)
        return Place(draws, tuple(_part(shares, rank) for shares in self._divisions))

    def _at_rest(self, draws: bool) -> float:
        """Bytes from the end of generation to the end of the step: the responses, the table and the owners."""
        responses = self._responses * (RESPONSE + (FIELD + ID * self._most_kept if self._kept else 0)) if draws else 0
        rollout, going_on = self._plan.config.rollout, 0
        if rollout.window_tokens is not None:  # every rank has all of them
            going_on = self._samples * rollout.max_response_tokens * UNFINISHED
        return responses + going_on + self._samples * (ROW + OWNER * (2 + len(self._divisions)))

    def _generate(self, draws: bool) -> Work:
        if not draws:
            return Work()
        packing = self._drawn * (self._size({"tokens", *self._fields}) + PACKING + (KEPT_PACKING if self._kept else 0))
        return Work(packing, self._drawn * (PACK_NS + KEPT_NS * self._kept))

    def _exchange(self, draws: bool) -> Work:
        """From the ranks that drew to all."""
        drawn = self._drawn if draws else 0
        if self._plan.world_size == 1:
            return Work(self._of_own(self._fields))
        moved = self._moved(drawn, self._own, {"tokens", *self._fields})
        held = drawn * self._size({"tokens", *self._fields}) + self._of_own(self._fields)
        return Work(held + moved.bytes, moved.ns + ROW_NS * self._samples)

    def _score(self) -> Work:
        responses = self._own // self._longest * self._plan.config.rollout.max_response_tokens
        return Work(self._of_own(self._fields) + TEXT * responses, TEXT_NS * responses)

    def _passes(self, parts: tuple[Part, ...]) -> Work:
        """Inputs to the roles, all before the first pass; the passes; the results back; the comparison with the sampler."""
        held = results = 0.0
        moved = back = Work()
        cut_ns = 0.0
        for shares, part in zip(self._divisions, parts):
            roles = [role for role in self._shares if self._shares[role] == shares]
            reads = self._existing({name for role in roles for name in outputs_of(role).reads})
            if shares != self._spread:  # else the own samples are the share
                held += self._held(shares, part, reads)
                moved = moved.then(self._sent(shares, part, reads))
            moved = moved.then(Work(0.0, ROW_NS * self._samples))
            share = self._tokens_each(shares.count)
            for role in roles:
                cut_ns += self._cut_ns(shares, part, self._existing(outputs_of(role).reads))
                if shares != self._spread:
                    sent, outputs = (share if part.reports else 0), outputs_of(role).tokens
                    results += sent * self._size(outputs)
                    back = back.then(self._moved(sent, self._own, outputs))
        before, after = self._of_own(self._fields), self._of_own(self._fields | self._outputs)
        most = max(before + held + moved.bytes, after + held + results + back.bytes, after + AGREEMENT * self._own)
        return Work(most, moved.ns + cut_ns + back.ns + AGREEMENT_NS * self._own)

    def _updates(self, parts: tuple[Part, ...]) -> Work:
        """Data of all roles that train, sent before the first of them starts; later epochs exchange within a role.

        Every mini-batch is balanced by itself, so that the samples that a rank owns are not its share, also where roles have a
        replica on each rank.
        """
        algorithm, in_windows = self._plan.config.algorithm, self._plan.config.rollout.window_tokens is not None
        held, ns, most = 0.0, 0.0, 0.0
        schedules = {role: update_schedule(self._plan.config, role) for role in self._trained}
        reads = {role: self._existing({*update_reads(role, algorithm, in_windows=in_windows), *READS}) for role in self._trained}
        parts_of = dict(zip(self._divisions, parts))
        # Sent once for roles that divide a batch, and an epoch, alike.
        division = {role: (self._shares[role], one.mini_batch_size, one.part) for role, one in schedules.items()}
        for key in sorted(set(division.values()), key=lambda one: (self._divisions.index(one[0]), *one[1:])):
            shares, size, _ = key
            part = parts_of[shares]
            roles = [role for role in self._trained if division[role] == key]
            fields = set().union(*(reads[role] for role in roles))
            if self._plan.world_size == 1:
                here, sent = 0.0, Work()
            else:
                here, sent = self._held(shares, part, fields), self._sent(shares, part, fields)
                sent = sent.then(Work(0.0, ROW_NS * self._samples))
            later = sum(schedules[role].epochs - 1 for role in roles)
            again = Work()
            if shares.count > 1 and later and part.holds | part.reads:
                share = self._tokens_each(shares.count)
                moved = self._moved(
                    share * len(shares.holders[0]) if part.reports else 0, share if part.holds else 0, {"tokens", *fields}
                )
                again = Work(here + moved.bytes, moved.ns + ROW_NS * self._samples)
            # A mini-batch is selected, then cut into micro-batches.
            select = here / (self._samples // size)
            held, most = held + here, max(most, sent.bytes, again.bytes, select)
            cut = ((schedules[role].epochs, self._cut_ns(shares, part, {*reads[role], "weight"})) for role in roles)
            ns += sent.ns + sum(2 * epochs * one_ns for epochs, one_ns in cut) + later * again.ns
        return Work(self._of_own(self._fields | self._outputs | self._shaped) + held + most, ns)

    def _tokens_each(self, count: int) -> int:
        """Tokens of the fullest of `count` parts of all samples."""
        return ceil(self._samples / count) * self._longest

    def _existing(self, fields: Collection[str]) -> set[str]:
        """Those of the fields that the experience has and that travel: weights are worked out where they are used."""
        absent = {
            "weight",
            NLL_WEIGHT,
            PTX_WEIGHT,
            *([] if self._kept else ["kept"]),
            *([] if "reference" in self._shares else ["ref_logprob"]),
        }
        return set(fields) - absent

    def _size(self, fields: Collection[str]) -> float:
        """Bytes of these fields of a token."""
        masks = dict.fromkeys(("response_mask", "whole_mask", "value_mask", REJECTED), MASK)
        sizes = {"tokens": TOKEN, **masks, "kept": KEPT_ROW + ID * self._kept}
        return sum(sizes.get(name, FIELD) for name in fields)

    def _of_own(self, fields: Collection[str]) -> float:
        return self._own * self._size({"tokens", *fields})

    def _held(self, shares: Shares, part: Part, fields: Collection[str]) -> float:
        """Bytes of a role's share on a rank."""
        if not (part.holds or part.reads):
            return 0
        return self._tokens_each(shares.count) * self._size({"tokens", *(fields if part.holds else ())})

    def _sent(self, shares: Shares, part: Part, fields: Collection[str]) -> Work:
        """From the owners to the ranks of a role: to each that holds fields, and tokens to those that read them alone."""
        share, holders, readers = self._tokens_each(shares.count), len(shares.holders[0]), len(shares.readers[0])
        tokens = self._moved(self._own * readers, share if part.reads else 0, ("tokens",))
        return tokens.then(self._moved(self._own * holders, share if part.holds else 0, {"tokens", *fields}))

    def _moved(self, sent: int, received: int, fields: Collection[str]) -> Work:
        """An exchange: the index of both ends, and the buffers of the fields that go at once. Ids travel as int32."""
        ends, most, kept = sent + received, max(sent, received), self._kept if "kept" in fields else 0.0
        count = len(fields)  # the numbers of ids are a field as others
        on_wire = self._size(fields) - (TOKEN - FIELD if "tokens" in fields else 0) - (KEPT_ROW - FIELD if kept else 0)
        # Ids stay at both ends until they are placed, beside where those of the batch start.
        of_kept = FIELD + ID * kept if kept else 0
        at_once = min(on_wire - of_kept, MOST_BYTES_AT_ONCE / self._own)
        buffers = ends * max(FIELD, of_kept, at_once)
        ns = ends * (INDEX_NS + FIELD_NS * count + KEPT_NS * kept) + WIRE_NS * most * on_wire
        return Work(INDEX * ends + buffers, ns)

    def _cut_ns(self, shares: Shares, part: Part, fields: Collection[str]) -> float:
        """Nanoseconds to gather a share's tokens and fields once more."""
        if not (part.holds or part.reads):
            return 0.0
        count = 1 + (len(fields) if part.holds else 0)
        ids_ns = KEPT_NS * self._kept if part.holds and "kept" in fields else 0.0
        return (FIELD_NS * count + ids_ns) * self._tokens_each(shares.count)


def _shaped_fields(config: TrainConfig) -> set[str]:
    """Fields of a token that stage 5 adds with memory of their own: if nothing changes the advantage, it is the raw one."""
    algorithm, returns = config.algorithm, {fields_of(role).returns for role in config.critics_in_use}
    asked = {
        "value_mask": algorithm.gae_level == "turn" or config.rollout.window_tokens is not None,
        "advantage": algorithm.whitens or algorithm.reweights,
        REJECTED: algorithm.correction.drops,
        DISAGREEMENT: len(config.critics_in_use) > 1,
        BONUS: algorithm.disagreement_entropy_ratio is not None,
    }
    return {"reward", "raw_advantage", *returns, *(name for name, is_there in asked.items() if is_there)}


def _part(shares: Shares, rank: int) -> Part:
    index = shares.index_of(rank)
    if index is None:
        return Part(False, False, False)
    return Part(rank in shares.holders[index], rank in shares.readers[index], shares.reporters[index] == rank)
