"""The contract of `engine/base.py`, asked of every engine: Megatron and FSDP2 in layouts of two ranks, and the toy engine.

Each check runs on all ranks of one world for each backend and raises where the engine breaks the contract. Faulty engines show
that the checks can fail.
"""

from __future__ import annotations

import math
import shutil
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from megappo.commands.verify.measure import DelegatingEngine
from megappo.config.role_sections import CriticConfig, ModelConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.data.packing import PackedBatch, pack
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import Engine, PassResult
from megappo.engine.factory import EngineFactory, EngineSpec
from megappo.engine.losses import LossOutput
from megappo.engine.whole_batch import sequences_of_share
from megappo.parallel.shares import Shares
from tests.engine.runs import recorded_batch
from tests.engine.toy_engine import ToyEngine, ToyOutput, toy_engines
from tests.engine.whole import Whole
from tests.models.checkpoints import write_checkpoint
from tests.rollout.responses import generate_all, going_on, sequence
from tests.worlds import spawn_world

LR, WARMUP = 1e-2, 2
TWO_RANKS = {
    "megatron pp2": {"pp": 2},
    "megatron dp2": {},
    "megatron tp2 sp": {"tp": 2, "sequence_parallel": True},
    "fsdp2 dp2": {},
    "fsdp2 tp2 sp": {"tp": 2, "sequence_parallel": True},
    "fsdp2 cp2": {"cp": 2},
}
# Log-probs and gradients of order 1, in fp32, added up in another order.
TOLERANCE = 2e-5


class World(NamedTuple):
    """The place of one check: a factory, the layout, a checkpoint, an empty directory that all ranks share.

    fault: put between a policy and its check. engine: as the sections name it.
    """

    engines: EngineFactory
    parallel: ParallelConfig
    path: str
    folder: Path
    fault: Callable[[Engine], Engine] = lambda engine: engine
    engine: str = "megatron"

    def sharing_policy(self) -> Engine:
        """The engine as it is: every rank passes its share."""
        return self.fault(self.engines.build(self.spec("policy", PolicyConfig(model=self.path, **self.settings()))))

    def policy(self) -> Engine:
        """Every rank passes the whole batch, as to the critic."""
        return Whole(self.sharing_policy())

    def critic(self) -> Engine:
        return Whole(self.engines.build(self.spec("critic", CriticConfig(**self.settings()), value_head="normal")))

    def value_head(self, start: str, seed: int, path: str, trained: bool) -> Tensor:
        """[1, hidden] as a value model of the checkpoint at `path` starts with it."""
        updates = 10 if trained else None
        spec = self.spec("critic", CriticConfig(**self.settings()), path, value_head=start, seed=seed, total_updates=updates)
        engine = self.engines.build(spec)
        return whole(engine, weights_of(engine))["score.weight"]

    def spec(self, role: str, section: Any, path: str | None = None, **more: Any) -> EngineSpec:
        from megappo.models.hf_config import read_arch

        path = path or self.path
        return EngineSpec(role, path, read_arch(path), section, **{"total_updates": 10, **more})

    def settings(self) -> dict[str, Any]:
        """Whole gradients on every rank if the engine can, several micro-batches, everything offloaded that can be."""
        distributed = self.engine == "fsdp2"
        optimizer = OptimizerConfig(lr=LR, warmup_steps=WARMUP, distributed=distributed, clip_grad=0.0, eps=1e-5)
        offload = ["parameters", "gradients", "optimizer"]
        layout = dict(engine=self.engine, parallel=self.parallel)
        return dict(dtype="fp32", micro_batch_tokens=48, optimizer=optimizer, offload=offload, **layout)


# ------------------------------------------------------------------------------------------------------------------- losses


def negative_logprob(output: Any, micro: Any) -> LossOutput:
    """Of the tokens of weight 1; language models."""
    from megappo.trainer.roles import LanguageModel

    logprob, _ = LanguageModel(None, 1.0).token_logprobs(output, micro, False)  # type: ignore[arg-type]
    loss = -(logprob * micro["weight"]).sum()
    return LossOutput(loss, tokens={"logprob": logprob}, sums={"loss": loss, "tokens": micro["weight"].sum()})


