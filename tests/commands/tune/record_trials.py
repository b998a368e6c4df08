"""Measures the layouts that `test_ranking.py` ranks, on two ranks of this machine, and this machine with `benchmarks/probe.py`.

    python tests/commands/tune/record_trials.py

writes `tests/commands/tune/trials_cpu.json`, or adds to it where it is of this machine. Not part of the suite: it takes minutes,
and wants
a machine with nothing else to do. Every layout is measured in rounds, each in a world of its own, and the fastest of all rounds
counts, of the probe too: what disturbs a round makes it slower, never faster.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.probe import probe
from megappo.commands.tune.trials import Measured, Trial, outcome_file, ranks_here, read_outcome, run_trials, write_trial
from megappo.config.loading import load_config

TARGET = Path(__file__).with_name("trials_cpu.json")
RANKS, ROUNDS = 2, 1
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
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
        "policy.parallel.tp=2",
        "policy.parallel.sequence_parallel=true",
        "policy.micro_batch_tokens=1024",
        "policy.recompute=full",
    ],
    "cp2": ["policy.parallel.cp=2", "policy.micro_batch_tokens=1024"],
    "pp2, 1 micro-batch": ["policy.parallel.pp=2", "policy.micro_batch_tokens=1024"],
    "pp2, 2 micro-batches": ["policy.parallel.pp=2", "policy.micro_batch_tokens=512"],
    "pp2, 8 micro-batches": ["policy.parallel.pp=2", "policy.micro_batch_tokens=128"],
    "pp2 vpp2, 8 micro-batches": ["policy.parallel.pp=2", "policy.parallel.vpp=2", "policy.micro_batch_tokens=128"],
    "pp2 vpp4, 8 micro-batches": ["policy.parallel.pp=2", "policy.parallel.vpp=4", "policy.micro_batch_tokens=128"],
    "pp2 of 6 and 2 layers, 8 micro-batches": [
        "policy.parallel.pp=2",
        "policy.parallel.layers_per_stage=[6,2]",
        "policy.micro_batch_tokens=128",
    ],
}


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
    machine = f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    old = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    record = old if old.get("machine") == machine else {"rounds": 0, "profile": {}, "seconds": {}}
    with tempfile.TemporaryDirectory(prefix="megappo-trials-") as name:
        folder = Path(name)
        path = write_run(folder)
        stems = {f"layout-{index}": layout for index, layout in enumerate(LAYOUTS)}
        for stem, layout in stems.items():
            config = load_config(path, LAYOUTS[layout])
            trial = Trial(
                config=config, role="policy", label=layout, samples=SAMPLES, prompt_tokens=PROMPT, response_tokens=RESPONSE
            )
            write_trial(folder, stem, trial)
        for _ in range(ROUNDS):
            record["profile"] = fastest_profile(record["profile"], asdict(probe()))
            if (code := run_trials(folder, list(stems), ranks_here(RANKS))) != 0:
                return code
            for stem, layout in stems.items():
                measured = read_outcome(folder, stem)
                assert isinstance(measured, Measured), measured
                outcome_file(folder, stem).unlink()  # for the next round
                record["seconds"][layout] = fastest(record["seconds"].get(layout, {}), measured.model_dump())
            record["rounds"] += 1
            facts = {"command": "python tests/commands/tune/record_trials.py", "machine": machine, **record}
            TARGET.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def fastest(known: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
    return {name: min(value, known.get(name, value)) for name, value in seconds.items()}


def fastest_profile(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The highest rates and the shortest times."""
    merged = dict(found)
    for name in known:
        if name.endswith(("_tflops", "_tb_s", "_gb_s")):
            merged[name] = max(known[name], found[name])
        elif name.endswith("_us"):
            merged[name] = min(known[name], found[name])
    return merged


if __name__ == "__main__":
    sys.exit(main())
