"""A rule of compaction for the tests, apart from the one that `rollout/environment.py` makes of a configuration."""

from __future__ import annotations

from collections.abc import Callable

from megappo.rollout.turns import Left


def keep_ends(first: int, last: int) -> Callable[[Left], list[int]]:
    """Return a `Compaction.prompt` that keeps the first and the last ids of the context with its observation."""

    def prompt(left: Left) -> list[int]:
        ids = [*left.context.tolist(), *left.observation.tolist()]
        return ids if len(ids) <= first + last else [*ids[:first], *ids[len(ids) - last :]]

    return prompt
