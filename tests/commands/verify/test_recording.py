"""The recorded rollouts hold the cases that parity breaks on, and are the same wherever they are drawn."""

from __future__ import annotations

import torch

from megappo.algo.aggregation import tokens_per_sequence
from megappo.commands.verify.recording import LONGEST_RESPONSE, LONGEST_SEQUENCE, num_top_k_ids, record_rollouts
from megappo.commands.verify.shrink_model import small_config, write_images
from megappo.config.role_sections import ParallelConfig
from megappo.config.schema import SamplingConfig
from megappo.data.images import IMAGE_BASE, ImageStore
from megappo.models.hf_config import arch_of
from megappo.models.vision import seen_in
from tests.commands.verify.models import MODELS


def drawn(seed: int = 0):
    return record_rollouts(3, sequences=12, vocab_size=131, seed=seed)


def test_a_seed_decides_everything() -> None:
    for first, second in zip(drawn(), drawn()):
        assert torch.equal(first.tokens, second.tokens) and torch.equal(first["score"], second["score"])
    assert not torch.equal(drawn()[0].tokens[:20], drawn(1)[0].tokens[:20])
    assert not torch.equal(drawn()[0].tokens[:20], drawn()[1].tokens[:20])


def test_it_has_gaps_cuts_single_tokens_and_unequal_lengths() -> None:
    for batch in drawn():
        mask, cu = batch["response_mask"], batch.cu_seqlens.tolist()
        sampled = tokens_per_sequence(mask, batch.cu_seqlens)
        turns = [int((mask[a + 1 : b] & ~mask[a : b - 1]).sum()) for a, b in zip(cu, cu[1:])]
        assert (sampled == 1).any() and (sampled > 1).any() and max(turns) > 1
        assert batch["truncated"].any() and not batch["truncated"].all()
        assert len(set(batch.lengths.tolist())) > 6
        assert not mask[batch.cu_seqlens[:-1].long()].any(), "the first token has no prefix to be sampled from"
        assert mask[batch.cu_seqlens[1:].long() - 1].all(), "a rollout ends with a sampled token"
        assert int(sampled.max()) <= LONGEST_RESPONSE and int(batch.lengths.max()) <= LONGEST_SEQUENCE
        assert (batch["rollout_logprob"] == 0)[~mask].all() and int(batch.tokens.max()) < 131


def test_images_stand_behind_the_first_token_and_are_never_sampled(tmp_path) -> None:
    vision = arch_of(small_config(MODELS["qwen3_vl"], 2, [ParallelConfig()], "local")).vision
    assert vision is not None
    write_images(tmp_path / "images", vision)
    images = ImageStore(tmp_path / "images")
    batches = record_rollouts(3, sequences=12, vocab_size=131, images=images)
    first = batches[0].tokens
    assert torch.equal(first[first < IMAGE_BASE], drawn()[0].tokens), "the rest is as without"
    for batch in batches:
        shown = [seen_in(one, images).images for one in batch.tokens.split(batch.lengths.tolist())]
        assert [len(one) for one in shown] == [0, 1, 2, 1] * 3 and {image for one in shown for image in one} == {0, 1, 2}
        text = batch.tokens < IMAGE_BASE
        assert not batch["response_mask"][~text].any() and not text[batch.cu_seqlens[:-1].long() + 1][1::4].any()


def test_every_sampled_token_is_among_the_ids_it_was_drawn_from() -> None:
    for plain, batch in zip(drawn(), record_rollouts(3, sequences=12, vocab_size=131, kept=5)):
        assert "kept" not in plain and torch.equal(plain.tokens, batch.tokens), "the rest is as without"
        kept, mask = batch.ragged("kept").padded(), batch["response_mask"]
        counts = (kept >= 0).sum(1)
        assert kept.shape == (batch.num_tokens, 5) and kept.dtype == torch.int32 and int(kept.max()) < 131
        assert (kept == batch.tokens[:, None]).any(1)[mask].all() and not counts[~mask].any()
        assert {1, 5} <= set(counts[mask].tolist())


def test_rollouts_are_recorded_as_the_run_samples() -> None:
    cases = [({}, 0), ({"top_k": 5}, 5), ({"top_k": 50, "top_p": 0.9}, 8), ({"top_p": 0.9, "replay_top_k_ids": False}, 0)]
    assert [num_top_k_ids(SamplingConfig(**keys)) for keys, _ in cases] == [want for _, want in cases]
