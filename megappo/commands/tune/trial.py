"""Work of every rank of a trial: build one role in one layout with random weights, and time its passes and updates.

It needs neither data nor weights of the run: times do not depend on values. Rank 0 writes the name of a trial at its begin, which
tells the launcher which one failed, and the result at its end. `trials.py` has the files' formats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megappo.algo.aggregation import loss_count, token_weights, tokens_per_sequence
from megappo.commands.tune.trials import RUNNING, Measured, Trial, read_trial, world_folder, write_outcome
from megappo.config.batch import text_arithmetic
from megappo.config.role_sections import TrainableConfig, is_critic, section_of
from megappo.config.run_sections import TimeoutsConfig
from megappo.data.packing import PackedBatch, pack
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend, EngineFactory
from megappo.engine.whole_batch import sequences_of_share
from megappo.parallel.device import select_device, start_alone, start_distributed
from megappo.runtime.world import is_rank
from megappo.telemetry.timers import wait_for_device
from megappo.trainer.build_roles import Role, build_role
from megappo.trainer.critics import BONUS, fields_of
from megappo.trainer.kernel_selection import choose_kernels
from megappo.trainer.ptx import with_texts
from megappo.trainer.roles import NLL_WEIGHT, Critic, Policy, RewardModel

# Short: ranks are never far apart without generation, scoring and saving, and a hang takes time from the job's other trials.
TIMEOUTS = TimeoutsConfig(start_s=300.0, pass_s=300.0, meeting_s=300.0)
TOTAL_UPDATES = 1000  # length of the learning rate's schedule, which takes no time to compute


def main(folder: Path, names: Sequence[str]) -> None:
    """Join the world that the launcher described, run every trial and leave."""
    trials, running = {name: read_trial(folder, name) for name in names}, world_folder(folder, names) / RUNNING
    run = next(iter(trials.values())).config.run
    device = select_device(run.device)
    if is_rank():
        start_distributed(device, TIMEOUTS)
    else:  # the only task of a step
        start_alone(device)
    for name, trial in trials.items():
        if dist.get_rank() == 0:
            running.write_text(name, encoding="utf-8")
        dist.barrier()  # no rank may fail in a trial before rank 0 has written its name
        choose_kernels(trial.config.kernels, device)
        measured = run_trial(trial, device)
        if dist.get_rank() == 0:
            write_outcome(folder, name, measured)
            running.unlink()
            print(f"  {trial.label}: {measured}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_trial(
    trial: Trial, device: torch.device, backend: EngineBackend = RoleEngines, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """Time one trial. Collective over the world. Wall-clock time is that of the slowest rank, processor time this rank's own."""
    fastest = partial(_fastest, clock=clock)
    section = section_of(trial.config, trial.role)
    engines = backend(trial.config.model, TIMEOUTS, device)
    passes = _build_passes(trial, engines)
    load_s = fastest(passes.nothing, trial.repeats) if "parameters" in section.offload else 0.0
    forward_s = fastest(passes.forward, trial.repeats)
    update_s, trip_s = None, 0.0
    if isinstance(section, TrainableConfig):
        # A phase of updates moves or reallocates what is offloaded.
        phase_s = fastest(passes.phase, trial.repeats) if section.offload else None
        with passes.train_mode():
            update_s = fastest(passes.update, trial.repeats)
        trip_s = max(0.0, phase_s - update_s) if phase_s is not None else 0.0
    del passes
    engines.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next trial starts with the whole device
    # min: noise may make the load alone take longer than load and pass.
    return Measured(forward_s=forward_s, update_s=update_s, load_s=min(load_s, forward_s), trip_s=trip_s)