def gradients_of(engine: Engine, **how: Any) -> dict[str, Tensor]:
    """Of one pass."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward(recorded_batch(), negative_logprob, reads=("weight",), **how)
        return {name: gradient.clone() for name, gradient in engine.named_gradients().items()}


def logprobs_of(engine: Engine) -> Tensor:
    from megappo.trainer.roles import LanguageModel

    return LanguageModel(engine, 1.0).logprobs(recorded_batch(), want_entropy=False)[0]


def update(engine: Engine, **how: Any) -> tuple[PassResult, Any, float]:
    with engine.train_mode():
        return one_update(engine, **how)


def one_update(engine: Engine, **how: Any) -> tuple[PassResult, Any, float]:
    """In train mode."""
    engine.optimizer_zero_grad()
    result = engine.forward_backward(recorded_batch(), negative_logprob, reads=("weight",), denominator=10.0, **how)
    lr = engine.lr_scheduler_step()
    return result, engine.optimizer_step(), lr


def weights_of(engine: Engine) -> dict[str, Tensor]:
    with engine.eval_mode():
        return {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """On every rank."""
    assert a.keys() == b.keys()
    own = torch.tensor(float(all(torch.equal(a[name], b[name]) for name in a)))
    dist.all_reduce(own, op=dist.ReduceOp.MIN)
    return bool(own)


def whole(engine: Engine, local: dict[str, Tensor], *, check_copies: bool = True) -> dict[str, Tensor]:
    """Hugging Face name -> tensor, put together by `pieces` on every rank; copies have to agree unless `check_copies` is off."""
    from megappo.models.pieces import as_2d
    from megappo.models.weight_map import hf_tensors

    mine = [
        (
            piece.hf,
            piece.box,
            as_2d(local[piece.local])[piece.row : piece.row + piece.box.rows, piece.col : piece.col + piece.box.cols],
        )
        for piece in engine.pieces()[dist.get_rank()]
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [(name, box, part.clone()) for name, box, part in mine])
    tensors = {name: torch.full(shape, torch.nan) for name, shape in hf_tensors(engine.arch, engine.value_head).items()}
    for name, box, part in (one for of_rank in gathered for one in of_rank):
        place = as_2d(tensors[name])[box.r0 : box.r1, box.c0 : box.c1]
        assert not check_copies or place.isnan().all() or torch.allclose(place, part, atol=TOLERANCE), f"copies of {name} differ"
        place.copy_(part)
    return tensors


# ------------------------------------------------------------------------------------------------------------------- checks


def modes_decide_whether_gradients_are_recorded(world: World) -> None:
    engine = world.policy()
    with engine.eval_mode():
        assert not torch.is_grad_enabled()
    with engine.train_mode():
        assert torch.is_grad_enabled()
    assert torch.is_grad_enabled() and engine.name == "policy" and not engine.value_head and world.critic().value_head


def names_of_parameters_gradients_and_pieces_agree(world: World) -> None:
    for engine in (world.policy(), world.critic()):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            parameters, gradients = engine.named_parameters(), engine.named_gradients()
            assert all(not gradient.any() for gradient in gradients.values())
        assert parameters.keys() == gradients.keys() == weights_of(engine).keys()
        assert {piece.local for piece in engine.pieces()[dist.get_rank()]} == parameters.keys()
        assert all(gradients[name].shape == parameter.shape for name, parameter in parameters.items())


def pieces_cover_every_tensor_once(world: World) -> None:
    from megappo.models.pieces import Box, check_tiling
    from megappo.models.weight_map import hf_tensors

    for engine in (world.policy(), world.critic()):
        pieces, boxes = engine.pieces(), defaultdict(set)
        assert set(pieces) == set(range(dist.get_world_size()))
        for piece in (one for held in pieces.values() for one in held):
            boxes[piece.hf].add(piece.box)
        shapes = hf_tensors(engine.arch, engine.value_head)
        assert boxes.keys() == shapes.keys()
        for name, shape in shapes.items():
            rows, cols = (*shape, 1)[:2]
            check_tiling(Box(0, rows, 0, cols), list(boxes[name]), name)
            assert sum(box.area for box in boxes[name]) == rows * cols, f"{name} is covered more than once"


def pieces_say_where_the_checkpoints_numbers_stand(world: World) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(world.path).state_dict()
    engine = world.policy()
    ours = whole(engine, weights_of(engine))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def log_probs_are_those_of_transformers_in_the_batchs_order(world: World) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(world.path, dtype=torch.float32)
    batch, ours = recorded_batch(), logprobs_of(world.policy())
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:]):
        ids = batch.tokens[start:end]
        with torch.no_grad():
            rows = model(ids[None]).logits[0, :-1].log_softmax(-1)
        assert ours[start] == 0.0, "no prefix"
        assert torch.allclose(ours[start + 1 : end], rows.gather(1, ids[1:, None])[:, 0], atol=TOLERANCE)


def both_ways_to_a_loss_give_its_gradient(world: World) -> None:
    """`fused_loss`, where there is one, and a loss of `logprobs`: rounded logits, temperature, kept ids, entropy."""
    from megappo.config.schema import AlgorithmConfig
    from megappo.data.packing import NO_ID, Ragged
    from megappo.trainer.roles import Policy

    engine, batch = world.policy(), recorded_batch()
    kept = torch.full((batch.num_tokens, 3), NO_ID, dtype=torch.int32)
    kept[:, 0], kept[: batch.num_tokens // 2, 1] = batch.tokens.int(), 7
    batch = batch.with_fields(ragged_fields={"kept": Ragged.of_table(kept)})
    policy = Policy(engine, 0.7, AlgorithmConfig(entropy={"type": "bonus", "coef": 0.01}), "bf16")
    batch = batch.with_fields({"logprob": policy.logprobs(batch)[0]})

    class TwoSteps:
        fused_loss = None

        def __init__(self, output: Any) -> None:
            self.logprobs = output.logprobs

    found = []
    for loss in (policy._loss_of, lambda output, micro: policy._loss_of(TwoSteps(output), micro)):  # type: ignore[arg-type]
        with engine.train_mode():
            engine.optimizer_zero_grad()
            reads = ("kept", "logprob", "advantage", "weight")
            result = engine.forward_backward(batch, loss, reads=reads, denominator=float(batch["weight"].sum()))
            found.append((result, {name: gradient.clone() for name, gradient in engine.named_gradients().items()}))
    (fused, gradients), (steps, others) = found
    assert fused.sums.keys() == steps.sums.keys() and fused.maxima.keys() == steps.maxima.keys()
    assert all(math.isclose(fused.sums[name], steps.sums[name], rel_tol=1e-4, abs_tol=1e-4) for name in fused.sums)
    assert all(torch.allclose(gradients[name], others[name], atol=TOLERANCE) for name in gradients)


def a_pass_reads_what_it_declares_and_hands_results_back_in_order(world: World) -> None:
    engine, batch = world.policy(), recorded_batch()

    def look(output: Any, micro: Any) -> LossOutput:
        refused = 0.0
        try:
            micro["returns"]
        except KeyError as error:
            refused = float("left out" in str(error))
        assert "absent" not in micro
        numbers = micro["advantage"]
        return LossOutput(
            tokens={"id": micro.tokens, "advantage": numbers},
            sums={"sum": numbers.sum(), "refused": torch.tensor(refused)},
            maxima={"max": numbers.max()},
        )

    with engine.eval_mode():
        result = engine.forward_backward(batch, look, reads=("advantage", "absent"), forward_only=True)
    assert torch.equal(result.tokens["id"], batch.tokens.float()) and torch.equal(result.tokens["advantage"], batch["advantage"])
    assert result.num_micro_batches * engine.shares.count > 1
    assert result.sums["refused"] == result.num_micro_batches * engine.shares.count
    assert math.isclose(result.sums["sum"], float(batch["advantage"].sum()), abs_tol=1e-5)
    assert result.maxima["max"] == float(batch["advantage"].max())


def gradients_are_divided_once(world: World) -> None:
    engine = world.policy()
    once, halved = gradients_of(engine, denominator=1.0), gradients_of(engine, denominator=2.0)
    assert all(torch.allclose(once[name], 2 * halved[name], rtol=1e-5, atol=TOLERANCE) for name in once)
    assert any(gradient.any() for gradient in once.values())


def gradients_are_those_of_transformers(world: World) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(world.path, dtype=torch.float32)
    batch, engine = recorded_batch(), world.policy()
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:]):
        ids = batch.tokens[start:end]
        logprob = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        (-(logprob * batch["weight"][start + 1 : end]).sum() / 10.0).backward()
    theirs = dict(model.named_parameters())
    for name, gradient in whole(engine, gradients_of(engine, denominator=10.0)).items():
        wanted = theirs[name].grad
        assert wanted is not None and torch.allclose(gradient, wanted, atol=TOLERANCE), name


def a_forward_only_pass_leaves_gradients(world: World) -> None:
    engine = world.policy()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward(recorded_batch(), without_loss, reads=("weight",), forward_only=True)
        assert not any(gradient.any() for gradient in engine.named_gradients().values())


def without_loss(output: Any, micro: Any) -> LossOutput:
    return LossOutput(tokens=negative_logprob(output, micro).tokens)


def a_step_moves_the_weights_by_the_scheduled_rate(world: World) -> None:
    engine = world.policy()
    gradients = whole(engine, gradients_of(engine, denominator=10.0))
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    before, rates = weights_of(engine), []
    for index in range(3):
        result, step, lr = update(engine)
        rates.append(lr)
        assert step.applied and result.sums["tokens"] == float(recorded_batch()["weight"].sum())
        if index == 0:
            assert math.isclose(step.grad_norm, norm, rel_tol=1e-4)
            moved = max(float((new - before[name]).abs().max()) for name, new in weights_of(engine).items())
            assert 0.5 * lr < moved < 1.5 * lr, "Adam's first step is the learning rate"
    assert rates[:2] == pytest.approx([LR / 2, LR])
    assert not same(before, weights_of(engine))


def a_non_finite_gradient_is_skipped(world: World) -> None:
    engine = world.policy()
    before = weights_of(engine)

    def poisoned(output: Any, micro: Any) -> LossOutput:
        return LossOutput(negative_logprob(output, micro).loss_sum * torch.nan)  # type: ignore[operator]

    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward(recorded_batch(), poisoned, reads=("weight",))
        engine.lr_scheduler_step()
        assert not engine.optimizer_step().applied
    assert same(before, weights_of(engine))


def leaving_a_mode_changes_nothing(world: World) -> None:
    """What the modes offload on exit comes back whole: two updates in one mode are two updates in two."""
    stays, leaves = world.policy(), world.policy()
    with stays.train_mode():
        for _ in range(2):
            one_update(stays)
    update(leaves)
    before = weights_of(leaves), logprobs_of(leaves)
    with leaves.train_mode():
        pass
    assert same(before[0], weights_of(leaves)) and torch.equal(before[1], logprobs_of(leaves))
    update(leaves)
    assert same(weights_of(stays), weights_of(leaves)), "moments came back"


def a_value_head_starts_as_asked(world: World) -> None:
    """Of a value model that trains and of a frozen one."""
    path = str(world.folder / "headed")
    if dist.get_rank() == 0:
        model = transformers.AutoModelForTokenClassification.from_pretrained(world.path, num_labels=1, dtype=torch.float32)
        torch.nn.init.ones_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
        model.save_pretrained(path)
    dist.barrier()
    for trained in (True, False):
        zero, own = world.value_head("zero", 0, path, trained), world.value_head("checkpoint", 0, path, trained)
        one, again, other = (world.value_head("normal", seed, path, trained) for seed in (1, 1, 2))
        assert not zero.any() and bool((own == 1.0).all()), f"{trained=}"
        assert torch.equal(one, again) and not torch.equal(one, other), f"drawn from the seed, {trained=}"


def a_checkpoint_gives_back_weights_and_optimizer(world: World) -> None:
    from megappo.checkpoint.store import CheckpointStore

    engine, store = world.policy(), CheckpointStore(world.folder / "run", keep_last=1)
    update(engine)
    saved = weights_of(engine)
    store.save(1, {"policy": engine}, {}, {})
    assert same(saved, weights_of(engine))
    update(engine)
    further = weights_of(engine)
    other = world.policy()
    store.load({"policy": other}, {}, {})
    assert same(saved, weights_of(other))
    _, _, lr = update(other)
    assert same(further, weights_of(other)) and lr == pytest.approx(LR), "moments and the schedule came back"


def a_critic_takes_the_layers_of_a_policy_and_keeps_its_head(world: World) -> None:
    from megappo.checkpoint.store import CheckpointStore

    policy, critic, store = world.policy(), world.critic(), CheckpointStore(world.folder / "run", keep_last=1)
    update(policy)
    store.save(1, {"policy": policy}, {}, {})
    head = whole(critic, weights_of(critic))["score.weight"]
    assert store.load_weights("policy", critic, with_head=False) == 1
    layers, taken = whole(policy, weights_of(policy)), whole(critic, weights_of(critic))
    assert torch.equal(taken.pop("score.weight"), head)
    assert all(torch.equal(tensor, layers[name]) for name, tensor in taken.items())


def a_weight_that_is_nan_is_found_in_what_would_be_saved(world: World) -> None:
    """On the rank that holds it, whichever it is."""
    from megappo.checkpoint.state import non_finite_tensors

    for engine in (world.policy(), world.critic()):
        update(engine) if engine.name == "policy" else None
        assert non_finite_tensors(engine, with_optimizer=True) == []
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, list(engine.named_parameters()))
        last: dict[str, float] = {}
        for rank, name in [(rank, name) for rank, theirs in enumerate(names) for name in theirs]:
            mine = rank == dist.get_rank()
            set_first(engine, {**last, name: torch.nan} if mine else last)
            found, last = non_finite_tensors(engine, with_optimizer=False), {name: 1.0} if mine else {}
            assert bool(found) == mine, f"{name} of rank {rank}"


def set_first(engine: Engine, values: dict[str, float]) -> None:
    """Set the first number of some parameters; of none on a rank that only takes part."""
    with engine.train_mode():
        for name, value in values.items():
            engine.named_parameters()[name].data.view(-1)[0] = value


def exports_are_read_by_transformers(world: World) -> None:
    policy, critic = world.policy(), world.critic()
    update(policy)
    for engine, kind in ((policy, "CausalLM"), (critic, "TokenClassification")):
        directory = world.folder / engine.name
        engine.export(directory, Path(world.path))
        dist.barrier()
        model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(directory, dtype=torch.float32)
        theirs = model.state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in whole(engine, weights_of(engine)).items())
        refused = False
        try:
            engine.export(directory, Path(world.path))
        except ValueError as error:
            refused = str(directory) in str(error)
        assert refused, "an export that exists is not overwritten"
        dist.barrier()
    check_values(critic, model)


def check_values(critic: Engine, model: Any) -> None:
    from megappo.trainer.roles import Critic

    batch = recorded_batch()
    values, _ = Critic(critic).values(batch)
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:]):
        with torch.no_grad():
            after = model(batch.tokens[None, start:end]).logits[0, :-1, 0]
        assert values[start] == 0.0 and torch.allclose(values[start + 1 : end], after, atol=TOLERANCE)


def frozen_weights_stay_and_the_rest_trains_as_without(world: World) -> None:
    """Also under full recomputation, which needs a gradient through frozen layers, and after a checkpoint."""
    from megappo.checkpoint.store import CheckpointStore

    patterns = ("embed_tokens", "self_attn", "layers.0-0.mlp")
    free, store = world.policy(), CheckpointStore(world.folder / "run", keep_last=1)
    wanted, before = whole(free, gradients_of(free, denominator=10.0)), whole(free, weights_of(free))
    recompute = {"recompute": "full"} if world.engine != "toy" else {}

    def partly_frozen() -> Engine:
        section = PolicyConfig(model=world.path, freeze=patterns, **world.settings(), **recompute)
        return Whole(world.fault(world.engines.build(world.spec("policy", section))))

    engine = partly_frozen()
    names = {piece.local: piece.hf for piece in engine.pieces()[dist.get_rank()]}
    still = {name for name in before if any(part in name for part in ("embed_tokens", "self_attn", "layers.0.mlp"))}
    with engine.train_mode():
        one_update(engine)
        gradients = {name: gradient.clone() for name, gradient in engine.named_gradients().items()}
    trained = {name for name in engine.named_parameters() if names[name] not in still}
    assert gradients.keys() == trained, "a frozen weight has no gradient"
    found = whole(engine, {name: gradients.get(name, torch.zeros(one.shape)) for name, one in engine.named_parameters().items()})
    assert all(torch.allclose(found[name], wanted[name], atol=TOLERANCE) for name in {*before} - still)
    after = whole(engine, weights_of(engine))
    assert all(torch.equal(after[name], before[name]) == (name in still) for name in before), "what is frozen stays, nothing else"
    store.save(1, {"policy": engine}, {}, {})
    other = partly_frozen()
    store.load({"policy": other}, {}, {})
    update(engine)
    update(other)
    assert same(weights_of(engine), weights_of(other)), "moments of what trains came back"


def a_categorical_head_trains_as_transformers_own_model(world: World) -> None:
    """Values, loss and gradients of a head of seven bins, by autograd in transformers' model of the export."""
    from megappo.algo.value_losses import categorical_loss
    from megappo.trainer.roles import Critic, bins_of

    section = CriticConfig(**world.settings(), loss={"type": "hl_gauss", "bins": 7, "low": -1.0, "high": 1.5})
    spec, bins, batch = world.spec("critic", section, value_head="normal"), bins_of(section.loss), recorded_batch()
    engine = Whole(world.engines.build(replace(spec, arch=replace(spec.arch, head_rows=7))))
    directory = world.folder / "bins"
    engine.export(directory, Path(world.path))
    dist.barrier()
    model = transformers.AutoModelForTokenClassification.from_pretrained(directory, dtype=torch.float32)
    critic, cuts = Critic(engine, section.loss), batch.cu_seqlens.tolist()
    after = [model(batch.tokens[None, start:end]).logits[0] for start, end in zip(cuts, cuts[1:])]
    aligned = torch.cat([torch.cat((torch.zeros(1, 7), rows[:-1])) for rows in after])
    values, bootstrap = critic.values(batch)
    inside = torch.ones(len(values), dtype=torch.bool).index_fill(0, batch.cu_seqlens[:-1].long(), False)
    assert torch.allclose(values[inside], bins.expectation(aligned)[inside], atol=TOLERANCE) and not values[~inside].any()
    assert torch.allclose(bootstrap, bins.expectation(torch.stack([rows[-1] for rows in after])), atol=TOLERANCE)
    returns = torch.linspace(-1.2, 1.7, len(values))
    fields = {"returns": returns, "weight": batch["weight"] * inside, "value": torch.zeros_like(returns)}
    loss, _ = categorical_loss(aligned, returns, fields["weight"], bins)
    (loss / 10).backward()
    with engine.train_mode():
        found = critic.update(batch.with_fields(fields), 10.0)
        assert math.isclose(found.losses.sums["loss_sum"], loss.item(), rel_tol=TOLERANCE)
        gradients = whole(engine, engine.named_gradients())
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(torch.allclose(gradient, theirs[name], atol=TOLERANCE) for name, gradient in gradients.items())
    dist.barrier()


