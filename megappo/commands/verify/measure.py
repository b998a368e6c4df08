"""Replay of recorded rollouts in given layouts through the trainer's own stages 4 to 6, with every result recorded. Roles are built
as for a run, with each trained engine wrapped in a recorder. `compare.py` compares two measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megappo.commands.verify.recording import RecordedTexts
from megappo.config.batch import update_schedule
from megappo.config.layout_checks import trained_sections
from megappo.config.schema import TrainConfig
from megappo.data.images import ImageStore
from megappo.data.packing import PackedBatch
from megappo.engine.base import Engine, PassResult, StepResult
from megappo.engine.factory import EngineFactory, EngineSpec
from megappo.engine.losses import LossFunction
from megappo.models.pieces import Box, Piece, as_2d, rectangle, sizes_of
from megappo.models.weight_map import hf_tensors
from megappo.parallel.consensus import gathered_at, told_by
from megappo.parallel.layout import Placement
from megappo.trainer.advantages import add_advantages
from megappo.trainer.build_roles import Roles, build_roles
from megappo.trainer.critics import critics_in
from megappo.trainer.experience.collect import sample_seed
from megappo.trainer.experience.experience import Experience
from megappo.trainer.model_outputs import add_model_outputs
from megappo.trainer.ptx import DrawnTexts
from megappo.trainer.roles import Critic, Policy
from megappo.trainer.updates import Updates, positive_samples


@dataclass(frozen=True)
class Gathered:
    """Assembled tensors of a role; both fields are empty on ranks other than the role's first."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Hugging Face name -> whole tensor, fp32 on the host."""
    spread: dict[str, float] = field(default_factory=dict)
    """Name -> largest difference of its copies on tp, cp, dp or edp ranks, or on both ends of a pipeline (tied embeddings)."""


