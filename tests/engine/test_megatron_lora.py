"""Adapters on Megatron's layers: PEFT's numbers in every kind of layout, what others read of the weights, checkpoints, dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.fsdp2 import count_own_parameters, sharded_memory
from megappo.commands.plan.memory import role_memory
from megappo.config.role_sections import LoraConfig, ModelConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.models.hf_config import arch_for, read_arch
from megappo.models.lora import is_adapter
from megappo.parallel.layout import ParallelLayout
from tests.engine.lora_oracle import MergedOracle, Oracle, worst
from tests.engine.runs import recorded_batch
from tests.engine.test_lora import (
    INT8,
    LORA,
    MODULES,
    OFFLOADED,
    OPTIMIZER,
    SP,
    STEPS,
    TOLERANCE,
    WHOLE,
    Bench,
    base_logprobs,
    bytes_of,
    logprobs,
    losses_of_rows,
    merged_parts,
    resident,
    trained,
    trained_on_rounded,
)
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

READ = {"tp2": {"parallel": SP, "optimizer": WHOLE}, "pp2": {"parallel": {"pp": 2}, "optimizer": WHOLE}}
IN_8_BITS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel": {"tp": 2}, "optimizer": WHOLE},
    "tp2 sp recomputed": {"parallel": SP, "optimizer": WHOLE, "recompute": "full"},
    "pp2": {"parallel": {"pp": 2}, "optimizer": WHOLE},
}
# A critic's base is its policy's: one layout has both.
ROLES_IN_8_BITS = [(name, value_head) for name in IN_8_BITS for value_head in ((False, True) if name == "tp2" else (False,))]
# All linear layers of a model with experts, theirs too; four ranks are those of tests/models/test_moe.py.
EXPERTS: dict[str, dict[str, Any]] = {
    "megatron tp2 sp ep2": {"parallel": {**SP, "ep": 2}, "optimizer": WHOLE},
    "megatron tp2 sp etp2 recomputed offloaded": {
        "parallel": {**SP, "etp": 2},
        "optimizer": WHOLE,
        "recompute": "full",
        "offload": OFFLOADED,
    },
    "fsdp2 dp2": {"engine": "fsdp2"},
    "fsdp2 cp2 recomputed offloaded": {"engine": "fsdp2", "parallel": {"cp": 2}, "recompute": "full", "offload": OFFLOADED},
}
EXPERT_READ = ("megatron tp2 sp etp2 recomputed offloaded", "fsdp2 dp2")
EXPERT_ROLES = [(name, value_head) for name in EXPERTS for value_head in ((False, True) if name in EXPERT_READ else (False,))]
RESUMED: dict[str, dict[str, Any]] = {
    "same": {"parallel": SP, "optimizer": OPTIMIZER},
    "pp2": {"parallel": {"pp": 2}, "optimizer": OPTIMIZER},
    "dp2": {"optimizer": OPTIMIZER},
    "tp2 plain": {"parallel": {"tp": 2}, "optimizer": WHOLE},
}
RESUMED_ROLES = {"policy": tuple(RESUMED), "critic": ("same", "pp2")}  # whose head is on the last stage


# ------------------------------------------------------------------------------------------------------------ in the world


def run_world(rank: int, folder: str) -> dict[str, Any]:
    from megappo.engine.build import RoleEngines
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    bench = Bench(engines, f"{folder}/llama")
    return {
        "read": {name: read_by_others(bench, Path(folder, name), keys) for name, keys in READ.items()},
        "saved": saved(bench, Path(folder)),
        "dropout": dropout(bench),
        "8 bits": in_8_bits(bench),
        "refused": stage_without_adapters(bench),
        "experts": experts(Bench(engines, f"{folder}/qwen3_moe"), Path(folder)),
    }


def experts(bench: Bench, folder: Path) -> dict[Any, Any]:
    """Updates in every layout; what others read; a checkpoint of the first layout in the others; dropout."""
    from megappo.checkpoint.store import CheckpointStore
    from megappo.trainer.replicas import Replicas

    found: dict[Any, Any] = {}
    saved: dict[bool, dict[str, Tensor]] = {}
    for name, keys in EXPERTS.items():
        found[name, "base"] = logprobs(bench.engine(None, keys, noise=False))  # type: ignore[arg-type]
        found[name, "started"] = logprobs(bench.engine(LORA, keys, noise=False))
        for value_head in (head for layout, head in EXPERT_ROLES if layout == name):
            engine = bench.engine(LORA, keys, value_head=value_head)
            found[name, "bytes", value_head] = bytes_of(engine)
            if not value_head:
                found[name, "on"], found[name, "off"] = logprobs(engine), base_logprobs(engine)
                found[name, "merged"] = merged_parts(engine)
            if name in EXPERT_READ:
                engine.export(folder / name / ("critic" if value_head else "policy"), Path(bench.path))
            found[name, value_head] = trained(engine) | {"replicas": Replicas(engine._engine).differences()}
            store = CheckpointStore(folder / f"experts_{value_head}", keep_last=1)
            if value_head not in saved:
                store.save(1, {engine.name: engine}, {}, {})
                saved[value_head] = everything(engine)
            other = bench.engine(LORA, keys, value_head=value_head, noise=False)
            store.load({engine.name: other}, {}, {})
            loaded = everything(other)
            found[name, value_head]["loaded"] = all(torch.equal(loaded[key], one) for key, one in saved[value_head].items())
            found[name, value_head]["next"] = trained(other)["parameters"]
    dropping = LORA.model_copy(update={"dropout": 0.3})
    for name in EXPERT_READ:
        found[name, "dropped"] = trained(bench.engine(dropping, EXPERTS[name])) | {
            "forward": logprobs(bench.engine(dropping, EXPERTS[name])),
            "again": trained(bench.engine(dropping, EXPERTS[name]))["losses"],
        }
    return found


def in_8_bits(bench: Bench) -> dict[str, Any]:
    from megappo.trainer.replicas import Replicas

    found: dict[Any, Any] = {}
    for name, value_head in ROLES_IN_8_BITS:
        engine = bench.engine(INT8, IN_8_BITS[name], value_head=value_head)
        held = sum(parameter.nbytes for parameter in engine.named_parameters().values())
        one: dict[str, Any] = {"bytes": held, "replicas": Replicas(engine._engine).differences()}
        if not value_head:
            one |= {"off": base_logprobs(engine), "merged": merged_parts(engine)}
        found[name, value_head] = one | trained(engine)
    return found


def read_by_others(bench: Bench, folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """The weights as the bridge, exports and the reference see them."""
    engine, plain = bench.engine(LORA, keys), bench.engine(None, keys, noise=False)  # type: ignore[arg-type]
    found: dict[str, Any] = {
        "base": logprobs(plain),
        "on": logprobs(engine),
        "off": base_logprobs(engine),
        "again": logprobs(engine),
        "started": logprobs(bench.engine(LORA, keys, noise=False)),
        "adapters": plain.adapters,
        "merged": merged_parts(engine),
    }
    folder.mkdir(exist_ok=True)
    engine.export(folder / "policy", Path(bench.path))
    bench.engine(LORA, keys, value_head=True).export(folder / "critic", Path(bench.path))
    return found


def saved(bench: Bench, folder: Path) -> dict[str, Any]:
    """Two steps, saved after the first; resumed in the same layout, in others, and as a model that does not train."""
    from megappo.checkpoint.store import CheckpointStore

    found: dict[Any, Any] = {}
    for value_head in (False, True):
        role = "critic" if value_head else "policy"
        first = bench.engine(LORA, RESUMED["same"], value_head=value_head)
        trained(first)
        store = CheckpointStore(folder / f"{role}_run", keep_last=1)
        store.save(1, {role: first}, {}, {})
        found[role, "keys"] = keys_of(first)
        found[role, "one"] = everything(first)
        trained(first)
        found[role, "two"] = everything(first)
        for name in RESUMED_ROLES[role]:
            other = bench.engine(LORA, RESUMED[name], value_head=value_head, noise=False)
            store.load({role: other}, {}, {})
            found[role, name, "one"] = everything(other)
            trained(other)
            found[role, name, "two"] = everything(other)
        frozen = bench.engine(LORA, {"parallel": SP}, value_head=value_head, noise=False, total_updates=None)
        store.load_weights(role, frozen)
        found[role, "frozen", "one"] = everything(frozen)
    return found


def everything(engine: Any) -> dict[str, Tensor]:
    """Name -> whole tensor, on every rank."""
    from megappo.commands.verify.measure import gather_tensors

    box = [gather_tensors(resident(engine), engine._engine).tensors]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def keys_of(engine: Any) -> set[str]:
    """Keys of the tensors in the files, of all ranks."""
    mine = {box.key for box in engine.save_state(with_optimizer=True).boxes}
    engine.release_state()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return set().union(*everyone)


def dropout(bench: Bench) -> dict[str, Any]:
    from megappo.commands.verify.measure import gather_tensors

    dropping = LORA.model_copy(update={"dropout": 0.3})
    found = {}
    for name, keys in {"tp2": {"parallel": {"tp": 2}}, "sp": {"parallel": SP}}.items():
        for again, more in (("kept", {}), ("again", {}), ("recomputed", {"recompute": "full"})):
            engine = bench.engine(dropping, {"optimizer": WHOLE, **keys, **more})
            found[name, again] = trained(engine)
            found[name, again]["spread"] = max(gather_tensors(resident(engine), engine._engine).spread.values(), default=0.0)
        found[name, "forward"] = logprobs(bench.engine(dropping, keys))
        without = bench.engine(LORA, {"optimizer": WHOLE, **keys})
        found[name, "on"], found[name, "without"] = logprobs(without), trained(without)
    return found


def stage_without_adapters(bench: Bench) -> str:
    """The message of targets in the second layer alone."""
    lora = LoraConfig(rank=2, targets=("layers.1.mlp.down_proj", "layers.1.self_attn.q_proj"))
    try:
        bench.engine(lora, {"parallel": {"pp": 2}}, noise=False)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_checkpoint(folder / "llama", "llama")
    write_checkpoint(folder / "qwen3_moe", "qwen3_moe")
    return folder


@pytest.fixture(scope="module")
def two(folder) -> list[dict[str, Any]]:
    return spawn_world(run_world, 2, str(folder))


# ------------------------------------------------------------------------------------------------- what others read of them


@pytest.mark.parametrize("layout", READ)
def test_without_adapters_the_base_model_speaks(two, layout: str) -> None:
    for found in (ranks["read"][layout] for ranks in two):
        assert torch.equal(found["off"], found["base"]), "the reference is the same model"
        assert torch.equal(found["on"], found["again"]), "and the policy is back afterwards"
        assert torch.equal(found["started"], found["base"]), "B starts as zeros"
        assert found["adapters"] is None
    reporter = two[-1]["read"][layout] if layout == "pp2" else two[0]["read"][layout]
    assert float((reporter["on"] - reporter["base"]).abs().max()) > 0.01, "a reference with the adapter on would be seen"


@pytest.mark.parametrize("layout", READ)
def test_merged_parts_are_base_and_adapter_in_fp32(two, folder, layout: str) -> None:
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).state_dict()
    oracle = Oracle(str(folder / "llama"), LORA).model.merge_and_unload().state_dict()
    seen: dict[str, set] = {}
    for ranks in two:
        for name, parts in ranks["read"][layout]["merged"].items():
            for (r0, r1, c0, c1), values in parts:
                wanted = oracle[name].reshape(len(oracle[name]), -1)[r0:r1, c0:c1]
                assert values.numel() == 0 or float((values.double() - wanted).abs().max()) < 1e-6, name
                seen.setdefault(name, set()).add((r0, r1, c0, c1))
    covered = {name: sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in boxes) for name, boxes in seen.items()}
    assert covered == {name: tensor.numel() for name, tensor in before.items()}
    unmerged = [name for name, tensor in before.items() if float((oracle[name] - tensor).abs().max()) > 0.01]
    assert len(unmerged) == len(MODULES), "an unmerged push of any of them would be seen"


@pytest.mark.parametrize("layout", READ)
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_peft_reads_the_exported_adapter_and_transformers_the_merged_model(two, folder, layout: str, role: str) -> None:
    value_head = role == "critic"
    kind = transformers.AutoModelForTokenClassification if value_head else transformers.AutoModelForCausalLM
    more = {"num_labels": 1} if value_head else {}
    ids, exported = recorded_batch().tokens[None, :40], folder / layout / role
    with torch.no_grad():
        wanted = Oracle(str(folder / "llama"), LORA, value_head=value_head).model(input_ids=ids).logits
        base = kind.from_pretrained(folder / "llama", dtype=torch.float32, **more)
        adapted = peft.PeftModel.from_pretrained(base, exported / "adapter").eval()
        merged = kind.from_pretrained(exported, dtype=torch.float32).eval()
        for name, model in (("adapter", adapted), ("merged", merged)):
            assert float((model(input_ids=ids).logits - wanted).abs().max()) < 1e-4, name


# ------------------------------------------------------------------------------------------------------------------ experts


@pytest.fixture(scope="module")
def merged_oracles(folder) -> dict[bool, tuple[MergedOracle, dict[str, Any]]]:
    """True for a critic -> the oracle before and after its training."""
    path = str(folder / "qwen3_moe")
    return {
        value_head: (
            MergedOracle(path, LORA, value_head=value_head),
            MergedOracle(path, LORA, value_head=value_head).train(losses_of_rows()[value_head], recorded_batch(), OPTIMIZER, STEPS),
        )
        for value_head in (False, True)
    }


@pytest.mark.parametrize("layout, value_head", EXPERT_ROLES)
def test_adapters_of_experts_train_as_peft_defines_them(two, merged_oracles, layout: str, value_head: bool) -> None:
    found, (_, wanted) = two[0]["experts"][layout, value_head], merged_oracles[value_head]
    assert any(".experts.7.down_proj.lora_B" in name for name in wanted["gradients"])
    assert found["losses"] == pytest.approx(wanted["losses"], rel=TOLERANCE)
    assert worst(found["gradients"], wanted["gradients"]) < TOLERANCE
    assert worst(found["parameters"], wanted["parameters"]) < 10 * TOLERANCE
    assert found["frozen"] and found["with gradient"] and found["replicas"] == []


@pytest.mark.parametrize("layout", EXPERTS)
def test_of_experts_too_the_base_speaks_without_adapters_and_merged_parts_are_read(two, merged_oracles, layout: str) -> None:
    wanted = merged_oracles[False][0].weights()
    seen: dict[str, set] = {}
    for found in (ranks["experts"] for ranks in two):
        for name, parts in found[layout, "merged"].items():
            for (r0, r1, c0, c1), values in parts:
                if (module := name.removesuffix(".weight")) in wanted:
                    assert values.numel() == 0 or float((values.double() - wanted[module][r0:r1, c0:c1]).abs().max()) < 1e-6, name
                    seen.setdefault(module, set()).add((r0, r1, c0, c1))
    covered = {name: sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in boxes) for name, boxes in seen.items()}
    assert covered == {name: weight.numel() for name, weight in wanted.items()}
    found = two[0]["experts"]
    for same in ("off", "started"):
        assert torch.equal(found[layout, same], found[layout, "base"]), same
    assert float((found[layout, "on"] - found[layout, "base"]).abs().max()) > 0.01


@pytest.mark.parametrize("layout, value_head", EXPERT_ROLES)
def test_a_checkpoint_of_experts_adapters_resumes_in_any_engine(two, layout: str, value_head: bool) -> None:
    saved = next(name for name, head in EXPERT_ROLES if head == value_head)
    first, found = (two[0]["experts"][name, value_head] for name in (saved, layout))
    assert found["loaded"]
    assert worst(found["next"], {name: tensor.double() for name, tensor in first["next"].items()}) < 10 * TOLERANCE
    assert any(not torch.equal(tensor, first["parameters"][name]) for name, tensor in found["next"].items())


@pytest.mark.parametrize("layout", EXPERT_READ)
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_adapters_of_experts_are_exported_merged_and_for_peft(two, folder, merged_oracles, layout: str, role: str) -> None:
    value_head = role == "critic"
    kind = transformers.AutoModelForTokenClassification if value_head else transformers.AutoModelForCausalLM
    more = {"num_labels": 1} if value_head else {}
    ids, exported = recorded_batch().tokens[:40], folder / layout / role
    with torch.no_grad():
        wanted = merged_oracles[value_head][0].logits(ids)
        base = kind.from_pretrained(folder / "qwen3_moe", dtype=torch.float32, **more)
        adapted = peft.PeftModel.from_pretrained(base, exported / "adapter").eval()
        merged = kind.from_pretrained(exported, dtype=torch.float32).eval()
        for name, model in (("merged", merged), ("adapter", adapted)):
            assert float((model(input_ids=ids[None]).logits[0] - wanted).abs().max()) < 1e-4, name
    names = load_file(exported / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight" in names


@pytest.mark.parametrize("layout", EXPERTS)
def test_adapters_of_experts_take_what_the_plan_says(two, folder, layout: str) -> None:
    keys = EXPERTS[layout]
    axes, engine = ParallelLayout(2, **keys.get("parallel", {})), keys.get("engine", "megatron")
    arch, adapters = arch_for(folder / "qwen3_moe", engine), {}
    for value_head in (head for name, head in EXPERT_ROLES if name == layout):
        sizes: Any = {"trained": True, "value_head": value_head, "distributed_optimizer": False}
        works = [
            RoleWork(dtype="fp32", micro_batch_tokens=48, num_micro_batches=1, lora=lora, **sizes)  # type: ignore[arg-type]
            for lora in (LORA, None)
        ]
        if engine == "fsdp2":
            planned, base = (
                sharded_memory(role_memory(arch, axes, 0, work, count_own_parameters), arch, axes, work) for work in works
            )
        else:
            planned, base = (role_memory(arch, axes, 0, work) for work in works)
        # Megatron's optimizer lists the fp32 parameters that it updates too.
        listed = planned.gradients if engine == "megatron" else 0
        found = two[0]["experts"][layout, "bytes", value_head]
        assert found == (planned.weights, planned.gradients, planned.optimizer + listed)
        adapters[value_head] = planned.parameters - base.parameters
    # Of a layer, 64 wide with 4 heads and 2 KV heads of 24: q, k, v and o, and 8 experts of 24 columns.
    beside, of_expert = [(96, 64), (48, 64), (48, 64), (64, 96)], [(24, 64), (24, 64), (64, 24)]
    whole = 2 * LORA.rank * (sum(map(sum, beside)) + 8 * sum(map(sum, of_expert)))
    # tp halves B of q, k and v and A of o, and so does etp in every expert; ep halves the experts.
    cut = sum(rows for rows, _ in beside[:3]) + beside[3][1]
    of_tp = 2 * LORA.rank * (sum(map(sum, beside)) - cut // 2)
    experts = {"ep": 4 * sum(map(sum, of_expert)), "etp": 8 * (sum(map(sum, of_expert)) - 3 * 24 // 2)}
    by_hand = {name: of_tp + 2 * LORA.rank * experts[name] for name in experts}
    wanted = whole // 2 if engine == "fsdp2" else by_hand["etp" if "etp2" in layout else "ep"]
    if engine == "megatron":
        assert set(adapters.values()) == {wanted}
    else:  # of rank 3 the first rank has 2 rows of A
        assert adapters[False] == pytest.approx(wanted, rel=0.05)


def test_dropout_of_experts_is_of_training_passes_and_the_same_when_they_are_repeated(two) -> None:
    for found in (ranks["experts"] for ranks in two):
        for layout in EXPERT_READ:
            dropped = found[layout, "dropped"]
            assert torch.equal(dropped["forward"], found[layout, "on"])
            assert dropped["losses"] == dropped["again"] and abs(dropped["losses"][0] - found[layout, False]["losses"][0]) > 1e-4


# --------------------------------------------------------------------------------------------------------- a base in 8 bits


@pytest.fixture(scope="module")
def rounded(folder) -> dict[bool, tuple[str, dict[str, Any]]]:
    return trained_on_rounded(folder)


@pytest.mark.parametrize("layout, value_head", ROLES_IN_8_BITS)
def test_a_base_in_8_bits_trains_as_peft_on_rounded_weights(two, rounded, layout: str, value_head: bool) -> None:
    """The oracle's weights are rounded by NumPy. Under tp the columns of o and down are cut within a block."""
    found, (_, wanted) = two[0]["8 bits"][layout, value_head], rounded[value_head]
    assert found["losses"] == pytest.approx(wanted["losses"], rel=TOLERANCE)
    assert worst(found["gradients"], wanted["gradients"]) < TOLERANCE
    assert worst(found["parameters"], wanted["parameters"]) < 10 * TOLERANCE
    assert found["frozen"] and found["with gradient"] and found["replicas"] == []