def logits_of_a_few_rows_are_those_behind_the_log_probs(world: World) -> None:
    from megappo.rollout.megatron_engine import MegatronRollout
    from megappo.rollout.types import Request, SamplingParams

    engine = world.sharing_policy()
    requests = [Request(0, (5, 6, 7), seed=1), Request(1, (9,), seed=2), Request(2, (3, 11), seed=3)]
    responses = generate_all(MegatronRollout(engine), requests, SamplingParams(5))
    from megappo.trainer.roles import LanguageModel

    greedy = SamplingParams(9, 0.0)
    whole = generate_all(MegatronRollout(engine), requests, greedy)
    rest = generate_all(MegatronRollout(engine), [going_on(*pair) for pair in zip(requests, whole)], greedy)
    assert [one.tokens.tolist() for one in rest] == [one.tokens[5:9].tolist() for one in whole], "a response goes on"
    batch = pack([sequence(request, response) for request, response in zip(requests, responses)])
    logprob, _ = LanguageModel(Whole(engine), 1.0).logprobs(batch, want_entropy=False)
    for end, response in zip(batch.cu_seqlens.tolist()[1:], responses):
        drawn = torch.from_numpy(response.logprobs)
        assert torch.allclose(logprob[end - len(drawn) : end], drawn, atol=TOLERANCE)
        assert all(0 <= token < engine.arch.vocab_size for token in response.tokens)


