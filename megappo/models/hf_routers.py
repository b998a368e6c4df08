"""The sampler's choice of experts in transformers' own classes, for engine fsdp2. A router is known by the outputs that its model
can record; in its forward the last choice of top_k among all experts, one torch.topk of [tokens, experts], is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megappo.models.hf_classes import decoder_of
from megappo.models.moe import Replay


class ReplayedRouters:
    """The routers of a model, in the order of its layers. counts: as of `moe.Replay`. ValueError if the model names none."""

    def __init__(self, model: torch.nn.Module, num_experts: int, top_k: int, counts: Tensor) -> None:
        self._choice, self._counts, self._routes = (num_experts, top_k), counts, torch.empty(0)
        recorded = getattr(decoder_of(model), "_can_record_outputs", None) or {}
        kind = getattr(recorded.get("router_logits"), "target_class", recorded.get("router_logits"))
        self._routers = [part for part in model.modules() if kind is not None and isinstance(part, kind)]
        if not self._routers:
            raise ValueError(
                f"rollout.replay_experts: {type(decoder_of(model)).__name__} does not say which of its modules are routers; "
                "set rollout.replay_experts=none, or policy.engine=megatron"
            )

    @contextmanager
    def replaying(self, routes: Tensor) -> Iterator[None]:
        """Replace the choice of this rank's tokens inside. routes: [T, sparse layers x top_k], as in `PackedSequences`."""
        top_k = self._choice[1]
        rows = routes.long().split(top_k, dim=1)
        assert len(rows) == len(self._routers), f"routes of {len(rows)} layers for {len(self._routers)} routers"
        for router, of_layer in zip(self._routers, rows):
            router.forward = partial(self._route, type(router).forward.__get__(router), Replay(of_layer, self._counts))
        try:
            yield
        finally:
            for router in self._routers:
                del router.forward

    def _route(self, forward: Any, replay: Replay, *args: Any, **kwargs: Any) -> Any:
        with _Choosing(replay, self._choice) as mode:
            out = forward(*args, **kwargs)
        if not mode.replaced:
            raise ValueError(
                "rollout.replay_experts: the routers of this model do not choose by one torch.topk; set rollout.replay_experts=none"
            )
        return out


class _Choosing(TorchFunctionMode):
    """Replaces the choice of (experts, top_k) by a replayed one."""

    def __init__(self, replay: Replay, choice: tuple[int, int]) -> None:
        super().__init__()
        self._replay, self._choice, self.replaced = replay, choice, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A choice within groups of experts has three dimensions
        is_choice = getattr(func, "__name__", "") == "topk" and args[0].dim() == 2
        if is_choice and (args[0].size(-1), out[1].size(-1)) == self._choice:
            chosen = self._replay.of(out[1])
            self.replaced = True
            return type(out)((args[0].gather(-1, chosen), chosen))
        return out
