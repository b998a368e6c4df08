"""Llama 2 and 3, deepseek-llm and other LlamaForCausalLM models: the baseline of the other families."""

from __future__ import annotations

from megappo.models.family import Family
from megappo.models.weight_rules import PRE_NORM_LAYER

LLAMA = Family("llama", "Llama", PRE_NORM_LAYER)
