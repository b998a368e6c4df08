"""Runs of the engine tests inside spawned gloo worlds: short PPO-like updates of policy and critic on one recorded batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megappo.algo.aggregation import token_weights
from megappo.algo.alignment import first_token_mask
from megappo.config.role_sections import CriticConfig, DecayingLRConfig, Offload, OptimizerConfig, PolicyConfig
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch, pack
from tests.engine.whole import on_whole_batches

STEPS = 2
SEQUENCES = 9
# Adam divides by |g| + eps: with the usual 1e-8 a weight whose gradient is rounding noise would move by a full step of random sign.
ADAM_EPS = 1e-5


def recorded_batch() -> PackedBatch:
    """Random sequences with gaps in the response mask, as if recorded from a rollout; the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 24, (SEQUENCES,), generator=generator).tolist()
    batch = pack([torch.randint(3, 131, (n,), generator=generator).tolist() for n in lengths])
    mask = (torch.rand(batch.num_tokens, generator=generator) < 0.6) & ~first_token_mask(batch.num_tokens, batch.cu_seqlens)
    noise = torch.randn(batch.num_tokens, generator=generator)
    return batch.with_fields(
        {
            "response_mask": mask,
            "advantage": torch.where(mask, noise, 0.0),
            "returns": torch.where(mask, noise.cos(), 0.0),
            "weight": token_weights("token-mean", mask, batch.cu_seqlens).weight,
        }
    )


def build_roles(
    path: str,
    groups,
    *,
    budget: int,
    dtype: str = "fp32",
    offload: bool | tuple[Offload, ...] = False,
    distributed: bool = True,
    recompute: str = "none",
):
    """Policy and critic on whole batches. offload: all parts, none, or those that are named."""
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch
    from megappo.trainer.roles import Critic, Policy

    arch = read_arch(path)
    if isinstance(offload, bool):
        offload = ("parameters", "gradients", "optimizer") if offload else ()
    common = dict(
        dtype=dtype,
        micro_batch_tokens=budget,
        recompute=recompute,
        optimizer=OptimizerConfig(lr=1e-3, eps=ADAM_EPS, distributed=distributed),
        offload=offload,
    )
    acts = EngineSpec("policy", path, arch, PolicyConfig(model=path, **common), total_updates=10)
    values = EngineSpec("critic", path, arch, CriticConfig(**common), value_head="normal", total_updates=10)
    policy, critic = (build_megatron(spec, groups, device=torch.device("cpu")) for spec in (acts, values))
    roles = Policy(policy, 0.7, AlgorithmConfig(entropy={"type": "bonus", "coef": 0.01})), Critic(critic)
    return tuple(map(on_whole_batches, roles))


def train(path: str, groups, batch: PackedBatch, **how) -> dict[str, object]:
    """Log-probs, values, losses and gradient norms of STEPS updates, as plain numbers."""
    policy, critic = build_roles(path, groups, **how)
    count = float(batch["weight"].sum())
    rows = []
    for step in range(STEPS):
        logprob, entropy = policy.logprobs(batch)
        value, bootstrap = critic.values(batch)
        if step == 0:
            recorded = batch.with_fields({"logprob": logprob, "value": value})
        with policy.engine.train_mode():
            acted = policy.update(recorded, count)
        with critic.engine.train_mode():
            valued = critic.update(recorded, count)
        rows.append(
            {
                "logprob": logprob.tolist(),
                "entropy": entropy.tolist(),
                "value": value.tolist(),
                "bootstrap": bootstrap.tolist(),
                "policy_loss": acted.losses.sums["surrogate_sum"] / count,
                "policy_grad_norm": acted.step.grad_norm,
                "critic_loss": valued.losses.sums["loss_sum"] / count,
                "critic_grad_norm": valued.step.grad_norm,
                "tokens": acted.losses.sums["tokens_sum"],
                "ratio_max": acted.losses.maxima["ratio_max"],
            }
        )
    return {"rows": rows, "micro_batches": acted.losses.num_micro_batches}


