"""Rules about how a run samples: vLLM's limits, pushes of weights, partial rollouts, trajectories of several turns (see
`checks.py`). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megappo.config.environment_sections import CompactionConfig, EnvironmentConfig
from megappo.config.errors import problem
from megappo.config.evaluations import DEFAULT, evaluation_sets
from megappo.config.layout_checks import scores_with_model
from megappo.config.rank_ranges import ALL
from megappo.config.schema import TrainConfig

# Ids recorded for a sampled token: 4 bytes each in the experience, and about 90 in vLLM's Python lists while it generates.
MAX_REPLAYED_TOP_K = 128
MAX_VLLM_RANK = 512  # vLLM 0.32, MaxLoRARanks


def push_problem(config: TrainConfig) -> str | None:
    """Refuse weights that vLLM would lose between two pushes, and evaluations of older weights than those of their step."""
    every = config.rollout.push_every
    if every == 1 or config.rollout.engine == "megatron":
        return None
    if config.rollout.sleep == "all":
        fix = f"vLLM would lose its weights after each step, and rollout.push_every = {every} pushes none for the next; use cache"
        return problem("rollout.sleep", "all", fix)
    for name, one in evaluation_sets(config).items():
        interval = one.every or 0
        if interval % every:
            written = name != DEFAULT and config.evaluations[name].every is not None
            key = f"evaluations.{name}.every" if written else "trainer.eval_every"
            below = interval - interval % every
            nearest = f"{below} or {below + every}" if below else str(every)
            fix = f"would evaluate older weights than those of the step; use a multiple of rollout.push_every = {every}: {nearest}"
            return problem(key, interval, fix)
    return None


def push_steps_problem(config: TrainConfig) -> str | None:
    """Refuse a push interval after which no step samples; `trainer.steps` may be None until the data is known."""
    every, steps = config.rollout.push_every, config.trainer.steps
    if every > 1 and steps is not None and every >= steps:
        fix = f"the run has {steps} steps, so none would sample from trained weights; use less than {steps}"
        return problem("rollout.push_every", every, fix)
    return None


def partial_rollout_problem(config: TrainConfig) -> str | None:
    """Refuse partial rollouts that cut nothing, or beside settings that need whole responses, complete groups or all turns."""
    window, longest = config.rollout.partial_rollout_tokens, config.rollout.max_response_tokens
    if window is None:
        return None
    if window >= longest:
        fix = f"every response ends within a step: none has more than rollout.max_response_tokens {longest}; lower it, or use null"
        return problem("rollout.partial_rollout_tokens", window, fix)
    for key, value, because in _needs_whole_responses(config):
        return problem(key, value, f"{because}; change it, or set rollout.partial_rollout_tokens to null")
    return None


def _needs_whole_responses(config: TrainConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, reason) of settings that exclude windows."""
    a = config.algorithm
    if a.estimator.type != "gae":
        because = "responses that go on have no reward yet, and windows need gae's values in its place"
        yield "algorithm.estimator.type", a.estimator.type, because
    if a.by_turns:
        yield "algorithm.estimator.level", "turn", "a turn that goes on has its value at a token of an earlier step"
    if a.dynamic_sampling is not None:
        because = "it compares the scores of all responses to a prompt, which end in other steps"
        yield "algorithm.dynamic_sampling", a.dynamic_sampling.model_dump(exclude_unset=True), because
    if config.critics:
        yield "critics", list(config.critics), "critics share responses by their places in a step, which change as responses go on"
    if a.loss.type == "gspo":
        yield "algorithm.loss.type", "gspo", "its ratio is of a whole response, of which a step has some tokens"
    if a.importance_sampling.type != "none" and a.importance_sampling.level != "token":
        because = "its ratio is of a whole response, of which a step has some tokens"
        yield "algorithm.importance_sampling.level", a.importance_sampling.level, because
    if a.kl.placement == "reward" and a.kl.controller.type == "adaptive":
        yield "algorithm.kl.controller.type", "adaptive", "it steers by the KL of whole responses, of which a step has some tokens"
    if (refresh := config.reference.refresh) is not None and refresh.above_kl is not None:
        key = "reference.refresh.above_kl"
        yield key, refresh.above_kl, "it goes by the KL of whole responses, of which a step has some tokens"
    if config.rollout.environment is not None:
        section = config.rollout.environment.model_dump(mode="json", exclude_unset=True)
        yield "rollout.environment", section, "trajectories of several turns do not go on in later steps"
    if config.rollout.stop:
        yield "rollout.stop", list(config.rollout.stop), "a string may lie across two windows, where no step sees all of it"


def staleness_problem(config: TrainConfig) -> str | None:
    """Refuse generation beside training with settings that need a step's responses before the next prompts, or other weights."""
    if config.rollout.max_staleness is None:
        return None
    for key, value, because in _needs_turns(config):
        return problem(key, value, f"{because}; change it, or set rollout.max_staleness to null")
    return None


