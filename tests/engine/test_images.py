"""Vision-language models in both engines, in every layout of two ranks, against transformers, one sample at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megappo.config.role_sections import CriticConfig, PolicyConfig
from megappo.data.packing import PackedBatch, pack
from megappo.data.tokenizers import load_tokenizer
from tests.engine.lora_oracle import PREFIX, noise_of
from tests.models.vision_cases import (
    IMAGE_TOKEN,
    KINDS,
    QUESTIONS,
    Sample,
    images_of,
    inputs_of,
    logprobs_alone,
    text_only,
    text_only_name,
    write_questions,
    write_vision_checkpoint,
)
from tests.worlds import spawn_world

# fp32 in another order of sums; of a gradient, relative to the largest number of its tensor.
TOLERANCE = 1e-5
SP = {"tp": 2, "sequence_parallel": True}
FSDP2 = {"engine": "fsdp2"}
LORA = {"rank": 4, "alpha": 2.0}
# A policy, a critic, and a policy with adapters.
BOTH, ACTS, VALUES = ("policy", "critic"), ("policy",), ("critic",)
# name -> (kinds of model, roles, layout, settings of the section). Both kinds where Megatron cuts them; a critic where an engine
# has it with something else to go wrong.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "dp": (("qwen3_vl",), ACTS, {}, {}),
    "tp": (("qwen2_5_vl", "qwen3_vl", "internvl"), ACTS, {"tp": 2}, {"micro_batch_tokens": 40}),
    "cp": (("qwen2_5_vl", "qwen3_vl", "internvl"), ACTS, {"cp": 2}, {}),
    "pp": (("qwen2_5_vl", "qwen3_vl"), ACTS, {"pp": 2}, {"recompute": "full"}),
    "values of stages": (("qwen2_5_vl", "internvl"), VALUES, {"pp": 2}, {}),
    "sp": (("qwen3_vl",), VALUES, SP, {"recompute": "full"}),
    "frozen": (("qwen3_vl",), ACTS, SP, {"freeze": ["visual"]}),
    "experts pp": (("qwen3_vl_moe",), VALUES, {"pp": 2}, {}),
    "experts ep": (("qwen3_vl_moe",), ACTS, SP | {"ep": 2}, {"recompute": "full"}),
    "fsdp2 experts": (("qwen3_vl_moe",), BOTH, {}, FSDP2 | {"micro_batch_tokens": 40}),
    "fsdp2": (("qwen3_vl", "internvl"), BOTH, {}, FSDP2 | {"micro_batch_tokens": 24}),
    "fsdp2 tp": (("qwen2_5_vl",), ACTS, {"tp": 2}, FSDP2),
    "fsdp2 sp": (("qwen3_vl",), VALUES, SP, FSDP2 | {"recompute": "full"}),
    "fsdp2 cp": (("qwen3_vl",), ACTS, {"cp": 2}, FSDP2),
    "lora": (("qwen3_vl",), ("adapted",), SP, {"lora": LORA, "recompute": "full"}),
    "fsdp2 lora": (("qwen2_5_vl",), ("adapted",), {}, FSDP2 | {"lora": LORA}),
    "lora experts": (("qwen3_vl_moe",), ("adapted",), SP | {"ep": 2}, {"lora": LORA | {"targets": "all-linear"}}),
    "fsdp2 lora experts": (("qwen3_vl_moe",), ("adapted",), {}, FSDP2 | {"lora": LORA | {"targets": "all-linear"}}),
    "fsdp2 frozen": (("qwen3_vl",), ACTS, {}, FSDP2 | {"freeze": ["visual"], "recompute": "selective", "micro_batch_tokens": 24}),
}
CONTROLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain positions": ({"tp": 2}, {}),
    "skipped tower": ({"tp": 2}, {}),
    "deepstack without gradients": ({"tp": 2}, {}),
    "fsdp2: deepstack without gradients": ({}, FSDP2),
}


def samples_of(folder: Path, kind: str) -> tuple[list[Sample], Any]:
    images = images_of(folder / kind, folder / "questions.jsonl", folder / "cache")
    tokenizer, generator = load_tokenizer(folder / kind), torch.Generator().manual_seed(1)
    samples = []
    for question, numbers in QUESTIONS:
        answer = torch.randint(3, 250, (7,), generator=generator).tolist()
        # A policy may sample the image token: it is a token of text then. transformers takes it so only without images.
        answer[3] = answer[3] if numbers else IMAGE_TOKEN
        samples.append(Sample.of([*images.encoded(question, numbers, tokenizer.encode_prompt, question), *answer], numbers))
    return samples, images


def weighted(samples: list[Sample]) -> PackedBatch:
    batch = pack([one.coded for one in samples])
    return batch.with_fields({"weight": torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(2))})


def of_two_ranks(rank: int, folder: str) -> dict[Any, Any]:
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    torch.set_num_threads(1)
    found = {}
    for kind in KINDS:
        samples, images = samples_of(Path(folder), kind)
        for name, (kinds, roles, parallel, settings) in CASES.items():
            for role in roles if kind in kinds else ():
                found[kind, name, role] = pass_of(Path(folder, kind), samples, images, role, parallel, settings)
    samples, images = samples_of(Path(folder), "qwen3_vl")
    for control, layout in CONTROLS.items():
        with fault(control):
            found[control] = pass_of(Path(folder, "qwen3_vl"), samples, images, "policy", *layout)
    return found


def fault(control: str) -> Any:
    from megappo.models import gpt, hf_classes

    def plain(tokens: torch.Tensor, cu_seqlens: torch.Tensor, _images: Any) -> torch.Tensor:
        return torch.cat([torch.arange(int(n)) for n in cu_seqlens.diff()]).expand(3, -1)

    def skipped(*args: Any) -> list[torch.Tensor]:
        return [0.0 * one for one in gpt_features(*args)]

    def detached(*args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        first, later = placed(*args)
        return first, [one.detach() for one in later]

    gpt_features, placed = gpt.features_of, hf_classes.placed
    replaced = {
        "plain positions": (gpt, "positions_of", plain),
        "skipped tower": (gpt, "features_of", skipped),
        "deepstack without gradients": (gpt, "Deferred", mock.Mock(apply=lambda _leaves, embedded, *_: embedded)),
        "fsdp2: deepstack without gradients": (hf_classes, "placed", detached),
    }
    return mock.patch.object(*replaced[control])


def pass_of(path: Path, samples: list[Sample], images: Any, role: str, parallel: dict, settings: dict) -> dict[str, Any]:
    """Log-probs or values, and gradients, of the sum of weight * output."""
    from megappo.commands.verify.measure import gather_tensors
    from megappo.config.role_sections import ModelConfig
    from megappo.config.run_sections import TimeoutsConfig
    from megappo.engine.build import RoleEngines
    from megappo.engine.factory import EngineSpec
    from megappo.engine.losses import LossOutput
    from megappo.models.hf_config import arch_for
    from megappo.trainer.roles import LanguageModel
    from tests.engine.lora_oracle import write_noise
    from tests.engine.test_any_family import whole_tensors
    from tests.engine.whole import Whole

    is_critic = role == "critic"
    # Megatron's sharded optimizer has the sum of its own shard alone.
    common: dict[str, Any] = dict(dtype="fp32", micro_batch_tokens=64, parallel=parallel) | settings
    if "engine" not in settings:
        common["optimizer"] = {"distributed": False}
    section = CriticConfig.model_validate(common) if is_critic else PolicyConfig.model_validate(common | {"model": str(path)})
    head: Any = {"value_head": "normal"} if is_critic else {}
    spec = EngineSpec(role, str(path), arch_for(path, section.engine), section, total_updates=10, images=images.store, **head)
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    engine: Any = Whole(engines.build(spec))  # type: ignore[arg-type]
    if role == "adapted":
        with torch.no_grad():
            write_noise(engine)
    model = LanguageModel(engine, 1.0)

    def loss(output: Any, micro: PackedBatch) -> LossOutput:
        rows = output if is_critic else model.token_logprobs(output, micro, want_entropy=False)[0]
        return LossOutput(loss_sum=(rows * micro["weight"]).sum(), tokens={"rows": rows})

    with engine.train_mode(), images_of_passes() as seen:
        engine.optimizer_zero_grad()
        result = engine.forward_backward(weighted(samples), loss, reads=("weight",))
        local = engine.named_gradients()
        gradients = gather_tensors(local, engine).tensors if role == "adapted" else whole_tensors(engine, local)
    again = passes_again(engine, weighted(samples), loss, images.store) if "freeze" in settings else None
    tiles = path.name == "internvl" and "cp" not in parallel  # once
    if role == "adapted" or (role == "policy" and (engine.arch.moe is not None or tiles)):
        engine.export(path.parent / f"{path.name} {role} {section.engine}", path)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (sorted(local), seen, again))
    engines.close()
    trained = sorted({name for names, *_ in held for name in names})
    seen, again = ([one[place] for one in held] for place in (1, 2))
    return {"rows": result.tokens["rows"], "gradients": gradients, "trained": trained, "seen": seen, "again": again}


def passes_again(engine: Any, batch: PackedBatch, loss: Any, store: Any) -> list[tuple[Any, list[list[int]]]]:
    """Outputs of passes, and the images of each pass through the tower, when a step begins, then, and when another one does."""
    from megappo.models import vision

    found, computed = [], vision.one_pass
    for begins in (True, False, True):
        if begins:
            store.features.clear()
        with mock.patch.object(vision, "one_pass", side_effect=computed) as tower, engine.eval_mode():
            rows = engine.forward_backward(batch, loss, reads=("weight",), forward_only=True).tokens["rows"]
        found.append((rows, [list(call.args[2]) for call in tower.call_args_list]))
    return found


@contextlib.contextmanager
def images_of_passes() -> Iterator[list[int]]:
    """Number of the images of every pass through a tower of engine fsdp2, 0 for one that no token asked for."""
    from megappo.models import hf_classes

    seen: list[int] = []
    seen_in = hf_classes.seen_in

    def recorded(*args: Any) -> Any:
        found = seen_in(*args)
        seen.append(len(found.images))
        return found

    with mock.patch.object(hf_classes, "seen_in", recorded):
        yield seen


# ------------------------------------------------------------------------------------------------------------------ oracle


def of_transformers(folder: Path, kind: str, role: str) -> dict[str, Any]:
    samples, images = samples_of(folder, kind)
    model: Any = KINDS[kind][1].from_pretrained(folder / kind, dtype=torch.float32, attn_implementation="eager")
    weights, rows, total = weighted(samples)["weight"].split([len(one.coded) for one in samples]), [], torch.zeros(())
    hidden = model.config.text_config.hidden_size
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)) * (hidden + 1) ** -0.5  # as `fill_value_head`
    head.requires_grad_()
    if role == "adapted":
        model = with_adapters(model)
    for sample, weight in zip(samples, weights):
        if role == "critic":
            out = (model.model(**inputs_of(sample, images)).last_hidden_state[0] @ head.t())[:, 0]
        else:
            out = torch.cat([torch.zeros(1), logprobs_alone(model, sample, images)])
        rows.append(out.detach())
        total = total + (out * weight).sum()
    total.backward()
    of_class = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if role == "adapted":
        named = {text_only_name(_of_class(name)): one for name, one in of_class.items()}
        gradients = {name: block for whole, one in named.items() for name, block in adapter_blocks(whole, one)}
    else:
        gradients = text_only(of_class)
    if role == "critic":
        gradients["score.weight"] = head.grad
    return {"rows": torch.cat(rows), "gradients": gradients}


def with_adapters(model: Any) -> Any:
    """PEFT's on the language model alone, at a start in which nothing is zero. Those of gate and up of an expert are one of twice
    the rank, of which blocks are zero."""
    targets = r".*\.language_model\.layers\..*_proj"
    how: dict[str, Any] = {}
    if hasattr(model.config.text_config, "num_experts"):
        joined = {name: {r".*\.gate_up_proj": 2 * LORA[of]} for name, of in (("rank_pattern", "rank"), ("alpha_pattern", "alpha"))}
        how = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], **joined}
    adapted: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=targets, **how)
    ).eval()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
            for ours, block in adapter_blocks(text_only_name(_of_class(name)), parameter.data):
                block.copy_(noise_of(ours, tuple(block.shape)))
    return adapted


def adapter_blocks(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and place of every adapter in a tensor of PEFT, which has those of all experts of a layer in one: A [experts x rank,
    in], B [out, rank x experts]."""
    layer, experts, rest = name.partition(".experts.")
    if not experts:
        yield name, tensor
        return
    is_a, rank = "lora_A" in rest, LORA["rank"]
    kinds = ("gate_proj", "up_proj") if rest.startswith("base_layer.") else ("down_proj",)
    each = len(tensor if is_a else tensor[0]) // rank // len(kinds)
    for expert in range(each):
        whole = tensor.chunk(each)[expert] if is_a else tensor.unflatten(1, (-1, each))[..., expert]
        for at, kind in enumerate(kinds):
            ranks = slice(at * rank, (at + 1) * rank)
            block = whole[ranks] if is_a else whole.chunk(len(kinds))[at][:, ranks]
            yield f"{layer}.experts.{expert}.{kind}.{rest.removeprefix('base_layer.')}", block


