"""Llama 2 and 3, deepseek-llm and whatever else calls itself LlamaForCausalLM: the family that the others are told apart from."""

from __future__ import annotations

from megappo.models.family import Family
from megappo.models.weight_rules import PRE_NORM_LAYER

LLAMA = Family("llama", "Llama", PRE_NORM_LAYER)
