"""Bytes of tensors that are alive while something runs, and what the engines of a role hold in each of their modes.

`Live` sees every tensor that an operator makes, so its peak is what an allocator without gaps would need, on any device.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.memory import RoleMemory, role_memory
from megappo.config.loading import validated
from megappo.config.role_sections import section_of
from megappo.models.arch import ModelArch
from megappo.parallel.layout import ParallelLayout

REPEATS, SHORT_REPEATS = 3, 8  # at most, of passes with a backward, and of those without, which end before gloo's threads do


class Live(TorchDispatchMode):
    """Counts the storages made inside. known: those that are there already."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def peak_of(what: Callable[[], object], known: Iterable[Tensor], repeats: int = REPEATS) -> int:
    """The most bytes alive at once that `what` makes. Cycles are not collected meanwhile: a GPU's allocator does not wait."""
    known = list(known)

    def peak() -> int:
        live = Live(known)
        with live:
            what()
        return live.peak

    gc.collect()
    gc.disable()
    try:
        return least(peak, repeats)
    finally:
        gc.enable()


def least(measure: Callable[[], int], repeats: int) -> int:
    """The least of at most `repeats` measurements: on a busy machine gloo's threads let go of what they have sent late, which only
    adds. The world stops once every rank has found its least twice: chance does not add the same bytes two times. Collective.
    """
    import torch.distributed as dist

    found: list[int] = []
    for _ in range(repeats):
        found.append(measure())
        again = torch.tensor(found.count(min(found)) > 1)
        dist.all_reduce(again, op=dist.ReduceOp.MIN)
        if again:
            break
    return min(found)


