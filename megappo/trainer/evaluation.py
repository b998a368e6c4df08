"""Evaluation: responses to held-out prompts, scored and reduced to mean@N, pass@K and maj@N. `megappo eval` runs the same code.
It does not disturb training: seeds depend only on the run's seed, the set, the prompt and the sample, and no state is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megappo.algo.summaries import majority, masked_moments, pass_at_k, standard_error
from megappo.config import evaluations as names
from megappo.config.reward_sections import EvaluationConfig
from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import Engine
from megappo.parallel.consensus import on_every_rank
from megappo.parallel.totals import place_in_world, totals
from megappo.rewards.compose import Scored
from megappo.rewards.scorer import Scorer
from megappo.rewards.votes import Answers, answers_of
from megappo.rollout.generation import generate
from megappo.rollout.half import EVALUATION
from megappo.rollout.types import RolloutEngine, SamplingParams
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.timers import StageTimers
from megappo.trainer.average import PolicyAverage
from megappo.trainer.experience.collect import collect, evaluation_requests, share_pictures
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.table import Owners
from megappo.trainer.left_out import LeftOut, left_out_of
from megappo.trainer.sampler_check import average_version
from megappo.trainer.scoring import begin_rewards, score_responses
from megappo.trainer.step_totals import Totals, Turns, moments_of_turns

# The catalogue's names of the set of `data.eval`.
_OF_DEFAULT = {
    (names.DEFAULT, names.SCORE): Metric.EVAL_SCORE.value,
    (names.DEFAULT, names.LENGTH): Metric.EVAL_LENGTH.value,
    (names.DEFAULT, names.TRUNCATED): Metric.EVAL_TRUNCATED.value,
}


@dataclass(frozen=True)
class Evaluation:
    """Result of one set. name: "" for `data.eval`. figures: figure -> value (`config.evaluations`), in the order shown. parts:
    means of the reward's parts. turns: None without an environment. is_whole: enough responses have a score to compare the figures
    with those of another step (`reward.max_without_verdict`)."""

    name: str
    num_prompts: int
    n: int
    figures: Mapping[str, float]
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: Turns | None = None
    is_whole: bool = True

    def all_figures(self) -> dict[str, float]:
        """Return figure -> value, with the reward's parts and the turns."""
        if self.turns is None:
            return {**self.figures, **self.parts}
        *of_turns, _ = self.turns
        return {**self.figures, **self.parts, **dict(zip(names.TURNS, of_turns, strict=True))}

    def metrics(self) -> dict[str, float]:
        """Return metric -> value of all figures and of the environment's answer times."""
        times = {} if self.turns is None else self.turns.answers
        named = {one: names.metric_name(self.name, one) for one in (*self.all_figures(), *times)}
        figures = {_OF_DEFAULT.get((self.name, one), named[one]): value for one, value in self.all_figures().items()}
        return figures | {Metric.ENVIRONMENT_OF_SET.of(named[one]): value for one, value in times.items()}

    def describe(self) -> str:
        """Return one line for the console."""
        f = dict(self.figures)
        length, cut = f.pop(names.LENGTH), f.pop(names.TRUNCATED)
        unscored = {figure: f.pop(figure) for figure in list(f) if figure.startswith(names.NO_VERDICT)}
        shown = ", ".join(f"{figure} {value:.3f}" for figure, value in f.items())
        parts = "".join(f", {name} {value:.3f}" for name, value in self.parts.items())
        turns = "" if self.turns is None else f", {self.turns.mean:.2f} turns"
        if self.turns is not None and self.turns.late:
            turns += f", {self.turns.late:.1%} ended by a late answer"
        counted = "".join(f", {value:.0f} without a score ({figure.rpartition('/')[2]})" for figure, value in unscored.items())
        samples = f" x {self.n} samples" if self.n > 1 else ""
        what = f"{shown} on {self.num_prompts} held-out prompts{samples}{parts}, mean length {length:.1f} tokens, {cut:.1%} cut"
        return f"{self.name + ': ' if self.name else ''}{what}{turns}{counted}"


