"""Helpers of the tests of `token_advantages`: loops over tokens in fp64 written from the contract, batches, and the comparison."""

import math

import torch

from megappo.ops import advantages as op

MASKS = ("random", "all", "none", "prefix", "suffix")
OF_TOKENS = ("token_reward", "steps", "weight", "trace")
# Tiles of Triton's kernel so small that short batches cross their borders, and are carried over the tiles in several turns.
SMALL_TILES = {"megappo.ops.triton.advantages.BLOCK": 64, "megappo.ops.triton.advantages.TILES_AT_ONCE": 4}


def token_advantages(value, response_mask, cu_seqlens, bootstrap=None, **given):
    """The op, with the fields of its values as arguments."""
    values = []
    for kind in (op.Rewards, op.Discount, op.TimeSteps):
        values.append(kind(**{name: given.pop(name) for name in kind._fields if name in given}))
    rewards, discount, times = values
    assert not given, given.keys()
    return op.token_advantages(rewards, value, response_mask, cu_seqlens, bootstrap, discount, times)


def examples(request):
    """Number of hypothesis's examples for which the implementation of this test is quick enough."""
    return 60 if request.node.callspec.params["kernels"].split()[0] in ("reference", "cpp") else 6


def oracle(reward, value, mask, cu, bootstrap, gamma, lam_policy, lam_value):
    """GAE over lists of Python floats; lam_* and bootstrap per sequence. Walks a sequence from its last token to its first."""
    advantage, returns = [0.0] * len(value), [0.0] * len(value)
    for b in range(len(cu) - 1):
        next_value = bootstrap[b] if bootstrap is not None else 0.0
        acc_policy = acc_value = 0.0
        for t in reversed(range(cu[b], cu[b + 1])):
            if not mask[t]:
                continue
            delta = reward[t] + gamma * next_value - value[t]
            acc_policy = delta + gamma * lam_policy[b] * acc_policy
            acc_value = delta + gamma * lam_value[b] * acc_value
            advantage[t], returns[t] = acc_policy, acc_value + value[t]
            next_value = value[t]
    return advantage, returns


def steps_oracle(reward, value, mask, steps, weight, trace, cu, bootstrap, gamma, lam_policy, lam_value):
    """GAE and V-trace over the time steps among the sampled tokens, in Python floats: A_k = w_k (R_k - V_k + gamma V_k+1 + gamma
    lambda c_k+1 A_k+1), R_k the sum of the rewards from step k to the next one. Lists over tokens, as `oracle`."""
    advantage, returns = [0.0] * len(value), [0.0] * len(value)
    for b in range(len(cu) - 1):
        sampled = [t for t in range(cu[b], cu[b + 1]) if mask[t]]
        starts = [t for t in sampled if steps is None or steps[t]]
        following, next_value, trace_of_next = cu[b + 1], bootstrap[b] if bootstrap is not None else 0.0, 0.0
        next_policy = next_critic = 0.0
        for t in reversed(starts):
            own = math.fsum(reward[s] for s in sampled if t <= s < following)
            w, c = (1.0 if x is None else x[t] for x in (weight, trace))
            plain = own - value[t] + gamma * next_value
            advantage[t] = w * (plain + gamma * lam_policy[b] * trace_of_next * next_policy)
            critic = w * (plain + gamma * lam_value[b] * trace_of_next * next_critic)
            returns[t] = critic + value[t]
            following, next_value, trace_of_next, next_policy, next_critic = t, value[t], c, advantage[t], critic
    return advantage, returns


def shaped_reward(logprob, ref_logprob, score, mask, cu, kl_estimator, kl_coef):
    reward = [0.0] * len(mask)
    for b in range(len(cu) - 1):
        sampled = [t for t in range(cu[b], cu[b + 1]) if mask[t]]
        for t in sampled if kl_coef and ref_logprob is not None else ():
            d = logprob[t] - ref_logprob[t]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.expm1(min(-d, 20.0)) + d}[kl_estimator]
            reward[t] = -kl_coef * kl
        if sampled:
            reward[sampled[-1]] += score[b]
    return reward


