"""Runs in the world of test_recipes.py: every recipe's first two steps, of some a third one after a resume, through `train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.commands.plan.run import plan_run
from megappo.config.loading import load_config
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.rollout import vllm_options
from megappo.trainer import assembly, main
from megappo.trainer.evaluation import Evaluation
from megappo.trainer.ppo import PPO
from tests.engine.whole import on_whole_batches

PROBE_LENGTHS = (7, 1, 40, 12, 150)


def probe_sequences(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in PROBE_LENGTHS]


class ProbedPPO(PPO):
    """The loop; after its last step it records what the engine's policy says of the probe sequences."""

    probe: PackedBatch
    said: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self) -> Evaluation | None:
        result = super().run()
        type(self).said = on_whole_batches(self.training.roles.policy).logprobs(self.probe)
        return result


def run_recipes(rank: int, jobs: Sequence[tuple[str, Path, list[str], bool]], vocab_size: int) -> dict[str, Any]:
    """name -> (logprob [T], entropy [T]) of the exported policy on the probe sequences. jobs: (name, recipe, overrides, whether it
    is resumed for a third step)."""
    sequences = probe_sequences(vocab_size)
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    ProbedPPO.probe = PackedBatch(tokens, cu_seqlens_of([len(sequence) for sequence in sequences]))
    assembly.PPO = ProbedPPO
    vllm_options.CPU_KV_CACHE_GIB = 0.03  # recipes set a share of a GPU's memory, beside which no key may say so
    said = {}
    for name, recipe, overrides, resumes in jobs:
        try:
            run(recipe, [*overrides, "trainer.steps=2"], resume=False)
            if resumes:
                run(recipe, [*overrides, "trainer.steps=3"], resume=True)
        except BaseException as error:
            error.add_note(f"in the run of {name}")
            raise
        said[name] = ProbedPPO.said
    return said


def run(recipe: Path, overrides: list[str], *, resume: bool) -> None:
    config = load_config(recipe, overrides)
    planned = plan_run(config, dist.get_world_size(), "cpu")
    main.train(config, planned.data, resume=resume)
