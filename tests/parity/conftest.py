"""The worlds of the parity matrix and of its faults, started once (one rank, two, four), and the step written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.commands.verify.recording import record_rollouts
from megappo.config.batch import update_schedule
from megappo.parallel.shares import Shares
from megappo.trainer.experience.collect import sample_seed
from megappo.trainer.experience.experience import Experience
from megappo.trainer.updates import first_epoch, mini_batches
from tests.parity.faults import measure_faults
from tests.parity.matrix import MODELS, SEQUENCES, VOCABULARY, config_of, run_world, write_models
from tests.parity.oracle import Numbers, Outcome, Sample, ppo_step
from tests.worlds import spawn_world


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of policy and reference by model."""
    folders = {model: tmp_path_factory.mktemp("parity") / model for model in MODELS}
    for model, folder in folders.items():
        write_models(folder, model)
    return folders


def measure_all(rank: int, folders: dict[str, str], losses: bool = True) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(`run_world`, `measure_faults`) of rank 0."""
    measured, faulty = run_world(rank, folders, losses), measure_faults(folders)
    return measured, faulty if rank == 0 else {}


@pytest.fixture(scope="session")
def worlds(models) -> dict[int, tuple[dict, dict]]:
    """world size -> `measure_all`."""
    folders = {model: str(folder) for model, folder in models.items()}
    return {size: spawn_world(measure_all, size, folders)[0] for size in (1, 2, 4)}


@pytest.fixture(scope="session")
def measured(worlds) -> dict[int, dict]:
    """world size -> model -> title -> Measured."""
    return {size: measured for size, (measured, _) in worlds.items()}


@pytest.fixture(scope="session")
def faulty(worlds) -> dict[str, Any]:
    """fault -> Measured with it."""
    return {name: found for _, faulty in worlds.values() for name, found in faulty.items()}


@pytest.fixture(scope="session")
def expected(models) -> dict[str, Outcome]:
    outcomes = {}
    for model, folder in models.items():
        config = config_of(folder)
        outcomes[model] = ppo_step(
            folder / "policy", folder / "reference", samples(), order_of(config), numbers_of(config), config.run.seed
        )
    return outcomes


def samples() -> list[Sample]:
    (batch,) = record_rollouts(1, sequences=SEQUENCES, vocab_size=VOCABULARY)
    cuts = batch.cu_seqlens.tolist()
    return [
        Sample(batch.tokens[a:b], batch["response_mask"][a:b], float(batch["score"][i]), bool(batch["truncated"][i]))
        for i, (a, b) in enumerate(zip(cuts, cuts[1:]))
    ]


def order_of(config) -> list[list[int]]:
    """Mini-batches by their samples: found by content, as the order itself is arbitrary."""
    (batch,) = record_rollouts(1, sequences=SEQUENCES, vocab_size=VOCABULARY)
    numbered = batch.with_fields(sequence_fields={"number": torch.arange(SEQUENCES)})
    seed, alone = sample_seed(config.run.seed, 1, -1), Shares.of_ranks([0])
    schedule = update_schedule(config, "policy")
    whole = first_epoch(Experience.of_whole(numbered), alone, ("number",), schedule.mini_batch_size, seed)
    minis = mini_batches(whole, alone, None, schedule, config.rollout.max_response_tokens, seed)
    return [mini.share["number"].tolist() for mini in minis]


def numbers_of(config) -> Numbers:
    a, o = config.algorithm, config.policy.optimizer
    return Numbers(
        config.rollout.sampling.temperature,
        a.gamma,
        a.lam,
        a.kl.coef,
        a.loss.clip_low,
        config.critic.loss.clip,
        a.entropy.coef,
        o.lr,
        o.eps,
        o.betas,
        o.weight_decay,
        o.clip_grad,
        config.policy.router_aux_coef,
    )
