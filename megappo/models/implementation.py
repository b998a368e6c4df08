"""Choice of layers: TransformerEngine's or Megatron-core's own. Names and shapes are the same, so roles of a run may differ."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Literal

from megappo.config.role_sections import RoleConfig, key_of_role
from megappo.runtime.libraries import import_fault

Implementation = Literal["transformer_engine", "local"]
Requested = Literal["auto", "transformer_engine", "local"]

_INSTALL = "scripts/install_transformer_engine.sh builds it for this torch"


@functools.cache
def transformer_engine_fault() -> str | None:
    """Say in one line why TransformerEngine's layers cannot be built here, with the fix; None if they can.
    Imports it, and Megatron-core after it: seconds if it is installed."""
    fault = import_fault()
    if fault is not None:
        return f"{fault}; {_INSTALL}"
    if not importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE:
        return "lacks what Megatron-core imports of it; install a version that `megappo doctor` lists"
    return None


def choose_implementation(requested: Requested, device_type: str) -> Implementation:
    """Resolve `auto`: TransformerEngine on a GPU if it works. ValueError if it is requested and cannot work."""
    fault = transformer_engine_fault()  # for any request: TransformerEngine must be imported before Megatron-core
    if requested == "transformer_engine" and device_type != "cuda":
        raise ValueError("model.impl = transformer_engine: it needs a CUDA device; set model.impl=local, or auto")
    if requested == "transformer_engine" and fault is not None:
        raise ValueError(f"model.impl = transformer_engine: it {fault}; or set model.impl=auto")
    if requested == "auto":
        return "transformer_engine" if fault is None and device_type == "cuda" else "local"
    return requested


def implementation_of_role(chosen: Implementation, requested: Requested, section: RoleConfig) -> Implementation:
    """Choose a role's layers: under auto those of a role in fp32, or with weights in 8 bits, are local."""
    if requested == "auto" and section.in_8_bits:  # TransformerEngine's layers read weights in their own type
        return "local"
    # TransformerEngine's fused attention is for half precision. In fp32 it pads every sequence to the longest and materialises
    # the scores, has no context parallelism, and multiplies in TF32.
    return "local" if requested == "auto" and section.dtype == "fp32" else chosen


def implementation_notes(requested: Requested, device_type: str, sections: Mapping[str, RoleConfig]) -> Iterator[str]:
    """Yield a line for each role of a GPU run whose layers are not the expected ones. sections: by role."""
    if device_type != "cuda" or requested == "local":
        return
    fault = transformer_engine_fault()
    if fault is not None:
        yield f"model.impl = auto: layers are Megatron-core's own, since TransformerEngine {fault}"
        return
    for role, section in sections.items():
        if section.engine != "megatron":
            continue
        key = key_of_role(role)
        if section.in_8_bits:
            yield f"{key}.lora.base_bits = 8: its layers are Megatron-core's own, TransformerEngine's have no weights in 8 bits"
        elif section.dtype == "fp32" and requested == "auto":
            yield f"{key}.dtype = fp32: its layers are Megatron-core's own, TransformerEngine's attention is for bf16"
        elif section.dtype == "fp32":
            yield (
                f"{key}.dtype = fp32: TransformerEngine pads its sequences, does not fuse its attention and multiplies in TF32; "
                "model.impl=auto gives it Megatron-core's own layers"
            )