@pytest.mark.parametrize("layout", IN_8_BITS)
def test_the_reference_and_the_push_are_of_the_rounded_base(two, rounded, layout: str) -> None:
    path, _ = rounded[False]
    merged = Oracle(path, LORA).model.merge_and_unload().state_dict()
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    for ranks in two:
        for name, parts in ranks["8 bits"][layout, False]["merged"].items():
            for (r0, r1, c0, c1), values in parts:
                wanted = merged[name].reshape(len(merged[name]), -1)[r0:r1, c0:c1]
                assert values.numel() == 0 or float((values.double() - wanted).abs().max()) < 1e-6, name
    assert max(float((merged[name] - tensor).abs().max()) for name, tensor in base.items()) > 0.01
    reporter = two[-1 if layout == "pp2" else 0]
    off = reporter["8 bits"][layout, False]["off"]
    assert float((off - two[0]["8 bits"]["tp2", False]["off"]).abs().max()) < 2e-5, "the same reference in every layout"
    plain = two[0]["read"]["tp2"]["base"]
    assert 1e-4 < float((off - plain).abs().max()) < 0.1, "which is the rounded model"


@pytest.mark.parametrize("layout", IN_8_BITS)
def test_a_base_in_8_bits_takes_what_the_plan_says(two, folder, layout: str) -> None:
    arch = read_arch(folder / "llama")
    axes = ParallelLayout(2, **IN_8_BITS[layout].get("parallel", {}))
    for value_head in (head for name, head in ROLES_IN_8_BITS if name == layout):
        for rank in (0, 1):
            planned, plain = (
                role_memory(
                    arch,
                    axes,
                    axes.coordinates(rank).pp,
                    RoleWork(
                        dtype="fp32", trained=True, micro_batch_tokens=1, num_micro_batches=1, value_head=value_head, lora=lora
                    ),
                )
                for lora in (INT8, LORA)
            )
            if rank == 1 or axes.tp == 1:  # the first tp rank has fewer blocks of down_proj
                assert two[rank]["8 bits"][layout, value_head]["bytes"] == planned.weights, rank
            assert planned.weights < plain.weights and planned.gradients == plain.gradients


