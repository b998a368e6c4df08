"""A rank of TRL's SFT or DPO for benchmarks/bench_supervised.py: `torchrun ... trl_rank.py SPEC`. Runs in TRL's environment and
imports nothing of megappo.

SPEC is a JSON file: model, records (a JSON-lines file of token ids), kind (sft or dpo), padding_free or precompute, rank_batch,
steps, lr, out. TRL's own defaults stay, but for what would be other work: bf16 and recomputation of activations are off, and
examples come in order.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["TQDM_DISABLE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast, TrainerCallback

from benchmarks.harness.step_clock import StepClock

trl: Any = importlib.import_module("trl")  # where megappo is checked there is none


def main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    clock = StepClock()
    trainer = (sft if spec["kind"] == "sft" else dpo)(spec, Timed(clock))
    trainer.train()
    rank = int(os.environ["RANK"])
    clock.write(Path(f"{spec['out']}.{rank}.json"))
    if rank == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path(f"{spec['out']}.losses.json").write_text(json.dumps(losses), encoding="utf-8")


class Timed(TrainerCallback):
    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 0:
            self._clock.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._clock.ended()


def in_order(base: Any, **methods: Any) -> Any:
    """Trainer class whose examples come in the order of its dataset."""

    def sampler(self: Any, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)

    return type("InOrder", (base,), {"_get_train_sampler": sampler, **methods})


def as_it_is(self: Any, dataset: Any, *others: Any, **named: Any) -> Any:
    """Prepare nothing: the records are token ids already."""
    return dataset


def settings(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": spec["out"],
        "per_device_train_batch_size": spec["rank_batch"],
        "max_steps": spec["steps"],
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "max_length": None,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "ddp_find_unused_parameters": False,
    }


def records(spec: dict[str, Any]) -> Dataset:
    # Of a file, not of memory: the ranks keep the reference's log-probs beside it, for each other.
    return Dataset.from_json(spec["records"])


def tokenizer() -> PreTrainedTokenizerFast:
    """Names of the special ids; no text is tokenized here."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def sft(spec: dict[str, Any], timed: Timed) -> Any:
    args = trl.SFTConfig(**settings(spec), padding_free=spec["padding_free"], dataset_kwargs={"skip_prepare_dataset": True})
    return in_order(trl.SFTTrainer)(
        spec["model"], args, train_dataset=records(spec), processing_class=tokenizer(), callbacks=[timed]
    )


def dpo(spec: dict[str, Any], timed: Timed) -> Any:
    args = trl.DPOConfig(**settings(spec), beta=0.1, precompute_ref_log_probs=spec["precompute"])
    return in_order(trl.DPOTrainer, _prepare_dataset=as_it_is)(
        spec["model"], args=args, train_dataset=records(spec), processing_class=tokenizer(), callbacks=[timed]
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