def _of_class(name: str) -> str:
    """Name without what PEFT adds."""
    return name.removeprefix(PREFIX).replace(".default.weight", ".weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_questions(folder)
    for kind in KINDS:
        write_vision_checkpoint(folder / kind, kind)
        samples_of(folder, kind)  # the ranks find the store made
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[Any, Any]:
    return spawn_world(of_two_ranks, 2, str(folder))[0]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> dict[Any, Any]:
    kinds_and_roles = {(kind, role) for kinds, roles, *_ in CASES.values() for kind in kinds for role in roles}
    return {one: of_transformers(folder, *one) for one in sorted(kinds_and_roles)}


def error_of(mine: dict[str, Any], theirs: dict[str, Any], names: set[str] | None = None) -> float:
    """Largest error of a gradient, relative to its tensor's largest number, or to a thousandth of that of all."""
    largest = max(float(one.abs().max()) for one in theirs.values())
    return max(
        float((mine[name] - one).abs().max()) / max(float(one.abs().max()), 1e-3 * largest)
        for name, one in theirs.items()
        if names is None or name in names
    )


@pytest.mark.parametrize(
    ("kind", "name", "role"), [(kind, name, role) for name, (kinds, roles, *_) in CASES.items() for kind in kinds for role in roles]
)
def test_a_layout_is_transformers(found, oracle, kind: str, name: str, role: str) -> None:
    mine, theirs = found[kind, name, role], oracle[kind, role]
    assert (mine["rows"] - theirs["rows"]).abs().max() < TOLERANCE
    frozen = "freeze" in CASES[name][-1]
    trained = {one for one in theirs["gradients"] if not (frozen and one.startswith("visual."))}
    assert error_of(mine["gradients"], theirs["gradients"], trained) < TOLERANCE
    assert any(one.startswith("visual.") for one in mine["trained"]) == (not frozen and role != "adapted")


@pytest.mark.parametrize("name", [name for name, (*_, settings) in CASES.items() if "freeze" in settings])
def test_a_frozen_tower_passes_once_a_step(found, name: str) -> None:
    """An image that stands in several micro-batches, or in a later pass, is not computed again, with the same bits; and under fsdp2
    all ranks enter the tower as often."""
    of_case = found["qwen3_vl", name, "policy"]
    ranks = of_case["again"]
    for (first, passes), (second, none), (third, same) in ranks:
        assert passes == same and none == []
        assert (first is None) or (torch.equal(first, second) and torch.equal(first, third))
        shown = [image for images in passes for image in images]
        assert len(set(shown)) == len(shown) or name.startswith("fsdp2")  # where a rank waits for a peer with the smallest one
    if name.startswith("fsdp2"):
        assert len({len(passes) for (_, passes), *_ in ranks}) == 1


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for name, (kinds, roles, *_) in CASES.items() for kind in kinds if "adapted" in roles]
)
def test_exports_with_adapters_are_the_policy(folder: Path, found, kind: str, name: str) -> None:
    """The merged model in transformers, and the adapters on the source in PEFT, which adapts no layer of the tower."""
    samples, images = samples_of(folder, kind)
    engine = CASES[name][-1].get("engine", "megatron")
    export, model_class = folder / f"{kind} adapted {engine}", KINDS[kind][1]
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    merged = model_class.from_pretrained(export, **how)
    adapted: Any = peft.PeftModel.from_pretrained(model_class.from_pretrained(folder / kind, **how), export / "adapter").eval()
    assert not [one for one, _ in adapted.named_parameters() if "lora" in one and "visual" in one]
    for model in (merged, adapted):
        with torch.no_grad():
            rows = torch.cat([one for sample in samples for one in (torch.zeros(1), logprobs_alone(model, sample, images))])
        assert (found[kind, name, "adapted"]["rows"] - rows).abs().max() < TOLERANCE


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_an_export_of_experts_is_as_published(folder: Path, found, engine: str) -> None:
    """Of weights that no step changed: bit for bit the tensors of the source, which has one of all experts of a layer."""
    source, export = (
        load_file(path / "model.safetensors") for path in (folder / "qwen3_vl_moe", folder / f"qwen3_vl_moe policy {engine}")
    )
    assert source.keys() == export.keys() and any(one.dim() == 3 for one in export.values())
    assert all(torch.equal(one, export[name]) for name, one in source.items())


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_an_export_of_tiles_is_read_by_transformers(folder: Path, found, engine: str) -> None:
    """Whole and with the same weights, under names other than those that it writes itself."""
    model_class = KINDS["internvl"][1]
    source = model_class.from_pretrained(folder / "internvl").state_dict()
    export, report = model_class.from_pretrained(folder / f"internvl policy {engine}", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert all(torch.equal(one, export.state_dict()[name]) for name, one in source.items())


@pytest.mark.parametrize("role", BOTH)
def test_a_rank_without_an_image_enters_the_tower(found, role: str) -> None:
    """Of the same number of micro-batches some have no image on one rank, and some on none: the gradients above are right, and no
    rank waited for another."""
    first, second = found["qwen3_vl", "fsdp2", role]["seen"]
    assert len(first) == len(second) > 1 and 0 in first + second and first != second


@pytest.mark.parametrize("control", CONTROLS)
def test_a_fault_is_seen(found, oracle, control: str) -> None:
    """Negative control."""
    mine, theirs = found[control], oracle["qwen3_vl", "policy"]
    if "deepstack" in control:
        assert error_of(mine["gradients"], theirs["gradients"]) > 100 * TOLERANCE
    else:
        assert (mine["rows"] - theirs["rows"]).abs().max() > 1000 * TOLERANCE