# -------------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_checkpoint_holds_adapters_head_and_moments_alone(two, role: str) -> None:
    keys = two[0]["saved"][role, "keys"]
    own = {key for key in keys if not key.startswith("optimizer.")}
    adapters = {key for key in own if is_adapter(key)}
    assert len(adapters) == 2 * len(MODULES) and own - adapters == ({"score.weight"} if role == "critic" else set())
    assert keys == own | {f"optimizer.state.{moment}.{key}" for moment in ("exp_avg", "exp_avg_sq") for key in own}


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_checkpoint_resumes_in_any_layout_and_to_the_bit_in_its_own(two, role: str) -> None:
    found = two[0]["saved"]
    for name in (*RESUMED_ROLES[role], "frozen"):
        assert all(torch.equal(found[role, name, "one"][key], tensor) for key, tensor in found[role, "one"].items()), name
    for name in RESUMED_ROLES[role]:
        further = found[role, name, "two"]
        if name == "same":
            assert all(torch.equal(further[key], tensor) for key, tensor in found[role, "two"].items())
        assert worst(further, {key: tensor.double() for key, tensor in found[role, "two"].items()}) < 10 * TOLERANCE, name
    assert any(not torch.equal(found[role, "two"][key], tensor) for key, tensor in found[role, "one"].items())


