"""The rollout side of a step, stages 1 to 3: prompts, responses and their scores. It needs no model but the sampler's, and hands a
`rounds.Rollout` to the training side (`training_side.py`), whose weights it receives in stage 7."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from megappo.config.schema import RolloutConfig
from megappo.parallel.consensus import warn_once
from megappo.rewards.base import TooFewVerdicts
from megappo.rollout.generation import generate
from megappo.trainer.experience.collect import LOST, collect, prompt_of_sample, share_pictures
from megappo.trainer.experience.experience import Experience
from megappo.trainer.extras import Extra
from megappo.trainer.left_out import LeftOut, VerdictRules, left_out_of
from megappo.trainer.prompt_source import PromptSource
from megappo.trainer.roles import Policy
from megappo.trainer.rounds import Rollout, Round, Sampler, StepSamples, nothing_to_learn
from megappo.trainer.sampler_check import require_version
from megappo.trainer.scoring import begin_rewards, score_responses

logger = logging.getLogger(__name__)

MAX_REDRAWS = 3
"""Draws of one step after the first, with `reward.above_max: redraw`: more would hide that the reward is down."""


class RolloutSide:
    """Stages 1 to 3 of a run. Methods are collective over the world; all but `push_weights` belong to one step.
    policy: source of the pushed weights, None on ranks where it does not live. source: of the requests."""

    def __init__(
        self,
        settings: RolloutConfig,
        sampler: Sampler,
        policy: Policy | None,
        source: PromptSource,
        *,
        extras: Sequence[Extra] = (),
        rules: VerdictRules,
    ) -> None:
        self.engine, self._sampling, self._tokenizer, self.scorer = sampler
        self.policy, self.source = policy, source
        self._settings, self._extras, self._rules = settings, extras, rules
        self._left_out: LeftOut | None = None  # of the step

    def begin(self) -> StepSamples:
        """Start the samples of a new step, with none drawn yet."""
        return self.source.begin_step()

    def draw_prompts(self, step: int, samples: StepSamples) -> Round:
        """Stage 1: draw the prompts of the step's next round and make their requests."""
        rows, requests = self.source.draw(step, samples.num_open, samples.num_drawn)
        return Round(step, rows, requests, self.source.prompts, is_first=not samples.num_drawn)

    def generate(self, asked: Round, samples: StepSamples) -> Experience:
        """Stage 2: generate the responses. SamplerMismatch if they were sampled with other weights than those of the last push."""
        step, requests, settings = asked.step, asked.requests, self._settings
        if not asked.is_first and settings.sleep == "all":
            self.push_weights(step - 1)  # they were released for the scoring of the round before
        begin = begin_rewards(asked.prompt_of, self._tokenizer, self.scorer, self._sampling.stop, requests)
        predicted = self.source.predicted_lengths(asked.rows)
        responses = generate(self.engine, requests, self._sampling, begin, predicted, f"step/{step}")
        share_pictures(self.engine, len(requests))
        for extra in self._extras:
            extra.after_generate(asked)
        self.engine.sleep()
        recorded = {"with_top_k_ids": self._sampling.top_k_width > 0, "num_experts": self._sampling.record_experts}
        drawn = collect(requests, responses, **recorded)
        samples.played += [one.played for one in responses if one.played is not None]
        require_version(drawn.table, step, settings.oldest_weights, self.engine.name)
        return drawn

    def score(self, asked: Round, drawn: Experience, samples: StepSamples) -> None:
        """Stage 3: score the responses and add the round to the samples of the step. TooFewVerdicts if more of them than
        `reward.max_without_verdict` have no score; with `above_max: redraw` all places are open again, MAX_REDRAWS times."""
        scored = score_responses(drawn, asked.prompt_of, self._tokenizer, self.scorer, self._sampling.stop)
        # A field of one round alone would not go together with the others.
        fields = {name: x for name, x in drawn.batch.sequence_fields.items() if not name.startswith(LOST)}
        drawn = drawn.with_batch(replace(drawn.batch, sequence_fields=fields))
        for extra in self._extras:
            drawn = extra.after_score(asked, drawn)
        samples.add(asked.rows, drawn, scored)
        self.source.observe(asked.rows, drawn, scored)
        if not samples.num_open:
            self._left_out = left_out_of(*samples.result(), compares_groups=self._rules.compares_groups)
            if self._left_out is not None and self._left_out.exceeds(self._rules.max_share):
                self._draw_again(asked.step, samples, self._left_out)

    def _draw_again(self, step: int, samples: StepSamples, left_out: LeftOut) -> None:
        said = f"step {step}: {left_out.describe()}; reward.max_without_verdict is {self._rules.max_share:g}"
        if self._rules.above == "stop" or samples.times_redrawn == MAX_REDRAWS:
            often = f" at the {samples.times_redrawn + 1}th draw" if samples.times_redrawn else ""
            raise TooFewVerdicts(f"{said}{often}")
        warn_once(logger, "%s; the step is drawn again", said)
        samples.draw_again()

    def end(self, step: int, samples: StepSamples) -> Rollout:
        """Return the rollout that the training side learns from."""
        experience, scored = samples.result()
        figures, left_out = self.source.end(experience), self._left_out
        if left_out is not None:
            experience, scored = left_out.rest()
        return Rollout(
            step=step,
            experience=experience,
            scored=scored,
            prompt_of=partial(prompt_of_sample, self.source.prompts, samples.rows, self.source.samples_per_row),
            sampler=self.engine.name,
            nothing_to_learn=nothing_to_learn(experience.table, left_out),
            figures=figures,
            rounds=samples.rounds(),
            played=samples.played,
            left_out=left_out,
            redrawn=samples.num_redrawn,
        )

    def push_weights(self, version: int) -> dict[str, float]:
        """Stage 7: push the policy's current weights, which must be resident, into the engine; return figures of the push."""
        with nullcontext() if self.policy is None else self.policy.engine.eval_mode():
            return self.engine.push_weights(version)

    def close(self) -> None:
        self.scorer.close()
