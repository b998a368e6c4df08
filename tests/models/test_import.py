"""Checkpoints that are wrong are refused with one line that names file and tensor; others are read however they are spelt."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.models.hf_config import read_arch
from megappo.models.hf_import import fill_value_head
from megappo.models.hf_tensors import CheckpointReader, read_box
from megappo.models.weight_check import check_tied
from megappo.models.weight_map import EMBEDDING, hf_tensors, megatron_pieces
from tests.models.cases import place
from tests.models.checkpoints import write_checkpoint


@pytest.fixture
def folder(tmp_path):
    """A llama checkpoint in one file."""
    write_checkpoint(tmp_path / "sharded", "llama")
    tensors = {name: t for file in (tmp_path / "sharded").glob("*.safetensors") for name, t in load_file(file).items()}
    single = tmp_path / "single"
    single.mkdir()
    (single / "config.json").write_text((tmp_path / "sharded" / "config.json").read_text())
    save_file(tensors, single / "model.safetensors")
    return tmp_path


def rewrite(folder, change):
    file = folder / "single" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder / "single"


def read_all(path):
    reader, arch = CheckpointReader(path), read_arch(path)
    return {name: read_box(reader.slice(name, shape)[0], megatron_box(shape)) for name, shape in hf_tensors(arch).items()}


def megatron_box(shape):
    from megappo.models.pieces import Box

    return Box(0, shape[0], 0, shape[1] if len(shape) == 2 else 1)


def test_one_file_and_shards_read_the_same(folder):
    single, sharded = read_all(folder / "single"), read_all(folder / "sharded")
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 1
    assert all(torch.equal(tensor, sharded[name]) for name, tensor in single.items())


@pytest.mark.parametrize(
    "spelling",
    [
        lambda name: f"language_model.{name}",  # Mistral 3 on the hub
        lambda name: name.replace("model.", "model.language_model.", 1),  # transformers 5
    ],
)
def test_language_models_inside_composite_checkpoints_are_found(folder, spelling):
    expected = read_all(folder / "single")

    def rename(tensors):
        for name in list(tensors):
            tensors[spelling(name)] = tensors.pop(name)
        tensors["vision_tower.ln_pre.weight"] = torch.zeros(3)

    found = read_all(rewrite(folder, rename))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_missing_and_misshapen_tensors_are_named_with_their_file(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    path = rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(3, 4)}))
    expected = rf"model.safetensors: tensor {name} has shape \[3, 4\], config.json asks for \[96, 64\]"
    with pytest.raises(ValueError, match=expected):
        read_all(path)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"{path}: tensor {name} \[96, 64\] is missing"):
        read_all(path)


def test_a_broken_index_or_file_is_named(folder):
    path = folder / "sharded"
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = sorted(set(content["weight_map"].values()))[0]
    (path / first).rename(path / "hidden")
    with pytest.raises(ValueError, match=f"{path / first} is missing, which model.safetensors.index.json names"):
        CheckpointReader(path)
    (path / first).write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=f"{first} cannot be read: .*; the download may be incomplete"):
        read_all(path)
    content["weight_map"]["model.norm.weight"] = "../single/model.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is not a file in"):
        CheckpointReader(path)


def test_pickled_weights_are_not_loaded(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="never read, save it with transformers' save_pretrained"):
        CheckpointReader(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="holds no .safetensors weights; the download may be incomplete"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_checkpoint_with_another_output_projection_is_refused(folder, same):
    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if not same:
            tensors["lm_head.weight"][130, 63] += 1

    path = rewrite(folder, tie)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    arch, reader = read_arch(path), CheckpointReader(path)
    for rank in (0, 1):
        boxes = [piece.box for piece in megatron_pieces(arch, *place(2, 1, rank, 0)) if piece.hf == EMBEDDING]
        if same or rank == 0:
            check_tied(reader, arch, boxes=boxes)
        else:
            with pytest.raises(ValueError, match="lm_head.weight differs from the embedding .* set tie_word_embeddings to false"):
                check_tied(reader, arch, boxes=boxes)


@pytest.mark.parametrize("name", ["score.weight", "v_head.summary.weight", "v_head.weight"])
def test_a_value_head_is_read_from_every_known_name(folder, name):
    head = torch.randn(1, 64)
    bias = name.removesuffix("weight") + "bias"
    path = rewrite(folder, lambda tensors: tensors.update({name: head, bias: torch.zeros(1)}))
    weight = torch.empty(1, 64)
    fill_value_head(weight, read_arch(path), CheckpointReader(path), "checkpoint", 0)
    assert torch.equal(weight, head)
    rewrite(folder, lambda tensors: tensors.update({bias: torch.tensor([0.5])}))
    with pytest.raises(ValueError, match=f"{bias} is 0.5, but the value head has no bias"):
        fill_value_head(weight, read_arch(path), CheckpointReader(path), "checkpoint", 0)


def test_an_absent_or_wide_value_head_is_refused(folder):
    path = folder / "single"
    with pytest.raises(ValueError, match="has no value head .*set critic.value_head to zero or normal"):
        fill_value_head(torch.empty(1, 64), read_arch(path), CheckpointReader(path), "checkpoint", 0)
    rewrite(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 64)}))
    with pytest.raises(ValueError, match=r"score.weight has shape \[2, 64\], config.json asks for \[1, 64\]"):
        fill_value_head(torch.empty(1, 64), read_arch(path), CheckpointReader(path), "checkpoint", 0)
