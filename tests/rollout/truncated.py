"""Top-k and top-p in a world: what an engine says it drew from, and the trainer's log-probs over the same ids.

Called by `test_policy_push.py`, whose world holds engines and policies of many layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megappo.data.packing import PackedBatch
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.trainer.experience.collect import pack_experience
from megappo.trainer.roles import LanguageModel
from megappo.trainer.sampler_check import compare_with_sampler
from tests.rollout.responses import generate_all

SAMPLING = SamplingParams(max_tokens=10, temperature=0.7, top_p=0.8, top_k=5, record_top_k_ids=True)
TOP_K = dataclasses.replace(SAMPLING, top_p=1.0)


def differences(
    policy: Any, requests: Sequence[Request], responses: Sequence[Response], sampling: SamplingParams
) -> dict[str, Any]:
    """|log-prob of the sampler - of the trainer| of the sampled tokens: largest with the recorded ids, mean without them.

    counts: ids that each token was drawn from. own, others: share of tokens that stand among their own ids, and among those of
    the token before.
    """
    batch = pack_experience(requests, responses, with_top_k_ids=True)
    mask, kept = batch["response_mask"], batch.ragged("kept").padded()
    whole = dataclasses.replace(batch, ragged_fields={})
    with_ids = of_trainer(policy, batch, sampling)
    logprobs = (with_ids, of_trainer(policy, whole, sampling))
    exact, without = ((logprob - batch["rollout_logprob"])[mask].abs() for logprob in logprobs)
    inside = (kept == batch.tokens[:, None]).any(1), (kept.roll(1, 0) == batch.tokens[:, None]).any(1)
    both = mask & mask.roll(1)
    return {
        "exact": float(exact.max()),
        "without": float(without.mean()),
        "counts": batch.ragged("kept").counts[mask].tolist(),
        "own": float(inside[0][mask].double().mean()),
        "others": float(inside[1][both].double().mean()),
        "agreement": compare_with_sampler(batch.with_fields({"logprob": with_ids}), sampling),
    }


def of_trainer(policy: Any, batch: PackedBatch, sampling: SamplingParams) -> Tensor:
    logprob, _ = LanguageModel(policy.engine, sampling.temperature).logprobs(batch, want_entropy=False)
    return logprob


def measure(engine: VllmEngine, policy: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """The engine holds the weights of the policy. Some responses end early, by a token and by a string."""
    drawn = generate_all(engine, requests, SAMPLING)
    ending = int(drawn[0].tokens[3])
    stopped = generate_all(engine, requests, dataclasses.replace(SAMPLING, stop_token_ids=(ending,)))
    engine._detokenize = lambda tokens: "".join(f"<{token}>" for token in tokens)
    worded = generate_all(engine, requests, dataclasses.replace(SAMPLING, stop=(f"<{drawn[1].tokens[4]}>",)))
    engine._detokenize = None
    few = [dataclasses.replace(request, prompt=request.prompt[:20]) for request in requests[:3]]
    by_trainer = generate_all(MegatronRollout(policy.engine._engine), few, dataclasses.replace(SAMPLING, max_tokens=4))
    return {
        "vllm": differences(policy, requests, drawn, SAMPLING),
        "top_k": differences(policy, requests, generate_all(engine, requests, TOP_K), TOP_K),
        "stopped": differences(policy, requests, stopped, SAMPLING),
        "worded": differences(policy, requests, worded, SAMPLING),
        "megatron": differences(policy, few, by_trainer, SAMPLING),
        "lengths": [[len(response.tokens) for response in responses] for responses in (drawn, stopped, worded)],
        "greedy": [response.kept for response in generate_all(engine, requests, dataclasses.replace(SAMPLING, temperature=0.0))],
    }


def measure_ties(engine: VllmEngine, policy: Any, requests: Sequence[Request], version: int) -> dict[str, Any]:
    """Every id has a twin with the same logit, and then all ids have the same. Leaves the policy like that."""
    weight = policy.engine.chunks[-1].output_weight()
    found = {}
    for name, change in (("twins", lambda w: w[1::2].copy_(w[0:-1:2])), ("equal", lambda w: w.zero_())):
        with torch.no_grad():
            change(weight)
        engine.push_weights(version)
        responses = generate_all(engine, requests, TOP_K)
        by_trainer = generate_all(MegatronRollout(policy.engine._engine), requests[:2], dataclasses.replace(TOP_K, max_tokens=2))
        found[name] = {
            "vllm": differences(policy, requests, responses, TOP_K),
            "megatron": differences(policy, requests[:2], by_trainer, TOP_K),
        }
    return found
