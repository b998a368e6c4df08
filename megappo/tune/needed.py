"""Number of GPUs needed by a run that does not fit on those available."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from megappo.tune.search import Machine, Search

MOST_DOUBLINGS = 8


def larger_worlds(machine: Machine) -> list[int]:
    """Numbers of GPUs by doubling, in whole nodes if more than one. Layouts that are kept divide them too."""
    sizes, per_node = [machine.world_size], machine.hardware.gpus_per_node
    for _ in range(MOST_DOUBLINGS):
        twice = 2 * sizes[-1]
        sizes.append(twice if twice <= per_node else lcm(twice, per_node))
    return sizes[1:]


def gpus_needed(search: Search) -> int | None:
    """The smallest of `larger_worlds` on which some layout fits; None if none does on the largest."""
    for world_size in larger_worlds(search.machine):
        machine = replace(search.machine, world_size=world_size)
        if Search(search.config, search.archs, machine, search.workload, search.tuned).can_fit():
            return world_size
    return None