@dataclass(frozen=True)
class Evaluator:
    """One set, ready to run: its prompts, sampling and scorer."""

    name: str
    settings: EvaluationConfig
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    scorer: Scorer
    votes: str | None
    seed: int
    max_without_verdict: float = 1.0

    def is_due(self, step: int, total_steps: int) -> bool:
        """Return True if the weights after `step` are evaluated; step 0 is before training."""
        every = self.settings.every or 0
        if step == 0:
            return bool(self.settings.before)
        return every > 0 and (step % every == 0 or step == total_steps)

    def run(self, rollout: RolloutEngine, tokenizer: Tokenizer) -> Evaluation:
        """Evaluate the weights in the rollout engine; the result is the same on every rank. Collective over the world."""
        n = self.settings.n
        requests = evaluation_requests(self.prompts, n, self.seed, self.name)

        def prompt_of(number: int) -> Prompt:
            return self.prompts[number // n]

        begin = begin_rewards(prompt_of, tokenizer, self.scorer, self.sampling.stop)
        responses = generate(rollout, requests, self.sampling, begin, None, f"{EVALUATION}{self.name}")
        share_pictures(rollout, len(requests))
        experience = collect(requests, [replace(one, contexts=()) for one in responses])  # scored by its last sequence
        scored = score_responses(experience, prompt_of, tokenizer, self.scorer, self.sampling.stop)
        table, parts, left_out = experience.table, _part_means(scored), left_out_of(experience, scored, compares_groups=False)
        figures = {
            **self._scores(experience, scored, left_out),
            names.LENGTH: float(table.sampled.sum()) / table.num_samples,
            names.TRUNCATED: float(table.truncated.sum()) / table.num_samples,
        }
        played = moments_of_turns([one.played for one in responses if one.played is not None])
        is_whole = left_out is None or not left_out.exceeds(self.max_without_verdict)
        return Evaluation(self.name, len(self.prompts), n, figures, parts, Turns.of(Totals(played)), is_whole)

    def _scores(self, experience: Experience, scored: Scored, left_out: LeftOut | None) -> dict[str, float]:
        """Return the figures over the responses that have a score, NaN if none has, and the counts of the others by reason."""
        scores = experience.column(torch.tensor(scored.total, dtype=torch.float64)).tolist()
        counts = {} if left_out is None else left_out.counts
        unscored = {f"{names.NO_VERDICT}/{reason}": float(count) for reason, count in sorted(counts.items())}
        mean = _mean([score for score in scores if not math.isnan(score)])
        if not self.name:
            return {names.SCORE: mean, **unscored}
        n = self.settings.n
        groups = [[score for score in one if not math.isnan(score)] for one in _grouped(scores, n)]
        right = [[score >= self.settings.correct_score for score in one] for one in groups]
        figures = {names.mean_at(n): mean, names.STDERR: standard_error([_mean(one) for one in groups if one])}
        for k in self.settings.pass_at or ():  # of a prompt with fewer scores than k it cannot be estimated
            figures[names.pass_at(k)] = _mean([pass_at_k(len(one), sum(one), k) for one in right if len(one) >= k])
        if self.votes is not None:
            found = _majorities(self.votes, experience, scored.texts, _grouped(scores, n), self.settings.correct_score)
            figures[names.majority_at(n)] = _mean(found)
        return figures | unscored


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _part_means(scored: Scored) -> dict[str, float]:
    """Return name -> mean over all samples that the part scored; a part that scored none is left out. Collective over the world."""
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in scored.parts.items()}
    sums = totals({name: masked_moments(x, ~x.isnan())[0] for name, x in columns.items()})
    return {name: float(moments[1] / moments[0]) for name, moments in sums.items() if moments[0]}


def _grouped(values: Sequence, n: int) -> list:
    return [values[start : start + n] for start in range(0, len(values), n)]