# ------------------------------------------------------------------------------------------------------------------- shares


def shares_are_of_all_ranks_and_say_who_holds_what(world: World) -> None:
    engine, rank = world.sharing_policy(), dist.get_rank()
    shares, found = engine.shares, [None] * dist.get_world_size()
    members = sorted(rank for ranks in shares.members for rank in ranks)
    assert members == sorted(dist.get_process_group_ranks(engine.host_group)) == list(range(dist.get_world_size()))
    for ranks, holders, readers in zip(shares.members, shares.holders, shares.readers, strict=True):
        assert holders and len({*holders, *readers}) == len(holders) + len(readers) and {*holders, *readers} <= {*ranks}
    assert rank in shares.members[shares.index_of(rank)]
    dist.all_gather_object(found, shares)
    assert all(theirs == shares for theirs in found)


def results_of_a_share_are_in_its_order_on_its_reporter_alone(world: World) -> None:
    engine, batch = world.sharing_policy(), recorded_batch()
    index, count = engine.shares.index_of(dist.get_rank()), engine.shares.count
    share = batch.select([number for number in reversed(range(batch.num_sequences)) if number % count == index])

    def look(output: Any, micro: Any) -> LossOutput:
        weight = micro["weight"]
        return LossOutput(tokens={"id": micro.tokens}, sums={"weight": weight.sum()}, maxima={"id": micro.tokens.max()})

    with engine.eval_mode():
        result = engine.forward_backward(share, look, reads=("weight",), forward_only=True)
    reports = dist.get_rank() in engine.shares.reporters
    assert torch.equal(result.tokens["id"], share.tokens.float() if reports else torch.zeros(share.num_tokens))
    assert result.sums["weight"] == float(batch["weight"].sum()), "of all shares, on every rank"
    assert result.maxima["id"] == float(batch.tokens.max())