def gather_tensors(local: Mapping[str, Tensor], engine: Engine) -> Gathered:
    """Assemble `local`: this rank's parameters of the engine, or their gradients, by the engine's names. Collective over its ranks.
    Frozen tensors may be missing, because they have no gradients."""
    rank, placement = dist.get_rank(), engine.placement
    position, first = placement.position_of(rank), placement.rank_of(0)
    pieces = [engine.pieces(), *(() if engine.adapters is None else (engine.adapters.pieces(),))]
    frozen = {name for name, parameter in engine.named_parameters().items() if not parameter.requires_grad} - local.keys()
    held = [one for each in pieces for one in each[position]]
    mine = [(one.hf, tuple(one.box), None if one.local in frozen else _part(local[one.local], one)) for one in held]
    parts = gathered_at(first, mine, engine.host_group)
    if rank != first:
        return Gathered()
    absent: set[str] = set()
    copies: dict[str, dict[Box, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for name, box, values in (part for rank in parts for part in rank):
        if values is None:
            absent.add(name)
        else:
            copies[name][Box(*box)].append(torch.from_numpy(values))
    gathered = Gathered()
    assert not absent & copies.keys(), f"frozen on some ranks alone: {sorted(absent & copies.keys())}"
    shapes = dict(hf_tensors(engine.arch, engine.value_head))
    for of_adapters in pieces[1:]:
        shapes.update(sizes_of(of_adapters))
    for name, shape in shapes.items():
        if name in absent:
            continue
        gathered.tensors[name], gathered.spread[name] = _assemble(name, torch.zeros(shape), copies[name])
    return gathered


def _part(tensor: Tensor, piece: Piece) -> NDArray[numpy.float32]:
    # A copy: the next step changes the parameter in place. NumPy: torch's tensors take five times as long to pickle.
    part = rectangle(tensor.detach(), piece.slot, piece.row, piece.col, piece.box.rows, piece.box.cols)
    return part.float().cpu().clone().numpy()


def _assemble(name: str, whole: Tensor, boxes: Mapping[Box, list[Tensor]]) -> tuple[Tensor, float]:
    """(the tensor from the first copy of each box, largest difference of another copy). Boxes are equal or disjoint."""
    covered = sum(box.area for box in boxes)
    assert covered == whole.numel(), f"{name}: pieces cover {covered} of {whole.numel()} elements"
    spread = 0.0
    for box, (first, *others) in boxes.items():
        as_2d(whole)[box.r0 : box.r1, box.c0 : box.c1] = first
        spread = max([spread, *(float((other - first).abs().max()) for other in others)])
    return whole, spread


REWARD_MODEL = "reward_model"
# Quantities of a role's updates, one number per mini-batch.
LOSS, GRAD_NORM = "loss", "gradient norm"


@dataclass
class RoleMeasures:
    """Results of one role: per quantity one tensor for every step, in the order of the rollouts, equal on all ranks. Only gradients
    and parameters are gathered on request: to rank 0, or to all ranks from a role that has ranks of its own."""

    values: dict[str, list[Tensor]] = field(default_factory=dict)
    """Per token [T] (logprobs, values, ...), per sequence [B] (bootstrap), or per mini-batch [updates] (loss, gradient norm)."""
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    """Name -> [updates]. Sums are divided by the loss's denominator."""
    gradients: Gathered | None = None
    """Gradients of the first mini-batch."""
    parameters: Gathered | None = None
    """Parameters after the last step."""

    def add(self, quantity: str, numbers: Tensor) -> None:
        self.values.setdefault(quantity, []).append(numbers.double())


Measured = dict[str, RoleMeasures]
"""policy, critic, reference, teacher and reward_model (where they are built), and experience: rewards, advantages, with a critic
returns."""


def measure(
    config: TrainConfig,
    rollouts: Sequence[PackedBatch],
    engines: EngineFactory,
    *,
    gradients: bool = False,
    parameters: bool = False,
    images: ImageStore | None = None,
) -> Measured:
    """Run one PPO step for each rollout (of `recording.py`), with the critic updated before the policy. Collective over the world,
    whichever of its ranks the roles live on. The KL coefficient stays at its first value.

    config: models, layouts, roles and algorithm. engines: builds the roles; the caller closes it. gradients: also gather those of
    the first mini-batch, without Megatron's distributed optimizer. parameters: also gather those after the last step. images: that
    tokens of the rollouts name."""
    # Megatron's distributed optimizer leaves each rank with whole gradients, but reduces only the rank's own shard.
    trained = trained_sections(config)
    partial = [s for s in trained.values() if s.engine == "megatron" and s.optimizer.distributed]
    assert not (gradients and partial), "gradients are gathered without the distributed optimizer"
    algorithm, num_samples = config.algorithm, sum(batch.num_sequences for batch in rollouts)
    num_updates = {role: max(1, update_schedule(config, role).optimizer_steps(num_samples)) for role in trained}
    measured: Measured = defaultdict(RoleMeasures)
    recording = _RecordingEngines(engines, measured, gradients)
    roles = build_roles(config, cast(EngineFactory, recording), num_updates, images=images)
    for step, rollout in enumerate(rollouts, 1):
        experience = add_model_outputs(Experience.of_whole(rollout), roles)
        if REWARD_MODEL in roles.shares:
            measured[REWARD_MODEL].add("scores", _scores(rollout, roles))
        score = experience.batch["score"]
        shaped = add_advantages(experience, score, algorithm.kl.coef, algorithm)
        experience = shaped.experience
        batch = experience.everywhere()
        for role, quantity, name in _fields_in(batch):
            if name in batch:
                measured[role].add(quantity, batch[name])
        seed, positive = sample_seed(config.run.seed, step, -1), positive_samples(experience, score, algorithm)
        texts = _texts(config, roles, step, experience.table.num_samples)
        updates = Updates(experience, roles, roles.trained, config, seed, positive=positive, texts=texts)
        for name in roles.update_order:
            updates.run(name)
            if name in recording.recorders:
                recording.recorders[name].end_step(cast("Critic | Policy", roles.by_name[name]).loss_name)
    if parameters:
        for recorder in recording.recorders.values():
            recorder.gather_parameters()
    for name in roles.trained:
        measured[name] = _of_first_rank(measured[name], roles.placements[name])
    return dict(measured)


def _of_first_rank(measures: RoleMeasures, placement: Placement) -> RoleMeasures:
    """Measures of a role as its first rank has them, for all ranks. Collective over the world."""
    if placement.is_whole:
        return measures
    return told_by(placement.rank_of(0), measures)  # small: the model is


def _texts(config: TrainConfig, roles: Roles, step: int, num_samples: int) -> DrawnTexts | None:
    """Recorded texts of a step, different in every update; None without `algorithm.ptx` and on ranks without the policy."""
    ptx = config.algorithm.ptx
    if ptx is None or roles.policy is None:
        return None
    size, updates = ptx.batch_size, update_schedule(config, "policy").optimizer_steps(num_samples)
    first = (step - 1) * updates * size
    numbers = [range(first + update * size, first + (update + 1) * size) for update in range(updates)]
    return DrawnTexts(RecordedTexts(roles.policy.engine.arch.vocab_size), numbers)


def _scores(rollout: PackedBatch, roles: Roles) -> Tensor:
    """Scores [B] of all sequences of a rollout, on every rank. Collective over the world."""
    experience, model = Experience.of_whole(rollout), roles.reward_model
    share = experience.for_role(roles.shares[REWARD_MODEL], ())
    results = {}
    if model is not None:  # which may have another vocabulary than the policy
        results["raw"] = model.scores(replace(share.batch, tokens=share.batch.tokens % model.engine.arch.vocab_size))
    return experience.with_results(share, (), ("raw",), results).everywhere(("raw",))["raw"]


def _fields_in(batch: PackedBatch) -> Iterator[tuple[str, str, str]]:
    """(role, quantity, field of the batch) of everything that is compared, where the batch has it."""
    critics = critics_in(batch)
    yield from (("policy", "logprobs", "logprob"), ("policy", "entropies", "entropy"))
    yield from (("reference", "logprobs", "ref_logprob"), ("teacher", "logprobs", "teacher_logprob"))
    yield from ((role, "values", fields.value) for role, fields in critics.items())
    yield from ((role, "bootstrap values", fields.bootstrap) for role, fields in critics.items())
    yield from (("experience", "rewards", "reward"), ("experience", "advantages", "advantage"))
    yield from (("experience", fields.returns, fields.returns) for fields in critics.values())


class DelegatingEngine:
    """An engine, or a factory of them, that hands every use on to another one: the base of those that change or record a part."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _RecordingEngines(DelegatingEngine):
    """An engine factory that wraps each engine that trains in a `_Recorder`."""

    def __init__(self, engines: EngineFactory, measured: Measured, gradients: bool) -> None:
        super().__init__(engines)
        self._measured, self._gradients = measured, gradients
        self.recorders: dict[str, _Recorder] = {}

    def build(self, spec: EngineSpec) -> Engine | None:
        engine = self._engine.build(spec)
        if engine is None or spec.total_updates is None:
            return engine
        self.recorders[spec.role] = _Recorder(engine, self._measured[spec.role], self._gradients)
        return cast(Engine, self.recorders[spec.role])


class _Recorder(DelegatingEngine):
    def __init__(self, engine: Engine, measures: RoleMeasures, gradients: bool) -> None:
        super().__init__(engine)
        self._measures, self._wants_gradients = measures, gradients
        self._updates: list[dict[str, Tensor]] = []
        self._norms: list[float] = []

    def forward_backward(
        self, share: PackedBatch, loss_fn: LossFunction, *, denominator: float = 1.0, forward_only: bool = False, **how: Any
    ) -> PassResult:
        result = self._engine.forward_backward(share, loss_fn, denominator=denominator, forward_only=forward_only, **how)
        if not forward_only:
            self._updates.append(_metrics(result, denominator))
        return result

    def optimizer_step(self) -> StepResult:
        if self._wants_gradients and self._measures.gradients is None:
            self._measures.gradients = gather_tensors(self._engine.named_gradients(), self._engine)
        result = self._engine.optimizer_step()
        self._norms.append(result.grad_norm)
        return result

    def end_step(self, loss: str) -> None:
        """Store the updates of the step, one tensor for each metric. loss: name of the metric that is the role's loss."""
        self._measures.add(LOSS, torch.stack([update[loss] for update in self._updates]))
        self._measures.add(GRAD_NORM, torch.tensor(self._norms, dtype=torch.float64))
        for name in self._updates[0]:
            self._measures.metrics.setdefault(name, []).append(torch.stack([update[name] for update in self._updates]))
        self._updates, self._norms = [], []

    def gather_parameters(self) -> None:
        with self._engine.eval_mode():
            self._measures.parameters = gather_tensors(self._engine.named_parameters(), self._engine)


def _metrics(result: PassResult, denominator: float) -> dict[str, Tensor]:
    """Sums per unit of the loss's denominator, maxima, and the routers' load: all independent of the layout."""
    metrics = {name: torch.tensor(value / denominator, dtype=torch.float64) for name, value in result.sums.items()}
    metrics |= {name: torch.tensor(value, dtype=torch.float64) for name, value in result.maxima.items()}
    if result.router is not None:
        metrics["router_tokens"] = result.router.tokens
        metrics["router_balance_loss"] = torch.tensor(result.router.balance_loss, dtype=torch.float64)
    return metrics
