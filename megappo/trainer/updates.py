"""Stage 6: epochs of mini-batches over one step's experience, for critics and policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.algo.aggregation import loss_count, tokens_per_sequence, true_positions, weight_of_tokens
from megappo.config.batch import WHOLE, SampleShare, UpdateSchedule, update_schedule
from megappo.config.role_sections import is_critic
from megappo.config.schema import AlgorithmConfig, TrainConfig
from megappo.data.packing import PackedBatch
from megappo.parallel.shares import Shares
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.route import Wire
from megappo.trainer.experience.table import Owners, SampleTable, balanced
from megappo.trainer.ptx import DrawnTexts, with_texts
from megappo.trainer.reweighting import REJECTED
from megappo.trainer.roles import NLL_WEIGHT, Critic, LanguageModel, Policy, UpdateResult, critic_reads, policy_reads

READS = ("response_mask",)
"""Fields that weight mini-batches, beside those that the role's loss reads."""


class Targets(NamedTuple):
    """Tokens that count in a role's loss, if not all sampled ones. field: of the experience, [T] bool. counts: [N], number in each
    sample. passes_all: if false, leave out samples without targets, and mini-batches of such samples alone."""

    field: str
    counts: Tensor
    passes_all: bool = True


class Counting(NamedTuple):
    """Tokens that count in a role's loss: all sampled ones, apart from these fields.
    left_out: [N] bool, samples without a loss. rejected: [N], tokens of each sample that its field REJECTED leaves out. targets:
    None for all sampled tokens. positive: [N] bool, samples with a field `roles.NLL_WEIGHT`, which makes their loss the mean over
    such tokens of the mini-batch. None for none."""

    left_out: Tensor | None = None
    rejected: Tensor | None = None
    targets: Targets | None = None
    positive: Tensor | None = None


ALL_SAMPLED = Counting()


class MiniBatch(NamedTuple):
    """One optimizer step of a role. share: this rank's samples, with the field `weight`. denominator: of the loss, over all ranks.
    lengths: [M], tokens of all samples of the mini-batch, and of its texts. samples: their numbers, without texts."""

    share: PackedBatch
    denominator: float
    lengths: Tensor
    samples: Tensor


@lru_cache(maxsize=8)  # the plan of owners asks for it, and every role
def order_of_epoch(num_samples: int, seed: int, part: SampleShare = WHOLE) -> Tensor:
    """Return the sample numbers of a part in the seeded order of mini-batches, the same on every rank. Read-only."""
    numbers = torch.arange(part.index, num_samples, part.count)
    return numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed % 2**63))]


def owners_of_epoch(table: SampleTable, shares: Shares, size: int, seed: int, part: SampleShare = WHOLE) -> Owners:
    """Balance the samples of an epoch over the shares for each mini-batch. Samples outside the part have owners too, but unused."""
    share = torch.zeros(table.num_samples, dtype=torch.long) if part == WHOLE else table.balanced(shares.count).clone()
    order = order_of_epoch(table.num_samples, seed, part)
    of_minis = [balanced(lengths, shares.count) for lengths in table.length.index_select(0, order).split(size)]
    return Owners(share.index_copy_(0, order, torch.cat(of_minis)), shares)


