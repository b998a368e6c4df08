"""A pipeline stage that sent its output waits for nothing more than the message, and keeps none of the data."""

from __future__ import annotations

from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engine.runs import build_roles, recorded_batch
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

CASES: list[tuple[dict, str]] = [(dict(pp=2), "none"), (dict(pp=2, vpp=2), "full")]
"""(layout, recompute)"""
FREED, KEPT = "freed", "kept"


class Outputs:
    """Bytes behind the outputs that this stage's chunks sent on, while others are computed."""

    def __init__(self, engine: Any) -> None:
        self._sent: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0
        for chunk in engine.chunks:
            chunk.register_forward_pre_hook(self._count)
            if not chunk.post_process:
                chunk.register_forward_hook(self._record)

    def _record(self, module: Any, inputs: Any, output: Any) -> None:
        storage = output.untyped_storage()
        self._sent.append((StorageWeakRef(storage), storage.nbytes()))

    def _count(self, module: Any, inputs: Any) -> None:
        self.peak = max(self.peak, sum(size for storage, size in self._sent if not storage.expired()))


def update_both_ways(rank: int, path: str) -> dict[tuple, dict[str, Any]]:
    """(layout, recompute, outputs freed or kept) -> numbers of an update of policy and critic, the peak of `Outputs`, the
    settings.
    """
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    cpu_patches.install()
    batch = recorded_batch()
    found = {}
    for sizes, recompute in CASES:
        groups = build_groups(ParallelLayout(2, **sizes))
        for way in (FREED, KEPT):
            found[tuple(sizes), recompute, way] = update(path, groups, batch, recompute, way)
    return found


def update(path: str, groups: Any, batch: Any, recompute: str, way: str) -> dict[str, Any]:
    roles = build_roles(path, groups, budget=16, recompute=recompute)
    count, peaks, settings = float(batch["weight"].sum()), [], []
    recorded = batch.with_fields(dict.fromkeys(("logprob", "value"), batch["advantage"] * 0.1 - 1.0))
    numbers: list[Any] = []
    for role in roles:
        config = role.engine.chunks[0].config
        settings.append((config.deallocate_pipeline_outputs, config.batch_p2p_sync))
        config.deallocate_pipeline_outputs = way == FREED
        outputs = Outputs(role.engine)
        with role.engine.train_mode():
            result = role.update(recorded, count)
        numbers += [result.losses.sums, result.losses.maxima, result.step.grad_norm, result.losses.num_micro_batches]
        numbers += [p.detach().clone().tolist() for p in role.engine.named_parameters().values()]
        peaks.append(outputs.peak)
    return {"numbers": numbers, "peaks": peaks, "settings": settings}


@pytest.fixture(scope="module")
def updates(tmp_path_factory) -> list[dict[tuple, dict[str, Any]]]:
    path = str(tmp_path_factory.mktemp("p2p") / "llama")
    write_checkpoint(path, "llama", num_hidden_layers=4)
    return spawn_world(update_both_ways, 2, path)


def test_an_exchange_waits_for_the_message_alone_and_frees_what_was_sent(updates) -> None:
    for of_rank in updates:
        assert all(found["settings"] == [(True, False)] * 2 for found in of_rank.values())


@pytest.mark.parametrize("layout, recompute", [(tuple(sizes), recompute) for sizes, recompute in CASES])
def test_outputs_that_were_sent_leave_no_bytes_and_change_no_bit(updates, layout: tuple, recompute: str) -> None:
    for of_rank in updates:
        freed, kept = (of_rank[layout, recompute, way] for way in (FREED, KEPT))
        assert freed["numbers"] == kept["numbers"]
        assert freed["numbers"][3] > 2, "several micro-batches are in flight"
    # The last stage of pp alone sends no output.
    senders = updates[:1] if layout == ("pp",) else updates
    for of_rank in senders:
        freed, kept = (of_rank[layout, recompute, way]["peaks"] for way in (FREED, KEPT))
        assert all(mine < others / 1.5 for mine, others in zip(freed, kept)), (freed, kept)
