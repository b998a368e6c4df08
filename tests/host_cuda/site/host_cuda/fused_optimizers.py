"""Stand-ins for `transformer_engine.pytorch.optimizers`: the kernels that Megatron-core clips gradients and updates parameters by.

TransformerEngine itself stays absent; only this one module of it can be imported, which is where Megatron-core 0.16 looks for
an optimizer. Each function is one kernel of its stream: it makes no tensors besides its result, as the fused ones do not.
Arguments and meaning are those of TransformerEngine 2.11; what Megatron-core does not ask for is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from host_cuda import runtime
from host_cuda.mode import extent, host_view, to_device

NAME = "transformer_engine.pytorch.optimizers"
CHUNK = 1 << 16  # elements that one block of a GPU works on; here it only completes the arguments


def install() -> None:
    """From now on `from transformer_engine.pytorch.optimizers import ...` finds this module."""
    # Python looks for the whole name first: the packages above it need not exist.
    sys.modules[NAME] = sys.modules[__name__]


def multi_tensor_applier(
    operation: Callable[..., Any], overflow: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    return operation(CHUNK, overflow, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm of all tensors [1], norms of each [n] or [0]), fp32. `overflow` becomes 1 where the norm is not finite."""
    (tensors,) = tensor_lists
    device = _launch("multi_tensor_l2norm", tensors, [overflow])
    norms = torch.stack([torch.linalg.vector_norm(host_view(x), dtype=torch.float32) for x in tensors])
    norm = torch.linalg.vector_norm(norms).view(1)
    if not torch.isfinite(norm):
        host_view(overflow).fill_(1)
    results = to_device(norm, device), to_device(norms if per_tensor else norms[:0], device)
    _launch("multi_tensor_l2norm", [], results)
    return results


def multi_tensor_scale(chunk: int, overflow: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """targets = sources x scale, in the targets' types. `overflow` becomes 1 where a source is not finite."""
    sources, targets = tensor_lists
    _launch("multi_tensor_scale", sources, [*targets, overflow], same_sizes=tensor_lists)
    for source, target in zip(sources, targets):
        values = host_view(source).float()
        if not torch.isfinite(values).all():
            host_view(overflow).fill_(1)
        host_view(target).copy_(values * scale)


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Lists of gradients, parameters, first and second moments. decoupled: AdamW's decay (Loshchilov & Hutter 2019), else L2's."""
    gradients, parameters, firsts, seconds = tensor_lists
    _launch("multi_tensor_adam", gradients, [*parameters, *firsts, *seconds], same_sizes=tensor_lists)
    unbias1, unbias2 = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
    for tensors in zip(*tensor_lists):
        gradient, parameter, first, second = (host_view(x) for x in tensors)
        g, p = gradient.float(), parameter.float()
        if not decoupled:
            g = g + weight_decay * p
        m = beta1 * first.float() + (1 - beta1) * g
        v = beta2 * second.float() + (1 - beta2) * g * g
        update = (m / unbias1) / ((v / unbias2).sqrt() + eps)
        if decoupled:
            update = update + weight_decay * p
        parameter.copy_(p - lr * update)
        first.copy_(m)
        second.copy_(v)


class FusedAdam(torch.optim.Optimizer):
    """Adam whose step is one kernel for all parameters of a group. The number of the step is the group's, not each parameter's.

    Moments are fp32, and beside fp32 parameters no master weights are kept.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.adam_w_mode = int(adam_w_mode)
        self._overflow = torch.zeros(1, dtype=torch.int, device="cuda")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if not group["params"]:
                continue  # and such a group counts no steps
            group["step"] = group.get("step", 0) + 1
            moving = [p for p in group["params"] if p.grad is not None]
            for p in moving:
                if not self.state[p]:
                    self.state[p].update({name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")})
            states = [self.state[p] for p in moving]
            lists = [[p.grad for p in moving], moving, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]]
            numbers = (group["lr"], *group["betas"], group["eps"], group["step"])
            settings = (self.adam_w_mode, int(group["bias_correction"]), group["weight_decay"])
            if moving:
                multi_tensor_applier(multi_tensor_adam, self._overflow, lists, *numbers, *settings)
        return loss


class FusedSGD(torch.optim.Optimizer):
    """Megatron-core imports it together with Adam."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("FusedSGD on the host's CUDA device: only FusedAdam is written out")


def _launch(
    name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, same_sizes: Sequence[Sequence[Tensor]] = ()
) -> torch.device:
    """Tell the runtime which bytes the kernel touches; ValueError for tensors that it would refuse."""
    device = writes[0].device
    for x in (*reads, *writes):
        if not x.is_cuda or x.device != device:
            raise ValueError(f"{name}: a tensor is on {x.device}, others on {device}: expected all on one CUDA device")
        if not x.is_contiguous():
            raise ValueError(f"{name}: a tensor {tuple(x.shape)} is not contiguous")
    for first, *others in zip(*same_sizes, strict=True):
        if any(x.numel() != first.numel() for x in others):
            raise ValueError(f"{name}: lists of tensors of other sizes: {[x.numel() for x in (first, *others)]}")
    ranges = [number for written, tensors in ((0, reads), (1, writes)) for x in tensors for number in (*extent(x), written)]
    runtime.begin(device.index, runtime.current_stream(device.index), name, ranges)
    return device