def mini_batches(
    experience: Experience,
    shares: Shares,
    group: dist.ProcessGroup | None,
    schedule: UpdateSchedule,
    max_tokens: int,
    seed: int,
    counting: Counting = ALL_SAMPLED,
) -> Iterator[MiniBatch]:
    """Yield the optimizer steps of a role by its schedule, each epoch in a new seeded order. Collective over the group.
    experience: sent to the owners of the first epoch (`first_epoch`). shares, group: of the role; later epochs exchange samples
    over the group. max_tokens: divisor of `loss_aggregation: fixed-length`."""
    left_out, rejected, targets, positive = counting
    table, mode, size, part = experience.table, schedule.loss_aggregation, schedule.mini_batch_size, schedule.part
    field, counted, passes_all = targets or Targets("response_mask", table.sampled)
    counted = counted if rejected is None else counted - rejected
    counted = counted if left_out is None else counted.masked_fill(left_out, 0)
    for epoch in range(schedule.epochs):
        if epoch > 0 and shares.count > 1:
            assert group is not None, "several replicas are several ranks"
            owners = owners_of_epoch(table, shares, size, seed + epoch, part)
            experience = experience.redistribute(owners, wire=Wire(group))
        index = shares.index_of(experience.rank)
        order = order_of_epoch(table.num_samples, seed + epoch, part)
        # For the whole epoch at once: a rank has few samples of the thousands in some dozen mini-batches.
        places = true_positions(experience.owners.share.index_select(0, order) == index)
        owns = order.index_select(0, places).split((places // size).bincount(minlength=-(-len(order) // size)).tolist())
        for chosen, own in zip(order.split(size), owns):
            if not passes_all:
                chosen, own = (numbers[counted[numbers] > 0] for numbers in (chosen, own))
                if not len(chosen):
                    continue  # a step without a gradient would still decay the weights
            share = experience.batch.select(torch.searchsorted(experience.numbers, own))
            # Without a single sampled token every weight is 0; any denominator keeps the loss 0 instead of NaN.
            denominator = max(loss_count(mode, counted.index_select(0, chosen), max_tokens), 1.0)
            if field in share:
                mask = share[field]
                if left_out is not None:
                    mask = mask & ~share.of_tokens(left_out[own])
                if rejected is not None:
                    mask = mask & ~share[REJECTED]
                weights = {"weight": weight_of_tokens(mode, mask, share.cu_seqlens)}
                if positive is not None:
                    correct = mask & share.of_tokens(positive[own])
                    # The loss is divided by `denominator`, their mean by their own number.
                    number = float(counted[chosen][positive[chosen]].sum())
                    weights[NLL_WEIGHT] = correct.float() * (denominator / max(number, 1.0))
                share = share.with_fields(weights)
            yield MiniBatch(share, denominator, table.length.index_select(0, chosen).long(), chosen)


def mixed(minis: Iterable[MiniBatch], drawn: DrawnTexts, shares: Shares, rank: int) -> Iterator[MiniBatch]:
    """Yield the mini-batches with their texts. shares: of the role. rank: of the world."""
    for mini, numbers in zip(minis, drawn.numbers, strict=True):
        share = with_texts(mini.share, drawn.texts, numbers, shares, rank, mini.denominator)
        yield mini._replace(share=share, lengths=torch.cat([mini.lengths, drawn.texts.lengths(numbers)]))


def first_epoch(
    experience: Experience, shares: Shares, fields: Collection[str], mini_batch_size: int, seed: int, part: SampleShare = WHOLE
) -> Experience:
    """Send these fields to where the first epoch of a role's updates needs them. Collective over the world."""
    assert "response_mask" in experience.batch, "sequences that were not sampled (`Experience.of_own`) cannot be trained on"
    owners = owners_of_epoch(experience.table, shares, mini_batch_size, seed, part)
    return experience.redistribute(owners, {*fields, *READS})


def update_reads(role: str, algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Return the experience fields that the updates of policy or critic read, if present."""
    if is_critic(role):
        return (*critic_reads(role), "value_mask")
    rejected = (REJECTED,) if algorithm.drops_rejected else ()
    return (*LanguageModel.sampling_fields, *policy_reads(algorithm), *rejected)


def left_out_of(role: str, table: SampleTable, algorithm: AlgorithmConfig) -> Tensor | None:
    """Return [N] bool, samples without a loss of this role; None if all count."""
    return table.truncated.bool() if role == "policy" and algorithm.mask_truncated else None


def rejected_of(experience: Experience) -> Tensor:
    """Return [N] int32, sampled tokens of each sample that its field REJECTED leaves out. Collective over the world."""
    mine = tokens_per_sequence(experience.batch[REJECTED], experience.batch.cu_seqlens)
    return experience.column(mine).int()


def targets_of(role: str, experience: Experience) -> Targets | None:
    """Return the targets of a critic; None for the policy, or if all sampled tokens count. Collective over the world."""
    if not is_critic(role) or "value_mask" not in experience.batch:
        return None
    counts = tokens_per_sequence(experience.batch["value_mask"], experience.batch.cu_seqlens)
    return Targets("value_mask", experience.column(counts).int(), passes_all="whole_mask" not in experience.batch)


def positive_samples(experience: Experience, score: Tensor, algorithm: AlgorithmConfig) -> Tensor | None:
    """Return [N] bool, samples that end here with a score of at least `algorithm.positive_nll.score`; None without that section.
    score: [B] of this rank's samples. Collective over the world."""
    if algorithm.positive_nll is None:
        return None
    is_positive = experience.column(score).float() >= algorithm.positive_nll.score  # in fp32, as which scores are added up
    return is_positive & experience.table.ends


@dataclass
class UpdateSummary:
    """Totals of one role's updates in a step."""

    num_updates: int = 0
    skipped: int = 0
    stopped_early: bool = False
    lr: float | None = None
    grad_norms: list[float] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    maxima: dict[str, float] = field(default_factory=dict)
    expert_tokens: Tensor | None = None
    """[layers, experts] tokens routed to each expert over all updates; None for a dense model."""
    balance_losses: list[float] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    """[M] int64 per mini-batch that was passed, tokens of its samples on all ranks."""
    samples: list[Tensor] = field(default_factory=list)
    """[M] int64 of each of them, numbers of its samples."""

    def add(self, result: UpdateResult, denominator: float) -> None:
        for name, value in result.losses.sums.items():
            self.sums[name] += value
        for name, value in result.losses.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        if result.losses.router is not None:
            tokens = result.losses.router.tokens
            self.expert_tokens = tokens if self.expert_tokens is None else self.expert_tokens + tokens
            self.balance_losses.append(result.losses.router.balance_loss)
        for name in ("surrogate_sum", "loss_sum"):
            if name in result.losses.sums:
                self.losses[name].append(result.losses.sums[name] / denominator)
        if result.step is None:
            self.stopped_early = True
            return
        self.lr = result.lr
        self.num_updates += result.step.applied
        self.skipped += not result.step.applied
        self.grad_norms.append(result.step.grad_norm)

    def per_token(self, name: str) -> float:
        return self.sums[name] / max(self.sums["tokens_sum"], 1.0)

    def loss(self, name: str) -> float:
        return _mean(self.losses[name])

    @property
    def grad_norm(self) -> float:
        return _mean(self.grad_norms)

    @property
    def balance_loss(self) -> float:
        return _mean(self.balance_losses)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def run_updates(role: Policy | Critic, minis: Iterable[MiniBatch]) -> UpdateSummary:
    """Run one update per mini-batch. Ends early if the role declines one (target KL), which all ranks see alike."""
    summary = UpdateSummary()
    with role.engine.train_mode():
        for mini in minis:
            result = role.update(mini.share, mini.denominator)
            summary.add(result, mini.denominator)
            summary.lengths.append(mini.lengths)
            summary.samples.append(mini.samples)
            if result.step is None:
                break
    return summary


class Updates:
    """Stage 6 of a step for some of the trained roles."""

    def __init__(
        self,
        experience: Experience,
        roles: Roles,
        names: Collection[str],
        config: TrainConfig,
        seed: int,
        positive: Tensor | None = None,
        texts: DrawnTexts | None = None,
    ) -> None:
        """Send every role its data before any starts, so roles on other ranks do not wait for each other. Collective over the
        world. names: roles to update. positive: `positive_samples`. texts: for the policy's mini-batches, None without
        `algorithm.ptx`.
        """
        self._roles, self._config, self._seed, self._positive, self._texts = roles, config, seed, positive, texts
        # Once for roles that divide a batch, and an epoch, alike.
        schedules = {name: update_schedule(config, name) for name in names}
        asked = partial(update_reads, algorithm=config.algorithm)
        division = {name: (roles.shares[name], one.mini_batch_size, one.part) for name, one in schedules.items()}
        reads: dict[tuple[Shares, int, SampleShare], set[str]] = {}
        for name in names:
            reads.setdefault(division[name], set()).update(asked(name))
        sent = {
            (shares, size, part): first_epoch(experience, shares, fields, size, seed, part)
            for (shares, size, part), fields in reads.items()
        }
        # Each role cuts, and exchanges for later epochs, its own fields alone.
        self._data = {name: sent[division[name]].only({*asked(name), *READS}) for name in names}
        self._targets = {name: targets_of(name, experience) for name in names}
        self._summaries = {name: UpdateSummary() for name in roles.trained}
        self._table = experience.table
        drops = "policy" in names and config.algorithm.drops_rejected
        self._rejected = {"policy": rejected_of(experience)} if drops else {}

    def run(self, name: str) -> None:
        """Run the role's updates if it is to be updated and lives here; else do nothing. Collective over the role's ranks."""
        role = self._roles.by_name.get(name)
        if name not in self._data or role is None:
            return
        data = self._data.pop(name)
        minis: Iterable[MiniBatch] = mini_batches(
            data,
            self._roles.shares[name],
            role.engine.host_group,
            update_schedule(self._config, name),
            self._config.rollout.max_response_tokens,
            self._seed,
            Counting(
                left_out_of(name, self._table, self._config.algorithm),
                self._rejected.get(name),
                self._targets[name],
                self._positive if name == "policy" else None,
            ),
        )
        if name == "policy" and self._texts is not None:
            minis = mixed(minis, self._texts, self._roles.shares[name], data.rank)
        self._summaries[name] = run_updates(cast(Policy | Critic, role), minis)

    def changed(self, name: str) -> bool:
        """Return True if `run` changed the role's weights. Valid on the role's ranks; not collective."""
        return name in self._summaries and self._summaries[name].num_updates > 0

    def summary(self, name: str) -> UpdateSummary:
        """Return the summary of the role's updates, the same on every rank; empty without updates. Collective over the world."""
        if name not in self._summaries:
            return UpdateSummary()
        self._summaries[name] = self._roles.told(name, self._summaries[name])  # some dozen numbers, and two for each expert
        return self._summaries[name]