def any_division_of_a_batch_gives_its_gradient(world: World) -> None:
    """Also with a share of one sequence or none, beside one that needs more micro-batches."""
    engine, batch, rank = world.sharing_policy(), recorded_batch(), dist.get_rank()
    wanted, count = gradients_of(Whole(engine)), batch.num_sequences
    for first in (count, count - 1, 1) if engine.shares.count > 1 else (count,):
        mine = range(first) if engine.shares.index_of(rank) == 0 else range(first, count)
        result, gradients = gradients_of_share(engine, batch.select(mine))
        assert all(torch.allclose(gradients[name], wanted[name], atol=TOLERANCE) for name in wanted), f"{first=}"
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, result.num_micro_batches)
        assert len({*sizes}) == 1 and result.sums["tokens"] == float(batch["weight"].sum())
    nothing, gradients = gradients_of_share(engine, batch.select([]))
    assert nothing.tokens["logprob"].shape == (0,) and nothing.sums == {"loss": 0.0, "tokens": 0.0}
    assert not any(gradient.any() for gradient in gradients.values())


def gradients_of_share(engine: Engine, share: PackedBatch) -> tuple[PassResult, dict[str, Tensor]]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        result = engine.forward_backward(share, negative_logprob, reads=("weight",))
        return result, {name: gradient.clone() for name, gradient in engine.named_gradients().items()}


def ranks_read_what_the_shares_say_and_no_more(world: World) -> None:
    """Ranks that are not among the holders have no fields, and tokens if they are readers."""
    engine, batch, rank = world.sharing_policy(), recorded_batch(), dist.get_rank()
    index = engine.shares.index_of(rank)
    wanted, share = gradients_of(Whole(engine)), batch.select(sequences_of_share(engine, batch))
    if rank not in engine.shares.holders[index]:
        tokens = share.tokens if rank in engine.shares.readers[index] else torch.zeros_like(share.tokens)
        share = PackedBatch(tokens, share.cu_seqlens)
    _, gradients = gradients_of_share(engine, share)
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


