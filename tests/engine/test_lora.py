"""Adapters under every engine that has them: PEFT's numbers, the base untouched and without gradients, the reference, checkpoints.

A world of two ranks and one of four; `ENGINES` says which engines and layouts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import peft
import pytest
import torch
import transformers
from torch import Tensor

from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.fsdp2 import sharded_memory
from megappo.commands.plan.memory import role_memory
from megappo.config.role_sections import CriticConfig, LoraConfig, ModelConfig, OptimizerConfig, PolicyConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.models.hf_config import read_arch
from megappo.models.lora import is_adapter
from megappo.parallel.layout import ParallelLayout
from tests.engine.lora_oracle import Oracle, worst, write_noise
from tests.engine.runs import recorded_batch
from tests.models.checkpoints import write_checkpoint
from tests.models.int8_oracle import write_rounded
from tests.worlds import spawn_world

STEPS = 2
# Adam's first step, lr g / (|g| + eps), has up to lr / eps times the error of a gradient near 0. In the windows' model in 8 bits
# fp32 errs by 5e-7 in tensors of gradients up to 5, in every layout of either engine elsewhere: with eps 1e-5, where one is 2.5e-5,
# by 1.2e-4 of the weights' largest.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, clip_grad=0.0, weight_decay=0.01)
WHOLE = OPTIMIZER.model_copy(update={"distributed": False})
"""Whole gradients on every rank of Megatron's engine."""
OFFLOADED = ["parameters", "gradients", "optimizer"]
SP = {"tp": 2, "sequence_parallel": True}
LORA = LoraConfig(rank=3, alpha=6.0)
INT8 = LoraConfig(rank=3, alpha=6.0, base_bits=8)
SOME = LoraConfig(rank=5, alpha=4.0 * math.sqrt(5), targets=("q_proj", "layers.1.mlp.down_proj"))  # rsLoRA's scale
# Sums in another order, in fp32; two steps of Adam on gradients of which some are nearly 0.
TOLERANCE = 1e-5


class Layout(NamedTuple):
    """Keys of a role's section, and the ranks that it takes."""

    ranks: int
    keys: dict[str, Any]


LAYOUTS = {
    "fsdp2 dp1": Layout(2, {"engine": "fsdp2", "ranks": "0"}),
    "fsdp2 dp2": Layout(2, {"engine": "fsdp2"}),
    "fsdp2 dp2 recomputed offloaded": Layout(2, {"engine": "fsdp2", "recompute": "full", "offload": OFFLOADED}),
    "fsdp2 cp2": Layout(2, {"engine": "fsdp2", "parallel": {"cp": 2}}),
    "fsdp2 tp2": Layout(2, {"engine": "fsdp2", "parallel": {"tp": 2}}),
    "fsdp2 tp2 sp recomputed": Layout(2, {"engine": "fsdp2", "parallel": SP, "recompute": "full"}),
    "fsdp2 tp2 sp dp2": Layout(4, {"engine": "fsdp2", "parallel": SP}),
    **{
        f"megatron {name}": Layout(ranks, {"optimizer": WHOLE, **keys})
        for name, ranks, keys in (
            ("dp2", 2, {}),
            ("tp2", 2, {"parallel": {"tp": 2}}),
            ("tp2 sp recomputed offloaded", 2, {"parallel": SP, "recompute": "full", "offload": OFFLOADED}),
            ("pp2", 2, {"parallel": {"pp": 2}}),
            ("tp2 sp pp2", 4, {"parallel": {**SP, "pp": 2}}),
            ("tp2 cp2", 4, {"parallel": {"tp": 2, "cp": 2}}),
        )
    },
}
CASES = {
    "all": ("llama", LORA),
    "some, tied": ("qwen2_tied", SOME),
    "windows": ("gemma3", LORA),
    "windows, 8 bits": ("gemma3", INT8),
}
BF16 = "fsdp2 dp2"
# Case, layout, value head: a policy or a critic in every layout, as their adapters are alike, both in one of each engine, and some
# modules where an engine cuts them in a way of its own. FSDP2 shards over dp x cp, so that replicas beside tp are context ranks
# beside it too. tests/parity/test_lora.py has more layouts.
TRAINED = [
    *(("all", name, False) for name in ("fsdp2 dp1", "fsdp2 dp2", "fsdp2 dp2 recomputed offloaded", "fsdp2 tp2 sp recomputed")),
    *(("all", name, False) for name in ("megatron dp2", "megatron tp2 sp recomputed offloaded", "megatron pp2")),
    *(("all", name, True) for name in ("fsdp2 dp2", "fsdp2 cp2", "megatron dp2")),
    *(("some, tied", name, False) for name in ("fsdp2 tp2", "megatron tp2 sp recomputed offloaded", "megatron pp2")),
    ("some, tied", "megatron tp2", True),
    ("all", "fsdp2 tp2 sp dp2", False),
    ("all", "megatron tp2 cp2", False),
    ("all", "megatron tp2 sp pp2", True),
    *((case, name, False) for case in CASES if "windows" in case for name in ("fsdp2 tp2", "megatron tp2 sp recomputed offloaded")),
]


