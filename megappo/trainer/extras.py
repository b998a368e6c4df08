"""Optional features of a run beside the eight stages of a step, each attached through hooks of `Extra`. All ranks have the same
extras in the same order, so hooks may be collective over the world."""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megappo.algo.kl import kl_estimate
from megappo.algo.objectives import steered
from megappo.algo.summaries import ratio_histogram
from megappo.config.schema import EntropyTargetConfig, TrainConfig
from megappo.data.images import IMAGE_BASE, ImageStore
from megappo.data.prompts import Prompt
from megappo.data.token_texts import response_text, special_ids, token_texts
from megappo.data.tokenizers import Tokenizer
from megappo.parallel.consensus import gathered_at
from megappo.parallel.totals import maxima, place_in_world, total, totals
from megappo.rewards.compose import Scored
from megappo.rollout.generation import generate
from megappo.rollout.half import GREEDY as GREEDY_BATCH
from megappo.rollout.types import SamplingParams
from megappo.telemetry.metrics import Distribution, Metric, of_critic
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.timers import StageTimers
from megappo.telemetry.trackers.base import Histogram
from megappo.telemetry.trajectories.files import FORMAT, TOKEN_FIELDS, rounded
from megappo.trainer.advantages import GREEDY
from megappo.trainer.average import PolicyAverage
from megappo.trainer.build_roles import Roles
from megappo.trainer.critics import critics_in
from megappo.trainer.experience.collect import SampleRequests, collect, share_pictures
from megappo.trainer.experience.experience import Experience
from megappo.trainer.replicas import ReplicaCheck
from megappo.trainer.rounds import Round, Sampler
from megappo.trainer.run import Steps
from megappo.trainer.scoring import score_responses
from megappo.trainer.state import TrainerState
from megappo.trainer.step_record import StepRecord
from megappo.trainer.step_totals import targets_in
from megappo.trainer.updates import Updates


