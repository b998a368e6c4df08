"""Copies of offload and when, and what a pass takes to the device. That neither changes a number is held in test_megatron.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.data.packing import Ragged, pack
from megappo.engine.offload import ALIGNMENT, HostBuffer, StorageOffload
from megappo.parallel.layout import ParallelLayout
from tests.engine.runs import build_roles, recorded_batch, train
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

UPDATES = 3


class Copies(TorchDispatchMode):
    """Bytes of every copy of raw storage, in their order: copies of values have the type of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------------------------- offload


def test_the_host_buffer_is_as_large_as_what_is_parked() -> None:
    """torch's pinned memory would be the next power of two: 8,192."""
    buffer = HostBuffer([4097, 3, 257], torch.device("cpu"))
    assert [part.numel() for part in buffer.parts] == [4097, 3, 257]
    assert buffer.nbytes == sum(-(-size // ALIGNMENT) * ALIGNMENT for size in (4097, 3, 257)) == 5120
    starts = [part.data_ptr() - buffer.parts[0].data_ptr() for part in buffer.parts]
    assert starts == [0, 4352, 4608], "each at its place, none over another"


def test_what_comes_back_is_what_was_there_and_stays_the_same_object() -> None:
    whole = torch.arange(10.0)
    tensors = [whole[:4], whole[4:], torch.arange(7, dtype=torch.int16)]
    offload = StorageOffload(lambda: iter(tensors))
    with Copies() as copies:
        offload.offload()
        assert whole.untyped_storage().nbytes() == 0
        offload.offload()
        offload.restore()
        offload.restore()
    assert copies.sizes == [40, 14, 40, 14], "a copy for each storage and direction, however often it is asked for"
    assert torch.equal(whole, torch.arange(10.0)) and torch.equal(tensors[2], torch.arange(7, dtype=torch.int16))


def test_bytes_that_stay_the_same_are_copied_to_the_host_once() -> None:
    weight = torch.arange(8.0)
    offload = StorageOffload(lambda: [weight])
    offload.offload()
    offload.restore(to_change=False)
    with Copies() as copies:
        offload.offload()
    assert copies.sizes == [] and weight.untyped_storage().nbytes() == 0
    offload.restore(to_change=False)
    offload.restore()  # resident, and from here on it may change
    weight.fill_(7.0)
    with Copies() as copies:
        offload.offload()
    offload.restore()
    assert copies.sizes == [32] and weight.tolist() == [7.0] * 8


def test_a_tensor_that_appears_late_is_parked_with_the_others() -> None:
    tensors = [torch.ones(3)]
    offload = StorageOffload(lambda: tensors)
    offload.offload()
    offload.restore(to_change=False)
    tensors.append(torch.full((2,), 5.0))
    offload.offload()
    assert [t.untyped_storage().nbytes() for t in tensors] == [0, 0]
    offload.restore()
    assert tensors[0].tolist() == [1.0] * 3 and tensors[1].tolist() == [5.0] * 2


def copies_of_a_step(rank: int, path: str) -> dict[str, Any]:
    """Copies by part of a step, with everything offloaded."""
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups

    cpu_patches.install()
    batch = recorded_batch()
    policy, _ = build_roles(path, build_groups(ParallelLayout(1)), budget=64, dtype="bf16", offload=True)
    engine = policy.engine
    parameters = sum({s._cdata: s.nbytes() for s in _storages(engine, lambda: engine.named_parameters().values())}.values())
    found: dict[str, Any] = {"weights": parameters}
    with Copies() as copies:
        logprob, _ = policy.logprobs(batch)
    found["log-probs"] = copies.sizes
    recorded = batch.with_fields({"logprob": logprob})
    for updates in (UPDATES, 1):
        with Copies() as copies, engine.train_mode():
            for _ in range(updates):
                policy.update(recorded, 10.0)
        found[f"{updates} updates"] = copies.sizes
    with Copies() as copies:
        engine.save_state(with_optimizer=True)
        engine.release_state()
    found["checkpoint"] = copies.sizes
    before = policy.logprobs(batch)[0]
    engine.to("device")
    with torch.no_grad():
        for parameter in engine.named_parameters().values():
            parameter.mul_(1.5)
    engine.offload_idle()
    found["changed"] = not torch.equal(policy.logprobs(batch)[0], before)
    return found


def _storages(engine: Any, tensors: Any) -> list[torch.UntypedStorage]:
    engine.to("device")
    held = [tensor.untyped_storage() for tensor in tensors()]
    sizes = [SimpleNamespace(_cdata=one._cdata, nbytes=lambda size=one.nbytes(): size) for one in held]
    engine.offload_idle()
    return sizes  # type: ignore[return-value]


def on_one_rank(rank: int, path: str) -> dict[str, Any]:
    return {each.__name__: each(rank, path) for each in (copies_of_a_step, each_part_alone, fields_of_passes)}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    path = str(tmp_path_factory.mktemp("offload") / "llama")
    write_checkpoint(path, "llama", num_hidden_layers=2)
    return spawn_world(on_one_rank, 1, path)[0]


@pytest.fixture
def step(found) -> dict[str, Any]:
    return found["copies_of_a_step"]


def test_a_pass_without_gradients_copies_weights_in_and_nothing_back(step) -> None:
    assert sum(step["log-probs"]) == step["weights"] > 0


def test_the_optimizer_travels_once_each_way_however_many_mini_batches_there_are(step) -> None:
    """Each way: bf16 weights, and 12 bytes for every 2 of them."""
    assert step[f"{UPDATES} updates"] == step["1 updates"]
    assert sum(step["1 updates"]) == pytest.approx(2 * (step["weights"] + 6 * step["weights"]), rel=0.01)


def test_a_checkpoint_copies_nothing_back(step) -> None:
    assert sum(step["checkpoint"]) == pytest.approx(7 * step["weights"], rel=0.01)


def test_weights_that_others_wrote_are_the_ones_that_are_parked(step) -> None:
    assert step["changed"]


def each_part_alone(rank: int, path: str) -> dict[str, Any]:
    """Results of updates with each part offloaded alone, and bytes of weights that rest then; fp32, bf16, both optimizers."""
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups

    cpu_patches.install()
    groups, batch, found = build_groups(ParallelLayout(1)), recorded_batch(), {}
    every = (None, "parameters", "gradients", "optimizer")
    for dtype, distributed, parts in (("fp32", True, every), ("fp32", False, (None, "optimizer")), ("bf16", True, every)):
        how = dict(budget=10**6, dtype=dtype, distributed=distributed)
        for part in parts:
            offload = (part,) if part else ()
            resting = []
            for role in build_roles(path, groups, offload=offload, **how):
                resting += [p.untyped_storage().nbytes() for p in role.engine.named_parameters().values()]
            found[dtype, distributed, part] = train(path, groups, batch, offload=offload, **how), resting
    return found


def test_each_part_is_offloaded_without_the_others(found) -> None:
    """fp32 weights, and a critic's fp32 head in bf16, are what the optimizer updates itself: parking it must leave them."""
    results_of = found["each_part_alone"]
    for (dtype, distributed, part), (results, resting) in results_of.items():
        assert results == results_of[dtype, distributed, None][0], (dtype, distributed, part)
        assert all(size == 0 for size in resting) if part == "parameters" else all(resting), (dtype, distributed, part)


# ------------------------------------------------------------------------------------------------------- micro-batches


def a_batch() -> Any:
    batch = pack([[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12]])
    none = torch.zeros(batch.num_tokens, dtype=torch.int32)
    fields = {"weight": torch.ones(batch.num_tokens)}, {"truncated": torch.zeros(5, dtype=torch.bool)}
    return batch.with_fields(*fields, {"kept": Ragged(none[:0], none)})


def test_what_a_pass_did_not_declare_is_left_out_and_asking_for_it_is_an_error() -> None:
    batch = a_batch().only(("weight", "absent"))
    for changed in (batch, batch.select([1, 3]), batch.padded(4)[0], batch.to("cpu")):
        assert list(changed.token_fields) == ["weight"] and not changed.sequence_fields and not changed.ragged_fields
        assert "absent" not in changed and "weight" in changed
        for name in ("kept", "truncated"):
            with pytest.raises(KeyError, match=f"'{name}' was left out of this pass"):
                changed.ragged(name) if name == "kept" else changed[name]
            with pytest.raises(KeyError, match=f"'{name}' was left out of this pass"):
                assert name in changed  # "not there" would be a wrong answer
    assert "kept" in batch.with_fields({"kept": torch.zeros(batch.num_tokens)}), "a field of that name that is put there is there"


@pytest.mark.parametrize("vpp", [1, 2])
def test_micro_batches_are_sent_one_ahead_and_let_go_after_the_last_chunk(monkeypatch, vpp: int) -> None:
    from megappo.engine import micro_batches as schedule

    layout = ParallelLayout(2, pp=2, vpp=vpp) if vpp > 1 else ParallelLayout(1)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    sent: list[int] = []
    usual = schedule.MicroBatch.to

    def to(self: Any, device: torch.device) -> Any:
        sent.append(self.batch.num_tokens)
        return usual(self, device)

    monkeypatch.setattr(schedule.MicroBatch, "to", to)
    batches = schedule.MicroBatches(
        a_batch(), [[0], [1, 4], [2], [3]], SimpleNamespace(layout=layout, cp=alone), torch.device("cpu")
    )
    assert batches.num_tokens == [3, 4, 4, 1] and len(batches) == 4 and sent == []
    chunks = [batches.of_chunk() for _ in range(vpp)]
    # Rounds of two micro-batches, a chunk after the other, as in the interleaved schedule
    order = [(chunk, micro) for first in (0, 2) for chunk in range(vpp) for micro in (first, first + 1)]
    for chunk, micro in order:
        got = next(chunks[chunk])
        assert got.batch.num_tokens == batches.num_tokens[micro]
        ahead = max(micro for _, micro in order[: order.index((chunk, micro)) + 1]) + 2
        assert sent == batches.num_tokens[:ahead], "one more than has been asked for, each once"
        assert len(batches._sent) <= (1 if vpp == 1 else 3), "beside the one handed out"
    assert not batches._sent


def fields_of_passes(rank: int, path: str) -> dict[str, Any]:
    """Fields that passes of policy and critic take to the device, and what a loss that reads another one gets."""
    from megappo.engine import micro_batches as schedule
    from megappo.engine.losses import LossOutput
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups

    cpu_patches.install()
    batch = recorded_batch()
    fields = {name: torch.zeros(batch.num_tokens) for name in ("rollout_logprob", "entropy", "value", "logprob")}
    kept = Ragged.of_table(torch.arange(131, dtype=torch.int32).expand(batch.num_tokens, 131))
    batch = batch.with_fields(fields, ragged_fields={"kept": kept})
    policy, critic = build_roles(path, build_groups(ParallelLayout(1)), budget=64)
    usual, seen = schedule.MicroBatch.to, set()

    def to(self, device):
        seen.update({*self.batch.token_fields, *self.batch.sequence_fields, *self.batch.ragged_fields})
        return usual(self, device)

    schedule.MicroBatch.to = to  # the last thing that this rank does
    found = {}
    for name, what in (
        ("log-probs", lambda: policy.logprobs(batch)),
        ("values", lambda: critic.values(batch)),
        ("policy", lambda: updated(policy, batch)),
        ("critic", lambda: updated(critic, batch)),
    ):
        what()
        found[name] = sorted(seen)
        seen.clear()

    def reads_more(output, micro):
        return LossOutput(tokens={"entropy": micro["entropy"]})

    try:
        policy.engine.forward_backward(batch, reads_more, reads=("value",), forward_only=True)
    except KeyError as error:
        found["error"] = str(error)
    return found


def updated(role: Any, batch: Any) -> None:
    with role.engine.train_mode():
        role.update(batch, 10.0)


def test_passes_take_the_fields_that_they_read_and_no_others(found) -> None:
    found = found["fields_of_passes"]
    assert found["log-probs"] == ["kept"] and found["values"] == []
    assert found["policy"] == ["advantage", "kept", "logprob", "weight"] and found["critic"] == ["returns", "value", "weight"]
    assert "'entropy' was left out of this pass" in found["error"]
