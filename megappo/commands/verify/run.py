"""`megappo verify CONFIG`: measure a small version of the run in its layout and on one rank, and compare. Starts the worlds one
after the other, as `megappo train` starts its ranks, and reads the files that they write."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

from megappo.commands.launch.local import start_worlds
from megappo.commands.verify.compare import (
    LEGEND,
    PARAMETER_TOLERANCE,
    TOLERANCE,
    Difference,
    bisection,
    compare,
    difference_table,
    first_cause,
    verdict,
)
from megappo.commands.verify.shrink import (
    SAMPLES,
    STEPS,
    Run,
    features,
    fewest_ranks,
    implementation_of,
    on_one_rank,
    one_at_a_time,
    placement_notes,
    small_run,
)
from megappo.commands.verify.world import Results, read_results
from megappo.config.checks import Device, check_config
from megappo.config.errors import ConfigError, problem
from megappo.config.layout_checks import roles_in_use, trained_sections
from megappo.config.loading import explicit_keys
from megappo.config.rank_ranges import ALL, ranks_of
from megappo.config.role_sections import key_of_role, section_of
from megappo.config.schema import TrainConfig
from megappo.models.hf_config import read_arch
from megappo.models.implementation import choose_implementation
from megappo.parallel.layout import layout_of
from megappo.runtime.ending import input_accepted
from megappo.telemetry.tables import table
from megappo.trainer.prepare.checks import check_kernels
from megappo.trainer.prepare.layouts import check_layouts, model_paths, read_archs

LAYOUT, ALONE = "layout", "one rank"
PRELOADED = ("megappo.commands.verify.world", "megappo.engine.megatron")
"""Imports that the measuring ranks share."""


def verify(
    config: TrainConfig,
    device: Device,
    *,
    max_ranks: int,
    tolerance: float = TOLERANCE,
    bisect: bool = False,
    rank_module: str = "megappo.commands.verify.rank",  # the program of every rank
) -> int:
    """Print the table and the verdict; returns 0 if all agrees, 1 if not, or the exit code of a rank that failed. ValueError, one
    line, if the configuration cannot work. Parameters after the steps may differ ten times as much as the rest."""
    _check(config, device)
    if device == "cuda":
        max_ranks = min(max_ranks, torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="megappo-verify-") as name:
        folder = Path(name)
        implementation, notes = implementation_of(config, device)
        run, given_up = small_run(config, folder, max_ranks, implementation)
        said = (*given_up, *placement_notes(config, run), *notes)
        print("\n".join([*_described(run), *(f"note: {note}" for note in said)]), flush=True)
        runs = {LAYOUT: run, ALONE: on_one_rank(run), **(one_at_a_time(run) if bisect else {})}
        with input_accepted():
            code = _measure(runs, folder, rank_module)
            if code != 0:
                return code
            results = {name: read_results(_file(folder, name, "pt")) for name in runs}
            return _report(run, results, tolerance, in_smaller_layouts=bool(given_up))


def _check(config: TrainConfig, device: Device) -> None:
    """Check like `megappo plan`, for the run's own number of ranks or the fewest possible, but without weights and data."""
    ranks = config.run.num_ranks
    if ranks is None:
        ranks = fewest_ranks(config)
    check_config(config, explicit_keys(config), ranks, device)
    check_kernels(config.kernels, device)
    for role, section in trained_sections(config).items():
        if section.in_8_bits:
            fix = "weights in 8 bits are other numbers than those of the one rank that verify compares with; remove it to verify"
            raise ConfigError(problem(f"{key_of_role(role)}.lora.base_bits", 8, fix))
    for key, path in model_paths(config).values():
        try:
            read_arch(path)
        except ValueError as error:
            fix = f"verify compares with one rank of engine megatron, which cannot run it ({error}); use a model of a family"
            raise ConfigError(problem(key, path, fix)) from None
    check_layouts(config, read_archs(config), ranks, choose_implementation(config.model.impl, device))


def _described(run: Run) -> list[str]:
    lines = [
        f"{STEPS} PPO steps of {SAMPLES} recorded samples in fp32, on {run.world_size} ranks and on one with reference kernels:"
    ]
    rows = []
    for role, parallel in roles_in_use(run.config).items():
        arch = read_arch(section_of(run.config, role).model)
        others = [
            name for name in features(run.config, role, run.world_size) if "." in name or name in ("engine", "recompute", "offload")
        ]
        ranks = section_of(run.config, role).ranks
        layout = str(layout_of(parallel, len(ranks_of(ranks, run.world_size))))
        where = [] if ranks == ALL else [f"on ranks {ranks}"]
        rows.append((role, f"{arch.family} of {arch.num_layers} layers", layout, ", ".join([*where, *others])))
    return [*lines, *table(rows[0], rows[1:], left=4)]


def _measure(runs: Mapping[str, Run], folder: Path, rank_module: str) -> int:
    """Run all measurements, one world for each number of ranks. Returns the first exit code that is not 0."""
    worlds: dict[int, list[str]] = defaultdict(list)
    for name, run in runs.items():
        _file(folder, name, "json").write_text(run.config.model_dump_json(), encoding="utf-8")
        worlds[run.world_size].append(name)
    # The largest first, because the ranks of later worlds get its number of threads.
    stems = {size: [_file(folder, name, "json").stem for name in worlds[size]] for size in sorted(worlds, reverse=True)}
    return start_worlds([(size, [str(folder), *names]) for size, names in stems.items()], rank_module, PRELOADED)


def _file(folder: Path, name: str, suffix: str) -> Path:
    return folder / f"{name.replace(' ', '-').replace('.', '-')}.{suffix}"


def _report(run: Run, results: Mapping[str, Results], tolerance: float, *, in_smaller_layouts: bool) -> int:
    differences = {name: _differences(results[name], results[ALONE], tolerance) for name in results if name != ALONE}
    first, steps = differences.pop(LAYOUT)
    rows = _rows(first, steps)
    print(f"\n{difference_table(rows)}\n{LEGEND}\n")
    alone = {name: first_cause(*others) for name, others in differences.items()}
    if alone:
        print(f"{bisection(alone)}\n")
    cause = first_cause(first, steps)
    print(verdict(cause, len(rows), alone, in_smaller_layouts=in_smaller_layouts))
    return int(any(difference is not None for difference in (cause, *alone.values())))


def _differences(measured: Results, baseline: Results, tolerance: float) -> tuple[list[Difference], list[Difference]]:
    """Differences of (the first step with its gradients, all steps with the parameters after them)."""
    looser = tolerance * PARAMETER_TOLERANCE / TOLERANCE
    return compare(measured.first, baseline.first, tolerance, looser), compare(measured.steps, baseline.steps, tolerance, looser)


def _rows(first: list[Difference], steps: list[Difference]) -> list[Difference]:
    """Rows of the table, role by role: all steps, and the gradients of the first."""
    last = {(d.role, d.quantity): d for d in (*first, *steps)}
    roles = dict.fromkeys(d.role for d in steps)
    return [d for role in roles for d in last.values() if d.role == role]
