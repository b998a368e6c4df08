"""A config.json, and the tables of the world tests of models/. A layout is (tp, pp, sequence_parallel); jobs are (case, layout,
critic, recompute)."""

import torch

from megappo.models.arch import Rope
from megappo.parallel.layout import ParallelLayout

# Keys of a small llama's config.json; 131 is prime, so that every tp pads the vocabulary.
LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=131,
    max_position_embeddings=128,
)

# (1, 1) on 2 ranks is dp 2. Other cases than llama are in one of these, and in DENSE_LAYOUT, with sequence parallel and stages.
LOGIT_LAYOUTS = [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False)]
OF_ALL_CASES = LOGIT_LAYOUTS[1:2]
EXPORT_LAYOUTS = [(2, 1, True), (1, 2, False), (2, 2, False)]

# Their shapes are those of tests/models/test_meta.py; here are the marks that Megatron reads.
SHAPE_CASES = ["llama", "qwen2_tied", "qwen3"]
SHAPE_LAYOUTS = [(2, 1, True), (1, 2, False)]

# All layouts of llama are those of tests/parity, with its critic.
GRADIENT_CASES = ["llama", "qwen2_tied", "qwen3", "ministral3_tied"]
GRADIENT_JOBS = [(case, layout, False, "none") for case in GRADIENT_CASES for layout in ((2, 1, False), (1, 2, False))]
GRADIENT_JOBS += [(case, (2, 1, True), True, "none") for case in GRADIENT_CASES]
GRADIENT_JOBS += [("qwen3_5", (2, 1, False), False, "none")]
RECOMPUTE_JOBS = [
    ("llama", layout, critic, kind)
    for kind in ("selective", "full")
    for layout, critic in (((2, 1, True), True), ((1, 2, False), False))
]

BF16_LAYOUTS = [(1, 1, False), (2, 1, True), (1, 2, False)]
LEARNING_RATE = 1e-4
BF16_CASES = ["llama", "qwen3", "ministral3_tied"]

# Mistakes in what gemma3 has beside llama: changes of its architecture.
ALTERED = {
    "a window that hides nothing": dict(sliding_window=256),
    "one rotary embedding": dict(sliding_rope=None),
    "another base of the window's": dict(sliding_rope=Rope(theta=101.0)),
    "another base of the others": dict(rope=Rope("linear", 5050.0, 4.0)),
    "plain scores": dict(softmax_scale=None),
    "plain embedding": dict(embedding_scale=1.0),
    "silu": dict(activation="silu"),
}

# Everything at once, on 4 ranks.
DENSE_LAYOUT = (2, 2, True)
DENSE_JOBS = [(case, DENSE_LAYOUT, critic, "full") for case in ("qwen2_tied", "qwen3") for critic in (False, True)]
DENSE_JOBS += [(case, DENSE_LAYOUT, False, "full") for case in ("gemma3", "qwen3_5")]  # their critics are those of tests/parity


# name -> (case of checkpoints.py, block, dtype of the scales). tp 2 cuts blocks of 32; those of (20, 28) end beyond the edges.
FP8_CASES: dict[str, tuple[str, tuple[int, int] | None, torch.dtype]] = {
    "ministral fp8": ("mistral3", None, torch.bfloat16),
    "llama fp8 blocks": ("llama", (32, 32), torch.float32),
    "qwen3 fp8 ragged": ("qwen3", (20, 28), torch.float32),
}


def place(tp: int, pp: int, tp_rank: int, stage: int) -> tuple[ParallelLayout, int]:
    """(layout without data parallel, world rank) of a position in it."""
    layout = ParallelLayout(tp * pp, tp, pp)
    return layout, layout.rank_of(tp=tp_rank, pp=stage)
