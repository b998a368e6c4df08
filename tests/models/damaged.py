"""Checkpoints of every family with one fault each: the change of the tensors, the roles, and the line that refuses them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megappo.models.hf_config import arch_for
from megappo.models.weight_check import check_headers, check_values
from tests.models.any_families import write_any_checkpoint
from tests.models.checkpoints import COMPOSITE, write_checkpoint
from tests.models.fp8_checkpoints import quantise_checkpoint

FP8, ANY, SHARDED = "fp8", "olmo2", "sharded"
CASES = ("llama", "llama3_tied", "qwen2_tied", "qwen3", "mistral", "ministral3_tied", "qwen3_moe", COMPOSITE, FP8, ANY, SHARDED)
LAST = "layers.1.post_attention_layernorm.weight"
UP = "layers.1.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def named(tensors: Tensors, end: str) -> str:
    """The name of the one tensor that ends so."""
    (name,) = [name for name in tensors if name.endswith(end) and "vision" not in name]
    return name


def without(end: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(named(tensors, end))


def with_head(head: torch.Tensor, name: str = "score.weight", **bias: float) -> Callable[[Tensors], Any]:
    beside = {name.removesuffix("weight") + "bias": torch.tensor([value]) for value in bias.values()}
    return lambda tensors: tensors.update({name: head, **beside})


def with_output(change: float) -> Callable[[Tensors], Any]:
    """Beside the embedding to which it is tied."""

    def add(tensors: Tensors) -> None:
        (output := tensors[named(tensors, "embed_tokens.weight")].clone())[130, 63] += change
        tensors["lm_head.weight"] = output

    return add


def other(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    def replace(tensors: Tensors) -> None:
        tensors[named(tensors, end)] = change(tensors[named(tensors, end)]).contiguous()

    return replace


# what is done to the tensors, the cases, the roles' value heads, a fragment of the line; "" if training takes it
NOTHING: Callable[[Tensors], Any] = lambda tensors: None
ALL_HEADS = (None, "zero", "normal", "checkpoint")
NO_HEAD = "has no value head (score.weight, v_head.summary.weight, v_head.weight); set critic.value_head to zero or normal"
TIED = ("llama3_tied", "qwen2_tied", "ministral3_tied")
UNTIED = ("llama", "qwen3", "mistral", "qwen3_moe", FP8, ANY)
DAMAGES: dict[str, tuple[Callable[[Tensors], Any], tuple[str, ...], tuple[str | None, ...], str]] = {
    "none": (NOTHING, CASES, (None, "zero"), ""),
    "a norm is missing": (
        without(LAST),
        ("llama", "qwen2_tied", COMPOSITE, "qwen3_moe"),
        (None, "zero"),
        f"{LAST} [64] is missing",
    ),
    "the embedding is missing": (
        without("embed_tokens.weight"),
        ("llama", ANY),
        (None, "zero"),
        "embed_tokens.weight [131, 64] is",
    ),
    "an expert is missing": (
        without("layers.1.mlp.experts.7.down_proj.weight"),
        ("qwen3_moe",),
        (None, "zero"),
        "experts.7.down_proj.weight [64, 24] is missing; the download may be incomplete",
    ),
    "lm_head is missing": (
        without("lm_head.weight"),
        UNTIED,
        (None,),
        "lm_head.weight [131, 64] is missing; set tie_word_embeddings to true",
    ),
    "lm_head is missing, which no critic reads": (without("lm_head.weight"), UNTIED, ("zero",), ""),
    "another lm_head": (with_output(1.0), TIED, (None,), "lm_head.weight differs from the embedding to which it is tied; set"),
    "another lm_head, which no critic reads": (with_output(1.0), TIED, ("zero",), ""),
    "the same lm_head": (with_output(0.0), TIED, (None,), ""),
    "the same lm_head in bf16": (
        lambda tensors: (with_output(0.0)(tensors), other("lm_head.weight", torch.Tensor.bfloat16)(tensors)),
        ("llama3_tied",),
        (None,),
        "lm_head.weight differs from the embedding",
    ),
    "a shape": (
        other(UP, lambda x: x[1:]),
        ("llama", "mistral", ANY),
        (None, "zero"),
        f"{UP} has shape [95, 64], config.json asks for [96, 64]; take both from the same checkpoint",
    ),
    "a vocabulary": (
        other("embed_tokens.weight", lambda x: x[:130]),
        CASES[:4],
        (None, "zero"),
        "embed_tokens.weight has shape [130, 64], config.json asks for [131, 64]",
    ),
    "8 bits": (other(UP, torch.Tensor.char), ("llama", ANY), (None, "zero"), f"{UP} is I8; weights are read from"),
    "a scale is missing": (without(f"{UP}_scale_inv"), (FP8,), (None, "zero"), f"its scale model.{UP}_scale_inv is missing"),
    "a scale of other blocks": (
        other(f"{UP}_scale_inv", lambda x: x[1:]),
        (FP8,),
        (None, "zero"),
        "has shape [2, 2]; blocks of [32, 32] of a weight of [96, 64] need [3, 2]",
    ),
    "no value head": (NOTHING, ("llama", "qwen2_tied", ANY), ("checkpoint",), NO_HEAD),
    "a value head": (with_head(torch.ones(1, 64)), ("llama", COMPOSITE, ANY), ALL_HEADS, ""),
    "TRL's value head": (with_head(torch.ones(1, 64), "v_head.summary.weight", bias=0.0), ("llama",), ALL_HEADS, ""),
    "two labels": (with_head(torch.ones(2, 64)), ("llama",), ("checkpoint",), "[2, 64]"),
    "a bias": (
        with_head(torch.ones(1, 64), bias=0.5),
        ("llama", ANY),
        ("checkpoint",),
        "score.bias is 0.5, but the value head has no bias; set critic.value_head to zero or normal",
    ),
    "tensors of no layer": (
        lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": torch.ones(96)}),
        CASES[:2],
        (None,),
        "",
    ),
}
ROWS = [
    (damage, case, value_head)
    for damage, (_, cases, value_heads, _) in DAMAGES.items()
    for case in cases
    for value_head in value_heads
]


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def one_file(folder: Path, tensors: Tensors) -> None:
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_cases(folder: Path) -> None:
    for case in CASES:
        if case == ANY:
            write_any_checkpoint(folder / case, case)
        else:
            write_checkpoint(folder / case, "llama" if case in (FP8, SHARDED) else case)
    quantise_checkpoint(folder / FP8, (32, 32))
    for damage, (change, cases, _, _) in DAMAGES.items():
        for case in cases:
            path = folder / damage / case
            shutil.copytree(folder / case, path)
            if change is not NOTHING:
                change(tensors := tensors_of(path))
                one_file(path, tensors)
    broken_files(folder)


def broken_files(folder: Path) -> None:
    """Beside the tables of tensors: files that are not there or no safetensors."""
    for name in FILES:
        shutil.copytree(folder / SHARDED, folder / name)
    index = folder / "index names another" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = sorted(set(content["weight_map"].values()))[0]
    content["weight_map"]["model.norm.weight"] = "../llama/model.safetensors"
    index.write_text(json.dumps(content))
    (folder / "a shard is missing" / first).unlink()
    cut = folder / "a shard is cut" / first
    cut.write_bytes(cut.read_bytes()[:-1])
    one_file(folder / "no safetensors", {})
    (folder / "no safetensors" / "model.safetensors").rename(folder / "no safetensors" / "pytorch_model.bin")
    (folder / "an index is missing" / "model.safetensors.index.json").unlink()
    shard = folder / "a shard lacks a tensor" / json.loads(index.read_text())["weight_map"]["lm_head.weight"]
    save_file({name: one for name, one in load_file(shard).items() if name != "lm_head.weight"}, shard)
    one_file(folder / "nothing", {})
    (folder / "nothing" / "model.safetensors").unlink()


FILES = {
    "a shard is missing": "is missing, which model.safetensors.index.json names; the download may be incomplete",
    "a shard is cut": "cannot be read: ",
    "a shard lacks a tensor": "tensor lm_head.weight is named by the index but not in the file",
    "index names another": "names ../llama/model.safetensors, which is not a file in",
    "an index is missing": "holds model-00001-of-00004.safetensors, but neither model.safetensors nor model.safetensors.index.json",
    "no safetensors": "holds pytorch_model.bin and no .safetensors; pickled weights are never read",
    "nothing": "holds no .safetensors weights; the download may be incomplete (`megappo plan --shapes-only` needs config.json",
}


def engines_of(case: str) -> tuple[Any, ...]:
    return ("fsdp2",) if case == ANY else ("megatron", "fsdp2")


def verdict(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def verdict_of_plan(path: Path, engine: Any, value_head: Any) -> str:
    def check() -> None:
        arch = arch_for(path, engine)
        check_headers(path, arch, value_head)
        check_values(path, arch, value_head)

    return verdict(check)
