"""The engines of a checkpoint: each is saved and loaded by the ranks that it lives on, all of them or none become a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from megappo.checkpoint.sharded import OPTIMIZER, load_sharded
from megappo.checkpoint.state import StatefulModel
from megappo.checkpoint.stored import StoredTensors
from megappo.parallel.consensus import on_every_rank, raised_by_all

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


def load_engine(engine: StatefulModel, directory: Path, *, with_optimizer: bool, with_head: bool = True) -> None:
    """Load the state of one engine, in any layout, by whatever engine it was saved. Collective over the engine's ranks.

    Without `with_head` the engine keeps its own head, and the checkpoint may have another one or none. ValueError or RankFault on
    all of them if the state does not fit.
    """
    stored = StoredTensors(directory)
    try:
        boxes = engine.boxes_to_load(stored.shapes, with_optimizer=with_optimizer, with_head=with_head)
    except ValueError as error:
        raise ValueError(f"{directory} does not fit the model: {error}") from None
    if boxes is not None:
        on_every_rank("reading the checkpoint of another engine", lambda: stored.fill(boxes), engine.host_group)
        engine.boxes_loaded(stored.plain_values() if with_optimizer else {})
        return
    state = engine.state_to_load(with_optimizer=with_optimizer, with_head=with_head)
    passed_over = () if with_optimizer else (OPTIMIZER,)
    passed_over += () if with_head else engine.head_names
    engine.load_state(load_sharded(state, directory, engine.host_group, passed_over=passed_over))
