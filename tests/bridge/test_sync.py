"""The whole bridge over gloo with a plain engine: layouts, dtypes, bucket sizes, and every fault that a push must report."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.bridge import sync as sync_module
from megappo.bridge.destination import Destination
from megappo.bridge.sync import BUCKET_BYTES, Route, WeightSync
from megappo.models.arch import ModelArch
from megappo.models.pieces import rectangle
from megappo.models.weight_map import piece_map
from megappo.parallel.layout import ParallelLayout
from tests.bridge.engines import HeldPolicy, arch_like, engine_destination, engine_tensors, policy_tensors, random_checkpoint
from tests.worlds import spawn_world

RANKS = 4
ARCHS = {
    "llama": arch_like("llama", num_kv_heads=4),
    "qwen2_tied": arch_like("qwen2", tied_embeddings=True),
    "qwen3_moe": arch_like("qwen3_moe", num_kv_heads=4),
}
_FP32 = (torch.float32, torch.float32)
# arch, train layout, engine tp, policy dtype, engine dtype, bucket bytes
PUSHES = {
    "tp2-pp2-to-tp2": ("llama", dict(tp=2, pp=2), 2, *_FP32, 1 << 20),
    "tp4-to-tp1-in-small-buckets": ("llama", dict(tp=4), 1, *_FP32, 500),
    "pp4-tied-to-tp4-kv-replicated": ("qwen2_tied", dict(pp=4), 4, *_FP32, 1 << 20),
    "dp2-tp2-tied-to-tp4": ("qwen2_tied", dict(tp=2), 4, *_FP32, 2000),
    "fp32-policy-bf16-engine": ("llama", dict(tp=2), 1, torch.float32, torch.bfloat16, 1 << 20),
    "bf16-policy-fp32-engine": ("llama", dict(pp=2), 2, torch.bfloat16, torch.float32, 1 << 20),
    "vpp2-uneven-cp2-to-tp2": ("llama", dict(cp=2, pp=2, vpp=2, layers_per_stage=(1, 1, 2, 0)), 2, *_FP32, 1 << 20),
    "ep4-to-tp1": ("qwen3_moe", dict(ep=4), 1, *_FP32, 2000),
    "ep2-etp2-to-tp2": ("qwen3_moe", dict(tp=2, ep=2, etp=2), 2, *_FP32, 1 << 20),
    "ep2-pp2-vpp2-to-tp4": ("qwen3_moe", dict(pp=2, vpp=2, ep=2), 4, *_FP32, 1 << 20),
    "ep2-tp4-fp32-to-bf16": ("qwen3_moe", dict(tp=4, ep=2), 1, torch.float32, torch.bfloat16, 500),
}
# arch, layout of the sources, their ranks, ranks of the engine, its tp; the other ranks of the world are at neither end
SPLITS = {
    "own-ranks-tp2": ("llama", ParallelLayout(2, tp=2), (0, 1), (2, 3), 2),
    "own-ranks-pp2-to-replicas": ("qwen2_tied", ParallelLayout(2, pp=2), (0, 1), (2, 3), 1),
    "engine-on-half-of-the-ranks": ("llama", ParallelLayout(4, tp=2, pp=2), (0, 1, 2, 3), (2, 3), 2),
    "policy-on-half-of-the-ranks": ("qwen3_moe", ParallelLayout(2, ep=2), (1, 3), (0, 1, 2, 3), 2),
    "overlap-of-one-rank": ("qwen3_moe", ParallelLayout(2, ep=2), (0, 1), (1, 2, 3), 1),
    "two-idle-ranks": ("llama", ParallelLayout(1), (3,), (1,), 1),
}
FAULTS = {
    "flipped_bit": "arrived with checksum",
    "gate_up_swapped": "gate_up_proj.weight arrived with checksum",
    "stale_rank": "arrived with checksum",
    "padding_touched": "embed_tokens.weight arrived with checksum",
    "missing_parameter": "rank 3 has no parameter decoder.layers.0.mlp.linear_fc1.weight",
    "wrong_shape": "rank 3: decoder.layers.0.mlp.linear_fc1.weight of shape (1, 16) is too small",
    "experts_swapped": "w13_weight arrived with checksum",
    "expert_gate_up_swapped": "w13_weight arrived with checksum",
    "expert_never_lands": "w2_weight arrived with checksum",
    "missing_expert": "rank 3 has no parameter decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.weight",
}


class PlainEngine:
    """Parameters in a dict, norms in fp32; `spoil(move, values)` may change what lands."""

    def __init__(self, arch: ModelArch, tp: int, rank: int, dtype: torch.dtype) -> None:
        self.receiver = self
        self.device = torch.device("cpu")
        self.version: int | None = None
        described = engine_destination(arch, tp, rank, dtype)
        others = {name: torch.float32 for name in described.shapes if "norm" in name}
        self._destination = dataclasses.replace(described, others=others)
        self.tensors: dict[str, Tensor] = {}
        self.spoil = lambda move, values: (move, values)
        self.spoil_end = lambda tensors: None

    def describe(self, tensors: Any) -> Destination:
        return self._destination

    @contextlib.contextmanager
    def session(self, moves: Any, inspect: Any) -> Iterator[Any]:
        shapes, dtype_of = self._destination.shapes, self._destination.dtype_of
        self.tensors = {n: torch.zeros(*s, dtype=dtype_of(n)) for n, s in shapes.items()}

        def land(move, values):
            move, values = self.spoil(move, values)
            rectangle(self.tensors[move.target], move.d_slot, move.d_row, move.d_col, move.rows, move.cols).copy_(values)

        yield land
        self.spoil_end(self.tensors)
        for name, tensor in self.tensors.items():
            if inspect is not None:
                inspect(name, tensor)

    def weights_changing(self) -> None:
        self.version = None

    def weights_changed(self, version: int) -> None:
        self.version = version


def connect(policy: HeldPolicy, engine: PlainEngine, engine_tp: int, cap: int = BUCKET_BYTES) -> WeightSync:
    return WeightSync(policy, engine, Route.colocated(policy, engine_tp), torch.device("cpu"), bucket_bytes=cap)


def run_push(rank: int, case: tuple) -> dict[str, Any]:
    name, sizes, engine_tp, policy_dtype, engine_dtype, cap = case
    arch, layout = ARCHS[name], ParallelLayout(RANKS, **sizes)
    engine = PlainEngine(arch, engine_tp, rank % engine_tp, engine_dtype)
    policy = HeldPolicy(arch, layout)
    local, sync = policy.tensors, connect(policy, engine, engine_tp, cap)
    wrong, metrics = [], {}
    for version in (1, 2):
        checkpoint = random_checkpoint(arch, seed=version)
        for name in checkpoint:
            if "norm" in name:  # would be rounded on a wire of bf16
                checkpoint[name] = (checkpoint[name] + 2.0**-12).to(policy_dtype).float()
        local.update({n: t.to(policy_dtype) for n, t in policy_tensors(arch, layout, rank, checkpoint).items()})
        metrics = sync.push(version)
        for target, want in engine_tensors(arch, checkpoint, engine_tp, rank % engine_tp).items():
            got = engine.tensors[target]
            if not torch.equal(got, want.to(got.dtype).view(got.shape)):
                wrong.append(f"version {version} {target}")
        assert engine.version == version
    filled = sum(fill.box.area for fill in engine.describe({}).fills) * engine_dtype.itemsize
    return {"wrong": wrong, "metrics": metrics, "needed": sum(t.nbytes for t in engine.tensors.values()) - filled}


def run_split(rank: int, case: tuple) -> dict[str, Any]:
    name, layout, sources, destinations, engine_tp = case
    arch = ARCHS[name]
    policy = HeldPolicy(arch, layout) if rank in sources else None
    tp_rank = destinations.index(rank) % engine_tp if rank in destinations else None
    engine = None if tp_rank is None else PlainEngine(arch, engine_tp, tp_rank, torch.float32)
    route = Route(arch, piece_map(arch, layout), sources, destinations, engine_tp)
    sync = WeightSync(policy, engine, route, torch.device("cpu"))
    wrong, metrics = [], {}
    for version in (1, 2):
        checkpoint = random_checkpoint(arch, seed=version)
        if policy is not None:
            policy.tensors = policy_tensors(arch, layout, sources.index(rank), checkpoint)
        metrics = sync.push(version)
        if engine is not None:
            wrong += differing(engine, engine_tensors(arch, checkpoint, engine_tp, tp_rank))
            assert engine.version == version
    return {"wrong": wrong, "metrics": metrics, "engine": engine is not None, "policy": policy is not None}


def differing(engine: PlainEngine, wanted: dict[str, Tensor]) -> list[str]:
    return [name for name, want in wanted.items() if not torch.equal(engine.tensors[name], want.view(engine.tensors[name].shape))]


def flip_bytes(rank: int) -> list[tuple[str, str]]:
    """Push again and again, with one byte of another parameter of rank 1 flipped each time: (parameter, error), "" without."""
    arch, layout = ARCHS["qwen3_moe"], ParallelLayout(RANKS, tp=2, ep=2)
    engine = PlainEngine(arch, 2, rank % 2, torch.bfloat16)
    sync = connect(HeldPolicy(arch, layout, policy_tensors(arch, layout, rank, random_checkpoint(arch, seed=1))), engine, 2)
    generator, found = random.Random(3), []
    for version, name in enumerate(["", *engine.describe({}).shapes, ""]):

        def flip(tensors: dict[str, Tensor], name: str = name) -> None:
            if rank == 1 and name:
                raw = tensors[name].view(-1).view(torch.uint8)
                raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)

        engine.spoil_end = flip
        try:
            sync.push(version)
            found.append((name, ""))
        except RuntimeError as error:
            found.append((name, str(error)))
    return found


def run_fault(rank: int, fault: str | None) -> str:
    """Push with one fault on rank 1 (or in rank 3's parameters); returns the error this rank raised."""
    arch, layout = arch_like("llama", num_kv_heads=4, vocab_size=50), ParallelLayout(RANKS, tp=4)
    if fault is not None and "expert" in fault:
        arch, layout = arch_like("qwen3_moe", num_kv_heads=4, vocab_size=50), ParallelLayout(RANKS, ep=4)
    engine = PlainEngine(arch, 1, 0, torch.float32)
    local = policy_tensors(arch, layout, rank, random_checkpoint(arch, seed=1))
    sync = connect(HeldPolicy(arch, layout, local), engine, 1)
    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    if fault == "flipped_bit" and rank == 1:

        def flip(move, values):
            values = values.clone()
            if "o_proj" in move.hf:
                values.view(torch.int32)[0, 0] ^= 1
            return move, values

        engine.spoil = flip
    elif fault == "gate_up_swapped" and rank == 1:
        half = arch.ffn_size
        engine.spoil = lambda move, values: (
            (move._replace(d_row=(move.d_row + half) % (2 * half)), values) if "gate_up" in move.target else (move, values)
        )
    elif fault == "stale_rank" and rank == 1:
        engine.spoil = lambda move, values: (move, torch.zeros_like(values) if move.src == 2 else values)
    elif fault == "padding_touched" and rank == 1:
        engine.spoil_end = lambda tensors: tensors["model.embed_tokens.weight"][..., -1, :].fill_(1.0)
    elif fault == "experts_swapped" and rank == 1:
        other = {2: 5, 5: 2}
        engine.spoil = lambda move, values: (move._replace(d_slot=other.get(move.d_slot, move.d_slot)), values)
    elif fault == "expert_gate_up_swapped" and rank == 1:
        half = arch.moe.ffn_size
        engine.spoil = lambda move, values: (
            (move._replace(d_row=(move.d_row + half) % (2 * half)), values) if "w13" in move.target else (move, values)
        )
    elif fault == "expert_never_lands" and rank == 1:
        engine.spoil = lambda move, values: (move, values * 0.0 if "experts.6.down_proj" in move.hf else values)
    elif fault == "missing_expert" and rank == 3:
        del local["decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.weight"]
    elif fault == "missing_parameter" and rank == 3:
        del local[fc1]
    elif fault == "wrong_shape" and rank == 3:
        local[fc1] = local[fc1][:1]
    try:
        sync.push(7)
    except RuntimeError as error:
        assert engine.version is None
        return str(error)
    assert engine.version == 7
    return ""


def disagree(rank: int) -> str:
    """Rank 2 plans for another layout."""
    arch = ARCHS["llama"]
    layout = ParallelLayout(RANKS, tp=2 if rank == 2 else 4)
    try:
        connect(HeldPolicy(arch, layout), PlainEngine(arch, 1, 0, torch.float32), 1)
    except RuntimeError as error:
        return str(error)
    return ""


def plan_otherwise(rank: int) -> str:
    """Rank 2 chooses senders by another rule."""
    arch, layout = ARCHS["llama"], ParallelLayout(RANKS, tp=2)
    planned = sync_module.plan_rank
    if rank == 2:
        sync_module.plan_rank = lambda ends, rank: planned(dataclasses.replace(ends, ranks_per_node=2), rank)
    try:
        connect(HeldPolicy(arch, layout), PlainEngine(arch, 1, 0, torch.float32), 1)
    except RuntimeError as error:
        return str(error)
    finally:
        sync_module.plan_rank = planned
    return ""


def in_world(rank: int) -> dict[str, Any]:
    return {
        "push": {name: run_push(rank, case) for name, case in PUSHES.items()},
        "fault": {fault: run_fault(rank, fault) for fault in (None, *FAULTS)},
        "split": {name: run_split(rank, case) for name, case in SPLITS.items()},
        "flipped": flip_bytes(rank),
        "disagree": disagree(rank),
        "planned_otherwise": plan_otherwise(rank),
    }


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return spawn_world(in_world, RANKS)


@pytest.mark.parametrize("name", PUSHES)
def test_pushed_weights_are_those_of_the_policy(world, name):
    for rank, result in enumerate(world):
        assert result["push"][name]["wrong"] == [], f"rank {rank}"


@pytest.mark.parametrize("name", PUSHES)
def test_bytes_are_accounted_for(world, name):
    results = [result["push"][name] for result in world]
    for result in results:
        assert result["metrics"]["bytes_received"] + result["metrics"]["bytes_local"] == result["needed"]
    assert sum(r["metrics"]["bytes_sent"] for r in results) == sum(r["metrics"]["bytes_received"] for r in results)


def test_every_push_is_verified(world):
    assert {push["metrics"]["verified"] for result in world for push in result["push"].values()} == {1.0}  # of the second push


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_by_every_rank_with_the_names(world, fault):
    messages = {result["fault"][fault] for result in world}
    assert len(messages) == 1, "all ranks raise the same"
    message = messages.pop()
    assert "push of weights 7: rank" in message and FAULTS[fault] in message
    assert ("rank 3" if FAULTS[fault].startswith("rank 3") else "rank 1") in message


def test_the_same_push_without_a_fault_passes(world):
    assert [result["fault"][None] for result in world] == [""] * RANKS


def test_ranks_with_different_plans_refuse_to_start(world):
    start = "the ranks computed different weight transfer plans: "
    layout = f"{start}rank 2 was given another policy layout or other ranks than rank 0"
    assert {result["disagree"] for result in world} == {layout}
    (error,) = {result["planned_otherwise"] for result in world}
    assert error.startswith(start) and "rank 2" in error and "would send" in error


@pytest.mark.parametrize("name", SPLITS)
def test_policy_and_engine_may_live_on_different_ranks(world, name):
    results = [result["split"][name] for result in world]
    assert [result["wrong"] for result in results] == [[]] * RANKS
    for result in results:
        sent, received, local = (result["metrics"][f"bytes_{what}"] for what in ("sent", "received", "local"))
        assert bool(received + local) == result["engine"]
        assert result["policy"] or not sent
        assert not local or (result["policy"] and result["engine"]), "only a rank at both ends keeps anything"
    assert sum(r["metrics"]["bytes_sent"] for r in results) == sum(r["metrics"]["bytes_received"] for r in results)


def test_one_flipped_byte_is_named_at_every_push(world):
    for result in world:
        flips = result["flipped"]
        assert len(flips) > 30 and flips[0] == flips[-1] == ("", "")
        for version, (name, error) in enumerate(flips[1:-1], start=1):
            assert error.startswith(f"push of weights {version}: rank 1: {name} arrived with checksum"), name
            assert "more" not in error
