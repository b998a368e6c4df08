"""The layout of sequences is no part of the result: order, padding, and a batch too small for all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megappo.commands.verify.compare import compare
from megappo.commands.verify.recording import record_rollouts
from megappo.data.packing import PackedBatch
from tests.parity.matrix import SEQUENCES, SP, VOCABULARY, Case, measure_case, roles_of, title
from tests.parity.test_layouts import disagreements
from tests.worlds import spawn_world

# One mini-batch of everything, so that it is the same set in any order. The padding here is of the user's own making: it moves the
# last token, which bootstraps, and is balanced over the experts like any other token. Padding of the engine does neither.
WHOLE = {
    "algorithm__mini_batch_size": SEQUENCES,
    "algorithm__bootstrap_truncated": False,
    "policy__router_aux_coef": 0.0,
    "critic__router_aux_coef": 0.0,
}
PAIRS = {"algorithm__mini_batch_size": 2, "data__prompts_per_step": 4}
SINGLE = {"algorithm__mini_batch_size": 1, "data__prompts_per_step": 1}
PADDED_TO = 64
# Model -> layouts of two ranks, and what each is run on: replicas have shares of their own, cp and sp cut packed rows, a pipeline
# and experts communicate whether a rank has tokens or not.
PADDED, ONE, LONG = "reversed and padded", "single", "long"
CASES: dict[str, list[tuple[Case, tuple[str, ...]]]] = {
    "llama": [
        ({}, (PADDED, ONE, LONG)),
        ({"cp": 2}, (PADDED, LONG)),
        (({"pp": 2, "vpp": 2}, SP), (PADDED, ONE)),
    ],
    "qwen3_moe": [({**SP, "ep": 2}, (PADDED, ONE))],
}
ALONE: dict[str, tuple[str, ...]] = {"llama": ("plain", "reversed", PADDED, ONE, LONG), "qwen3_moe": ("plain", PADDED, ONE)}
ORDER = list(reversed(range(SEQUENCES)))


def recorded() -> PackedBatch:
    return record_rollouts(1, sequences=SEQUENCES, vocab_size=VOCABULARY)[0]


def one_long() -> PackedBatch:
    """Four samples with the ids that tokens were drawn from; one is longer than the others together, and than a micro-batch."""
    batch = record_rollouts(1, sequences=SEQUENCES, vocab_size=VOCABULARY, kept=5)[0]
    order = batch.lengths.argsort()
    return batch.select([int(order[-1]), *order[:3].tolist()])


def arrangements() -> dict[str, tuple[PackedBatch, torch.Tensor]]:
    """name -> (batch, where its tokens stand in the recorded order)"""
    plain = recorded()
    turned, index = plain.select(ORDER), torch.argsort(plain.token_index(ORDER))
    padded, real = turned.padded(sequence_multiple=PADDED_TO)
    return {
        "plain": (plain, torch.arange(plain.num_tokens)),
        "reversed": (turned, index),
        PADDED: (padded, real[index]),
    }


def packing_world(rank: int, folders: dict[str, str]):
    """model -> title -> arrangement -> Measured; ONE is one sequence for all ranks, LONG `one_long`. Of rank 0. On two ranks order
    and padding change at once: the matrix has the plain batch.
    """
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    size = dist.get_world_size()
    runs = {name: (WHOLE, batch) for name, (batch, _) in arrangements().items()}
    runs |= {ONE: (SINGLE, record_rollouts(1, sequences=1, vocab_size=VOCABULARY, seed=5)[0]), LONG: (PAIRS, one_long())}
    found: dict = {}
    for model, folder in folders.items():
        for case, names in CASES[model] if size > 1 else [({}, ALONE[model])]:
            with roles_of(case) as roles:
                by_name = {name: measure_case(folder, roles, runs[name][0], [runs[name][1]]) for name in names}
            found.setdefault(model, {})[title(case, size)] = by_name
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def packed(models):
    folders = {model: str(models[model]) for model in CASES}
    return {size: spawn_world(packing_world, size, folders)[0] for size in (1, 2)}


def runs_on(kind: str) -> list[Any]:
    """Parameters of the tests: (model, 2, title)."""
    return [
        pytest.param(model, 2, title(case, 2), id=f"{model}-{title(case, 2)}")
        for model, cases in CASES.items()
        for case, kinds in cases
        if kind in kinds
    ]


@pytest.mark.parametrize("model, size, name", [pytest.param(m, 1, "tp1 pp1 dp1", id=f"{m}-alone") for m in CASES] + runs_on(PADDED))
def test_order_and_padding_change_nothing(packed, model: str, size: int, name: str) -> None:
    _, index = arrangements()[PADDED]
    found, expected = packed[size][model][name][PADDED], packed[1][model]["tp1 pp1 dp1"]["plain"]
    for role, quantity in (
        ("policy", "logprobs"),
        ("policy", "entropies"),
        ("critic", "values"),
        ("experience", "advantages"),
        ("experience", "returns"),
    ):
        a, b = found[role].values[quantity][0][index], expected[role].values[quantity][0]
        assert float(((a - b).abs() / b.abs().clamp(min=1)).max()) < 1e-5, quantity
    for role in ("policy", "critic"):
        for quantity in ("loss", "gradient norm"):
            a, b = found[role].values[quantity][0], expected[role].values[quantity][0]
            assert a.tolist() == pytest.approx(b.tolist(), rel=1e-5, abs=1e-5), (role, quantity)
        for kind in ("gradients", "parameters"):
            for tensor, b in getattr(expected[role], kind).tensors.items():
                error = (getattr(found[role], kind).tensors[tensor] - b).abs().max() / b.abs().max()
                assert float(error) < 1e-5, (role, kind, tensor)


@pytest.mark.parametrize("model, size, name", runs_on(ONE))
def test_a_batch_of_one_sequence_gives_the_same_and_every_rank_takes_part(packed, model: str, size: int, name: str) -> None:
    """A rank without sequences runs through every collective: pipeline, all-to-all of the experts, gradients, metrics."""
    assert disagreements(packed[size][model][name][ONE], packed[1][model]["tp1 pp1 dp1"][ONE]) == []


@pytest.mark.parametrize("model, size, name", runs_on(LONG))
def test_a_sample_longer_than_all_others_gives_the_same(packed, model: str, size: int, name: str) -> None:
    """Its replica has nothing else of a mini-batch; the other one may have none at all."""
    lengths = one_long().lengths.tolist()
    assert lengths[0] > sum(lengths[1:]) and lengths[0] > 48, "tokens of a micro-batch"
    assert disagreements(packed[size][model][name][LONG], packed[1][model]["tp1 pp1 dp1"][LONG]) == []


def test_the_ids_that_tokens_were_drawn_from_count(packed) -> None:
    """Negative control of the one above: without them the log-probs are others."""
    found = packed[1]["llama"]["tp1 pp1 dp1"][LONG]["policy"].values
    drawn_alone = one_long().ragged("kept").counts == 1
    assert drawn_alone.any() and found["logprobs"][0][drawn_alone].abs().max() < 1e-6


def test_the_comparison_notices_a_wrong_order(packed) -> None:
    found = packed[1]["llama"]["tp1 pp1 dp1"]
    assert any(not d.agrees for d in compare(found["reversed"], found["plain"]))
