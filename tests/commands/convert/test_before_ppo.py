"""`megappo convert` of runs that generate nothing: TRL's DPO and reward models, OpenRLHF's, NeMo-RL's, FlowMesh's."""

import json
import shlex

import pytest

from megappo.commands.cli import main
from megappo.commands.convert.conversion import convert
from megappo.commands.convert.report import unknown
from megappo.commands.convert.sources import Source, read_source
from megappo.config.checks import problems
from megappo.config.foreign.before_ppo import NEMO_DPO, OPENRLHF_DPO, OPENRLHF_RM, TRL_DPO, TRL_REWARD
from megappo.config.foreign.rule import Outcome
from megappo.config.foreign.trl import TRL
from megappo.config.keys import value_at
from megappo.config.loading import explicit_keys, load_run

TRL_YAML = """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 1
max_length: 512
beta: 0.2
loss_type: [sigmoid, sft]
loss_weights: [1.0, 0.5]
eval_strategy: steps
eval_steps: 50
logging_steps: 25
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_steps: 20
gradient_checkpointing: false
use_peft: true
lora_r: 32
lora_alpha: 16
bf16: true
dataloader_pin_memory: true
report_to: [wandb]
output_dir: out
"""
NEMO = """
policy:
  model_name: meta-llama/Llama-3.2-1B-Instruct
  train_global_batch_size: 128
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, lora_cfg: {enabled: false, dim: 8}}
  megatron_cfg: {enabled: false, peft: {enabled: false}, cuda_graph_impl: none, optimizer: {lr: 1.0}}
  sequence_packing: {enabled: false}
  dynamic_batching: {enabled: false}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.1, betas: [0.9, 0.98], eps: 1.0e-5, fused: false}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 20}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [20]
checkpointing: {enabled: true, checkpoint_dir: results, save_period: 50, keep_top_k: 3, metric_name: "val:loss"}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  train: {data_path: train.jsonl, %s}
  validation: {data_path: held_out.jsonl}
cluster: {gpus_per_node: 8, num_nodes: 2}
logger: {tensorboard_enabled: true, wandb_enabled: false, num_val_samples_to_print: 0}
"""
OPENRLHF = """
read -r -d '' training_commands <<EOF
openrlhf.cli.%s \\
   --ckpt.output_dir ./checkpoint/llama3-8b --ckpt.save_steps -1 --eval.steps -1 --logger.logging_steps 1 \\
   --train.batch_size 256 --train.micro_batch_size 2 --train.max_epochs 1 --data.max_len 1024 \\
   --model.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --ds.zero_stage 3 --ds.param_dtype bf16 --ds.tensor_parallel_size 2 \\
   --adam.lr 7e-7 --lr_warmup_ratio 0 --data.dataset OpenRLHF/preferences --data.apply_chat_template --data.chosen_key chosen \\
   --data.rejected_key worse --model.gradient_checkpointing_enable --ds.packing_samples --ckpt.load_enable %s
EOF
deepspeed --module $training_commands
"""
FLOWMESH = """
apiVersion: flowmesh/v1
kind: TrainingTask
metadata: {name: ministral-dpo}
spec:
  taskType: dpo
  resources: {hardware: {cpu: "16", gpu: {type: any, count: 2}}}
  model: {source: {type: huggingface, identifier: mistralai/Ministral-3-3B-Instruct-2512, revision: main}}
  data: {dataset_name: owner/pairs, split: train, chosen_column: better}
  training:
    allow_multi_gpu: true
    learning_rate: 5e-7
    batch_size: 4
    gradient_accumulation_steps: 4
    num_train_epochs: 1
    save_model: true
    save_freq: 500
    fp16: false
    bf16: true
  output: {destination: {type: local}}
"""
# name of the file -> its text, keys of ours that matter, keys without equivalent, and the exit code
SOURCES = {
    "trl_dpo.yaml": (
        TRL_YAML,
        {
            "kind": "dpo",
            "policy.model": "Qwen/Qwen2-0.5B-Instruct",
            "data.train": "trl-lib/ultrafeedback_binarized",
            "data.eval": "trl-lib/ultrafeedback_binarized::test",
            "trainer.batch_size": 16,
            "trainer.epochs": 1,
            "trainer.eval_every": 50,
            "data.max_tokens": 512,
            "loss.beta": 0.2,
            "loss.type": "sigmoid",
            "loss.nll_coef": 0.5,
            "policy.optimizer.lr": 5e-6,
            "policy.optimizer.lr_schedule.type": "cosine",
            "policy.optimizer.lr_schedule.min_ratio": 0.1,
            "policy.optimizer.warmup_steps": 20,
            "policy.optimizer.betas": (0.9, 0.999),
            "policy.recompute": "none",
            "policy.lora.rank": 32,
            "policy.lora.alpha": 16.0,
            "policy.lora.dropout": 0.05,
            "policy.lora.targets": ("q_proj", "v_proj"),
            "telemetry.trackers": ("wandb",),
        },
        [],
        0,
    ),
    "dpo.sh": (
        "accelerate launch --num_processes 4 trl/scripts/dpo.py --config base.yaml --gradient_accumulation_steps 2 --loss_type ipo "
        "--no_gradient_checkpointing",
        {
            "kind": "dpo",
            "run.num_ranks": 4,
            "trainer.batch_size": 24,
            "loss.type": "ipo",
            "loss.logprob": "mean",
            "policy.model": "m",
            "trainer.epochs": 3,
            "policy.recompute": "none",
            "policy.optimizer.lr": 1e-6,
            "policy.optimizer.lr_schedule.type": "linear",
        },
        [],
        0,
    ),
    "reward.sh": (
        "trl reward --model_name_or_path m --dataset_name d --center_rewards_coefficient 0.01 --max_steps 200 --warmup_steps 0.1",
        {
            "kind": "reward_model",
            "reward_model.model": "m",
            "loss.centring": 0.01,
            "trainer.steps": 200,
            "trainer.batch_size": 8,
            "reward_model.optimizer.lr": 1e-4,
            "reward_model.optimizer.warmup_steps": 20,
            "data.max_tokens": 1024,
        },
        [],
        0,
    ),
    "reward.py": (
        "from trl import RewardConfig\nargs = RewardConfig(output_dir='rm', per_device_train_batch_size=4, max_length=256)\n",
        {"kind": "reward_model", "trainer.batch_size": 4, "data.max_tokens": 256, "run.output_dir": "rm"},
        [],
        0,
    ),
    "nemo_dpo.yaml": (
        NEMO
        % "prompt_key: context, chosen_key: good"
        + "dpo: {max_num_epochs: 1, max_num_steps: 150, val_period: 25, val_at_start: true, val_batches: -1, seed: 7, "
        "reference_policy_kl_penalty: 0.05, preference_average_log_probs: false, preference_loss_weight: 1, sft_loss_weight: 0}\n",
        {
            "kind": "dpo",
            "trainer.batch_size": 128,
            "trainer.steps": 150,
            "trainer.eval_every": 25,
            "policy.micro_batch_tokens": 2 * 2 * 1024,
            "data.max_tokens": 1024,
            "loss.beta": 0.05,
            "loss.logprob": "sum",
            "policy.engine": "fsdp2",
            "policy.parallel.tp": 2,
            "policy.optimizer.lr": 5e-6,
            "policy.optimizer.betas": (0.9, 0.98),
            "policy.optimizer.warmup_steps": 20,
            "policy.optimizer.lr_schedule.type": "constant",
            "run.num_ranks": 16,
            "run.seed": 7,
            "data.prompt_key": "context",
            "data.chosen_key": "good",
            "data.train": "train.jsonl",
            "data.eval": "held_out.jsonl",
        },
        ["checkpointing.metric_name"],
        0,
    ),
    "nemo_rm.yaml": (
        NEMO % "split: train" + "rm: {max_num_epochs: 2, max_num_steps: -1, val_period: 16, val_batches: -1, seed: 42}\n",
        {"kind": "reward_model", "reward_model.engine": "fsdp2", "reward_model.optimizer.lr": 5e-6, "trainer.epochs": 2},
        ["checkpointing.metric_name"],
        0,
    ),
    "nemo_sft.yaml": (
        NEMO % "input_key: question, output_key: solution"
        + "sft: {max_num_epochs: 1, max_num_steps: 60, val_period: 10, val_batches: 8, only_unmask_final: true, seed: 42}\n",
        {
            "kind": "sft",
            "policy.micro_batch_tokens": 2 * 1024,
            "data.prompt_key": "question",
            "data.response_key": "solution",
            "trainer.steps": 60,
        },
        ["sft.val_batches", "checkpointing.metric_name"],
        0,
    ),
    "openrlhf_dpo.sh": (
        OPENRLHF % ("train_dpo", "--model.beta 0.3 --model.ipo_enable --model.nll_loss_coef 0.2 --ref.model_name_or_path other"),
        {
            "kind": "dpo",
            "trainer.batch_size": 256,
            "policy.micro_batch_tokens": 2 * 2 * 1024,
            "data.max_tokens": 1024,
            "loss.type": "ipo",
            "loss.logprob": "sum",
            "loss.beta": 0.3,
            "loss.nll_coef": 0.2,
            "reference.model": "other",
            "policy.optimizer.lr": 7e-7,
            "policy.optimizer.lr_schedule.type": "cosine",
            "policy.optimizer.lr_schedule.min_ratio": 0.1,
            "policy.parallel.tp": 2,
            "policy.recompute": "full",
            "data.chat_template": True,
            "data.rejected_key": "worse",
            "checkpoint.save_every": 0,
        },
        [],
        0,
    ),
    "openrlhf_rm.sh": (
        OPENRLHF % ("train_rm", "--model.margin_loss_enable --train.seed 3 --no_such_flag 1"),
        {
            "kind": "reward_model",
            "data.margin_key": "margin",
            "reward_model.optimizer.lr": 7e-7,
            "reward_model.parallel.tp": 2,
            "reward_model.recompute": "full",
            "run.seed": 3,
        },
        [],
        0,
    ),
    "flowmesh.yaml": (
        FLOWMESH,
        {
            "kind": "dpo",
            "run.num_ranks": 2,
            "trainer.batch_size": 4 * 4 * 2,
            "policy.optimizer.lr": 5e-7,
            "policy.optimizer.lr_schedule.type": "linear",
            "policy.model": "mistralai/Ministral-3-3B-Instruct-2512",
            "data.train": "owner/pairs",
            "data.chosen_key": "better",
            "data.max_tokens": 1024,
            "loss.beta": 0.1,
            "checkpoint.save_every": 500,
        },
        [],
        0,
    ),
}


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", SOURCES)
def test_runs_before_ppo_become_configurations_that_load(name, tmp_path, capsys):
    text, wanted, without, exit_code = SOURCES[name]
    (tmp_path / name).write_text(text)
    (tmp_path / "base.yaml").write_text("model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 3\n")
    code, out, err = run(capsys, "convert", tmp_path / name, "-o", tmp_path / "run.yaml")
    assert (code, err) == (exit_code, ""), out + err
    config = load_run(tmp_path / "run.yaml")
    assert {key: value_at(config, key) for key in wanted} == wanted, out
    conversion = convert(read_source(tmp_path / name))
    assert {row.key for row in conversion.rows if row.outcome is Outcome.MISSING} == set(without)
    assert [row.key for row in unknown(conversion)] == (["no_such_flag"] if "no_such_flag" in text else [])
    assert list(problems(config, explicit_keys(config), config.run.num_ranks or 2)) == []
    assert all(row.note or row.sets for row in conversion.rows), "every key has a fate"


