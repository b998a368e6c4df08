"""Evaluation: responses to held-out prompts, scored and reduced to mean@N, pass@K and maj@N.

Nothing drawn here touches the training: seeds are a function of the run's seed, the set, the prompt and the sample, and no state
is kept. `megappo eval` runs the same code without a training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from megappo.algo.evaluation import majority, pass_at_k, standard_error
from megappo.config import evaluations as names
from megappo.config.reward_sections import EvaluationConfig
from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.parallel.consensus import on_every_rank
from megappo.prepare.evaluations import EvaluationSet
from megappo.rewards.compose import Scored
from megappo.rewards.scorer import Scorer
from megappo.rewards.votes import answers_of
from megappo.rollout.generation import gather_responses, generate
from megappo.rollout.types import RolloutEngine, SamplingParams
from megappo.telemetry.metrics import Metric
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.timers import StageTimers
from megappo.trainer.experience import evaluation_requests
from megappo.trainer.scoring import score_responses

# The catalogue's names of the set of `data.eval`.
_OF_DEFAULT = {
    (names.DEFAULT, names.SCORE): Metric.EVAL_SCORE.value,
    (names.DEFAULT, names.LENGTH): Metric.EVAL_LENGTH.value,
    (names.DEFAULT, names.TRUNCATED): Metric.EVAL_TRUNCATED.value,
}


@dataclass(frozen=True)
class Evaluation:
    """Result of one set: figure -> value (`config.evaluations`), in the order in which they are shown. name: "" of `data.eval`."""

    name: str
    num_prompts: int
    n: int
    figures: Mapping[str, float]
    parts: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Metric -> value, the reward's parts among them."""
        figures = {**self.figures, **self.parts}
        return {_OF_DEFAULT.get((self.name, one), names.metric_name(self.name, one)): value for one, value in figures.items()}

    def describe(self) -> str:
        """One line for the console."""
        f = dict(self.figures)
        length, cut = f.pop(names.LENGTH), f.pop(names.TRUNCATED)
        unscored = {figure: value for figure in (names.UNDECIDED, names.UNUSABLE) if (value := f.pop(figure, 0.0))}
        shown = ", ".join(f"{figure} {value:.3f}" for figure, value in f.items())
        parts = "".join(f", {name} {value:.3f}" for name, value in self.parts.items())
        counted = "".join(f", {figure.replace('_', ' ')} {value:.0f}" for figure, value in unscored.items())
        samples = f" x {self.n} samples" if self.n > 1 else ""
        what = f"{shown} on {self.num_prompts} held-out prompts{samples}{parts}, mean length {length:.1f} tokens, {cut:.1%} cut"
        return f"{self.name + ': ' if self.name else ''}{what}{counted}"


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

    @classmethod
    def of(cls, one: EvaluationSet, sampling: SamplingParams, scorer: Scorer, seed: int) -> Evaluator:
        """sampling: of the set. scorer: of its reward. seed: of the run."""
        return cls(one.name, one.settings, one.prompts.prompts, sampling, scorer, one.votes, seed)

    def is_due(self, step: int, total_steps: int) -> bool:
        """If the weights after `step` are evaluated; step 0 is before training."""
        every = self.settings.every or 0
        if step == 0:
            return bool(self.settings.before)
        return every > 0 and (step % every == 0 or step == total_steps)

    def run(self, rollout: RolloutEngine, tokenizer: Tokenizer) -> Evaluation:
        """Evaluate the weights that the rollout engine holds. Collective; the same result on every rank."""
        n = self.settings.n
        requests = evaluation_requests(self.prompts, n, self.seed, self.name)
        asked = [prompt for prompt in self.prompts for _ in range(n)]
        responses = gather_responses(generate(rollout, requests, self.sampling), len(requests))
        scored = score_responses(asked, responses, tokenizer, self.scorer, self.sampling.stop)
        count = len(asked)
        figures = {
            **self._scores(scored),
            names.LENGTH: sum(len(r.tokens) for r in responses) / count,
            names.TRUNCATED: sum(r.finish == "length" for r in responses) / count,
        }
        if self.name:
            figures |= {names.UNDECIDED: float(scored.num_undecided), names.UNUSABLE: float(scored.num_unusable)}
        return Evaluation(self.name, len(self.prompts), n, figures, scored.part_means())

    def _scores(self, scored: Scored) -> dict[str, float]:
        mean = sum(scored.total) / len(scored.total)
        if not self.name:
            return {names.SCORE: mean}
        n = self.settings.n
        groups = _grouped(scored.total, n)
        right = [[score >= self.settings.correct_score for score in scores] for scores in groups]
        figures = {names.mean_at(n): mean, names.STDERR: standard_error([sum(scores) / n for scores in groups])}
        for k in self.settings.pass_at or ():
            figures[names.pass_at(k)] = sum(pass_at_k(n, sum(one), k) for one in right) / len(right)
        if self.votes is not None:
            answers = _vote(self.votes, _grouped(scored.texts, n))
            figures[names.majority_at(n)] = sum(map(majority, right, answers)) / len(right)
        return figures


