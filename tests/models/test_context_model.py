"""Whole models under context parallel, alone and with tp, sequence parallel and pp: logits against transformers, gradients against
those of cp 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megappo.data.packing import pack
from megappo.parallel.layout import ParallelLayout
from tests.models import worlds
from tests.models.checkpoints import example_sequences, reference_logits, write_checkpoint
from tests.worlds import spawn_world

LAYOUTS = {
    "cp2": ParallelLayout(4, cp=2),
    "cp4": ParallelLayout(4, cp=4),  # more ranks than KV heads
    "tp2 cp2": ParallelLayout(4, tp=2, cp=2),
    "tp2 cp2 sp": ParallelLayout(4, tp=2, cp=2, sequence_parallel=True),
    "pp2 cp2": ParallelLayout(4, pp=2, cp=2),
}
# A window in all layers, one in the second layer only, queries scaled by position; 4 heads and 2 KV heads. Nothing special under cp
# is in tests/parity.
CASES: dict[str, tuple[str, ...]] = {
    "mistral_window": tuple(LAYOUTS),
    "qwen2_window": ("cp2", "pp2 cp2"),
    "ministral3_tied": ("cp4", "tp2 cp2 sp"),
}
CUT = [(case, layout) for case, layouts in CASES.items() for layout in layouts]
OF_GRADIENTS = [(case, layout) for case, layout in CUT if layout in ("cp2", "cp4")]


def padded_batch(layout: ParallelLayout):
    batch = pack([sequence.tolist() for sequence in example_sequences()])
    total_multiple = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    return batch.padded(2 * layout.cp if layout.cp > 1 else 1, total_multiple)


def load(path: Path, groups, **changes):
    """(arch, the one model chunk of this rank)"""
    from megappo.models.build import build_model
    from megappo.models.hf_config import read_arch
    from megappo.models.hf_import import load_pretrained

    arch = replace(read_arch(path), **changes)
    (model,) = chunks = build_model(arch, groups, dtype=torch.float32)
    load_pretrained(chunks, arch, groups, path)
    return arch, model


def logits(groups, arch, model) -> torch.Tensor | None:
    """[real tokens, vocab] on the last stage, differentiable where tp is 1."""
    from megappo.parallel.context import context_shard

    batch, real = padded_batch(groups.layout)
    context = context_shard(batch.cu_seqlens, groups.cp, torch.device("cpu"))
    hidden = worlds.forward(groups, model, batch.tokens, batch.cu_seqlens, context)
    if hidden is None:
        return None
    if groups.layout.sequence_parallel:
        hidden = joined(hidden, groups.tp, 0)
    local = hidden[:, 0] @ model.output_weight().T
    if context is not None:
        local = context.gather(local)
    if groups.layout.tp > 1:
        local = joined(local, groups.tp, 1)
    return local[real, : arch.vocab_size]


def joined(x: torch.Tensor, group, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def gradients(groups, arch, model, weight) -> dict[str, torch.Tensor]:
    """Of the same loss on every rank, summed over the cp ranks."""
    (logits(groups, arch, model) * weight).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad, group=groups.cp)
    return grads


def compare(rank: int, folder: str) -> dict:
    """(case, layout) -> largest difference of a logit; (case, layout, "gradient") -> largest relative one of a gradient."""
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups

    cpu_patches.install()
    groups = {name: build_groups(layout) for name, layout in LAYOUTS.items()}
    alone = build_groups(ParallelLayout(4))
    errors = {}
    for case in CASES:
        expected = torch.load(Path(folder, f"{case}.pt"))
        for name in CASES[case]:
            arch, model = load(Path(folder, case), groups[name])
            with torch.no_grad():
                ours = logits(groups[name], arch, model)
            if ours is not None:
                errors[case, name] = float((ours - expected).abs().max())
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
        whole = gradients(alone, *load(Path(folder, case), alone), weight)
        for name in (layout for of, layout in OF_GRADIENTS if of == case):
            parts = gradients(groups[name], *load(Path(folder, case), groups[name]), weight)
            assert parts.keys() == whole.keys()
            errors[case, name, "gradient"] = max(relative(parts[key], whole[key]) for key in whole)
    for case, window in (("mistral_window", 8), ("mistral_window", 10), ("qwen2_window", 13)):
        arch, model = load(Path(folder, case), groups["cp2"], sliding_window=window)
        with torch.no_grad():
            wrong = logits(groups["cp2"], arch, model)
        errors["window", case, window] = float((wrong - torch.load(Path(folder, f"{case}.pt"))).abs().max())
    return errors


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict:
    """Results of `compare`, the largest of any rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in CASES:
        torch.save(reference_logits(write_checkpoint(folder / case, case)), folder / f"{case}.pt")
    merged: dict = {}
    for rank in spawn_world(compare, 4, str(folder)):
        merged |= {key: max(error, merged.get(key, 0.0)) for key, error in rank.items()}
    return merged


@pytest.mark.parametrize("case, layout", CUT)
def test_logits_equal_transformers(errors, case, layout) -> None:
    assert errors[case, layout] < 1e-4


@pytest.mark.parametrize("case, layout", OF_GRADIENTS)
def test_gradients_summed_over_the_ranks_are_those_of_one(errors, case, layout) -> None:
    """fp32 sums in another order."""
    assert errors[case, layout, "gradient"] < 1e-5


def test_a_window_that_is_one_off_is_detected(errors) -> None:
    """Negative control: transformers' mask is i - window < j <= i, and one token more or less changes the logits."""
    wrong = {key: error for key, error in errors.items() if key[0] == "window"}
    assert len(wrong) == 3 and min(wrong.values()) > 1e-2, wrong
