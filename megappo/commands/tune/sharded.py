"""Communication of a role under engine fsdp2: every weight is gathered for each micro-batch, and every gradient reduced after it,
or after the last one alone (`reduce_once`).

Rajbhandari et al. 2020 ("ZeRO", section 7.2): one all-gather in the forward pass, and in the backward pass another one and a
reduce-scatter, of the whole model each.
"""

from __future__ import annotations

from megappo.commands.tune.links import Links, span
from megappo.commands.tune.work import Pass
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.hardware import Hardware


def exchange_s(weights: int, gradients: int, layout: ParallelLayout, layers: int, work: Pass, hardware: Hardware) -> float:
    """Seconds that communication adds to one micro-batch of a rank. work: its arithmetic; without a backward pass, only forward.

    weights, gradients: bytes of the whole model, or of what tp leaves of it; no gradients if they are not reduced after this one.
    """
    links, group = Links.of(hardware), span(layout, "gradients", hardware.gpus_per_node)
    gather = links.gather_s(group, weights)
    times = [(gather, work.forward_s)]
    if work.backward:
        reduce = links.gather_s(group, gradients) if gradients else 0.0
        times.append((gather + reduce, work.total_s - work.forward_s))
    if not hardware.is_gpu():
        return sum(talk for talk, _ in times)  # the cores that send are those that compute
    # The next layer is gathered while one computes: all that shows is the first layer, and what computation is too short to hide.
    return sum(max(talk / layers, talk - compute) for talk, compute in times)
