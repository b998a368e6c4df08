"""Mistakes that public trainers have shipped, put into megappo for the time of one measurement, and these measurements.

Each is a context manager that changes a running process and nothing on disk. The tests assert that parity notices every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.commands.verify import measure
from megappo.commands.verify.measure import Measured
from tests.parity.matrix import FSDP2, SP, Case, measure_case, roles_of


@contextmanager
def no_right_shift() -> Iterator[None]:
    """V(s_{t+1}) is taken for V(s_t)."""
    from megappo.trainer import roles

    right = roles.align_values
    with mock.patch.object(roles, "align_values", lambda output, cu_seqlens: (output, right(output, cu_seqlens)[1])):
        yield


@contextmanager
def temperature_on_values() -> Iterator[None]:
    """The sampling temperature divides the critic's output as it divides logits."""
    from megappo.trainer import roles

    right = roles.align_values
    with mock.patch.object(roles, "align_values", lambda output, cu_seqlens: right(output / 0.7, cu_seqlens)):
        yield


@contextmanager
def labels_rolled_over_the_pack() -> Iterator[None]:
    """Targets and log-probs are shifted through the whole packed row: a first token is judged by its neighbour."""
    from megappo.trainer import roles

    with (
        mock.patch.object(roles, "next_token_targets", lambda tokens, cu_seqlens: tokens.roll(-1)),
        mock.patch.object(roles, "shift_right", lambda output, cu_seqlens: output.roll(1)),
    ):
        yield


@contextmanager
def labels_rolled_on_each_cp_rank() -> Iterator[None]:
    """The tokens are cut before the labels are shifted: the last token of a chunk is asked for the first of another."""
    from megappo.trainer import roles

    class Shard:
        """`roles` shifts, then cuts; this puts off the shift until after the cut."""

        def __init__(self, tokens: Tensor) -> None:
            self.tokens = tokens

    def own_tokens(output: Any, x: Shard) -> Tensor:
        return output.context.take(x.tokens).roll(-1)

    with (
        mock.patch.object(roles, "next_token_targets", lambda tokens, cu_seqlens: Shard(tokens)),
        mock.patch("megappo.engine.linear_output.LinearOutput.own_tokens", own_tokens),
    ):
        yield


@contextmanager
def normalised_per_micro_batch() -> Iterator[None]:
    """Each micro-batch is divided by its own token count, and the micro-batches are averaged."""
    from megappo.engine import role_engine
    from megappo.engine.megatron import MegatronEngine

    right_loss, right_plan = MegatronEngine._compute_loss, role_engine.plan_micro_batches
    num_micro_batches = [1]

    def plan(*args: Any) -> Any:
        micro_batches = right_plan(*args)
        num_micro_batches[0] = len(micro_batches)
        return micro_batches

    def compute_loss(self: Any, loss_fn: Any, denominator: float, outputs: Any, micro: Any, raw: Tensor) -> Any:
        if "weight" in micro.batch:
            denominator = max(1.0, float(micro.batch["weight"].sum())) * num_micro_batches[0] * self.groups.layout.dp
        return right_loss(self, loss_fn, denominator, outputs, micro, raw)

    with (
        mock.patch.object(role_engine, "plan_micro_batches", plan),
        mock.patch.object(MegatronEngine, "_compute_loss", compute_loss),
    ):
        yield


@contextmanager
def whitened_on_each_rank() -> Iterator[None]:
    """Every rank takes mean and deviation of its own share of the sequences."""
    from megappo.trainer import advantages

    with mock.patch.object(advantages, "total", lambda moments: moments):
        yield


def forgotten_all_reduce(part: str) -> Callable[[], Any]:
    """Each tp rank sees its own tokens under sequence parallel; the gradient of a replicated weight (`part` of its name)
    stays so.
    """

    @contextmanager
    def fault() -> Iterator[None]:
        from megappo.models import build

        right = build._mark_sharded

        def forget(model: torch.nn.Module) -> None:
            right(model)
            for name, parameter in model.named_parameters():
                if part in name:
                    parameter.sequence_parallel = False

        with mock.patch.object(build, "_mark_sharded", forget):
            yield

    return fault


@contextmanager
def copies_of_kv_heads_apart() -> Iterator[None]:
    """Each tp rank trains its copy of a KV head by its own query heads."""
    from megappo.engine import megatron

    with mock.patch.object(megatron, "sum_copies", lambda parameters, copies, tp: None):
        yield


@contextmanager
def copies_of_kv_heads_counted() -> Iterator[None]:
    """Every tp rank adds its copy of a KV head to the gradient norm."""
    from megappo.engine import megatron_optimizer

    with mock.patch.object(megatron_optimizer, "counted_parts", lambda optimizer: ()):
        yield


@contextmanager
def fsdp2_partial_gradients() -> Iterator[None]:
    """Under FSDP2 the gradients of norms, of a rank's own tokens, are not added up over tp."""
    from megappo.engine.fsdp2_model import ShardedModel

    with mock.patch.object(ShardedModel, "sum_partial_gradients", lambda self: None):
        yield


@contextmanager
def fsdp2_copies_counted() -> Iterator[None]:
    """Every tp rank adds the whole of the weights that all of them have to the gradient norm."""
    from megappo.engine import fsdp2_model

    with mock.patch.object(fsdp2_model, "copied_names", lambda arch, value_head: set()):
        yield


