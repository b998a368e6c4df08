"""Parallel sizes that a model allows; every rule names key, value and fix. Rules for any model: `config/layout_checks.py`."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.batch import nearest_divisors
from megappo.config.errors import problem
from megappo.config.role_sections import ParallelConfig
from megappo.models.arch import ModelArch, check_cp, check_ep, check_tp
from megappo.models.implementation import Implementation


def model_problems(section: str, parallel: ParallelConfig, arch: ModelArch, implementation: Implementation) -> Iterator[str]:
    """Yield the sizes that the model does not allow, one line each. section: such as `policy.parallel`."""
    try:
        check_tp(arch, parallel.tp)
    except ValueError as error:
        yield problem(f"{section}.tp", parallel.tp, str(error))
        return  # the rules below divide by tp
    yield from _layer_problems(section, parallel, arch.num_layers)
    yield from _head_problems(section, parallel, arch, implementation)
    yield from _expert_problems(section, parallel, arch)


def _layer_problems(section: str, parallel: ParallelConfig, layers: int) -> Iterator[str]:
    pp, vpp, given = parallel.pp, parallel.vpp, parallel.layers_per_stage
    if given:
        if sum(given) != layers:
            fix = f"adds up to {sum(given)} and the model has {layers} layers; change an entry, or leave it out for an even split"
            yield problem(f"{section}.layers_per_stage", list(given), fix)
        return
    # An uneven split is no way out if there are fewer layers than chunks: every chunk needs one.
    uneven = ", or give an uneven split in layers_per_stage" if pp * vpp <= layers else ""
    if layers % pp:
        yield problem(f"{section}.pp", pp, f"does not divide the {layers} layers into stages; use {_or(layers, pp)}{uneven}")
    elif layers // pp % vpp:
        stage = f"the {layers // pp} layers of a stage ({layers} layers / pp {pp})"
        yield problem(f"{section}.vpp", vpp, f"does not divide {stage} into chunks; use {_or(layers // pp, vpp)}{uneven}")


def _head_problems(section: str, parallel: ParallelConfig, arch: ModelArch, implementation: Implementation) -> Iterator[str]:
    try:
        check_cp(arch, parallel.tp, parallel.cp, implementation)
    except ValueError as error:
        yield problem(f"{section}.cp", parallel.cp, str(error))


def _expert_problems(section: str, parallel: ParallelConfig, arch: ModelArch) -> Iterator[str]:
    for axis, ep, etp in (("ep", parallel.ep, 1), ("etp", 1, parallel.etp)):
        try:
            check_ep(arch, ep, etp)
        except ValueError as error:
            yield problem(f"{section}.{axis}", getattr(parallel, axis), str(error))
    if arch.moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        # Without it every tp rank would dispatch the same tokens, and each expert would see them tp times.
        fix = f"tp {parallel.tp} with experts needs it (Megatron-core refuses to train without); set it to true, or tp to 1"
        yield problem(f"{section}.sequence_parallel", False, fix)


def _or(number: int, wanted: int) -> str:
    return " or ".join(map(str, nearest_divisors(number, wanted)))
