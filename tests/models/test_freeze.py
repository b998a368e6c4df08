"""Patterns of frozen weights: which tensors they name, in every family, layout and engine alike."""

import json
from dataclasses import replace

import pytest

from megappo.models.freeze import check_frozen_stages, frozen_on_rank, frozen_tensors, frozen_whole
from megappo.models.hf_config import arch_of
from megappo.models.weight_map import hf_tensors, local_shapes, megatron_pieces
from megappo.parallel.layout import ParallelLayout
from tests.commands.plan.archs import MOE, llama
from tests.models.checkpoints import CASES, EXPERT_CASES, hf_config

# patterns -> test of a name
NAMED = [
    (("embed_tokens",), lambda name: name == "model.embed_tokens.weight"),
    (("self_attn",), lambda name: ".self_attn." in name),
    (("layers.0-2",), lambda name: name.startswith(("model.layers.0.", "model.layers.1.", "model.layers.2."))),
    (("layers.1-1.mlp", "norm"), lambda name: name.startswith("model.layers.1.mlp.") or name == "model.norm.weight"),
    (("mlp.down_proj", "layers.3"), lambda name: "mlp.down_proj" in name or name.startswith("model.layers.3.")),
    (("model.layers.0.self_attn.o_proj.weight",), lambda name: name == "model.layers.0.self_attn.o_proj.weight"),
]


def test_a_pattern_is_a_run_of_parts_of_a_name():
    for value_head in [False, True]:
        for engine in ["megatron", "fsdp2"]:
            for patterns, named in NAMED:
                names = hf_tensors(llama(), value_head)
                found = frozen_tensors(llama(), patterns, engine, value_head=value_head)
                assert found == {name for name in names if named(name)} and found


def test_a_part_is_a_whole_word():
    for pattern in ("layers.1-", "self", "proj", "ayers.0", "layers.0-2.self"):
        with pytest.raises(ValueError, match="matches no weight"):
            frozen_tensors(llama(), (pattern,), "megatron", value_head=False)
    twelve = llama(layers=12)
    assert {name.split(".")[2] for name in frozen_tensors(twelve, ("layers.1",), "megatron", value_head=False)} == {"1"}


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2, "layers_per_stage": (3, 1)}])
def test_every_layout_freezes_the_same_tensors(axes):
    """Names of a rank's frozen parameters, against the layers that it holds."""
    frozen = frozen_tensors(llama(), ("layers.1-2", "embed_tokens"), "megatron", value_head=True)
    layout = ParallelLayout(4, **axes)
    for rank in range(4):
        found = frozen_on_rank(llama(), layout, rank, frozen, value_head=True)
        held = local_shapes(llama(), layout, rank, True)
        parts = ("decoder.layers.1.", "decoder.layers.2.", "embedding.")
        assert found == {name for name in held if name.startswith(parts)}, rank


def test_a_tied_output_projection_is_frozen_with_the_embedding_on_both_ends():
    tied, layout = llama(tied=True), ParallelLayout(2, pp=2)
    frozen = frozen_tensors(tied, ("embed_tokens",), "megatron", value_head=False)
    assert frozen_on_rank(tied, layout, 0, frozen, value_head=False) == {"embedding.word_embeddings.weight"}
    assert frozen_on_rank(tied, layout, 1, frozen, value_head=False) == {"output_layer.weight"}
    with pytest.raises(ValueError, match="lm_head matches no weight"):
        frozen_tensors(tied, ("lm_head",), "megatron", value_head=False)


def test_a_rank_with_padding_of_the_vocabulary_alone_freezes_its_embedding_too():
    small = llama(vocab=3, kv_heads=4)  # of 4 rows, 2 on each tp rank; with tp 4 the last has none
    frozen = frozen_tensors(small, ("embed_tokens",), "megatron", value_head=False)
    layout = ParallelLayout(4, tp=4)
    assert all(frozen_on_rank(small, layout, rank, frozen, value_head=False) for rank in range(4))


def test_parts_of_one_parameter_are_refused_under_the_engine_that_fuses_them():
    """Megatron has q, k and v in one matrix, and gate and up; transformers' class each by itself."""
    for pattern, others in (("q_proj", "k_proj, v_proj"), ("mlp.up_proj", "gate_proj")):
        with pytest.raises(ValueError, match=f"is one parameter with {others} under engine megatron; .* engine to fsdp2"):
            frozen_tensors(llama(), (pattern,), "megatron", value_head=False)
        apart = frozen_tensors(llama(), (pattern,), "fsdp2", value_head=False)
        assert len(apart) == 4 and frozen_whole(llama(), apart, value_head=False) == apart
    assert len(frozen_tensors(llama(), ("q_proj", "k_proj", "v_proj"), "megatron", value_head=False)) == 12


def test_experts_are_frozen_by_number_or_all_with_their_router_trained():
    arch = replace(llama(), family="qwen3_moe", moe=MOE, qk_norm=True)
    frozen = frozen_tensors(arch, ("experts",), "megatron", value_head=False)
    assert frozen and all(".experts." in name for name in frozen)
    one = frozen_tensors(arch, ("experts.0",), "megatron", value_head=False)
    assert one and all(".experts.0." in name for name in one)
    layout = ParallelLayout(2, ep=2)
    assert frozen_on_rank(arch, layout, 0, one, value_head=False) and not frozen_on_rank(arch, layout, 1, one, value_head=False)


def test_a_stage_with_nothing_to_train_is_refused():
    frozen = frozen_tensors(llama(), ("layers.0-1",), "megatron", value_head=True)
    check_frozen_stages(llama(), ParallelLayout(2, pp=2), frozen, value_head=True)  # the embedding trains there
    chunks = ParallelLayout(2, pp=2, vpp=2)
    with pytest.raises(ValueError, match=r"stage 1, chunk 0 \(layer 1\)"):
        check_frozen_stages(llama(), chunks, frozen, value_head=True)
    probe = frozen_tensors(llama(), ("model",), "megatron", value_head=True)
    check_frozen_stages(llama(), ParallelLayout(2), probe, value_head=True)  # the value head alone


@pytest.mark.parametrize("case", [*CASES, *EXPERT_CASES])
def test_every_part_of_every_family_is_frozen_by_its_name(case):
    """Alone, or together with what Megatron has in the same parameter, which holds nothing else."""
    arch = arch_of(
        json.loads(hf_config(case).to_json_string()) | {"architectures": [f"{(CASES | EXPERT_CASES)[case][0]}ForCausalLM"]}
    )
    names = hf_tensors(arch, True).keys() - {"score.weight"}
    refused: list[str] = []

    def check(*patterns: str) -> None:
        found = frozen_tensors(arch, patterns, "megatron", value_head=True)
        assert found == {name for name in names if {*patterns} & {*name.split(".")}}
        held = frozen_on_rank(arch, ParallelLayout(1), 0, found, value_head=True)
        assert {piece.hf for piece in megatron_pieces(arch, ParallelLayout(1), 0, True) if piece.local in held} == found

    for part in sorted({part for name in names for part in name.split(".") if not part.isdigit()} - {"weight", "bias"}):
        try:
            check(part)
        except ValueError as error:
            assert " is one parameter with " in str(error)
            refused.append(part)
    check(*refused)