# ---------------------------------------------------------------------------------------------------------- dropout, faults


@pytest.mark.parametrize("layout", ["tp2", "sp"])
def test_dropout_is_of_training_passes_and_the_same_when_they_are_repeated(two, layout: str) -> None:
    for found in (ranks["dropout"] for ranks in two):
        assert torch.equal(found[layout, "forward"], found[layout, "on"])
        kept, again, recomputed = (found[layout, name]["losses"] for name in ("kept", "again", "recomputed"))
        assert kept == again and kept == pytest.approx(recomputed, rel=1e-6)
        assert abs(kept[0] - found[layout, "without"]["losses"][0]) > 1e-4
    first, recomputed = (two[0]["dropout"][layout, name]["gradients"] for name in ("kept", "recomputed"))
    assert worst(recomputed, {name: tensor.double() for name, tensor in first.items()}) < TOLERANCE, "the same masks again"


def test_dropout_keeps_the_copies_of_tp_ranks_equal(two) -> None:
    """Without sequence parallel both have the whole input of a column-parallel layer, and have to drop the same of it."""
    first, second = (ranks["dropout"]["tp2", "kept"] for ranks in two)
    assert first["losses"] == second["losses"] and first["spread"] == 0.0


def test_a_stage_without_adapters_is_refused_on_every_rank(two) -> None:
    for found in two:
        assert found["refused"].startswith("adapts no layer of pipeline stage 0 (layer 0), which must train some")