def draw_samples(num_samples: int, samples_per_prompt: int, count: int, run_seed: int, step: int) -> list[int]:
    """Return ascending indices of min(count, num_samples) samples of a step, the same in every layout and after a resume.
    Prompts are drawn with all their adjacent samples, whose differences PPO learns from; the last prompt may be cut by `count`."""
    order = list(range(num_samples // samples_per_prompt))
    # Seeded by the whole text; random.Random keeps its sequence across Python versions.
    random.Random(f"trajectories {run_seed} {step}").shuffle(order)
    drawn = [prompt * samples_per_prompt + sample for prompt in order for sample in range(samples_per_prompt)]
    return sorted(drawn[:count])


def trajectories_of(
    record: StepRecord,
    prompt_of: Callable[[int], Prompt],
    drawn: Sequence[int],
    tokenizer: Tokenizer,
    images: ImageStore | None = None,
) -> list[dict[str, Any]]:
    """Return the records of the drawn samples by number on rank 0, nothing elsewhere. Collective over the world.
    prompt_of, drawn: by the sample's number in the step, before any were left out. images: of the run."""
    places = _places_of(record)
    rows = [_row(record, places[number], prompt_of(number), number, tokenizer) for number in drawn if number in places]
    if images is not None:
        rows = [{**row, "images": _thumbnails([*row["prompt_tokens"], *row["response_tokens"]], images)} for row in rows]
    if place_in_world()[1] == 1:
        return rows
    return sorted((row for theirs in gathered_at(0, rows) for row in theirs), key=lambda row: row["sample"])


def _thumbnails(tokens: Sequence[int], images: ImageStore) -> dict[int, str]:
    """Map the ids of images among these tokens to small pictures, as data: URIs."""
    shown = sorted({one for one in tokens if one >= IMAGE_BASE})
    encoded = {one: base64.b64encode(images.thumbnail(one - IMAGE_BASE)).decode() for one in shown}
    return {one: f"data:image/jpeg;base64,{content}" for one, content in encoded.items()}


class _Place(NamedTuple):
    """A sample on this rank. index: in the batch of `experience`. reason: why it has no score, else empty."""

    experience: Experience
    scored: Scored
    index: int
    reason: str


def _places_of(record: StepRecord) -> dict[int, _Place]:
    """Map this rank's samples by their numbers in the step; those left out lack what the training side computed."""
    left_out, experience, kept = record.rollout.left_out, record.experience, record.experience.numbers
    if left_out is None:
        return {number: _Place(experience, record.scored, i, "") for i, number in enumerate(kept.tolist())}
    kept = left_out.numbers[kept] if len(left_out.numbers) else kept
    held = [(left_out.experience, left_out.scored, left_out.experience.numbers), (experience, record.scored, kept)]
    return {
        number: _Place(samples, scored, i, left_out.reasons.get(number, ""))
        for samples, scored, numbers in held
        for i, number in enumerate(numbers.tolist())
    }


def _row(record: StepRecord, place: _Place, prompt: Prompt, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the record of a sample."""
    experience, scored, index, reason = place
    batch, table, row = experience.batch.select([index]).to("cpu"), experience.table, int(experience.numbers[index])
    tokens, mask = batch.tokens.tolist(), batch["response_mask"]
    start, goes_on = int(table.prompt[row] - table.earlier[row]), bool(table.unfinished[row])
    texts = token_texts(tokens, tokenizer)
    return {
        "format": FORMAT,
        "sample": number,
        "id": prompt.id,
        "prompt": prompt.text,
        "response": response_text(tokens[start:], tokenizer) if goes_on else scored.texts[index],
        "answer": prompt.answer,
        "score": None if reason else scored.total[index],
        **({"reason": reason} if reason else {}),
        # NaN: another recipe's part, or one without a verdict, or a response that goes on
        "parts": {name: values[index] for name, values in scored.parts.items() if not math.isnan(values[index])},
        "recipe": scored.labels[index] if scored.labels else "",
        "finish": "window" if goes_on else "length" if batch["truncated"][0] else "stop",
        "version": int(table.oldest[row]),
        "kl_coef": record.kl_coef,
        "prompt_tokens": tokens[:start],
        "prompt_texts": texts[:start],
        "response_tokens": tokens[start:],
        "response_texts": texts[start:],
        "special_tokens": special_ids(tokens, tokenizer),
        "response_mask": mask[start:].int().tolist(),
        **{name: rounded(torch.where(mask, batch[name], torch.nan)[start:].tolist()) for name in TOKEN_FIELDS if name in batch},
    }


NUM_BINS = 64  # TensorBoard shows about 30
# Change of the entropy bonus's factor in a step: the paper's (Skywork-OR1). No recipe sets another, and from 0 the factor passes
# the usual bonuses (0.001 to 0.01) within two steps.
ENTROPY_STEP = 0.005


def histograms_of(record: StepRecord) -> dict[str, Histogram]:
    """Return name -> histogram of a step. Collective over the world.
    Ratios cover all updates of the step, if the policy counted them. KL needs a reference; values and returns need a critic."""
    batch = record.batch
    mask, table, numbers = batch["response_mask"], record.experience.table, record.experience.numbers
    ends = table.ends[numbers]
    values = {
        Distribution.ADVANTAGE: batch["raw_advantage"][mask],
        Distribution.RESPONSE: table.response[numbers][ends],
        Distribution.SCORE: record.score[ends],
    }
    of_critics = {
        of_critic(name.value, role): batch[field][targets_in(record.batch)]
        for role, fields in critics_in(batch).items()
        for name, field in ((Distribution.VALUE, fields.value), (Distribution.RETURN, fields.returns))
    }
    if "ref_logprob" in batch:
        values[Distribution.KL] = kl_estimate(batch["logprob"], batch["ref_logprob"], record.kl)[mask]
    found = even_histograms({name.value: x for name, x in values.items()} | of_critics)
    if (ratios := ratio_histogram(record.policy.sums)) is not None:
        found[Distribution.RATIO.value] = Histogram(tuple(ratios[0]), tuple(ratios[1]))
    return found


def even_histograms(values: Mapping[str, Tensor]) -> dict[str, Histogram]:
    """Build histograms of the finite values [n] of all ranks, with even bins from minimum to maximum. Collective over the world.
    A single distinct value gets one bin around it; a name without values is left out."""
    exact = {name: x.detach().double().cpu() for name, x in values.items()}
    none = torch.full((1,), -math.inf, dtype=torch.float64)
    ends = maxima({name: torch.stack([torch.cat([-x, none]).max(), torch.cat([x, none]).max()]) for name, x in exact.items()})
    ranges = {name: (-float(low), float(high)) for name, (low, high) in ends.items() if high > -math.inf}
    counted = totals({name: _counts(exact[name], ends_of) for name, ends_of in ranges.items()})
    return {name: _histogram(counted[name], ends_of) for name, ends_of in ranges.items()}


def _counts(x: Tensor, ends: tuple[float, float]) -> Tensor:
    if ends[0] == ends[1] or not x.numel():
        return torch.tensor([x.numel()] + [0] * (NUM_BINS - 1), dtype=torch.float64)
    return torch.histogram(x, NUM_BINS, range=ends).hist


def _histogram(counts: Tensor, ends: tuple[float, float]) -> Histogram:
    low, high = ends
    if low == high:
        margin = max(abs(low), 1.0) * 0.5
        return Histogram((int(counts.sum()),), (low - margin, high + margin))
    # The edges that `torch.histogram` counts by.
    edges = torch.histogram(torch.empty(0, dtype=torch.float64), len(counts), range=ends).bin_edges
    return Histogram(tuple(int(count) for count in counts), tuple(edges.tolist()))


class Extra:
    """Hooks in the order of a step, which do nothing by default: two of the rollout side, then those of the training side."""

    def after_generate(self, drawn: Round) -> None:
        """Run in stage 2, before the engine sleeps."""

    def after_score(self, drawn: Round, experience: Experience) -> Experience:
        """Run in stage 3; return the experience of the round, with added fields if any."""
        return experience

    def before_updates(self, record: StepRecord) -> None:
        """Run at the end of stage 5."""

    def after_updates(self, updates: Updates) -> None:
        """Run at the end of stage 6."""

    def before_push(self, step: int, timers: StageTimers) -> None:
        """Run between stages 6 and 7."""

    def after_step(self, record: StepRecord) -> None:
        """Run in stage 8 after the KL coefficient has moved, only after steps that update the policy."""

    def after_log(self, record: StepRecord) -> None:
        """Run in stage 8, after the step is logged."""


def greedy_requests(requests: SampleRequests) -> SampleRequests:
    """Return one request per prompt, numbered like the groups of its samples."""
    return replace(requests, samples_per_prompt=1, seed_of=lambda prompt: prompt)  # nothing is drawn: any seed will do


def greedy_sampling(training: SamplingParams) -> SamplingParams:
    return replace(training, temperature=0.0, top_p=1.0, top_k=-1, record_top_k_ids=False)


class GreedyBaseline(Extra):
    """Baseline of the estimator remax (Li et al. 2024, arXiv:2310.10505): the score of one greedy response to each prompt.
    Greedy responses are drawn in stage 2 and scored in stage 3 beside the samples, and not trained on."""

    def __init__(self, sampler: Sampler) -> None:
        self._engine, params, self._tokenizer, self._scorer = sampler
        self._params = greedy_sampling(params)
        self._greedy: Experience

    def after_generate(self, drawn: Round) -> None:
        """Draw one greedy response per prompt, numbered like the groups of the samples. Collective over the world."""
        assert isinstance(drawn.requests, SampleRequests), "responses that go on have no greedy one"
        once = greedy_requests(drawn.requests)
        responses = generate(self._engine, once, self._params, batch=f"{GREEDY_BATCH}{drawn.step}")
        share_pictures(self._engine, len(once))
        self._greedy = collect(once, responses)

    def after_score(self, drawn: Round, experience: Experience) -> Experience:
        """Add the field GREEDY, [B] fp64. Collective over the world; errors as `score_responses`."""
        prompt_of, stop = (lambda group: drawn.prompts[drawn.rows[group]]), self._params.stop
        scored = score_responses(self._greedy, prompt_of, self._tokenizer, self._scorer, stop)
        scores = self._greedy.column(torch.tensor(scored.total, dtype=torch.float64))
        return experience.with_fields({}, {GREEDY: scores[experience.table.group[experience.numbers].long()]})


class EntropyTarget(Extra):
    """Steers the coefficient of the entropy bonus towards the target of `algorithm.entropy`; the state keeps the next step's."""

    def __init__(self, bonus: EntropyTargetConfig, roles: Roles, state: TrainerState) -> None:
        self._bonus, self._roles, self._state = bonus, roles, state

    def before_updates(self, record: StepRecord) -> None:
        """Set the coefficient for this step's updates of the policy. Collective over the world."""
        if not record.updates_policy:
            return
        coef = self.coef_of(record.experience)
        if self._roles.policy is not None:
            self._roles.policy.entropy_coef = coef
        record.figures[Metric.POLICY_ENTROPY_COEF.value] = coef

    def coef_of(self, experience: Experience) -> float:
        """Return the coefficient for this step's updates and steer the next, from the field entropy. Collective over the world,
        once a step."""
        bonus = self._bonus
        before = bonus.coef if self._state.entropy_coef is None else self._state.entropy_coef
        mask = experience.batch["response_mask"]
        own = torch.stack((experience.batch["entropy"][mask].sum(dtype=torch.float64), mask.sum(dtype=torch.float64)))
        entropy, tokens = total(own.cpu()).tolist()
        acting, self._state.entropy_coef = steered(before, entropy / max(1.0, tokens), bonus.target, ENTROPY_STEP)
        return acting


class AverageOfPolicy(Extra):
    """Updates the average of `policy.ema`. average: None on ranks without the policy."""

    def __init__(self, average: PolicyAverage | None) -> None:
        self._average = average

    def after_updates(self, updates: Updates) -> None:
        """Update the average if the policy changed. Collective over the policy's ranks."""
        if self._average is not None and updates.changed("policy"):
            self._average.update()


class ReplicaChecks(Extra):
    """Compares replicas every `run.replica_check_every` steps, before wrong weights reach the sampler or a checkpoint."""

    def __init__(self, roles: Roles, steps: Steps, every: int) -> None:
        self._check, self._steps, self._every = ReplicaCheck(roles.engines), steps, every

    def before_push(self, step: int, timers: StageTimers) -> None:
        """Raise if ranks hold different copies of a weight. Collective over the world."""
        if self._steps.is_due(step, self._every):
            with timers.stage("check_replicas"):
                self._check()


class Trajectories(Extra):
    """Logs some samples in full every `telemetry.trajectories_every` steps. n: samples per prompt, which are drawn together.
    images: of the run."""

    def __init__(self, config: TrainConfig, n: int, tokenizer: Tokenizer, images: ImageStore | None, log: RunLog) -> None:
        self._settings, self._seed, self._n = config.telemetry, config.run.seed, n
        self._tokenizer, self._images, self._log = tokenizer, images, log

    def after_log(self, record: StepRecord) -> None:
        step, settings = record.step, self._settings
        if step % settings.trajectories_every == 0:
            left_out = record.rollout.left_out
            table = record.experience.table if left_out is None else left_out.experience.table
            drawn = draw_samples(table.num_trajectories, self._n, settings.trajectories_per_step, self._seed, step)
            rows = trajectories_of(record, record.rollout.prompt_of, drawn, self._tokenizer, self._images)
            self._log.trajectories(step, rows)


class Histograms(Extra):
    """Logs histograms every `telemetry.histogram_interval` steps."""

    def __init__(self, roles: Roles, steps: Steps, interval: int, log: RunLog) -> None:
        self._roles, self._steps, self._interval, self._log, self._is_due = roles, steps, interval, log, False

    def before_updates(self, record: StepRecord) -> None:
        """Have the policy count ratios in the updates of a step that is due."""
        self._is_due = self._steps.is_due(record.step, self._interval)
        if self._roles.policy is not None:
            self._roles.policy.counts_ratios = self._is_due

    def after_log(self, record: StepRecord) -> None:
        if self._is_due:
            self._log.histograms(record.step, histograms_of(record))