# ----------------------------------------------------------------------------------------------------------- in the world


class Bench:
    """One engine factory, and engines of its roles on a checkpoint with adapters whose B is not zero."""

    def __init__(self, engines: Any, path: str) -> None:
        self.engines, self.path = engines, path

    def engine(self, lora: LoraConfig, keys: dict[str, Any], *, value_head: bool = False, noise: bool = True, **spec: Any) -> Any:
        from megappo.engine.factory import EngineSpec
        from megappo.models.hf_config import arch_for
        from tests.engine.whole import Whole

        section: dict[str, Any] = {"dtype": "fp32", "micro_batch_tokens": 48, "optimizer": OPTIMIZER, "lora": lora, **keys}
        kind = CriticConfig(**section) if value_head else PolicyConfig(model=self.path, **section)
        head = {"value_head": "zero"} if value_head else {}
        role = "critic" if value_head else "policy"
        built = self.engines.build(
            EngineSpec(role, self.path, arch_for(self.path, kind.engine), kind, **{"total_updates": 10, **head, **spec})
        )
        if built is None:
            return None
        engine = Whole(built)
        if noise:
            with engine.train_mode(), torch.no_grad():
                write_noise(engine)
        return engine


def loss_function(value_head: bool) -> Any:
    from megappo.engine.losses import LossOutput
    from tests.engine.test_conformance import negative_logprob

    def squares(values: Any, micro: Any) -> LossOutput:
        loss = ((values - micro["returns"]) ** 2 * micro["weight"]).sum()
        return LossOutput(loss, sums={"loss": loss})

    return squares if value_head else negative_logprob


def trained(engine: Any) -> dict[str, Any]:
    """As `Oracle.train`."""
    found: dict[str, Any] = {"losses": [], "gradients": None}
    before = {name: p.detach().clone() for name, p in resident(engine).items() if not is_trained(name)}
    for _ in range(STEPS):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            reads = ("returns", "weight") if engine.value_head else ("weight",)
            result = engine.forward_backward(recorded_batch(), loss_function(engine.value_head), reads=reads)
            found["losses"].append(result.sums["loss"])
            gradients = engine.named_gradients()
            found["with gradient"] = all(map(is_trained, gradients)) and bool(gradients)
            if found["gradients"] is None:
                found["gradients"] = gathered(gradients, engine)
            engine.lr_scheduler_step()
            engine.optimizer_step()
    after = resident(engine)
    found["frozen"] = all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    return found | {"parameters": {n: t for n, t in gathered(after, engine).items() if is_trained(n)}}


def is_trained(name: str) -> bool:
    """By the names of either engine."""
    return is_adapter(name) or name in ("score.weight", "value_head.weight")


def resident(engine: Any) -> dict[str, Tensor]:
    with engine.eval_mode():
        return {name: p.detach().clone() for name, p in engine.named_parameters().items()}


def gathered(local: dict[str, Tensor], engine: Any) -> dict[str, Tensor]:
    """On the first rank of the role, by Hugging Face's names."""
    from megappo.commands.verify.measure import gather_tensors

    if not engine.placement.is_whole:  # one rank, which has all
        return {name: tensor.detach().clone() for name, tensor in local.items()}
    return gather_tensors(local, engine).tensors


def logprobs(engine: Any) -> Tensor:
    from megappo.trainer.roles import LanguageModel

    return LanguageModel(engine, 1.0).logprobs(recorded_batch(), want_entropy=False)[0]


