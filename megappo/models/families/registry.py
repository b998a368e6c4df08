"""The model families that megappo trains. A new one is a file beside this one and an entry in `FAMILIES`."""

from __future__ import annotations

from megappo.models.families.llama import LLAMA
from megappo.models.families.ministral3 import MINISTRAL3
from megappo.models.families.mistral import MISTRAL
from megappo.models.families.qwen2 import QWEN2
from megappo.models.families.qwen3 import QWEN3
from megappo.models.families.qwen3_moe import QWEN3_MOE
from megappo.models.family import HEADS, Family

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MINISTRAL3)}
"""`ModelArch.family` -> family."""


class NotImplementedByFamilies(ValueError):
    """A valid config whose architecture or feature megappo's own layers do not have."""


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
