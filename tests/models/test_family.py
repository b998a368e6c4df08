"""The worked example "How to add a model family": one `Family` in the registry, and the model does whatever the others do.

Toy is Qwen2 under names of its own, in config.json and in the layers, so transformers' Qwen2 says what it computes.
"""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megappo.bridge.plan import Ends, plan_rank
from megappo.bridge.target import Target
from megappo.bridge.vllm_layout import record_destination
from megappo.commands.verify.shrink import small_run
from megappo.config.loading import validated
from megappo.config.role_sections import ParallelConfig
from megappo.config.schema import TrainConfig
from megappo.models.families.registry import FAMILIES
from megappo.models.family import Family
from megappo.models.hf_config import arch_of, read_arch
from megappo.models.pieces import as_2d
from megappo.models.weight_map import hf_tensors, piece_map
from megappo.models.weight_rules import Matrix, Qkv, gate_up, row_parallel
from megappo.parallel.layout import ParallelLayout
from tests.bridge.engines import policy_tensors, read_checkpoint
from tests.models import worlds
from tests.models.checkpoints import example_sequences, reference_logits, write_checkpoint
from tests.worlds import spawn_world

TOY = Family(
    "toy",
    "Toy",
    rules=(
        Matrix("input_layernorm.weight", "ln_1.weight", "hidden"),
        Qkv("self_attention.linear_qkv.weight", "attn.query.weight", "attn.key.weight", "attn.value.weight"),
        Qkv("self_attention.linear_qkv.bias", "attn.query.bias", "attn.key.bias", "attn.value.bias", bias=True),
        row_parallel("self_attention.linear_proj.weight", "attn.out.weight", "heads"),
        Matrix("pre_mlp_layernorm.weight", "ln_2.weight", "hidden"),
        gate_up("mlp.linear_fc1.weight", "mlp.gate.weight", "mlp.up.weight"),
        row_parallel("mlp.linear_fc2.weight", "mlp.down.weight", "ffn"),
    ),
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_head_kv",
        "rms_norm_eps": "norm_epsilon",
    },
)
# Negative control: the checkpoint's biases are left out.
WITHOUT_BIAS = dataclasses.replace(TOY, rules=tuple(rule for rule in TOY.rules if not rule.local.endswith("bias")))

QWEN2_NAMES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.o_proj": "attn.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
LAYOUTS = [(1, 1, False), (2, 1, True), (1, 2, False)]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(FAMILIES, TOY.name, TOY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """toy/: a checkpoint; expected.pt: its logits, by transformers."""
    folder = tmp_path_factory.mktemp("toy")
    model = write_checkpoint(folder / "qwen2", "qwen2_tied", tie_word_embeddings=False, rms_norm_eps=1e-3)
    torch.save(reference_logits(model), folder / "expected.pt")
    (folder / "toy").mkdir()
    tensors = {toy_name(name): tensor for name, tensor in read_checkpoint(folder / "qwen2").items()}
    save_file(tensors, folder / "toy" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "qwen2" / "config.json").read_text())
    toy_config = {TOY.keys.get(key, key): value for key, value in config.items()}
    (folder / "toy" / "config.json").write_text(json.dumps({**toy_config, "architectures": ["ToyForCausalLM"]}))
    return folder


def toy_name(name: str) -> str:
    for theirs, ours in QWEN2_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def use_the_toy(rank: int, folder: Path) -> tuple[dict[Any, float], float]:
    """(layout -> error of the logits where this rank has them, the same without biases); exports from each layout."""
    from megappo.models.hf_export import export_pretrained

    expected = torch.load(folder / "expected.pt")

    def error(layout: tuple[int, int, bool], out: Path | None = None) -> float | None:
        arch, groups, model = worlds.build(folder / "toy", layout)
        if out is not None:
            export_pretrained([model], arch, groups, out, folder / "toy")
        logits = worlds.policy_logits(arch, groups, model, example_sequences())
        return None if logits is None else float((logits - expected).abs().max())

    FAMILIES[TOY.name] = TOY
    errors = {layout: error(layout, folder / f"out{i}") for i, layout in enumerate(LAYOUTS)}
    FAMILIES[TOY.name] = WITHOUT_BIAS
    wrong = error((1, 1, False))
    assert wrong is not None
    return {layout: found for layout, found in errors.items() if found is not None}, wrong


@pytest.fixture(scope="module")
def used(folder) -> list[tuple[dict[Any, float], float]]:
    """[rank] what `use_the_toy` found."""
    return spawn_world(use_the_toy, 2, folder)


def test_an_unregistered_family_is_refused_with_those_that_are(folder):
    with pytest.raises(
        ValueError, match="ToyForCausalLM is not supported; supported are LlamaForCausalLM, .*Ministral3ForCausalLM"
    ):
        read_arch(folder / "toy")


def test_logits_are_those_of_the_reference_in_every_layout(used):
    errors = {layout: found for rank, _ in used for layout, found in rank.items()}
    assert errors.keys() == set(LAYOUTS)
    assert max(errors.values()) < 1e-4, errors
    assert all(wrong > 0.1 for _, wrong in used), "a family without its biases computes the same"


