"""Rules about what a run learns by: estimators, losses, corrections for the sampler, penalties, rewards, evaluations.
Their signature is in `settings.py`. What of a key is not taken over although the rest is goes to `Settings.lost`."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from megappo.commands.convert.settings import Settings, Values, implied, missing, number, same, translated, unneeded
from megappo.commands.convert.single_values import listed, rules_of_data
from megappo.config.foreign.rule import Rule

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
# Group means without a division by the standard deviation; those that whiten the whole batch after that.
UNDIVIDED = ("reinforce_plus_plus_baseline", "reinforce_baseline", "dr_grpo")
WHITENED = ("reinforce_plus_plus_baseline", "reinforce_baseline")
OFF = (None, False, "", "none", "null", -1)
OVERLONG = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")  # verl's, before and after a move
SHAPING = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length", "stop_properly_penalty_coef")  # NeMo-RL's
SCALING = {"source_min": 0.0, "source_max": 1.0, "target_min": 0.0, "target_max": 1.0}  # NeMo-RL's, with its defaults
SAMPLED = {"do_sample": False, "temperature": 0, "n": 1, "top_p": 1.0, "top_k": -1}  # verl's validation, likewise
GREEDY: dict[str, Any] = {}  # keys of a set of `evaluations` with its defaults
ADAPTER = "verl_reward.py"


def estimator(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate the estimator of the advantages, with the two switches of a comparison inside a group."""
    ours = translated(rule, value)
    if ours == "gae":
        raise implied("GAE")
    found = {"algorithm.estimator.type": ours}
    if ours == "grpo":
        divided = bool(settings.foreign.get("algorithm.norm_adv_by_std_in_grpo", True))  # verl's
        found["algorithm.estimator.divide_by_group_std"] = divided and value not in UNDIVIDED
    return found | ({"algorithm.whiten_advantages": True} if value in WHITENED else {})


# ------------------------------------------------------------------------------------------------------------------ losses