def a_rank_with_other_sequences_than_its_replica_is_named(world: World) -> None:
    from megappo.parallel.meeting import ScheduleDiverged

    engine, batch = world.sharing_policy(), recorded_batch()
    order = list(range(batch.num_sequences))
    message = ""
    with engine.eval_mode():
        try:
            share = batch.select(order[::-1] if dist.get_rank() == 1 else order)
            engine.forward_backward(share, without_loss, reads=("weight",), forward_only=True)
        except ScheduleDiverged as error:
            message = str(error)
    assert "rank 0 is before a forward pass of the policy (pass 1) with lengths" in message
    assert "rank 1 is before a forward pass of the policy (pass 1) with lengths" in message
    assert torch.equal(logprobs_of(Whole(engine)), logprobs_of(world.policy())), "the next pass is right again"


CHECKS: tuple[Callable[[World], None], ...] = (
    modes_decide_whether_gradients_are_recorded,
    names_of_parameters_gradients_and_pieces_agree,
    pieces_cover_every_tensor_once,
    pieces_say_where_the_checkpoints_numbers_stand,
    log_probs_are_those_of_transformers_in_the_batchs_order,
    both_ways_to_a_loss_give_its_gradient,
    a_pass_reads_what_it_declares_and_hands_results_back_in_order,
    gradients_are_divided_once,
    gradients_are_those_of_transformers,
    a_forward_only_pass_leaves_gradients,
    a_step_moves_the_weights_by_the_scheduled_rate,
    a_non_finite_gradient_is_skipped,
    leaving_a_mode_changes_nothing,
    a_value_head_starts_as_asked,
    a_checkpoint_gives_back_weights_and_optimizer,
    a_critic_takes_the_layers_of_a_policy_and_keeps_its_head,
    a_weight_that_is_nan_is_found_in_what_would_be_saved,
    exports_are_read_by_transformers,
    frozen_weights_stay_and_the_rest_trains_as_without,
    a_categorical_head_trains_as_transformers_own_model,
    logits_of_a_few_rows_are_those_behind_the_log_probs,
    shares_are_of_all_ranks_and_say_who_holds_what,
    results_of_a_share_are_in_its_order_on_its_reporter_alone,
    any_division_of_a_batch_gives_its_gradient,
    ranks_read_what_the_shares_say_and_no_more,
    a_rank_with_other_sequences_than_its_replica_is_named,
)


# -------------------------------------------------------------------------------------------------------------- in the world


def outcome(check: Callable[[World], None], world: World) -> str:
    try:
        check(world)
    except Exception:
        return traceback.format_exc()
    return ""


def run_of_two(rank: int, path: str, folder: str) -> dict[str, dict[str, str]]:
    """layout -> check -> the traceback of its failure, empty where it passes."""
    from megappo.engine.build import RoleEngines
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    found: dict[str, dict[str, str]] = {}
    for name, sizes in TWO_RANKS.items():
        parallel = ParallelConfig.model_validate(sizes)
        engines.connect([PolicyConfig(model=path, parallel=parallel)])
        place, kind = Path(folder, name.replace(" ", "_")), name.split()[0]
        found[name] = {
            check.__name__: outcome(check, World(engines, parallel, path, place / check.__name__, engine=kind))
            for check in meant_for(name)
        }
        for fault, (layout, check, _) in FAULTY_OF_TWO.items():
            if layout == name:
                place = World(engines, parallel, path, Path(folder, fault.__name__), fault)
                found[fault.__name__] = {check.__name__: outcome(check, place)}
    return found


def run_toy(rank: int, path: str, folder: str) -> dict[str, dict[str, str]]:
    """As `run_of_two`, for the toy engine and every faulty one."""
    found: dict[str, dict[str, str]] = {}
    for kind in (ToyEngine, *FAULTY):
        engines, name = toy_engines(), "toy" if kind is ToyEngine else kind.__name__
        engines.build = kind
        found[name] = {
            check.__name__: outcome(check, World(engines, ParallelConfig(), path, Path(folder, name, check.__name__)))
            for check in (meant_for("toy") if kind is ToyEngine else FAULTY[kind][:1])
        }
    return found


# ------------------------------------------------------------------------------------------------------------------- faults


class DividesTwice(ToyEngine):
    def forward_backward(self, share: Any, loss_fn: Any, *, denominator: float = 1.0, **how: Any) -> PassResult:
        return super().forward_backward(share, loss_fn, denominator=denominator**2, **how)


class ReadsEverything(ToyEngine):
    def forward_backward(self, share: Any, loss_fn: Any, *, reads: Any = (), **how: Any) -> PassResult:
        return super().forward_backward(share, loss_fn, reads=(*share.token_fields, *reads), **how)


class HandsBackInItsOwnOrder(ToyEngine):
    def forward_backward(self, share: Any, loss_fn: Any, **how: Any) -> PassResult:
        result = super().forward_backward(share, loss_fn, **how)
        result.tokens.update({name: values.roll(1) for name, values in result.tokens.items()})
        return result


class ForgetsMoments(ToyEngine):
    def boxes_to_load(self, stored: Any, **how: Any) -> Any:
        return [box for box in super().boxes_to_load(stored, **how) if not box.key.startswith("optimizer.")]


class TakesEveryHead(ToyEngine):
    def boxes_loaded(self, position: Any) -> None:
        super().boxes_loaded(position)
        if self.value_head:
            self.named_parameters()["score.weight"].data.zero_()


class HoldsATensorTwice(ToyEngine):
    def pieces(self) -> Any:
        (held,) = super().pieces().values()
        whole = held[0]
        return {0: [whole._replace(box=whole.box._replace(r1=whole.box.r1 - 1)), *held]}


class StepsThroughNaN(ToyEngine):
    def optimizer_step(self) -> Any:
        self._optimizer.step()
        return super().optimizer_step()


class MovesFrozenWeights(ToyEngine):
    def optimizer_step(self) -> Any:
        taken = super().optimizer_step()
        for weight in self.named_parameters().values():
            if not weight.requires_grad:
                weight.data.mul_(1.001)
        return taken


