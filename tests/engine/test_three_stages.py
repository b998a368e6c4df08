"""A pipeline of three stages: its first rank reads tokens, its last one tokens and fields, the one between lengths alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.runs import build_roles, recorded_batch
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

WITHHELD = ("nothing", "what the shares withhold", "tokens of the first stage", "a field of the last stage")


def gradient_norms(rank: int, path: str) -> dict[str, Any]:
    """What is withheld -> gradient norms of updates of policy and critic."""
    from megappo.data.packing import PackedBatch
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    cpu_patches.install()
    groups = build_groups(ParallelLayout(3, pp=3))
    batch = recorded_batch()
    batch = batch.with_fields({"logprob": -batch["weight"], "value": batch["weight"]})
    found = {}
    for withheld in WITHHELD:
        roles, norms = build_roles(path, groups, budget=48), []
        for role in roles:
            role.engine = role.engine._engine  # every rank passes its share
            shares, share = role.engine.shares, batch
            if withheld != "nothing" and rank not in shares.holders[0]:
                has_tokens = rank in shares.readers[0] and withheld != "tokens of the first stage"
                share = PackedBatch(batch.tokens if has_tokens else torch.zeros_like(batch.tokens), batch.cu_seqlens)
            if withheld == "a field of the last stage" and rank in shares.holders[0]:
                share = batch.with_fields({"weight": torch.zeros_like(batch["weight"])})
            with role.engine.train_mode():
                norms.append(role.update(share, 10.0).step.grad_norm)
        found[withheld] = norms
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("stages") / "llama")
    write_checkpoint(path, "llama", num_hidden_layers=3)
    return spawn_world(gradient_norms, 3, path)


def test_stages_read_no_more_than_the_shares_say(found) -> None:
    for of_rank in found:
        assert of_rank["what the shares withhold"] == of_rank["nothing"]
        assert all(norm > 0 for norm in of_rank["nothing"])


@pytest.mark.parametrize("withheld", WITHHELD[2:])
def test_what_they_do_read_counts(found, withheld: str) -> None:
    """Negative control."""
    assert all(mine != theirs for mine, theirs in zip(found[0][withheld], found[0]["nothing"], strict=True))
