"""Stage 4: outputs of the models for the sampled tokens, computed where each role lives and sent to the owners of the samples."""

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
    """Fields of a role's pass over all samples: fields it reads if present, and fields it adds."""

    reads: tuple[str, ...]
    tokens: tuple[str, ...]
    sequences: tuple[str, ...] = ()


def outputs_of(role: str) -> Outputs:
    """Return the fields of a role; a role without such a pass adds none."""
    if is_critic(role):
        fields = fields_of(role)
        return Outputs((), (fields.value,), (fields.bootstrap,))
    return Outputs(LanguageModel.sampling_fields, {"policy": ("logprob", "entropy"), "reference": ("ref_logprob",)}.get(role, ()))


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
            found[roles.shares[name]] |= cast(_Passing, role).outputs(inputs[roles.shares[name]].batch)
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