class ReadsBinsBackwards(ToyEngine):
    def forward_backward(self, share: Any, loss_fn: Any, **how: Any) -> PassResult:
        return super().forward_backward(share, lambda output, micro: loss_fn(output.flip(-1), micro), **how)


class RecordsInEvalMode(ToyEngine):
    def eval_mode(self) -> Any:
        return nullcontext()


class NamesGradientsOtherwise(ToyEngine):
    def named_gradients(self) -> dict[str, Tensor]:
        return {f"module.{name}": gradient for name, gradient in super().named_gradients().items()}


class SwapsTwoLayers(ToyEngine):
    def pieces(self) -> Any:
        (held,) = super().pieces().values()
        other = str.maketrans("01", "10")  # the checkpoint has two layers
        return {0: [piece._replace(hf=piece.hf.translate(other)) for piece in held]}


class FusesWithoutTemperature(ToyEngine):
    class output(ToyOutput):
        def fused_loss(self, query: Any, token_loss: Any) -> Any:
            return token_loss(slice(None), *self.logprobs(replace(query, temperature=1.0)))


class ReducesATensorTwice(ToyEngine):
    def forward_backward(self, share: Any, loss_fn: Any, **how: Any) -> PassResult:
        result = super().forward_backward(share, loss_fn, **how)
        self.named_gradients()["model.embed_tokens.weight"].mul_(2.0)
        return result


class LeavesGradientsBehind(ToyEngine):
    def forward_backward(self, share: Any, loss_fn: Any, *, forward_only: bool = False, **how: Any) -> PassResult:
        result = super().forward_backward(share, loss_fn, forward_only=forward_only, **how)
        if forward_only:
            self.named_gradients()["model.norm.weight"].add_(1.0)
        return result


class StepsAtTheFullRate(ToyEngine):
    def lr_scheduler_step(self) -> float:
        scheduled = super().lr_scheduler_step()
        self._optimizer.param_groups[0]["lr"] = LR
        return scheduled


class LosesMomentsOnExit(ToyEngine):
    @contextmanager
    def train_mode(self) -> Any:
        yield
        self._optimizer.state.clear()


class IgnoresTheSeed(ToyEngine):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(replace(spec, seed=0))


class FrozenHeadIsZero(ToyEngine):
    def __init__(self, spec: EngineSpec) -> None:
        frozen_critic = spec.value_head is not None and spec.total_updates is None
        super().__init__(replace(spec, value_head="zero") if frozen_critic else spec)


class LeavesATensorOut(ToyEngine):
    def save_state(self, **how: Any) -> Any:
        state = super().save_state(**how)
        left = {name: values for name, values in state.tensors.items() if name != "model.norm.weight"}
        return replace(state, boxes=[box for box in state.boxes if box.key in left], tensors=left)


class ExportsItsFirstWeights(ToyEngine):
    def export(self, directory: Path, source: Path, tokenizer: Tokenizer | None = None) -> None:
        shutil.copytree(source, directory)


class OverwritesAnExport(ToyEngine):
    def export(self, directory: Path, source: Path, tokenizer: Tokenizer | None = None) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        super().export(directory, source, tokenizer)


class GivesTheNextRow(ToyEngine):
    class output(ToyOutput):
        def logits(self, rows: Any, logits_dtype: Any) -> Tensor:
            return super().logits(rows if isinstance(rows, slice) else rows - 1, logits_dtype)


class HasNoHolder(ToyEngine):
    shares = Shares(((0,),), ((),), ((),))


class LeavesEmptySharesOut(ToyEngine):
    def forward_backward(self, share: Any, loss_fn: Any, **how: Any) -> PassResult:
        return super().forward_backward(share, loss_fn, **how) if share.num_sequences else PassResult({}, {}, {}, 0)


class ReportsEverywhere(DelegatingEngine):
    def forward_backward(self, share: Any, loss_fn: Any, **how: Any) -> PassResult:
        result = self._engine.forward_backward(share, loss_fn, **how)
        for values in result.tokens.values():
            dist.all_reduce(values)
        return result


class ReadsFieldsEverywhere(DelegatingEngine):
    def forward_backward(self, share: Any, loss_fn: Any, *, reads: Any = (), **how: Any) -> PassResult:
        missing = torch.tensor(float(any(name not in share for name in reads)))
        dist.all_reduce(missing)  # all ranks fail: one alone would leave the others in the pass
        assert not missing, "a field is not there"
        return self._engine.forward_backward(share, loss_fn, reads=reads, **how)


class AgreesWithoutAsking(DelegatingEngine):
    def forward_backward(self, share: Any, loss_fn: Any, **how: Any) -> PassResult:
        return PassResult({}, {}, {}, 1)


