"""Dealing requests to replicas."""

from __future__ import annotations

import random

import pytest

from megappo.rollout.vllm_engine import share_requests


def prompts_of(seed: int, count: int, samples: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    different = [(i,) * rng.randint(1, 200) for i in range(count)]
    return [prompt for prompt in different for _ in range(samples)]


@pytest.mark.parametrize("count, samples, replicas", [(0, 1, 3), (1, 1, 4), (7, 1, 2), (64, 8, 4), (3, 16, 4), (100, 1, 1)])
def test_every_request_is_dealt_once_and_evenly(count, samples, replicas):
    prompts = prompts_of(1, count, samples)
    shares = share_requests(prompts, replicas)
    assert len(shares) == replicas
    assert sorted(index for share in shares for index in share) == list(range(len(prompts)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= (samples if count >= 4 * replicas else 1)


def test_tokens_are_balanced_too():
    prompts = prompts_of(2, 400, 1)
    tokens = [sum(len(prompts[i]) for i in share) for share in share_requests(prompts, 4)]
    assert max(tokens) - min(tokens) <= 200  # one prompt


def test_samples_of_one_prompt_stay_together_when_there_are_enough_prompts():
    prompts = prompts_of(3, 32, 4)
    for share in share_requests(prompts, 4):
        assert all({4 * (i // 4) + k for k in range(4)} <= set(share) for i in share)