def _needs_turns(config: TrainConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, reason) of settings that exclude generation beside training."""
    rollout, a = config.rollout, config.algorithm
    if rollout.ranks == ALL:
        because = "what generates beside training needs ranks of its own: name the last ones, and the others in roles"
        yield "rollout.ranks", ALL, because
    if rollout.push_every > 1:
        yield "rollout.push_every", rollout.push_every, "with rollout.max_staleness every step pushes, into running requests; use 1"
    if rollout.partial_rollout_tokens is not None:
        because = "long responses run on beside training anyway; use null"
        yield "rollout.partial_rollout_tokens", rollout.partial_rollout_tokens, because
    if config.trainer.evaluate_with != "policy" and rollout.environment is not None:
        yield (
            "trainer.evaluate_with",
            config.trainer.evaluate_with,
            "trajectories whose turns are answered would go on under the average; use policy, or evaluate an export of the average",
        )
    if rollout.max_staleness and "importance_sampling" not in a.model_fields_set:
        fix = "responses of older weights ask for a choice: name tis, mis, icepop or none"
        yield "algorithm.importance_sampling.type", a.importance_sampling.type, fix


def environment_problem(config: TrainConfig) -> str | None:
    """Refuse an environment without code, limits never reached or without room, and settings that compaction rules out."""
    environment, longest = config.rollout.environment, config.rollout.max_response_tokens
    if environment is None:
        return None
    key = "rollout.environment"
    if (message := _code_problem(key, environment)) is not None:
        return message
    if environment.timeout_s is not None and not environment.workers:
        return problem(f"{key}.timeout_s", environment.timeout_s, "only a process can be ended; set workers, for example 4")
    if environment.join == "each" and not environment.workers:
        return problem(
            f"{key}.join", "each", "without workers a turn is answered at once; set workers, for example 4, or remove it"
        )
    if environment.turn_tokens is not None and environment.turn_tokens > longest:
        fix = f"no turn is longer than rollout.max_response_tokens {longest}; lower it, or use null"
        return problem(f"{key}.turn_tokens", environment.turn_tokens, fix)
    if environment.observation_tokens is not None and environment.observation_tokens >= longest:
        fix = (
            f"no turn could follow: a sequence has rollout.max_response_tokens {longest} behind its prompt; lower it, or raise that"
        )
        return problem(f"{key}.observation_tokens", environment.observation_tokens, fix)
    if environment.images:
        for other, value, because in _excluded_by_images(config, environment):
            return problem(other, value, f"{because}; change it, or set {key}.images to 0")
    if environment.compaction is None:
        return None
    return _compaction_problem(f"{key}.compaction", environment.compaction, config)


def _excluded_by_images(config: TrainConfig, environment: EnvironmentConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, reason) of settings that exclude images from an environment."""
    key = "rollout.environment"
    if environment.interface == "ids":
        yield f"{key}.interface", "ids", "images come with messages, not among ids"
    if environment.observation_tokens is not None:
        yield f"{key}.observation_tokens", environment.observation_tokens, "it could cut the place of an image"
    if environment.compaction is not None:
        section = environment.compaction.model_dump(mode="json", exclude_unset=True)
        yield f"{key}.compaction", section, "it could cut an image"
    if config.rollout.max_staleness is not None:
        because = "images of environments are not kept in the log of what is drawn beside training"
        yield "rollout.max_staleness", config.rollout.max_staleness, because
    if scores_with_model(config):
        because = "it would see the images of prompts alone, and the environment's as the text <image>"
        yield "reward_model.model", str(config.reward_model.model), because


def _code_problem(key: str, environment: EnvironmentConfig) -> str | None:
    if environment.path is None and environment.entry_point is None:
        return f"{key}.path is missing: name a Python file, or in entry_point an installed package's environment"
    if environment.path is not None and environment.entry_point is not None:
        return problem(f"{key}.entry_point", environment.entry_point, "path is set too; keep one of the two")
    if environment.path is not None and environment.function is None:
        return problem(f"{key}.path", environment.path, "name its function in the key function")
    if environment.entry_point is not None and environment.function is not None:
        return problem(f"{key}.function", environment.function, "an entry point names its function; remove it, or set path")
    return None


