"""Prepares evaluation sets like the training set, before a model is built: loads prompts, checks rewards and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import best_metric, config_of_set, evaluation_sets, key_of, majority_at, metric_name
from megappo.config.reward_sections import EvaluationConfig, RewardConfig
from megappo.config.schema import TrainConfig
from megappo.data.cache import Cache
from megappo.data.images import PromptImages
from megappo.data.prompt_rows import load_prompts
from megappo.data.prompts import PromptSet
from megappo.data.tokenizers import Tokenizer
from megappo.rewards.base import PreparedPart
from megappo.rewards.votes import VOTING, voting_rule
from megappo.trainer.prepare.reward_notes import reward_notes
from megappo.trainer.prepare.reward_parts import load_parts

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluationSet:
    """One set. name: "" for `data.eval`. settings: of `config.evaluations.evaluation_sets`.
    reward, reward_parts: the set's own; None and empty if it shares the training's. votes: rule whose answers maj@N counts; None if
    no rule of its reward tells answers apart, or n is 1."""

    name: str
    settings: EvaluationConfig
    prompts: PromptSet
    reward: RewardConfig | None = None
    reward_parts: Mapping[str, PreparedPart] = field(default_factory=dict)
    votes: str | None = None


def load_evaluations(
    config: TrainConfig, tokenizer: Tokenizer, cache: Cache, images: PromptImages | None = None
) -> tuple[EvaluationSet, ...]:
    """Load every set that `config` evaluates on. ConfigError or ValueError, one line with the set's name, as for training data."""
    sets = tuple(_load(name, one, config, tokenizer, cache, images) for name, one in evaluation_sets(config).items())
    for one in sets:
        maj = metric_name(one.name, majority_at(one.settings.n))
        if one.votes is None and one.settings.n > 1 and best_metric(config) == maj:
            fix = f"{maj} does not exist: no rule of its reward names the final answer ({', '.join(VOTING)} do)"
            raise ConfigError(problem("trainer.keep_best", config.trainer.keep_best, fix))
    return sets


def _load(
    name: str, one: EvaluationConfig, config: TrainConfig, tokenizer: Tokenizer, cache: Cache, images: PromptImages | None
) -> EvaluationSet:
    view = config_of_set(config, one)
    prefix = f"evaluations.{name}: " if name else ""
    prompts = _naming(prefix, lambda: load_prompts(view.data, one.data, tokenizer, cache, one.prompts, images))
    votes = _voting_rule(view.reward) if one.n > 1 else None
    if one.reward is None:
        return EvaluationSet(name, one, prompts, votes=votes)
    own = _naming(f"evaluations.{name}.", lambda: load_parts(view.reward))
    return EvaluationSet(name, one, prompts, view.reward, own, votes)


def _voting_rule(reward: RewardConfig) -> str | None:
    """Return the rule that counts votes under every recipe of a reward; None if there is none or they differ."""
    rules = {voting_rule([part.label for part in parts if part.kind == "name"]) for parts in reward.recipes.values()}
    return rules.pop() if len(rules) == 1 else None


def check_evaluations(sets: Sequence[EvaluationSet], cache: Cache) -> Iterator[str]:
    """Check the sets that have their own reward against it; yield notes. ConfigError as `reward_notes`."""
    for one in sets:
        if one.reward is not None:
            check = partial(reward_notes, one.reward, one.reward_parts, {key_of(one.name): one.prompts}, cache)
            yield from _naming(f"evaluations.{one.name}.", check)
        if one.votes is None and one.settings.n > 1:
            n = one.settings.n
            yield f"evaluations.{one.name}: no maj@{n}: no rule of its reward names the final answer ({', '.join(VOTING)} do)"


def _naming(prefix: str, action: Callable[[], T]) -> T:
    """Run `action`; prefix the message of a ValueError with the set's name and raise it as a ConfigError."""
    try:
        return action()
    except ValueError as error:
        raise ConfigError(prefix + str(error)) from error
