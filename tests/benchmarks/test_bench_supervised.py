"""The benchmark beside TRL: both read the same tokens, and what differs or is too slow fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_supervised
from benchmarks.bench_supervised import ARMS, BATCH, Arm, Found, config_of, write_task
from megappo.config.loading import load_run
from megappo.data.packing import PackedBatch
from megappo.trainer.prepare.run import prepare_run
from megappo.trainer.prepare.supervised import SupervisedData

STEPS = 2


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("task")
    return folder, write_task(folder, STEPS)


def examples(folder: Path, kind: str) -> tuple[PackedBatch, list[dict[str, list[int]]]]:
    """All examples as megappo packs them, and TRL's records."""
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(config_of(folder / kind, kind, STEPS)))
    data = prepare_run(load_run(path), 2, "cpu").data
    assert isinstance(data, SupervisedData)
    number = STEPS * BATCH[kind]
    records = [json.loads(line) for line in (folder / f"{kind}.trl.jsonl").read_text().splitlines()]
    assert len(records) == number
    return data.train.packed(range(number)), records


def test_both_trainers_learn_the_same_tokens(task: tuple[Path, dict[str, int]]) -> None:
    folder, tokens = task
    packed, records = examples(folder, "sft")
    assert packed.tokens.tolist() == [one for record in records for one in record["input_ids"]]
    assert packed["response_mask"].tolist() == [one != -100 for record in records for one in record["labels"]]
    assert tokens["sft"] == packed.num_tokens // STEPS
    packed, records = examples(folder, "dpo")
    sides = [(record["prompt_ids"], record[side]) for record in records for side in ("chosen_ids", "rejected_ids")]
    assert packed.tokens.tolist() == [one for prompt, response in sides for one in (*prompt, *response)]
    assert packed["response_mask"].tolist() == [one for p, r in sides for one in [False] * len(p) + [True] * len(r)]
    assert tokens["dpo"] == packed.num_tokens // STEPS


def found(faster: float = 2.0, apart: float = 0.0) -> dict[Arm, Found]:
    """TRL takes `faster` times as long, and its losses are `apart` from megappo's."""
    losses: Tensor = torch.linspace(2.0, 1.0, 6)
    return {
        arm: Found(
            [1.0 if arm.trl is None else faster] * 3, [2.0] * 3, (losses + (arm.trl is not None) * apart).tolist(), 100.0, 150.0
        )
        for arm in ARMS
    }


@pytest.mark.parametrize(("faster", "apart", "code"), [(2.0, 1e-5, 0), (1.2, 0.0, 1), (2.0, 2e-4, 1)])
def test_a_slow_step_or_other_losses_miss_the_bar(
    faster: float, apart: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_supervised.report(found(faster, apart), {"sft": 1500, "dpo": 1000}) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(ARMS) and lines[-1].endswith("missed" if code else "met")
    assert lines[1].split()[:7] == ["sft", "megappo", "1000", "1,500", "2.00", "150", "50"]
    assert lines[2].split()[-3:] == [f"{faster:.2f}", "1.00", f"{apart:.1e}"] or apart
