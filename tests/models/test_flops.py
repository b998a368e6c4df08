"""FLOPs from shapes, against torch's own counter on transformers' models, masks counted out, and published figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from megappo.models.arch import ModelArch, Rope
from megappo.models.flops import ForwardFlops, forward_flops, generation_flops, layer_weights, tower_flops, window_of
from megappo.models.hf_config import arch_of
from megappo.models.vision import tower_of
from megappo.models.vision_families import tower_shape
from tests.models.checkpoints import CASES, EXPERT_CASES, LENGTHS, example_sequences, hf_config
from tests.models.vision_cases import TOWERS, vision_arch

LENGTH = torch.tensor(LENGTHS)
LLAMA_7B = ModelArch("llama", "LlamaForCausalLM", 32, 4096, 32, 32, 128, 11008, 32000, 4096, False, 1e-5, Rope())


def counted(case: str, head: str, *, training: bool = False, frozen: bool = False) -> tuple[ModelArch, int]:
    """(architecture, FLOPs that torch counted in passes over the example sequences, one by one).

    frozen: no weight has a gradient, but the input of the first layer, as below adapters.
    """
    stem = {**CASES, **EXPERT_CASES}[case][0]
    config = hf_config(case, num_labels=1)
    model = getattr(transformers, f"{stem}For{head}")(config)
    if case in EXPERT_CASES:
        model.set_experts_implementation("eager")  # torch's counter does not know the grouped product of all experts
    if frozen:
        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    counter = FlopCounterMode(display=False)
    with counter, as_products():
        for tokens in example_sequences():
            logits = model(input_ids=tokens[None], use_cache=False).logits
            if training:
                logits.sum().backward()
    # torch counts the angles of the rotary embedding, which transformers computes as a product of two vectors.
    angles = sum(
        count for name, by_op in counter.get_flop_counts().items() if name.endswith("rotary_emb") for count in by_op.values()
    )
    return arch_of({**config.to_dict(), "architectures": ["".join([stem, "ForCausalLM"])]}), counter.get_total_flops() - angles


def delta_rule(query, key, value, g, beta, **_):
    """The recurrence of a gated delta net, with the products that it needs and no others."""
    state, outputs = value.new_zeros(*value.shape[2:], key.size(-1)).requires_grad_(query.requires_grad), []
    for q, k, v, decay, rate in zip(*(x[0] for x in (query, key, value, g, beta))):
        state = state * decay.exp()[:, None, None]
        state = state + (rate[:, None, None] * (v[..., None] - state @ k[..., None])) @ k[:, None]
        outputs.append((state @ q[..., None])[..., 0])
    return torch.stack(outputs)[None], None


def convolution(x, weight, bias, activation, **_):
    windows = torch.nn.functional.pad(x[0], (weight.size(1) - 1, 0)).unfold(1, weight.size(1), 1)
    return torch.nn.functional.silu(windows @ weight[:, :, None])[None, ..., 0]


@contextmanager
def as_products() -> Iterator[None]:
    """Delta nets without the products of chunks, and without the outputs of their padded convolution, which are thrown away."""
    with ExitStack() as stack:
        for of in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
            stack.enter_context(mock.patch.object(of, "torch_chunk_gated_delta_rule", delta_rule))
            stack.enter_context(mock.patch.object(of, "causal_conv1d_fn", convolution))
        yield


@pytest.mark.parametrize(
    "case", ["llama", "qwen2_tied", "qwen3", "mistral_window", "ministral3_tied", "gemma3", "qwen3_5", *EXPERT_CASES]
)
def test_a_forward_pass_has_as_many_operations_as_torch_counts(case: str) -> None:
    arch, found = counted(case, "CausalLM")
    assert forward_flops(arch, LENGTH, value_head=False, causal=False).total == found


@pytest.mark.parametrize("case", ["llama", *EXPERT_CASES])
def test_training_is_three_forward_passes_as_torch_counts_them(case: str) -> None:
    arch, found = counted(case, "CausalLM", training=True)
    assert forward_flops(arch, LENGTH, value_head=False, causal=False).training == found


@pytest.mark.parametrize("case", ["llama", *EXPERT_CASES])
def test_training_on_frozen_weights_has_no_products_for_their_gradients(case: str) -> None:
    arch, found = counted(case, "CausalLM", training=True, frozen=True)
    flops = forward_flops(arch, LENGTH, value_head=False, causal=False)
    assert flops.training_frozen == found < flops.training


def test_a_critic_has_a_head_of_one_column() -> None:
    arch, found = counted("llama", "TokenClassification")
    flops = forward_flops(arch, LENGTH, value_head=True, causal=False)
    assert flops.total == found and flops.head == 2 * arch.hidden_size * sum(LENGTHS)


@pytest.mark.parametrize("kind", [*TOWERS, "internvl"])
def test_a_tower_has_as_many_operations_as_torch_counts(kind: str) -> None:
    vision = vision_arch(kind).vision
    assert vision is not None
    # Tiles; or grids of which some are not a multiple of the windows.
    grids = [(4, 4), (12, 4)] if vision.tile else [(4, 6), (10, 4), (2, 2), (14, 10)]
    tower = tower_of(vision, torch.float32)
    tower.config._attn_implementation = "eager"  # type: ignore[union-attr] # torch counts products, and not the CPU's kernel
    pixels = torch.randn(sum(rows * cols for rows, cols in grids), tower_shape(vision).pixels)
    counts = [FlopCounterMode(display=False) for _ in range(2)]
    with counts[0], torch.no_grad():
        tower(pixels, grid_thw=torch.tensor([(1, *grid) for grid in grids]))
    with counts[1]:
        out = tower(pixels, grid_thw=torch.tensor([(1, *grid) for grid in grids]), return_dict=True)
        torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]).sum().backward()
    found = [tower_flops(vision, grid) for grid in grids]
    total, embedding = (sum(getattr(one, name) for one in found) for name in ("total", "embedding"))
    assert counts[0].get_total_flops() == total
    assert counts[1].get_total_flops() == 3 * total - embedding
    everywhere = replace(vision, config=vision.config.replace("window_size", "no_window"))
    assert (sum(tower_flops(everywhere, grid).total for grid in grids) != total) == (tower_shape(vision).window is not None)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda arch: replace(arch, num_kv_heads=arch.num_heads),
        lambda arch: replace(arch, head_dim=arch.hidden_size // arch.num_heads),
        lambda arch: replace(arch, moe=replace(arch.moe, ffn_size=arch.moe.ffn_size * 2 // 3)),
        lambda arch: replace(arch, vocab_size=arch.vocab_size + 1),
        lambda arch: replace(arch, moe=None),
        lambda arch: replace(arch, moe=replace(arch.moe, top_k=arch.moe.num_experts)),
        lambda arch: replace(arch, moe=replace(arch.moe, dense_layers=(0,))),
    ],
    ids=[
        "no gqa",
        "head_dim of hidden_size",
        "mlp without gate",
        "padded vocabulary",
        "no experts",
        "all experts",
        "a dense layer",
    ],
)
def test_what_the_formula_could_forget_changes_the_count(mistake) -> None:
    arch = arch_of({**hf_config("qwen3_moe").to_dict(), "architectures": ["Qwen3MoeForCausalLM"]})
    right, wrong = (forward_flops(one, LENGTH, value_head=False, causal=False).total for one in (arch, mistake(arch)))
    assert right != wrong


@pytest.mark.parametrize("window", [None, 1, 9, 39, 40, 64])
def test_causal_attention_counts_the_keys_that_masks_leave(window: int | None) -> None:
    arch = replace(LLAMA_7B, num_layers=2, sliding_window=window, sliding_layers=() if window is None else (False, True))
    pairs = 0
    for layer in range(2):
        for length in LENGTHS:
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            seen = window_of(arch, layer)
            pairs += int((mask if seen is None else mask & mask.triu(1 - seen)).sum())
    assert forward_flops(arch, LENGTH, value_head=False).attention == 4 * arch.num_heads * arch.head_dim * pairs


def test_a_7b_llama_takes_about_six_operations_for_each_parameter_and_token() -> None:
    parameters = 6_738_415_616  # of the release
    tokens = torch.full((1000,), 4096)
    flops = forward_flops(LLAMA_7B, tokens, value_head=False)
    approximate = 6 * parameters * int(tokens.sum())
    # More by causal attention, 6 s h L a token (Narayanan et al. 2021 without the mask's half: 12 s h L), less by the embedding.
    exact = approximate + 6 * 4097 * 4096 * 32 * int(tokens.sum()) - 6 * 32000 * 4096 * int(tokens.sum())
    assert flops.training == pytest.approx(exact, rel=1e-4)
    assert 1.03 < flops.training / approximate < 1.09


def test_the_formula_of_megatron_for_equal_lengths() -> None:
    """`num_floating_point_operations` of megatron/training/training.py for LLAMA_7B; it halves s^2, we count s (s + 1) / 2."""
    b, s, h, layers, ffn, vocab = 3, 2048, 4096, 32, 11008, 32000
    attention = 3 * 2 * (h * 3 * h + h * s / 2 * 2 + h * h)
    megatron = b * s * (3 * 2 * h * ffn * 3 * layers + attention * layers + 3 * 2 * h * vocab)
    ours = forward_flops(LLAMA_7B, torch.full((b,), s), value_head=False).training
    assert ours - megatron == 6 * h * s * b * layers, "the diagonal of the mask"
    assert ours == pytest.approx(megatron, rel=2e-4)


def test_counts_of_sequences_add_up() -> None:
    whole = forward_flops(LLAMA_7B, LENGTH, value_head=False)
    parts = [forward_flops(LLAMA_7B, one[None], value_head=False) for one in LENGTH]
    assert whole == ForwardFlops(*(sum(getattr(part, name) for part in parts) for name in ("layers", "attention", "head")))


def test_generation_passes_every_token_but_the_last_and_has_logits_of_the_response() -> None:
    prompts, responses = torch.tensor([3, 5]), torch.tensor([4, 1])
    flops = generation_flops(LLAMA_7B, prompts, responses)
    assert flops.layers == 2 * 32 * sum(layer_weights(LLAMA_7B, LLAMA_7B.kind(0))) * (6 + 5)
    assert flops.head == 2 * 4096 * 32000 * 5
    assert flops.attention == 4 * 4096 * 32 * (6 * 7 // 2 + 5 * 6 // 2)
    assert generation_flops(LLAMA_7B, torch.tensor([0]), torch.tensor([0])).total == 0


def test_recomputation_adds_a_forward_pass_without_the_head_or_attention_alone() -> None:
    flops = forward_flops(LLAMA_7B, LENGTH, value_head=False)
    assert [flops.recomputed(how) for how in ("none", "selective", "full")] == [0, flops.attention, flops.total - flops.head]
