"""A second engine, as small as the interface allows: transformers' model in fp32, a sequence at a time on one rank, and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from megappo.algo.alignment import IGNORE_INDEX
from megappo.checkpoint.state import ModelState, StateBox
from megappo.data.packing import PackedBatch
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import PassResult, StepResult
from megappo.engine.factory import EngineSpec
from megappo.engine.losses import LogitsDtype, LogprobQuery
from megappo.models.pieces import Box, Piece, PieceMap, as_2d
from megappo.parallel.device import world_group
from megappo.parallel.layout import Placement
from megappo.parallel.shares import Shares, plan_micro_batches


class ToyOutput:
    """Holds all logits [T, V] of a micro-batch."""

    fused_loss = None

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logits(self, rows: Any, logits_dtype: LogitsDtype) -> Tensor:
        return self._logits[rows].bfloat16().float() if logits_dtype == "bf16" else self._logits[rows]

    def logprobs(self, query: LogprobQuery) -> tuple[Tensor, Tensor | None]:
        temperature = query.temperature[:, None] if isinstance(query.temperature, Tensor) else query.temperature
        x = self.logits(slice(None), query.logits_dtype) / temperature
        if query.kept is not None:  # NO_ID is -1: the last of these columns
            wanted = torch.zeros(x.shape[0], x.shape[1] + 1).scatter(1, query.kept.long() % (x.shape[1] + 1), 1.0)[:, :-1]
            x = x.masked_fill((wanted.sum(1, keepdim=True) > 0) & (wanted == 0), -torch.inf)
        logp, untargeted = x.log_softmax(-1), query.target == IGNORE_INDEX
        entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1) if query.want_entropy else None
        chosen = logp.gather(1, query.target.clamp(min=0)[:, None])[:, 0]
        return chosen.masked_fill(untargeted, 0.0), None if entropy is None else entropy.masked_fill(untargeted, 0.0)


class ToyEngine:
    output = ToyOutput
    placement, shares, adapters = Placement.whole(1), Shares.of_all([0]), None

    def __init__(self, spec: EngineSpec) -> None:
        self.name, self.arch, self.value_head = spec.role, spec.arch, spec.value_head is not None
        self._budget, self._updates = spec.section.micro_batch_tokens, 0
        if self.value_head:
            self._model, found = AutoModelForTokenClassification.from_pretrained(
                spec.model, num_labels=spec.arch.head_rows, dtype=torch.float32, output_loading_info=True
            )
            self._start_head(spec, found["missing_keys"])
        else:
            self._model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32)
        self._model.get_input_embeddings().padding_idx = None  # transformers would give that token no gradient
        self._weights = {name: p for name, p in self._model.named_parameters() if name != "score.bias"}
        if spec.total_updates is not None:
            o = self._settings = spec.section.optimizer  # type: ignore[attr-defined]
            trained = [parameter for name, parameter in self._weights.items() if name not in spec.frozen]
            self._model.requires_grad_(False)
            self._optimizer = AdamW(trained, o.lr, o.betas, o.eps, o.weight_decay)
            for parameter in trained:
                parameter.requires_grad_().grad = torch.zeros_like(parameter)

    def _start_head(self, spec: EngineSpec, missing: Collection[str]) -> None:
        weight = self._model.score.weight.data
        if spec.value_head == "checkpoint" and "score.weight" in missing:
            raise ValueError(f"{spec.model} has no value head (score.weight)")
        if spec.value_head == "zero":
            weight.zero_()
        if spec.value_head == "normal":
            weight.normal_(0.0, (spec.arch.hidden_size + 1) ** -0.5, generator=torch.Generator().manual_seed(spec.seed))
        torch.nn.init.zeros_(self._model.score.bias)

    @property
    def host_group(self) -> dist.ProcessGroup:
        return world_group()

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._weights

    def named_gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self._weights.items() if parameter.grad is not None}

    def main_parameters(self, *, gather: bool = False) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def merged_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._weights

    def pieces(self) -> PieceMap:
        weights = {name: as_2d(parameter) for name, parameter in self._weights.items()}
        return PieceMap.of({0: [Piece(name, Box(0, len(p), 0, p.shape[1]), name, 0, 0) for name, p in weights.items()]})

    def export(self, directory: Path, source: Path, tokenizer: Tokenizer | None = None) -> None:
        if directory.exists():
            raise ValueError(f"{directory} exists")
        self._model.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save(directory)

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Nothing: it offloads nothing."""

    def train_mode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def eval_mode(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def forward_backward(
        self, share: PackedBatch, loss_fn: Any, *, reads: Collection[str] = (), denominator: float = 1.0, forward_only: bool = False
    ) -> PassResult:
        plan = plan_micro_batches(share.lengths.tolist(), self._budget)
        result = PassResult({}, {}, {}, len(plan))
        for sequences in plan:
            micro, where = share.only(reads).select(sequences), share.token_index(sequences)
            with torch.set_grad_enabled(not forward_only):
                # One token of padding where there is no sequence.
                sequences_of_ids = micro.tokens.split(micro.lengths.tolist()) or (torch.zeros(1, dtype=torch.long),)
                raw = torch.cat([self._model(ids[None]).logits[0] for ids in sequences_of_ids])[: micro.num_tokens]
                found = loss_fn(raw.squeeze(-1) if self.value_head else self.output(raw), micro)
                if found.loss_sum is not None:
                    (found.loss_sum / denominator).backward()
            for name, values in found.tokens.items():
                result.tokens.setdefault(name, torch.zeros(share.num_tokens))[where] = values.detach().float()
            result.sums.update({name: result.sums.get(name, 0.0) + float(value) for name, value in found.sums.items()})
            result.maxima.update({name: max(result.maxima.get(name, -inf), float(value)) for name, value in found.maxima.items()})
        return result

    def optimizer_zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)

    def optimizer_step(self) -> StepResult:
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), self._settings.clip_grad or torch.inf)
        if norm.isfinite():
            self._optimizer.step()
        return StepResult(float(norm), bool(norm.isfinite()))

    def lr_scheduler_step(self) -> float:
        self._updates += 1
        warm = min(1.0, self._updates / max(1, self._settings.warmup_steps))
        self._optimizer.param_groups[0]["lr"] = self._settings.lr * warm
        return self._settings.lr * warm

    def save_state(self, *, with_optimizer: bool) -> ModelState:
        with_optimizer &= hasattr(self, "_optimizer")
        position = {"updates": self._updates, "steps": self._steps()} if with_optimizer else {}
        held = self._held(with_optimizer)
        return ModelState([StateBox(key, 0, 0, as_2d(values)) for key, values in held.items()], held, position)

    def _held(self, with_optimizer: bool) -> dict[str, Tensor]:
        held = {name: parameter.detach() for name, parameter in self._weights.items()}
        if with_optimizer:
            for name, parameter in self._weights.items():
                if parameter.requires_grad:
                    state = self._optimizer.state[parameter]
                    for moment in ("exp_avg", "exp_avg_sq"):
                        held[f"optimizer.state.{moment}.{name}"] = state.setdefault(moment, torch.zeros_like(parameter.data))
                    state.setdefault("step", torch.tensor(0.0))
        return held

    def _steps(self) -> int:
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        if read is not None:
            read()

    def boxes_of(self, values: Any, *, to_save: bool) -> list[StateBox]:
        return [StateBox(key, 0, 0, as_2d(one)) for key, one in values.items()]

    def boxes_to_load(self, stored: Any, *, with_optimizer: bool, with_head: bool = True) -> list[StateBox]:
        held = self._held(with_optimizer and hasattr(self, "_optimizer"))
        kept = () if with_head else ("lm_head.weight", "score.weight")
        return [StateBox(key, 0, 0, as_2d(values)) for key, values in held.items() if key not in kept]

    def boxes_loaded(self, position: Any) -> None:
        if position:
            self._updates = position["updates"]
            for state in self._optimizer.state.values():
                state["step"] = torch.tensor(float(position["steps"]))


def toy_engines(*_: Any) -> Any:
    """An `EngineBackend`: makes an `EngineFactory`."""
    return SimpleNamespace(
        build=ToyEngine, describe=lambda section: "toy", connect=lambda _: None, settle=lambda: None, close=lambda: None
    )
