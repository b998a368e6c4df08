"""Qwen2 and Qwen2.5: biases on q, k and v, and a window that has to be switched on."""

from __future__ import annotations

from megappo.models.family import Family, Window
from megappo.models.weight_rules import PRE_NORM_LAYER, QKV_BIAS

QWEN2 = Family(
    "qwen2",
    "Qwen2",
    PRE_NORM_LAYER + QKV_BIAS,
    num_kv_heads=32,
    window=Window(default=4096, switched=True, first_layer=28),
)
