"""Stage 4: outputs of the models for the sampled tokens, computed where each role lives and sent to the owners of the samples.
They must be finite there: one NaN logit would spread to the advantages of the whole batch, look like a sampler mismatch, or
surface only in the gradients of a later update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from megappo.config.role_sections import is_critic
from megappo.data.packing import PackedBatch
from megappo.parallel.shares import Shares
from megappo.parallel.totals import largest, total
from megappo.trainer.build_roles import Roles
from megappo.trainer.critics import critics_in, fields_of
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.table import Owners
from megappo.trainer.roles import Critic, LanguageModel, Teacher
from megappo.trainer.token_scans import whole_responses


class Outputs(NamedTuple):
    """Fields of a role's pass over all samples: fields it reads if present, and fields it adds."""

    reads: tuple[str, ...]
    tokens: tuple[str, ...]
    sequences: tuple[str, ...] = ()


def outputs_of(role: str) -> Outputs:
    """Return the fields of a role; a role without such a pass adds none."""
    if is_critic(role):
        fields = fields_of(role)
        return Outputs((), (fields.value,), (fields.bootstrap,))
    reads = (Teacher if role == "teacher" else LanguageModel).sampling_fields
    return Outputs(reads, _LOGPROBS.get(role, ()))


_LOGPROBS = {"policy": ("logprob", "entropy"), "reference": ("ref_logprob",), "teacher": ("teacher_logprob",)}
"""Role -> fields of its pass of log-probs."""


def add_model_outputs(experience: Experience, roles: Roles) -> Experience:
    """Add the fields of stage 4. Collective over the world."""
    asked = {name: outputs for name in roles.shares if (outputs := outputs_of(name)).tokens}
    # Send all inputs before any role starts and exchange results after all have ended, so roles on different ranks run
    # concurrently.
    inputs = _inputs(experience, {roles.shares[name]: set(outputs.reads) for name, outputs in asked.items()})
    found: dict[Shares, dict[str, Tensor]] = {shares: {} for shares in inputs}
    for name in asked:
        role = roles.by_name.get(name)
        if role is not None:
            found[roles.shares[name]] |= cast(LanguageModel | Critic, role).outputs(inputs[roles.shares[name]].batch)
    for shares, share in inputs.items():
        experience = experience.with_results(
            share, *results_of([name for name in asked if roles.shares[name] == shares]), found[shares]
        )
    return experience


def results_of(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the fields per token and per sample that these roles add."""
    outputs = [outputs_of(name) for name in names]
    return [field for one in outputs for field in one.tokens], [field for one in outputs for field in one.sequences]


def _inputs(experience: Experience, reads: dict[Shares, set[str]]) -> dict[Shares, Experience]:
    return {shares: experience.for_role(shares, fields) for shares, fields in reads.items()}


def computing_ranks(experience: Experience, shares: Shares, sample: int) -> str:
    """Describe the ranks that computed a role's outputs of a sample in `add_model_outputs`."""
    return shares.describe(int(Owners.of_role(experience.table, shares).share[sample]))


def _tokens(batch: PackedBatch) -> dict[str, str | None]:
    """Return field per token -> role that computes it, None for the sampler."""
    values = {fields.value: role for role, fields in critics_in(batch).items()}
    # Not the entropy, which is only measured.
    return {"rollout_logprob": None, "logprob": "policy", **values, "ref_logprob": "reference", "teacher_logprob": "teacher"}


def _ends(batch: PackedBatch) -> dict[str, str]:
    return {fields.bootstrap: role for role, fields in critics_in(batch).items()}


class NonFiniteOutput(RuntimeError):
    """A log-prob or value of a sampled token is NaN or infinite. The message, the same on every rank, names field, role and ranks.
    A restart may get over it (an overflow in one batch, a memory error), unlike `checkpoints.NonFiniteWeights`."""


def require_finite_outputs(experience: Experience, shares: Mapping[str, Shares], sampler: str, step: int) -> None:
    """Raise NonFiniteOutput on every rank if a field that training reads is not finite at a sampled token. Collective over the
    world. Checks logprob, rollout_logprob, ref_logprob, teacher_logprob, and value and bootstrap (of cut responses) of every
    critic.
    shares: role -> how it divides a batch. sampler: name of the rollout engine."""
    bad = _bad_samples(experience)
    counts = total(torch.tensor([len(samples) for samples in bad.values()]))
    if not int(counts.sum()):
        return
    none, ends = experience.table.num_samples, _ends(experience.batch)
    roles = _tokens(experience.batch) | ends
    firsts = -largest(-torch.tensor([int(samples.min()) if len(samples) else none for samples in bad.values()]))
    for name, number, first in zip(bad, counts.tolist(), firsts.tolist()):
        if not number:
            continue
        role = roles[name]
        whose, where = sampler, ""
        if role is not None:
            whose, where = f"the {role}", f", computed by {computing_ranks(experience, shares[role], first)}"
        places = _count(number, at_end=name in ends)
        raise NonFiniteOutput(
            f"step {step}: {name} of {whose} is NaN or infinite at {places}, the first of sample {first}{where}"
            "; no update is made of it"
        )


def num_not_finite(experience: Experience) -> Tensor:
    """Count the non-finite values in this rank's samples, [] int64 where they are; `require_finite_outputs` names them."""
    batch, sampled = experience.batch, whole_responses(experience.batch)["response_mask"]
    found = [_num_bad(batch[name], sampled) for name in _tokens(batch) if name in batch]
    found += [_num_bad(batch[name], batch["truncated"]) for name in _ends(batch) if name in batch]
    return torch.stack(found).sum()


def _num_bad(values: Tensor, counts: Tensor) -> Tensor:
    # On a device the host would wait for the sum that `_bad` reads.
    bad = _bad(values, counts) if values.device.type == "cpu" else None
    return (counts & ~values.isfinite()).sum() if bad is None else torch.tensor(len(bad))


def _bad_samples(experience: Experience) -> dict[str, Tensor]:
    """Return field -> sample number of each non-finite value, for this rank's samples."""
    batch, numbers = experience.batch, experience.numbers
    sampled = whole_responses(batch)["response_mask"]
    ends = batch.host_offsets[1:].long()
    of_tokens = {
        # The sample of a token is the first that ends behind it.
        name: numbers[torch.searchsorted(ends, _bad(batch[name], sampled).cpu(), right=True)]
        for name in _tokens(batch)
        if name in batch
    }
    return of_tokens | {name: numbers[_bad(batch[name], batch["truncated"]).cpu()] for name in _ends(batch) if name in batch}


def _bad(values: Tensor, counts: Tensor) -> Tensor:
    """Return the positions where `counts` is true and `values` is not finite."""
    # A finite sum rules out bad values in a tenth of the time; a sum of large finite values may overflow, so check those one by
    # one.
    if values.sum().isfinite():
        return counts.new_empty(0, dtype=torch.long)
    return (counts & ~values.isfinite()).nonzero().flatten()


def _count(number: int, *, at_end: bool) -> str:
    kind = "the end of {} cut response" if at_end else "{} sampled token"
    return kind.format("a") if number == 1 else f"{kind}s".format(number)