# Faulty engine -> the check that notices it, and a part of the line that fails.
FAULTY: dict[type[ToyEngine], tuple[Callable[[World], None], str]] = {
    RecordsInEvalMode: (modes_decide_whether_gradients_are_recorded, "not torch.is_grad_enabled()"),
    NamesGradientsOtherwise: (names_of_parameters_gradients_and_pieces_agree, "gradients.keys()"),
    HoldsATensorTwice: (pieces_cover_every_tensor_once, "overlap"),
    SwapsTwoLayers: (pieces_say_where_the_checkpoints_numbers_stand, "theirs[name]"),
    HandsBackInItsOwnOrder: (log_probs_are_those_of_transformers_in_the_batchs_order, "no prefix"),
    FusesWithoutTemperature: (both_ways_to_a_loss_give_its_gradient, "steps.sums[name]"),
    ReadsEverything: (a_pass_reads_what_it_declares_and_hands_results_back_in_order, "refused"),
    DividesTwice: (gradients_are_divided_once, "2 * halved"),
    ReducesATensorTwice: (gradients_are_those_of_transformers, "torch.allclose(gradient, wanted"),
    LeavesGradientsBehind: (a_forward_only_pass_leaves_gradients, "not any(gradient.any()"),
    StepsAtTheFullRate: (a_step_moves_the_weights_by_the_scheduled_rate, "0.5 * lr < moved"),
    StepsThroughNaN: (a_non_finite_gradient_is_skipped, "same(before"),
    LosesMomentsOnExit: (leaving_a_mode_changes_nothing, "moments came back"),
    IgnoresTheSeed: (a_value_head_starts_as_asked, "drawn from the seed, trained=True"),
    FrozenHeadIsZero: (a_value_head_starts_as_asked, "trained=False"),
    ForgetsMoments: (a_checkpoint_gives_back_weights_and_optimizer, "same(further"),
    TakesEveryHead: (a_critic_takes_the_layers_of_a_policy_and_keeps_its_head, "torch.equal(taken.pop"),
    LeavesATensorOut: (a_weight_that_is_nan_is_found_in_what_would_be_saved, "bool(found) == mine"),
    ExportsItsFirstWeights: (exports_are_read_by_transformers, "theirs[name]"),
    OverwritesAnExport: (exports_are_read_by_transformers, "an export that exists"),
    GivesTheNextRow: (logits_of_a_few_rows_are_those_behind_the_log_probs, "torch.allclose(logprob["),
    HasNoHolder: (shares_are_of_all_ranks_and_say_who_holds_what, "assert holders"),
    MovesFrozenWeights: (frozen_weights_stay_and_the_rest_trains_as_without, "what is frozen stays"),
    ReadsBinsBackwards: (a_categorical_head_trains_as_transformers_own_model, "values[inside], bins.expectation"),
    LeavesEmptySharesOut: (any_division_of_a_batch_gives_its_gradient, "nothing.tokens["),
}
# The same of engines on two ranks, with the layout.
FAULTY_OF_TWO: dict[type[DelegatingEngine], tuple[str, Callable[[World], None], str]] = {
    ReportsEverywhere: (
        "megatron tp2 sp",
        results_of_a_share_are_in_its_order_on_its_reporter_alone,
        "else torch.zeros(share.num_tokens)",
    ),
    ReadsFieldsEverywhere: ("megatron pp2", ranks_read_what_the_shares_say_and_no_more, "assert not missing"),
    AgreesWithoutAsking: ("megatron tp2 sp", a_rank_with_other_sequences_than_its_replica_is_named, 'assert "rank 0 is before'),
}
# An engine keeps the whole contract in one layout; in the others what depends on who holds which part of a tensor or of a batch.
# Numbers in all of them are those of tests/parity.
WHOLE_CONTRACT = ("megatron pp2", "fsdp2 tp2 sp", "toy")
OF_LAYOUTS = (
    pieces_cover_every_tensor_once,
    pieces_say_where_the_checkpoints_numbers_stand,
    a_non_finite_gradient_is_skipped,
    a_checkpoint_gives_back_weights_and_optimizer,
    a_weight_that_is_nan_is_found_in_what_would_be_saved,
    logits_of_a_few_rows_are_those_behind_the_log_probs,
    shares_are_of_all_ranks_and_say_who_holds_what,
    results_of_a_share_are_in_its_order_on_its_reporter_alone,
    any_division_of_a_batch_gives_its_gradient,
    a_rank_with_other_sequences_than_its_replica_is_named,
)
# Checks that an engine cannot fail, and the reason.
VACUOUS = {
    ("toy", both_ways_to_a_loss_give_its_gradient): "the toy has no fused_loss: there is one way to its loss",
    **{
        (engine, ranks_read_what_the_shares_say_and_no_more): "every rank holds tokens and fields"
        for engine in (*(name for name in TWO_RANKS if "pp2" not in name), "toy")
    },
    **{
        (engine, a_rank_with_other_sequences_than_its_replica_is_named): "a replica is one rank"
        for engine in ("megatron dp2", "fsdp2 dp2", "toy")
    },
}


def meant_for(engine: str) -> list[Callable[[World], None]]:
    checks = CHECKS if engine in WHOLE_CONTRACT else OF_LAYOUTS
    return [check for check in checks if (engine, check) not in VACUOUS]


# -------------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[dict[str, str]]]:
    """Engine -> for every rank: check -> traceback."""
    folder = tmp_path_factory.mktemp("conformance")
    path = str(folder / "llama")
    write_checkpoint(path, "llama")
    ranks = spawn_world(run_of_two, 2, path, str(folder / "two"))
    (toy,) = spawn_world(run_toy, 1, path, str(folder / "toy"))
    return {name: [found[name] for found in ranks] for name in ranks[0]} | {name: [found] for name, found in toy.items()}


@pytest.mark.parametrize("engine", [*TWO_RANKS, "toy"])
def test_the_engine_keeps_its_contract(outcomes, engine: str) -> None:
    """Every check on every rank; a check that fails is there with its traceback."""
    for found in outcomes[engine]:
        assert found == {check.__name__: "" for check in meant_for(engine)}


@pytest.mark.parametrize("fault", FAULTY, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(outcomes, fault: type[ToyEngine]) -> None:
    check, line = FAULTY[fault]
    assert line in outcomes[fault.__name__][0][check.__name__]


@pytest.mark.parametrize("fault", FAULTY_OF_TWO, ids=lambda fault: fault.__name__)
def test_a_fault_of_one_of_two_ranks_is_noticed(outcomes, fault: type[DelegatingEngine]) -> None:
    _, check, line = FAULTY_OF_TWO[fault]
    assert any(line in found[check.__name__] for found in outcomes[fault.__name__])


def test_every_check_can_fail() -> None:
    assert {check for *_, check, _ in (*FAULTY.values(), *FAULTY_OF_TWO.values())} == set(CHECKS)