def worlds_of(rank: int, path: str, layouts: list[dict]) -> dict[str, object]:
    """Every layout (sizes of ParallelLayout) and its variants; what does not depend on the layout is run in a world of one."""
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    cpu_patches.install()
    results: dict[str, object] = {}
    batch = recorded_batch()
    for sizes in layouts:
        layout = ParallelLayout(dist.get_world_size(), **sizes)
        groups = build_groups(layout)
        results[str(layout)] = train(path, groups, batch, budget=64)
        results[f"{layout} offloaded"] = train(path, groups, batch, budget=64, offload=True)
        results[f"{layout} plain optimizer"] = train(path, groups, batch, budget=64, distributed=False)
        if layout.pp > 1 or dist.get_world_size() == 1:
            results[f"{layout} non-finite"] = non_finite(path, groups, batch)
        for distributed in (True, False) if dist.get_world_size() > 1 else ():
            name = f"{layout} non-finite on rank 1, {'sharded' if distributed else 'plain'}"
            results[name] = non_finite_on_rank_1(path, groups, batch, distributed)
        results[f"{layout} freed"] = freed_bytes(path, groups)
        if dist.get_world_size() == 1:
            results[f"{layout} one sequence"] = train(path, groups, batch, budget=1)
            results[f"{layout} whole"] = train(path, groups, batch, budget=10**6)
            results[f"{layout} schedule"] = schedule(path, groups)
    return results


def non_finite(path: str, groups, batch: PackedBatch) -> dict[str, object]:
    """One NaN advantage on one token: the step is skipped everywhere, and the third in a row stops the run."""
    from megappo.engine.role_engine import NonFiniteGradient

    policy, _ = build_roles(path, groups, budget=64)
    logprob, _ = policy.logprobs(batch)
    advantage = batch["advantage"].clone()
    advantage[int(batch["response_mask"].nonzero()[0])] = torch.nan
    poisoned = batch.with_fields({"advantage": advantage, "logprob": logprob})
    before = [p.detach().clone() for p in policy.engine.named_parameters().values()]
    applied, error = [], ""
    with policy.engine.train_mode():
        try:
            for _ in range(3):
                applied.append(policy.update(poisoned, 10.0).step.applied)
        except NonFiniteGradient as stopped:
            error = str(stopped)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, policy.engine.named_parameters().values()))
    return {"applied": applied, "unchanged": unchanged, "error": error}


def non_finite_on_rank_1(path: str, groups, batch: PackedBatch, distributed: bool) -> dict[str, object]:
    """Put NaN into one reduced gradient of rank 1 alone: in two steps, not in the third, then in three in a row."""
    from megappo.engine.role_engine import NonFiniteGradient

    policy, _ = build_roles(path, groups, budget=64, distributed=distributed)
    logprob, _ = policy.logprobs(batch)
    recorded = batch.with_fields({"logprob": logprob})
    name, applied, unchanged, error = "", [], True, ""
    optimizer = policy.engine._optimizer
    plain_step = optimizer.step

    def poisoned_step():
        nonlocal name
        if dist.get_rank() == 1 and len(applied) != 2:
            # Of a plain optimizer any; a sharded one reads the shard of this rank alone, which is the end of the buffer.
            name, gradient = list(policy.engine.named_gradients().items())[0]
            gradient.view(-1)[-1] = torch.nan
        return plain_step()

    optimizer.step = poisoned_step
    with policy.engine.train_mode():
        try:
            for _ in range(6):
                before = [p.detach().clone() for p in policy.engine.named_parameters().values()]
                applied.append(policy.update(recorded, 10.0).step.applied)
                same = all(torch.equal(a, b) for a, b in zip(before, policy.engine.named_parameters().values()))
                unchanged &= same != applied[-1]
        except NonFiniteGradient as stopped:
            error = str(stopped)
    names: list = [None] * 2
    dist.all_gather_object(names, name)
    return {"applied": applied, "unchanged": unchanged, "error": error, "poisoned": names[1]}


def freed_bytes(path: str, groups) -> dict[str, int]:
    """Bytes behind the parameters while the role works and while it is offloaded."""
    policy, _ = build_roles(path, groups, budget=64, offload=True)

    def resident() -> int:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in policy.engine.named_parameters().values()}
        return sum(storages.values())

    with policy.engine.eval_mode():
        working = resident()
    return {"working": working, "offloaded": resident()}


def schedule(path: str, groups) -> list[float]:
    """Learning rates of ten steps with two warm-up steps and a linear decay to a tenth."""
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch

    optimizer = OptimizerConfig(lr=1.0, lr_schedule=DecayingLRConfig(type="linear", min_ratio=0.1), warmup_steps=2)
    config = PolicyConfig(model=path, dtype="fp32", optimizer=optimizer)
    spec = EngineSpec("policy", path, read_arch(path), config, total_updates=10)
    engine = build_megatron(spec, groups, device=torch.device("cpu"))
    return [engine.lr_scheduler_step() for _ in range(10)]
