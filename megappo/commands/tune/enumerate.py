"""Every layout that a model allows on a number of ranks, and the secondary choices that go with it. Sizes are divisors.
`config/layout_checks.py` and `trainer/prepare/layouts.py` decide which are legal, as for `megappo plan`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain

from megappo.config.layout_checks import parallel_problems
from megappo.config.role_sections import ParallelConfig
from megappo.models.arch import ModelArch
from megappo.models.implementation import Implementation
from megappo.rollout.vllm_limits import cut_sizes, kv_heads_fit
from megappo.trainer.prepare.layouts import model_problems

MOST_MICRO_BATCH_TOKENS = 65536
CHOICES_OF_TOKENS = 4  # budgets of 1, 2, 4 and 8 longest sequences


@cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def layouts(arch: ModelArch, world_size: int, implementation: Implementation = "local") -> Iterator[ParallelConfig]:
    """Yield every legal choice of tp, sequence_parallel, pp, vpp, cp, ep and etp; layers_per_stage only without an even split."""
    for tp in divisors(world_size):
        # Refuse a bad tp here, and a bad cp below: each would have hundreds of combinations.
        if not _legal(ParallelConfig(tp=tp, sequence_parallel=tp > 1), arch, world_size, implementation):
            continue
        for cp in divisors(world_size // tp):
            if not _legal(ParallelConfig(tp=tp, cp=cp, sequence_parallel=tp > 1), arch, world_size, implementation):
                continue
            for pp in divisors(world_size // (tp * cp)):
                for ep, etp in _expert_sizes(arch, world_size // pp):
                    yield from _variants(arch, world_size, implementation, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def _expert_sizes(arch: ModelArch, ranks_per_stage: int) -> Iterator[tuple[int, int]]:
    if arch.moe is None:
        yield 1, 1
        return
    for ep in divisors(arch.moe.num_experts):
        for etp in divisors(arch.moe.ffn_size):
            if ranks_per_stage % (ep * etp) == 0:
                yield ep, etp


def _variants(
    arch: ModelArch, world_size: int, implementation: Implementation, *, pp: int, tp: int, **sizes: int
) -> Iterator[ParallelConfig]:
    for sequence_parallel in (False,) if tp == 1 else (True, False):
        common = {**sizes, "tp": tp, "pp": pp, "sequence_parallel": sequence_parallel}
        for vpp in range(1, arch.num_layers // pp + 1) if pp > 1 else [1]:  # every chunk has a layer
            split = nearly_even(arch.num_layers, pp * vpp) if arch.num_layers % (pp * vpp) else ()
            if split is None:
                continue
            parallel = ParallelConfig(**common, vpp=vpp, layers_per_stage=split)
            if _legal(parallel, arch, world_size, implementation):
                yield parallel


def nearly_even(num_layers: int, parts: int) -> tuple[int, ...] | None:
    """Layers per stage (or chunk) if `parts` does not divide them: one less on the last, or on the last and the first. None if that
    does not suffice, or leaves a stage without a layer."""
    # The ends hold the output and the embedding; Llama 3 (2024, section 3.3.2) takes a layer from each end.
    least, larger = divmod(num_layers, parts)
    smaller = parts - larger
    if smaller > 2 or least == 0:
        return None
    first = smaller - 1
    return (least,) * first + (least + 1,) * larger + (least,)


def _legal(parallel: ParallelConfig, arch: ModelArch, world_size: int, implementation: Implementation) -> bool:
    problems = chain(parallel_problems("", parallel, world_size), model_problems("", parallel, arch, implementation))
    return next(problems, None) is None


def rollout_sizes(arch: ModelArch, world_size: int) -> list[int]:
    """Every rollout.tp that divides the model and the ranks."""
    return [tp for tp in divisors(world_size) if all(size % tp == 0 for _, size in cut_sizes(arch)) and kv_heads_fit(arch, tp)]


def token_budgets(configured: int, longest: int) -> list[int]:
    """Micro-batch budgets to try, in tokens, ascending: the configured one, and 1, 2, 4, ... longest sequences."""
    sizes = {longest << power for power in range(CHOICES_OF_TOKENS) if longest << power <= MOST_MICRO_BATCH_TOKENS}
    return sorted(sizes | {max(configured, longest)})


def recompute_choices(configured: str | None) -> list[str]:
    """Recomputation to try. configured: None for a role that does not train."""
    # `selective` saves nothing if attention stores no scores (`commands/plan/activations.py`), so it is tried only if configured;
    # offload is for engine fsdp2 alone.
    if configured is None:
        return ["none"]
    return list(dict.fromkeys(["none", "full", configured]))
