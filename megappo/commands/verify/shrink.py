"""The small version of a user's run that `megappo verify` measures. It keeps what could make numbers depend on the layout:
families, layouts, recomputation, optimizer, offload, algorithm. It changes settings that would hide a difference or take time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

from megappo.commands.verify.recording import LONGEST_RESPONSE, LONGEST_SEQUENCE
from megappo.commands.verify.shrink_layouts import FittedLayouts, fit_layouts, fit_placed, ranks_needed, split_layers
from megappo.commands.verify.shrink_model import small_config, write_images, write_model
from megappo.config.layout_checks import placements_in_use, require_whole_steps, roles_in_use
from megappo.config.rank_ranges import ALL, ranges_of, ranks_of
from megappo.config.role_sections import (
    AnyCriticConfig,
    CriticConfig,
    ParallelConfig,
    PolicyConfig,
    RoleConfig,
    TrainableConfig,
    key_of_role,
    section_of,
    with_sections,
)
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.hf_config import arch_of, read_arch, read_config
from megappo.models.implementation import Implementation, choose_implementation
from megappo.parallel.layout import placement_of
from megappo.trainer.prepare.layouts import model_paths

# Two mini-batches in a step: the second sees weights that the first has moved.
STEPS, SAMPLES, MINI_BATCH = 3, 12, 6
IMAGES = "images"
"""Folder of the images that samples show, beside the models."""
# Texts in each update, with `algorithm.ptx`.
TEXTS = 5
# In a second epoch ratios are far from 1, so that clipping is measured. A third would show nothing new.
MOST_EPOCHS = 2
# Room for a few sequences: several micro-batches in a mini-batch, with different numbers of sequences.
MICRO_BATCH_TOKENS = 64
# Large: the few steps move every weight by far more than its rounding.
LEARNING_RATE = 1e-3
# Largest world that a note asks for. Users do not start more ranks to verify.
MOST_NAMED_RANKS = 32
# With the usual 1e-8 Adam turns the rounding noise of gradients near zero into full steps of random sign.
ADAM_EPS = 1e-5


class Run(NamedTuple):
    """A small run and the number of ranks that it is measured on."""

    config: TrainConfig
    world_size: int


def small_run(config: TrainConfig, folder: Path, max_ranks: int, implementation: Implementation) -> tuple[Run, tuple[str, ...]]:
    """Write the models of a small version of `config` below `folder`, and return (the run, notes on layouts that did not fit).
    Roles that share a checkpoint share a small one."""
    require_whole_steps(config, "verify")
    fitted = _fit_placed(config, max_ranks) or fit_layouts(roles_in_use(config), max_ranks)
    paths = {role: path for role, (_, path) in model_paths(config).items()}
    parallel, models = _write_models(paths, fitted.parallel, folder, implementation)
    sections: dict[str, Any] = {}
    for role in paths:
        section = section_of(config, role)
        changes: dict[str, Any] = {
            "model": models[role],
            "parallel": parallel[role],
            "ranks": fitted.ranks.get(role, ALL),
            "dtype": "fp32",  # half types differ by their rounding
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
        }
        if isinstance(section, PolicyConfig):
            changes["logits_dtype"] = "fp32"
        if isinstance(section, TrainableConfig):
            optimizer = {"lr": LEARNING_RATE, "eps": ADAM_EPS, "warmup_steps": 0}
            changes["optimizer"] = section.optimizer.model_copy(update=optimizer)
            changes["freeze"] = tuple({"visual"} & {*section.freeze})  # others name layers that the small model may not have
        if isinstance(section, CriticConfig):
            changes["warmup"] = None
        if isinstance(section, AnyCriticConfig):
            # A head of zeros would let no gradient reach the layers.
            changes |= {"value_head": "normal", "checkpoint": None}
            if section.mini_batch_size is not None:
                changes["mini_batch_size"] = MINI_BATCH
            if section.ppo_epochs is not None:
                changes["ppo_epochs"] = min(section.ppo_epochs, MOST_EPOCHS)
        sections[role] = section.model_copy(update=changes)
    # Without warm-ups and target KL every step updates both models.
    epochs = min(config.algorithm.ppo_epochs, MOST_EPOCHS)
    ptx = config.algorithm.ptx and config.algorithm.ptx.model_copy(update={"batch_size": TEXTS})
    algorithm = {"mini_batch_size": MINI_BATCH, "ppo_epochs": epochs, "target_kl": None, "ptx": ptx}
    small = with_sections(
        config,
        {
            **sections,
            "algorithm": config.algorithm.model_copy(update=algorithm),
            "rollout": config.rollout.model_copy(update={"max_response_tokens": LONGEST_RESPONSE, "ranks": ALL}),
            "model": config.model.model_copy(update={"impl": implementation}),
            "run": config.run.model_copy(update={"num_ranks": None}),  # the small world's number holds
        },
    )
    return Run(small, fitted.world_size), fitted.notes


def fewest_ranks(config: TrainConfig) -> int:
    """Smallest world of the layouts. With roles on ranks of their own, the world of all ranks that they name."""
    named = [ranges_of(text)[-1].stop for text in placements_in_use(config).values() if text != ALL]
    if named:
        return max(named)
    replicas = config.rollout.tp if config.rollout.engine == "vllm" else 1
    return lcm(replicas, *(ranks_needed(parallel) for parallel in roles_in_use(config).values()))


def _placed(config: TrainConfig) -> list[str]:
    """Roles that do not live on all ranks of the run's world."""
    world_size = config.run.num_ranks or fewest_ranks(config)
    return [role for role in roles_in_use(config) if not placement_of(section_of(config, role).ranks, world_size).is_whole]


