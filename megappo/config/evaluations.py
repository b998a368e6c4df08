"""Evaluation sets of a run with all defaults filled in, the names of their metrics, and rules about their keys.

The set of `data.eval` is named "", is greedy, and logs `eval/score`, `eval/length`, ...; a set NAME of `evaluations` logs
`eval/NAME/...`. Imports only megappo/config.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from megappo.config.errors import problem
from megappo.config.reward_sections import EvaluationConfig, RewardConfig
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig, SftConfig, SupervisedConfig
from megappo.config.supervised_step import sampling_config

DEFAULT = ""  # name of the set that `data.eval` makes
SCORE, LENGTH, TRUNCATED = "score", "length", "truncated"
STDERR, NO_VERDICT = "stderr", "no_verdict"
# Figures of a set that is played in an environment.
TURNS = ("turns_mean", "turns_max", "turns_limited", "turns_late")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_RESERVED = (SCORE, LENGTH, TRUNCATED, NO_VERDICT, *TURNS)  # eval/score is a metric of data.eval


def evaluation_sets(config: TrainConfig) -> dict[str, EvaluationConfig]:
    """Map each name to its set, `data.eval` first. Only `prompts` (all) and `reward` (the training's) may still be null."""
    sets = {} if config.data.eval is None else {DEFAULT: EvaluationConfig(data=config.data.eval, prompts=config.data.eval_prompts)}
    return {name: _filled(one, config) for name, one in {**sets, **config.evaluations}.items()}


def _filled(one: EvaluationConfig, config: TrainConfig) -> EvaluationConfig:
    defaults = {
        "prompt_key": config.data.prompt_key,
        "answer_key": config.data.answer_key,
        "prompt_suffix": config.data.prompt_suffix,
        "max_response_tokens": config.rollout.max_response_tokens,
        "every": config.trainer.eval_every,
        "before": config.trainer.eval_before,
        "pass_at": tuple(sorted({*(1 << power for power in range(one.n.bit_length())), one.n})),
    }
    return one.model_copy(update={key: value for key, value in defaults.items() if getattr(one, key) is None})


def key_of(name: str) -> str:
    return f"evaluations.{name}.data" if name else "data.eval"


def config_of_set(config: TrainConfig, one: EvaluationConfig) -> TrainConfig:
    """Copy of the configuration with the reward, response length and data keys of a set."""
    keys = {"prompt_key": one.prompt_key, "answer_key": one.answer_key, "prompt_suffix": one.prompt_suffix}
    return config.model_copy(
        update={
            "reward": one.reward or config.reward,
            "data": config.data.model_copy(update=keys),
            "rollout": config.rollout.model_copy(update={"max_response_tokens": one.max_response_tokens}),
        }
    )


def rewards_of(config: AnyConfig) -> list[RewardConfig]:
    if (sampled := sampling_config(config)) is None:
        return []
    # The training's reward, and those of sets with their own.
    return [sampled.reward, *(one.reward for one in sampled.evaluations.values() if one.reward is not None)]


def longest_sequence_tokens(config: TrainConfig) -> int:
    """Most tokens of prompt and response that the sampler may see, in training or in an evaluation."""
    responses = [config.rollout.max_response_tokens, *(one.max_response_tokens or 0 for one in config.evaluations.values())]
    return config.data.max_prompt_tokens + max(responses)


# ----------------------------------------------------------------------------------------------------------------- metrics


def metric_name(name: str, figure: str) -> str:
    """Metric name of a set's figure: score, length, mean@8, the label of a reward part, ..."""
    return f"eval/{name}/{figure}" if name else f"eval/{figure}"


def mean_at(n: int) -> str:
    return f"mean@{n}"


def pass_at(k: int) -> str:
    return f"pass@{k}"


def majority_at(n: int) -> str:
    return f"maj@{n}"


def metric_names(config: TrainConfig) -> list[str]:
    """Metrics that the evaluations of a run may log. maj@N is logged only if a rule of the set tells answers apart (`prepare`)."""
    return [metric_name(name, figure) for name, one in evaluation_sets(config).items() for figure in _figures(name, one, config)]


def _figures(name: str, one: EvaluationConfig, config: TrainConfig) -> Iterator[str]:
    labels = list((one.reward or config.reward).all_parts)
    if config.rollout.environment is not None:
        yield from TURNS
    if not name:
        yield from (SCORE, LENGTH, TRUNCATED, *labels)
        return
    yield mean_at(one.n)
    yield from (pass_at(k) for k in one.pass_at or ())
    if one.n > 1:
        yield majority_at(one.n)
    yield from (STDERR, LENGTH, TRUNCATED, *labels)


SMALLEST = "min "  # before the metric in `trainer.keep_best`


def best_metric(config: AnyConfig) -> str | None:
    """Full name of the metric of `trainer.keep_best`: `eval/NAME` stands for the set's mean@N."""
    if config.trainer.keep_best is None:
        return None
    wanted = config.trainer.keep_best.removeprefix(SMALLEST)
    name, sampled = wanted.removeprefix("eval/"), sampling_config(config)
    if sampled is not None and name in sampled.evaluations and wanted != name:
        return metric_name(name, mean_at(sampled.evaluations[name].n))
    return wanted


def best_mode(config: AnyConfig) -> Literal["max", "min"]:
    """Direction of `trainer.keep_best`."""
    return "min" if (config.trainer.keep_best or "").startswith(SMALLEST) else "max"


# ------------------------------------------------------------------------------------------------------------------- rules


def evaluation_problem(config: TrainConfig) -> str | None:
    """First problem of the sets and of `trainer.keep_best`; None without one."""
    sets = evaluation_sets(config)
    for name, one in config.evaluations.items():
        found = _name_problem(name, config) or _sampling_problem(name, one, sets[name]) or _verdict_problem(name, one)
        if found is not None:
            return found
    return _best_problem(config)


def _name_problem(name: str, config: TrainConfig) -> str | None:
    if not _NAME.fullmatch(name):
        return problem("evaluations", name, "is no name for metrics; use letters, digits and . _ - (64 at most), such as gsm8k")
    taken = {*_RESERVED, *config.reward.all_parts} if config.data.eval is not None else set(_RESERVED)
    if name in taken:
        return problem("evaluations", name, f"eval/{name} is a metric of data.eval; give the set another name")
    return None


def _sampling_problem(name: str, one: EvaluationConfig, filled: EvaluationConfig) -> str | None:
    key = f"evaluations.{name}"
    if one.temperature == 0 and one.n > 1:
        return problem(f"{key}.n", one.n, f"greedy responses to a prompt are equal; set {key}.temperature > 0, or n to 1")
    for cut, off in (("top_p", 1.0), ("top_k", -1)):
        if one.temperature == 0 and (value := getattr(one, cut)) != off:
            return problem(
                f"{key}.{cut}", value, f"has no effect: {key}.temperature is 0 (greedy); remove it, or set a temperature"
            )
    if one.top_k == 0:
        return problem(f"{key}.top_k", 0, "must be >= 1, or -1 for all tokens")
    if one.pass_at is not None and (wrong := [k for k in one.pass_at if k > one.n]):
        return problem(f"{key}.pass_at", list(one.pass_at), f"pass@{wrong[0]} needs n >= {wrong[0]} responses, and n is {one.n}")
    if one.pass_at is not None and len(set(one.pass_at)) < len(one.pass_at):
        return problem(f"{key}.pass_at", list(one.pass_at), "names a K twice")
    if filled.every == 0 and not filled.before:
        unset = f"{key}.every is 0 and before is false" if one.every == 0 else "trainer.eval_every is 0 and before is false"
        return problem(f"{key}.data", one.data, f"{unset}, so nothing is evaluated; remove the set, or set {key}.every")
    return None


def _verdict_problem(name: str, one: EvaluationConfig) -> str | None:
    usual = RewardConfig()
    for key in ("max_without_verdict", "above_max"):
        if one.reward is not None and (value := getattr(one.reward, key)) != getattr(usual, key):
            fix = "has no effect: it is of training steps, and an evaluation leaves out what has no score; remove it"
            return problem(f"evaluations.{name}.reward.{key}", value, fix)
    return None


def held_out_names(config: SupervisedConfig) -> list[str]:
    """Metrics that the evaluations of a supervised run log."""
    losses = [metric_name(name, figure) for name in config.held_out for figure in config.figures]
    return losses if (sampled := sampling_config(config)) is None else [*losses, *metric_names(sampled)]


def held_out_problem(config: SupervisedConfig) -> str | None:
    """First problem of the names of held-out data and of `trainer.keep_best` in a supervised run; None without one."""
    sampled = sampling_config(config)
    for name in config.evaluations:
        if not _NAME.fullmatch(name) or name in config.figures:
            fix = "is no name of its own for metrics; use letters, digits and . _ - (64 at most), such as hard"
            return problem("evaluations", name, fix)
        if sampled is not None and (message := _name_problem(name, sampled)) is not None:
            return message
    if config.trainer.keep_best is not None and config.held_out and config.trainer.eval_every == 0:
        fix = "trainer.eval_every is 0, so no step is evaluated; set it"
        return problem("trainer.keep_best", config.trainer.keep_best, fix)
    return _unknown_best(config, held_out_names(config))


def generated_problem(config: SupervisedConfig) -> str | None:
    """Refuse to generate held-out answers without a reward, prompts or room for them, and a reward without answers."""
    if not isinstance(config, SftConfig) or (config.rollout is None and config.reward is None):
        return None
    data, rollout, reward = config.data, config.rollout, config.reward
    if reward is None:
        return "reward is missing: rollout generates answers for it to score; add it, or remove rollout"
    if rollout is None:
        return "rollout is missing: reward scores the answers that it generates; add it, or remove reward"
    for key in ("messages_key", "tokens_key"):
        if (value := getattr(data, key)) is not None:
            fix = "rollout answers prompts, which data.prompt_key names; use that form, or remove rollout and reward"
            return problem(f"data.{key}", value, fix)
    if not config.held_out:
        return "data.eval is missing: rollout answers held-out prompts; name some, or remove rollout and reward"
    if rollout.max_response_tokens >= data.max_tokens:
        fix = f"leaves no prompt of the data.max_tokens {data.max_tokens} of a sequence; use less, or raise that"
        return problem("rollout.max_response_tokens", rollout.max_response_tokens, fix)
    for key, part in reward.all_parts.values():
        if part.model is not None:
            fix = "only `megappo train` builds a reward model; use other parts, or `megappo eval` of the export with a file of that"
            return problem(f"{key}.model", part.model, fix)
    if (label := next((one for one in reward.all_parts if one in config.figures), None)) is not None:
        return problem("reward.parts", label, f"eval/{label} is a figure of the held-out data; give the part another name")
    return None


def _best_problem(config: TrainConfig) -> str | None:
    written, metric = config.trainer.keep_best, best_metric(config)
    if metric is None:
        return None
    sets = evaluation_sets(config)
    if (message := _unknown_best(config, metric_names(config))) is not None:
        return message
    name = set_of(metric, config)
    if sets[name].every == 0:
        every = f"evaluations.{name}.every" if name and config.evaluations[name].every == 0 else "trainer.eval_every"
        return problem("trainer.keep_best", written, f"{every} is 0, so no step is evaluated; set it")
    return None


def _unknown_best(config: AnyConfig, known: Sequence[str]) -> str | None:
    """Problem of a `trainer.keep_best` that is no metric of an evaluation."""
    written, metric = config.trainer.keep_best, best_metric(config)
    if metric is None or metric in known:
        return None
    if not known:
        return problem("trainer.keep_best", written, "nothing is evaluated; set data.eval, or name a set in evaluations")
    nearest = difflib.get_close_matches(metric, known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return problem("trainer.keep_best", written, f"is no metric of an evaluation; {hint}Metrics: {', '.join(known)}")


def set_of(metric: str, config: TrainConfig) -> str:
    """Name of the set that logs a metric of `metric_names`."""
    return next((name for name in config.evaluations if metric.startswith(f"eval/{name}/")), DEFAULT)
