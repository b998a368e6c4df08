"""What the tests of models/ run inside a spawned gloo world."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.data.packing import cu_seqlens_of
from megappo.parallel.layout import ParallelLayout
from megappo.platform import cpu

from .checkpoints import example_sequences


@lru_cache(maxsize=None)
def groups_of(tp: int, pp: int, sequence_parallel: bool):
    from megappo.parallel.groups import build_groups

    cpu.install()
    return build_groups(ParallelLayout(dist.get_world_size(), tp, pp, sequence_parallel))


def build(path, layout, *, dtype=torch.float32, recompute="none", critic=False, value_head="zero", seed=0):
    """(arch, groups, loaded model)"""
    groups = groups_of(*layout)
    from megappo.models.arch import read_arch
    from megappo.models.build import build_model
    from megappo.models.hf_import import load_pretrained

    arch = read_arch(path)
    model = build_model(arch, groups, dtype=dtype, recompute=recompute, value_head=critic)
    load_pretrained(model, arch, groups, path, value_head, seed)
    return arch, groups, model


def forward(groups, model, tokens, cu_seqlens):
    """The model's output on the last stage, None on the others; stages follow each other without a schedule. Forward only."""
    at, layout = groups.coordinates, groups.layout
    previous = layout.rank_of(at.tp, at.dp, at.pp - 1) if at.pp else None
    following = layout.rank_of(at.tp, at.dp, at.pp + 1) if at.pp + 1 < layout.pp else None
    if previous is not None:
        shape = torch.empty(3, dtype=torch.long)
        dist.recv(shape, previous)
        hidden = torch.empty(*shape.tolist(), dtype=model.config.params_dtype)
        dist.recv(hidden, previous)
        model.set_input_tensor(hidden)
    output = model(tokens, cu_seqlens)
    if following is None:
        return output
    dist.send(torch.tensor(output.shape), following)
    dist.send(output.detach().contiguous(), following)
    return None


def policy_logits(arch, groups, model, sequences):
    """[T, vocab] on the last stage, gathered over tp, None elsewhere."""
    lengths = [len(s) for s in sequences]
    with torch.no_grad():
        hidden = forward(groups, model, torch.cat(sequences), cu_seqlens_of(lengths))
        if hidden is None:
            return None
        if groups.layout.sequence_parallel:
            parts = [torch.empty_like(hidden) for _ in range(groups.layout.tp)]
            dist.all_gather(parts, hidden.contiguous(), group=groups.tp)
            hidden = torch.cat(parts)
        local = hidden[: sum(lengths), 0] @ model.output_weight().T
        parts = [torch.empty_like(local) for _ in range(groups.layout.tp)]
        dist.all_gather(parts, local, group=groups.tp)
    logits = torch.cat(parts, dim=1)
    assert not logits[:, arch.vocab_size :].any(), "vocabulary padding is not zero"
    return logits[:, : arch.vocab_size]


def logits_errors(rank, folder, cases, layouts):
    """{(case, layout): largest |difference| to transformers} of every last-stage rank."""
    errors = {}
    for case in cases:
        expected = torch.load(Path(folder, f"{case}.pt"))
        for layout in layouts:
            arch, groups, model = build(Path(folder, case), layout)
            logits = policy_logits(arch, groups, model, example_sequences(arch.vocab_size))
            if logits is not None:
                errors[case, layout] = float((logits - expected).abs().max())
    return errors


def export_all(rank, folder, jobs):
    """Import and export again: jobs are (source, target, layout, critic, value_head, shard_bytes)."""
    from megappo.models.hf_export import export_pretrained

    for source, target, layout, critic, value_head, shard_bytes in jobs:
        arch, groups, model = build(Path(folder, source), layout, critic=critic, value_head=value_head)
        export_pretrained(model, arch, groups, Path(folder, target), Path(folder, source), shard_bytes=shard_bytes)