def base_logprobs(engine: Any) -> Tensor:
    from megappo.trainer.roles import BaseOfPolicy

    return BaseOfPolicy(engine, 1.0).logprobs(recorded_batch(), want_entropy=False)[0]


def merged_parts(engine: Any) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    """Name -> (box, values) of this rank, as the bridge reads them: every rectangle in two halves."""
    from megappo.models.lora import part_of

    found: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    with engine.eval_mode():
        weights = engine.merged_parameters()
        for piece in engine.pieces()[engine.placement.position_of(torch.distributed.get_rank())]:
            box, half = piece.box, piece.box.cols // 2
            for start, cols in ((0, half), (half, box.cols - half)) if half else ((0, box.cols),):
                values = part_of(weights[piece.local], piece.slot, piece.row, piece.col + start, box.rows, cols)
                found.setdefault(piece.hf, []).append(((box.r0, box.r1, box.c0 + start, box.c0 + start + cols), values.clone()))
    return found


def run_world(rank: int, folder: str) -> dict[str, Any]:
    from megappo.engine.build import RoleEngines
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    ranks, found = torch.distributed.get_world_size(), {}
    for case, name, value_head in TRAINED:
        family, lora = CASES[case]
        if LAYOUTS[name].ranks == ranks:
            engine = Bench(engines, f"{folder}/{family}").engine(lora, LAYOUTS[name].keys, value_head=value_head)
            found[case, name, value_head] = None if engine is None else trained(engine)
    bench = Bench(engines, f"{folder}/llama")
    if ranks == 4:
        found["merged over tp and dp"] = merged_parts(bench.engine(LORA, LAYOUTS["fsdp2 tp2 sp dp2"].keys))
    else:
        found |= of_two_ranks(bench, Path(folder))
    return found


def of_two_ranks(bench: Bench, folder: Path) -> dict[Any, Any]:
    keys = LAYOUTS["fsdp2 dp2"].keys
    engine, plain = bench.engine(LORA, keys), bench.engine(None, keys, noise=False)  # type: ignore[arg-type]
    found: dict[Any, Any] = {
        "base": logprobs(plain),
        "on": logprobs(engine),
        "off": base_logprobs(engine),
        "again": logprobs(engine),
    }
    found["started"] = logprobs(bench.engine(LORA, keys, noise=False))
    found["merged"], found["kept"] = merged_parts(engine), resident(engine)
    engine.export(folder / "export", Path(bench.path))
    cut = bench.engine(LORA, LAYOUTS["fsdp2 tp2"].keys)
    found["merged over tp"], found["bytes over tp"] = merged_parts(cut), bytes_of(cut)
    cut.export(folder / "export_of_tp", Path(bench.path))
    found["saved over tp"] = saved_names(cut)
    critic = bench.engine(LORA, keys, value_head=True)
    critic.export(folder / "critic_export", Path(bench.path))
    found["adapters"] = plain.adapters
    half = bench.engine(LORA, {**keys, "dtype": "bf16"})
    built = {("fp32", False): engine, ("fp32", True): critic, ("bf16", False): half}
    built["bf16", True] = bench.engine(LORA, {**keys, "dtype": "bf16"}, value_head=True)
    found |= {("bytes", *kind): bytes_of(one) for kind, one in built.items()}
    found["bf16"] = {name: p.dtype for name, p in half.named_parameters().items()}
    found["bf16 logprobs"] = logprobs(half)
    dropping = LORA.model_copy(update={"dropout": 0.3})
    for name, more in (("kept", {}), ("again", {}), ("recomputed", {"recompute": "full"})):
        found["dropout", name] = trained(bench.engine(dropping, {**keys, **more}))
    found["dropout", "forward"] = logprobs(bench.engine(dropping, keys))
    columns = dropping.model_copy(update={"targets": ("q_proj", "v_proj", "up_proj")})
    for name in ("fsdp2 dp1", "fsdp2 tp2"):
        one = bench.engine(columns, LAYOUTS[name].keys)
        found["dropout", name] = None if one is None else trained(one)
    found["saved"] = saved_names(engine)
    found |= of_compiled_layers(bench)
    found |= of_8_bits(bench)
    return found


