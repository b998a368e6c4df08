"""Distributions of a teacher on given texts: its likeliest next tokens at every token that is learned, computed where it lives and
sent to the ranks of the policy."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.algo.alignment import shift_left, shift_right
from megappo.data.packing import PackedBatch
from megappo.engine.losses import LanguageOutput, LossOutput
from megappo.parallel.shares import Shares
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.route import Route, world_wire
from megappo.trainer.experience.table import Owners
from megappo.trainer.kinds.kind import Drawn
from megappo.trainer.roles import Teacher

IDS, LOGPROBS = "teacher_id", "teacher_logprob"
"""Fields of a batch, [T, K] each: the teacher's likeliest ids for the token at t given its prefix, and their log-probs."""
_ROWS = 256  # rows of whole logits at a time: 155 MB for the largest vocabularies


def with_teacher(batch: PackedBatch, drawn: Drawn, roles: Roles, top_k: int, vocab_size: int) -> PackedBatch:
    """Add IDS and LOGPROBS to the policy's share of a pass, on its ranks that hold fields. vocab_size: of the policy, whose ids
    alone count. Collective over the world."""
    shares, world = roles.shares["teacher"], Shares.of_world(dist.get_world_size())
    teacher, names = roles.by_name.get("teacher"), [f"{field} {i}" for field in (IDS, LOGPROBS) for i in range(top_k)]
    fields = dict.fromkeys(names, torch.empty(0))
    if teacher is not None:
        assert isinstance(teacher, Teacher)
        report = partial(_report, top_k=top_k, vocab_size=vocab_size)
        with teacher.engine.eval_mode():
            share = drawn.share(shares).batch
            fields = teacher.engine.forward_backward(share, report, reads=("response_mask",), forward_only=True).tokens
    # By way of single ranks: only the reporters of a replica have its results, and all holders of the policy's read them.
    hops = [drawn.owners(one) for one in (shares, world, roles.shares["policy"])]
    for source, target in zip(hops, hops[1:]):
        fields = _sent(fields, drawn.sequence_lengths, source, target)
    if not fields:
        return batch
    ids, logprobs = (torch.stack([fields[name] for name in part], -1) for part in (names[:top_k], names[top_k:]))
    return batch.with_fields({IDS: ids.long(), LOGPROBS: logprobs})


def _sent(fields: dict[str, Tensor], lengths: Tensor, source: Owners, target: Owners) -> dict[str, Tensor]:
    return Route.between(lengths, source, target, dist.get_rank(), world_wire()).moved(None, fields)[1]


def _report(output: LanguageOutput, micro: PackedBatch, top_k: int, vocab_size: int) -> LossOutput:
    ids = torch.zeros(micro.num_tokens, top_k, device=micro.device)  # fp32, as results are, holds every id
    logprobs = torch.zeros_like(ids)
    # The output before a token that is learned gives its distribution.
    learned = shift_left(micro["response_mask"], micro.cu_seqlens, 0).nonzero().flatten()
    for rows in learned.split(_ROWS) if len(learned) else ():
        found = torch.log_softmax(output.logits(rows, "fp32")[:, :vocab_size], -1).topk(top_k)
        ids[rows], logprobs[rows] = found.indices.float(), found.values
    aligned = {field: shift_right(values, micro.cu_seqlens) for field, values in ((IDS, ids), (LOGPROBS, logprobs))}
    return LossOutput(tokens={f"{field} {i}": values[:, i] for field, values in aligned.items() for i in range(top_k)})
