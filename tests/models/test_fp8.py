"""Checkpoints in fp8: each rank's rectangles are those of the dequantised tensors, bit for bit, as transformers has them."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megappo.models import fp8
from megappo.models.hf_config import arch_of, read_arch, read_config, text_config
from megappo.models.hf_tensors import CheckpointReader, read_box
from megappo.models.pieces import as_2d
from megappo.models.weight_map import hf_tensors, megatron_pieces
from tests.models.cases import FP8_CASES, LLAMA, place
from tests.models.checkpoints import COMPOSITE, write_checkpoint
from tests.models.fp8_checkpoints import quantise_checkpoint, transformers_model

UP = "model.layers.1.mlp.up_proj.weight"


def cut(path, meant):
    """(rectangle as a rank reads it, the same of the tensors `meant`) of all ranks of layouts that cut blocks."""
    arch, reader = read_arch(path), CheckpointReader(path)
    shapes = hf_tensors(arch)
    for tp, pp in ((1, 1), (2, 1), (2, 2)):
        for tp_rank in range(tp):
            for stage in range(pp):
                for piece in megatron_pieces(arch, *place(tp, pp, tp_rank, stage)):
                    box = piece.box
                    expected = as_2d(meant[piece.hf])[box.r0 : box.r1, box.c0 : box.c1]
                    yield read_box(reader.slice(piece.hf, shapes[piece.hf])[0], box), expected


@pytest.fixture(params=FP8_CASES)
def quantised(request, tmp_path):
    """(checkpoint, every tensor that it stands for) of one case."""
    case, block, dtype = FP8_CASES[request.param]
    write_checkpoint(tmp_path / "model", case)
    return tmp_path / "model", quantise_checkpoint(tmp_path / "model", block, dtype)


def test_rectangles_are_those_of_the_dequantised_tensors(quantised):
    pairs = list(cut(*quantised))
    assert pairs and all(torch.equal(found, expected) for found, expected in pairs)


def mistaken(change):
    """`Dequantised` whose scales are changed after they were read."""

    class Mistaken(fp8.Dequantised):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._scales = change(self._scales)

    return Mistaken


@pytest.mark.parametrize("change", [torch.ones_like, lambda s: s.T.reshape(s.shape)], ids=["ignored", "transposed"])
def test_the_comparison_sees_scales_that_are_ignored_or_transposed(change, tmp_path, monkeypatch):
    write_checkpoint(tmp_path, "llama")
    meant = quantise_checkpoint(tmp_path, (32, 32))
    monkeypatch.setattr("megappo.models.hf_tensors.Dequantised", mistaken(change))
    assert not all(torch.equal(found, expected) for found, expected in cut(tmp_path, meant))


@pytest.mark.parametrize("case", ["llama fp8 blocks", "ministral fp8"])
def test_transformers_dequantises_to_the_same_weights(case, tmp_path):
    stem, block, dtype = FP8_CASES[case]
    write_checkpoint(tmp_path, stem)
    quantise_checkpoint(tmp_path, block, dtype)
    kind = transformers.Mistral3ForConditionalGeneration if stem == COMPOSITE else transformers.AutoModelForCausalLM
    model = transformers_model(kind, tmp_path, dtype=torch.float32)
    theirs = {name.replace("model.language_model.", "model."): tensor for name, tensor in model.state_dict().items()}
    pairs = list(cut(tmp_path, theirs))
    assert pairs and all(torch.equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("case", FP8_CASES)
def test_ranks_import_the_weights_and_export_a_plain_checkpoint(case, checkpoints, four_ranks):
    """Through tp 2 pp 2 and back to files."""
    folder = checkpoints / f"{case}.out"
    exported = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    meant = torch.load(checkpoints / f"{case}.pt")
    assert set(exported) == set(hf_tensors(read_arch(folder)))
    assert all(torch.equal(tensor, meant[name]) for name, tensor in exported.items())
    assert "quantization_config" not in (folder / "config.json").read_text()


def test_what_is_sampled_from_is_not_quantised(quantised):
    path, _ = quantised
    assert "quantization_config" in read_config(path) and "quantization_config" not in text_config(read_config(path))


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# change of the tensors, what the message says
BROKEN = {
    "scale missing": (lambda t: t.pop(f"{UP}_scale_inv"), f"tensor {UP} is F8_E4M3, but its scale {UP}_scale_inv is missing"),
    "scales of other blocks": (
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 3)}),
        f"tensor {UP}_scale_inv has shape [2, 3]; blocks of [32, 32] of a weight of [96, 64] need [3, 2]",
    ),
    "scales that are exponents": (
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(3, 2, dtype=torch.uint8)}),
        f"tensor {UP}_scale_inv is U8; scales are read from F32, BF16, F16",
    ),
    "a scale too many": (lambda t: t.update({UP: torch.ones(96, 64)}), f"tensor {UP} is F32, but {UP}_scale_inv scales it"),
    "another fp8": (
        lambda t: t.update({UP: torch.ones(96, 64).to(torch.float8_e5m2)}),
        f"tensor {UP} is F8_E5M2; weights are read from F64, F32, BF16, F16 and F8_E4M3",
    ),
    "packed numbers": (lambda t: t.update({UP: torch.ones(96, 64, dtype=torch.int8)}), f"tensor {UP} is I8"),
}


@pytest.mark.parametrize("change, says", BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_refused_with_the_tensor(change, says, tmp_path):
    write_checkpoint(tmp_path, "llama")
    quantise_checkpoint(tmp_path, (32, 32))
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        CheckpointReader(tmp_path).slice(UP, (96, 64))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_fp8_without_settings_is_refused(tmp_path):
    write_checkpoint(tmp_path, "llama")
    quantise_checkpoint(tmp_path, None)
    (tmp_path / "config.json").write_text(json.dumps(text_config(read_config(tmp_path))))
    with pytest.raises(ValueError, match="is F8_E4M3, but config.json has no quantization_config"):
        CheckpointReader(tmp_path).slice(UP, (96, 64))


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"quant_method": "awq"}, "the checkpoint is quantised (awq); training needs its bf16, fp16, fp32 or fp8 version"),
        ({"bits": 4}, "quantised (unknown)"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]: two positive integers, or null"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_other_quantisation_is_refused(settings, says, wrapped):
    inner = {**LLAMA, "quantization_config": settings}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner} if wrapped else inner
    with pytest.raises(ValueError, match=re.escape(says)):
        arch_of(config)


def test_blocks_are_those_of_transformers_where_the_file_names_none():
    default = transformers.FineGrainedFP8Config().weight_block_size
    assert fp8.read_fp8({"quantization_config": {"quant_method": "fp8"}}) == fp8.Fp8(tuple(default))