def of_8_bits(bench: Bench) -> dict[Any, Any]:
    """The base in 8 bits: updates, log-probs without adapters, merged weights, bytes, names in a checkpoint."""
    keys = LAYOUTS["fsdp2 dp2"].keys
    policy, critic = bench.engine(INT8, keys), bench.engine(INT8, keys, value_head=True)
    found: dict[Any, Any] = {
        "int8 off": base_logprobs(policy),
        "int8 merged": merged_parts(policy),
        "int8 saved": saved_names(policy),
    }
    found["int8 bytes", "fp32", True] = bytes_of(critic)
    found |= {("int8", engine is critic): trained(engine) for engine in (policy, critic)}
    recomputed = {"recompute": "full", "offload": OFFLOADED, "parallel": {"cp": 2}}
    found["int8, recomputed, cp2"] = trained(bench.engine(INT8, {**keys, **recomputed}))
    for name in ("fsdp2 tp2", "fsdp2 tp2 sp recomputed"):
        cut = bench.engine(INT8, LAYOUTS[name].keys)
        found |= {("int8 bytes", name): bytes_of(cut), ("int8 merged", name): merged_parts(cut), ("int8", name): trained(cut)}
    half = bench.engine(INT8, {**keys, "dtype": "bf16"})
    return found | {"int8 bf16": base_logprobs(half), ("int8 bytes", "bf16", False): bytes_of(half)}


def of_compiled_layers(bench: Bench) -> dict[str, Any]:
    """Updates by compiled layers on one rank, log-probs with and without adapters, and the number of graphs. eager: torch's backend
    that runs the graphs as they are; kernels would take a minute."""
    from torch._dynamo.utils import counters

    from megappo.engine import fsdp2
    from megappo.models import hf_classes

    keys = {**LAYOUTS["fsdp2 dp1"].keys, "recompute": "full", "compile": True}
    counters.clear()
    with mock.patch.object(hf_classes, "COMPILER", "eager"):
        engine = bench.engine(LORA, keys)
        if engine is None:
            return {}
        found = {"compiled off": base_logprobs(engine), "compiled on": logprobs(engine), "compiled": trained(engine)}
    found["graphs"] = dict(counters["frames"])
    with mock.patch.object(fsdp2.shutil, "which", lambda name: None), pytest.raises(ValueError) as refused:
        bench.engine(LORA, keys)
    return {**found, "no compiler": str(refused.value)}


def refused(action: Any) -> str:
    try:
        action()
    except AssertionError as error:
        return str(error)
    return ""


