"""A PPO run that takes seconds: a tiny llama, sums, two gloo ranks, real vLLM. For the tests of the trainer."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import transformers
import yaml

from scripts.arithmetic import ArithmeticTask, train_tokenizer, write_arithmetic

# Rewards, losses and KL of the same tokens, added up in another order.
NUMBERS = (
    "reward/score_mean",
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "critic/loss",
    "critic/grad_norm",
    "critic/value_mean",
    "kl/per_token",
    "kl/coef",
    "lengths/response_mean",
    "rollout/prob_diff_mean",
)
TOLERANCE = 1e-5


def check_same_numbers(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], *, rel: float = 1e-4, absolute: float = TOLERANCE
) -> None:
    """Assert that steps of two runs (rows of metrics.jsonl) have the same NUMBERS, but for rounding."""
    for one, other in zip(ours, theirs, strict=True):
        assert {key: one[key] for key in NUMBERS} == pytest.approx({key: other[key] for key in NUMBERS}, rel=rel, abs=absolute)


SIZES: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def write_small_task(folder: Path) -> None:
    """model/ (random llama and SentencePiece tokenizer) and data/ below `folder`."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    train_tokenizer(folder / "model")
    write_arithmetic(folder / "data", num_train=60, num_eval=20, num_sft=20, seed=0, task=ArithmeticTask(0, 9, "+-"))


def write_teacher(folder: Path) -> None:
    """teacher/ below `folder`: a smaller llama with the same tokenizer, whose vocabulary is padded further."""
    torch.manual_seed(1)
    sizes = {**SIZES, "vocab_size": 40, "hidden_size": 32}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained(folder / "teacher")
    train_tokenizer(folder / "teacher")


def taught(folder: Path, **distillation: Any) -> dict[str, Any]:
    """Keys of a run that learns from that teacher."""
    return {"teacher": {"model": str(folder / "teacher"), "dtype": "fp32"}, "algorithm.distillation": distillation}


def small_config(folder: Path, name: str, *, steps: int, **overrides: Any) -> dict[str, Any]:
    """Configuration as nested dict; overrides are dotted keys."""
    config: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder / "runs"), "num_ranks": 2, "device": "cpu", "seed": 1},
        "policy": {"model": str(folder / "model"), "dtype": "fp32", "parallel": {"tp": 2}, "optimizer": {"lr": 1e-3}},
        "critic": {"dtype": "fp32", "parallel": {"pp": 2}, "optimizer": {"lr": 1e-3}},
        "reference": {"dtype": "fp32"},
        "rollout": {"samples_per_prompt": 2, "max_response_tokens": 6},
        "data": {
            "train": str(folder / "data" / "train.jsonl"),
            "eval": str(folder / "data" / "eval.jsonl"),
            "tokenizer": str(folder / "model" / "tokenizer.model"),
            "chat_template": False,
            "max_prompt_tokens": 12,
            "prompts_per_step": 16,
        },
        "reward": {"parts": [{"name": "exact_match"}, {"name": "has_eos", "weight": 0.5}]},
        "algorithm": {
            "mini_batch_size": 16,
            "kl": {"coef": 0.01, "controller": {"type": "adaptive", "target": 0.5, "horizon": 100}},
            "bootstrap_truncated": True,
        },
        "trainer": {"steps": steps, "eval_every": 6},
        "telemetry": {"trajectories_every": 3, "trajectories_per_step": 2},
    }
    return set_keys(config, overrides)


def bare(config: dict[str, Any], *, saves: bool = False) -> dict[str, Any]:
    """`config` itself, without what a test that looks at metrics of steps does not read and every run pays for: evaluations,
    trackers, the export, and checkpoints unless it saves."""
    config["data"].pop("eval", None)
    config["trainer"].pop("eval_every", None)
    config["telemetry"]["trackers"] = []
    config["checkpoint"] = {"export_at_end": False, **({} if saves else {"save_every": "never"}), **config.get("checkpoint", {})}
    return config


def set_keys(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` itself, with dotted keys set; sections that are missing are made."""
    for key, value in changes.items():
        *sections, last = key.split(".")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return config


def branch_off(folder: Path, run: str, name: str, step: int) -> None:
    """Make a run `name` that ended with the checkpoint that `run` wrote after `step`, for a resume: a run less than one that is
    stopped there. Collective over the world."""

    def newer(_: str, names: list[str]) -> list[str]:
        return [one for one in names if one.startswith("step-") and int(one.removeprefix("step-")) > step]

    dist.barrier()  # the other rank may still be removing files of its own
    if dist.get_rank() == 0:
        shutil.copytree(folder / "runs" / run, folder / "runs" / name, ignore=newer)
    dist.barrier()


def run_many(rank: int, runs: list[tuple[dict[str, Any], bool]]) -> None:
    """Train each configuration in turn on this rank; True resumes."""
    from megappo.commands.plan.run import plan_run
    from megappo.config.loading import load_run
    from megappo.trainer.main import train

    for config, resume in runs:
        gc.freeze()  # what the runs before have left, which seven collections of each would visit
        # As in a process of its own: ranks of a test's world are forked with the same states.
        random.seed()
        numpy.random.seed()
        path = Path(config["run"]["output_dir"]).parent / f"{config['run']['name']}.{rank}.yaml"
        path.write_text(yaml.safe_dump(config))
        loaded = load_run(str(path))
        data = plan_run(loaded, config["run"]["num_ranks"], "cpu", resume=resume).data
        assert data is not None, "only a plan of shapes has none"
        train(loaded, data, resume=resume)
