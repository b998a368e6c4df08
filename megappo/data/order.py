"""Order of the prompts of an epoch: a permutation, or visits in proportion to weights. Pure functions of their arguments."""

from __future__ import annotations

import random
from array import array

import numpy


def shuffled(num_prompts: int, seed: int, epoch: int) -> array:
    """[N] a permutation of the prompts, 32-bit."""
    order = array("i", range(num_prompts))  # 4 bytes a prompt; a list takes 36
    # Seeding by a string hashes all of it (SHA-512); random.Random keeps its sequence across Python versions.
    random.Random(f"prompts {seed} {epoch}").shuffle(order)  # pyright: ignore[reportArgumentType]  no MutableSequence
    return order


def weighted(weights: numpy.ndarray, seed: int, epoch: int) -> array:
    """[N] visits of N prompts, 32-bit: prompt i is visited floor or ceil of N w_i / sum(w) times, and that often in the mean of the
    epochs; with equal weights once.

    weights: [N] fp64, >= 0, not all 0. Systematic sampling (Madow 1949) over a permutation, whose visits are then shuffled: of all
    ways to draw in proportion to weights, it leaves the least to chance.
    """
    count, generator = len(weights), random.Random(f"weights {seed} {epoch}")
    order = numpy.frombuffer(shuffled(count, seed, epoch), numpy.int32)
    # Relative to the largest: a sum of weights near the limit of fp64 would be infinite.
    ends = numpy.cumsum(weights[order] / weights.max())
    ends = numpy.where(ends == ends[-1], count, ends * (count / ends[-1]))  # exact where only weights of 0 follow
    # Visit k is of the prompt whose interval has the point k + u; rounding may not push the last one out.
    points = numpy.minimum(numpy.arange(count) + generator.random(), numpy.nextafter(count, 0.0))
    visits = array("i", order[numpy.searchsorted(ends, points, side="right")].tobytes())
    generator.shuffle(visits)  # pyright: ignore[reportArgumentType]  no MutableSequence
    return visits
