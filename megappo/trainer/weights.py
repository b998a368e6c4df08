"""Weights that come into a run, of critics trained before, and that leave it, the exported policy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megappo.checkpoint.store import CheckpointStore
from megappo.config.schema import TrainConfig
from megappo.engine.base import Engine
from megappo.parallel.consensus import RankFault, on_rank_zero, raised_by_all
from megappo.telemetry.runlog import RunLog
from megappo.trainer.build_roles import spec_of_role
from megappo.trainer.prepare.critic_source import critic_source
from megappo.trainer.rundir import RunDir


def load_critics(config: TrainConfig, engines: Mapping[str, Engine], log: RunLog) -> None:
    """Load the weights of `critic.checkpoint`, if set, in place of those of `critic.model`, and so for every critic. engines: by
    role, of those that live here."""
    for role, critic in config.critics.items():
        # Another run may be writing there: rank 0 decides which of its checkpoints all ranks read.
        spec = spec_of_role(config, role, None)
        find = partial(critic_source, critic, spec.arch, spec.model, role)
        source = on_rank_zero(f"finding {role}.checkpoint", find)
        if source is None:
            continue
        store = CheckpointStore(source.directory, keep_last=1)
        store.load_weights(source.role, engines.get(role), source.step, with_head=source.role != "policy")
        log.note(f"{role}: starts from the {source.role} of step {source.step} in {source.directory}")


def export_policy(engine: Engine | None, run_dir: RunDir, source: Path) -> None:
    """Write the policy for transformers and vLLM; an export that a resumed run replaces is renamed. Collective over the world.

    engine: None on ranks that it does not live on.
    """
    if dist.get_rank() == 0 and run_dir.export.exists():
        run_dir.export.rename(run_dir.export_replaced())
    dist.barrier()
    raised_by_all(lambda: None if engine is None else engine.export(run_dir.export, source), ValueError, OSError, RankFault)