def _majorities(
    rule: str, experience: Experience, texts: Sequence[str], scores: Sequence[Sequence[float]], correct_score: float
) -> list[float]:
    """Return `majority` of each prompt with a score. scores: per prompt, of its n samples, NaN without one; such a sample has no
    vote. A prompt whose votes cannot be counted has no majority. Collective over the world."""
    n, (rank, world_size) = len(scores[0]), place_in_world()
    # The rule compares all answers of a prompt, so its texts go to one rank, which counts its votes.
    owners = Owners.of_prompts(experience.table, n, world_size)
    groups = _grouped(experience.texts(texts, owners), n)
    mine = (owners.numbers(rank)[::n] // n).tolist()

    def of_prompt(prompt: int, answers: Answers | None) -> float:
        if answers is None:
            return math.nan
        scored = [(score, one) for score, one in zip(scores[prompt], answers, strict=True) if not math.isnan(score)]
        return majority([score >= correct_score for score, _ in scored], [one for _, one in scored]) if scored else math.nan

    def count() -> dict[int, float]:
        return {prompt: of_prompt(prompt, answers) for prompt, answers in zip(mine, answers_of(rule, groups), strict=True)}

    found = on_every_rank(f"counting the votes of {rule}", count)
    by_prompt = {prompt: value for part in found for prompt, value in part.items()}
    return [by_prompt[prompt] for prompt in range(len(scores)) if not math.isnan(by_prompt[prompt])]


class Evaluations:
    """Runs the evaluation sets when they are due. weights: step -> context with other weights than the sampler's."""

    def __init__(
        self,
        evaluators: Sequence[Evaluator],
        rollout: RolloutEngine,
        tokenizer: Tokenizer,
        log: RunLog,
        total_steps: int,
        weights: Callable[[int], AbstractContextManager] = nullcontext,
    ) -> None:
        self._evaluators, self._total_steps, self._weights = evaluators, total_steps, weights
        self._rollout, self._tokenizer, self._log = rollout, tokenizer, log

    def due(self, step: int) -> list[str]:
        """Return the names of the sets that are due after `step`, in order."""
        return [one.name for one in self._evaluators if one.is_due(step, self._total_steps)]

    def of_push(self, step: int) -> list[str]:
        """Return those that are due after `step` and drawn by the weights that this step has pushed."""
        return self.due(step) if self._weights is nullcontext else []

    def after(self, step: int, timers: StageTimers) -> list[Evaluation]:
        """Evaluate the sets due after `step` (0: before training), log and return their results. Collective over the world."""
        due = self.due(step)
        results: list[Evaluation] = []
        with self._weights(step) if due else nullcontext():
            for one in filter(lambda one: one.name in due, self._evaluators):
                # A stage for each set: limits are learned from a stage's times, and a large set is no hang of a small one.
                with timers.stage(f"evaluate_{one.name}" if one.name else "evaluate"):
                    results.append(one.run(self._rollout, self._tokenizer))
                self._log.evaluation(results[-1], step)
        return results

    def close(self) -> None:
        for one in self._evaluators:
            one.scorer.close()


@contextmanager
def average_in_sampler(average: PolicyAverage | None, push_weights: Callable[[int], Any], step: int) -> Iterator[None]:
    """Hold the policy's average after `step` in the sampler, then push the policy's weights again. Collective over the world.
    average: None on ranks without the policy."""
    with nullcontext() if average is None else average.in_place():
        push_weights(average_version(step))
        yield
    push_weights(step)


def push_policy(rollout: RolloutEngine, policy: Engine | None, version: int) -> dict[str, float]:
    """Push the policy's current weights, which must be resident, into the sampler; return figures of the push. Collective over the
    world. policy: None on ranks without it."""
    with nullcontext() if policy is None else policy.eval_mode():
        return rollout.push_weights(version)


@contextmanager
def policy_in_sampler(rollout: RolloutEngine, policy: Engine | None, step: int) -> Iterator[None]:
    """Hold the policy's weights after `step` in the sampler, which then sleeps again. Collective over the world. policy: as of
    `push_policy`."""
    push_policy(rollout, policy, step)
    yield
    rollout.sleep()


def metrics_of(results: Sequence[Evaluation]) -> dict[str, float]:
    return {name: value for result in results for name, value in result.metrics().items()}
