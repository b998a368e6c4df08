"""The engines of a checkpoint: each is saved and loaded by the ranks that it lives on, all of them or none become a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

from megappo.checkpoint.state import StatefulModel
from megappo.parallel.consensus import raised_by_all

Models = Mapping[str, StatefulModel | None]
"""Name of an engine -> the engine; None on ranks that it does not live on. The same names in the same order on every rank."""


def on_engines(models: Models, action: Callable[[str, StatefulModel], None], *kinds: type[Exception]) -> None:
    """Run `action` for every engine on its ranks, which raise its errors of `kinds` together; then raise the first on all ranks.

    Collective over the world. Engines on different ranks are worked on at the same time.
    """

    def own() -> None:
        faults: list[Exception] = []
        failed: list[set[int]] = []
        for name, engine in models.items():
            ranks = set() if engine is None else set(dist.get_process_group_ranks(engine.host_group))
            # Without the engines all of whose ranks know of a fault; others would wait for this rank.
            if engine is None or any(ranks <= others for others in failed):
                continue
            try:
                action(name, engine)
            except kinds as error:
                faults.append(error)
                failed.append(ranks)
        if faults:
            raise faults[0]

    raised_by_all(own, *kinds)