def sequence_mask(kind, length, generator):
    if kind == "random":
        return torch.rand(length, generator=generator) < 0.6
    position = torch.arange(length)
    return {"all": position >= 0, "none": position < 0, "prefix": position < length // 2, "suffix": position >= length // 2}[kind]


def batch(lengths, seed=0, mask="random"):
    """Inputs of token_advantages; mask "mixed" takes another kind for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
    total, count = int(cu[-1]), len(lengths)
    fields = torch.randn(3, total, generator=generator)
    kinds = [MASKS[i % len(MASKS)] if mask == "mixed" else mask for i in range(count)]
    masks = [sequence_mask(kind, length, generator) for kind, length in zip(kinds, lengths)]
    return {
        "logprob": -fields[0].abs(),
        "ref_logprob": -fields[0].abs() + 0.3 * fields[1],
        "score": torch.randn(count, generator=generator),
        "value": fields[2],
        "response_mask": torch.cat([torch.zeros(0, dtype=torch.bool), *masks]),
        "cu_seqlens": cu.int(),
        "bootstrap": torch.randn(count, generator=generator),
    }


def rewards_batch(lengths, seed=0, mask="random"):
    """Inputs of token_advantages for plain GAE of given rewards; logprob is not to be read."""
    x = batch(lengths, seed, mask)
    score, unread = torch.zeros_like(x["score"]), torch.full_like(x["logprob"], torch.nan)
    return {**x, "logprob": unread, "ref_logprob": None, "score": score, "token_reward": x["logprob"]}


def with_tokens(inputs, names=OF_TOKENS, seed=0):
    """The inputs with some of OF_TOKENS. Of the steps some sequences lack the first sampled token, and some have none."""
    size, generator = inputs["value"].numel(), torch.Generator().manual_seed(seed)
    drawn = torch.rand(4, size, generator=generator, dtype=torch.float64)
    given = {"token_reward": 2 * drawn[0].float() - 1, "steps": drawn[1] < 0.5, "weight": 1.5 * drawn[2], "trace": drawn[3]}
    return {**inputs, **{name: given[name] for name in names}}


def check(device, inputs, call=token_advantages, gamma=0.98, lam_policy=0.9, lam_value=0.97, kl_estimator="k1", kl_coef=0.05):
    """Results of the call, on the host, after a comparison with the loops."""
    lams = {"lam_policy": lam_policy, "lam_value": lam_value}
    got = call(**on(device, inputs), gamma=gamma, kl_estimator=kl_estimator, kl_coef=kl_coef, **on(device, lams))
    reward, advantage, returns, moments = (x.cpu() for x in got)
    mask, count = inputs["response_mask"], inputs["score"].numel()
    logprob, ref_logprob, score, value, sampled, cu, bootstrap = lists(*list(inputs.values())[:7])
    inner, steps, weight, trace = lists(*(inputs.get(name) for name in OF_TOKENS))
    want_reward = shaped_reward(logprob, ref_logprob, score, sampled, cu, kl_estimator, kl_coef)
    if inner is not None:
        want_reward = [a + b if at else a for a, b, at in zip(want_reward, inner, sampled)]
    numbers = cu, bootstrap, gamma, per_sequence(lam_policy, count), per_sequence(lam_value, count)
    if steps is None and weight is None and trace is None:
        want = oracle(want_reward, value, sampled, *numbers)
    else:
        want = steps_oracle(want_reward, value, sampled, steps, weight, trace, *numbers)
    at_steps = mask if steps is None else mask & inputs["steps"]
    assert_rounded(reward, want_reward, mask, "reward")
    assert_rounded(advantage, want[0], at_steps, "advantage")
    assert_rounded(returns, want[1], at_steps, "returns")
    assert_moments(moments, advantage, at_steps)
    return reward, advantage, returns, moments


def on(device, inputs):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def lists(*tensors):
    return [x.tolist() if x is not None else None for x in tensors]


def per_sequence(lam, count):
    return lam.tolist() if isinstance(lam, torch.Tensor) else [lam] * count


def assert_rounded(got, want, mask, name):
    """One rounding to fp32 of each result, and 0 where masked."""
    want = torch.tensor(want, dtype=torch.float64)
    atol = 2**-40 * max(float(want.abs().max()) if want.numel() else 0.0, 1.0)
    torch.testing.assert_close(got.double(), want, rtol=2**-23, atol=atol, msg=lambda m: f"{name}: {m}")
    assert got.dtype == torch.float32 and not got[~mask].any(), name


def assert_moments(moments, advantage, mask):
    kept = advantage[mask].double()
    want = torch.tensor([float(kept.numel()), float(kept.sum()), float(kept.square().sum())], dtype=torch.float64)
    torch.testing.assert_close(moments, want, rtol=1e-12, atol=1e-12 * max(1.0, float(kept.abs().sum())))
