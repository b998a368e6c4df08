"""PPO runs on a device, as scenarios: the same function runs them on the CPU in a gloo world. Also with faults put into megappo."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from benchmarks.reliability.compare import MEASURED
from tests.trainer.small_run import set_keys, small_config

VOLATILE = (*MEASURED, "rollout/push_verified")


def config_of(folder: Path, name: str, steps: int, device: str, **overrides: Any) -> dict[str, Any]:
    """The small run with what this device can do: policy tp 2, critic pp 2, local layers, Megatron's rollout."""
    common: dict[str, Any] = {"rollout.engine": "megatron", "model.impl": "local", "kernels": "reference"}
    common["run.replica_check_every"] = 0  # it would end runs with a fault whose numbers are to be compared
    return without_evaluation(small_config(folder, name, steps=steps, **{**common, "run.device": device, **overrides}))


def without_evaluation(config: dict[str, Any]) -> dict[str, Any]:
    """`config` itself: held-out prompts are answered by passes that every step makes anyway."""
    config["data"].pop("eval")
    config["trainer"].pop("eval_every")
    return config


QUICKSTART = Path(__file__).parent.parent.parent / "configs/quickstart.yaml"


def quickstart_config(folder: Path, name: str, device: str) -> dict[str, Any]:
    """configs/quickstart.yaml with half its batch, from the random model that scripts/quickstart_model.py wrote into `folder`."""
    config = yaml.safe_load(QUICKSTART.read_text())
    changes = {
        "run.name": name,
        "run.output_dir": str(folder / "runs"),
        "run.device": device,
        "policy.model": str(folder / "model"),
        "data.train": str(folder / "data/train.jsonl"),
        "data.tokenizer": str(folder / "model/tokenizer.model"),
        "rollout.engine": "megatron",
        "kernels": "reference",
        # The model guesses: an end of the sequence is a score that it finds, a sum is not.
        "reward.parts": [{"name": "exact_match"}, {"name": "has_eos", "weight": 0.5}],
        "critic.warmup.steps": 1,
        **{f"{role}.optimizer.warmup_steps": 1 for role in ("policy", "critic")},
        # Full micro-batches, whose size the plan knows.
        "policy.micro_batch_tokens": 1024,
        "reference.micro_batch_tokens": 1024,
        "data.prompts_per_step": 64,  # still several micro-batches of each role in each update
        "trainer.steps": 2,
    }
    return without_evaluation(set_keys(config, changes))


def offloading() -> dict[str, Any]:
    return {f"{role}.offload": ["parameters", "gradients", "optimizer"] for role in ("policy", "critic")}


def train_once(rank: int, config: dict[str, Any], resume: bool, fault: str = "") -> list[int]:
    """Train on run.device; returns the bytes that this rank's device holds at the end of each step. fault: one of FAULTS."""
    from megappo.trainer.ppo import PPO

    held = []

    class WeighedPPO(PPO):
        def step(self) -> Any:
            result = super().step()
            gc.collect()
            held.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
            return result

    with FAULTS[fault]():
        _train(rank, config, WeighedPPO, resume)
    return held


def train_all(rank: int, configs: Sequence[dict[str, Any]]) -> None:
    for config in configs:
        train_once(rank, config, resume=False)


