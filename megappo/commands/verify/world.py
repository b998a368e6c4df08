"""Work of every rank of a measuring world: measure small runs by their names. `run.py` starts it through `rank.py`.
FOLDER/NAME.json is a small run. Rank 0 writes its results to FOLDER/NAME.pt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megappo.commands.verify.measure import Gathered, Measured, RoleMeasures, measure
from megappo.commands.verify.recording import num_top_k_ids, record_rollouts
from megappo.commands.verify.shrink import IMAGES, SAMPLES, STEPS
from megappo.commands.verify.shrink_model import VOCAB_SIZE
from megappo.config.layout_checks import trained_sections
from megappo.config.role_sections import ModelConfig, with_sections
from megappo.config.schema import TrainConfig
from megappo.data.images import ImageStore
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend, EngineFactory
from megappo.models.implementation import choose_implementation
from megappo.parallel.device import select_device, start_distributed
from megappo.trainer.kernel_selection import choose_kernels


class Results(NamedTuple):
    """Measurements of one run."""

    first: Measured
    """The first step, with the gradients of its first mini-batch, without the distributed optimizer."""
    steps: Measured
    """All steps, with the parameters after them."""


def main(folder: str, names: Sequence[str], backend: EngineBackend = RoleEngines) -> None:
    """Join the world that torchrun described, measure every run and leave."""
    runs = {name: TrainConfig.model_validate_json(Path(folder, f"{name}.json").read_text(encoding="utf-8")) for name in names}
    run = next(iter(runs.values())).run
    images = ImageStore(Path(folder, IMAGES)) if Path(folder, IMAGES).is_dir() else None
    device = select_device(run.device)
    start_distributed(device, run.timeouts)
    for name, config in runs.items():
        choose_kernels(config.kernels, device)
        # By name: for small runs, which are in fp32, `auto` would not take TransformerEngine as the user's run does.
        layers = ModelConfig(impl=choose_implementation(config.model.impl, device.type))
        engines = backend(layers, config.run.timeouts, device)
        results = _measure(config, engines, images)
        if dist.get_rank() == 0:
            torch.save(results, Path(folder, f"{name}.pt"))
        engines.close()
    dist.barrier()
    dist.destroy_process_group()


def _measure(config: TrainConfig, engines: EngineFactory, images: ImageStore | None) -> Results:
    kept = num_top_k_ids(config.rollout.sampling)
    rollouts = record_rollouts(STEPS, sequences=SAMPLES, vocab_size=VOCAB_SIZE, seed=config.run.seed, kept=kept, images=images)
    plain = {
        role: section.model_copy(update={"optimizer": section.optimizer.model_copy(update={"distributed": False})})
        for role, section in trained_sections(config).items()
    }
    first = measure(with_sections(config, plain), rollouts[:1], engines, gradients=True, images=images)
    return Results(first, measure(config, rollouts, engines, parameters=True, images=images))


def read_results(path: Path) -> Results:
    """Read the results of a run. Only tensors, numbers, text and these classes are unpickled."""
    with torch.serialization.safe_globals([Results, RoleMeasures, Gathered]):
        return torch.load(path, weights_only=True)
