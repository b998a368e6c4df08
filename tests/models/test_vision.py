"""Architectures with towers, and the positions of tokens and images, against transformers."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megappo.data.images import IMAGE_BASE
from megappo.data.packing import pack
from megappo.models import vision
from megappo.models.hf_classes import build_on_meta, fill_buffers
from megappo.models.hf_config import arch_for, arch_of, read_arch
from megappo.models.hf_tensors import CheckpointReader, read_box
from megappo.models.pieces import Box
from megappo.models.rope import inverse_frequencies
from megappo.models.vision import features_of, positions_of, seen_in, tower_of
from megappo.models.vision_families import tower_shape
from megappo.models.weight_check import check_headers
from megappo.models.weight_map import hf_tensors
from tests.models.vision_cases import (
    IMAGE_TOKEN,
    KINDS,
    TOWERS,
    Sample,
    as_published,
    images_of,
    inputs_of,
    text_only,
    write_questions,
    write_vision_checkpoint,
)
from tests.trainer.public_models import VISION_30B_A3B, facts_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_questions(folder)
    for kind in KINDS:
        write_vision_checkpoint(folder / kind, kind)
    return folder


def test_experts_are_read_in_both_directions(folder: Path, tmp_path: Path) -> None:
    """As on the hub, and as transformers writes them: whole matrices, and rectangles of them."""
    shutil.copytree(folder / "qwen3_vl_moe", tmp_path / "other")
    as_published(tmp_path / "other")  # turns them back
    published, other = (CheckpointReader(path) for path in (folder / "qwen3_vl_moe", tmp_path / "other"))
    model = KINDS["qwen3_vl_moe"][1].from_pretrained(folder / "qwen3_vl_moe")
    whole, shapes = text_only(dict(model.named_parameters())), hf_tensors(read_arch(folder / "qwen3_vl_moe"))
    experts = [name for name in shapes if ".experts." in name]
    assert len(experts) == 3 * 4 * 3  # matrices of the experts of the layers with some
    for name in experts:
        rows, cols = shapes[name]
        for box in (Box(0, rows, 0, cols), Box(8, rows - 4, 16, cols)):
            for reader in (published, other):
                part = read_box(reader.slice(name, shapes[name])[0], box)
                assert torch.equal(part, whole[name][box.r0 : box.r1, box.c0 : box.c1])
    with pytest.raises(ValueError, match=r"experts.gate_up_proj has shape \[96, 64\], config.json asks for \[64, 64\]"):
        published.slice("model.layers.0.mlp.experts.0.up_proj.weight", (64, 64))


def test_a_published_model_with_experts_has_its_parameters() -> None:
    """The total that the page of Qwen3-VL-30B-A3B-Instruct states."""
    assert sum(map(prod, hf_tensors(arch_of(VISION_30B_A3B)).values())) == 31_070_754_032


def test_a_key_that_transformers_and_vllm_read_differently_is_refused(folder: Path) -> None:
    config = json.loads((folder / "qwen3_vl_moe/config.json").read_text())
    config["text_config"]["norm_topk_prob"] = False
    with pytest.raises(ValueError, match="text_config.norm_topk_prob false: transformers computes true.*; set it to true"):
        arch_of(config)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_are_those_of_transformers(folder: Path, kind: str) -> None:
    left_out = check_headers(folder / kind, read_arch(folder / kind), None)  # raises if one is missing or of another shape
    assert left_out.others == () and left_out.head is None


def test_keys_at_the_top_level_are_the_language_models(folder: Path) -> None:
    """Qwen2.5-VL's files on the hub, with their name of the rotary embedding."""
    flat = as_on_the_hub(folder / "qwen2_5_vl")
    assert arch_of(flat) == read_arch(folder / "qwen2_5_vl")
    del flat["vision_config"]["hidden_size"]
    with pytest.raises(ValueError, match="has no hidden_size, which its tower needs"):
        arch_of(flat)


def test_keys_of_a_tower_that_transformers_leaves_out_have_its_defaults() -> None:
    """As older versions write a fine-tuned Qwen2.5-VL: what differs from the defaults of the class, and the hidden size."""
    whole = facts_of("Qwen2.5-VL-7B-Instruct")
    tower = transformers.Qwen2_5_VLConfig().vision_config.to_dict()
    short = {key: value for key, value in whole["vision_config"].items() if key == "hidden_size" or tower.get(key) != value}
    assert set(short) == {"hidden_size", "tokens_per_second"}
    other = arch_of({**whole, "vision_config": short}).vision
    vision = arch_of(whole).vision
    assert other is not None and vision is not None
    assert (other.tensors, tower_shape(other)) == (vision.tensors, tower_shape(vision))


