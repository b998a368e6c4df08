"""Stage 4 looks for NaN and infinities in what models and sampler say of the sampled tokens, before anything is computed from it.

A NaN in one logit would otherwise become NaN advantages of the whole batch, be told as a disagreement with the sampler, or end the
run three updates later by its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megappo.config.schema import CRITICS
from megappo.parallel.shares import Shares
from megappo.parallel.totals import largest, total
from megappo.trainer.critics import fields_of
from megappo.trainer.experience.experience import Experience
from megappo.trainer.model_outputs import computing_ranks
from megappo.trainer.token_scans import whole_responses

# Field of the batch -> role that computes it, None for the sampler. Not the entropy, which is only measured.
_TOKENS = {
    "rollout_logprob": None,
    "logprob": "policy",
    **{fields_of(role).value: role for role in CRITICS},
    "ref_logprob": "reference",
}
_ENDS = {fields_of(role).bootstrap: role for role in CRITICS}


class NonFiniteOutput(RuntimeError):
    """A log-prob or a value of a sampled token is NaN or infinite. The same message on every rank: tensor, role, rank and stage.

    Another start may get over it (an overflow of one batch, memory that lost a bit); weights that are not finite do not
    (`checkpoints.NonFiniteWeights`).
    """


def require_finite_outputs(experience: Experience, shares: Mapping[str, Shares], sampler: str, step: int) -> None:
    """Raise NonFiniteOutput, on every rank, if a field that training reads is not finite at a sampled token of any rank's samples.
    Collective over the world.

    shares: role -> its division of a batch. sampler: name of the rollout engine. The step's fields: logprob, rollout_logprob, value
    and bootstrap (of cut responses) of every critic, ref_logprob if there is a reference.
    """
    bad = _bad_samples(experience)
    counts = total(torch.tensor([len(samples) for samples in bad.values()]))
    if not int(counts.sum()):
        return
    none = experience.table.num_samples
    firsts = -largest(-torch.tensor([int(samples.min()) if len(samples) else none for samples in bad.values()]))
    for name, number, first in zip(bad, counts.tolist(), firsts.tolist()):
        if not number:
            continue
        role = _TOKENS[name] if name in _TOKENS else _ENDS[name]
        whose, where = sampler, ""
        if role is not None:
            whose, where = f"the {role}", f", computed by {computing_ranks(experience, shares[role], first)}"
        raise NonFiniteOutput(
            f"step {step}: {name} of {whose} is NaN or infinite at {_count(name, number)}, the first of sample {first}{where}"
            "; no update is made of it"
        )


def num_not_finite(experience: Experience) -> int:
    """Number of those values in this rank's samples. If any rank has some, `require_finite_outputs` names them."""
    return sum(map(len, _bad_samples(experience).values()))


def _bad_samples(experience: Experience) -> dict[str, Tensor]:
    """Field -> number of the sample of each of its values that is not finite, of this rank's."""
    batch, numbers = experience.batch, experience.numbers
    sampled = whole_responses(batch)["response_mask"]
    ends = batch.cu_seqlens[1:].long()
    of_tokens = {
        # The sample of a token is the first that ends behind it.
        name: numbers[torch.searchsorted(ends, _bad(batch[name], sampled), right=True)]
        for name in _TOKENS
        if name in batch
    }
    return of_tokens | {name: numbers[_bad(batch[name], batch["truncated"])] for name in _ENDS if name in batch}


def _bad(values: Tensor, counts: Tensor) -> Tensor:
    """Positions of the elements of `values` that count and are not finite."""
    # In a tenth of the time the sum tells that there is none; of large numbers it may be infinite without.
    if values.sum().isfinite():
        return counts.new_empty(0, dtype=torch.long)
    return (counts & ~values.isfinite()).nonzero().flatten()


def _count(name: str, number: int) -> str:
    kind = "the end of {} cut response" if name in _ENDS else "{} sampled token"
    return kind.format("a") if number == 1 else f"{kind}s".format(number)
