"""Experts in mxfp4: each rank's rectangles are those of the tensors that transformers makes of them, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megappo.models import mxfp4
from megappo.models.hf_config import arch_for, read_arch, read_config, text_config
from megappo.models.hf_tensors import CheckpointReader, read_box
from megappo.models.pieces import as_2d
from megappo.models.weight_check import check_headers
from megappo.models.weight_map import hf_tensors, megatron_pieces
from megappo.parallel.layout import ParallelLayout
from tests.models.checkpoints import write_checkpoint

DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """(checkpoint as it is published, every tensor that it stands for)"""
    path = tmp_path_factory.mktemp("mxfp4") / "model"
    write_checkpoint(path, "gpt_oss")
    meant = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    stored, generator = dict(meant), torch.Generator().manual_seed(0)
    for name in [name for name in meant if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(117, 127, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales).float()
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(stored, path / "model.safetensors")
    config = read_config(path) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    return path, meant


def rectangles(path):
    """Pieces of all ranks of layouts that cut experts, and what they read."""
    arch, reader = read_arch(path), CheckpointReader(path)
    shapes = hf_tensors(arch)
    for layout in (ParallelLayout(1), ParallelLayout(4, ep=2, etp=2)):
        for rank in range(layout.world_size):
            for piece in megatron_pieces(arch, layout, rank):
                yield piece, read_box(reader.slice(piece.hf, shapes[piece.hf])[0], piece.box)


def equal(found, piece, meant) -> bool:
    box = piece.box
    return torch.equal(found.float(), as_2d(meant[piece.hf])[box.r0 : box.r1, box.c0 : box.c1])


def test_rectangles_are_those_of_transformers_tensors(quantised):
    path, meant = quantised
    assert all(equal(found, piece, meant) for piece, found in rectangles(path))


def test_numbers_in_another_order_would_be_noticed(quantised, monkeypatch):
    path, meant = quantised
    numbers = mxfp4._NUMBERS
    monkeypatch.setattr(mxfp4, "_NUMBERS", (*numbers[8:], *numbers[:8]))  # signs
    wrong = {piece.hf.rpartition(".")[2] for piece, found in rectangles(path) if not equal(found, piece, meant)}
    assert wrong == {"gate_up_proj", "down_proj"}


def test_the_plan_reads_headers_alone_and_an_export_is_not_quantised(quantised):
    path, _ = quantised
    left = check_headers(path, read_arch(path), None)
    assert left.others == () and left.head is None
    assert "quantization_config" not in text_config(read_config(path)) and arch_for(path, "fsdp2").own


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(DOWN + "_scales"), "has no .*down_proj_scales; the download may be incomplete"),
        (lambda t: t.update({DOWN + "_scales": t[DOWN + "_scales"][:, :1].contiguous()}), r"with scales \[8, 1, 3\]; \[experts"),
        (lambda t: t.update({DOWN + "_blocks": t[DOWN + "_blocks"].float()}), "is F32; blocks and scales of mxfp4 are U8"),
    ],
)
def test_damaged_blocks_are_refused_in_one_line(quantised, tmp_path, change, message):
    path, _ = quantised
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(ValueError, match=message) as refused:
        check_headers(tmp_path, read_arch(path), None)
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)
