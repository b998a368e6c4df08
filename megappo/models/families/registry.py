"""The model families that megappo trains. A new one stands in a file beside this one, with those of its kind, and in `_ALL`."""

from __future__ import annotations

from megappo.models.families.delta_nets import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from megappo.models.families.dense import LLAMA, MINISTRAL3, MISTRAL, QWEN2, QWEN3
from megappo.models.families.gemma3 import GEMMA3
from megappo.models.families.sigmoid_experts import DEEPSEEK_V3, GLM4_MOE
from megappo.models.families.softmax_experts import GPT_OSS, MIXTRAL, QWEN3_MOE
from megappo.models.family import HEADS, Family, NotImplementedByFamilies

_ALL = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    MISTRAL,
    MIXTRAL,
    MINISTRAL3,
    GEMMA3,
    GLM4_MOE,
    GPT_OSS,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    DEEPSEEK_V3,
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""`ModelArch.family` -> family."""


def family_of(architecture: str) -> Family:
    """Return the family of a text-only Hugging Face architecture. NotImplementedByFamilies names those that are supported."""
    for family in FAMILIES.values():
        if architecture in map(family.architecture, HEADS):
            return family
    supported = [family.architecture() for family in FAMILIES.values()] + list(wrapped_families())
    raise NotImplementedByFamilies(f"architecture {architecture} is not supported; supported are {', '.join(supported)}")


def wrapped_families() -> dict[str, list[Family]]:
    """Composite architecture -> the families that its `text_config` may be of."""
    wrapped: dict[str, list[Family]] = {}
    for family in FAMILIES.values():
        if family.composite is not None:
            wrapped.setdefault(family.composite.architecture, []).append(family)
    return wrapped
