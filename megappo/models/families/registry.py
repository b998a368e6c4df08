"""The model families that megappo trains. A new one is a file beside this one and an entry in `FAMILIES`."""

from __future__ import annotations

from megappo.models.families.deepseek_v3 import DEEPSEEK_V3
from megappo.models.families.gemma3 import GEMMA3
from megappo.models.families.glm4_moe import GLM4_MOE
from megappo.models.families.gpt_oss import GPT_OSS
from megappo.models.families.llama import LLAMA
from megappo.models.families.ministral3 import MINISTRAL3
from megappo.models.families.mistral import MISTRAL
from megappo.models.families.mixtral import MIXTRAL
from megappo.models.families.qwen2 import QWEN2
from megappo.models.families.qwen3 import QWEN3
from megappo.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from megappo.models.families.qwen3_moe import QWEN3_MOE
from megappo.models.families.qwen3_next import QWEN3_NEXT
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
