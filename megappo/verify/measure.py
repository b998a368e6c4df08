"""Replays recorded rollouts in given layouts through the trainer's own stages 4 to 6, and keeps everything that comes out.

What the stages do is `trainer/`; here the roles are built as for a run, with an engine around the engine that writes down what
passes. `compare.py` holds two measurements against each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megappo.config.schema import TrainConfig
from megappo.data.packing import PackedBatch
from megappo.engine.base import LossFunction, PassResult, StepResult
from megappo.engine.build import build_frozen, build_trainable
from megappo.engine.megatron import MegatronEngine
from megappo.models.arch import ModelArch
from megappo.models.hf_config import read_arch
from megappo.models.implementation import Implementation
from megappo.parallel.groups import ProcessGroups
from megappo.trainer.experience import sample_seed
from megappo.trainer.roles import Critic, LanguageModel, Policy, add_model_outputs
from megappo.trainer.shaping import shape_advantages
from megappo.trainer.updates import mini_batches, run_updates
from megappo.verify.gather import Gathered, gather_tensors

# Quantities of a role's updates, one number for each mini-batch.
LOSS, GRAD_NORM = "loss", "gradient norm"
_LOSS_SUM = {"policy": "surrogate_sum", "critic": "loss_sum"}


@dataclass
class RoleMeasures:
    """What one role gave. Per quantity one tensor for every step, in the order of the rollouts.

    values: per token [T] (logprobs, values, ...), per sequence [B] (bootstrap), or per mini-batch [updates] (loss, gradient
    norm). metrics: name -> [updates]; sums are divided by the loss's denominator. gradients: of the first mini-batch. parameters:
    after the last step. Both are gathered on request, and there on rank 0 only; everything else is the same on every rank.
    """

    values: dict[str, list[Tensor]] = field(default_factory=dict)
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: Gathered | None = None
    parameters: Gathered | None = None

    def add(self, quantity: str, numbers: Tensor) -> None:
        """One step's numbers of a quantity."""
        self.values.setdefault(quantity, []).append(numbers.double())


Measured = dict[str, RoleMeasures]
"""policy, critic, reference (where one is built), and experience: rewards, advantages and returns."""


def measure(
    config: TrainConfig,
    rollouts: Sequence[PackedBatch],
    groups: Mapping[str, ProcessGroups],
    *,
    device: torch.device,
    implementation: Implementation = "local",
    gradients: bool = False,
    parameters: bool = False,
) -> Measured:
    """One PPO step for each rollout (as `verify/recording.py` makes them), the critic updated before the policy. Collective.

    config: models, layout-independent settings of roles and algorithm; its `parallel` sections are not read. groups: role -> its
    layout on this world. With `gradients` those of the first mini-batch are gathered, which needs optimizer.distributed=false:
    the distributed optimizer leaves each rank with the reduced sum of its own shard only. The factor of the KL stays at its first
    value.
    """
    sharded = config.policy.optimizer.distributed or config.critic.optimizer.distributed
    assert not (gradients and sharded), "gradients are gathered without the distributed optimizer"
    roles = _Roles(config, groups, sum(batch.num_sequences for batch in rollouts), device, implementation, gradients)
    algorithm = config.algorithm
    measured = roles.measures
    for step, rollout in enumerate(rollouts, 1):
        batch = add_model_outputs(rollout, roles.policy, roles.critic, roles.reference)
        batch = shape_advantages(batch, batch["score"], algorithm.kl.coef, algorithm)
        for role, quantity, name in _FIELDS:
            if name in batch:
                measured[role].add(quantity, batch[name])
        seed = sample_seed(config.run.seed, step, -1)
        for role in (roles.critic, roles.policy):
            run_updates(role, mini_batches(batch, algorithm, config.rollout.max_response_tokens, seed))
        roles.end_step()
    if parameters:
        roles.gather_parameters()
    return dict(measured)


# (role, quantity, field of the batch)
_FIELDS = (
    ("policy", "logprobs", "logprob"),
    ("policy", "entropies", "entropy"),
    ("reference", "logprobs", "ref_logprob"),
    ("critic", "values", "value"),
    ("critic", "bootstrap values", "bootstrap"),
    ("experience", "rewards", "reward"),
    ("experience", "advantages", "advantage"),
    ("experience", "returns", "returns"),
)


