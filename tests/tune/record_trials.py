"""Measures the layouts that `test_ranking.py` ranks, on two ranks of this machine, and this machine with `--probe`.

    python tests/tune/record_trials.py

writes `tests/tune/trials_cpu.json`. Not part of the suite: it takes minutes, and wants a machine with nothing else to do. Every layout is
measured in several rounds, each in a world of its own, and the fastest counts: what disturbs a round makes it slower, never faster.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megappo.config.loading import load_config
from megappo.launch.local import start_ranks
from megappo.tune.probe import probe
from megappo.tune.profiles import dump_hardware
from megappo.tune.trial import Trial, read_measured, write_trial

TARGET = Path(__file__).with_name("trials_cpu.json")
RANKS, ROUNDS = 2, 2
MODEL = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 704, "vocab_size": 2048, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
SAMPLES, PROMPT, RESPONSE = 8, 32, 96
# Overrides of the policy: 1,024 tokens in an update, 512 of them on each of two data-parallel ranks.
LAYOUTS: dict[str, list[str]] = {
    "dp2": ["policy.micro_batch_tokens=512"],
    "dp2, 4 micro-batches": ["policy.micro_batch_tokens=128"],
    "dp2, recompute full": ["policy.micro_batch_tokens=512", "policy.recompute=full"],
    "tp2": ["policy.parallel.tp=2", "policy.micro_batch_tokens=1024"],
    "tp2, 8 micro-batches": ["policy.parallel.tp=2", "policy.micro_batch_tokens=128"],
    "tp2 sp": ["policy.parallel.tp=2", "policy.parallel.sequence_parallel=true", "policy.micro_batch_tokens=1024"],
    "tp2 sp, recompute full": [
        "policy.parallel.tp=2", "policy.parallel.sequence_parallel=true", "policy.micro_batch_tokens=1024", "policy.recompute=full",
    ],
    "cp2": ["policy.parallel.cp=2", "policy.micro_batch_tokens=1024"],
    "pp2, 1 micro-batch": ["policy.parallel.pp=2", "policy.micro_batch_tokens=1024"],
    "pp2, 2 micro-batches": ["policy.parallel.pp=2", "policy.micro_batch_tokens=512"],
    "pp2, 8 micro-batches": ["policy.parallel.pp=2", "policy.micro_batch_tokens=128"],
    "pp2 vpp2, 8 micro-batches": ["policy.parallel.pp=2", "policy.parallel.vpp=2", "policy.micro_batch_tokens=128"],
    "pp2 vpp4, 8 micro-batches": ["policy.parallel.pp=2", "policy.parallel.vpp=4", "policy.micro_batch_tokens=128"],
    "pp2 of 6 and 2 layers, 8 micro-batches": [
        "policy.parallel.pp=2", "policy.parallel.layers_per_stage=[6,2]", "policy.micro_batch_tokens=128",
    ],
}  # fmt: skip


def write_run(folder: Path) -> Path:
    """The configuration that the layouts are overrides of; no weights and no data are needed."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(
        f"run: {{num_ranks: {RANKS}, device: cpu}}\npolicy: {{model: {model}, dtype: fp32}}\ncritic: {{dtype: fp32}}\n"
        f"reference: {{dtype: fp32}}\nrollout: {{engine: megatron, max_response_tokens: {RESPONSE}}}\n"
        f"data: {{train: none, max_prompt_tokens: {PROMPT}, prompts_per_step: {SAMPLES}}}\n"
        f"algorithm: {{mini_batch_size: {SAMPLES}}}\n",
        encoding="utf-8",
    )
    return path


def main() -> int:
    hardware = probe()
    with tempfile.TemporaryDirectory(prefix="megappo-trials-") as name:
        folder = Path(name)
        path = write_run(folder)
        stems = {f"layout-{index}": layout for index, layout in enumerate(LAYOUTS)}
        for stem, layout in stems.items():
            config = load_config(path, LAYOUTS[layout])
            write_trial(folder, stem, Trial(config=config, role="policy", samples=SAMPLES, prompt_tokens=PROMPT, response_tokens=RESPONSE))
        best: dict[str, dict[str, float]] = {}
        for _ in range(ROUNDS):
            if (code := start_ranks(RANKS, [name, *stems], module="megappo.tune.rank")) != 0:
                return code
            for stem, layout in stems.items():
                measured = read_measured(folder, stem)
                assert measured is not None and measured.update_s is not None
                old = best.setdefault(layout, {"forward_s": float("inf"), "update_s": float("inf")})
                best[layout] = {"forward_s": min(old["forward_s"], measured.forward_s), "update_s": min(old["update_s"], measured.update_s)}
    record: dict[str, Any] = {
        "command": "python tests/tune/record_trials.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}",
        "profile": dump_hardware(hardware).split("\n"),
        "seconds": best,
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
