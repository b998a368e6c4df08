"""Vision-language models in Megatron's engine, in every layout of two ranks, against transformers, one sample at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megappo.config.role_sections import CriticConfig, PolicyConfig
from megappo.data.packing import PackedBatch, pack
from megappo.data.tokenizers import load_tokenizer
from tests.models.vision_cases import (
    IMAGE_TOKEN,
    KINDS,
    QUESTIONS,
    Sample,
    images_of,
    inputs_of,
    logprobs_alone,
    text_only_name,
    write_questions,
    write_vision_checkpoint,
)
from tests.worlds import spawn_world

# fp32 in another order of sums; of a gradient, relative to the largest number of its tensor.
TOLERANCE = 1e-5
SP = {"tp": 2, "sequence_parallel": True}
BOTH, ACTS, VALUES = ("policy", "critic"), ("policy",), ("critic",)
# name -> (kinds of model, roles, layout, settings of the section)
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "dp": (("qwen3_vl",), ACTS, {}, {}),
    "tp": (("qwen2_5_vl", "qwen3_vl"), BOTH, {"tp": 2}, {"micro_batch_tokens": 40}),
    "cp": (("qwen2_5_vl", "qwen3_vl"), ACTS, {"cp": 2}, {}),
    "pp": (("qwen2_5_vl", "qwen3_vl"), BOTH, {"pp": 2}, {"recompute": "full"}),
    "sp": (("qwen3_vl",), VALUES, SP, {"recompute": "full"}),
    "frozen": (("qwen3_vl",), ACTS, SP, {"freeze": ["visual"]}),
}
CONTROLS = ("plain positions", "skipped tower", "deepstack without gradients")


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
    for control in CONTROLS:
        with fault(control):
            found[control] = pass_of(Path(folder, "qwen3_vl"), samples, images, "policy", {"tp": 2}, {})
    return found


def fault(control: str) -> Any:
    from megappo.models import gpt

    def plain(tokens: torch.Tensor, cu_seqlens: torch.Tensor, _images: Any) -> torch.Tensor:
        return torch.cat([torch.arange(int(n)) for n in cu_seqlens.diff()]).expand(3, -1)

    def skipped(*args: Any) -> list[torch.Tensor]:
        return [0.0 * one for one in gpt_features(*args)]

    gpt_features = gpt.features_of
    replaced = {
        "plain positions": ("positions_of", plain),
        "skipped tower": ("features_of", skipped),
        "deepstack without gradients": ("Deferred", mock.Mock(apply=lambda _leaves, embedded, *_: embedded)),
    }
    return mock.patch.object(gpt, *replaced[control])


def pass_of(path: Path, samples: list[Sample], images: Any, role: str, parallel: dict, settings: dict) -> dict[str, Any]:
    """Log-probs or values, and gradients, of the sum of weight * output."""
    from megappo.config.role_sections import ModelConfig
    from megappo.config.run_sections import TimeoutsConfig
    from megappo.engine.build import RoleEngines
    from megappo.engine.factory import EngineSpec
    from megappo.engine.losses import LossOutput
    from megappo.models.hf_config import read_arch
    from megappo.trainer.roles import LanguageModel
    from tests.engine.test_any_family import whole_tensors
    from tests.engine.whole import Whole

    is_critic = role == "critic"
    # A sharded optimizer has the sum of its own shard alone.
    common = dict(dtype="fp32", micro_batch_tokens=64, parallel=parallel, optimizer={"distributed": False}) | settings
    section = CriticConfig.model_validate(common) if is_critic else PolicyConfig.model_validate(common | {"model": str(path)})
    head: Any = {"value_head": "normal"} if is_critic else {}
    spec = EngineSpec(role, str(path), read_arch(path), section, total_updates=10, images=images.store, **head)
    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    engine: Any = Whole(engines.build(spec))  # type: ignore[arg-type]
    model = LanguageModel(engine, 1.0)

    def loss(output: Any, micro: PackedBatch) -> LossOutput:
        rows = output if is_critic else model.token_logprobs(output, micro, want_entropy=False)[0]
        return LossOutput(loss_sum=(rows * micro["weight"]).sum(), tokens={"rows": rows})

    with engine.train_mode():
        engine.optimizer_zero_grad()
        result = engine.forward_backward(weighted(samples), loss, reads=("weight",))
        local = engine.named_gradients()
        gradients = whole_tensors(engine, local)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, sorted(local))
    engines.close()
    return {"rows": result.tokens["rows"], "gradients": gradients, "trained": sorted({name for names in held for name in names})}


# ------------------------------------------------------------------------------------------------------------------ oracle


def of_transformers(folder: Path, kind: str, role: str) -> dict[str, Any]:
    samples, images = samples_of(folder, kind)
    model: Any = KINDS[kind][1].from_pretrained(folder / kind, dtype=torch.float32, attn_implementation="eager")
    weights, rows, total = weighted(samples)["weight"].split([len(one.coded) for one in samples]), [], torch.zeros(())
    hidden = model.config.text_config.hidden_size
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)) * (hidden + 1) ** -0.5  # as `fill_value_head`
    head.requires_grad_()
    for sample, weight in zip(samples, weights):
        if role == "critic":
            out = (model.model(**inputs_of(sample, images)).last_hidden_state[0] @ head.t())[:, 0]
        else:
            out = torch.cat([torch.zeros(1), logprobs_alone(model, sample, images)])
        rows.append(out.detach())
        total = total + (out * weight).sum()
    total.backward()
    gradients = {text_only_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    if role == "critic":
        gradients["score.weight"] = head.grad
    return {"rows": torch.cat(rows), "gradients": gradients}


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
    return {(kind, role): of_transformers(folder, kind, role) for kind in KINDS for role in ("policy", "critic")}


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
    trained = {one for one in theirs["gradients"] if not (name == "frozen" and one.startswith("visual."))}
    assert error_of(mine["gradients"], theirs["gradients"], trained) < TOLERANCE
    assert any(one.startswith("visual.") for one in mine["trained"]) == (name != "frozen")


@pytest.mark.parametrize("control", CONTROLS)
def test_a_fault_is_seen(found, oracle, control: str) -> None:
    """Negative control."""
    mine, theirs = found[control], oracle["qwen3_vl", "policy"]
    if control == "deepstack without gradients":
        assert error_of(mine["gradients"], theirs["gradients"]) > 100 * TOLERANCE
    else:
        assert (mine["rows"] - theirs["rows"]).abs().max() > 1000 * TOLERANCE
