"""All tables of foreign keys, and the search for the rule that a foreign key most likely means."""

from __future__ import annotations

from megappo.config.foreign.nemo_rl import NEMO_RL
from megappo.config.foreign.openrlhf import LIGHTRFT, OPENRLHF
from megappo.config.foreign.rule import Outcome, Rule, Trainer, taken
from megappo.config.foreign.trl import FLOWMESH, TRL
from megappo.config.foreign.verl import VERL

# Arguments of Megatron-LM, which slime passes through, and slime's own. Only hints use them.
MEGATRON = Trainer(
    "Megatron-LM",
    {
        **taken(
            "tensor_model_parallel_size=tp pipeline_model_parallel_size=pp sequence_parallel context_parallel_size=cp",
            "expert_model_parallel_size=ep expert_tensor_parallel_size=etp virtual_pipeline_model_parallel_size=vpp",
            "num_virtual_stages_per_pipeline_rank=vpp num_layers_per_virtual_pipeline_stage=vpp",
            "pipeline_model_parallel_layout=layers_per_stage decoder_first_pipeline_num_layers=layers_per_stage",
            "decoder_last_pipeline_num_layers=layers_per_stage",
            ours="policy.parallel.",
        ),
        **taken(
            "moe_aux_loss_coeff=router_aux_coef router_aux_loss_coef=router_aux_coef max_tokens_per_gpu=micro_batch_tokens",
            "bf16=dtype micro_batch_size=micro_batch_tokens recompute_granularity=recompute load=model lr=optimizer.lr",
            "min_lr=optimizer.lr_schedule.min_ratio lr_decay_style=optimizer.lr_schedule.type clip_grad=optimizer.clip_grad",
            "lr_warmup_iters=optimizer.warmup_steps weight_decay=optimizer.weight_decay adam_beta1=optimizer.betas",
            "adam_beta2=optimizer.betas adam_eps=optimizer.eps use_distributed_optimizer=optimizer.distributed",
            ours="policy.",
        ),
        **taken(
            "critic_load=critic.checkpoint global_batch_size=data.prompts_per_step train_batch_size=data.prompts_per_step",
            "data_path=data.train tokenizer_model=data.tokenizer train_iters=trainer.steps eval_interval=trainer.eval_every",
            "save=run.output_dir seed=run.seed save_interval=checkpoint.save_every tensorboard_dir=telemetry.trackers",
        ),
    },
)

# The first trainer wins where several know a name.
TRAINERS: tuple[Trainer, ...] = (MEGATRON, VERL, NEMO_RL, OPENRLHF, LIGHTRFT, TRL, FLOWMESH)

# Other trainers' words for our roles, so that `policy.param_offload` finds verl's actor.
ROLES = {"policy": ("policy", "actor"), "critic": ("critic", "value"), "reference": ("reference", "ref")}


def exact_rule(name: str) -> tuple[Trainer, Rule] | None:
    """Find the rule of a foreign flag (without dashes) or dotted key; `rollout.name` finds `actor_rollout_ref.rollout.name`. The
    last part must be equal, and the other parts must occur in the foreign key in the same order."""
    wanted = name.split(".")
    found = [one for one in _ending_like(wanted[-1]) if _holds(wanted, one[1]) and (len(wanted) > 1 or len(one[1]) == 1)]
    return min(found, key=lambda one: (len(one[1]), one[0]))[2:] if found else None


def rule_by_last_part(last: str) -> tuple[Trainer, Rule] | None:
    """Find the rule of the foreign keys with this last part, if they agree on our key, or on why there is none."""
    known = _ending_like(last)
    found = [one for one in known if one[3].outcome is Outcome.TAKEN]
    answers = {one[3].keys[0].rsplit(".", 1)[-1] for one in found}
    if not found and "_" in last:  # a single word (`enable`, `type`) is too vague
        found = known
        answers = {(one[3].outcome.value, one[3].otherwise or one[3].note) for one in found}
    return min(found, key=lambda one: (one[0], len(one[1])))[2:] if len(answers) == 1 else None


def _ending_like(last: str) -> list[tuple[int, list[str], Trainer, Rule]]:
    return [
        (place, key.split("."), trainer, rule)
        for place, trainer in enumerate(TRAINERS)
        for key, rule in trainer.rules.items()
        if key.rsplit(".", 1)[-1] == last
    ]


def _holds(wanted: list[str], key: list[str]) -> bool:
    rest = iter(key[:-1])
    return all(any(part in ROLES.get(one, (one,)) for part in rest) for one in wanted[:-1])
