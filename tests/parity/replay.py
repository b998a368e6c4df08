"""PPO steps from the same recorded rollouts: parameters after twenty across layouts, and curves against a golden file.

`python -m tests.parity.replay` writes the golden file anew; a change of it needs a reason in the commit.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.commands.verify.recording import record_rollouts
from megappo.data.packing import PackedBatch
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import SamplingParams
from megappo.trainer.experience.collect import make_requests, pack_experience
from tests.parity.matrix import (
    SEQUENCES,
    SP,
    VARIANTS,
    VOCABULARY,
    Case,
    config_of,
    measure_case,
    roles_of,
    title,
    write_models,
)
from tests.rollout.responses import generate_all
from tests.worlds import spawn_world

STEPS = 20
GOLDEN = Path(__file__).with_name("golden.json")
# tp with sequence parallel is that of the experts' model, and of the adapters' steps (lora.py); FSDP2's layouts are those of
# replay_fsdp2.py. Policy and critic meet in the experience alone, so each takes a layout of its own.
REPLAYED: dict[str, dict[int, list[Case]]] = {
    "llama": {1: [{}], 2: [({"cp": 2}, {"pp": 2, "vpp": 2})]},
    "qwen3_moe": {1: [{}], 2: [{**SP, "ep": 2}]},
}
# Whole mini-batches take half of the time; that their split changes nothing is the matrix's to show.
REPLAY = {
    "policy__optimizer__distributed": True,
    "critic__optimizer__distributed": True,
    "algorithm__ppo_epochs": 2,
    **VARIANTS["whole batch"],
}
Curves = dict[str, list[float]]


def replay_world(rank: int, folders: Mapping[str, str], steps: int = STEPS) -> dict[str, dict[str, Any]]:
    """model -> title -> Measured over so many steps, with the distributed optimizer. Of rank 0 alone."""
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    size = dist.get_world_size()
    rollouts = record_rollouts(steps, sequences=SEQUENCES, vocab_size=VOCABULARY)
    measured: dict[str, dict[str, Any]] = {model: {} for model in folders}
    for model, folder in folders.items():
        for case in REPLAYED[model].get(size, []):
            with roles_of(case) as roles:
                measured[model][title(case, size)] = measure_case(folder, roles, REPLAY, rollouts, gradients=False)
    return measured if rank == 0 else {}


@dataclass(frozen=True)
class FirstStep:
    """kl: for two steps (largest |log pi - log pi_ref|, mean k3 estimate) on sampled tokens, the reference being the first policy.
    ratio: largest probability ratio of every mini-batch of the first step.
    """

    kl: list[tuple[float, float]]
    ratio: list[float]


def on_policy_world(rank: int, folders: Mapping[str, str], cases: Mapping[str, list[Case]]) -> dict[str, dict[str, FirstStep]]:
    """model -> title -> two steps on what the first policy itself writes, as in a run; tokens drawn at random have log-probs near
    -10, where fp32 resolves ratios to no better than 1e-6.
    """
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    return {
        model: {title(case, dist.get_world_size()): first_step(folders[model], case) for case in cases[model]} for model in cases
    }


def first_step(folder: str, case: Case) -> FirstStep:
    """Collective."""
    changes = {"reference__model": str(Path(folder) / "policy")}
    with roles_of(case) as roles:
        rollouts = [written_by_the_policy(folder, roles["policy"])] * 2
        measured = measure_case(folder, roles, changes, rollouts, gradients=False, parameters=False)
    kl = []
    for rollout, logprob, ref in zip(
        rollouts, measured["policy"].values["logprobs"], measured["reference"].values["logprobs"], strict=True
    ):
        d = (logprob - ref)[rollout["response_mask"]]
        kl.append((float(d.abs().max()), float((torch.expm1(-d) + d).mean())))
    return FirstStep(kl, measured["policy"].metrics["ratio_max"][0].tolist())


def written_by_the_policy(folder: str, groups: Any) -> PackedBatch:
    """Responses to recorded prompts, sampled by the Megatron engine as a run would, with random scores."""
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch

    config = config_of(Path(folder))
    path = config.policy.model
    engine = build_megatron(EngineSpec("policy", path, read_arch(path), config.policy), groups, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCABULARY, (4,), generator=generator).tolist() for _ in range(SEQUENCES)]
    requests = make_requests(prompts, samples_per_prompt=1, run_seed=0, step=1)
    responses = generate_all(MegatronRollout(engine), requests, SamplingParams(10, config.rollout.sampling.temperature))
    return pack_experience(requests, responses).with_fields(sequence_fields={"score": torch.randn(SEQUENCES, generator=generator)})


def curves(measured: Any) -> Curves:
    """Metrics that a user watches, one number for each step."""
    out: Curves = {}
    for role in ("policy", "critic"):
        out[f"{role}/loss"] = [float(step.mean()) for step in measured[role].values["loss"]]
        out[f"{role}/grad_norm"] = [float(step.mean()) for step in measured[role].values["gradient norm"]]
    out["policy/approx_kl"] = [float(step.mean()) for step in measured["policy"].metrics["approx_kl_sum"]]
    out["reward/shaped_sum"] = [float(step.sum()) for step in measured["experience"].values["rewards"]]
    out["critic/value_mean"] = [float(step.mean()) for step in measured["critic"].values["values"]]
    return out


def distance_to_golden(steps: int) -> float:
    """Largest difference of the curves of the first steps in all layouts of two ranks to the golden file's, relative where their
    numbers are larger than 1.
    """
    with tempfile.TemporaryDirectory() as folder:
        folders = {model: str(Path(folder, model)) for model in REPLAYED}
        for model in folders:
            write_models(Path(folders[model]), model)
        found = spawn_world(replay_world, 2, folders, steps)[0]
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return max(
        abs(a - b) / max(1.0, abs(b))
        for model, layouts in found.items()
        for measured in layouts.values()
        for name, values in curves(measured).items()
        for a, b in zip(values, golden[model][name][:steps], strict=True)
    )


def write_golden() -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = {model: str(Path(folder, model)) for model in REPLAYED}
        for model in folders:
            write_models(Path(folders[model]), model)
        (alone,) = spawn_world(replay_world, 1, folders)
    golden = {
        model: {name: [float(f"{value:.7g}") for value in values] for name, values in curves(found["tp1 pp1 dp1"]).items()}
        for model, found in alone.items()
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_golden()