def _fit_placed(config: TrainConfig, max_ranks: int) -> FittedLayouts | None:
    """Layouts in a small world with roles on ranks of their own, as in the run; None if they have none, or if there is no room."""
    if not _placed(config):
        return None
    wanted, world_size = roles_in_use(config), config.run.num_ranks or fewest_ranks(config)
    texts = {role: section_of(config, role).ranks for role in wanted}
    ranks = {role: [range(world_size)] if text == ALL else ranges_of(text) for role, text in texts.items()}
    # FSDP2 keeps two replicas: with one it would shard nothing.
    sharded = {role for role, parallel in wanted.items() if sum(map(len, ranks[role])) > ranks_needed(parallel)}
    replicas = {role: 2 if role in sharded and section_of(config, role).engine == "fsdp2" else 1 for role in wanted}
    return fit_placed(wanted, ranks, replicas, world_size, max_ranks)


def placement_notes(config: TrainConfig, run: Run) -> Iterator[str]:
    """Two lines if roles have ranks of their own in the run for which the small version `run` has no room."""
    placed = _placed(config)
    if not placed or any(section_of(run.config, role).ranks != ALL for role in placed):
        return
    needed = next((most for most in range(2, MOST_NAMED_RANKS + 1) if _fit_placed(config, most) is not None), None)
    asked = f"more than --max-ranks {MOST_NAMED_RANKS}" if needed is None else f"--max-ranks {needed}"
    yield f"all roles are verified on all ranks of this small world; on ranks of their own they need {asked}"
    keys = " ".join(f"{key_of_role(role)}.ranks={ALL}" for role in placed)
    yield f"exchanges between ranks of different roles are not measured; compare trainer.steps=3 with one of {keys}"


def _write_models(
    paths: Mapping[str, str], parallel: Mapping[str, ParallelConfig], folder: Path, implementation: Implementation
) -> tuple[dict[str, ParallelConfig], dict[str, str]]:
    """(role -> its layout of the small model, role -> directory of that model)."""
    users: dict[str, list[str]] = defaultdict(list)
    for role, path in paths.items():
        users[path].append(role)
    layouts: dict[str, ParallelConfig] = {}
    models: dict[str, str] = {}
    for seed, (path, roles) in enumerate(users.items()):
        num_layers, splits = split_layers([parallel[role] for role in roles])
        target = folder / f"model-{roles[0]}"
        small = small_config(read_config(path), num_layers, splits, implementation)
        write_model(target, small, seed)
        vision = arch_of(small).vision
        if vision is not None and not (folder / IMAGES).is_dir():  # all roles see the same ones
            write_images(folder / IMAGES, vision)
        layouts |= dict(zip(roles, splits))
        models |= {role: str(target) for role in roles}
    return layouts, models


def implementation_of(config: TrainConfig, device_type: str) -> tuple[Implementation, tuple[str, ...]]:
    """Layers to measure with, and a note if they are not the run's. ValueError as for a run."""
    # TransformerEngine is measured only if it is requested by name, and needs a wider --tolerance: it multiplies fp32 matrices in
    # TF32, whose rounding hides real differences. Its context parallelism has only half-precision kernels.
    wanted = choose_implementation(config.model.impl, device_type)
    if wanted == "local":
        return wanted, ()
    if any(parallel.cp > 1 for parallel in roles_in_use(config).values()):
        return "local", ("layers are Megatron-core's own: TransformerEngine has no context parallelism in fp32",)
    if config.model.impl == "transformer_engine":
        return wanted, ("TransformerEngine multiplies fp32 matrices in TF32: differences of 1e-3 are its rounding",)
    other = "model.impl=transformer_engine measures those of the run, in TF32"
    return "local", (f"layers are Megatron-core's own, which multiply in fp32; {other}",)