@functools.cache
def groups_of(world_size: int, **axes: Any) -> Any:
    """Process groups, once for each layout of this rank's world: every one has threads that poll."""
    from megappo.parallel.groups import build_groups

    return build_groups(ParallelLayout(world_size, **axes))


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes behind the tensors, each storage once; what is parked has none."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def role_of(
    arch: ModelArch,
    axes: dict[str, Any],
    dtype: torch.dtype,
    recompute: Any,
    critic: bool,
    budget: int,
    *,
    offload: bool = False,
    device: str = "cpu",
    implementation: Any = "local",
    lora: Any = None,
) -> tuple[Any, list[Any]]:
    """(policy or critic with an engine of random weights on all ranks of the world, its wrapped chunks)."""
    import torch.distributed as dist

    from megappo.config.role_sections import OptimizerConfig
    from megappo.config.schema import AlgorithmConfig
    from megappo.engine.megatron import MegatronEngine
    from megappo.engine.megatron_optimizer import Optimizer, wrap_with_ddp
    from megappo.engine.role_engine import EngineSettings
    from megappo.models.build import build_model
    from megappo.models.lora_linear import attach_adapters
    from megappo.trainer.roles import Critic, Policy

    groups = groups_of(dist.get_world_size(), **axes)
    chunks = build_model(arch, groups, dtype=dtype, recompute=recompute, value_head=critic, implementation=implementation)
    adapters = None if lora is None else attach_adapters(chunks, arch, groups, lora, role="role", seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.normal_(0, 0.02)
    wrapped = wrap_with_ddp(chunks, groups, distributed_optimizer=True)
    engine = MegatronEngine(
        "role",
        wrapped,
        groups,
        EngineSettings(torch.device(device), budget, ("parameters", "gradients", "optimizer") if offload else ()),
        optimizer=Optimizer(wrapped, groups, OptimizerConfig(), 1),
        adapters=adapters,
    )
    return Critic(engine) if critic else Policy(engine, 1.0, AlgorithmConfig()), wrapped


def batch_of(lengths: Sequence[int], vocab_size: int) -> Any:
    from megappo.data.packing import PackedBatch, cu_seqlens_of

    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(1)
    fields = {name: 0.01 * torch.randn(tokens, generator=generator) for name in ("logprob", "advantage", "value", "returns")}
    ids = torch.randint(0, vocab_size, (tokens,), generator=generator)
    return PackedBatch(ids, cu_seqlens_of(lengths)).with_fields({**fields, "weight": torch.ones(tokens)})


def share_of(engine: Any, batch: Any) -> Any:
    """The sequences of this rank's replica."""
    from megappo.engine.whole_batch import sequences_of_share

    return batch.select(sequences_of_share(engine, batch))


def peaks(
    arch: ModelArch,
    axes: dict,
    dtype: torch.dtype,
    recompute: str,
    critic: bool,
    lengths: list[int],
    budget: int,
    lora: Any = None,
) -> tuple:
    """Bytes of (a pass without gradients, forward and backward passes) on this rank, beyond weights, gradients and optimizer."""
    role, wrapped = role_of(arch, axes, dtype, recompute, critic, budget, lora=lora)
    engine, batch = role.engine, share_of(role.engine, batch_of(lengths, arch.vocab_size))
    # gloo sums the gradients through copies of the whole buffer, NCCL in place.
    wrapped[0].module.config.finalize_model_grads_func = lambda *args, **kwargs: None
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    known = [tensor for buffer in buffers for tensor in (buffer.grad_data, buffer.param_data) if tensor is not None]
    known += list(engine.named_parameters().values())
    forward = peak_of(lambda: role.values(batch) if critic else role.logprobs(batch), known, SHORT_REPEATS)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        trained = peak_of(lambda: engine.forward_backward(batch, role._loss_of, reads=batch.token_fields, denominator=1.0), known)
    return forward, trained


def modes(arch: ModelArch, axes: dict, critic: bool, lengths: list[int]) -> dict[str, tuple[int, int, int]]:
    """mode -> bytes of (weights, gradients, optimizer) of a role that offloads everything, in the order of a step."""
    role, wrapped = role_of(arch, axes, torch.bfloat16, "none", critic, sum(lengths), offload=True)
    engine, batch = role.engine, share_of(role.engine, batch_of(lengths, arch.vocab_size))
    optimizer = engine._optimizer
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    found: dict[str, tuple[int, int, int]] = {}

    def look(mode: str) -> None:
        weights = held(engine.named_parameters().values())
        found[mode] = weights, held(b.grad_data for b in buffers), held(engine._optimizer_tensors())

    def seen(mode: str, step: Callable) -> Callable:
        def stepping() -> Any:
            result = step()
            look(mode)
            return result

        return stepping

    engine.offload_idle()
    look("rest")
    with engine.eval_mode():
        look("log-probs")
    with engine.train_mode():
        look("update")
        optimizer.step = seen("optimizer step", optimizer.step)
        role.update(batch, 1.0)
        look("update after a step")
    look("rest after")
    engine.save_state(with_optimizer=True)
    look("checkpoint")
    engine.release_state()
    look("rest at the end")
    return found


def described(arch: ModelArch, axes: dict) -> tuple[int, int, int]:
    """Bytes that a checkpoint's description makes on this rank; the same if it copied what it describes; bytes of the optimizer."""
    from megappo.engine import megatron_optimizer_state as state

    role, _ = role_of(arch, axes, torch.bfloat16, "none", False, 64)
    engine = role.engine
    engine.save_state(with_optimizer=True)  # creates the moments
    known = [*engine._optimizer.tensors(), *engine.named_parameters().values()]

    def describe() -> None:
        engine._described = None  # else it is that of the save before
        engine.save_state(with_optimizer=True)

    made = peak_of(describe, known)
    usual = state._local_values
    state._local_values = lambda *of: {name: values.clone() for name, values in usual(*of).items()}
    try:
        copied = peak_of(describe, known)
    finally:
        state._local_values = usual
    return made, copied, sum(tensor.nbytes for tensor in engine._optimizer.tensors())


def planned_on_one_gpu(arch: ModelArch, budget: int, recompute: Any, critic: bool, *, adam_buffers: bool) -> RoleMemory:
    """Plan of a role in bf16 on one rank, in two micro-batches of `budget` tokens. adam_buffers: of torch's own Adam."""
    return role_memory(
        arch,
        ParallelLayout(1),
        0,
        RoleWork(
            dtype="bf16",
            trained=True,
            micro_batch_tokens=budget,
            num_micro_batches=2,
            value_head=critic,
            recompute=recompute,
            adam_buffers=adam_buffers,
        ),
    )


def statistics_in_steps(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`linear_stats` outside of its operator."""
    from megappo.ops.linear_blocks import LinearLogits
    from megappo.ops.linear_stats import stats_in_blocks

    *given, want_entropy, keep_logits, chunk_tokens = arguments
    return stats_in_blocks(LinearLogits(*given), want_entropy, keep_logits, chunk_tokens)


def own_peaks(path: str, section: Any, role: str, length: int = 64) -> tuple[int, int, int, int]:
    """Bytes of (a pass without gradients, forward and backward passes) of a role under engine fsdp2 on this rank, beyond weights,
    gradients and optimizer; and the plan's. section: its keys beside the model; of 1,024 tokens in sequences of `length` in all.
    """
    import torch.distributed as dist

    from benchmarks.harness.alive import alive_peak
    from megappo.commands.plan.estimate import memory_of_stages
    from megappo.config.schema import TrainConfig
    from megappo.engine.build import RoleEngines
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import arch_for
    from megappo.parallel.layout import layout_of
    from megappo.trainer.roles import Critic, Policy

    samples = 1024 // length
    keys = {"model": path, "engine": "fsdp2", "micro_batch_tokens": 512, **section}
    config = validated(
        {
            "policy": keys if role == "policy" else {"model": path},
            **({"critic": keys} if role == "critic" else {}),
            "data": {"train": "none", "max_prompt_tokens": length // 2, "prompts_per_step": samples},
            "rollout": {"engine": "megatron", "max_response_tokens": length // 2, "samples_per_prompt": 1},
            "algorithm": {"mini_batch_size": samples},
        },
        TrainConfig,
    )
    arch, settings, critic = arch_for(path, "fsdp2"), section_of(config, role), role == "critic"
    layout = layout_of(settings.parallel, dist.get_world_size())
    planned = memory_of_stages(config, role, arch, layout, [0], "cpu")[0]
    engines = RoleEngines(config.model, config.run.timeouts, torch.device("cpu"))
    head = {"value_head": "zero"} if critic else {}
    spec = EngineSpec(role, path, arch, settings, total_updates=10, random_weights=True, **head)  # type: ignore[arg-type]
    engine: Any = engines.build(spec)
    batch = share_of(engine, batch_of([length] * samples, arch.vocab_size))
    which: Any = Critic(engine) if critic else Policy(engine, 1.0, config.algorithm)
    with engine.train_mode():
        engine.optimizer_zero_grad()
    known = [*engine.named_parameters().values(), *engine.named_gradients().values(), *engine._optimizer.tensors()]

    def train() -> None:
        # What an operator makes inside is not seen: the log-probs' statistics are computed by its steps.
        with mock.patch.object(torch.ops.megappo, "linear_stats", statistics_in_steps), engine.train_mode():
            engine.forward_backward(batch, which._loss_of, reads=batch.token_fields, denominator=1.0)

    def score() -> object:
        return which.values(batch) if critic else which.logprobs(batch, want_entropy=True)

    forward = least(lambda: alive_peak(score, known), SHORT_REPEATS)
    trained = least(lambda: alive_peak(train, known), 6)
    return forward, trained, planned.forward, planned.activations
