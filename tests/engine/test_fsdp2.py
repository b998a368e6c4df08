"""FSDP2 beyond the contract (`test_conformance.py`) and the numbers (`tests/parity`): families, refusals, shards, bytes, faults."""

from __future__ import annotations

import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.fsdp2 import sharded_memory
from megappo.commands.plan.memory import role_memory
from megappo.config.role_sections import (
    ConstantLRConfig,
    CriticConfig,
    DecayingLRConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from megappo.config.run_sections import TimeoutsConfig
from megappo.engine.megatron_optimizer import schedule_of
from megappo.models.hf_config import arch_for, read_arch
from megappo.models.pieces import Box, check_tiling
from megappo.models.row_shards import shard_box, shard_piece_map
from megappo.models.weight_map import hf_cuts, hf_tensors
from megappo.models.weight_rules import Cut
from megappo.parallel.layout import ParallelLayout
from tests.engine.runs import recorded_batch
from tests.models.checkpoints import CASES, COMPOSITE, DELTA_CASES, write_checkpoint
from tests.models.fp8_checkpoints import quantise_checkpoint
from tests.worlds import spawn_world

FP8 = "llama in fp8"
EXPERTS = "qwen3_moe"  # others are in test_any_family.py
FAMILIES = (*(case for case in CASES if case not in DELTA_CASES), EXPERTS, COMPOSITE, FP8)
# Whole on each rank, beside tp: where tp is refused, and where what is read is no plain checkpoint. bf16: dense and with experts.
UNCUT, ROUNDED = ("llama", EXPERTS, COMPOSITE, FP8), ("llama", EXPERTS)
# fp32: log-probs of order 1 to 10 in another order of sums; bf16 beside Megatron's bf16, both against fp32.
TOLERANCE, BF16_FACTOR = 2e-5, 1.5
RECOMPUTE = ("none", "selective", "full")
BUILT = [(dtype, value_head, 1) for dtype in ("bf16", "fp32") for value_head in (False, True)] + [("bf16", True, 2)]
SEQUENCE_PARALLEL = ParallelConfig(tp=2, sequence_parallel=True)
# Families with gradients of a kind of their own: head norms are partial over tp, biases are cut, ties come apart.
CUT = ("qwen3", "qwen2_tied")


def engine_of(engines: Any, path: str, section: Any, **spec: Any) -> Any:
    from megappo.engine.factory import EngineSpec

    role = "critic" if spec.get("value_head") else "policy"
    return engines.build(EngineSpec(role, path, arch_for(path, section.engine), section, **spec))


def logprobs(engine: Any) -> torch.Tensor:
    from megappo.trainer.roles import LanguageModel
    from tests.engine.whole import Whole

    return LanguageModel(Whole(engine), 1.0).logprobs(recorded_batch(), want_entropy=False)[0]


def run_of_two(rank: int, folder: str) -> dict[str, Any]:
    from megappo.engine.build import RoleEngines
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    found: dict[str, Any] = {"kinds": set(), "families": {}, "bytes": {}}
    for family in FAMILIES:
        path, outputs = f"{folder}/{family}", {}
        kinds = [("megatron", "fp32")] + [("fsdp2", "fp32")] * (family in UNCUT)
        for kind, dtype in kinds + [("megatron", "bf16"), ("fsdp2", "bf16")] * (family in ROUNDED):
            engine = engine_of(engines, path, PolicyConfig(model=path, engine=kind, dtype=dtype, micro_batch_tokens=64))
            found["kinds"].add((kind, type(engine).__name__))
            outputs[kind, dtype] = logprobs(engine)
        if family != EXPERTS:  # refused with tp
            cut = PolicyConfig(model=path, engine="fsdp2", dtype="fp32", micro_batch_tokens=64, parallel=SEQUENCE_PARALLEL)
            outputs["fsdp2 tp2 sp", "fp32"] = logprobs(engine_of(engines, path, cut))
        found["families"][family] = outputs
    for family in CUT:
        found[family] = wrong_gradients(engines, f"{folder}/{family}")
    with mock.patch("megappo.engine.fsdp2_model.ShardedModel.sum_partial_gradients"):
        found["qwen3 without sum"] = wrong_gradients(engines, f"{folder}/qwen3")
    path = f"{folder}/llama"
    for dtype, value_head, tp in BUILT:
        found["bytes"][dtype, value_head, tp] = held_bytes(engines, path, dtype, value_head, tp)
    policy = PolicyConfig(model=path, engine="fsdp2", dtype="fp32")
    found["averaged"] = first_gradient(engines, path, policy, averaged=True) / first_gradient(engines, path, policy)
    found["weights seen"] = weights_are_seen(engine_of(engines, path, policy))
    with mock.patch("megappo.engine.fsdp2_model.ShardedModel.reshard"):
        found["weights seen without reshard"] = weights_are_seen(engine_of(engines, path, policy))
    for recompute in RECOMPUTE:
        section = policy.model_copy(update={"recompute": recompute})
        found["recompute", recompute] = kept_and_gradients(engine_of(engines, path, section, total_updates=1))
    for away in (False, True):
        section = policy.model_copy(update={"recompute": "offload" if away else "full", "micro_batch_tokens": 64})
        found["inputs", away] = inputs_and_gradients(engine_of(engines, path, section, total_updates=1))
    for once in (False, True):
        section = policy.model_copy(update={"reduce_once": once, "micro_batch_tokens": 16})
        found["reductions", once] = reductions(engine_of(engines, path, section, total_updates=1))
    found["neighbours"] = message(lambda: with_one_long_sequence(engines, path, policy))
    return found


def wrong_gradients(engines: Any, path: str) -> list[str]:
    """Tensors whose gradients differ between data parallel and tensor parallel, or between copies of a tp rank."""
    from tests.engine.test_conformance import gradients_of, whole
    from tests.engine.whole import Whole

    found = []
    for parallel in (ParallelConfig(), ParallelConfig(tp=2)):
        section = PolicyConfig(model=path, engine="fsdp2", dtype="fp32", parallel=parallel)
        engine = Whole(engine_of(engines, path, section, total_updates=1))
        found.append(whole(engine, gradients_of(engine), check_copies=False))
    wanted, ours = found
    return [name for name, gradient in wanted.items() if not torch.allclose(ours[name], gradient, atol=TOLERANCE)]


def held_bytes(engines: Any, path: str, dtype: Any, value_head: bool, tp: int) -> tuple[int, int, int]:
    """(weights, gradients, optimizer state) of this rank of a model that trains."""
    settings: dict[str, Any] = dict(engine="fsdp2", dtype=dtype, parallel={"tp": tp})
    section = CriticConfig(**settings) if value_head else PolicyConfig(model=path, **settings)
    engine = engine_of(engines, path, section, value_head="normal" if value_head else None, total_updates=1)
    engine.optimizer_zero_grad()
    parameters, gradients = engine.named_parameters().values(), engine.named_gradients().values()
    counted = (parameters, gradients, engine._optimizer.tensors())
    return tuple(sum(tensor.nbytes for tensor in tensors) for tensors in counted)  # type: ignore[return-value]


def first_gradient(engines: Any, path: str, section: PolicyConfig, *, averaged: bool = False) -> float:
    """A number of the reduced gradient of a fixed batch on every rank; averaged: with FSDP2's own division by the ranks."""
    from torch.distributed.fsdp import FSDPModule

    from tests.engine.test_conformance import negative_logprob

    engine = engine_of(engines, path, section, total_updates=1)
    for part in engine._model.module.modules() if averaged else ():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(2.0)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward(recorded_batch(), negative_logprob, reads=("weight",))
        return float(engine.named_gradients()["model.layers.0.self_attn.q_proj.weight"].flatten()[0])


def kept_and_gradients(engine: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """(bytes that autograd keeps from forward to backward, reduced gradients) of a fixed batch."""
    from tests.engine.test_conformance import gradients_of

    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gradients = gradients_of(engine)
    return sum(kept.values()), gradients


def inputs_and_gradients(engine: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
    """(layers whose input is alive between forward and backward, for each micro-batch; reduced gradients)."""
    from tests.engine.test_conformance import negative_logprob

    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    alive = []

    def enter(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs.append(weakref.ref(args[0].untyped_storage()))

    def between(output: Any, micro: Any) -> Any:
        alive.append(sum(one() is not None for one in inputs))
        inputs.clear()
        return negative_logprob(output, micro)

    for layer in engine._model.module.base_model.layers:
        layer.register_forward_pre_hook(enter)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward(recorded_batch(), between, reads=("weight",))
        return alive, {name: gradient.clone() for name, gradient in engine.named_gradients().items()}


class Counting(TorchDispatchMode):
    """Counts the operators whose name has `part` in it."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.count = part, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.part in str(func)
        return func(*args, **(kwargs or {}))


class Reductions(NamedTuple):
    """Of a training pass. gradients: after it, and after another one without zeroing between them. peak: bytes alive in a third."""

    micro_batches: int
    reduce_scatters: int
    gradients: list[dict[str, torch.Tensor]]
    peak: int


def reductions(engine: Any) -> Reductions:
    from benchmarks.harness.alive import alive_peak
    from tests.engine.test_conformance import negative_logprob
    from tests.engine.whole import Whole

    gradients = []

    def run() -> Any:
        return Whole(engine).forward_backward(recorded_batch(), negative_logprob, reads=("weight",))

    with engine.train_mode():
        engine.optimizer_zero_grad()
        with Counting("reduce_scatter") as reduced:
            passed = run()
        peaks = []
        for _ in range(6):
            gradients.append({name: gradient.clone() for name, gradient in engine.named_gradients().items()})
            held = (*engine.named_parameters().values(), *engine.named_gradients().values(), *engine._optimizer.tensors())
            peaks.append(alive_peak(run, held))
    # The least: how long a buffer of a reduction lives depends on when the other rank comes.
    return Reductions(passed.num_micro_batches, reduced.count, gradients[:2], min(peaks))


def weights_are_seen(engine: Any) -> bool:
    """New numbers in the shards of the root's group, as a load or a step writes them, change the next pass."""
    before = logprobs(engine)
    with torch.no_grad():
        engine.named_parameters()["lm_head.weight"].mul_(1.25)
    return not torch.equal(before, logprobs(engine))


def with_one_long_sequence(engines: Any, path: str, section: PolicyConfig) -> None:
    """Build with attention to whatever stands before a token, of other sequences too."""
    from megappo.models import hf_classes

    real = hf_classes.PackedSequences

    def one_sequence(**settings: Any) -> Any:
        settings["offsets"] = settings["offsets"][[0, -1]]
        return real(**settings)

    with mock.patch.object(hf_classes, "PackedSequences", one_sequence):
        engine_of(engines, path, section)


def message(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    for family in FAMILIES:
        write_checkpoint(folder / family, "llama" if family == FP8 else family)
    quantise_checkpoint(folder / FP8, (32, 32))
    return spawn_world(run_of_two, 2, str(folder))


def test_every_family_gives_the_log_probs_of_megatron(world) -> None:
    assert world[0]["kinds"] == {("megatron", "MegatronEngine"), ("fsdp2", "Fsdp2Engine")}
    for family, found in world[0]["families"].items():
        exact = found["megatron", "fp32"]
        ours = [found[way] for way in (("fsdp2", "fp32"), ("fsdp2 tp2 sp", "fp32")) if way in found]
        assert ours and all(torch.allclose(one, exact, atol=TOLERANCE) for one in ours), family
    for family in ROUNDED:
        found = world[0]["families"][family]
        mine, theirs = (float((found[kind, "bf16"] - found["megatron", "fp32"]).square().mean()) for kind in ("fsdp2", "megatron"))
        assert 0 < mine < BF16_FACTOR**2 * theirs, family


def test_tensor_parallel_gives_the_gradients_of_data_parallel(world) -> None:
    """Negative control: without a sum over tp the head norms, and no others, have the gradients of one rank's heads."""
    for found in world:
        assert [found[family] for family in CUT] == [[]] * len(CUT)
        assert {name.rsplit(".", 2)[1] for name in found["qwen3 without sum"]} == {"q_norm", "k_norm"}


@pytest.mark.parametrize("dtype, value_head, tp", BUILT)
def test_the_plan_counts_what_a_trained_model_holds(world, tmp_path, dtype: Any, value_head: bool, tp: int) -> None:
    write_checkpoint(tmp_path, "llama")
    arch, sizes = read_arch(tmp_path), {"trained": True, "value_head": value_head}
    layout = ParallelLayout(2, tp=tp)
    work = RoleWork(dtype=dtype, micro_batch_tokens=1, num_micro_batches=1, **sizes)
    megatron = role_memory(arch, layout, 0, work)
    planned = sharded_memory(megatron, arch, layout, work)
    assert world[0]["bytes"][dtype, value_head, tp] == (planned.weights, planned.gradients, planned.optimizer)
    assert planned.gradients == pytest.approx(megatron.gradients / layout.dp, rel=0.01), "over dp a half, unlike Megatron's"


def test_gradients_are_sums_over_ranks_and_a_mean_would_be_seen(world) -> None:
    assert all(found["averaged"] == pytest.approx(0.5) for found in world)


def test_recomputed_activations_are_not_kept_and_give_the_same_gradients(world) -> None:
    for found in world:
        kept, gradients = zip(*(found["recompute", recompute] for recompute in RECOMPUTE), strict=True)
        assert kept[0] > kept[1] > kept[2], kept
        for name, wanted in gradients[0].items():
            assert all(torch.equal(other[name], wanted) for other in gradients[1:]), name


def test_layers_inputs_are_in_host_memory_until_the_backward_and_come_back_bit_for_bit(world) -> None:
    for found in world:
        (kept, wanted), (away, gradients) = (found["inputs", how] for how in (False, True))
        layers = len({name.split(".")[2] for name in wanted if ".layers." in name})
        assert kept == [layers] * len(kept) and away == [0] * len(kept) and kept
        for name, gradient in wanted.items():
            assert torch.equal(gradients[name], gradient), name


def test_gradients_are_reduced_once_a_pass_and_are_the_same(world) -> None:
    """A reduce-scatter for each layer and one for the rest of the model, in every micro-batch or in the last one alone."""
    for found in world:
        each, once = (found["reductions", how] for how in (False, True))
        groups = 1 + len({name.split(".")[2] for name in each.gradients[0] if ".layers." in name})
        assert once.micro_batches > 2
        assert (each.reduce_scatters, once.reduce_scatters) == (groups * once.micro_batches, groups)
        for wanted, ours in zip(each.gradients, once.gradients, strict=True):
            assert ours.keys() == wanted.keys()
            for name, gradient in wanted.items():
                assert torch.allclose(ours[name], gradient, rtol=1e-6, atol=1e-6), name
        first, second = (one["model.norm.weight"] for one in once.gradients)
        assert torch.allclose(second, 2 * first, rtol=1e-5), "passes add up"


def test_the_plan_counts_gradients_that_wait_for_the_last_micro_batch(world, tmp_path) -> None:
    """As if all layers' waited in its backward, where each is let go once it is reduced."""
    write_checkpoint(tmp_path, "llama")
    arch, sizes = read_arch(tmp_path), {"trained": True, "value_head": False}
    layout = ParallelLayout(2)
    work = RoleWork(dtype="fp32", micro_batch_tokens=1, num_micro_batches=3, **sizes)
    plain = role_memory(arch, layout, 0, work)
    planned = [sharded_memory(plain, arch, layout, work, accumulates=one).activations for one in (False, True)]
    assert planned[1] - planned[0] == 4 * sum(shape.numel() for shape in map(torch.Size, hf_tensors(arch).values()))
    for found in world:
        grown = found["reductions", True].peak - found["reductions", False].peak
        assert 0.4 * (planned[1] - planned[0]) < grown <= planned[1] - planned[0]


def test_new_weights_are_seen_because_the_root_is_let_go(world) -> None:
    assert all(found["weights seen"] for found in world)
    assert not any(found["weights seen without reshard"] for found in world), "negative control"


def test_a_model_whose_tokens_see_other_sequences_is_refused(world) -> None:
    for found in world:
        assert "LlamaModel: sequences packed together differ from each alone by" in found["neighbours"]
        assert "cannot run under engine fsdp2" in found["neighbours"] and "\n" not in found["neighbours"]


# ---------------------------------------------------------------------------------------------------------------- values


# Uneven rows, more ranks than rows of some tensors.
LAYOUTS = [
    *(ParallelLayout(ranks) for ranks in (1, 2, 3, 5, 200)),
    ParallelLayout(2, tp=2),
    ParallelLayout(6, tp=2),
    ParallelLayout(12, tp=2, cp=2),
    ParallelLayout(300, tp=2, cp=3),
]


@pytest.mark.parametrize("family", ["llama", "llama3_tied", "qwen2_window", "qwen3"])
def test_rectangles_cover_every_tensor_once(tmp_path, family: str) -> None:
    for value_head in [False, True]:
        for layout in LAYOUTS:
            write_checkpoint(tmp_path, family)
            arch = read_arch(tmp_path)
            held: dict[str, list[Box]] = {}
            pieces, cuts = shard_piece_map(arch, layout, value_head), hf_cuts(arch, value_head)
            for position in range(layout.world_size):
                for piece in pieces[position]:
                    # Of a tensor that tp does not cut every tp rank has a copy.
                    if cuts[piece.hf].dim is not None or layout.coordinates(position).tp == 0:
                        held.setdefault(piece.hf, []).append(piece.box)
            shapes = hf_tensors(arch, value_head)
            assert held.keys() == shapes.keys()
            for name, shape in shapes.items():
                check_tiling(Box(0, shape[0], 0, (*shape, 1)[1]), held[name], name)
            moved = [box._replace(r0=box.r0 + (box.r0 > 0)) for box in held["model.embed_tokens.weight"]]
            if layout.world_size > 1:  # a cut that is off by one
                with pytest.raises(ValueError, match="elements have a source"):
                    check_tiling(Box(0, arch.vocab_size, 0, arch.hidden_size), moved, "embedding")


def test_rectangles_are_chunks_of_the_chunks_of_a_tp_rank() -> None:
    for cut, shape in [(Cut(dim), shape) for dim in (None, 0, 1) for shape in ((131, 24), (7, 8), (2, 6))]:
        for layout in LAYOUTS:
            whole = torch.arange(shape[0] * shape[1]).view(shape)
            for position in range(layout.world_size):
                of_tp = whole if cut.dim is None else whole.chunk(layout.tp, cut.dim)[position % layout.tp]
                chunks = of_tp.chunk(layout.dp * layout.cp)
                number, box = position // layout.tp, shard_box(shape, cut, layout, position)
                if box is None:
                    assert number >= len(chunks), "a rank without rows"
                else:
                    assert torch.equal(whole[box.r0 : box.r1, box.c0 : box.c1], chunks[number])


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup, total", [(0, 10), (3, 10), (1, 1), (5, 3)])
def test_the_schedule_warms_up_decays_and_keeps_the_smallest_rate(shape: Any, warmup: int, total: int) -> None:
    schedule = ConstantLRConfig() if shape == "constant" else DecayingLRConfig(type=shape, min_ratio=0.25)
    weights = [{"params": [torch.nn.Parameter(torch.ones(2))], "wd_mult": mult} for mult in (1.0, 0.0)]
    optimizer = torch.optim.AdamW(weights)
    scheduler = schedule_of(optimizer, OptimizerConfig(lr=2.0, lr_schedule=schedule, warmup_steps=warmup, weight_decay=0.1), total)
    last = max(total, warmup + 1)
    for step in range(1, total + 4):
        scheduler.step(increment=1)
        done = min(1.0, (step - warmup) / (last - warmup))
        left = 1.0 - done if shape == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        wanted = 2.0 * step / warmup if step <= warmup else 2.0 if shape == "constant" else 0.5 + left * 1.5
        assert [group["lr"] for group in optimizer.param_groups] == [wanted] * 2, step
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


RANK_IMPORTS = """
import sys
from megappo.runtime.libraries import quiet_libraries
quiet_libraries()
import megappo.trainer.main, megappo.engine.build
assert {"transformers", "PIL"}.isdisjoint(sys.modules)
"""


def test_a_run_of_megatron_models_imports_no_transformers() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RANK_IMPORTS], cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
