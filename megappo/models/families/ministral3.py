"""Ministral 3: llama's tensors, with YaRN and queries that grow with their position."""

from __future__ import annotations

from megappo.models.families.mistral import MISTRAL3
from megappo.models.family import Family, Window
from megappo.models.weight_rules import PRE_NORM_LAYER

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
