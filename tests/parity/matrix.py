"""The parity matrix: which layouts are measured against one rank, on which model, and the runs that measure them.

`test_layouts.py` asserts on it and `tests/parity/page.py` prints it. Everything is replayed through the trainer's own stages by
`megappo.commands.verify.measure`; every layout is that of policy, critic and reference alike unless the table says otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.commands.verify.recording import num_top_k_ids, record_rollouts
from megappo.config.loading import validated
from megappo.config.schema import ESTIMATORS, TrainConfig
from megappo.parallel.layout import ParallelLayout
from tests.models.checkpoints import write_checkpoint

# Sizes of ParallelLayout; a pair of them is policy and critic. Four layers, 4 heads, 4 KV heads; 8 experts of which 3 are chosen.
Sizes = Mapping[str, Any]
Case = Sizes | tuple[Sizes, Sizes]

SP = {"tp": 2, "sequence_parallel": True}
# Pairs, not products: every two of tp, sp, pp, vpp, cp, ep, etp and dp > 1 meet in some row, for the policy or the critic, whose
# bodies are alike; heads are not, so each of those without experts, and uneven stages, are of both roles in some row.
DENSE: dict[int, list[Case]] = {
    2: [
        {},
        (SP, {"pp": 2, "layers_per_stage": (3, 1)}),
        ({"cp": 2}, {"pp": 2, "vpp": 2}),
        ({"pp": 2, "vpp": 2}, {"cp": 2}),
        ({"tp": 2}, SP),
    ],
    4: [
        ({**SP, "tp": 4}, {"cp": 4}),
        ({"cp": 2}, {"tp": 2}),
        ({"tp": 2, "pp": 2}, {"cp": 2, "pp": 2, "vpp": 2}),
        ({"pp": 2, "vpp": 2, "layers_per_stage": (1, 1, 1, 1)}, {**SP, "pp": 2, "vpp": 2}),
        ({"pp": 4}, {**SP, "cp": 2}),
    ],
}
# Experts are of the body, which policy and critic have alike, and no layout of them touches a head, whose layouts are those above:
# a row has one layout of them for the policy and another for the critic.
EXPERTS: dict[int, list[Case]] = {
    2: [
        {**SP, "ep": 2},
        ({**SP, "etp": 2}, {"ep": 2}),
        ({"cp": 2, "ep": 2}, {"pp": 2, "vpp": 2}),
    ],
    4: [
        ({"ep": 4}, {**SP, "ep": 4}),
        ({"ep": 2, "pp": 2, "vpp": 2}, {"ep": 2, "etp": 2}),
        ({**SP, "ep": 2, "pp": 2}, {"cp": 2, "ep": 4}),
        ({**SP, "ep": 2, "etp": 2}, {"cp": 2, "ep": 2, "pp": 2}),
    ],
}
# Tied embeddings live on both ends of a pipeline, and the critic's are not tied.
TIED: dict[int, list[Case]] = {4: [{**SP, "pp": 2}]}
WINDOW: dict[int, list[Case]] = {2: [({"cp": 2}, {"tp": 2})]}  # of the body, as experts
# Corrections and shared experts; latent attention, whose parts are cut in ways of their own.
SIGMOIDS: dict[int, list[Case]] = {4: [({**SP, "ep": 2}, {"cp": 2, "ep": 2, "pp": 2})]}
LATENT: dict[int, list[Case]] = {4: [({**SP, "cp": 2, "ep": 2}, {**SP, "pp": 2, "vpp": 2})]}
SINKS: dict[int, list[Case]] = {4: [({**SP, "cp": 2, "etp": 2}, {"ep": 2, "pp": 2, "vpp": 2})]}  # and biases, which etp cuts too
# Delta nets and gated attention in turn, gated shared experts; cp is in tests/models/test_moe.py.
DELTA: dict[int, list[Case]] = {4: [({**SP, "ep": 2}, {**SP, "pp": 2, "vpp": 2, "etp": 2})]}
# The same with projections of their own.
DELTA_DENSE: dict[int, list[Case]] = {2: [({"pp": 2, "vpp": 2}, SP)]}
DELTA_SPARSE: dict[int, list[Case]] = {2: [({"cp": 2, "ep": 2}, {**SP, "etp": 2})]}
# What is beside llama's layer: biases and a window in the last two layers, norms of heads, names of experts.
BIASES: dict[int, list[Case]] = {2: [({"cp": 2}, SP)]}
HEAD_NORMS: dict[int, list[Case]] = {2: [(SP, {"pp": 2, "vpp": 2})]}
NAMED: dict[int, list[Case]] = {2: [({**SP, "ep": 2}, {"ep": 2, "cp": 2})]}
# Windows and rotary embeddings by layer, norms of outputs, tied embeddings.
SANDWICH: dict[int, list[Case]] = {4: [({**SP, "pp": 2, "vpp": 2}, {**SP, "cp": 2})]}
MODELS: dict[str, dict[int, list[Case]]] = {
    "llama": DENSE,
    "qwen3_moe": EXPERTS,
    "qwen2_window": BIASES,
    "qwen3": HEAD_NORMS,
    "mistral_window": WINDOW,
    "ministral3_tied": TIED,
    "mixtral": NAMED,
    "gemma3": SANDWICH,
    "glm4_moe": SIGMOIDS,
    "deepseek_v3": LATENT,
    "gpt_oss": SINKS,
    "qwen3_next": DELTA,
    "qwen3_5": DELTA_DENSE,
    "qwen3_5_moe": DELTA_SPARSE,
}
# Layouts by world size in which RUN_TOGETHER are run too.
VARIED: dict[str, dict[int, list[Case]]] = {
    "llama": {1: [{}], 2: [{}, ({"cp": 2}, {"pp": 2, "vpp": 2})], 4: []},
    "qwen3_moe": {1: [{}], 2: [{**SP, "ep": 2}], 4: []},
}

SEQUENCES = 8
VOCABULARY = 131
# Changes of the configuration that must not change the numbers; bf16 by no more than its rounding.
VARIANTS: dict[str, dict[str, Any]] = {
    "one sequence": {f"{role}__micro_batch_tokens": 1 for role in ("policy", "critic", "reference")},
    "whole batch": {f"{role}__micro_batch_tokens": 10**6 for role in ("policy", "critic", "reference")},
    "recompute selective": {"policy__recompute": "selective", "critic__recompute": "selective"},
    "recompute full": {"policy__recompute": "full", "critic__recompute": "full"},
    "bf16": {f"{role}__dtype": "bf16" for role in ("policy", "critic", "reference")},
    "offload": {f"{role}__offload": ["parameters", "gradients", "optimizer"] for role in ("policy", "critic")},
}
# Several of them in one run: each alters another part of a pass, and every layout of VARIED meets every one.
TOGETHER = (("one sequence", "recompute full", "offload"), ("whole batch", "recompute selective"), ("bf16",))
RUN_TOGETHER: dict[str, dict[str, Any]] = {
    ", ".join(names): {key: value for name in names for key, value in VARIANTS[name].items()} for names in TOGETHER
}


# Texts in each mini-batch: more and fewer than samples, and than replicas.
PTX_TEXTS = 3
PTX = {"algorithm__ptx": {"coef": 0.3, "data": "none.jsonl", "batch_size": PTX_TEXTS}}
# Other losses: in the layouts of LOSSES against one rank with the same ones.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "two epochs, turns, mean of sequences, KL in the loss, a teacher, dis, two_hot critic": {
        "algorithm__distillation": {"coef": 0.5},
        "critic__loss": {"type": "two_hot", "bins": 9, "low": -2.0, "high": 1.5},
        "algorithm__ppo_epochs": 2,
        "algorithm__loss": {"type": "dis", "low": 0.3, "high": 4.0},
        "algorithm__estimator": {"type": "gae", "level": "turn"},
        "algorithm__bootstrap_truncated": "last",
        "algorithm__loss_aggregation": "seq-mean-token-mean",
        "algorithm__kl": {"placement": "loss", "estimator": "k3", "coef": 0.05},
    },
    "fixed length, dual clip, no whitening, icepop out of the loss, huber critic": {
        "critic__loss": {"type": "huber", "delta": 0.3, "clip": None},
        "algorithm__importance_sampling": {"type": "icepop", "low": 0.3, "high": 4.0, "count_rejected": False},
        "algorithm__loss_aggregation": "fixed-length",
        "algorithm__loss__dual_clip": 2.0,
        "algorithm__whiten_advantages": False,
        "algorithm__lam_length_alpha": 0.05,
        "algorithm__positive_nll__coef": 0.1,
        "algorithm__positive_nll__score": 0.0,  # scores are drawn around it
        **PTX,
    },
    "two critics, the lower value, masks where they differ, a teacher, vtrace, top-k and top-p": {
        "algorithm__distillation": {"coef": 0.5},
        "critics__b__loss": "huber",  # of the reference's weights: it disagrees with the first
        # Mini-batches of half the samples have few tokens with a loss. With the usual seed the gradients of one cancel in a norm of
        # the critic: rounding is 1.1e-5 of their sum under cp, with others 4e-6 and less.
        "run__seed": 4,
        "algorithm__value_of_critics": "min",
        "algorithm__disagreement_mask_ratio": 0.2,
        "algorithm__disagreement_entropy_ratio": 0.2,
        "algorithm__estimator": "vtrace",
        "rollout__sampling__top_k": 6,
        "rollout__sampling__top_p": 0.9,
        **PTX,  # texts have no kept ids
    },
    "grpo, gspo, a teacher of tokens, no cut responses, mis of responses": {
        "algorithm__distillation": {"coef": 0.5, "placement": "advantage"},
        "algorithm__importance_sampling": {"type": "mis", "level": "sequence", "high": 1.5},
        "algorithm__estimator": "grpo",
        "algorithm__loss__type": "gspo",
        "algorithm__loss_aggregation": "seq-mean-token-mean",
        "algorithm__mask_truncated": True,
        **PTX,
    },
    "reinforce++, cispo, high entropy, tis of responses": {
        "algorithm__importance_sampling": {"type": "tis", "level": "geometric", "high": 1.2},
        "algorithm__estimator": "reinforce_plus_plus",
        "algorithm__loss__type": "cispo",
        "algorithm__high_entropy_token_ratio": 0.4,
    },
    "rloo, sums of sequences, KL k2 in the loss": {
        "algorithm__estimator": "rloo",
        "algorithm__loss_aggregation": "seq-mean-token-sum",
        "algorithm__kl": {"placement": "loss", "estimator": "k2", "coef": 0.05},
    },
    "remax": {"algorithm__estimator": "remax"},
    "hl_gauss critic, frozen parts, against the behaviour policy": {
        "algorithm__loss__proximal": "behaviour",
        "critic__loss": {"type": "hl_gauss", "bins": 9, "low": -2.0, "high": 1.5},
        "critic__freeze": ["embed_tokens", "self_attn"],
        "policy__freeze": ["input_layernorm", "lm_head"],
    },
}
# An estimator that no row names is run by itself.
_NAMED = {
    "gae",
    *(row.get("algorithm__estimator") for row in ALGORITHMS.values() if not isinstance(row.get("algorithm__estimator"), dict)),
}
ALGORITHMS |= {name: {"algorithm__estimator": name} for name in ESTIMATORS if name not in _NAMED}
(TWO_CRITICS,) = (name for name in ALGORITHMS if "two critics" in name)
(FROZEN,) = (name for name in ALGORITHMS if "frozen" in name)
(FIXED_LENGTH,) = (name for name in ALGORITHMS if "fixed length" in name)
# That of them that is run with roles on ranks of their own, on four ranks: it exchanges samples for a second epoch.
(PLACED_LOSSES,) = (name for name in ALGORITHMS if "two epochs" in name)
_OF_SEQUENCES = [name for name in ALGORITHMS if name.startswith(("grpo", "reinforce++"))]
_OF_EXPERTS = [FROZEN, FIXED_LENGTH]
# Which of them run where. Losses read whole sequences in every layout, so all of them run on replicas, whose sums they are, and
# each other layout takes those that touch what it cuts.
LOSSES: dict[str, dict[int, list[tuple[Case, Sequence[str]]]]] = {
    "llama": {
        1: [({}, list(ALGORITHMS))],
        2: [
            ({}, list(ALGORITHMS)),
            (({"tp": 2}, {"cp": 2}), [TWO_CRITICS]),
            ({"cp": 2}, _OF_SEQUENCES),
            ({"pp": 2, "vpp": 2}, [PLACED_LOSSES, FROZEN, FIXED_LENGTH]),
        ],
    },
    # Two critics are not among those of experts: a mini-batch of one has six tokens with a loss, whose gradients cancel in some
    # experts. The rounding of fp32 is relative to the sum of their sizes: over 24 orders of the hidden channels on one rank it
    # is 0.5 to 2e-6 of that sum (medians of the tensors) and at most 7e-6. In layer 1, expert 6, gate, the sum is 7.5 times the
    # gradient's largest element, of which that makes 1e-6 to 2e-5. The layout errs by 8e-6, so that 1e-5 would be luck.
    "qwen3_moe": {1: [({}, _OF_EXPERTS)], 2: [({**SP, "ep": 2}, _OF_EXPERTS)]},
}
# And under FSDP2, on two replicas: second epochs, a further critic, texts, frozen parts.
FSDP2_LOSSES = [PLACED_LOSSES, TWO_CRITICS, FROZEN]


_FSDP2 = {f"{role}__engine": "fsdp2" for role in ("policy", "critic", "reference", "teacher")}
_FSDP2_B = {"critics__b__engine": "fsdp2"}
_RECOMPUTE = {"policy__recompute": "full", "critic__recompute": "selective", **VARIANTS["whole batch"]}
# Changes of the configuration that run roles under FSDP2, by layout: they give the numbers of one Megatron rank.
FSDP2_DP: dict[str, dict[str, Any]] = {
    "fsdp2": _FSDP2,
    # Recomputing some layers, of whole batches, is that of "fsdp2 tp2 cp2 sp, recompute".
    **{f"fsdp2, {name}": {**_FSDP2, **changes} for name, changes in RUN_TOGETHER.items() if "selective" not in name},
}
FSDP2_CASES: dict[str, Case] = {
    "fsdp2 tp2 sp": SP,
    "fsdp2 cp2": {"cp": 2},
    "fsdp2 tp2 cp2 sp, recompute / critic dp2 cp2": ({**SP, "cp": 2}, {"cp": 2}),  # FSDP2 shards over dp x cp
    "fsdp2 tp2 / critic cp2": ({"tp": 2}, {"cp": 2}),
}
FSDP2 = {**FSDP2_DP, **{name: {**_FSDP2, **(_RECOMPUTE if "recompute" in name else {})} for name in FSDP2_CASES}}
# Policy and reference in the layout of the case under Megatron, the critic over all ranks under FSDP2.
MIXED = {"critic__engine": "fsdp2"}
MIXED_CASE: Case = ({"tp": 2}, {})
# Each role on ranks of its own, of a world of four: rank 0 has no policy, rank 3 no critic.
PLACED: dict[str, Any] = {
    "policy__ranks": "2-3",
    "policy__parallel": {"tp": 2},
    "critic__ranks": "0-1",
    "critic__parallel": {"pp": 2},
    "reference__ranks": "1-2",
    "teacher__ranks": "0,3",
}
SHARDED: dict[str, dict[int, list[str]]] = {
    "llama": {
        1: ["fsdp2"],
        2: [*FSDP2_DP, "fsdp2 tp2 sp", "fsdp2 tp2 / critic cp2"],
        4: ["fsdp2 tp2 cp2 sp, recompute / critic dp2 cp2"],
    },
    "mistral_window": {2: ["fsdp2 cp2"]},
    "gemma3": {2: ["fsdp2 tp2 sp"]},  # with tied embeddings
}


def layouts_of(case: Case, world_size: int) -> tuple[ParallelLayout, ParallelLayout]:
    """(policy's, critic's)"""
    policy, critic = case if isinstance(case, tuple) else (case, case)
    return ParallelLayout(world_size, **policy), ParallelLayout(world_size, **critic)


def title(case: Case, world_size: int) -> str:
    policy, critic = layouts_of(case, world_size)
    return str(policy) if policy == critic else f"{policy} / critic {critic}"


# Of four attention heads; the others have four. tp ranks have copies of fewer, two or all of them the same one.
KV_HEADS = {"mistral_window": 1, "gemma3": 2}


def write_models(folder: Path, model: str, kv_heads: int | None = None) -> None:
    """Policy, and a reference that is not the policy."""
    for name, seed in (("policy", 0), ("reference", 1)):
        heads = kv_heads or KV_HEADS.get(model, 4)
        write_checkpoint(folder / name, model, seed=seed, num_hidden_layers=4, num_key_value_heads=heads)


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """One PPO step with everything on: temperature, entropy bonus, KL in the reward, value clip, bootstrap, balanced experts.

    changes: `section.key` with dots written as __, for example policy__micro_batch_tokens=1.
    """
    role = {
        "dtype": "fp32",
        "micro_batch_tokens": 48,
        "router_aux_coef": 0.01 if "moe" in str(folder) else 0.0,
        # Adam divides by |g| + eps: with the usual 1e-8 a weight whose gradient is rounding noise would move a full step.
        "optimizer": {"lr": 3e-4, "eps": 1e-5, "weight_decay": 0.01, "distributed": False},
    }
    frozen = {"model": str(folder / "reference"), "dtype": "fp32", "micro_batch_tokens": 48}
    tree: dict[str, Any] = {
        "policy": {**role, "model": str(folder / "policy")},
        "critic": {**role, "value_head": "normal"},
        "reference": frozen,
        "teacher": {**frozen},
        "rollout": {"sampling": {"temperature": 0.7}, "max_response_tokens": 64},
        "data": {"train": "none.jsonl", "prompts_per_step": SEQUENCES},
        "algorithm": {
            "entropy": {"coef": 0.01},
            "mini_batch_size": SEQUENCES // 2,
            "ppo_epochs": 1,
            "kl": {"coef": 0.05},
            "gamma": 0.99,
            "bootstrap_truncated": True,
        },
    }
    if any(key.startswith("critics__b__") for key in changes):
        tree["critics"] = {"b": {**tree["critic"], "model": tree["reference"]["model"]}}
    for key, value in changes.items():
        *path, last = key.split("__")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return validated(tree, TrainConfig)


def run_world(rank: int, folders: Mapping[str, str], losses: bool = True) -> dict[str, dict[str, Any]]:
    """model -> title -> Measured, for all cases of this world size; f"{title}, {variant}" for the cases of VARIED and, with
    `losses`, of LOSSES; those of SHARDED by their names, "mixed" and "placed". Of rank 0; the others return nothing, as they
    measure the same.
    """
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    size = dist.get_world_size()
    measured: dict[str, dict[str, Any]] = {model: {} for model in folders}
    for model, folder in folders.items():
        cases = [{}] if size == 1 else MODELS[model].get(size, [])
        for case in cases:
            with roles_of(case) as roles:
                measured[model][title(case, size)] = measure_case(folder, roles)
                for name, changes in RUN_TOGETHER.items() if case in VARIED.get(model, {}).get(size, []) else ():
                    measured[model][f"{title(case, size)}, {name}"] = measure_case(folder, roles, changes)
        for case, names in LOSSES.get(model, {}).get(size, []) if losses else ():
            with roles_of(case) as roles:
                for name in names:
                    measured[model][f"{title(case, size)}, {name}"] = measure_case(folder, roles, ALGORITHMS[name])
        for name in SHARDED.get(model, {}).get(size, []):
            with roles_of(FSDP2_CASES.get(name, {})) as roles:
                measured[model][name] = measure_case(folder, roles, FSDP2[name])
    if "llama" in folders and size == 2:
        with roles_of(MIXED_CASE) as roles:
            measured["llama"]["mixed"] = measure_case(folders["llama"], roles, MIXED)
        with roles_of({}) as roles:
            for name in FSDP2_LOSSES if losses else ():
                changes = {**FSDP2["fsdp2"], **ALGORITHMS[name], **(_FSDP2_B if name == TWO_CRITICS else {})}
                measured["llama"][f"fsdp2, {name}"] = measure_case(folders["llama"], roles, changes)
    if "llama" in folders and size == 4:
        for name, changes in {"placed": {}, f"placed, {PLACED_LOSSES}": ALGORITHMS[PLACED_LOSSES]}.items():
            measured["llama"][name] = measure_placed(folders["llama"], {**PLACED, **changes})
    return measured if rank == 0 else {}


@contextmanager
def roles_of(case: Case) -> Iterator[dict[str, Any]]:
    """Role -> process groups. They are freed at the end: hundreds of idle gloo groups poll a CPU to a standstill."""
    from megappo.parallel.groups import build_groups, destroy_groups

    gc.freeze()  # what was measured so far, which the collection below need not visit
    built = {layout: build_groups(layout) for layout in dict.fromkeys(layouts_of(case, dist.get_world_size()))}
    policy, critic = layouts_of(case, dist.get_world_size())
    yield {
        "policy": built[policy],
        "critic": built[critic],
        "critic_b": built[critic],
        "reference": built[policy],
        "teacher": built[policy],
    }
    gc.collect()
    for groups in built.values():
        destroy_groups(groups)


def engines_in(roles: Mapping[str, Any], device: torch.device) -> Any:
    """Factory of Megatron engines in these groups (role -> its own), whatever the configuration says of layouts."""
    from megappo.config.role_sections import ModelConfig
    from megappo.config.run_sections import TimeoutsConfig
    from megappo.engine.build import RoleEngines

    class Placed(RoleEngines):
        def connect(self, parallels: Any) -> None:
            pass

        def groups_for(self, spec: Any) -> Any:
            return roles[spec.role]

    return Placed(ModelConfig(impl="local"), TimeoutsConfig(), device)


def measure_case(
    folder: str, roles: Mapping[str, Any], changes: Mapping[str, Any] = {}, rollouts: Sequence | None = None, **wanted: bool
) -> Any:
    """`megappo.commands.verify.measure`, with gradients and parameters unless `wanted` says otherwise. Collective."""
    from megappo.commands.verify.measure import measure

    config = config_of(Path(folder), **changes)
    kept = num_top_k_ids(config.rollout.sampling)
    rollouts = rollouts or record_rollouts(1, sequences=SEQUENCES, vocab_size=VOCABULARY, kept=kept)
    return measure(config, rollouts, engines_in(roles, torch.device("cpu")), **{"gradients": True, "parameters": True, **wanted})


def measure_placed(folder: str, changes: Mapping[str, Any]) -> Any:
    """As `measure_case`, by engines in the layouts and on the ranks that the changes name. Collective."""
    from megappo.commands.verify.measure import measure
    from megappo.config.role_sections import ModelConfig
    from megappo.config.run_sections import TimeoutsConfig
    from megappo.engine.build import RoleEngines

    engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))
    rollouts = record_rollouts(1, sequences=SEQUENCES, vocab_size=VOCABULARY)
    found = measure(config_of(Path(folder), **changes), rollouts, engines, gradients=True, parameters=True)
    engines.close()
    return found
