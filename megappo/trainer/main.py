"""Assembles a PPO run from its configuration and runs it on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.algo.kl import AdaptiveKL, FixedKL, KLController
from megappo.checkpoint.manifest import Manifest
from megappo.checkpoint.store import CheckpointStore
from megappo.config.batch import step_arithmetic
from megappo.config.dump import dump_yaml
from megappo.config.layout_checks import roles_in_use
from megappo.config.schema import KLConfig, ParallelConfig, RolloutConfig, TrainConfig
from megappo.data.tokenizers import Tokenizer
from megappo.engine.build import build_frozen, build_trainable
from megappo.engine.megatron import MegatronEngine
from megappo.models.hf_config import read_arch
from megappo.models.hf_export import export_pretrained
from megappo.models.implementation import Implementation, choose_implementation, implementation_of_role
from megappo.parallel.consensus import any_rank, on_rank_zero
from megappo.parallel.groups import ProcessGroups, build_groups, settle
from megappo.parallel.layout import ParallelLayout
from megappo.platform.device import select_device, start_distributed
from megappo.prepare.critic_source import critic_source
from megappo.prepare.data import RunData
from megappo.prepare.layouts import layout_of
from megappo.resilience.signals import StopRequest
from megappo.rewards.compose import Scorer
from megappo.rollout.build import build_rollout
from megappo.rollout.types import SamplingParams
from megappo.telemetry.log import configure_logging
from megappo.telemetry.runlog import RunLog
from megappo.trainer.kernel_selection import select_kernels
from megappo.trainer.ppo import PPO
from megappo.trainer.roles import Critic, LanguageModel, Policy
from megappo.trainer.run_facts import run_facts
from megappo.trainer.rundir import RunDir
from megappo.trainer.shaping import HOST_OPS
from megappo.trainer.state import TrainerState


def train(config: TrainConfig, data: RunData, *, resume: bool, stop: StopRequest | None = None) -> bool:
    """Run PPO on this rank of the world. `config` and `data` have been checked by `plan.run.plan_run`.

    True where the run reached its end, False where a rank was asked to `stop`: it can be resumed then, and `RunDir.stopped` says
    so. A world that exists already is the caller's and stays; otherwise the launcher's is joined and left again.
    """
    owns_world = not dist.is_initialized()
    device = select_device(config.run.device)
    start_distributed(device, config.run.timeouts)
    configure_logging(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(config.run.seed)
    run_dir = RunDir.of(config.run)
    run_dir.claim(config.run, dump_yaml(config), resume=resume)
    store = CheckpointStore(run_dir.checkpoints, config.checkpoint.keep_last, config.checkpoint.save_only_model)
    facts = run_facts(config, data.tokenizer)
    # A checkpoint that cannot be resumed is refused before any model is built.
    manifest = store.find_resumable(facts) if resume else None
    stop = stop or StopRequest()
    parts = _Parts(config, data, run_dir, store, facts, device, stop)
    if manifest is not None:
        parts.resume(manifest)
        run_dir.record_config(dump_yaml(config))
    else:
        parts.load_critic()
    done_before = parts.state.step
    parts.ppo.run()
    parts.log.close()
    finished = not parts.ppo.stopped
    if not finished:
        run_dir.record_stop(parts.state.step, stop.received)
        parts.log.note(f"stopped after step {parts.state.step} with a checkpoint; --resume goes on")
    elif config.checkpoint.export_at_end and (parts.state.step > done_before or not run_dir.is_exported()):
        parts.export(run_dir)
    parts.close()
    if owns_world:
        dist.destroy_process_group()
    return finished


class _Parts:
    """Everything one run is made of."""

    def __init__(
        self,
        config: TrainConfig,
        data: RunData,
        run_dir: RunDir,
        store: CheckpointStore,
        facts: dict[str, Any],
        device: torch.device,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.data = data
        self.store, self._facts = store, facts
        self.log = RunLog(run_dir.root, tensorboard=config.telemetry.tensorboard)

        self._layers = _layers(config, device)
        layers = ", ".join(f"{role}: {chosen}" for role, chosen in self._layers.items())
        self.log.note(f"layers: {layers}; rollout: {config.rollout.engine}")
        select_kernels(config.kernels, device, self.log, host_ops=HOST_OPS)
        self.policy_arch = read_arch(config.policy.model)
        self._groups: dict[ParallelLayout, ProcessGroups] = {}
        for parallel in roles_in_use(config).values():  # while ranks are together: loading takes them different times
            self._groups_of(parallel)
        self.policy_engine = self._build_policy(device)
        self.critic_engine = self._build_critic(device)
        reference = self._build_reference(device)
        sampling = sampling_params(config.rollout, data.tokenizer)
        self.rollout = build_rollout(
            config.rollout,
            self.policy_engine,
            model=config.policy.model,
            arch=self.policy_arch,
            tokenizer=data.tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            policy_dtype=config.policy.dtype,
            logits_dtype=config.policy.logits_dtype,
            seed=config.run.seed,
            device=device,
        )
        temperature = sampling.temperature

        self.state = TrainerState()
        self.kl_controller = kl_controller(config.algorithm.kl)
        self.ppo = PPO(
            config,
            data.total_steps,
            policy=Policy(self.policy_engine, temperature, config.algorithm, config.policy.logits_dtype),
            critic=Critic(self.critic_engine, config.algorithm.value_clip),
            reference=reference,
            rollout=self.rollout,
            sampling=sampling,
            prompts=data.train.prompts,
            loader=data.loader,
            eval_prompts=data.eval.prompts if data.eval else (),
            tokenizer=data.tokenizer,
            scorer=_scorer(config),
            kl_controller=self.kl_controller,
            state=self.state,
            log=self.log,
            save=self.save,
            settle=lambda: settle(self._groups.values(), config.run.timeouts),
            stop_agreed=lambda: any_rank(stop.received is not None),
        )

    # ------------------------------------------------------------------------------------------------------ checkpoints

    @property
    def _engines(self) -> Mapping[str, MegatronEngine]:
        return {"policy": self.policy_engine, "critic": self.critic_engine}

    @property
    def _components(self) -> dict:
        return {"trainer": self.state, "loader": self.data.loader, "kl_controller": self.kl_controller}

    def save(self, step: int) -> None:
        self.store.save(step, self._engines, self._components, self._facts)

    def resume(self, manifest: Manifest) -> None:
        step = self.store.restore(manifest, self._engines, self._components)
        self.log.resume_after(step)
        self.log.note(f"resumed after step {step}")

    def load_critic(self) -> None:
        """The weights that `critic.checkpoint` names, in place of those of `critic.model`."""
        critic, arch = self.config.critic, self.critic_engine.chunks[0].arch
        # Another run may be writing there: rank 0 says which of its checkpoints is meant.
        source = on_rank_zero("finding critic.checkpoint", lambda: critic_source(critic, arch))
        if source is None:
            return
        store = CheckpointStore(source.directory, keep_last=1)
        store.load_weights(source.role, self.critic_engine, source.step, with_head=source.role == "critic")
        self.log.note(f"critic: starts from the {source.role} of step {source.step} in {source.directory}")

    def export(self, run_dir: RunDir) -> None:
        """Write the policy for transformers and vLLM; the export that a resumed run replaces keeps another name."""
        if dist.get_rank() == 0 and run_dir.export.exists():
            run_dir.export.rename(run_dir.export_replaced())
        dist.barrier()
        engine = self.policy_engine
        with engine.eval_mode():
            export_pretrained(engine.chunks, self.policy_arch, engine.groups, run_dir.export, Path(self.config.policy.model))

    def close(self) -> None:
        self.rollout.close()
        dist.barrier()

    # ----------------------------------------------------------------------------------------------------------- models

    def _groups_of(self, parallel: ParallelConfig) -> ProcessGroups:
        """Roles with the same layout share their groups."""
        layout = layout_of(parallel, dist.get_world_size())
        if layout not in self._groups:
            self._groups[layout] = build_groups(layout, self.config.run.timeouts)
        return self._groups[layout]

    def _build_policy(self, device: torch.device) -> MegatronEngine:
        config = self.config
        steps = max(1, self.data.total_steps - config.critic.warmup_steps)
        return build_trainable(
            "policy",
            config.policy.model,
            self.policy_arch,
            config.policy,
            self._groups_of(config.policy.parallel),
            device=device,
            total_updates=steps * step_arithmetic(config).optimizer_steps,
            seed=config.run.seed,
            implementation=self._layers["policy"],
        )

    def _build_critic(self, device: torch.device) -> MegatronEngine:
        config = self.config
        path = config.critic.model or config.policy.model
        return build_trainable(
            "critic",
            path,
            read_arch(path),
            config.critic,
            self._groups_of(config.critic.parallel),
            device=device,
            total_updates=self.data.total_steps * step_arithmetic(config).optimizer_steps,
            seed=config.run.seed,
            value_head=config.critic.value_head,
            implementation=self._layers["critic"],
        )

    def _build_reference(self, device: torch.device) -> LanguageModel | None:
        config = self.config
        if config.algorithm.kl.placement == "none":
            return None
        path = config.reference.model or config.policy.model
        engine = build_frozen(
            "reference",
            path,
            read_arch(path),
            config.reference,
            self._groups_of(config.reference.parallel),
            device=device,
            offload=config.reference.offload,
            implementation=self._layers["reference"],
        )
        return LanguageModel(engine, config.rollout.sampling.temperature, config.policy.logits_dtype)


def _layers(config: TrainConfig, device: torch.device) -> dict[str, Implementation]:
    """Role -> implementation of its layers."""
    chosen, requested = choose_implementation(config.model.impl, device.type), config.model.impl
    return {role: implementation_of_role(chosen, requested, getattr(config, role).dtype) for role in roles_in_use(config)}


def sampling_params(rollout: RolloutConfig, tokenizer: Tokenizer) -> SamplingParams:
    s = rollout.sampling
    return SamplingParams(
        rollout.max_response_tokens, s.temperature, s.top_p, s.top_k, rollout.stop, tokenizer.eos_ids, s.replay_kept_tokens
    )


def kl_controller(kl: KLConfig) -> KLController:
    if kl.controller == "adaptive":
        return AdaptiveKL(kl.coef, kl.target, kl.horizon)
    return FixedKL(kl.coef)


def _scorer(config: TrainConfig) -> Scorer:
    reward = config.reward
    parts = [(part.name, part.weight) for part in reward.parts]
    return Scorer(parts, reward.missing_eos_penalty, reward.length_penalty, reward.length_penalty_start)