def train_by_phases(rank: int, config: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Phase of `megappo plan` -> (most bytes allocated in it, planned bytes at rest, planned bytes of its work) of this rank."""
    from megappo.commands.plan.phases import phases
    from megappo.trainer.ppo import PPO

    gc.collect()
    torch.cuda.empty_cache()
    before, peaks = torch.cuda.memory_allocated(), {}

    def watched(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only"):  # part of a phase that is watched as a whole
                return call(*args, **kwargs)
            torch.cuda.reset_peak_memory_stats()
            result = call(*args, **kwargs)
            peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated() - before)
            return result

        return run

    class WatchedPPO(PPO):
        def run(self) -> Any:
            policy, critic, reference = (self.training.roles.by_name[name] for name in ("policy", "critic", "reference"))
            for owner, method, phase in (
                (self.rollout.engine, "poll", "generate"),
                (policy, "logprobs", "log-probs"),
                (critic, "values", "values"),
                (reference, "logprobs", "reference log-probs"),
                (critic.engine, "forward_backward", "critic update"),
                (critic.engine, "optimizer_step", "critic optimizer step"),
                (policy.engine, "forward_backward", "policy update"),
                (policy.engine, "optimizer_step", "policy optimizer step"),
                (self.rollout, "push_weights", "push weights"),
            ):
                setattr(owner, method, watched(phase, getattr(owner, method)))
            return super().run()

        def step(self) -> Any:
            result = super().step()
            peaks["rest"] = max(peaks.get("rest", 0), torch.cuda.memory_allocated() - before)
            return result

    plan = _train(rank, config, WatchedPPO)
    planned = {phase.name: (phase.rest - plan.reserve, phase.work) for phase in phases(plan, rank)}
    planned["rest"] = (plan.trainer_at_rest(rank) - plan.reserve, 0)
    return {phase: (peak, *planned[phase]) for phase, peak in peaks.items()}


STAGES = {"add_logprobs": 4, "add_advantages": 5, "begin_updates": 6, "update_critics": 6, "update_policy": 6}


def train_and_count_waits(rank: int, config: dict[str, Any]) -> tuple[dict[int, dict[str, int]], dict[str, str], list[str]]:
    """(stage of the last step -> what makes the host wait for the device -> how often, and the copies between both; op of stage 5
    -> implementation that ran; lines of the log)."""
    from host_cuda import runtime

    from megappo.ops import dispatch
    from megappo.telemetry.runlog import RunLog
    from megappo.trainer.ppo import PPO

    found: dict[int, Counter[str]] = {}
    ran: dict[str, str] = {}
    notes: list[str] = []

    def watch(op: str, implementation: str, call: Callable[[], Any]) -> Any:
        ran[op] = implementation
        return call()

    def in_stage(stage: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, waits = runtime.counters(rank), found.setdefault(stage, Counter())
            with runtime.waits_noticed(lambda: waits.update([_place()])), dispatch.watched(watch) if stage == 5 else nullcontext():
                result = call(*args, **kwargs)
            waits.update({name: runtime.counters(rank)[name] - before[name] for name in ("copies", "copied_bytes")})
            return result

        return run

    class WatchedPPO(PPO):
        def step(self) -> Any:
            found.clear()
            return super().step()

        def run(self) -> Any:
            for name, stage in STAGES.items():
                setattr(self.training, name, in_stage(stage, getattr(self.training, name)))
            return super().run()

    with mock.patch.object(RunLog, "note", lambda log, text: notes.append(text)):
        _train(rank, config, WatchedPPO)
    return {stage: dict(waits) for stage, waits in found.items()}, ran, notes


def _place() -> str:
    """The innermost function of megappo that runs in this thread."""
    frame = sys._getframe()
    while frame is not None:
        folder, _, path = frame.f_code.co_filename.partition("/megappo/")
        if path and not folder.endswith("site-packages"):
            return f"{path} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def _train(rank: int, config: dict[str, Any], loop: type, resume: bool = False) -> Any:
    """With `loop` in place of megappo's PPO; the run's plan."""
    import torch.distributed as dist

    from megappo.commands.plan.run import plan_run
    from megappo.config.loading import load_config
    from megappo.trainer import assembly, main

    path = Path(config["run"]["output_dir"]).parent / f"{config['run']['name']}.{rank}.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_config(str(path), [])
    prepared = plan_run(loaded, dist.get_world_size(), config["run"]["device"], resume=resume)
    with mock.patch.object(assembly, "PPO", loop):
        main.train(loaded, prepared.data, resume=resume)
    return prepared.plan


def metrics_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each step, what does not depend on the clock."""
    path = Path(config["run"]["output_dir"]) / config["run"]["name"] / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(VOLATILE)} for row in rows if "critic/loss" in row]


# ----------------------------------------------------------------------------------------------------------------- faults


@contextmanager
def _outputs_are_kept() -> Iterator[None]:
    from megappo.engine.megatron import MegatronEngine

    compute_loss, kept = MegatronEngine._compute_loss, []

    def keeping(engine: MegatronEngine, loss_fn: Any, denominator: float, outputs: list, micro: Any, raw: torch.Tensor) -> Any:
        kept.append(raw.detach())
        return compute_loss(engine, loss_fn, denominator, outputs, micro, raw)

    with mock.patch.object(MegatronEngine, "_compute_loss", keeping):
        yield


@contextmanager
def _no_sum_over_shards() -> Iterator[None]:
    from megappo.ops.linear_logprob import LinearCall

    with mock.patch.object(LinearCall, "sum_over_shards", lambda call, dhidden: dhidden):
        yield


@contextmanager
def _host_counts_as_current() -> Iterator[None]:
    from megappo.engine.offload import StorageOffload

    restore = StorageOffload.restore
    with mock.patch.object(StorageOffload, "restore", lambda parked, *, to_change=True: restore(parked, to_change=False)):
        yield


@contextmanager
def _copies_of_experience_are_late() -> Iterator[None]:
    from megappo.trainer.experience.experience import Experience

    to = Experience.to

    def on_a_stream_of_its_own(experience: Experience, device: torch.device) -> Experience:
        with torch.cuda.stream(torch.cuda.Stream()):  # which nothing waits for
            return to(experience, device)

    with mock.patch.object(Experience, "to", on_a_stream_of_its_own):
        yield


@contextmanager
def _no_bias_correction() -> Iterator[None]:
    from host_cuda import fused_optimizers

    adam = fused_optimizers.multi_tensor_adam

    def biased(*args: Any) -> None:
        *others, bias_correction, weight_decay = args
        adam(*others, 0, weight_decay)

    with mock.patch.object(fused_optimizers, "multi_tensor_adam", biased):
        yield


FAULTS: Mapping[str, Callable[[], AbstractContextManager]] = {
    "": nullcontext,
    "outputs of passes are kept": _outputs_are_kept,
    "no all-reduce of the gradient of hidden states": _no_sum_over_shards,
    "offload takes its host copy for current": _host_counts_as_current,
    "Adam without bias correction": _no_bias_correction,
    "nothing waits for the copies of experience": _copies_of_experience_are_late,
}
