"""The language-modelling loss on a second data set: InstructGPT's term in fp64 loops, its division over ranks, its cursor.

Parity over layouts and engines: `tests/parity`; a resumed run: `test_average.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megappo.commands.verify.recording import RecordedTexts, record_rollouts
from megappo.config.loading import validated
from megappo.config.role_sections import PolicyConfig
from megappo.config.schema import AlgorithmConfig
from megappo.data.loader import PromptLoader
from megappo.data.packing import PackedBatch, Ragged
from megappo.engine.factory import EngineSpec
from megappo.models.hf_config import read_arch
from megappo.parallel.shares import Shares
from megappo.trainer.prepare.data import TextData
from megappo.trainer.ptx import Texts, draw_texts, with_texts
from megappo.trainer.roles import PTX_WEIGHT, Policy, policy_reads
from tests.engine.toy_engine import ToyEngine
from tests.models.checkpoints import write_checkpoint

VOCABULARY, TEMPERATURE, COEF, DENOMINATOR = 131, 0.7, 0.3, 41.0
NUMBERS = (4, 0, 9, 2, 7)
ALONE = Shares.of_ranks([0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ptx") / "model"
    write_checkpoint(path, "llama")
    return path


def algorithm(objective: str, coef: float) -> AlgorithmConfig:
    ptx = {"coef": coef, "data": "none.jsonl"} if coef else None
    aggregation = {"loss_aggregation": "seq-mean-token-mean"} if objective == "gspo" else {}
    return validated(
        {"estimator": "rloo", "loss": objective, "entropy": {"coef": 0.01}, "ptx": ptx, **aggregation}, AlgorithmConfig
    )


def mini_batch(kept: bool = False) -> PackedBatch:
    """A mini-batch of policy updates, with log-probs near those of a random model."""
    (batch,) = record_rollouts(1, sequences=4, vocab_size=VOCABULARY, kept=5 if kept else 0)
    generator = torch.Generator().manual_seed(3)
    advantage = torch.randn(batch.num_tokens, generator=generator)
    logprob = -5.0 + 0.1 * torch.randn(batch.num_tokens, generator=generator)
    return batch.with_fields({"advantage": advantage, "logprob": logprob, "weight": batch["response_mask"].float()})


def result_of(model: Path, share: PackedBatch, asked: AlgorithmConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(gradients, sums) of the policy's loss."""
    section = PolicyConfig(model=str(model), dtype="fp32", micro_batch_tokens=40)  # several micro-batches, of both kinds
    engine: Any = ToyEngine(EngineSpec("policy", str(model), read_arch(str(model)), section, total_updates=1))
    policy = Policy(engine, TEMPERATURE, asked)
    reads = (*Policy.sampling_fields, *policy_reads(asked))
    result = engine.forward_backward(share, policy._loss_of, reads=reads, denominator=DENOMINATOR)
    return {name: gradient.double() for name, gradient in engine.named_gradients().items()}, result.sums


def by_hand(model: Path, texts: Texts, temperature: float = 1.0, by_sequence: bool = False) -> tuple[dict[str, Tensor], float, int]:
    """(gradients of COEF times the mean, sum of the negative log-likelihood, number of tokens) of NUMBERS, in fp64."""
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    net.get_input_embeddings().padding_idx = None
    means, total, count = [], torch.zeros((), dtype=torch.float64), 0
    for number in NUMBERS:
        ids = texts.packed([number]).tokens
        logits = net(ids[None]).logits[0] / temperature
        own = torch.zeros((), dtype=torch.float64)
        for t in range(1, len(ids)):
            own = own - (logits[t - 1, ids[t]] - torch.logsumexp(logits[t - 1], 0))
        means.append(own / (len(ids) - 1))
        total, count = total + own, count + len(ids) - 1
    (COEF * (torch.stack(means).mean() if by_sequence else total / count)).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, float(total.detach()), count


def mixed(batch: PackedBatch, texts: Texts) -> PackedBatch:
    return with_texts(batch, texts, NUMBERS, ALONE, 0, DENOMINATOR)


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in found)


