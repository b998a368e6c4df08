"""Models without a family under FSDP2, on two ranks, against transformers itself, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers

from megappo.config.role_sections import CriticConfig, LoraConfig, ModelConfig, OptimizerConfig, PolicyConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.data.packing import PackedBatch
from megappo.models.hf_config import arch_for
from megappo.models.pieces import as_2d, rectangle
from megappo.models.weight_map import hf_tensors
from tests.engine.lora_oracle import MergedOracle, Oracle, worst
from tests.engine.runs import recorded_batch
from tests.models.any_families import FAMILIES, write_any_checkpoint, write_composite
from tests.worlds import spawn_world

# fp32 in another order of sums, relative to the largest number of a tensor.
TOLERANCE = 5e-5
CONTEXT = ("gpt_oss", "deepseek_v3")  # sinks are cut with the heads; values are narrower than keys
REPLAYED = ("mixtral", "deepseek_v3", "gpt_oss", "minimax_m2", "qwen3_5_moe_text")  # qwen3_moe chooses as mixtral does
CRITICS = ("gpt_neox", "deepseek_v3", "gpt_oss", "qwen3_5_text")
DENOMINATOR = 10.0
LORA = LoraConfig(rank=3, alpha=6.0)
# model type -> (adapters, of a critic). Fused projections; names without `model.`, and biases; delta nets, windows.
ADAPTED = {
    "phi3": (LORA, True),
    "gpt_neox": (LORA, False),
    "qwen3_5_text": (LORA, False),
}
# Adapters on every linear layer, experts' too -> what the oracle has to know. Names and parts of their own; latent attention, and
# layers beside experts with the names of theirs; experts that are one tensor of the checkpoint.
EXPERTS_ADAPTED: dict[str, dict[str, Any]] = {
    "mixtral": {"prefix": "block_sparse_moe", "parts": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}},
    "deepseek_v3": {},
    "gpt_oss": {"turned": True},
    "qwen3_5_moe_text": {},
}


def run_of_two(rank: int, folder: str) -> dict[str, Any]:
    from megappo.engine.build import RoleEngines
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    found: dict[Any, Any] = {}
    for kind in FAMILIES:
        found[kind] = trained(engines, Path(folder, kind))
    for kind in CRITICS:
        found["critic", kind] = values(engines, Path(folder, kind))
    found["resumed"] = resumed(engines, Path(folder, "deepseek_v3"))
    found["composite"] = trained(engines, Path(folder, "composite"))
    for kind in CONTEXT:
        found["cp", kind] = trained(engines, Path(folder, kind), exports=False, parallel={"cp": 2})
    for kind, (lora, value_head) in ADAPTED.items():
        found["lora", kind] = adapted(engines, Path(folder, kind), lora, value_head=value_head)
    for kind in EXPERTS_ADAPTED:
        found["experts", kind] = adapted(engines, Path(folder, kind), LORA, value_head=False)
    for kind in REPLAYED:
        found["replayed", kind] = replayed(engines, Path(folder, kind))
    for recompute in ("selective", "full"):
        found["recompute", recompute] = trained(engines, Path(folder, "gpt_oss"), recompute=recompute, exports=False)
    return found


def engine_for(engines: Any, path: Path, role: str, section: Any, **spec: Any) -> Any:
    from megappo.engine.factory import EngineSpec

    return engines.build(EngineSpec(role, str(path), arch_for(path, "fsdp2"), section, total_updates=1, **spec))


def trained(engines: Any, path: Path, *, exports: bool = True, **settings: Any) -> dict[str, Any]:
    """Log-probs and gradients of one pass, the same of transformers; log-probs after an update, and of the export."""
    from tests.engine.test_conformance import logprobs_of, negative_logprob
    from tests.engine.whole import Whole

    # Adam divides by |g| + eps: with a small eps a weight whose gradient is rounding noise would move a full step.
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3)
    offload = ["parameters", "gradients", "optimizer"]
    common = dict(engine="fsdp2", dtype="fp32", micro_batch_tokens=64, optimizer=optimizer, offload=offload)
    engine: Any = Whole(engine_for(engines, path, "policy", PolicyConfig.model_validate(common | {"model": str(path)} | settings)))
    with engine.train_mode():
        engine.optimizer_zero_grad()
        result = engine.forward_backward(recorded_batch(), negative_logprob, reads=("weight",), denominator=DENOMINATOR)
        gradients = whole_tensors(engine, engine.named_gradients())
        engine.lr_scheduler_step()
        assert engine.optimizer_step().applied
    found = {"logprobs": result.tokens["logprob"], "gradients": gradients}
    if exports:
        found["updated"] = logprobs_of(engine)
        engine.export(path / "export", path)
        dist.barrier()
    return found


def replayed(engines: Any, path: Path) -> dict[str, Any]:
    """One recomputed pass with the sampler's routes: none, the model's own as transformers chooses, and those of the next token."""
    from megappo.data.packing import ROUTES, Ragged
    from tests.engine.test_conformance import negative_logprob
    from tests.engine.whole import Whole

    section = PolicyConfig(model=str(path), engine="fsdp2", dtype="fp32", micro_batch_tokens=64, recompute="full")
    engine: Any = Whole(engine_for(engines, path, "policy", section))
    batch, found = recorded_batch(), {}
    own = own_routes(read(path), batch)
    for name, routes in (("plain", None), ("own", own), ("shifted", own.roll(1, 0))):
        given = batch
        if routes is not None:
            rows = Ragged.of_table(routes)
            given = batch.with_fields(ragged_fields={ROUTES: Ragged(rows.ids.to(torch.uint8), rows.counts)})
        with engine.train_mode():
            engine.optimizer_zero_grad()
            result = engine.forward_backward(given, negative_logprob, reads=("weight", ROUTES), denominator=DENOMINATOR)
            gradients = {name: gradient.clone() for name, gradient in engine.named_gradients().items()}
        found[name] = result.tokens["logprob"], gradients, result.sums.get("rerouted_sum")
    return found


def own_routes(model: Any, batch: PackedBatch) -> torch.Tensor:
    """[T, sparse layers x top_k] int32, -1 for the first token of each sequence: what every topk among the experts chose."""
    from torch.overrides import TorchFunctionMode

    config = model.config
    named = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    choice = next(count for count in named if count), config.num_experts_per_tok

    class Recorder(TorchFunctionMode):
        found: list[torch.Tensor] = []

        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func in (torch.topk, torch.Tensor.topk) and args[0].dim() == 2 and (args[0].size(-1), out[1].size(-1)) == choice:
                self.found.append(out[1])
            return out

    rows = []
    for start, end in sequences(batch):
        with torch.no_grad(), Recorder() as recorder:
            recorder.found = []
            model(batch.tokens[None, start:end], use_cache=False)
        rows.append(torch.cat(recorder.found, 1).int())
        rows[-1][0] = -1
    return torch.cat(rows)


def adapted(engines: Any, path: Path, lora: LoraConfig, *, value_head: bool) -> dict[str, Any]:
    """Losses, gradients and adapters of updates (`test_lora.trained`); of a policy log-probs afterwards, and an export."""
    from tests.engine.lora_oracle import write_noise
    from tests.engine.test_conformance import logprobs_of
    from tests.engine.test_lora import OPTIMIZER, trained
    from tests.engine.whole import Whole

    common: dict[str, Any] = dict(engine="fsdp2", dtype="fp32", micro_batch_tokens=48, optimizer=OPTIMIZER, lora=lora)
    section = CriticConfig(**common) if value_head else PolicyConfig(model=str(path), **common)
    role, head = ("critic", {"value_head": "zero"}) if value_head else ("policy", {})
    engine: Any = Whole(engine_for(engines, path, role, section, **head))
    with engine.train_mode(), torch.no_grad():
        write_noise(engine)
    found = trained(engine)
    if not value_head:
        found["updated"] = logprobs_of(engine)
        engine.export(path / "adapted", path)
        dist.barrier()
    return found


def resumed(engines: Any, path: Path) -> dict[str, bool]:
    """Weights and log-probs of an engine that loads another's checkpoint are the other's, to the bit, also after one more step."""
    from megappo.checkpoint.store import CheckpointStore
    from tests.engine.test_conformance import logprobs_of, one_update
    from tests.engine.whole import Whole

    section = PolicyConfig(model=str(path), engine="fsdp2", dtype="fp32", optimizer=OptimizerConfig(lr=1e-2, eps=1e-3))
    pair: list[Any] = [Whole(engine_for(engines, path, "policy", section)) for _ in range(2)]
    first, second = pair
    store = CheckpointStore(path / "run", keep_last=1)
    with first.train_mode():
        one_update(first)
    store.save(1, {"policy": first}, {}, {})
    found = {"before": torch.equal(logprobs_of(first), logprobs_of(second))}
    store.load({"policy": second}, {}, {})
    found["loaded"] = torch.equal(logprobs_of(first), logprobs_of(second))
    for engine in (first, second):
        with engine.train_mode():
            one_update(engine)
    return found | {"next": torch.equal(logprobs_of(first), logprobs_of(second))}


def values(engines: Any, path: Path) -> dict[str, Any]:
    """Values of a new critic, and its head."""
    from megappo.trainer.roles import Critic
    from tests.engine.whole import Whole

    section = CriticConfig(engine="fsdp2", dtype="fp32", micro_batch_tokens=64)
    engine: Any = Whole(engine_for(engines, path, "critic", section, value_head="normal"))
    found = {"values": Critic(engine).values(recorded_batch())[0]}
    with engine.eval_mode():
        found["head"] = whole_tensors(engine, engine.named_parameters())["score.weight"]
    engine.export(path / "critic", path)
    dist.barrier()
    again: Any = Whole(engine_for(engines, path / "critic", "critic", section, value_head="checkpoint"))
    return found | {"again": Critic(again).values(recorded_batch())[0]}


def whole_tensors(engine: Any, local: Any) -> dict[str, torch.Tensor]:
    """Hugging Face name -> tensor, put together by `pieces`; constants have no gradient and stay zero."""
    mine = []
    for piece in engine.pieces()[dist.get_rank()]:
        if piece.local in local:
            place = piece.slot, piece.row, piece.col, piece.box.rows, piece.box.cols
            mine.append((piece.hf, piece.box, rectangle(local[piece.local].detach(), *place).clone()))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    tensors = {name: torch.zeros(shape) for name, shape in hf_tensors(engine.arch, engine.value_head).items()}
    for name, box, part in (one for of_rank in gathered for one in of_rank):
        as_2d(tensors[name])[box.r0 : box.r1, box.c0 : box.c1] = part
    return tensors


# ------------------------------------------------------------------------------------------------------------------ oracle


def sequences(batch: PackedBatch) -> list[tuple[int, int]]:
    cuts = batch.cu_seqlens.tolist()
    return list(zip(cuts, cuts[1:], strict=False))


def logprobs_of_transformers(model: Any, batch: PackedBatch) -> torch.Tensor:
    """[T], of each token after its prefix, 0 for the first; differentiable."""
    found = []
    for start, end in sequences(batch):
        ids = batch.tokens[start:end]
        rows = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found += [torch.zeros(1), rows.gather(1, ids[1:, None])[:, 0]]
    return torch.cat(found)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("any")
    for kind in FAMILIES:
        write_any_checkpoint(path / kind, kind)
    write_composite(path / "composite", path / "gemma3_text")
    return path


@pytest.fixture(scope="module")
def world(folder) -> dict[str, Any]:
    return spawn_world(run_of_two, 2, str(folder))[0]


def read(path: Path, kind: str = "CausalLM", **settings: Any) -> Any:
    """Through eager attention: the one that has sinks and caps."""
    load = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
    return load(path, dtype=torch.float32, attn_implementation="eager", **settings)


@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_and_gradients_are_those_of_transformers(world, folder, kind: str) -> None:
    batch, model = recorded_batch(), read(folder / kind)
    theirs = logprobs_of_transformers(model, batch)
    assert error(world[kind]["logprobs"], theirs.detach()) < TOLERANCE
    (-(theirs * batch["weight"]).sum() / DENOMINATOR).backward()
    from transformers.core_model_loading import revert_weight_conversion

    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    wanted = revert_weight_conversion(model, gradients)
    ours = {name: one for name, one in world[kind]["gradients"].items() if "correction" not in name}
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert error(ours[name], gradient) < TOLERANCE, name
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in wanted.values())


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_export_is_the_updated_model(world, folder, kind: str) -> None:
    with torch.no_grad():
        theirs = logprobs_of_transformers(read(folder / kind / "export"), recorded_batch())
    assert error(world[kind]["updated"], theirs) < TOLERANCE
    assert error(world[kind]["updated"], world[kind]["logprobs"]) > 1e-3, "the update changed something"


def test_a_checkpoint_of_experts_is_resumed_to_the_bit(world) -> None:
    assert world["resumed"] == {"before": False, "loaded": True, "next": True}


def test_of_text_and_images_the_language_model_alone_is_trained_and_exported(world, folder) -> None:
    ours, alone = world["composite"], world["gemma3_text"]
    assert torch.equal(ours["logprobs"], alone["logprobs"]) and torch.equal(ours["updated"], alone["updated"])
    with torch.no_grad():
        theirs = logprobs_of_transformers(read(folder / "composite" / "export"), recorded_batch())
    assert error(ours["updated"], theirs) < TOLERANCE


@pytest.mark.parametrize("kind", CRITICS)
def test_values_are_the_head_on_hidden_states_of_transformers(world, folder, kind: str) -> None:
    found, batch, model = world["critic", kind], recorded_batch(), read(folder / kind)
    rows = [torch.zeros(0)]
    for start, end in sequences(batch):
        with torch.no_grad():
            hidden = model.base_model(batch.tokens[None, start:end], use_cache=False).last_hidden_state[0, :-1]
        rows += [torch.zeros(1), (hidden @ found["head"].t())[:, 0]]
    assert error(found["values"], torch.cat(rows)) < TOLERANCE
    assert torch.equal(found["again"], found["values"]), "an exported critic starts a critic"


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_are_those_of_peft(world, folder, kind: str) -> None:
    from tests.engine.test_lora import OPTIMIZER, STEPS

    lora, value_head = ADAPTED[kind]
    oracle = Oracle(str(folder / kind), lora, value_head=value_head)
    compare(world["lora", kind], oracle.train(loss_of(value_head), recorded_batch(), OPTIMIZER, STEPS))


@pytest.mark.parametrize("kind", EXPERTS_ADAPTED)
def test_adapters_of_experts_are_those_of_peft(world, folder, kind: str) -> None:
    from tests.engine.test_lora import OPTIMIZER, STEPS

    oracle = MergedOracle(str(folder / kind), LORA, **EXPERTS_ADAPTED[kind])
    compare(world["experts", kind], oracle.train(loss_of(False), recorded_batch(), OPTIMIZER, STEPS))


def loss_of(value_head: bool) -> Any:
    batch = recorded_batch()

    def loss(rows: torch.Tensor) -> torch.Tensor:
        if value_head:
            return ((rows[:, 0] - batch["returns"].double()) ** 2 * batch["weight"].double()).sum()
        chosen = rows[:-1].log_softmax(-1).gather(1, batch.tokens[1:, None])[:, 0]
        logprob = torch.cat([chosen.new_zeros(1), chosen]).index_fill(0, batch.cu_seqlens[:-1].long(), 0.0)
        return -(logprob * batch["weight"].double()).sum()

    return loss


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert worst(found["gradients"], wanted["gradients"]) < TOLERANCE
    assert worst(found["parameters"], wanted["parameters"]) < 10 * TOLERANCE
    assert found["frozen"] and found["with gradient"]


@pytest.mark.parametrize("kind", [*(kind for kind, (_, value_head) in ADAPTED.items() if not value_head), *EXPERTS_ADAPTED])
def test_peft_reads_the_adapter_of_an_export_and_transformers_the_merged_model(world, folder, kind: str) -> None:
    batch, wanted = recorded_batch(), world["experts" if kind in EXPERTS_ADAPTED else "lora", kind]["updated"]
    with torch.no_grad():
        before = logprobs_of_transformers(read(folder / kind), batch)
        adapter = peft.PeftModel.from_pretrained(read(folder / kind), folder / kind / "adapted" / "adapter").eval()
        for model in (adapter, read(folder / kind / "adapted")):
            assert error(wanted, logprobs_of_transformers(model, batch)) < TOLERANCE
    assert error(wanted, before) > 1e-2, "an export of the base would be seen"


def test_replayed_routes_replace_the_routers_choice(world) -> None:
    """A model's own choice changes no bit, also where a layer is recomputed; another token's is noticed."""
    for kind in REPLAYED:
        (plain, gradients, _), (own, same, rerouted), (shifted, _, others) = world["replayed", kind].values()
        assert torch.equal(own, plain) and rerouted == 0.0 and others > 0.0, kind
        assert all(torch.equal(same[name], gradient) for name, gradient in gradients.items()), kind
        assert float((shifted - plain).abs().max()) > 1e-2, kind


@pytest.mark.parametrize("kind", CONTEXT)
def test_context_parallel_gives_the_numbers_of_data_parallel(world, kind: str) -> None:
    ours, wanted = world["cp", kind], world[kind]
    assert error(ours["logprobs"], wanted["logprobs"]) < TOLERANCE
    assert all(error(ours["gradients"][name], gradient) < TOLERANCE for name, gradient in wanted["gradients"].items())


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit_of_experts_sinks_and_windows(world, recompute: str) -> None:
    ours, wanted = world["recompute", recompute], world["gpt_oss"]
    assert torch.equal(ours["logprobs"], wanted["logprobs"])
    assert all(torch.equal(ours["gradients"][name], gradient) for name, gradient in wanted["gradients"].items())
