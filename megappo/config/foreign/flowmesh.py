"""Keys of a FlowMesh workflow of type ppo (`apiVersion: flowmesh/v1`), which runs TRL's older PPO."""

from __future__ import annotations

from megappo.config.foreign.rule import ALWAYS_PACKED, Trainer, each, implied, missing, take, taken, unneeded
from megappo.config.foreign.trl import OLD, TRL

OWN_CLASSIFIER = "decoders with one label score (docs/rewards.md), other classifiers do not"
ORCHESTRATOR = "for the orchestrator: `megappo launch` submits to Slurm"

_TRAINING = {name: rule for name, rule in TRL.rules.items() if name not in ("output_dir", "dataset_name")}

FLOWMESH = Trainer(
    "FlowMesh",
    {
        **each(unneeded(ORCHESTRATOR), "apiVersion kind metadata spec.resources"),
        "metadata.name": take("run.name", by="run_name"),
        "spec.taskType": implied("PPO", expects=("ppo",), otherwise="ppo and dpo are read"),
        **taken(
            "spec.resources.hardware.gpu.count=run.num_ranks spec.model.source.identifier=policy.model",
            "spec.data.dataset_name=data.train spec.data.prompt_column=data.prompt_key",
            "spec.generation.max_new_tokens=rollout.max_response_tokens spec.generation.temperature=rollout.sampling.temperature",
            "spec.generation.top_p=rollout.sampling.top_p spec.training.save_model=checkpoint.export_at_end",
        ),
        "spec.model.source.type": implied("a directory or a name of the hub", "policy.model"),
        "spec.model.source.revision": missing("name it in the model: owner/name@revision", "policy.model", off=(None, "main")),
        "spec.model.source.trust_remote_code": missing("no code of a model repository is run"),
        **each(missing(OWN_CLASSIFIER, "reward_model.model"), "spec.reward_model.identifier spec.reward_model"),
        "spec.data.prompts": missing('a file with one {"prompt": ...} a line', "data.train"),
        "spec.data.split": implied("data.train names the split: NAME:SUBSET:SPLIT", "data.train"),
        "spec.data.max_samples": missing("give a shorter file", "data.train"),
        "spec.generation.top_k": take("rollout.sampling.top_k", by="top_k"),
        "spec.generation.do_sample": implied("training responses are sampled", "rollout.sampling.temperature", expects=(True,)),
        "spec.output": unneeded("everything is in the run's directory", "run.output_dir"),
        **{f"spec.training.{name}": rule for name, rule in (_TRAINING | OLD).items()},
        "spec.training.allow_multi_gpu": unneeded("run.num_ranks says it", "run.num_ranks"),
        "spec.training.padding_side": implied(ALWAYS_PACKED, "policy.micro_batch_tokens"),
        "spec.training.save_freq": take("checkpoint.save_every", by="save_steps"),
        "spec.training.save_strategy": take("checkpoint.save_every", by="save_strategy"),
    },
    defaults={"spec.training.ppo_epochs": 4, "spec.training.gradient_accumulation_steps": 1},
    sections=(
        "metadata",
        "spec.resources",
        "spec.reward_model",
        "spec.output",
        "spec.data.prompts",
        "spec.training.tracker_kwargs",
    ),
    chosen={"reward.parts": "rules_of_data"},
)
