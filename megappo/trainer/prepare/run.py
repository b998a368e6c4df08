"""Prepares a PPO run before its first model is built: the configuration to run, its data, and notes. `data.fit_batch` lowers batch
sizes to what the data and the ranks can fill, and never raises them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm

from megappo.config.checks import Device
from megappo.config.errors import ConfigError
from megappo.config.keys import replaced
from megappo.config.layout_checks import placement_problems, reads_trajectories, trained_sections
from megappo.config.rank_ranges import ranks_of
from megappo.config.role_sections import key_of_role
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, SupervisedConfig
from megappo.data.prompt_rows import open_cache
from megappo.data.prompts import PromptSet
from megappo.models.arch import ModelArch
from megappo.trainer.prepare.checks import check_run
from megappo.trainer.prepare.data import RunData, load_run_data, load_train_prompts
from megappo.trainer.prepare.recorded import RecordedData, load_recorded_data
from megappo.trainer.prepare.supervised import SupervisedData, load_supervised_data


def fit_if_asked(config: AnyConfig, world_size: int, *, shapes_only: bool) -> tuple[AnyConfig, PromptSet | None, tuple[str, ...]]:
    """Return (configuration to run, training prompts if they were read, notes); unchanged without `data.fit_batch`."""
    if isinstance(config, SupervisedConfig) or not config.data.fit_batch:
        return config, None, ()
    cache = open_cache(config.run)
    train = None if shapes_only or reads_trajectories(config) else load_train_prompts(config, cache)
    config, notes = fit_batch(config, world_size, len(train) if train is not None else None)
    return config, train, (*notes, *cache.notes)


def fit_batch(config: TrainConfig, world_size: int, num_prompts: int | None) -> tuple[TrainConfig, tuple[str, ...]]:
    """Lower `data.prompts_per_step` and the mini-batch sizes until they fit; return the configuration and notes on the changes.
    A step takes at most all prompts. Its samples and those of a mini-batch, which divides the step, divide evenly over the
    data-parallel ranks of policy and critics; with fewer samples than ranks, some ranks get none. num_prompts: after the filter;
    None if unknown, then only the ranks count."""
    critics = max(1, len(config.critics_in_use))  # each trains on its own part of the samples
    replicas = _replicas(config, world_size) * critics
    n = config.rollout.samples_per_prompt
    unit = replicas // gcd(replicas, n)  # prompts whose samples divide over the replicas
    asked = config.data.prompts_per_step
    prompts = min(asked, num_prompts) if num_prompts else asked
    prompts -= prompts % unit if prompts >= unit else 0
    sizes = {"algorithm.mini_batch_size": config.algorithm.mini_batch_size}
    fitting = {key: _mini_batch(prompts * n, size, replicas) for key, size in sizes.items()}
    for role, critic in config.critics_in_use.items():
        if critic.mini_batch_size is not None:
            key = f"{key_of_role(role)}.mini_batch_size"
            sizes[key] = critic.mini_batch_size
            fitting[key] = _mini_batch(prompts * n // critics, critic.mini_batch_size, replicas // critics)
    notes = []
    if prompts != asked:
        of_data = f"of {num_prompts:,} prompts " if num_prompts is not None else ""
        ranks = f"{replicas // critics} data-parallel ranks" + (f", for {critics} critics" if critics > 1 else "")
        notes.append(f"data.fit_batch: data.prompts_per_step {asked} -> {prompts} ({of_data}on {ranks})")
    for key, size in sizes.items():
        if fitting[key] != size:
            notes.append(f"data.fit_batch: {key} {size} -> {fitting[key]} (of {prompts * n} samples a step)")
    fitted = replaced(config, ["data", "prompts_per_step"], prompts)
    for key, size in fitting.items():
        fitted = replaced(fitted, key.split("."), size)
    return (fitted, tuple(notes)) if notes else (config, ())


def _mini_batch(samples: int, asked: int, replicas: int) -> int:
    """Return the largest divisor of `samples` up to `asked`, a multiple of the replicas if there is one."""
    fitting = [size for size in range(1, min(asked, samples) + 1) if samples % size == 0]
    even = [size for size in fitting if size % replicas == 0]
    return max(even or fitting)


def _replicas(config: TrainConfig, world_size: int) -> int:
    """Return the least common multiple of the trained roles' data-parallel sizes."""
    for message in placement_problems(config, world_size):
        raise ConfigError(message)  # before it is counted on ranks that the world lacks
    dps = [1]
    for section in trained_sections(config).values():
        size, ranks = section.parallel.tp * section.parallel.pp * section.parallel.cp, len(ranks_of(section.ranks, world_size))
        # A layout that does not divide its ranks is refused later; it does not count here.
        dps += [ranks // size] if ranks % size == 0 else []
    return lcm(*dps)


AnyData = RunData | RecordedData | SupervisedData
"""Data of a run of any kind."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start, if it fits its memory."""

    config: AnyConfig
    """The configuration that runs, with fitted batches (`data.fit_batch`)."""
    data: AnyData
    """Recorded trajectories or examples if the run reads them."""
    notes: tuple[str, ...]


def prepare_run(config: AnyConfig, world_size: int, device: Device, *, resume: bool = False) -> PreparedRun:
    """Check a run and load its data, but leave its memory to `megappo plan`. ValueError, one line, for the first mistake."""
    config, train, fitted = fit_if_asked(config, world_size, shapes_only=False)
    checked = check_run(config, world_size, device, resume=resume, shapes_only=False)
    data = load_data(config, checked.archs, train)
    return PreparedRun(config, data, (*fitted, *checked.notes, *data.notes))


def load_data(config: AnyConfig, archs: Mapping[str, ModelArch], train: PromptSet | None) -> AnyData:
    """Load the examples or recorded trajectories of a run that reads them, else tokenizer and prompts. train: as in
    `load_run_data`."""
    if isinstance(config, SupervisedConfig):
        return load_supervised_data(config, archs)
    if reads_trajectories(config):
        return load_recorded_data(config, archs)
    return load_run_data(config, archs["policy"], train)
