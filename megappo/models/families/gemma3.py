"""Gemma 3's language model: windows and rotary embeddings by layer, norms round every block, tied embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

from megappo.models.arch import ModelArch
from megappo.models.family import Composite, Family, NotImplementedByFamilies, Values, Window
from megappo.models.weight_rules import HEAD_NORMS, SANDWICH_LAYER

_OFF = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Keys that all published configs leave off."""


def _details(values: Values, arch: ModelArch) -> ModelArch:
    for key in _OFF:
        if found := values.get(key):
            raise NotImplementedByFamilies(f"{key} {found!r} is not supported by megappo's layers of {arch.family}")
    return replace(
        arch,
        max_positions=values.positive("max_position_embeddings"),  # stretched already
        softmax_scale=values.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=math.sqrt(arch.hidden_size),
        centred_norms=True,
        sandwich=True,
    )


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3",
    SANDWICH_LAYER + HEAD_NORMS,
    keys={"hidden_act": "hidden_activation"},
    head_dim=256,
    num_kv_heads=4,
    window=Window(default=4096, pattern=6, sampler_by_layer=True),
    activation="gelu_pytorch_tanh",
    local_theta=10000.0,
    classifier_stem="Gemma3Text",
    defaults={  # 4b's and 12b's files leave some of them out
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    composite=Composite("Gemma3ForConditionalGeneration", model_type="gemma3_text"),
    details=_details,
)