def bytes_of(engine: Any) -> tuple[int, int, int]:
    """(weights, gradients, optimizer state) of this rank."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        gradients = sum(tensor.nbytes for tensor in engine.named_gradients().values())
    optimizer = sum(tensor.nbytes for tensor in engine._engine._optimizer.tensors())
    return sum(p.nbytes for p in engine.named_parameters().values()), gradients, optimizer


def saved_names(engine: Any) -> dict[str, int]:
    """Key of a checkpoint's tensor -> bytes of this rank."""
    boxes = engine.save_state(with_optimizer=True).boxes
    engine.release_state()
    return {box.key: box.values.nbytes for box in boxes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for family in {family for family, _ in CASES.values()}:
        write_checkpoint(folder / family, family)
    return folder


@pytest.fixture(scope="module")
def two(folder) -> list[dict[Any, Any]]:
    return spawn_world(run_world, 2, str(folder))


@pytest.fixture(scope="module")
def four(folder) -> list[dict[Any, Any]]:
    return spawn_world(run_world, 4, str(folder))


def losses_of_rows() -> dict[bool, Any]:
    """True for a critic -> the loss of `loss_function`, of the oracle's rows."""
    batch = recorded_batch()

    def negative_logprob(rows: Tensor) -> Tensor:
        logprob = torch.zeros(batch.num_tokens, dtype=torch.float64)
        chosen = rows[:-1].log_softmax(-1).gather(1, batch.tokens[1:, None])[:, 0]
        logprob[1:] = chosen
        logprob[batch.cu_seqlens[:-1].long()] = 0.0
        return -(logprob * batch["weight"].double()).sum()

    def squares(rows: Tensor) -> Tensor:
        return ((rows[:, 0] - batch["returns"].double()) ** 2 * batch["weight"].double()).sum()

    return {False: negative_logprob, True: squares}


@pytest.fixture(scope="module")
def oracles(folder) -> dict[tuple[str, bool], dict[str, Any]]:
    found = {}
    for case, value_head in dict.fromkeys((case, value_head) for case, _, value_head in TRAINED):
        family, lora = CASES[case]
        path = folder / family
        if lora.base_bits is not None:
            write_rounded(path, path := folder / f"{family}_rounded")
        oracle = Oracle(str(path), lora, value_head=value_head)
        found[case, value_head] = oracle.train(losses_of_rows()[value_head], recorded_batch(), OPTIMIZER, STEPS)
    return found


@pytest.fixture(scope="module")
def rounded_oracles(folder) -> dict[bool, tuple[str, dict[str, Any]]]:
    return trained_on_rounded(folder)


def trained_on_rounded(folder: Path) -> dict[bool, tuple[str, dict[str, Any]]]:
    """True for a critic -> the llama with rounded weights, and PEFT's training on it."""
    path, losses = folder / "llama_rounded", losses_of_rows()
    write_rounded(folder / "llama", path)
    return {
        value_head: (
            str(path),
            Oracle(str(path), LORA, value_head=value_head).train(losses[value_head], recorded_batch(), OPTIMIZER, STEPS),
        )
        for value_head in (False, True)
    }


# ------------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("case, layout, value_head", TRAINED)
def test_losses_gradients_and_adapters_are_those_of_peft(request, oracles, case: str, layout: str, value_head: bool) -> None:
    ranks = request.getfixturevalue("two" if LAYOUTS[layout].ranks == 2 else "four")
    found, wanted = ranks[0][case, layout, value_head], oracles[case, value_head]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=TOLERANCE)
    assert worst(found["gradients"], wanted["gradients"]) < TOLERANCE
    assert worst(found["parameters"], wanted["parameters"]) < 10 * TOLERANCE
    assert found["frozen"] and found["with gradient"]


def test_the_comparison_sees_another_scaling(oracles, folder) -> None:
    """Negative control."""
    other = Oracle(str(folder / "llama"), LORA.model_copy(update={"alpha": 6.1}))
    assert {name: t.shape for name, t in other.tensors.items()} == {
        name: t.shape for name, t in oracles["all", False]["parameters"].items()
    }
    batch = recorded_batch()
    rows = Oracle(str(folder / "llama"), LORA).rows(batch)
    assert float((other.rows(batch) - rows).abs().max().detach()) > 100 * TOLERANCE


# ---------------------------------------------------------------------------------------------------------- the base model


def test_without_adapters_the_base_model_speaks(two) -> None:
    for found in two:
        assert torch.equal(found["off"], found["base"]), "the reference is the same model"
        assert torch.equal(found["on"], found["again"]), "and the policy is back afterwards"
        assert float((found["on"] - found["base"]).abs().max()) > 0.01, "a reference with the adapter on would be seen"
        assert torch.equal(found["started"], found["base"]), "B starts as zeros"
        assert found["adapters"] is None


@pytest.mark.parametrize("parts, world", [("merged", "two"), ("merged over tp", "two"), ("merged over tp and dp", "four")])
def test_merged_parts_are_base_and_adapter_in_fp32(request, folder, parts: str, world: str) -> None:
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).state_dict()
    oracle = Oracle(str(folder / "llama"), LORA).model.merge_and_unload().state_dict()
    seen: dict[str, int] = {}
    boxes: set[Any] = set()
    for found in request.getfixturevalue(world):
        for name, rectangles in found[parts].items():
            for (r0, r1, c0, c1), values in rectangles:
                wanted = oracle[name].reshape(len(oracle[name]), -1)[r0:r1, c0:c1]
                assert float((values.double() - wanted).abs().max()) < 1e-6, name
                copy = (name, r0, c0) in boxes  # of another tp rank
                boxes.add((name, r0, c0))
                seen[name] = seen.get(name, 0) + values.numel() * (not copy)
    assert seen == {name: tensor.numel() for name, tensor in before.items()}
    moved = max(float((oracle[name] - tensor).abs().max()) for name, tensor in before.items())
    assert moved > 0.01, "an unmerged push would be seen"


# --------------------------------------------------------------------------------------------------------- a base in 8 bits


