"""Communication of a role under engine fsdp2: every weight is gathered for each micro-batch, and every gradient reduced after it.

Rajbhandari et al. 2020 ("ZeRO", section 7.2): one all-gather in the forward pass, and in the backward pass another one and a
reduce-scatter, of the whole model each. Gradients travel in fp32 (`engine/fsdp2.py`).
"""

from __future__ import annotations

from megappo.parallel.layout import ParallelLayout
from megappo.plan.memory import FP32
from megappo.platform.hardware import Hardware
from megappo.tune.links import Links, span
from megappo.tune.work import Pass


def exchange_s(parameters: int, layout: ParallelLayout, itemsize: int, layers: int, work: Pass, hardware: Hardware) -> float:
    """Seconds that communication adds to one micro-batch of a rank. work: its arithmetic; without a backward pass, only forward.

    parameters: of the whole model. itemsize: bytes of a number in computation.
    """
    links, group = Links.of(hardware), span(layout, "gradients", hardware.gpus_per_node)
    gather = links.gather_s(group, parameters * itemsize)
    times = [(gather, work.forward_s)]
    if work.backward:
        times.append((gather + links.gather_s(group, parameters * FP32), work.total_s - work.forward_s))
    if not hardware.is_gpu():
        return sum(talk for talk, _ in times)  # the cores that send are those that compute
    # The next layer is gathered while one computes: all that shows is the first layer, and what computation is too short to hide.
    return sum(max(talk / layers, talk - compute) for talk, compute in times)
