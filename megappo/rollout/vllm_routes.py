"""Experts that vLLM chose for each token, for their replay in training (`rollout.replay_experts`). On a GPU vLLM's second model
runner returns them; the CPU has the first one alone, where a tap on vLLM's own hook of its routers records every step."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from megappo.data.packing import route_dtype
from megappo.models.arch import ModelArch
from megappo.rollout.types import Routes

WAY_OUT = "set rollout.replay_experts=none"


def sparse_layers(arch: ModelArch) -> list[int]:
    return [layer for layer in range(arch.num_layers) if arch.kind(layer).sparse]


def routes_of_output(output: Any, arch: ModelArch) -> Routes | None:
    """Return what vLLM's second runner recorded of a finished `CompletionOutput`, None if it is nothing."""
    found = output.routed_experts
    if found is None:
        return None
    assert arch.moe is not None
    # Of all layers, those without experts too
    chosen = torch.from_numpy(numpy.ascontiguousarray(found[:, sparse_layers(arch)].astype(numpy.int32)))
    return Routes(0, chosen.flatten(1).to(route_dtype(arch.moe.num_experts)).numpy())


class RouteTap:
    """Records the choice of every router of a worker of vLLM's first model runner. RuntimeError if this vLLM has no such hook."""

    def __init__(self, worker: Any, arch: ModelArch) -> None:
        assert arch.moe is not None
        self._layers, self._dtype = sparse_layers(arch), route_dtype(arch.moe.num_experts)
        self._of_step: dict[int, Tensor] = {}
        self._parts: dict[str, list[tuple[int, NDArray[Any]]]] = {}  # by request: the first token of every step, and its rows
        self._runner = worker.model_runner
        try:
            from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

            bind_routed_experts_capturer(worker.get_model(), self)  # type: ignore[arg-type]  # it calls `capture` alone
        except (ImportError, ValueError) as error:
            raise RuntimeError(f"rollout.replay_experts: vLLM does not tell which experts it chose ({error}); {WAY_OUT}") from error
        self._execute, self._runner.execute_model = self._runner.execute_model, self._recorded

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Take the choice of a layer [tokens of the step, top_k]; vLLM calls it."""
        self._of_step[layer_id] = topk_ids

    def _recorded(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._of_step = {}
        out = self._execute(scheduled, *args, **kwargs)
        total = scheduled.total_num_scheduled_tokens
        if total and self._of_step:
            assert sorted(self._of_step) == self._layers, f"vLLM routed in layers {sorted(self._of_step)}, not {self._layers}"
            rows = torch.stack([self._of_step[layer][:total] for layer in self._layers], 1).flatten(1).to(self._dtype).numpy()
            cached = scheduled.scheduled_cached_reqs
            starts = dict(zip(cached.req_ids, cached.num_computed_tokens))
            starts |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
            row = 0
            for name in self._runner.input_batch.req_ids:  # in the order of the step's tokens
                count = scheduled.num_scheduled_tokens.get(name, 0)
                if count:
                    self._parts.setdefault(name, []).append((starts[name], rows[row : row + count]))
                row += count
            assert row == total, f"vLLM ran {total} tokens, of which {row} belong to its requests"
        return out

    def forget(self, name: str) -> None:
        """Forget a request that ended without a response. All its tokens run again, with the weights that go on with it."""
        self._parts.pop(name, None)

    def take(self, name: str) -> Routes | None:
        """Return and forget what a finished request's tokens chose, None if no step recorded it. A token that ran twice, after a
        preemption, has its last choice."""
        parts = self._parts.pop(name, None)
        if parts is None:
            return None
        first, end = min(start for start, _ in parts), max(start + len(rows) for start, rows in parts)
        experts = numpy.empty((end - first, parts[0][1].shape[1]), parts[0][1].dtype)
        for start, rows in parts:
            experts[start - first : start - first + len(rows)] = rows
        return Routes(first, experts)