_AXES = ("tp", "sequence_parallel", "pp", "vpp", "cp", "ep", "etp")
_SETTINGS = ("engine", "ranks", "compile", "reduce_once", "recompute", "offload", "micro_batch_tokens")
DISTRIBUTED, DP, ENGINE, KERNELS, RANKS = "optimizer.distributed", "dp", "engine", "kernels", "ranks"


def on_one_rank(run: Run) -> Run:
    """The baseline: Megatron's engine with reference kernels, without parallelism, sharding, recomputation or offload."""
    plain = {role: _plain(run.config, role) for role in roles_in_use(run.config)}
    return Run(with_sections(run.config, {**plain, KERNELS: "reference"}), 1)


def features(config: TrainConfig, role: str, world_size: int) -> list[str]:
    """Features of this role that `on_one_rank` removes."""
    section, plain = section_of(config, role), _plain(config, role)
    parallel = section.parallel
    found = [axis for axis in _AXES if getattr(parallel, axis) != getattr(plain.parallel, axis)]
    if len(ranks_of(section.ranks, world_size)) > parallel.tp * parallel.cp * parallel.pp:
        found.append(DP)
    found += [key for key in _SETTINGS if getattr(section, key, None) != getattr(plain, key, None)]
    if isinstance(section, TrainableConfig) and section.engine == "megatron" and section.optimizer.distributed:
        found.append(DISTRIBUTED)
    return found


def one_at_a_time(run: Run) -> dict[str, Run]:
    """Feature of `run` -> the baseline with this feature alone and the settings it requires."""
    used = {role: features(run.config, role, run.world_size) for role in roles_in_use(run.config)}
    alone = on_one_rank(run).config
    runs: dict[str, Run] = {}
    if run.config.kernels != alone.kernels:
        runs[KERNELS] = Run(alone.model_copy(update={KERNELS: run.config.kernels}), 1)
    for feature in dict.fromkeys(feature for found in used.values() for feature in found):
        config = with_sections(
            alone, {role: _with_feature(run.config, role, feature if feature in found else None) for role, found in used.items()}
        )
        world_size = lcm(*(ranks_needed(parallel) for parallel in roles_in_use(config).values()))
        if feature in (DP, DISTRIBUTED, ENGINE):
            world_size = min(2, run.world_size)  # two copies are enough to see a difference
        if feature == RANKS:
            world_size = run.world_size
        runs[feature] = Run(config, world_size)
    return runs


def _plain(config: TrainConfig, role: str) -> RoleConfig:
    section = section_of(config, role)
    changes: dict[str, Any] = {"engine": "megatron", RANKS: ALL, "compile": False, "parallel": ParallelConfig(), "offload": ()}
    changes["micro_batch_tokens"] = SAMPLES * LONGEST_SEQUENCE
    if isinstance(section, TrainableConfig):
        optimizer = section.optimizer.model_copy(update={"distributed": False})
        changes |= {
            "reduce_once": False,
            "recompute": "none",
            "optimizer": optimizer,
        }
    return section.model_copy(update=changes)


def _with_feature(config: TrainConfig, role: str, feature: str | None) -> RoleConfig:
    section, plain = section_of(config, role), _plain(config, role)
    if feature in _AXES:
        return plain.model_copy(update={"parallel": _one_axis(section.parallel, feature, read_arch(section.model))})
    if feature in ("compile", "reduce_once"):  # with the engine that has it
        return plain.model_copy(update={"engine": section.engine, feature: True})
    if feature == "recompute" and isinstance(section, TrainableConfig) and section.recompute == "offload":
        return plain.model_copy(update={"engine": section.engine, feature: "offload"})
    if feature in _SETTINGS:
        return plain.model_copy(update={feature: getattr(section, feature)})
    if feature == DISTRIBUTED:
        return plain.model_copy(update={"optimizer": section.optimizer})
    return plain


def _one_axis(parallel: ParallelConfig, axis: str, arch: ModelArch) -> ParallelConfig:
    keys = {"sequence_parallel": ("tp", "sequence_parallel"), "vpp": ("pp", "vpp")}.get(axis, (axis,))
    if axis in ("pp", "vpp") and parallel.layers_per_stage:
        keys = ("pp", "vpp", "layers_per_stage")  # pp alone may not divide the layers
    if axis == "tp" and arch.moe is not None:
        keys = ("tp", "sequence_parallel")  # tp with experts requires sequence parallel
    return ParallelConfig.model_validate({key: getattr(parallel, key) for key in keys})
