"""Architectures without a family: names and places of their tensors, what is refused, and the start-up check as the judge."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from megappo.models import any_model
from megappo.models.any_model import describe_model
from megappo.models.hf_config import arch_for
from megappo.models.hf_tensors import CheckpointReader, read_box
from megappo.models.pieces import Box, check_tiling, rectangle, shape_as_2d
from megappo.models.row_shards import own_parameters, shard_piece_map
from megappo.models.weight_map import hf_tensors
from megappo.parallel.layout import ParallelLayout
from tests.models.any_families import FAMILIES, REFUSED, config_of, write_any_checkpoint
from tests.worlds import spawn_world

EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("any")
    for kind in EXPERTS:
        write_any_checkpoint(path / kind, kind)
    return path


def assembled(path: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Parameters put together from the file's tensors by the pieces of all ranks."""
    arch, reader = arch_for(path, "fsdp2"), CheckpointReader(path)
    parameters, shapes = {one.name: one for one in own_parameters(arch)}, hf_tensors(arch)
    held: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    pieces = shard_piece_map(arch, ParallelLayout(ranks))
    for rank in range(ranks):
        local: dict[str, torch.Tensor] = {}
        for piece in pieces[rank]:
            shape = parameters[piece.local].shape
            step = shape[0] if parameters[piece.local].constant else -(-shape[0] // ranks)
            part = local.setdefault(piece.local, torch.full((min(step, shape[0] - rank * step), *shape[1:]), torch.nan))
            box = piece.box
            source, _ = reader.slice(piece.hf, shapes[piece.hf])
            rectangle(part, piece.slot, piece.row, piece.col, box.rows, box.cols).copy_(read_box(source, box))
        for name, part in local.items():
            held[name].append(part)
    return {name: torch.cat(parts) for name, parts in held.items()}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_read_into_the_places_where_transformers_has_them(folder, kind: str) -> None:
    for ranks in [1, 2, 3, 7]:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / kind).state_dict()
        ours = assembled(folder / kind, ranks)
        assert ours.keys() == theirs.keys() and sum("experts" in name for name in ours)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("kind", EXPERTS)
def test_pieces_cover_every_tensor_once(folder, kind: str, value_head: bool) -> None:
    arch = arch_for(folder / kind, "fsdp2")
    held: dict[str, list[Box]] = {}
    for piece in (one for pieces in shard_piece_map(arch, ParallelLayout(3), value_head).values() for one in pieces):
        held.setdefault(piece.hf, []).append(piece.box)
    shapes = hf_tensors(arch, value_head)
    assert held.keys() == shapes.keys() and ("score.weight" in held) == value_head
    for name, shape in shapes.items():
        rows, cols = shape_as_2d(shape)
        check_tiling(Box(0, rows, 0, cols), held[name], name)


def test_layers_of_one_kind_share_a_template(tmp_path) -> None:
    config_of("minimax_m2", {**FAMILIES["minimax_m2"], "num_hidden_layers": 12}).save_pretrained(tmp_path)
    assert len(shard_piece_map(named(tmp_path, "MiniMaxM2ForCausalLM"), ParallelLayout(4)).templates) == 2


def named(path: Path, architecture: str):
    """Description of a config.json, which transformers writes without `architectures`."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return arch_for(path, "fsdp2")


def test_a_model_without_a_family_is_read_for_fsdp2_alone(folder) -> None:
    arch = arch_for(folder / "minimax_m2", "fsdp2")
    assert (arch.family, arch.num_layers, arch.hidden_size, arch.vocab_size) == ("minimax_m2", 2, 64, 131)
    assert arch.moe is not None and (arch.moe.num_experts, arch.moe.top_k, arch.moe.ffn_size) == (5, 2, 96)
    assert arch_for(folder / "deepseek_v3", "fsdp2").moe.dense_layers == (0,)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="architecture MiniMaxM2ForCausalLM is not supported.*; engine fsdp2 runs any") as refused:
        arch_for(folder / "minimax_m2", "megatron")
    assert "\n" not in str(refused.value)


def test_code_of_a_checkpoint_is_refused_before_transformers_reads_it(tmp_path) -> None:
    config = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with mock.patch.object(any_model, "AutoConfig", side_effect=AssertionError), pytest.raises(ValueError, match="auto_map"):
        arch_for(tmp_path, "fsdp2")


@pytest.mark.parametrize("name", REFUSED)
def test_what_packed_sequences_would_change_is_refused_in_one_line(tmp_path, name: str) -> None:
    kind, settings, message = REFUSED[name]
    config_of(kind, settings).save_pretrained(tmp_path)
    with pytest.raises(ValueError) as refused:
        describe_model(tmp_path)
    assert message in str(refused.value) and str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def start_up_checks(rank: int, folder: str) -> dict[str, Any]:
    """Name of a config -> scale of its logits, or the refusal, of a random model."""
    from megappo.models import hf_classes
    from megappo.models.hf_classes import build_on_meta, check_packing, fill_buffers
    from megappo.parallel.groups import build_groups

    groups, found = build_groups(ParallelLayout(1)), {}
    for path in sorted(Path(folder).iterdir()):
        together = mock.patch.object(hf_classes, "_keep_states_apart") if path.name == "states in a row" else nullcontext()
        with together:
            model = build_on_meta(str(path), head_rows=0, dtype=torch.float32).eval().to_empty(device="cpu")
        fill_buffers(model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        try:
            found[path.name] = check_packing(model, torch.float32, torch.device("cpu"), groups)
        except ValueError as error:
            found[path.name] = str(error)
    return found


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checked")
    for name, refused in (("linear attention",) * 2, ("states in a row", "linear attention"), ("capped logits",) * 2):
        kind, settings, _ = REFUSED[refused]
        config_of(kind, settings).save_pretrained(folder / name)
    for kind in ("granite", "cohere2", "olmo2"):
        config_of(kind, FAMILIES[kind]).save_pretrained(folder / kind)
    return spawn_world(start_up_checks, 1, str(folder))[0]


@pytest.mark.parametrize("name", ["capped logits", "states in a row"])
def test_the_start_up_check_refuses_them_too(checked, name: str) -> None:
    """The judge of what no rule knows: of delta nets, too, if they do not see each sequence alone."""
    assert "sequences packed together differ from each alone by" in checked[name]
    assert checked["linear attention"] == 1.0


def test_scales_of_logits_are_found(checked) -> None:
    assert (checked["granite"], checked["cohere2"], checked["olmo2"]) == (0.25, 0.25, 1.0)
