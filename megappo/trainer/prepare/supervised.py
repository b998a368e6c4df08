"""Data of a supervised run: read once, counted, checked against the batch and the length of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megappo.config.errors import ConfigError, problem
from megappo.config.supervised import DpoConfig, PairDataConfig, RewardTrainingConfig, SftConfig, SupervisedConfig
from megappo.config.supervised_step import sampling_config
from megappo.data.cache import Cache
from megappo.data.examples import Examples
from megappo.data.images import PromptImages
from megappo.data.loader import PromptLoader
from megappo.data.preferences import Keys, LabelKeys, ListKeys, PairKeys, PreferenceRules, preferences_of
from megappo.data.prompt_rows import format_of, open_cache
from megappo.data.sources import Joined, Source, joined_spec, open_sources
from megappo.data.texts import DemonstrationRules, DemonstrationSet, demonstrations_of
from megappo.data.tokenizers import Tokenizer
from megappo.models.arch import ModelArch
from megappo.telemetry.tables import figures
from megappo.trainer.prepare.data import EvaluationData, check_vocabularies, checked_tokenizer, load_sets, steps_of
from megappo.trainer.prepare.images import image_notes, images_of_run
from megappo.trainer.prepare.reward_model import pad_id_of


def demonstrations(
    config: SftConfig, source: Source | Joined, tokenizer: Tokenizer, cache: Cache, images: PromptImages | None = None
) -> DemonstrationSet:
    """Read the demonstrations of a source by the keys of `data`. images: of the run, if it has some."""
    data = config.data
    rules = DemonstrationRules(
        data.prompt_key,
        data.response_key,
        format_of(data),
        data.max_tokens,
        data.overlong,
        data.messages_key,
        data.turns,
        data.tools_key,
        data.tokens_key,
        data.mask_key,
    )
    return demonstrations_of(source, tokenizer, rules, cache, images)


def _rankings(
    config: RewardTrainingConfig, source: Source | Joined, tokenizer: Tokenizer, cache: Cache, images: PromptImages | None
) -> Examples:
    data, pad_id = config.data, pad_id_of(config.reward_model.model)
    keys = PairKeys(data.chosen_key, data.rejected_key, data.margin_key, data.tie_key)
    rules = _rules(data, keys if data.responses_key is None else ListKeys(data.responses_key))
    # The export has the tokenizer's, if the model has none.
    scored = replace(rules, scored=True, pad_id=tokenizer.pad_id if pad_id is None else pad_id)
    return preferences_of(source, tokenizer, scored, cache, images)


def _preferences(
    config: DpoConfig, source: Source | Joined, tokenizer: Tokenizer, cache: Cache, images: PromptImages | None
) -> Examples:
    data = config.data
    labels = LabelKeys(data.response_key, data.label_key)
    keys = labels if config.loss.type == "kto" else PairKeys(data.chosen_key, data.rejected_key)
    return preferences_of(source, tokenizer, _rules(data, keys), cache, images)


def _rules(data: PairDataConfig, keys: Keys) -> PreferenceRules:
    return PreferenceRules(keys, data.prompt_key, format_of(data), data.max_tokens, data.overlong)


Reader = Callable[[Any, Source | Joined, Tokenizer, Cache, Any], Examples]
READERS: dict[str, Reader] = {"sft": demonstrations, "reward_model": _rankings, "dpo": _preferences}
"""Kind -> reader of its examples from (configuration, source, tokenizer, cache, images of the run). ValueError, one line, with the
record's name and line in its file, for a record that it cannot take."""


@dataclass(frozen=True, kw_only=True)
class SupervisedData(EvaluationData):
    """Data of a supervised run. held_out: name -> examples, `data.eval` under the empty name. loader: at its start. total_steps: of
    the optimizer."""

    train: Examples
    held_out: Mapping[str, Examples]
    loader: PromptLoader
    total_steps: int
    ptx: None = None


def load_supervised_data(config: SupervisedConfig, archs: Mapping[str, ModelArch]) -> SupervisedData:
    """Load tokenizer and examples of this configuration. ValueError, one line: missing or unreadable files, records that the kind
    cannot take, fewer examples than a batch, a warm-up longer than the run; of generated answers as `load_run_data`."""
    tokenizer, cache = checked_tokenizer(config, archs[config.learner]), open_cache(config.run)
    notes = tuple(check_vocabularies(config, tokenizer))
    if isinstance(config, SftConfig) and config.distillation is not None:
        top_k, known = config.distillation.top_k, archs["policy"].vocab_size
        if top_k > known:
            raise ConfigError(problem("distillation.top_k", top_k, f"the vocabulary has {known} tokens; use at most as many"))
    images, read = images_of_run(config, cache), READERS[config.name]
    train = read(config, open_sources(config.data.train), tokenizer, cache, images)
    size = config.trainer.batch_size
    if size > len(train):
        source = joined_spec(config.data.train)
        fix = f"more than the {len(train):,} {train.unit}s of {source} ({train.summary()}); lower it or add data"
        raise ConfigError(problem("trainer.batch_size", size, fix))
    held_out: dict[str, Examples] = {}
    for name, spec in config.held_out.items():
        try:
            held_out[name] = read(config, open_sources(spec), tokenizer, cache, images)
        except ValueError as error:
            raise ConfigError(f"{f'evaluations.{name}' if name else 'data.eval'}: {error}") from error
    answered = _answered(config, tokenizer, cache, images)
    loader = PromptLoader(len(train), size, shuffle=config.data.shuffle, seed=config.run.seed)
    return SupervisedData(
        tokenizer=tokenizer,
        evaluations=answered.evaluations,
        notes=(*notes, *answered.notes, *image_notes(images), *cache.notes),
        reward_parts=answered.reward_parts,
        images=images,
        train=train,
        held_out=held_out,
        loader=loader,
        total_steps=steps_of(config, loader),
    )


def _answered(config: SupervisedConfig, tokenizer: Tokenizer, cache: Cache, images: PromptImages | None) -> EvaluationData:
    """Load the held-out prompts that are answered, and what scores the answers; neither if the run generates none."""
    if (sampled := sampling_config(config)) is None:
        return EvaluationData(tokenizer=tokenizer)
    try:
        return load_sets(sampled, tokenizer, cache, images)
    except ValueError as error:  # by the keys of `step_like`
        own = "data.max_tokens - rollout.max_response_tokens"
        raise ConfigError(str(error).replace("data.max_prompt_tokens", own)) from error


def describe(data: SupervisedData) -> Iterator[str]:
    """Yield lines on the examples and on how often the run visits each."""
    size, unit = data.loader.prompts_per_step, data.train.unit
    yield f"data: {data.train.summary()}"
    yield f"run: {data.total_steps:,} steps of {size:,} {unit}s = {figures(data.total_steps * size / len(data.train))} epochs"
    for name, examples in data.held_out.items():
        yield f"eval{' ' + name if name else ''}: {examples.summary()}"
    for one in data.evaluations:
        yield f"answers{' ' + one.name if one.name else ''}: {one.prompts.summary()}"
