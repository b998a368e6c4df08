"""Mistral 7B and its successors: llama's tensors, with a window in every layer that newer checkpoints set to null."""

from __future__ import annotations

from megappo.models.family import Composite, Family, Window
from megappo.models.weight_rules import PRE_NORM_LAYER

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