class _Roles:
    """The roles of a run, each trained one behind a `_Recorder`."""

    def __init__(
        self,
        config: TrainConfig,
        groups: Mapping[str, ProcessGroups],
        num_samples: int,
        device: torch.device,
        implementation: Implementation,
        gradients: bool,
    ) -> None:
        self._config = config
        self.measures: Measured = defaultdict(RoleMeasures)
        a, temperature = config.algorithm, config.rollout.sampling.temperature
        common: dict[str, Any] = dict(device=device, implementation=implementation)
        trained: dict[str, Any] = dict(
            common, total_updates=max(1, num_samples * a.ppo_epochs // a.mini_batch_size), seed=config.run.seed
        )
        path = config.policy.model
        policy = build_trainable("policy", path, read_arch(path), config.policy, groups["policy"], **trained)
        path = config.critic.model or config.policy.model
        critic = build_trainable(
            "critic", path, read_arch(path), config.critic, groups["critic"], value_head=config.critic.value_head, **trained
        )
        self._recorders = {
            role: _Recorder(engine, self.measures[role], gradients) for role, engine in (("policy", policy), ("critic", critic))
        }
        logits_dtype = config.policy.logits_dtype
        stand_ins: dict[str, Any] = dict(self._recorders)  # they have of an engine what the roles use
        self.policy = Policy(stand_ins["policy"], temperature, a, logits_dtype)
        self.critic = Critic(stand_ins["critic"], a.value_clip)
        self.reference: LanguageModel | None = None
        if a.kl.placement != "none":
            path = config.reference.model or config.policy.model
            frozen = build_frozen(
                "reference",
                path,
                read_arch(path),
                config.reference,
                groups["reference"],
                offload=config.reference.offload,
                **common,
            )
            self.reference = LanguageModel(frozen, temperature, logits_dtype)

    def end_step(self) -> None:
        for recorder in self._recorders.values():
            recorder.end_step()

    def gather_parameters(self) -> None:
        for role, recorder in self._recorders.items():
            self.measures[role].parameters = recorder.gather_parameters()


class _Recorder:
    """An engine that writes down the training passes and optimizer steps that go through it; otherwise the given engine."""

    def __init__(self, engine: MegatronEngine, measures: RoleMeasures, gradients: bool) -> None:
        self._engine, self._measures, self._wants_gradients = engine, measures, gradients
        self._updates: list[dict[str, Tensor]] = []
        self._norms: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward_backward(
        self,
        batch: PackedBatch,
        loss_fn: LossFunction,
        *,
        reads: Collection[str] = (),
        denominator: float = 1.0,
        forward_only: bool = False,
    ) -> PassResult:
        result = self._engine.forward_backward(batch, loss_fn, reads=reads, denominator=denominator, forward_only=forward_only)
        if not forward_only:
            self._updates.append(_metrics(result, denominator))
        return result

    def optimizer_step(self) -> StepResult:
        if self._wants_gradients and self._measures.gradients is None:
            parameters: dict[str, Any] = dict(self._engine.named_parameters())  # main_grad is of Megatron's DDP
            local = {name: parameter.main_grad for name, parameter in parameters.items()}
            self._measures.gradients = self._gather(local)
        result = self._engine.optimizer_step()
        self._norms.append(result.grad_norm)
        return result

    def end_step(self) -> None:
        """The step's updates, one tensor for each metric."""
        loss = _LOSS_SUM[self._engine.name]
        self._measures.add(LOSS, torch.stack([update[loss] for update in self._updates]))
        self._measures.add(GRAD_NORM, torch.tensor(self._norms, dtype=torch.float64))
        for name in self._updates[0]:
            self._measures.metrics.setdefault(name, []).append(torch.stack([update[name] for update in self._updates]))
        self._updates, self._norms = [], []

    def gather_parameters(self) -> Gathered:
        with self._engine.eval_mode():
            return self._gather(self._engine.named_parameters())

    def _gather(self, local: Mapping[str, Tensor]) -> Gathered:
        return gather_tensors(local, self._arch, self._engine.groups, value_head=self._engine.name == "critic")

    @property
    def _arch(self) -> ModelArch:
        return self._engine.chunks[0].arch


def _metrics(result: PassResult, denominator: float) -> dict[str, Tensor]:
    """Sums per unit of the loss, maxima, and what the routers saw: all independent of the layout."""
    metrics = {name: torch.tensor(value / denominator, dtype=torch.float64) for name, value in result.sums.items()}
    metrics |= {name: torch.tensor(value, dtype=torch.float64) for name, value in result.maxima.items()}
    if result.router is not None:
        metrics["router_tokens"] = result.router.tokens
        metrics["router_balance_loss"] = torch.tensor(result.router.balance_loss, dtype=torch.float64)
    return metrics
