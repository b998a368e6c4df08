"""Log-probs over the ids that a sampler kept: the role against the definition, the Megatron engine against the role, and what a
wrong alignment would do."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist

from megappo.data.packing import NO_ID, PackedBatch, Ragged, pack
from megappo.engine.linear_output import LinearOutput
from megappo.rollout.megatron_engine import _sample_next
from megappo.rollout.types import SamplingParams
from megappo.trainer import roles
from megappo.trainer.roles import LanguageModel

VOCAB, HIDDEN, TEMPERATURE = 23, 6, 0.7
SEQUENCES = [[3, 7, 7, 1, 22], [5], [9, 0, 4]]
SAMPLED = {2: {7, 1, 2, 8}, 3: {1}, 4: {22, 0, 5}, 8: {4, 3}}
"""Position in the batch -> the ids that its token was drawn from; the others were given."""


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def batch_of(kept: dict[int, set[int]]) -> PackedBatch:
    batch = pack(SEQUENCES)
    field = torch.full((batch.num_tokens, 5), NO_ID, dtype=torch.int32)
    for position, ids in kept.items():
        field[position, : len(ids)] = torch.tensor(sorted(ids), dtype=torch.int32)
    return batch.with_fields(ragged_fields={"kept": Ragged.of_table(field)})


def output_of() -> LinearOutput:
    """Hidden states and an output layer whose last rows are padding; logits of up to 20."""
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(sum(map(len, SEQUENCES)), HIDDEN, generator=generator)
    weight = torch.randn(VOCAB + 2, HIDDEN, generator=generator)
    return LinearOutput(hidden.requires_grad_(), weight, vocab_start=0, num_valid=VOCAB, group=dist.group.WORLD)


def by_definition(output: LinearOutput, kept: dict[int, set[int]], bf16: bool) -> tuple[list[float], list[float]]:
    """(log-probs, entropies) in Python floats: the softmax over a token's ids, or over the vocabulary, of the row before it."""
    logits = output.hidden @ output.weight[:VOCAB].t()
    logits = (logits.bfloat16() if bf16 else logits).double() / TEMPERATURE
    logprobs, entropies, start = [], [], 0
    for sequence in SEQUENCES:
        for place, token in enumerate(sequence):
            if place == 0:
                logprobs.append(0.0), entropies.append(0.0)
                continue
            row = logits[start + place - 1].tolist()
            ids = sorted(kept.get(start + place, set(range(VOCAB))))
            top = max(row[i] for i in ids)
            whole = sum(math.exp(row[i] - top) for i in ids)
            logprobs.append(row[token] - top - math.log(whole))
            entropies.append(-sum(math.exp(row[i] - top) / whole * (row[i] - top - math.log(whole)) for i in ids))
        start += len(sequence)
    return logprobs, entropies


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kept", [SAMPLED, {}])
def test_logprobs_and_entropies_are_over_the_ids_of_their_own_token(alone, kept, bf16):
    output = output_of()
    model = LanguageModel(None, TEMPERATURE, "bf16" if bf16 else "fp32")
    logprob, entropy = model.token_logprobs(output, batch_of(kept), True)
    want, want_entropy = by_definition(output, kept, bf16)
    assert logprob.tolist() == pytest.approx(want, abs=5e-6) and entropy.tolist() == pytest.approx(want_entropy, abs=5e-6)
    other, _ = by_definition(output, kept, not bf16)
    assert max(abs(a - b) for a, b in zip(want, other)) > 1e-3, "the rounding shows"


def test_the_width_of_the_table_changes_no_bit(alone, monkeypatch):
    """A micro-batch's own longest row, or that of a whole share, as long as all ids."""
    found = []
    tight = Ragged.padded
    for columns in (0, VOCAB - 4):
        monkeypatch.setattr(Ragged, "padded", lambda self, n=columns: torch.nn.functional.pad(tight(self), (0, n), value=NO_ID))
        output = output_of()
        logprob, entropy = LanguageModel(None, TEMPERATURE).token_logprobs(output, batch_of(SAMPLED), True)
        found.append((logprob, entropy, *torch.autograd.grad(logprob.sum() + entropy.sum(), output.hidden)))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_token_with_one_id_has_no_gradient(alone):
    output = output_of()
    logprob, _ = LanguageModel(None, TEMPERATURE).token_logprobs(output, batch_of(SAMPLED), False)
    assert logprob[3].detach().abs() < 1e-7, "token 3 could only be what it is"
    (gradient,) = torch.autograd.grad(logprob.sum(), output.hidden)
    assert gradient[2].abs().max() < 1e-7 and gradient.abs().max() > 0.1


@pytest.mark.parametrize("shift", [lambda field, *_: field, lambda field, *_: field.roll(1, 0)])
def test_ids_of_another_token_are_noticed(alone, monkeypatch, shift):
    monkeypatch.setattr(roles, "shift_left", shift)
    with pytest.raises(ValueError, match="not among its kept ids"):
        LanguageModel(None, TEMPERATURE).token_logprobs(output_of(), batch_of(SAMPLED), False)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_megatron_engine_draws_from_the_trainers_logits(alone, dtype, bf16):
    """Whatever the type of the model is, its logits are rounded only where the trainer rounds them."""
    output = output_of()
    output = dataclasses.replace(output, hidden=output.hidden.detach().to(dtype), weight=output.weight.to(dtype))
    sampling = SamplingParams(1, TEMPERATURE, top_p=0.9, top_k=4, record_top_k_ids=True)
    batch = pack(SEQUENCES)
    drawing = batch.with_fields(sequence_fields={"draw": torch.tensor([0.1, 0.5, 0.9]), "length": batch.lengths})
    drawn = _sample_next(sampling, "bf16" if bf16 else "fp32", output, drawing).tokens
    ends = (batch.cu_seqlens[1:] - 1).tolist()
    kept = [[int(drawn[name][end]) for name in drawn if name.startswith("kept")] for end in ends]
    for end, ids in zip(ends, kept):
        token, found = int(drawn["token"][end]), [one for one in ids if one != NO_ID]
        assert token in found and 1 <= len(found) <= 4
        row = dataclasses.replace(output, hidden=output.hidden[[end, end]])
        of_pair = Ragged.of_table(torch.tensor([[NO_ID] * len(ids), ids], dtype=torch.int32))
        pair = pack([[0, token]]).with_fields(ragged_fields={"kept": of_pair})
        for rounded in (False, True):
            model = LanguageModel(None, TEMPERATURE, "bf16" if rounded else "fp32")
            difference = abs(float(model.token_logprobs(row, pair, False)[0][1] - drawn["logprob"][end]))
            assert (difference < 5e-6) == (rounded == bf16 or len(found) == 1)
