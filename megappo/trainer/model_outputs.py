"""Stage 4: what the models say of the sampled tokens, computed where each role lives and returned to the owners of the samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from megappo.config.role_sections import is_critic
from megappo.data.packing import PackedBatch
from megappo.parallel.shares import Shares
from megappo.trainer.build_roles import Roles
from megappo.trainer.critics import fields_of
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.owners import Owners
from megappo.trainer.roles import LanguageModel


class _Passing(Protocol):
    def outputs(self, share: PackedBatch) -> Mapping[str, Tensor]: ...


class Outputs(NamedTuple):
    """Fields of a role's pass over all samples: those that it reads if there are any, and those that it gives."""

    reads: tuple[str, ...]
    tokens: tuple[str, ...]
    sequences: tuple[str, ...] = ()


def outputs_of(role: str) -> Outputs:
    """Fields of a role; none are given by one that makes no such pass."""
    if is_critic(role):
        fields = fields_of(role)
        return Outputs((), (fields.value,), (fields.bootstrap,))
    return Outputs(LanguageModel.sampling_fields, {"policy": ("logprob", "entropy"), "reference": ("ref_logprob",)}.get(role, ()))


def add_model_outputs(experience: Experience, roles: Roles) -> Experience:
    """Add the fields of stage 4. Collective over the world.

    All roles are sent their inputs before any of them starts, and the results are exchanged after all have ended here: roles on
    other ranks do not wait for each other in between.
    """
    asked = {name: outputs for name in roles.shares if (outputs := outputs_of(name)).tokens}
    inputs = _inputs(experience, {roles.shares[name]: set(outputs.reads) for name, outputs in asked.items()})
    found: dict[Shares, dict[str, Tensor]] = {shares: {} for shares in inputs}
    for name in asked:
        role = roles.by_name.get(name)
        if role is not None:
            found[roles.shares[name]] |= cast(_Passing, role).outputs(inputs[roles.shares[name]].batch)
    for shares, share in inputs.items():
        experience = experience.with_results(
            share, *results_of([name for name in asked if roles.shares[name] == shares]), found[shares]
        )
    return experience


def results_of(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Fields per token and per sample that these roles give."""
    outputs = [outputs_of(name) for name in names]
    return [field for one in outputs for field in one.tokens], [field for one in outputs for field in one.sequences]


def _inputs(experience: Experience, reads: dict[Shares, set[str]]) -> dict[Shares, Experience]:
    """Experience for each division among replicas, once for all roles that have it."""
    return {shares: experience.for_role(shares, fields) for shares, fields in reads.items()}


def computing_ranks(experience: Experience, shares: Shares, sample: int) -> str:
    """Ranks that computed a role's outputs of a sample in `add_model_outputs`, in words."""
    return shares.describe(int(Owners.of_role(experience.table, shares).share[sample]))
