"""Tokenizer, prompts and environment of a run: loaded once, counted for the plan and passed to the trainer. Applies the
configuration to `megappo/data`, and checks the counts against the batch size and the length of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megappo.config.batch import step_arithmetic
from megappo.config.checks import step_problems
from megappo.config.errors import ConfigError, about, problem
from megappo.config.evaluations import DEFAULT, config_of_set, key_of
from megappo.config.layout_checks import uses_model
from megappo.config.role_sections import is_critic
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig
from megappo.data.ahead import AheadLoader
from megappo.data.cache import Cache
from megappo.data.images import PromptImages
from megappo.data.loader import PassRates, PromptLoader, weights_of
from megappo.data.prompt_rows import load_prompts, open_cache
from megappo.data.prompts import PromptSet
from megappo.data.reward_text import RewardText
from megappo.data.sources import open_sources
from megappo.data.texts import TextRules, TextSet, texts_of
from megappo.data.tokenizers import Tokenizer, find_tokenizer, load_tokenizer
from megappo.models.arch import ModelArch
from megappo.rewards.base import PreparedPart
from megappo.rollout.environment import Conversation, PreparedEnvironment
from megappo.rollout.turn import USE
from megappo.runtime.user_code import OwnCode
from megappo.trainer.prepare.evaluations import EvaluationSet, check_evaluations, load_evaluations
from megappo.trainer.prepare.images import image_notes, images_of_run
from megappo.trainer.prepare.layouts import model_of_tokenizer, model_paths
from megappo.trainer.prepare.reward_model import ScoredTexts, load_reward_text
from megappo.trainer.prepare.reward_notes import reward_notes
from megappo.trainer.prepare.reward_parts import AnswerKey, check_answers, load_parts, require_answer


def sampling_notes(config: TrainConfig, loader: PromptLoader) -> Iterator[str]:
    """Yield lines on partial rollouts, environments, dynamic sampling, weights and the curriculum, where configured."""
    dynamic, step, rollout = config.algorithm.dynamic_sampling, step_arithmetic(config), config.rollout
    if rollout.partial_rollout_tokens is not None:
        yield (
            f"rollout.partial_rollout_tokens = {rollout.partial_rollout_tokens}: a response takes up to {rollout.windows} steps in "
            f"one of the {step.samples:,} places of a step, so the run visits fewer prompts than steps x places; what is "
            "unfinished at its end is dropped"
        )
    if (environment := rollout.environment) is not None:
        longest = config.data.max_prompt_tokens + rollout.max_response_tokens
        where = f"{environment.workers} processes of each rank that asks" if environment.workers else "the ranks themselves"
        yield (
            f"rollout.environment: up to {environment.max_turns} turns in a sequence of at most {longest:,} tokens, observations "
            f"included; {where} answer, and neither their time nor their memory is planned"
        )
        if environment.compaction is not None:
            yield (
                f"rollout.environment.compaction: a trajectory is up to {environment.max_turns} sequences and as many samples; "
                f"memory, optimizer steps and the learning-rate schedule are planned for one each, {step.samples:,} in a step"
            )
    if dynamic is not None:
        yield (
            "algorithm.dynamic_sampling: a share q of prompts with equal scores costs 1 / (1 - q) times the generation and scoring "
            f"of {step.samples:,} responses (2 times at q = 0.5), at most {dynamic.max_rounds} times in {dynamic.max_rounds} rounds"
        )
    if config.data.weight_key is not None:
        yield (
            f"data.weight_key={config.data.weight_key}: an epoch is {loader.num_prompts:,} visits of {loader.num_weighted:,} "
            f"prompts, the heaviest of them up to {loader.most_visits:,} times"
        )
    if config.data.curriculum is not None and config.rollout.samples_per_prompt == 1:
        yield (
            "data.curriculum: with rollout.samples_per_prompt = 1 a prompt has passed always or never after its "
            "first visit, so it comes back with data.curriculum.min_chance"
        )


def check_vocabularies(config: AnyConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a note for each such role whose checkpoint has no tokenizer to compare. ConfigError, with the first differing id, if a
    role numbers other pieces than `tokenizer`, the run's."""
    for role, (key, path) in model_paths(config).items():
        is_policys = key == f"{config.learner}.model" or Path(path).resolve() == Path(model_of_tokenizer(config)).resolve()
        if is_policys or not (is_critic(role) or role in ("reference", "teacher")):
            continue
        try:
            of_role = find_tokenizer(path)()
        except ValueError:
            yield f"{key} has no tokenizer that can be read: its vocabulary is taken to be that of data.tokenizer"
            continue
        # Ids that only one has are not compared: models pad their vocabulary, and tokenizers add tokens at its end.
        for number, (own, theirs) in enumerate(zip(tokenizer.pieces(), of_role.pieces())):
            if own != theirs:
                fix = f"the {role} reads the policy's ids; use a model with the same tokenizer"
                raise ConfigError(problem(key, path, f"id {number} of its tokenizer is {theirs!r}, of the policy's {own!r}: {fix}"))


