"""The import's verdict on damaged checkpoints is that of the plan, which reads their headers: the same line, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megappo.config.role_sections import CriticConfig, PolicyConfig
from megappo.models.hf_config import arch_for
from tests.models.damaged import FILES, ROWS, engines_of, verdict, verdict_of_plan, write_cases
from tests.worlds import spawn_world


def verdicts_of_import(rank: int, folder: Path, rows: list[tuple[str, str, str, str | None]]) -> list[str]:
    """What building an engine says of (damage, case, engine, value head)."""
    from megappo.config.role_sections import ModelConfig
    from megappo.config.run_sections import TimeoutsConfig
    from megappo.engine.build import RoleEngines
    from megappo.engine.factory import EngineSpec
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    found = []
    for damage, case, engine, value_head in rows:
        path = str(folder / damage / case)
        settings: dict[str, Any] = dict(engine=engine, dtype="fp32")
        section = PolicyConfig(model=path, **settings) if value_head is None else CriticConfig(**settings)
        role = "policy" if value_head is None else "critic"
        spec = EngineSpec(role, path, arch_for(path, section.engine), section, value_head=value_head)  # pyright: ignore
        found.append(verdict(lambda: engines.build(spec)))
    return found


def test_the_verdicts_are_those_of_both_engines(tmp_path) -> None:
    write_cases(tmp_path)
    rows = [(damage, case, engine, head) for damage, case, head in ROWS for engine in engines_of(case)]
    rows += [(name, "", engine, None) for name in FILES for engine in ("megatron", "fsdp2")]
    (imported,) = spawn_world(verdicts_of_import, 1, tmp_path, rows)
    planned = [verdict_of_plan(tmp_path / damage / case, engine, head) for damage, case, engine, head in rows]
    assert sum(map(bool, planned)) > len(rows) / 3
    for row, theirs, ours in zip(rows, imported, planned, strict=True):
        assert theirs == ours, row