def loss(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate the policy's loss. GSPO averages over the tokens of a response, then over responses, whatever is set beside it."""
    ours = translated(rule, value)
    if ours == "ppo":
        raise implied("PPO's clipped loss")
    return {"algorithm.loss.type": ours} | ({"algorithm.loss_aggregation": "seq-mean-token-mean"} if ours == "gspo" else {})


def aggregation(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate the reduction of token losses, which GSPO does not read."""
    keys = (f"{ACTOR}.policy_loss.loss_mode", "policy_loss_type", "loss_fn.sequence_level_importance_ratios")
    if any(settings.foreign.get(key) in ("gspo", True) for key in keys):
        raise implied("gspo has its own")
    return same(rule.keys, translated(rule, value))


def verl_dual_clip(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take verl's dual clip, which its losses other than PPO's do not read."""
    mode = settings.foreign.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode in ("gspo", "cispo"):
        raise implied(f"verl's {mode} does not read it")
    return same(rule.keys, value)


# -------------------------------------------------------------------------------------------- the sampler's probabilities


def verl_correction(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate verl's weights by the ratio to the sampler, with the bounds outside of which it leaves samples out."""
    if value in OFF:
        raise unneeded()
    if settings.foreign.get(f"{CORRECTION}.bypass_mode"):
        raise implied("with bypass_mode the ratio of the loss is to the sampler already")
    if value not in ("token", "sequence"):
        raise missing("weights are of tokens or of sequences")
    level = str(value)
    high = number(settings.foreign.get(f"{CORRECTION}.rollout_is_threshold", 2.0))
    bounds = _rejected(level, high, settings)
    if bounds is not None:
        return _correction("icepop", level=level, low=bounds[0], high=bounds[1], count_rejected=False)
    return _correction("tis", level=level, high=high)


def verl_rejection(rule: Rule, value: Any, settings: Settings) -> Values:
    """Say whether `verl_correction` takes verl's rejection over."""
    if value in OFF:
        raise unneeded()
    level = settings.foreign.get(f"{CORRECTION}.rollout_is")
    if _rejected(level, number(settings.foreign.get(f"{CORRECTION}.rollout_is_threshold", 2.0)), settings) is None:
        raise missing("samples are left out by the ratio that weighs them, alone: see icepop and mis")
    raise implied("with rollout_is it is icepop")


def _rejected(level: Any, high: float, settings: Settings) -> tuple[float, float] | None:
    """Bounds of the ratio outside of which verl leaves out what `rollout_is` weighs; None if it compares something else."""
    kind, spec = (settings.foreign.get(f"{CORRECTION}.{name}") for name in ("rollout_rs", "rollout_rs_threshold"))
    if kind != {"token": "token_k1", "sequence": "seq_sum_k1"}.get(str(level)):
        return None
    try:
        parts = [float(part) for part in str(spec).split("_")]
        low, top = parts if len(parts) == 2 else (1 / parts[0], parts[0])
    except (ValueError, ZeroDivisionError):
        return None
    # verl compares the inverse of the ratio. Above `high` it would cut the weight and icepop would not.
    return (1 / top, 1 / low) if 0 < low < top and 1 / low <= high else None


def verl_bypass(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take the sampler's log-probs as the old ones, as PPO's loss does in verl's bypass mode."""
    if value in OFF:
        raise unneeded()
    if settings.foreign.get(f"{CORRECTION}.loss_type", "ppo_clip") != "ppo_clip":
        raise missing("REINFORCE with the ratio to the sampler is not there; dis is the nearest")
    return same(rule.keys, "behaviour")


def tis_cap(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take the bound of the weights of verl before it had a section for them."""
    if value in OFF or number(value) <= 0:
        raise unneeded()
    return _correction("tis", level="token", high=value)


def openrlhf_correction(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate OpenRLHF's weights: today a pair of bounds, before that an upper bound alone."""
    kind = settings.foreign.get("algo.advantage.is_correction_type", "tis")
    bounds = settings.foreign.get("vllm_is_truncated_threshold", [0.5, 5.0])
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (None, bounds)
    if kind == "icepop":
        return _correction("icepop", level="token", low=number(low), high=number(high))
    if kind != "tis":
        raise missing(f"{kind}: there are tis, mis and icepop")
    if low is not None:
        settings.lost.append(f"the lower bound {low} of the weights of the correction: tis cuts them above alone")
    return _correction("tis", level="token", high=number(high))


def nemo_correction(rule: Rule, value: Any, settings: Settings) -> Values:
    """Translate NeMo-RL's weights, which have a bound only if their kind is named."""
    names = ("type", "ratio", "ratio_min")
    kind, high, low = (settings.foreign.get(f"loss_fn.truncated_importance_sampling_{name}") for name in names)
    level = "sequence" if settings.foreign.get("loss_fn.sequence_level_importance_ratios") else "token"
    if kind == "tis":
        if low is not None:
            settings.lost.append(f"loss_fn.truncated_importance_sampling_ratio_min = {low}: tis cuts weights above alone")
        return _correction("tis", level=level, high=number(high))
    if kind == "icepop":
        return _correction("icepop", level=level, low=number(low), high=number(high))
    raise missing("weights without a bound are not there: see tis" if kind is None else f"{kind}: there are tis, mis and icepop")


def _correction(kind: str, **settings: Any) -> Values:
    section = "algorithm.importance_sampling"
    return {f"{section}.type": kind} | {f"{section}.{key}": value for key, value in settings.items()}


# --------------------------------------------------------------------------------------------------------------- rewards


def _overlong(buffer: Any, penalty: Any, longest: Any) -> Values:
    """DAPO's penalty: from 0 at `longest - buffer` response tokens to `penalty` at `longest`."""
    if number(buffer) <= 0 or number(penalty) <= 0:
        raise unneeded()
    start = int(number(longest)) - int(buffer)
    return {"reward.length_penalty.per_token": penalty / buffer, "reward.length_penalty.start": max(0, start)}


def verl_overlong(rule: Rule, value: Any, settings: Settings) -> Values:
    section = next((name for name in OVERLONG if f"{name}.enable" in settings.written), OVERLONG[0])
    longest = settings.ours.get("rollout.max_response_tokens", 512)
    return _overlong(settings.foreign.get(f"{section}.len"), settings.foreign.get(f"{section}.penalty_factor", 1.0), longest)


def nemo_overlong(rule: Rule, value: Any, settings: Settings) -> Values:
    of = {name: settings.foreign.get(f"ppo.reward_shaping.{name}") for name in SHAPING}
    if of["stop_properly_penalty_coef"] is not None:
        raise missing("scores of cut responses are not scaled: see reward.missing_eos_penalty")
    return _overlong(of["overlong_buffer_length"], of["overlong_buffer_penalty"], of["max_response_length"])


def openrlhf_overlong(rule: Rule, value: Any, settings: Settings) -> Values:
    longest = settings.ours.get("rollout.max_response_tokens", 1024)
    return _overlong(value, settings.foreign.get("overlong_penalty_factor", 1.0), longest)


def reward_scale(rule: Rule, value: Any, settings: Settings) -> Values:
    """Give the parts of the reward the weight by which NeMo-RL's linear map stretches them. Parts have no constant."""
    of = {name: number(settings.foreign.get(f"ppo.reward_scaling.{name}", end)) for name, end in SCALING.items()}
    if of["source_max"] <= of["source_min"]:
        raise missing("the source's range is empty")
    factor = (of["target_max"] - of["target_min"]) / (of["source_max"] - of["source_min"])
    constant = of["target_min"] - factor * of["source_min"]
    if constant:
        settings.lost.append(f"ppo.reward_scaling: the constant {constant:g} that it adds to every score; the factor is taken over")
    if factor == 1:
        raise implied("the factor is 1")
    chosen = rules_of_data("reward.parts", settings)  # None if the source names them
    parts = settings.ours["reward.parts"] if chosen is None else chosen[0]
    return {"reward.parts": [{**part, "weight": factor} for part in parts]}


def use_reward_file(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take verl's function of a file of the user's own as a part behind an adapter, which the report prints."""
    if not isinstance(value, str) or not value:
        raise unneeded()
    # The section was moved below `reward`.
    own = {key.removeprefix("reward."): one for key, one in settings.foreign.items() if "custom_reward_function." in key}
    prefix = "custom_reward_function.reward_kwargs."
    args = {key.removeprefix(prefix): one for key, one in own.items() if key.startswith(prefix)}
    whole = own.get(prefix[:-1])
    args |= whole if isinstance(whole, dict) else {}
    name = str(own.get("custom_reward_function.name", "compute_score"))
    settings.lines += adapter(value, name)
    return {"reward.parts": [{"path": ADAPTER, "function": "score"} | ({"args": args} if args else {})]}


def adapter(path: str, name: str) -> list[str]:
    """Lines of a file that calls verl's `NAME(data_source, solution_str, ground_truth, extra_info)` for a response of ours."""
    found = "sample.record.get"
    call = f'verl({found}("data_source"), sample.response, sample.answer, {found}("extra_info"), **args)'
    return [
        f"save these lines as {ADAPTER} in the working directory:",
        f"    verl = __import__('runpy').run_path({path!r})[{name!r}]",
        "    def score(sample, **args):",
        f"        return (lambda found: found['score'] if isinstance(found, dict) else float(found))({call})",
    ]


# ----------------------------------------------------------------------------------------------------------- evaluations


def val_sampling(rule: Rule, value: Any, settings: Settings) -> Values:
    """Make verl's validation a set of `evaluations` where it is not greedy with one answer a prompt, as `data.eval` is."""
    sampling, data = _sampling(settings), settings.ours.get("data.eval")
    if sampling == GREEDY:
        raise implied("a validation is greedy, with one answer a prompt")
    if "evaluations" in settings.ours:
        return {"evaluations": settings.ours["evaluations"]}  # `validation_files` took it over
    if not isinstance(data, str):
        raise missing("no validation file to draw from: see evaluations")
    return {"evaluations": {"validation": {"data": data, **sampling}}}


def validation_files(rule: Rule, value: Any, settings: Settings) -> Values:
    """Take one validation file as `data.eval`, and each of several as a set of its own, by the name of the file."""
    files = listed(value)
    if len(files) == 1:
        return {"data.eval": files[0]}
    names = [re.sub(r"\W+", "_", PurePosixPath(str(file)).stem).strip("_") or "set" for file in files]
    named = [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)]
    return {"evaluations": {name: {"data": file, **_sampling(settings)} for name, file in zip(named, files)}}


def _sampling(settings: Settings) -> dict[str, Any]:
    """Keys of a set of `evaluations` that draws as verl's validation does."""
    of = {name: settings.foreign.get(f"actor_rollout_ref.rollout.val_kwargs.{name}", default) for name, default in SAMPLED.items()}
    n = int(number(of["n"]))
    if not of["do_sample"] or of["temperature"] == 0:
        return GREEDY if n == 1 else {"n": n, "temperature": 0.0}
    top_k = -1 if of["top_k"] in (None, 0) else int(number(of["top_k"]))
    return {"n": n, "temperature": float(number(of["temperature"])), "top_p": float(number(of["top_p"])), "top_k": top_k}