def _compaction_problem(key: str, compaction: CompactionConfig, config: TrainConfig) -> str | None:
    a, prompt, longest = config.algorithm, config.data.max_prompt_tokens, config.rollout.max_response_tokens
    unset = f"set {key} to null"
    if not a.has_critic:
        return problem(
            "algorithm.estimator.type", a.estimator.type, f"trajectories of several sequences need gae or vtrace; or {unset}"
        )
    if (rounds := a.dynamic_sampling) is not None:
        fix = f"its rounds do not replace trajectories of several sequences; set it to null, or {unset}"
        return problem("algorithm.dynamic_sampling", rounds.model_dump(exclude_unset=True), fix)
    if compaction.max_tokens <= prompt:
        fix = f"a new sequence may begin with data.max_prompt_tokens {prompt}, and would be compacted at once; use more"
        return problem(f"{key}.max_tokens", compaction.max_tokens, fix)
    if compaction.max_tokens >= prompt + longest:
        limits = f"data.max_prompt_tokens {prompt} + rollout.max_response_tokens {longest}"
        return problem(f"{key}.max_tokens", compaction.max_tokens, f"no sequence is longer than {limits}; use less, or {unset}")
    first, last = compaction.keep_first, compaction.keep_last
    if compaction.ask is not None:
        for name, value in (("keep_first", first), ("keep_last", last)):
            if value is not None:
                return problem(
                    f"{key}.{name}", value, "the new sequence has the prompt and the summary of ask; remove one of the two"
                )
        if config.rollout.stop:
            return problem("rollout.stop", list(config.rollout.stop), f"would end summaries too; remove it, or {key}.ask")
        return None
    if last is None:
        return f"{key}.keep_last is missing: name the tokens to keep, or in ask a message that asks for a summary"
    if (first or 0) + last > prompt:
        fix = f"with keep_first {first or 0} more than data.max_prompt_tokens {prompt}, which bounds what a sequence begins with"
        return problem(f"{key}.keep_last", last, f"{fix}; lower one of them, or raise that")
    return None


def greedy_problem(config: TrainConfig) -> str | None:
    if config.rollout.sampling.temperature == 0:
        fix = "greedy responses have no probability to train on; use a value > 0 (evaluation is always greedy)"
        return problem("rollout.sampling.temperature", 0.0, fix)
    return None


def top_k_problem(config: TrainConfig) -> str | None:
    return (
        problem("rollout.sampling.top_k", 0, "must be >= 1, or -1 for all tokens") if config.rollout.sampling.top_k == 0 else None
    )


def top_k_ids_problem(config: TrainConfig) -> str | None:
    """Refuse to record more ids per token for replay than MAX_REPLAYED_TOP_K."""
    sampling = config.rollout.sampling
    if not (sampling.replay_top_k_ids and sampling.truncates):
        return None
    without = "or rollout.sampling.replay_top_k_ids: false to train on log-probs of the whole vocabulary"
    if sampling.top_k < 1:  # top_p alone: the nucleus of a flat distribution is most of the vocabulary
        fix = f"may leave too many tokens to record for replay; set top_k too (1 to {MAX_REPLAYED_TOP_K}), {without}"
        return problem("rollout.sampling.top_p", sampling.top_p, fix)
    if sampling.top_k > MAX_REPLAYED_TOP_K:
        fix = f"recording so many ids of every sampled token costs too much; use at most {MAX_REPLAYED_TOP_K}, {without}"
        return problem("rollout.sampling.top_k", sampling.top_k, fix)
    return None


def replay_problem(config: TrainConfig) -> str | None:
    """Refuse to replay experts that the sampler does not record."""
    rollout = config.rollout
    if rollout.replay_experts in ("auto", "none") or rollout.replays_experts:
        return None
    because = (
        "Megatron's own generation records none"
        if rollout.engine == "megatron"
        else "the turns of an environment do not carry them"
    )
    return problem("rollout.replay_experts", rollout.replay_experts, f"{because}; use none, or leave it out")


def logits_problem(config: TrainConfig) -> str | None:
    """Refuse bf16 logits in the trainer where the sampler does not round its own."""
    if config.policy.logits_dtype == "fp32" or config.rollout.engine == "megatron":
        return None
    sampler = config.policy.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    if sampler == "fp32":  # it does not round: rounding on this side alone would add a difference instead of removing one
        return problem(
            "policy.logits_dtype", "bf16", "the logits of vLLM are fp32 (rollout.dtype, policy.dtype); use fp32, or sample in bf16"
        )
    return None


def adapter_problem(config: TrainConfig) -> str | None:
    """Refuse a separate adapter that vLLM cannot apply."""
    lora = config.policy.lora
    if config.rollout.adapter == "merged" or config.rollout.engine == "megatron" or lora is None:
        return None
    if lora.rank > MAX_VLLM_RANK:
        fix = f"vLLM applies adapters up to rank {MAX_VLLM_RANK}; lower it, or set rollout.adapter to merged"
        return problem("policy.lora.rank", lora.rank, fix)
    if config.rollout.sleep == "all":
        return problem("rollout.sleep", "all", "vLLM would lose the frozen weights, which rollout.adapter pushes once; use cache")
    if config.policy.in_8_bits:
        fix = "policy.lora.base_bits keeps the frozen weights in 8 bits, which are pushed with the adapters alone; use merged"
        return problem("rollout.adapter", "separate", fix)
    return None


def seed_problem(config: TrainConfig) -> str | None:
    if config.rollout.engine == "vllm" and config.run.seed >= 1 << 32:  # vLLM seeds numpy, which raises
        return problem("run.seed", config.run.seed, f"vLLM takes seeds up to {(1 << 32) - 1}; use a smaller one")
    return None


def stop_problem(config: TrainConfig) -> str | None:
    if "" in config.rollout.stop:
        return problem("rollout.stop", list(config.rollout.stop), "an empty string would end every response at once; remove it")
    return None