def _grouped(values: Sequence, n: int) -> list:
    """Values of the n samples of each prompt."""
    return [values[start : start + n] for start in range(0, len(values), n)]


def _vote(rule: str, texts: Sequence[Sequence[str]]) -> list:
    """Answers of the samples of each prompt; each rank reads those of its share. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = on_every_rank(f"counting the votes of {rule}", lambda: answers_of(rule, texts[rank::world_size]))
    return [shares[i % world_size][i // world_size] for i in range(len(texts))]


class Evaluations:
    """The sets of a run, evaluated where they are due."""

    def __init__(
        self, evaluators: Sequence[Evaluator], rollout: RolloutEngine, tokenizer: Tokenizer, log: RunLog, total_steps: int
    ) -> None:
        self._evaluators, self._total_steps = evaluators, total_steps
        self._rollout, self._tokenizer, self._log = rollout, tokenizer, log

    def after(self, step: int, timers: StageTimers) -> list[Evaluation]:
        """Evaluate the sets that are due after `step` (0: before training), log and return their results. Collective."""
        results = []
        for one in self._evaluators:
            if one.is_due(step, self._total_steps):
                # A stage for each set: limits are learned from a stage's times, and a large set is no hang of a small one.
                with timers.stage(f"evaluate_{one.name}" if one.name else "evaluate"):
                    results.append(one.run(self._rollout, self._tokenizer))
                self._log.evaluation(results[-1], step)
        return results

    def close(self) -> None:
        """End the workers of the sets' rewards."""
        for one in self._evaluators:
            one.scorer.close()


def metrics_of(results: Sequence[Evaluation]) -> dict[str, float]:
    """Metrics of several sets."""
    return {name: value for result in results for name, value in result.metrics().items()}


def evaluators_of(
    sets: Sequence[EvaluationSet],
    sampling: SamplingParams,
    scorer: Scorer | None,
    seed: int,
    own_scorer: Callable[[EvaluationSet], Scorer],
) -> list[Evaluator]:
    """Evaluators of the sets. sampling: of the training, for stop strings and ends. scorer: of the training's reward, which sets
    without one of their own share. own_scorer: makes that of a set with one."""
    made = []
    for one in sets:
        s = one.settings
        assert s.max_response_tokens is not None, "evaluation_sets fills it in"
        of_set = SamplingParams(
            s.max_response_tokens, s.temperature, s.top_p, s.top_k, stop=sampling.stop, stop_token_ids=sampling.stop_token_ids
        )
        judge = scorer if one.reward is None else own_scorer(one)
        assert judge is not None, "a set without a reward shares the training's"
        made.append(Evaluator.of(one, of_set, judge, seed))
    return made
