"""Assignment of requests to replicas. Pure arithmetic, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence

_GROUPS_PER_REPLICA = 4  # with fewer, keeping equal prompts together would leave replicas idle


def share_requests(prompts: Sequence[Sequence[int]], replicas: int) -> list[list[int]]:
    """Indices of each replica's requests, ascending; every request once.

    Balanced by count, then by prompt tokens. Equal prompts (several samples of one) stay on one replica if there are enough
    different ones to balance.
    """
    # Equal prompts on one replica share its prefix cache.
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(index)
    units = list(groups.values())
    if len(units) < _GROUPS_PER_REPLICA * replicas:
        units = [[index] for index in range(len(prompts))]
    units.sort(key=lambda unit: (-len(unit), -len(prompts[unit[0]]), unit[0]))
    shares: list[list[int]] = [[] for _ in range(replicas)]
    tokens = [0] * replicas
    for unit in units:
        replica = min(range(replicas), key=lambda r: (len(shares[r]), tokens[r], r))
        shares[replica].extend(unit)
        tokens[replica] += len(unit) * len(prompts[unit[0]])
    return [sorted(share) for share in shares]
