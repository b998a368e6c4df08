"""The policy's adapter in vLLM's own LoRA layers, replaced in memory without files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megappo.config.role_sections import LoraConfig
from megappo.models.lora import adapted_of

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM 0.32 allocates for (its `MaxLoRARanks`)."""
_ID = 1
_PREFIX = "base_model.model."  # PEFT's, which vLLM's parser of names expects


def adapter_options(lora: LoraConfig) -> dict[str, Any]:
    return dict(enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=next(rank for rank in RANKS if rank >= lora.rank))


class VllmAdapter:
    """The one adapter of an engine on this rank; `worker` is vLLM's, built with `adapter_options`. vLLM's manager holds it under
    the id of `request`, so vLLM never looks for its files. RuntimeError if this vLLM has another manager."""

    def __init__(self, worker: Any, lora: LoraConfig) -> None:
        self._worker, self._lora = worker, lora
        self._manager = getattr(worker.model_runner.lora_manager, "_adapter_manager", None)
        if not all(hasattr(self._manager, name) for name in ("add_adapter", "remove_adapter", "activate_adapter")):
            raise RuntimeError("this vLLM keeps adapters otherwise than 0.32; set rollout.adapter=merged")

    @property
    def request(self) -> Any:
        """vLLM's `LoRARequest`, which every request of a generation carries."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", _ID, "in memory")

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these tensors, named as in `models.lora`, in the engine's dtype."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        lora, manager = self._lora, self._manager
        assert manager is not None
        targets = sorted({module.rpartition(".")[2] for module in adapted_of(tensors)})
        helper = PEFTHelper(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)  # type: ignore[arg-type]
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        with torch.inference_mode():  # vLLM makes its stacked tensors in it
            model = LoRAModel.from_lora_tensors(
                _ID,
                # Copies: vLLM scales B in place.
                {_PREFIX + name: tensor.clone() for name, tensor in tensors.items()},
                helper,
                device=str(self._worker.device),
                weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            )
            manager.remove_adapter(_ID)
            manager.add_adapter(model)
            manager.activate_adapter(_ID)
