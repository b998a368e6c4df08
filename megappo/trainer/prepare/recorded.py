"""Recorded trajectories as the data of a run that pretrains critics: read once, checked against the configuration, packed. The
format is that of `megappo/commands/trajectories`; `trainer/recorded.py` trains on them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from megappo.config.batch import step_arithmetic
from megappo.config.errors import ConfigError, problem
from megappo.config.schema import TrainConfig
from megappo.data.loader import PromptLoader
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.data.token_texts import token_texts
from megappo.data.tokenizers import Tokenizer
from megappo.models.arch import ModelArch
from megappo.telemetry.tables import figures
from megappo.telemetry.trajectories.read import Trajectory, read_run
from megappo.trainer.prepare.data import EvaluationData, tokenizer_of

KEY = "critic.warmup.trajectories"
READ_AGAIN = 64  # trajectories whose texts are decoded once more: another tokenizer differs in nearly every one


@dataclass(frozen=True)
class RecordedSamples:
    """Trajectories of the run at `path`, in the order of its steps. batch: all of them, with response_mask, token_reward [T] fp32
    (0 outside the mask), truncated, and score [B] fp32. steps: first and last step of that run. sha256: of the data trained on."""

    path: str
    batch: PackedBatch
    steps: tuple[int, int]
    sha256: str

    def __len__(self) -> int:
        return self.batch.num_sequences

    def summary(self) -> str:
        first, last = self.steps
        of_steps = f"step {first}" if first == last else f"steps {first} to {last}"
        sampled = int(self.batch["response_mask"].sum())
        return f"{len(self):,} trajectories of {self.path} ({of_steps}), {sampled:,} sampled tokens"


@dataclass(frozen=True, kw_only=True)
class RecordedData(EvaluationData):
    """Data of a run that reads trajectories. Fields as in `data.RunData`; nothing is sampled or scored."""

    samples: RecordedSamples
    loader: PromptLoader
    total_steps: int
    ptx: None = None


def load_recorded_data(config: TrainConfig, archs: Mapping[str, ModelArch]) -> RecordedData:
    """Read the trajectories that `critic.warmup.trajectories` names. archs: of the critics.
    ConfigError, one line: no or broken records, missing token rewards, token ids of another tokenizer, a trajectory longer than the
    sequences of this configuration, fewer trajectories than a step takes."""
    path, step = str(config.critic.warmup_trajectories), step_arithmetic(config)
    assert config.trainer.steps is not None, "`layout_checks.reads_trajectories`"
    try:
        sampled = read_run(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{KEY}: {error}") from None
    tokenizer = tokenizer_of(config)
    for fault in _faults(sampled.trajectories, tokenizer, archs, step.max_sequence_tokens):
        raise ConfigError(problem(KEY, path, fault))
    if (count := len(sampled.trajectories)) < step.samples:
        each = f"data.prompts_per_step {step.prompts} x rollout.samples_per_prompt {config.rollout.samples_per_prompt}"
        fix = f"holds {count:,} trajectories, and a step takes {step.samples:,} ({each}); lower one of the two, or record more"
        raise ConfigError(problem(KEY, path, fix))
    notes = [f"{KEY}: {note}" for note in sampled.notes]
    loader = PromptLoader(count, step.samples, config.data.shuffle, config.run.seed)
    samples = _packed(path, sampled.trajectories)
    return RecordedData(tokenizer=tokenizer, notes=tuple(notes), samples=samples, loader=loader, total_steps=config.trainer.steps)


def _faults(
    trajectories: Sequence[Trajectory], tokenizer: Tokenizer, archs: Mapping[str, ModelArch], longest: int
) -> Iterator[str]:
    role, vocabulary = min(((role, arch.vocab_size) for role, arch in archs.items()), key=lambda one: one[1])
    for one in trajectories:
        name, tokens = f"sample {one.sample} of step {one.step}", len(one.prompt_tokens) + len(one.tokens)
        if "reward" not in one.fields:
            yield f"{name} has no rewards of its tokens (reward), from which the returns follow; record with this megappo"
        elif not numpy.isfinite(one.fields["reward"][one.mask]).all():
            yield f"{name} has a reward that is not finite; remove that record"
        if tokens > longest:
            fix = f"raise rollout.max_response_tokens by {tokens - longest}, or take both keys of the run that wrote it"
            yield f"{name} has {tokens} tokens, and data.max_prompt_tokens + rollout.max_response_tokens is {longest}; {fix}"
        if (last := max((*one.prompt_tokens, *one.tokens.tolist()), default=0)) >= vocabulary:
            yield f"{name} has the token {last}, and the {role} knows {vocabulary}; use a model with the tokenizer of that run"
    for one in trajectories[:: -(-len(trajectories) // READ_AGAIN)]:
        ids = [*one.prompt_tokens, *one.tokens.tolist()]
        if max(ids, default=0) >= tokenizer.vocab_size:
            continue
        for number, (now, then) in enumerate(zip(token_texts(ids, tokenizer), [*one.prompt_texts, *one.texts])):
            if now != then:
                what = f"token {number} (id {ids[number]}) of sample {one.sample} of step {one.step}"
                yield f"{what} was {then!r}, and data.tokenizer reads {now!r}; use the tokenizer of the run that wrote it"


def _packed(path: str, trajectories: Sequence[Trajectory]) -> RecordedSamples:
    lengths = torch.tensor([len(one.prompt_tokens) + len(one.tokens) for one in trajectories])
    tokens, masks, rewards = [], [], []
    for one in trajectories:
        prompt = len(one.prompt_tokens)
        tokens += [numpy.array(one.prompt_tokens, numpy.int64), one.tokens]
        masks += [numpy.zeros(prompt, bool), one.mask]
        rewards += [numpy.zeros(prompt), numpy.where(one.mask, one.fields["reward"], 0.0)]
    fields = {
        "response_mask": torch.from_numpy(numpy.concatenate(masks)),
        "token_reward": torch.from_numpy(numpy.concatenate(rewards).astype(numpy.float32)),
    }
    of_sequences = {
        "truncated": torch.tensor([one.is_truncated for one in trajectories]),
        "score": torch.tensor([one.score for one in trajectories], dtype=torch.float32),
    }
    batch = PackedBatch(torch.from_numpy(numpy.concatenate(tokens)), cu_seqlens_of(lengths), fields, of_sequences)
    digest = hashlib.sha256()
    for column in (batch.tokens, batch.cu_seqlens, *fields.values(), of_sequences["truncated"]):
        digest.update(column.numpy().tobytes())
    steps = min(one.step for one in trajectories), max(one.step for one in trajectories)
    return RecordedSamples(path, batch, steps, digest.hexdigest())


def describe(data: RecordedData, samples_per_step: int) -> str:
    """Describe the trajectories and how often the run visits each, in one line."""
    visits = data.total_steps * samples_per_step / len(data.samples)
    return f"{data.samples.summary()}; {data.total_steps:,} steps of {samples_per_step:,} = {figures(visits)} passes"
