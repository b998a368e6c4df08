"""A policy that trains beside an engine, and how far the engine's answers are from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megappo.data.packing import pack
from megappo.models.hf_config import read_arch
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.types import Request, Response
from tests.engine.runs import recorded_batch
from tests.engine.whole import on_whole_batches
from tests.rollout.responses import sequence


def make_policy(
    path: str, layout: ParallelLayout, device: torch.device = torch.device("cpu"), lora: Any = None, freeze: Sequence[str] = ()
) -> Any:
    """A policy at temperature 1 in a layout of the world, on whole batches; one step moves what trains by about 1e-2."""
    from megappo.config.role_sections import OptimizerConfig, PolicyConfig
    from megappo.config.schema import AlgorithmConfig
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.parallel.groups import build_groups
    from megappo.trainer.roles import Policy

    optimizer = OptimizerConfig(lr=1e-2, eps=1e-5)
    config = PolicyConfig(model=path, dtype="fp32", micro_batch_tokens=256, optimizer=optimizer, lora=lora, freeze=tuple(freeze))
    spec = EngineSpec("policy", path, read_arch(path), config, total_updates=10)
    engine = build_megatron(spec, build_groups(layout), device=device)
    return on_whole_batches(Policy(engine, 1.0, AlgorithmConfig()))


def train_once(policy: Any) -> None:
    batch = recorded_batch()
    batch = batch.with_fields({"logprob": policy.logprobs(batch)[0]})
    with policy.engine.train_mode():
        policy.update(batch, float(batch["weight"].sum()))


def train_frozen(policy: Any, freeze: Sequence[str]) -> tuple[set[str], set[str]]:
    """(tensors of this rank that the patterns name, those of them that `train_once` changes)"""
    engine = policy.engine
    names = {piece.local: f".{piece.hf}." for piece in engine.pieces()[dist.get_rank()]}
    named = {local for local in engine.named_parameters() if any(f".{pattern}." in names.get(local, "") for pattern in freeze)}
    before = {local: engine.named_parameters()[local].detach().clone() for local in named}
    train_once(policy)
    return named, {local for local, one in before.items() if not torch.equal(engine.named_parameters()[local], one)}


def of_responses(policy: Any, requests: Sequence[Request], responses: Sequence[Response]) -> list[torch.Tensor]:
    """The trainer's log-probs of the sampled tokens."""
    batch = pack([sequence(request, response) for request, response in zip(requests, responses, strict=True)])
    logprob, _ = policy.logprobs(batch, want_entropy=False)
    return [logprob[end - len(r.tokens) : end] for end, r in zip(batch.cu_seqlens[1:].tolist(), responses)]


def distance(policy: Any, requests: Sequence[Request], responses: Sequence[Response]) -> float:
    """Largest |log-prob of the engine - log-prob of the trainer| of a sampled token."""
    return float(_distances(policy, requests, responses).max())


def mean_distance(policy: Any, requests: Sequence[Request], responses: Sequence[Response]) -> float:
    return float(_distances(policy, requests, responses).mean())


def _distances(policy: Any, requests: Sequence[Request], responses: Sequence[Response]) -> torch.Tensor:
    pairs = zip(responses, of_responses(policy, requests, responses), strict=True)
    return torch.cat([(torch.from_numpy(response.logprobs) - own.cpu()).abs() for response, own in pairs])
