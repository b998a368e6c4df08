"""Keys of a FlowMesh workflow of type ppo (`apiVersion: flowmesh/v1`), which runs TRL's older PPO."""

from __future__ import annotations

from megappo.config.foreign.rule import ALWAYS_PACKED, Trainer, implied, missing, take, unneeded
from megappo.config.foreign.trl import OLD, TRL

OWN_CLASSIFIER = "decoders with one label score (docs/rewards.md), other classifiers do not"
ORCHESTRATOR = "for the orchestrator: `megappo launch` submits to Slurm"

_TRAINING = {name: rule for name, rule in TRL.rules.items() if name not in ("output_dir", "dataset_name")}

FLOWMESH = Trainer(
    "FlowMesh",
    {
        "apiVersion": unneeded(ORCHESTRATOR),
        "kind": unneeded(ORCHESTRATOR),
        "metadata.name": take("run.name", by="run_name"),
        "metadata": unneeded(ORCHESTRATOR),
        "spec.taskType": implied("PPO", expects=("ppo",), otherwise="ppo and dpo are read"),
        "spec.resources.hardware.gpu.count": take("run.num_ranks"),
        "spec.resources": unneeded(ORCHESTRATOR),
        "spec.model.source.type": implied("a directory or a name of the hub", "policy.model"),
        "spec.model.source.identifier": take("policy.model"),
        "spec.model.source.revision": missing("name it in the model: owner/name@revision", "policy.model", off=(None, "main")),
        "spec.model.source.trust_remote_code": missing("no code of a model repository is run"),
        "spec.reward_model.identifier": missing(OWN_CLASSIFIER, "reward_model.model"),
        "spec.reward_model": missing(OWN_CLASSIFIER, "reward_model.model"),
        "spec.data.prompts": missing('a file with one {"prompt": ...} a line', "data.train"),
        "spec.data.dataset_name": take("data.train"),
        "spec.data.split": implied("data.train names the split: NAME:SUBSET:SPLIT", "data.train"),
        "spec.data.max_samples": missing("give a shorter file", "data.train"),
        "spec.data.prompt_column": take("data.prompt_key"),
        "spec.generation.max_new_tokens": take("rollout.max_response_tokens"),
        "spec.generation.temperature": take("rollout.sampling.temperature"),
        "spec.generation.top_p": take("rollout.sampling.top_p"),
        "spec.generation.top_k": take("rollout.sampling.top_k", by="top_k"),
        "spec.generation.do_sample": implied("training responses are sampled", "rollout.sampling.temperature", expects=(True,)),
        "spec.output": unneeded("everything is in the run's directory", "run.output_dir"),
        **{f"spec.training.{name}": rule for name, rule in (_TRAINING | OLD).items()},
        "spec.training.allow_multi_gpu": unneeded("run.num_ranks says it", "run.num_ranks"),
        "spec.training.padding_side": implied(ALWAYS_PACKED, "policy.micro_batch_tokens"),
        "spec.training.save_freq": take("checkpoint.save_every", by="save_steps"),
        "spec.training.save_model": take("checkpoint.export_at_end"),
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