@pytest.mark.parametrize("value_head", [False, True], ids=["policy", "critic"])
def test_a_base_in_8_bits_trains_as_peft_on_rounded_weights(two, rounded_oracles, value_head: bool) -> None:
    """The oracle's weights are rounded by NumPy, in a checkpoint of their own."""
    _, wanted = rounded_oracles[value_head]
    in_other_layouts = ["int8, recomputed, cp2", ("int8", "fsdp2 tp2"), ("int8", "fsdp2 tp2 sp recomputed")]
    for name in [("int8", value_head), *(in_other_layouts if not value_head else [])]:
        found = two[0][name]
        assert found["losses"] == pytest.approx(wanted["losses"], rel=TOLERANCE)
        assert worst(found["gradients"], wanted["gradients"]) < TOLERANCE
        assert worst(found["parameters"], wanted["parameters"]) < 10 * TOLERANCE
        assert found["frozen"] and found["with gradient"]
    unrounded = two[0]["all", "fsdp2 dp2", value_head]
    assert worst(unrounded["gradients"], wanted["gradients"]) > 100 * TOLERANCE, "negative control: the rounding is seen"


def test_the_reference_and_the_push_are_of_the_rounded_base(two, rounded_oracles) -> None:
    path, _ = rounded_oracles[False]
    oracle = Oracle(path, LORA)
    batch = recorded_batch()
    with oracle.model.disable_adapter(), torch.no_grad():
        rows = oracle.rows(batch)
    logprob = torch.zeros(batch.num_tokens, dtype=torch.float64)
    logprob[1:] = rows[:-1].log_softmax(-1).gather(1, batch.tokens[1:, None])[:, 0]
    logprob[batch.cu_seqlens[:-1].long()] = 0.0
    merged = oracle.model.merge_and_unload().state_dict()
    for found in two:
        assert float((found["int8 off"].double() - logprob).abs().max()) < 2e-5
        assert float((found["int8 off"] - found["off"]).abs().max()) > 1e-4, "negative control"
        for layout in ("int8 merged", ("int8 merged", "fsdp2 tp2")):
            assert found[layout].keys() == found["merged"].keys()
            for name, rectangles in found[layout].items():
                for (r0, r1, c0, c1), values in rectangles:
                    wanted = merged[name].reshape(len(merged[name]), -1)[r0:r1, c0:c1]
                    assert float((values.double() - wanted).abs().max()) < 1e-6, name
        assert found["int8 saved"] == found["saved"], "checkpoints hold adapters alone"
        assert 0 < float((found["int8 bf16"] - found["int8 off"]).abs().mean()) < 0.02


