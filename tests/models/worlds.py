"""Cases that the tests of models/ run inside a spawned gloo world."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.data.packing import cu_seqlens_of
from megappo.parallel import cpu_patches
from megappo.parallel.layout import ParallelLayout
from tests.models.checkpoints import example_sequences


@cache
def groups_of(tp: int, pp: int, sequence_parallel: bool):
    from megappo.parallel.groups import build_groups

    cpu_patches.install()
    return build_groups(ParallelLayout(dist.get_world_size(), tp, pp, sequence_parallel))


def build(path, layout, *, dtype=torch.float32, recompute="none", critic=False, value_head="zero", seed=0, **changes):
    """(arch, groups, loaded model) in a layout of one chunk (tp, pp, sequence_parallel). changes: of the architecture."""
    groups = groups_of(*layout)
    from megappo.models.build import build_model
    from megappo.models.hf_config import read_arch
    from megappo.models.hf_import import load_pretrained

    arch = replace(read_arch(path), **changes)
    chunks = build_model(arch, groups, dtype=dtype, recompute=recompute, value_head=critic)
    load_pretrained(chunks, arch, groups, path, value_head, seed)
    (model,) = chunks
    return arch, groups, model


def packed(groups, sequences):
    """(tokens, cu_seqlens) with one more sequence of zeros where sequence parallel needs a multiple of tp tokens."""
    lengths = [len(s) for s in sequences]
    missing = -sum(lengths) % groups.layout.tp if groups.layout.sequence_parallel else 0
    padding = [torch.zeros(missing, dtype=torch.long)] if missing else []
    return torch.cat([*sequences, *padding]), cu_seqlens_of([*lengths, *(len(p) for p in padding)])


def forward(groups, model, tokens, cu_seqlens, context=None):
    """The model's output on the last stage, None on the others; stages follow each other without a schedule. Forward only."""
    at, layout = groups.coordinates, groups.layout
    previous = layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp - 1) if at.pp else None
    following = layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp + 1) if at.pp + 1 < layout.pp else None
    if previous is not None:
        shape = torch.empty(3, dtype=torch.long)
        dist.recv(shape, previous)
        hidden = torch.empty(*shape.tolist(), dtype=model.config.params_dtype)
        dist.recv(hidden, previous)
        model.set_input_tensor(hidden)
    output = model(tokens, cu_seqlens, context)
    if following is None:
        return output
    dist.send(torch.tensor(output.shape), following)
    dist.send(output.detach().contiguous(), following)
    return None


def policy_logits(arch, groups, model, sequences):
    """[T, vocab] on the last stage, gathered over tp, None elsewhere."""
    lengths = [len(s) for s in sequences]
    with torch.no_grad():
        hidden = forward(groups, model, *packed(groups, sequences))
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


def logits_errors(rank, folder, cases, layouts, dtype=torch.float32):
    """{(case, layout): (largest, root mean square) difference to transformers in fp32} of every last-stage rank."""
    errors = {}
    for case in cases:
        expected = torch.load(Path(folder, f"{case}.pt"))
        for layout in layouts:
            arch, groups, model = build(Path(folder, case), layout, dtype=dtype)
            logits = policy_logits(arch, groups, model, example_sequences())
            if logits is not None:
                difference = logits.float() - expected
                errors[case, layout] = float(difference.abs().max()), float(difference.square().mean().sqrt())
    return errors


def altered_errors(rank, folder, case, alterations):
    """{name: largest difference to transformers} of a model whose architecture was altered, on one rank."""
    expected, errors = torch.load(Path(folder, f"{case}.pt")), {}
    for name, changes in alterations.items():
        logits = policy_logits(*build(Path(folder, case), (1, 1, False), **changes), example_sequences())
        errors[name] = float((logits - expected).abs().max())
    return errors


def export_all(rank, folder, jobs):
    """Import and export again: jobs are (source, target, layout, critic, value_head, shard_bytes)."""
    from megappo.models.hf_export import export_pretrained

    for source, target, layout, critic, value_head, shard_bytes in jobs:
        arch, groups, model = build(Path(folder, source), layout, critic=critic, value_head=value_head)
        export_pretrained([model], arch, groups, Path(folder, target), Path(folder, source), shard_bytes=shard_bytes)


def refused_exports(rank, folder):
    """Messages of export on this rank about a directory that exists, and to a file where one rank of the last stage must write."""
    from megappo.models import hf_export

    def message(out):
        try:
            hf_export.export_pretrained([model], arch, groups, Path(folder, out), Path(folder, "llama"), shard_bytes=60_000)
        except (ValueError, OSError) as error:
            return type(error).__name__, str(error)

    def blocked_start(out, partial, start=hf_export._start):
        start(out, partial)
        for shard in hf_export.plan_shards(arch, groups.layout, False, 4, 60_000)[-1:]:
            (partial / shard.file).mkdir()

    arch, groups, model = build(Path(folder, "llama"), (2, 2, False))
    existing = message("llama")
    original, hf_export._start = hf_export._start, blocked_start
    try:
        blocked = message("blocked")
    finally:
        hf_export._start = original
    return existing, blocked


