"""Supervised fine-tuning on demonstrations: the warm-up before PPO, with the same engine, ops and loss normalisation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.config.dump import dump_yaml
from megappo.config.redaction import redacted_values
from megappo.config.run_directory import apply_permissions
from megappo.config.schema import SftConfig
from megappo.data.loader import PromptLoader
from megappo.data.packing import PackedBatch
from megappo.data.texts import DemonstrationSet
from megappo.engine.base import Engine
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend, EngineFactory
from megappo.engine.losses import LanguageOutput, LossOutput
from megappo.engine.whole_batch import pass_whole_batch
from megappo.parallel.device import select_device, start_distributed
from megappo.runtime.ending import input_accepted
from megappo.runtime.sections import EXPORT, Sections
from megappo.runtime.watchdog import Watchdog
from megappo.telemetry.console import configure_logging
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.timers import StageTimers
from megappo.telemetry.trackers.tensorboard import TensorBoard
from megappo.trainer.build_roles import spec_of_role
from megappo.trainer.kernel_selection import select_kernels
from megappo.trainer.preflight import watched
from megappo.trainer.prepare.data import SftData
from megappo.trainer.replicas import ReplicaCheck
from megappo.trainer.roles import LanguageModel
from megappo.trainer.rundir import RunDir
from megappo.trainer.step_totals import expert_metrics


def train_sft(config: SftConfig, data: SftData, engines: EngineBackend = RoleEngines) -> None:
    """Train on this rank of the world, then export the model to `export/` of the run directory. Collective over the world.
    config, data: checked by `prepare.checks.check_run`. engines: builds the model."""
    apply_permissions(config.run.permissions)
    device = select_device(config.run.device)
    start_distributed(device, config.run.timeouts)
    configure_logging(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(config.run.seed)
    run_dir = RunDir.of(config.run)
    with run_dir.claim(config.run, dump_yaml(config), resume=False, saves=False):
        with watched(config.run.timeouts, run_dir.root) as watchdog:
            _train(config, data, run_dir, engines(config.model, config.run.timeouts, device), device, watchdog)
    dist.destroy_process_group()


def _train(
    config: SftConfig, data: SftData, run_dir: RunDir, factory: EngineFactory, device: torch.device, watchdog: Watchdog
) -> None:
    log = RunLog(
        run_dir.root, {"tensorboard": TensorBoard(run_dir.root / "tensorboard")}, redacted_values(config.model_dump(mode="json"))
    )
    log.note(f"layers: {factory.describe(config.policy)}")
    select_kernels(config.kernels, device, log)

    trainer = config.trainer
    factory.connect([config.policy])
    engine = factory.build(spec_of_role(config, "policy", trainer.steps))
    assert engine is not None, "fine-tuning is on all ranks"
    with input_accepted():
        run_sft(
            engine,
            data.demonstrations,
            steps=trainer.steps,
            batch_size=trainer.batch_size,
            seed=config.run.seed,
            log=log,
            settle=factory.settle,
            sections=watchdog.sections,
            replica_check_every=config.run.replica_check_every,
        )
        log.close()
        with watchdog.section(EXPORT):
            engine.export(run_dir.export, Path(config.policy.model), data.tokenizer)
        run_dir.record_finish(trainer.steps)
        dist.barrier()


def run_sft(
    engine: Engine,
    demonstrations: DemonstrationSet,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    log: RunLog,
    settle: Callable[[], None],
    sections: Sections,
    replica_check_every: int,
) -> None:
    """Take `steps` optimizer steps; the loss is the mean negative log-prob of response tokens over the whole batch.
    replica_check_every: steps between comparisons of weight copies, 0 for none."""
    check_replicas = ReplicaCheck({engine.name: engine})
    loader = PromptLoader(len(demonstrations), batch_size, shuffle=True, seed=seed)
    model, reads = LanguageModel(engine, temperature=1.0), ("response_mask", *LanguageModel.sampling_fields)

    def loss(output: LanguageOutput, micro: PackedBatch) -> LossOutput:
        logprob, _ = model.token_logprobs(output, micro, want_entropy=False)
        summed = -torch.where(micro["response_mask"], logprob, 0.0).sum()
        return LossOutput(loss_sum=summed, sums={"loss_sum": summed})

    for step in range(1, steps + 1):
        timers = StageTimers(observer=sections.of_step(step))
        batch = demonstrations.packed(loader.next_step())
        num_tokens = int(batch["response_mask"].sum())
        with timers.stage("update"), engine.train_mode():
            engine.optimizer_zero_grad()
            result = pass_whole_batch(engine, batch, loss, reads=reads, denominator=num_tokens)
            lr = engine.lr_scheduler_step()
            taken = engine.optimizer_step()
        settle()
        if replica_check_every and (step % replica_check_every == 0 or step == steps):
            with timers.stage("check_replicas"):
                check_replicas()
        log.sft_step(
            {
                Metric.SFT_LOSS.value: result.sums["loss_sum"] / num_tokens,
                Metric.SFT_GRAD_NORM.value: taken.grad_norm,
                Metric.SFT_LR.value: lr,
                Metric.TOKENS_PER_S.value: batch.num_tokens / timers.total_s,
                **({} if result.router is None else expert_metrics("sft", result.router.tokens, result.router.balance_loss)),
            },
            step,
            steps,
        )
