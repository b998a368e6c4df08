"""A weight that changes on one rank alone is found at the next check, by name and rank, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

NORM, EMBEDDING, OUTPUT = "decoder.final_layernorm.weight", "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = "decoder.layers.0.self_attention.linear_proj.weight"
# Case -> (layout, ranks, bf16, distributed optimizer, parameter, rank whose copy changes, or None)
CASES: dict[str, tuple[dict, bool, bool, str, int | None]] = {
    "dp": ({}, False, True, LAYER, 2),
    "dp, bf16": ({}, True, True, LAYER, 0),
    "dp, fp32 main parameter": ({}, True, False, LAYER, 1),
    "none": ({}, True, False, LAYER, None),
}
PAIRS: dict[str, tuple[dict, bool, bool, str, int | None]] = {
    "tp, a norm": (dict(tp=2), False, True, NORM, 1),
    "tp, a cut weight": (dict(tp=2), False, True, LAYER, None),
    "pp, tied embeddings": (dict(pp=2), False, True, OUTPUT, 1),
    "cp": (dict(cp=2), False, True, EMBEDDING, 1),
}


def one_ulp(tensor: torch.Tensor) -> None:
    """Change the lowest bit of the last element."""
    kind = torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32
    tensor.detach().view(-1)[-1:].view(kind).bitwise_xor_(1)


def drifts(rank: int, path: str, cases: dict[str, tuple]) -> dict[str, list[str]]:
    """Case -> messages before the change, after it, and after it was undone; "" for none."""
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout
    from megappo.runtime.ending import ReplicaDrift, Unrecoverable
    from megappo.trainer.replicas import ReplicaCheck
    from tests.engine.runs import build_roles

    cpu_patches.install()
    groups: dict[str, Any] = {}
    found: dict[str, list[str]] = {}
    for name, (sizes, bf16, distributed, parameter, culprit) in cases.items():
        layout = ParallelLayout(dist.get_world_size(), **sizes)
        groups.setdefault(str(layout), build_groups(layout))
        how = dict(budget=64, offload=True, dtype="bf16" if bf16 else "fp32", distributed=distributed)
        policy, critic = build_roles(path, groups[str(layout)], **how)
        engine = policy.engine
        check = ReplicaCheck({"policy": engine, "critic": critic.engine})

        def message() -> str:
            try:
                check()
            except ReplicaDrift as error:
                assert isinstance(error, Unrecoverable)
                return str(error)
            return ""

        def change() -> None:
            with engine.train_mode():  # the offloaded copy changes as well
                engine.to("device")
                tensors = dict(engine.main_parameters()) if "main" in name else engine.named_parameters()
                if rank == culprit or (culprit is None and rank == 0 and "cut" in name):
                    one_ulp(tensors[parameter])

        found[name] = [message()]
        for _ in range(2):
            change()
            found[name].append(message())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[list[str]]]:
    """Case -> the messages of each rank."""
    path = str(tmp_path_factory.mktemp("replicas") / "llama")
    write_checkpoint(path, "llama", num_hidden_layers=2, tie_word_embeddings=True)
    worlds = spawn_world(drifts, 3, path, CASES), spawn_world(drifts, 2, path, PAIRS)
    return {name: [of_rank[name] for of_rank in world] for world in worlds for name in world[0]}


EXPECTED = {
    "dp": "model.layers.0.self_attn.o_proj.weight [0:64, 0:64] differs on rank 2 from ranks 0-1",
    "dp, bf16": "model.layers.0.self_attn.o_proj.weight [0:64, 0:64] differs on rank 0 from ranks 1-2",
    "dp, fp32 main parameter": "o_proj.weight [0:64, 0:64] (fp32 main parameter) differs on rank 1 from ranks 0, 2",
    "tp, a norm": "model.norm.weight [0:64, 0:1] differs between rank 0 and rank 1",
    "pp, tied embeddings": "model.embed_tokens.weight [0:131, 0:64] differs between rank 0 and rank 1",
    "cp": "model.embed_tokens.weight [0:131, 0:64] differs between rank 0 and rank 1",
}


@pytest.mark.parametrize("case", EXPECTED)
def test_one_bit_is_found_and_named_alike_on_every_rank(found, case: str) -> None:
    assert all(of_rank == found[case][0] for of_rank in found[case])
    before, changed, undone = found[case][0]
    assert before == undone == ""
    assert changed.startswith("copies of the policy's weights differ: model.") and changed.endswith(EXPECTED[case])


@pytest.mark.parametrize("case", ["none", "tp, a cut weight"])
def test_weights_that_have_no_other_copy_are_not_compared(found, case: str) -> None:
    """Negative control: ranks whose shards differ, and ranks that are alike."""
    assert all(messages == ["", "", ""] for messages in found[case])


def test_an_engine_of_one_rank_has_no_copies(tmp_path) -> None:
    assert spawn_world(toy, 1, str(tmp_path / "llama")) == [0]


def toy(rank: int, path: str) -> int:
    from megappo.config.role_sections import PolicyConfig
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch
    from megappo.trainer.replicas import ReplicaCheck, Replicas
    from tests.engine.toy_engine import ToyEngine

    write_checkpoint(path, "llama", num_hidden_layers=1)
    section = PolicyConfig(model=path, dtype="fp32")
    engine = ToyEngine(EngineSpec("policy", path, read_arch(path), section, total_updates=1))
    ReplicaCheck({"policy": engine})()
    return len(Replicas(engine)._copies)
