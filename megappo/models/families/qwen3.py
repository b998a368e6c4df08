"""Qwen3, dense: an RMSNorm of every head of q and k."""

from __future__ import annotations

from megappo.models.family import Family, Window
from megappo.models.weight_rules import HEAD_NORMS, PRE_NORM_LAYER

QWEN3 = Family(
    "qwen3",
    "Qwen3",
    PRE_NORM_LAYER + HEAD_NORMS,
    head_dim=128,
    num_kv_heads=32,
    window=Window(default=4096, switched=True, first_layer=28),
)