def as_on_the_hub(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": rope["rope_theta"]}
    return flat | {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}


def test_fsdp2_builds_the_text_only_class_beside_the_tower(folder: Path, tmp_path: Path) -> None:
    """Of a file of the hub: its angles, and the buffers that no checkpoint brings, are those of whole models."""
    config = as_on_the_hub(folder / "qwen2_5_vl") | {"rope_theta": 7e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = arch_for(tmp_path, "fsdp2")
    assert arch.vision is not None
    model: Any = build_on_meta(str(tmp_path), head_rows=0, dtype=torch.float32, vision=arch.vision)
    model.to_empty(device="cpu")
    fill_buffers(model)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert torch.equal(model.model.rotary_emb.inv_freq, inverse_frequencies(arch.rope, arch.head_dim)[0])
    whole = dict(tower_of(arch.vision, torch.float32).named_buffers())
    assert whole and all(torch.equal(buffer, whole[name]) for name, buffer in model.visual.named_buffers())


@pytest.mark.parametrize("kind", TOWERS)
def test_positions_are_those_of_transformers(folder: Path, kind: str) -> None:
    images: Any = images_of(folder / kind, folder / "questions.jsonl", folder / "cache")
    store = images.store

    def image(number: int) -> list[int]:
        return [IMAGE_BASE + number] * store.num_tokens(number)

    # None; one; three, the same one twice; one at an end; a sampled image token, which is one of text.
    coded = [
        [5, 6],
        [5, *image(2), 6, 7],
        [*image(1), 5, *image(3), 6, *image(1), 8],
        [9, *image(0)],
        [3, *image(0), IMAGE_TOKEN, 4],
    ]
    shown = [[], [2], [1, 3, 1], [0], [0]]
    batch = pack(coded)
    mine = positions_of(batch.tokens, batch.cu_seqlens, store).split(batch.lengths.tolist(), dim=1)
    model: Any = KINDS[kind][1].from_pretrained(folder / kind)
    for ids, numbers, found in zip(coded, shown, mine, strict=True):
        sample = Sample.of(ids, numbers)
        given = inputs_of(sample, images)
        theirs = torch.arange(len(ids)).expand(3, -1)
        if numbers:
            keys = ("input_ids", "mm_token_type_ids", "image_grid_thw")
            theirs = model.model.get_rope_index(**{key: given[key] for key in keys})[0][:, 0]
        assert torch.equal(found, theirs)
    assert seen_in(batch.tokens, store).images == [2, 1, 3, 0]


def test_a_part_of_an_image_is_no_image(folder: Path) -> None:
    store = images_of(folder / "qwen3_vl", folder / "questions.jsonl", folder / "cache").store
    cut = pack([[IMAGE_BASE] * 3])
    with pytest.raises(AssertionError, match="has not 4 tokens in a row"):
        positions_of(cut.tokens, cut.cu_seqlens, store)


def test_a_frozen_tower_computes_an_image_once_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all roles with its weights, in any order of images; other weights, and a tower that trains, compute their own."""
    path, calls = folder / "qwen3_vl", []
    store = images_of(path, folder / "questions.jsonl", folder / "cache").store
    computed = vision.one_pass

    def counted(tower: torch.nn.Module, images: Any, numbers: list[int], dtype: torch.dtype) -> Any:
        calls.append(list(numbers))
        return computed(tower, images, numbers, dtype)

    def tower(seed: int, trains: bool = False) -> torch.nn.Module:
        torch.manual_seed(seed)
        arch = read_arch(path).vision
        assert arch is not None
        return tower_of(arch, torch.float32).requires_grad_(trains)

    def new_calls(one: torch.nn.Module, numbers: list[int]) -> list[list[int]]:
        calls.clear()
        found = features_of(one, store, numbers, torch.float32)
        together = computed(one, store, numbers, torch.float32)
        assert all((a - b).abs().max() < 1e-6 for a, b in zip(found, together, strict=True))
        return calls[:]

    monkeypatch.setattr(vision, "one_pass", counted)
    first, twin, other = tower(0), tower(0), tower(0)
    with torch.no_grad():
        next(other.parameters()).view(-1)[3] *= 1 + 2**-23
    assert new_calls(first, [0, 1]) == [[0], [1]] and new_calls(first, [1, 2, 0]) == [[2]]
    assert new_calls(twin, [2, 1]) == [] and new_calls(other, [2, 1]) == [[2], [1]]
    trained = tower(0, trains=True)
    assert new_calls(trained, [0]) == new_calls(trained, [0]) == [[0]]
    with torch.no_grad():
        assert new_calls(trained, [0]) == [[0]], "its weights change in the step, with or without a graph"
    store.features.clear()
    store.features.free = 0
    assert new_calls(first, [0]) == new_calls(first, [0]) == [[0]], "what does not fit is computed again"