@pytest.mark.parametrize("objective", ["ppo", "gspo"])
@pytest.mark.parametrize("kept", [False, True], ids=["all ids", "kept ids"])
def test_it_adds_the_mean_over_the_tokens_of_the_texts(model: Path, objective: str, kept: bool) -> None:
    """The gradient that it adds, at temperature 1 and over the whole vocabulary whatever the responses were sampled with."""
    texts, batch = RecordedTexts(VOCABULARY), mini_batch(kept)
    with_it, sums = result_of(model, mixed(batch, texts), algorithm(objective, COEF))
    without, plain = result_of(model, batch, algorithm(objective, 0.0))
    added = {name: with_it[name] - without[name] for name in with_it}
    wanted, total, count = by_hand(model, texts)
    assert furthest(added, wanted) < 1e-4
    assert sums["ptx_sum"] == pytest.approx(total, rel=1e-5) and sums["ptx_tokens_sum"] == count
    assert {name: sums[name] for name in plain} == pytest.approx(plain, rel=1e-4), "texts count in no other loss"
    if not kept:  # negative controls
        assert furthest(added, by_hand(model, texts, TEMPERATURE)[0]) > 1e-2, "the sampling temperature"
        assert furthest(added, by_hand(model, texts, by_sequence=True)[0]) > 1e-2, "the mean over texts"


def test_every_text_is_in_one_share_and_their_weights_add_up_to_the_denominator() -> None:
    texts, batch, shares = RecordedTexts(VOCABULARY), mini_batch(kept=True), Shares.of_ranks(range(3))
    found: list[list[int]] = []
    total = 0.0
    for rank in range(3):
        share = with_texts(batch.select([rank]), texts, NUMBERS, shares, rank, DENOMINATOR)
        own = share.select(range(1, share.num_sequences))
        assert not own["weight"].any() and not own["response_mask"].any() and len(own.ragged("kept").ids) == 0
        assert not share.select([0])[PTX_WEIGHT].any()
        assert not own[PTX_WEIGHT][own.cu_seqlens[:-1].long()].any(), "a first token has no prefix"
        total += float(own[PTX_WEIGHT].sum())
        cuts = own.cu_seqlens.tolist()
        found += [own.tokens[a:b].tolist() for a, b in zip(cuts, cuts[1:])]
    assert total == pytest.approx(DENOMINATOR, rel=1e-6)
    assert sorted(found) == sorted(texts.packed([number]).tokens.tolist() for number in NUMBERS)


def test_a_rank_without_fields_knows_the_same_lengths() -> None:
    """A stage of a pipeline that is not the last one."""
    texts, batch = RecordedTexts(VOCABULARY), mini_batch(kept=True)
    bare = PackedBatch(batch.tokens, batch.cu_seqlens)
    assert mixed(bare, texts).cu_seqlens.equal(mixed(batch, texts).cu_seqlens) and not mixed(bare, texts).token_fields


def test_a_share_without_samples_has_its_texts() -> None:
    texts, batch = RecordedTexts(VOCABULARY), mini_batch(kept=True).select([])
    share = mixed(batch, texts)
    assert share.num_sequences == len(NUMBERS) and share.token_fields.keys() >= {"weight", PTX_WEIGHT}
    assert isinstance(share.ragged("kept"), Ragged)


def test_the_cursor_goes_on_after_a_resume() -> None:
    def drawn(loader: PromptLoader, updates: int) -> Sequence[Sequence[int]]:
        return draw_texts(TextData(texts, loader), updates).numbers

    texts: Any = RecordedTexts(VOCABULARY)
    whole, resumed = (PromptLoader(7, 3, shuffle=True, seed=5) for _ in range(2))
    first, rest = drawn(whole, 2), drawn(whole, 3)
    assert drawn(resumed, 2) == first
    again = PromptLoader(7, 3, shuffle=True, seed=5)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert drawn(again, 3) == rest != first
    assert sorted(n for numbers in (*first, *rest) for n in numbers)[:2] == [0, 0], "7 texts, then those of the next epoch"