@contextmanager
def fsdp2_mean_gradients() -> Iterator[None]:
    """Gradients are averaged over the ranks that share the weights, as FSDP2 does by itself: losses are divided once more."""
    from torch.distributed.fsdp import FSDPModule

    from megappo.engine import fsdp2_model

    right = fsdp2_model._shard

    def averaged(module: torch.nn.Module, *args: Any) -> None:
        right(module, *args)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(2.0)

    with mock.patch.object(fsdp2_model, "_shard", averaged):
        yield


@contextmanager
def fsdp2_rows_off_by_one() -> Iterator[None]:
    """The second rank reads its rows of an odd vocabulary one too early."""
    from megappo.models import hf_import

    right = hf_import.read_box

    def shifted(source: Any, box: Any) -> Tensor:
        odd = source.get_shape()[0] % 2 and box.r0 > 0
        return right(source, box._replace(r0=box.r0 - 1, r1=box.r1 - 1) if odd else box)

    with mock.patch.object(hf_import, "read_box", shifted):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "no right shift": no_right_shift,
    "temperature on values": temperature_on_values,
    "labels rolled over the pack": labels_rolled_over_the_pack,
    "labels rolled on each cp rank": labels_rolled_on_each_cp_rank,
    "normalised per micro-batch": normalised_per_micro_batch,
    "whitened on each rank": whitened_on_each_rank,
    "forgotten all-reduce of norms": forgotten_all_reduce("layernorm"),
    "forgotten all-reduce of the router": forgotten_all_reduce("router"),
    "forgotten all-reduce of the value head": forgotten_all_reduce("value_head"),
    "copies of a KV head not added up": copies_of_kv_heads_apart,
    "every copy of a KV head counted": copies_of_kv_heads_counted,
    "fsdp2: forgotten sum of norms over tp": fsdp2_partial_gradients,
    "fsdp2: copies counted by every tp rank": fsdp2_copies_counted,
    "fsdp2: mean of gradients over ranks": fsdp2_mean_gradients,
    "fsdp2: odd rows off by one": fsdp2_rows_off_by_one,
}

# Those that all layouts share show against the step written out; fault -> (role, quantity) that gives it away.
SHARED = {
    "no right shift": ("critic", "values"),
    "temperature on values": ("critic", "values"),
    "labels rolled over the pack": ("policy", "logprobs"),
}
# Others show between layouts: fault -> (model, layout of two ranks, (role, quantity)).
BETWEEN: dict[str, tuple[str, Case, tuple[str, str]]] = {
    "labels rolled on each cp rank": ("llama", {"cp": 2}, ("policy", "logprobs")),
    "normalised per micro-batch": ("llama", {}, ("critic", "gradients")),
    "whitened on each rank": ("llama", {}, ("experience", "advantages")),
    "forgotten all-reduce of norms": ("llama", SP, ("policy", "gradients")),
    "forgotten all-reduce of the router": ("qwen3_moe", {**SP, "ep": 2}, ("policy", "gradients")),
    "forgotten all-reduce of the value head": ("llama", SP, ("critic", "gradients, copies")),
    "copies of a KV head not added up": ("mistral_window", {"tp": 2}, ("policy", "gradients")),
    "every copy of a KV head counted": ("mistral_window", {"tp": 2}, ("critic", "gradient norm")),
    "fsdp2: forgotten sum of norms over tp": ("llama", SP, ("critic", "gradients")),
    "fsdp2: copies counted by every tp rank": ("llama", SP, ("policy", "gradient norm")),
    "fsdp2: mean of gradients over ranks": ("llama", {"cp": 2}, ("policy", "gradients")),
    "fsdp2: odd rows off by one": ("llama", {"tp": 2}, ("policy", "logprobs")),
}
BEFORE_UPDATES = ("logprobs", "values", "advantages")
"""Quantities that are there before the first update."""


@contextmanager
def without_updates() -> Iterator[None]:
    with (
        mock.patch.object(measure, "Updates", lambda *args, **how: SimpleNamespace(run=lambda name: None)),
        mock.patch.object(measure._Recorder, "end_step", lambda self, loss: None),
    ):
        yield


def measure_faults(folders: Mapping[str, str]) -> dict[str, Measured]:
    """Fault -> Measured with it, as far as its quantity needs it; on one rank those of SHARED, on two those of BETWEEN."""
    jobs = {1: {name: ("llama", {}, of) for name, of in SHARED.items()}, 2: BETWEEN}.get(dist.get_world_size(), {})
    return {name: measure_fault(folders[model], case, name, quantity) for name, (model, case, (_, quantity)) in jobs.items()}


def measure_fault(folder: str, case: Case, name: str, quantity: str) -> Measured:
    with ExitStack() as stack:
        roles = stack.enter_context(roles_of(case))
        stack.enter_context(FAULTS[name]())
        if quantity in BEFORE_UPDATES:
            stack.enter_context(without_updates())
        changes = FSDP2["fsdp2"] if name.startswith("fsdp2") else {}
        return measure_case(folder, roles, changes, gradients="gradients" in quantity, parameters=False)