def test_the_export_is_the_checkpoint(used, folder):
    before, config = read_checkpoint(folder / "toy"), json.loads((folder / "toy" / "config.json").read_text())
    for i, layout in enumerate(LAYOUTS):
        after = read_checkpoint(folder / f"out{i}")
        assert before.keys() == after.keys(), layout
        assert all(torch.equal(before[name], after[name]) for name in before), layout
        assert json.loads((folder / f"out{i}" / "config.json").read_text()) == config, layout


def test_config_keys_are_read_under_both_names_and_messages_say_the_files_own(registered, folder):
    config = json.loads((folder / "toy" / "config.json").read_text())
    usual = {"n_embd": "hidden_size", "norm_epsilon": "rms_norm_eps"}
    assert arch_of(config) == arch_of({usual.get(key, key): value for key, value in config.items()})
    assert (arch_of(config).num_heads, arch_of(config).norm_eps, arch_of(config).qkv_bias) == (4, 1e-3, True)
    assert arch_of({**config, "hidden_size": 32}).hidden_size == 32, "llama's key counts where a file has both"
    for wrong, message in (({"n_embd": 0}, "n_embd = 0"), ({"n_head_kv": 3}, "n_head 4 is not a multiple of n_head_kv 3")):
        with pytest.raises(ValueError, match=message):
            arch_of({**config, **wrong})
    del config["n_layer"]
    with pytest.raises(ValueError, match="n_layer = None"):
        arch_of(config)


class Engine(torch.nn.Module):
    """An inference engine's model of a toy checkpoint: q, k and v fused as vLLM fuses them, all else as in the files."""

    def __init__(self, tensors: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = torch.nn.Module()
        shapes: dict[str, tuple[int, ...]] = {}
        self.places: dict[str, tuple[str, int]] = {}  # checkpoint's tensor -> (parameter, first row)
        for name, shape in tensors.items():
            target = name.replace(".", "_")
            for part in ("query", "key", "value"):
                target = target.replace(f"attn_{part}", "attn_qkv")
            first = shapes.get(target, (0,))[0]
            shapes[target] = (first + shape[0], *shape[1:])
            self.places[name] = target, first
        for target, shape in shapes.items():
            self.tensors.register_parameter(target, torch.nn.Parameter(torch.empty(shape), requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            target, first = self.places[name]
            self.tensors.get_parameter(target).narrow(0, first, len(tensor)).copy_(tensor)


def test_the_bridge_fills_an_engine_from_every_layout(registered, folder):
    arch, checkpoint = read_arch(folder / "toy"), read_checkpoint(folder / "toy")
    engine = Engine(hf_tensors(arch))
    engine.load_weights(checkpoint.items())
    wanted = {name: parameter.clone() for name, parameter in engine.named_parameters()}
    api = types.SimpleNamespace(
        initialize=lambda model: model.to("meta"),
        info=lambda layer: types.SimpleNamespace(can_load=lambda: False),
        layer_tensors=lambda layer: dict(layer._parameters),
        original_loader=lambda tensor: None,
        is_deferred=lambda layer: False,
    )
    destination = record_destination(engine, api, hf_tensors(arch), torch.float32)
    for layout in (ParallelLayout(1), ParallelLayout(2, tp=2), ParallelLayout(4, tp=2, pp=2)):
        held = [policy_tensors(arch, layout, rank, checkpoint) for rank in range(layout.world_size)]
        got = {name: torch.full_like(tensor, float("nan")) for name, tensor in wanted.items()}
        pieces = piece_map(arch, layout)
        ends = Ends(pieces, tuple(range(len(pieces))), (0,), (Target.of(destination, pieces),))
        for move in plan_rank(ends, 0).incoming:
            source = as_2d(held[move.src][move.source])[move.s_row : move.s_row + move.rows, move.s_col : move.s_col + move.cols]
            as_2d(got[move.target])[move.d_row : move.d_row + move.rows, move.d_col : move.d_col + move.cols] = source
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items()), layout


def test_verify_shrinks_it_with_its_features(registered, folder, tmp_path):
    large = json.loads((folder / "toy" / "config.json").read_text()) | {"n_embd": 2048, "n_inner": 8192, "n_layer": 24}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(large))
    parallel = ParallelConfig(tp=2, sequence_parallel=True)
    policy = {"model": str(tmp_path / "large"), "parallel": parallel.model_dump()}
    run, _ = small_run(validated({"policy": policy, "data": {"train": "absent.jsonl"}}, TrainConfig), tmp_path, 2, "local")
    small, theirs = read_arch(run.config.policy.model), read_arch(tmp_path / "large")
    for feature in ("family", "qkv_bias", "qk_norm", "tied_embeddings", "norm_eps", "rope"):
        assert getattr(small, feature) == getattr(theirs, feature), feature
    assert (small.hidden_size, small.num_layers) < (64, 4)
    tensors = read_checkpoint(run.config.policy.model)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == hf_tensors(small)
    norms = [tensor for name, tensor in tensors.items() if "ln_" in name]
    assert norms and all(0.5 <= float(tensor.min()) and float(tensor.max()) <= 1.5 for tensor in norms)