# trainer, keys, what is set, and keys that change what is learned and are not taken over
CASES = [
    (TRL_DPO, {"loss_type": "sigmoid_norm"}, {"loss.logprob": "mean"}, []),
    (TRL_DPO, {"loss_type": ["sigmoid"], "rpo_alpha": 1.0}, {"loss.nll_coef": 1.0}, []),
    (TRL_DPO, {"loss_type": "robust", "label_smoothing": 0.1}, {"loss.label_smoothing": 0.1}, ["loss_type"]),
    (TRL_DPO, {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}, {}, ["loss_type"]),
    (TRL_DPO, {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 1.0]}, {"loss.nll_coef": None}, ["loss_type"]),
    (TRL_DPO, {"f_divergence_type": "forward_kl"}, {}, ["f_divergence_type"]),
    (TRL_DPO, {"sync_ref_model": True}, {}, ["sync_ref_model"]),
    (TRL_DPO, {"optim": "adafactor"}, {}, ["optim"]),
    (TRL_DPO, {"per_device_train_batch_size": "many"}, {"trainer.batch_size": None}, ["per_device_train_batch_size"]),
    (TRL_DPO, {"num_train_epochs": 0.5}, {"trainer.epochs": None}, []),
    (TRL_DPO, {"dataset_name": "d", "dataset_config": "c", "dataset_train_split": "t"}, {"data.train": "d:c:t"}, []),
    (TRL_DPO, {"use_peft": True, "lora_target_modules": "all-linear"}, {"policy.lora.rank": 16}, []),
    (TRL_DPO, {"use_peft": True, "use_rslora": True}, {"policy.lora.rank": None}, ["use_peft"]),
    (TRL_REWARD, {"chat_template_path": "template.jinja"}, {}, ["chat_template_path"]),
    (OPENRLHF_DPO, {"pretrain": "m", "learning_rate": 1e-6, "beta": 0.2, "l2": 0.1}, {"policy.optimizer.weight_decay": 0.1}, None),
    (OPENRLHF_DPO, {"ipo": False, "max_len": 2048}, {"loss.type": None, "data.max_tokens": 2048}, None),
    (OPENRLHF_DPO, {"optim": "muon", "muon.lr": 0.02, "lr_warmup_ratio": 0}, {}, ["optim"]),
    (OPENRLHF_RM, {"loss": "logexp", "lr_warmup_ratio": 0}, {"data.margin_key": None}, []),
    (NEMO_DPO, {"dpo.sft_loss_weight": 0.1, "dpo.sft_average_log_probs": True}, {"loss.nll_coef": 0.1}, []),
    (NEMO_DPO, {"dpo.sft_loss_weight": 0.1, "dpo.sft_average_log_probs": False}, {"loss.nll_coef": None}, ["dpo.sft_loss_weight"]),
    (NEMO_DPO, {"dpo.preference_loss_weight": 0.5}, {}, ["dpo.preference_loss_weight"]),
    (NEMO_DPO, {"policy.tokenizer.chat_template": "{{ messages }}"}, {}, ["policy.tokenizer.chat_template"]),
    (
        NEMO_DPO,
        {"policy.dtensor_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 4},
        {"policy.lora.rank": 4, "policy.lora.alpha": 32, "policy.lora.dropout": 0.0},
        [],
    ),
    (
        NEMO_DPO,
        {
            "policy.dtensor_cfg.enabled": True,
            "policy.optimizer.kwargs.lr": 1e-5,
            "policy.scheduler": [
                {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 5}},
                {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 100, "eta_min": 1e-6}},
                {"milestones": [5]},
            ],
        },
        {"policy.optimizer.lr_schedule.min_ratio": 0.1, "policy.optimizer.warmup_steps": 5},
        [],
    ),
    (
        NEMO_DPO,
        {"policy.dtensor_cfg.enabled": True, "policy.scheduler": [{"name": "torch.optim.lr_scheduler.StepLR"}]},
        {},
        ["policy.scheduler"],
    ),
]