def _fastest(work: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    """Seconds until the slowest rank is done, in the fastest of the repeats."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = clock()  # after the barrier: waiting for a late rank does not count
        work()
        wait_for_device()
        dist.barrier()
        times.append(clock() - start)
    return min(times[1:])  # the first pass allocates, compiles and connects


def _build_passes(trial: Trial, engines: EngineFactory) -> _Passes | _NoPasses:
    """Passes of the role, or none on a rank without it. Collective over the world."""
    section, algorithm = section_of(trial.config, trial.role), trial.config.algorithm
    algorithm = algorithm.model_copy(update={"target_kl": None})  # a skipped update would take no time
    config = trial.config.model_copy(update={"algorithm": algorithm})
    updates = TOTAL_UPDATES if isinstance(section, TrainableConfig) else None
    role = build_role(config, trial.role, engines, updates, random_weights=True)
    return _NoPasses() if role is None else _Passes(trial, role)


class _NoPasses:
    """A rank without the role: it waits at the barriers, so that every rank sees the time of the slowest."""

    def nothing(self) -> None: ...

    forward = phase = update = nothing

    def train_mode(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Passes:
    """The role's own passes (trainer/roles.py) over one batch of random tokens, of which each replica has its share."""

    def __init__(self, trial: Trial, role: Role) -> None:
        config = trial.config
        self.role = role
        whole = _random_batch(trial, role.engine.arch.vocab_size)
        self.batch = whole.select(sequences_of_share(role.engine, whole))
        mode, max_tokens = config.algorithm.loss_aggregation, config.rollout.max_response_tokens
        weights = token_weights(mode, self.batch["response_mask"], self.batch.cu_seqlens, max_tokens)
        sampled = tokens_per_sequence(whole["response_mask"], whole.cu_seqlens)
        self._count = max(loss_count(mode, sampled, max_tokens), 1.0)
        mini, texts = self.batch.with_fields({"weight": weights.weight}), text_arithmetic(config, trial.role)
        if texts.count:  # stage 6 adds them to each update; all have the longest length here
            drawn = _RandomTexts(texts.max_tokens, role.engine.arch.vocab_size)
            mini = with_texts(mini, drawn, range(texts.count), role.engine.shares, dist.get_rank(), self._count)
        self._mini = mini

    def nothing(self) -> None:
        """Run a pass without a batch: weights come from host memory and are freed, because they did not change."""
        with self.role.engine.eval_mode():
            pass

    def forward(self) -> None:
        if isinstance(self.role, Critic):
            self.role.values(self.batch)
        elif isinstance(self.role, RewardModel):
            self.role.scores(self.batch)
        else:
            self.role.logprobs(self.batch, want_entropy=isinstance(self.role, Policy))

    def train_mode(self) -> AbstractContextManager[None]:
        return self.role.engine.train_mode()

    def phase(self) -> None:
        """Run a phase of one update like stage 6 (trainer/updates.py): weights and the optimizer's state come and go back."""
        assert isinstance(self.role, (Policy, Critic))
        with self.train_mode():
            self.update()

    def update(self) -> None:
        assert isinstance(self.role, (Policy, Critic))
        # From the second update of a phase on, offloaded parts are on the device already.
        self.role.update(self._mini, self._count)


class _RandomTexts(NamedTuple):
    max_tokens: int
    vocab_size: int

    def lengths(self, indices: Sequence[int]) -> torch.Tensor:
        return torch.full((len(indices),), self.max_tokens)

    def packed(self, indices: Sequence[int]) -> PackedBatch:
        generator = torch.Generator().manual_seed(len(indices))
        return pack(torch.randint(0, self.vocab_size, (len(indices), self.max_tokens), generator=generator).tolist())


def _random_batch(trial: Trial, vocab_size: int) -> PackedBatch:
    """Random sequences of one length, with every field of responses that stages 4 to 6 read."""
    generator = torch.Generator().manual_seed(trial.config.run.seed)
    length = trial.prompt_tokens + trial.response_tokens
    tokens = torch.randint(0, vocab_size, (trial.samples, length), generator=generator)
    batch = pack(tokens.tolist())
    mask = torch.zeros(trial.samples, length, dtype=torch.bool)
    mask[:, trial.prompt_tokens :] = True
    own = fields_of(trial.role if is_critic(trial.role) else "critic")
    fields = {name: torch.randn(batch.num_tokens, generator=generator) * 0.1 for name in ("advantage", own.value, own.returns)}
    # Log-probs of a uniform policy, so that ratios are near 1.
    near = torch.full((batch.num_tokens,), -torch.log(torch.tensor(float(vocab_size))).item())
    fields |= dict.fromkeys(("logprob", "rollout_logprob", "ref_logprob"), near)
    fields |= dict.fromkeys((NLL_WEIGHT, BONUS), mask.flatten().float())
    return batch.with_fields({**fields, "response_mask": mask.flatten()})