def turn_notes(config: TrainConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a note if the chat template closes a turn of the assistant with a text at which no response ends, as ChatML's
    <|im_end|> beside another eos: the policy would go on with the next turn."""
    if not (config.data.chat_template and tokenizer.has_chat_template):
        return
    try:
        ids = tokenizer.conversation([{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}])
    except ValueError:  # it refuses such messages; the prompts will show that
        return
    closing = tokenizer.decode_all(ids).rpartition("yes")[2].strip()
    ends = [*(tokenizer.decode_all([one]) for one in tokenizer.eos_ids), *config.rollout.stop]
    if closing and not any(end in closing for end in ends):
        yield (
            f"the chat template closes a turn with {closing!r}, and responses end with {' or '.join(map(repr, ends))}: "
            "add its id to eos_token_id in the model's generation_config.json, or the text to rollout.stop"
        )


GROUP = "megappo.environments"
KEY = "rollout.environment"


def load_environment(config: TrainConfig, tokenizer: Tokenizer, images: PromptImages | None = None) -> PreparedEnvironment | None:
    """Load `rollout.environment`; None if it is not set. images: of the run. ConfigError, one line, if its code or the chat
    template cannot be used."""
    settings = config.rollout.environment
    if settings is None:
        return None
    code = OwnCode(GROUP, settings.path, settings.function, settings.entry_point, settings.args)
    key, value = ("path", settings.path) if settings.path is not None else ("entry_point", settings.entry_point)
    with about(f"{KEY}.{key}", value):
        function = code.load(USE)
    try:
        conversation = Conversation(tokenizer, config.data.chat_template)
    except ValueError as error:
        fix = f"{error}; or set data.chat_template to false, and observations are bare text"
        raise ConfigError(problem(f"{KEY}.{key}", value, fix)) from error
    return PreparedEnvironment(settings, function, code.as_read(function), conversation, images if settings.images else None)


@dataclass(frozen=True)
class TextData:
    """Texts of `algorithm.ptx`. loader: their order, at its start."""

    texts: TextSet
    loader: PromptLoader


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """Data of `megappo eval`, and the part of it that any run has. notes: on unreadable answers and on labels. reward_parts: by
    label. reward_text, environment: None if not configured."""

    tokenizer: Tokenizer
    evaluations: tuple[EvaluationSet, ...] = ()
    notes: tuple[str, ...] = ()
    reward_parts: Mapping[str, PreparedPart] = field(default_factory=dict)
    reward_text: RewardText | None = None
    environment: PreparedEnvironment | None = None
    images: PromptImages | None = None
    """Images of all prompts; None if `data.image_key` is not set."""


@dataclass(frozen=True, kw_only=True)
class RunData(EvaluationData):
    """Data of a run. loader: at its start. total_steps: PPO steps. ptx: None if not configured."""

    train: PromptSet
    loader: PromptLoader
    total_steps: int
    ptx: TextData | None = None

    @property
    def eval(self) -> PromptSet | None:
        return next((one.prompts for one in self.evaluations if one.name == DEFAULT), None)


def load_run_data(config: TrainConfig, policy: ModelArch) -> RunData:
    """Load tokenizer and prompts of this configuration.
    ValueError, one line: missing or unreadable files; records without a needed key; no prompt left after the filter, or fewer than
    a step takes; invalid weights; token ids that the model lacks, or that critic, reference or teacher number otherwise; a warm-up
    longer than the run; a reward rule that can read no answer; code of a reward or environment that cannot be loaded; a field that
    reward code requires and records lack; a reward model that refuses the prompts; fewer texts than an update takes.
    """
    parts = load_parts(config.reward)
    tokenizer, cache = checked_tokenizer(config, policy), open_cache(config.run)
    notes = [*check_vocabularies(config, tokenizer), *turn_notes(config, tokenizer)]
    images = images_of_run(config, cache)
    train = load_prompts(config.data, config.data.train, tokenizer, cache, images=images)
    data = load_sets(config, tokenizer, cache, images, train, parts)
    loader, ptx = _loader(config, train, cache), _text_data(config, tokenizer, cache)
    notes += [*data.notes, *sampling_notes(config, loader), *image_notes(images), *cache.notes]
    own = {"notes": tuple(notes), "train": train, "loader": loader, "total_steps": steps_of(config, loader), "ptx": ptx}
    return RunData(**vars(data) | own)


def load_evaluation_data(config: TrainConfig, policy: ModelArch) -> EvaluationData:
    """Load tokenizer and evaluation sets of this configuration, without training prompts. Errors as `load_run_data`."""
    tokenizer, cache = checked_tokenizer(config, policy), open_cache(config.run)
    images = images_of_run(config, cache, trains=False)
    data = load_sets(config, tokenizer, cache, images)
    return replace(data, notes=(*data.notes, *image_notes(images), *cache.notes))


def load_sets(
    config: TrainConfig,
    tokenizer: Tokenizer,
    cache: Cache,
    images: PromptImages | None,
    train: PromptSet | None = None,
    parts: Mapping[str, PreparedPart] | None = None,
) -> EvaluationData:
    """Load the evaluation sets with what scores them, and check rewards and environment against these and `train`. Errors as
    `load_run_data`. images: opened by `images_of_run`. parts: of `reward`, if they are loaded."""
    evaluations = load_evaluations(config, tokenizer, cache, images)
    by_reward = {key_of(one.name): one.prompts for one in evaluations if one.reward is None}
    if train is not None:
        by_reward = {"data.train": train} | by_reward
    if parts is None:
        parts = load_parts(config.reward) if by_reward else {}
    environment = load_environment(config, tokenizer, images)
    notes = [*_answer_notes(config, parts, train, evaluations, environment)]
    notes += [*reward_notes(config.reward, parts, by_reward, cache), *check_evaluations(evaluations, cache)]
    scored = _scored_texts(config, train, evaluations, cache, images)
    return EvaluationData(
        tokenizer=tokenizer,
        evaluations=evaluations,
        notes=(*notes, *scored.notes),
        reward_parts=parts,
        reward_text=scored.text,
        environment=environment,
        images=images,
    )


def _answer_notes(
    config: TrainConfig,
    parts: Mapping[str, PreparedPart],
    train: PromptSet | None,
    evaluations: Sequence[EvaluationSet],
    environment: PreparedEnvironment | None,
) -> Iterator[str]:
    """Yield a note for each set with records without a reference answer. ConfigError if a reward or the environment reads it."""
    sets = [] if train is None else [("data.train", train, config.reward, parts, AnswerKey(config.data.answer_key))]
    for one in evaluations:
        its_parts = parts if one.reward is None else one.reward_parts
        key = AnswerKey(str(one.settings.answer_key))
        if one.name in config.evaluations and config.evaluations[one.name].answer_key is not None:
            key = key._replace(option=f"evaluations.{one.name}.answer_key")
        sets.append((key_of(one.name), one.prompts, one.reward or config.reward, its_parts, key))
    for name, prompts, reward, its_parts, key in sets:
        if not prompts.unanswered:
            continue
        try:
            check_answers(reward, its_parts, key, prompts)
            if environment is not None and environment.function.reads("answer"):
                require_answer(prompts[prompts.unanswered[0]], key, environment.function.origin)
        except ConfigError as error:
            is_named = not name.startswith("evaluations.") or key.option.startswith("evaluations.")
            raise ConfigError(str(error) if is_named else f"{name.removesuffix('.data')}: {error}") from None
        count = f"{len(prompts.unanswered):,} of {len(prompts):,} records"
        yield f"{name}: {count} have no reference answer ({key.option}={key.field}), which is an empty text for the reward"


def _text_data(config: TrainConfig, tokenizer: Tokenizer, cache: Cache) -> TextData | None:
    ptx = config.algorithm.ptx
    if ptx is None:
        return None
    try:
        texts = texts_of(open_sources(ptx.data), tokenizer, TextRules(ptx.text_key, ptx.max_tokens), cache)
    except ValueError as error:
        raise ConfigError(f"algorithm.ptx.data: {error}") from error
    if ptx.batch_size > len(texts):
        fix = f"is more than the {texts.summary()}; lower it or add texts"
        raise ConfigError(problem("algorithm.ptx.batch_size", ptx.batch_size, fix))
    return TextData(texts, PromptLoader(len(texts), ptx.batch_size, shuffle=True, seed=config.run.seed))


def _loader(config: TrainConfig, train: PromptSet, cache: Cache) -> PromptLoader:
    data, seed = config.data, config.run.seed
    weights = None if data.weight_key is None else weights_of(train, data.weight_key, cache)
    rates = None
    if (curriculum := data.curriculum) is not None:
        rates = PassRates(len(train), curriculum.pass_score, curriculum.min_chance, seed)
    order = {"shuffle": data.shuffle, "seed": seed, "weights": weights, "pass_rates": rates}
    if (staleness := config.rollout.max_staleness) is None:
        return PromptLoader(len(train), data.prompts_per_step, **order)
    ahead = {"staleness": staleness, "n": config.rollout.samples_per_prompt}
    return AheadLoader(len(train), data.prompts_per_step, **ahead, **order)


def steps_of(config: AnyConfig, loader: PromptLoader) -> int:
    """Count the steps of a run. ConfigError for a schedule that is longer."""
    steps = config.trainer.steps or loader.num_steps(config.trainer.epochs)  # steps is None or >= 1
    for message in step_problems(config, steps):
        raise ConfigError(message)
    return steps


def _scored_texts(
    config: TrainConfig,
    train: PromptSet | None,
    evaluations: Sequence[EvaluationSet],
    cache: Cache,
    images: PromptImages | None,
) -> ScoredTexts:
    """Load the reward model's text format and check it against the prompts of all sets that it scores; empty if it scores none."""
    sets = {"data.train": (train, config.data)} if train is not None and uses_model(config.reward) else {}
    for one in evaluations:
        if uses_model(one.reward or config.reward):
            sets[key_of(one.name)] = (one.prompts, config_of_set(config, one.settings).data)
    return load_reward_text(config, sets, cache, images)


def tokenizer_of(config: AnyConfig) -> Tokenizer:
    """Open the tokenizer of a run; what ends a response of its model counts too. ValueError as `load_tokenizer`."""
    model = model_of_tokenizer(config)
    return load_tokenizer(config.data.tokenizer or model, model, config.data.template_args)


def checked_tokenizer(config: AnyConfig, policy: ModelArch) -> Tokenizer:
    """Open the tokenizer of a run. ConfigError if it has ids that the model lacks; otherwise as `tokenizer_of`."""
    tokenizer = tokenizer_of(config)
    if tokenizer.vocab_size > policy.vocab_size:  # the reverse is common: models pad their vocabulary
        fix = f"has {tokenizer.vocab_size} ids and policy.model only {policy.vocab_size}; use the tokenizer of the model"
        raise ConfigError(problem("data.tokenizer", str(tokenizer.path), fix))
    return tokenizer