@pytest.mark.parametrize("trainer, foreign, wanted, lost", CASES, ids=range(len(CASES)))
def test_figures_of_keys_alone(trainer, foreign, wanted, lost):
    conversion = convert(Source("here", trainer, foreign))
    assert {key: conversion.values.get(key) for key in wanted} == wanted
    if lost is not None:
        assert [line.split(" = ")[0] for line in conversion.lost] == lost


def test_a_loss_that_is_not_taken_over_is_exit_code_1(tmp_path, capsys):
    script = tmp_path / "run.sh"
    for loss, code in (("hinge", 1), ("sigmoid", 0)):
        script.write_text(f"trl dpo --model_name_or_path m --dataset_name d --loss_type {loss} --beta 0.1\n")
        assert run(capsys, "convert", script)[0] == code


def test_what_a_file_of_arguments_trains_is_known_by_its_keys(tmp_path):
    shared = {"model_name_or_path": "m", "learning_rate": 1e-6, "output_dir": "o", "dataloader_pin_memory": True}
    own = {
        "beta": (0.1, TRL_DPO),
        "center_rewards_coefficient": (0.01, TRL_REWARD),
        "num_ppo_epochs": (4, TRL),
    }
    for key, (value, trainer) in own.items():
        (tmp_path / "a.yaml").write_text(json.dumps(shared | {key: value}))
        assert read_source(tmp_path / "a.yaml").trainer is trainer
    (tmp_path / "a.sh").write_text(shlex.join(["trl", "reward", "--config", "a.yaml"]))
    assert read_source(tmp_path / "a.sh").trainer is TRL_REWARD, "a command says it too"