def built_shapes(rank, folder, cases, layouts):
    """[(case, layout, critic, {name: (shape, dtype, sharded)})] of the really built model, with this rank's coordinates."""
    out = []
    for case in cases:
        for layout in layouts:
            for critic in (False, True):
                from megappo.models.gpt import named_parameters

                _, groups, model = build(Path(folder, case), layout, critic=critic)
                marks = ("tensor_model_parallel", "sequence_parallel")
                facts = {
                    name: (tuple(p.shape), p.dtype, *(getattr(p, mark, False) for mark in marks))
                    for name, p in named_parameters([model]).items()
                }
                out.append((case, layout, critic, groups.coordinates.tp, groups.coordinates.pp, facts))
    return out


def _policy_loss(arch, groups, model, hidden, weight):
    """sum(logits * weight) of this rank's vocabulary shard; Megatron's own mappings sum the gradient of hidden over tp."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

    if groups.layout.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=groups.tp)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=groups.tp)
    local = model.output_weight()
    missing = local.size(0) * groups.layout.tp - weight.size(1)
    shard = torch.nn.functional.pad(weight, (0, missing)).chunk(groups.layout.tp, dim=1)[groups.coordinates.tp]
    return ((hidden[: weight.size(0), 0] @ local.T) * shard).sum()


def train_step(arch, groups, model, sequences, weight, *, critic, distributed_optimizer=False, values=None):
    """One forward and backward through Megatron's DDP and schedule; gradients are reduced. Returns the wrapped model.

    values: a list that gets a critic's [T] on the last stage.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    model.config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, model, pg_collection=groups.collection)
    wrapped.zero_grad_buffer()

    def forward_step(iterator, chunk):
        tokens, cu_seqlens = next(iterator)

        def loss(output):
            if values is not None:
                values.append(output.detach()[: weight.size(0)])
            total = (output[: weight.size(0)] * weight[:, 0]).sum() if critic else _policy_loss(arch, groups, model, output, weight)
            return total, torch.tensor(1, dtype=torch.int), {}

        return chunk(tokens, cu_seqlens), loss

    arguments = dict(
        forward_step_func=forward_step,
        data_iterator=iter([packed(groups, sequences)]),
        model=wrapped,
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
        pg_collection=groups.collection,
    )
    if groups.layout.pp == 1:
        schedules.forward_backward_no_pipelining(**arguments)
    else:
        communicator = P2PCommunicator(pp_group=groups.pp, config=model.config)
        schedules.forward_backward_pipelining_without_interleaving(**arguments, p2p_communicator=communicator)
    return wrapped


def gradients(rank, folder, jobs):
    """Per job this rank's gradient as pieces: [(hf name, box, values)], a critic's "values" among them.

    jobs: (case, layout, critic, recompute).
    """
    from megappo.models.gpt import named_parameters
    from megappo.models.pieces import Box, as_2d
    from megappo.models.weight_map import megatron_pieces

    out = []
    for case, layout, critic, recompute in jobs:
        arch, groups, model = build(Path(folder, case), layout, recompute=recompute, critic=critic, value_head="normal")
        model.train()
        weight = torch.load(Path(folder, "weight.pt"))
        values = [] if critic else None
        train_step(arch, groups, model, example_sequences(), weight, critic=critic, values=values)
        grads = {name: parameter.main_grad for name, parameter in named_parameters([model]).items()}
        out.append(
            [
                (p.hf, p.box, as_2d(grads[p.local])[p.row : p.row + p.box.rows, p.col : p.col + p.box.cols].clone())
                for p in megatron_pieces(arch, groups.layout, rank, critic)
            ]
            + [("values", Box(0, len(one), 0, 1), one[:, None]) for one in values or ()]
        )
    return out


def bf16_critic_step(rank, folder, layouts, lr):
    """(change of the value head, its dtype, head after the step) per layout after one Adam step of the distributed optimizer."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    out = []
    for layout in layouts:
        arch, groups, model = build(Path(folder, "llama"), layout, dtype=torch.bfloat16, critic=True, value_head="normal")
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        weight = torch.load(Path(folder, "weight.pt"))
        wrapped = train_step(arch, groups, model, example_sequences(), weight, critic=True, distributed_optimizer=True)
        config = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            clip_grad=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        optimizer = get_megatron_optimizer(config, [wrapped], pg_collection=groups.collection, use_gloo_process_groups=False)
        assert optimizer.step()[0]
        after = {name: p.detach() for name, p in model.named_parameters()}
        # A step of lr is below the resolution of bf16 norms near 1, but not of the small weights of the projections.
        moved = all(not torch.equal(before[name], after[name]) for name in before if "linear" in name)
        head = after.get("value_head.weight")
        out.append((moved, None if head is None else (head - before["value_head.weight"], head.dtype, head.clone())))
    return out


def run_all(rank, calls):
    """Several of these functions in one world: {name: result}; starting a world costs more than most of them."""
    return {name: fn(rank, *args) for name, (fn, args) in calls.items()}
