"""Runs that learn from preferences, for tests: sums with a right and a wrong answer, on the tiny llama of `small_run.py`."""

from __future__ import annotations

import gc
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from tests.trainer.small_run import SIZES, set_keys, write_small_task

RECORDS = 48


def write_preferences(folder: Path) -> None:
    """model/ and data/, with pairs.jsonl, lists.jsonl (longer ones first), labels.jsonl, and held-out pairs in held.jsonl."""
    write_small_task(folder)
    draw = random.Random(3)
    lines: dict[str, list[dict[str, Any]]] = {"pairs": [], "lists": [], "labels": [], "held": []}
    for number in range(RECORDS):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        right, wrong = str(a + b), str(a + b + draw.randint(1, 60))
        pair = {"prompt": f"{a}+{b}=", "chosen": right, "rejected": wrong, "by": draw.random(), "even": number % 7 == 3}
        lines["pairs" if number % 4 else "held"].append(pair)
        lines["lists"].append({"prompt": pair["prompt"], "responses": [right, wrong, f"{wrong}-1", "-"][: 2 + number % 3]})
        lines["labels"].append({"prompt": pair["prompt"], "completion": right if number % 2 else wrong, "label": bool(number % 2)})
    for name, records in lines.items():
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_experts(folder: Path) -> None:
    """experts/, a model of four experts a layer in place of model/."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.1)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder / "experts")


def run_config(folder: Path, kind: str, name: str, **keys: Any) -> dict[str, Any]:
    """Configuration as nested dict; keys are dotted, and `role.KEY` is of the role that learns."""
    role = "reward_model" if kind == "reward_model" else "policy"
    config: dict[str, Any] = {
        "kind": kind,
        "run": {"name": name, "output_dir": str(folder / "runs"), "num_ranks": 2, "device": "cpu", "seed": 1},
        role: {"model": str(folder / "model"), "dtype": "fp32", "micro_batch_tokens": 64, "optimizer": {"lr": 1e-3}},
        "data": {
            "train": str(folder / "data" / "pairs.jsonl"),
            "eval": str(folder / "data" / "held.jsonl"),
            "tokenizer": str(folder / "model" / "tokenizer.model"),
            "chat_template": False,
            "max_tokens": 24,
        },
        "trainer": {"steps": 3, "batch_size": 12, "eval_every": 3},
        "checkpoint": {"save_every": "never", "export_at_end": False},
        "telemetry": {"trackers": []},
    }
    return set_keys(config, {re.sub("^role[.]", f"{role}.", key): value for key, value in keys.items()})


def run_all(rank: int, runs: Sequence[tuple[dict[str, Any], bool]]) -> None:
    """Train each configuration in turn on this rank; True resumes."""
    from megappo.config.loading import load_run
    from megappo.trainer.main import train
    from megappo.trainer.prepare.run import prepare_run

    for config, resume in runs:
        gc.freeze()
        path = Path(config["run"]["output_dir"]).parent / f"{config['run']['name']}.{rank}.yaml"
        path.write_text(yaml.safe_dump(config))
        config = load_run(str(path), [])
        train(config, prepare_run(config, 2, "cpu", resume=resume).data, resume=resume)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