@pytest.mark.parametrize("dtype, value_head", [("bf16", False), ("fp32", True)])
def test_a_base_in_8_bits_takes_a_byte_and_scales_of_two(two, folder, dtype: str, value_head: bool) -> None:
    weights, gradients, optimizer = map(sum, zip(*(found["int8 bytes", dtype, value_head] for found in two)))
    beside = sum((rows + columns) * LORA.rank for rows, columns in MODULES.values()) + (64 if value_head else 0)
    linear = sum(rows * columns for rows, columns in MODULES.values())
    scales = sum(rows * -(-columns // 64) for rows, columns in MODULES.values())
    others = BASE - linear - (131 * 64 if value_head else 0)
    assert (gradients, optimizer) == (4 * beside, 8 * beside)
    assert weights == linear + 2 * scales + others * (2 if dtype == "bf16" else 4) + 4 * beside
    arch, layout = read_arch(folder / "llama"), ParallelLayout(2)
    sizes: Any = {"trained": True, "value_head": value_head}
    work = RoleWork(dtype=dtype, micro_batch_tokens=1, num_micro_batches=1, **sizes)  # type: ignore[arg-type]
    plain = role_memory(arch, layout, 0, work)
    planned = sharded_memory(plain, arch, layout, dataclasses.replace(work, lora=INT8))
    assert (planned.weights, planned.gradients, planned.optimizer) == two[0]["int8 bytes", dtype, value_head]


def test_a_base_in_8_bits_over_tp_takes_what_the_plan_says_of_its_fullest_rank(two, folder) -> None:
    """The 96 columns of down_proj are cut in a block: the first rank has scales of one block, the second of two. Of 131 tokens the
    first has 66, and the plan the most of both."""
    arch, layout, sizes = read_arch(folder / "llama"), ParallelLayout(2, tp=2), {"trained": True, "value_head": False}
    work = RoleWork(dtype="fp32", micro_batch_tokens=1, num_micro_batches=1, **sizes)  # type: ignore[arg-type]
    plain = role_memory(arch, layout, 0, work)
    planned = sharded_memory(plain, arch, layout, dataclasses.replace(work, lora=INT8))
    first, second = (ranks["int8 bytes", "fsdp2 tp2"] for ranks in two)
    scales, rows = 2 * 64 * 2, 2 * 64 * 4  # of down_proj in two layers; of the embedding and the output projection
    assert first == (planned.weights - scales, planned.gradients, planned.optimizer)
    assert second == (planned.weights - rows, planned.gradients, planned.optimizer)


# ------------------------------------------------------------------------------------------------------- bytes, checkpoints


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("value_head", [False, True])
def test_only_adapters_and_head_have_gradients_and_moments(two, folder, dtype: str, value_head: bool) -> None:
    weights, gradients, optimizer = map(sum, zip(*(found["bytes", dtype, value_head] for found in two)))
    adapters = sum((rows + columns) * LORA.rank for rows, columns in MODULES.values())
    beside = adapters + (64 if value_head else 0)
    base = BASE - (131 * 64 if value_head else 0)
    assert gradients == 4 * beside and optimizer == 8 * beside
    assert weights == base * (2 if dtype == "bf16" else 4) + 4 * beside
    arch, sizes = read_arch(folder / "llama"), {"trained": True, "value_head": value_head}
    work = RoleWork(dtype=dtype, micro_batch_tokens=1, num_micro_batches=1, **sizes)  # type: ignore[arg-type]
    plain = role_memory(arch, ParallelLayout(2), 0, work)
    planned = sharded_memory(plain, arch, ParallelLayout(2), dataclasses.replace(work, lora=LORA))
    assert (planned.weights, planned.gradients, planned.optimizer) == two[0]["bytes", dtype, value_head], "the plan's"


def test_adapters_over_tp_take_what_the_plan_says(two, folder) -> None:
    """Of a layer's 3 x (in + out) numbers, tp halves those of B of q, k, v, gate and up and of A of o and down."""
    cut, rank = ParallelLayout(2, tp=2), LORA.rank
    halved = sum(rank * (columns if name in ("o", "down") else rows) for (_, name), (rows, columns) in MODULES.items())
    adapters = sum(rank * (rows + columns) for rows, columns in MODULES.values()) - halved // 2
    weights, gradients, optimizer = two[0]["bytes over tp"]
    assert (gradients, optimizer) == (4 * adapters, 8 * adapters)
    arch, sizes = read_arch(folder / "llama"), {"trained": True, "value_head": False}
    work = RoleWork(dtype="fp32", micro_batch_tokens=1, num_micro_batches=1, **sizes)  # type: ignore[arg-type]
    plain = role_memory(arch, cut, 0, work)
    planned = sharded_memory(plain, arch, cut, dataclasses.replace(work, lora=LORA))
    assert (planned.weights, planned.gradients, planned.optimizer) == (weights, gradients, optimizer)


# Of the llama of tests/models/checkpoints.py: 64 wide, 4 heads and 2 KV heads of 16, 96 columns, 2 layers, 131 tokens.
_LAYER = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "gate": (96, 64), "up": (96, 64), "down": (64, 96)}
MODULES = {(layer, name): size for layer in range(2) for name, size in _LAYER.items()}
BASE = 2 * 131 * 64 + 5 * 64 + sum(rows * columns for rows, columns in MODULES.values())


def test_adapters_of_a_bf16_model_are_fp32(two, folder) -> None:
    for name, dtype in two[0]["bf16"].items():
        assert dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
    assert 0 < float((two[0]["bf16 logprobs"] - two[0]["on"]).abs().max()) < 0.2


@pytest.mark.parametrize("saved", ["saved", "saved over tp"])
def test_a_checkpoint_holds_adapters_and_their_moments_alone(two, saved: str) -> None:
    keys = {key for found in two for key in found[saved]}
    own = {key for key in keys if not key.startswith("optimizer.")}
    assert own and all(map(is_adapter, own)) and len(own) == 2 * len(MODULES)
    assert keys == own | {f"optimizer.state.{moment}.{key}" for moment in ("exp_avg", "exp_avg_sq") for key in own}


# ---------------------------------------------------------------------------------------------------------- compiled layers


def test_compiled_layers_give_the_same_numbers(two) -> None:
    compiled, wanted = two[0]["compiled"], two[0]["all", "fsdp2 dp1", False]
    assert compiled["losses"] == pytest.approx(wanted["losses"], rel=TOLERANCE)
    for kind in ("gradients", "parameters"):
        assert worst(compiled[kind], {name: tensor.double() for name, tensor in wanted[kind].items()}) < TOLERANCE
    for switch in ("off", "on"):
        assert float((two[0][f"compiled {switch}"] - two[0][switch]).abs().max()) < TOLERANCE


def test_layers_share_their_graphs(two) -> None:
    """Four frames round attention: without gradients and with, of an input that has one and not, with adapters on and off."""
    graphs = two[0]["graphs"]
    assert graphs["ok"] == graphs["total"], "no frame runs as it is"
    assert 0 < graphs["ok"] <= 4 * 4


def test_without_a_compiler_the_role_is_refused_in_one_line(two) -> None:
    assert two[0]["no compiler"].startswith("policy.compile = true: torch.compile calls g++, which is not on PATH; install it")


# ----------------------------------------------------------------------------------------------------------------- dropout


def test_dropout_is_of_training_passes_and_depends_on_the_step_alone(two) -> None:
    for found in two:
        assert torch.equal(found["dropout", "forward"], found["on"])
        kept, again, recomputed = (found["dropout", name]["losses"] for name in ("kept", "again", "recomputed"))
        assert kept == again and kept == pytest.approx(recomputed, rel=1e-6)
        assert abs(kept[0] - found["all", "fsdp2 dp2", False]["losses"][0]) > 1e-4
    first, recomputed = two[0]["dropout", "kept"]["gradients"], two[0]["dropout", "recomputed"]["gradients"]
    assert worst(recomputed, {name: tensor.double() for name, tensor in first.items()}) < TOLERANCE, "the same masks again"


def test_tp_ranks_drop_the_same_of_an_input_that_they_share(two) -> None:
    cut, whole = two[0]["dropout", "fsdp2 tp2"], two[0]["dropout", "fsdp2 dp1"]
    assert cut["losses"] == pytest.approx(whole["losses"], rel=TOLERANCE)
    assert worst(cut["gradients"], {name: tensor.double() for name, tensor in whole["gradients"].items()}) < TOLERANCE


# ------------------------------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("export", ["export", "export_of_tp"])
def test_peft_reads_the_exported_adapter_and_transformers_the_merged_model(two, folder, export: str) -> None:
    batch = recorded_batch()
    ids, oracle = batch.tokens[None, :40], Oracle(str(folder / "llama"), LORA).model
    with torch.no_grad():
        wanted = oracle(input_ids=ids).logits
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(base, folder / export / "adapter").eval()
        merged = transformers.AutoModelForCausalLM.from_pretrained(folder / export, dtype=torch.float32).eval()
        for name, model in (("adapter", adapted), ("merged", merged)):
            assert float((model(input_ids=ids).logits - wanted).abs().max()) < 1e-4, name
    config = json.loads((folder / export / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 3 and config["task_type"] == "CAUSAL_LM" and "lm_head" not in config["target_modules"]


def test_a_critics_adapter_brings_its_head(two, folder) -> None:
    kind = transformers.AutoModelForTokenClassification
    ids, oracle = recorded_batch().tokens[None, :40], Oracle(str(folder / "llama"), LORA, value_head=True).model
    with torch.no_grad():
        wanted = oracle(input_ids=ids).logits
        base = kind.from_pretrained(folder / "llama", dtype=torch.float32, num_labels=1)
        adapted = peft.PeftModel.from_pretrained(base, folder / "critic_export" / "adapter").eval()
        merged = kind.from_pretrained(folder / "critic_export", dtype=torch.float32).eval()
        for name, model in (("adapter", adapted), ("merged", merged)):
            assert float((model(input_ids=ids).logits - wanted).abs().max()) < 1e-4, name
