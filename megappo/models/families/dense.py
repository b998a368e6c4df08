"""Dense families with llama's tensors: all LlamaForCausalLM models, the baseline of the others; Qwen2 and Qwen2.5 (biases on q, k
and v, a window that has to be switched on); Qwen3 (an RMSNorm of every head of q and k); Mistral 7B and its successors (a window in
every layer, which newer checkpoints set to null); Ministral 3 (YaRN, queries that grow with their position)."""

from __future__ import annotations

from megappo.models.family import Composite, Family, Window
from megappo.models.weight_rules import HEAD_NORMS, PRE_NORM_LAYER, QKV_BIAS

LLAMA = Family("llama", "Llama", PRE_NORM_LAYER)


QWEN2 = Family(
    "qwen2",
    "Qwen2",
    PRE_NORM_LAYER + QKV_BIAS,
    num_kv_heads=32,
    window=Window(default=4096, switched=True, first_layer=28),
)


QWEN3 = Family(
    "qwen3",
    "Qwen3",
    PRE_NORM_LAYER + HEAD_NORMS,
    head_dim=128,
    num_kv_heads=32,
    window=Window(default=4096, switched=True, first_layer=28),
)


MISTRAL3 = Composite("Mistral3ForConditionalGeneration", model_type="mistral")
"""A vision tower beside a language model of this family or of ministral3."""

MISTRAL = Family(
    "mistral",
    "Mistral",
    PRE_NORM_LAYER,
    num_kv_heads=8,
    window=Window(default=4096),
    composite=MISTRAL3,
)


MINISTRAL3 = Family(
    "ministral3",
    "Ministral3",
    PRE_NORM_LAYER,
    head_dim=128,
    num_kv_heads=8,
    norm_eps=1e-5,
    window=Window(),
    scaled_queries=True,
    composite=MISTRAL3,
)
