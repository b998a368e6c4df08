"""What a run learns by comes along, or is said and makes the exit code 1: estimators, losses, corrections, penalties, rewards."""

import re

import pytest

from megappo.commands.cli import main
from megappo.commands.convert.conversion import convert
from megappo.commands.convert.report import report
from megappo.commands.convert.sources import Source, read_source
from megappo.config.foreign.nemo_rl import NEMO_RL
from megappo.config.foreign.openrlhf import OPENRLHF
from megappo.config.foreign.trl import TRL
from megappo.config.foreign.verl import VERL
from megappo.config.keys import value_at
from megappo.config.loading import load_config
from megappo.rewards.base import RewardInput

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
N = {"actor_rollout_ref.rollout.n": 4}
GRPO = {"algorithm.estimator.type": "grpo", "algorithm.estimator.divide_by_group_std": True}
TIS = {"algorithm.importance_sampling.type": "tis", "algorithm.importance_sampling.level": "token"}
ICEPOP = {"algorithm.importance_sampling.type": "icepop", "algorithm.importance_sampling.count_rejected": False}


def converted(values, trainer):
    return convert(Source("here", trainer, values))


# trainer, its keys, ours, and the start of what is lost. The oracle of each line is the formula in the trainer's own code.
LEARNS = [
    (VERL, {"algorithm.adv_estimator": "gae"}, {"algorithm.estimator.type": None, "critic.optimizer.lr": 1e-5}, []),
    (
        VERL,
        {"algorithm.adv_estimator": "grpo", "critic.ppo_epochs": 2} | N,
        GRPO | {"critic.ppo_epochs": None, "critic.optimizer.lr": None},
        [],
    ),
    (
        VERL,
        {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False} | N,
        GRPO | {"algorithm.estimator.divide_by_group_std": False, "algorithm.whiten_advantages": None},
        [],
    ),
    (VERL, {"algorithm.adv_estimator": "rloo"} | N, {"algorithm.estimator.type": "rloo"}, []),
    (VERL, {"algorithm.adv_estimator": "remax"}, {"algorithm.estimator.type": "remax"}, []),
    (VERL, {"algorithm.adv_estimator": "reinforce_plus_plus"}, {"algorithm.estimator.type": "reinforce_plus_plus"}, []),
    (
        VERL,
        {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"} | N,
        GRPO | {"algorithm.estimator.divide_by_group_std": False, "algorithm.whiten_advantages": True},
        [],
    ),
    (VERL, {"algorithm.adv_estimator": "grpo_passk"} | N, {"algorithm.estimator.type": None}, ["algorithm.adv_estimator"]),
    (
        VERL,
        {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_low": 3e-4, f"{ACTOR}.loss_agg_mode": "token-mean"},
        {
            "algorithm.loss.type": "gspo",
            "algorithm.loss.clip_low": 3e-4,
            "algorithm.loss.dual_clip": None,
            "algorithm.loss_aggregation": "seq-mean-token-mean",
        },
        [],
    ),
    (
        VERL,
        {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.loss_agg_mode": "token-mean"},
        {"algorithm.loss.type": "cispo", "algorithm.loss.dual_clip": None, "algorithm.loss_aggregation": "token-mean"},
        [],
    ),
    (VERL, {f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}, {"algorithm.loss.type": None}, [f"{ACTOR}.policy_loss.loss_mode"]),
    (VERL, {f"{ACTOR}.tis_imp_ratio_cap": 3.0}, TIS | {"algorithm.importance_sampling.high": 3.0}, []),
    (VERL, {f"{CORRECTION}.rollout_is": None}, {"algorithm.importance_sampling.type": None}, []),
    (
        VERL,
        {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_is_threshold": 5.0},
        TIS | {"algorithm.importance_sampling.level": "sequence", "algorithm.importance_sampling.high": 5.0},
        [],
    ),
    (
        VERL,
        {
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_rs": "token_k1",
            f"{CORRECTION}.rollout_rs_threshold": "0.8_2.0",
        },
        ICEPOP | {"algorithm.importance_sampling.low": 0.5, "algorithm.importance_sampling.high": 1.25},
        [],
    ),
    (
        VERL,
        {
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_rs": "seq_mean_k3",
            f"{CORRECTION}.rollout_rs_threshold": 0.01,
        },
        TIS,
        [f"{CORRECTION}.rollout_rs ="],
    ),
    (
        VERL,
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.bypass_mode": True},
        {"algorithm.importance_sampling.type": None, "algorithm.loss.proximal": "behaviour"},
        [],
    ),
    (
        VERL,
        {
            "data.max_response_length": 1000,
            "reward_model.overlong_buffer.enable": True,
            "reward_model.overlong_buffer.len": 200,
            "reward_model.overlong_buffer.penalty_factor": 0.5,
        },
        {"reward.length_penalty.per_token": 0.5 / 200, "reward.length_penalty.start": 800},
        [],
    ),
    (
        VERL,
        {"algorithm.filter_groups.enable": True} | N | {"algorithm.adv_estimator": "grpo"},
        {"algorithm.dynamic_sampling.max_rounds": 10},
        [],
    ),
    (VERL, {"~algorithm.kl_ctrl.kl_coef": None}, {}, ["~algorithm.kl_ctrl.kl_coef"]),
    (VERL, {"--config-name": "mine"}, {}, ["--config-name"]),
    (VERL, {"--config-name": "ppo_megatron_trainer"}, {"policy.recompute": None, "critic.recompute": None}, []),
    (VERL, {}, {"policy.recompute": "full", "critic.recompute": "full", "rollout.max_num_seqs": None}, []),
    (
        NEMO_RL,
        {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False},
        {"algorithm.loss.type": "gspo", "algorithm.loss_aggregation": "seq-mean-token-mean"},
        [],
    ),
    (
        NEMO_RL,
        {
            "loss_fn.use_importance_sampling_correction": True,
            "loss_fn.truncated_importance_sampling_type": "tis",
            "loss_fn.truncated_importance_sampling_ratio": 5,
        },
        TIS | {"algorithm.importance_sampling.high": 5},
        [],
    ),
    (NEMO_RL, {"loss_fn.use_importance_sampling_correction": True}, {}, ["loss_fn.use_importance_sampling_correction"]),
    (
        NEMO_RL,
        {"data.default.env_name": "math", "ppo.reward_scaling.enabled": True, "ppo.reward_scaling.target_max": 2.0},
        {"reward.parts": [{"name": "math_verify", "weight": 2.0}]},
        [],
    ),
    (
        NEMO_RL,
        {"ppo.reward_scaling.enabled": True, "ppo.reward_scaling.target_min": -1.0, "data.default.env_name": "math"},
        {"reward.parts": [{"name": "math_verify", "weight": 2.0}]},
        ["ppo.reward_scaling: the constant -1"],
    ),
    (
        NEMO_RL,
        {
            "ppo.reward_shaping.enabled": True,
            "ppo.reward_shaping.overlong_buffer_length": 100,
            "ppo.reward_shaping.overlong_buffer_penalty": 1,
            "ppo.reward_shaping.max_response_length": 400,
        },
        {"reward.length_penalty.per_token": 0.01, "reward.length_penalty.start": 300},
        [],
    ),
    (
        OPENRLHF,
        {
            "algo.advantage.estimator": "group_norm",
            "rollout.n_samples_per_prompt": 8,
            "algo.advantage.is_correction_enable": True,
            "algo.advantage.is_correction_type": "icepop",
            "algo.kl.init_coef": 0,
            "actor.lr_warmup_ratio": 0,
        },
        GRPO
        | {"algorithm.importance_sampling.low": 0.5, "algorithm.importance_sampling.high": 5.0, "algorithm.kl.placement": "none"},
        [],
    ),
    (
        OPENRLHF,
        {"algo.advantage.is_correction_enable": True, "actor.lr_warmup_ratio": 0},
        TIS | {"algorithm.importance_sampling.high": 5.0},
        ["the lower bound 0.5"],
    ),
    # Found by random keys: a controller without a place under a KL in the loss; both forms of one bound.
    (
        OPENRLHF,
        {"algo.kl.use_loss": True, "algo.kl.horizon": 2, "actor.lr_warmup_ratio": 0},
        {"algorithm.kl.placement": "loss", "algorithm.kl.controller.horizon": None, "algorithm.kl.estimator": None},
        ["the default kl_estimator"],
    ),
    (
        OPENRLHF,
        {"data.max_len": 4096, "prompt_max_len": 7, "actor.lr_warmup_ratio": 0},
        {"data.max_prompt_tokens": 7, "rollout.max_response_tokens": 1024},
        [],
    ),
    (TRL, {"num_ppo_epochs": 2}, {"policy.optimizer.lr": 3e-6, "critic.optimizer.lr": 3e-6}, []),
    (
        TRL,
        {"model_name_or_path": "t", "sft_model_path": "s", "reward_model_path": "r"},
        {
            "policy.model": "s",
            "data.tokenizer": "t",
            "reference.model": None,
            "critic.model": "r",
            "critic.value_head": "checkpoint",
        },
        [],
    ),
    (TRL, {"model_name_or_path": "m"}, {"policy.model": "m", "data.tokenizer": None}, []),
]


@pytest.mark.parametrize("trainer, foreign, wanted, lost", LEARNS, ids=range(len(LEARNS)))
def test_what_is_learned_by_is_taken_over_or_said(trainer, foreign, wanted, lost):
    conversion = converted(foreign, trainer)
    assert {key: conversion.values.get(key) for key in wanted} == wanted
    assert len(conversion.lost) == len(lost) and all(map(str.startswith, conversion.lost, lost)), conversion.lost
    assert "".join(report(conversion).partition("before it runs")[1:]).count("\n  ") >= len(lost)


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_the_exit_code_says_what_is_not_taken_over(tmp_path, capsys):
    script = tmp_path / "run.sh"
    command = "python -m verl.trainer.main_ppo data.train_files=gsm8k.parquet actor_rollout_ref.model.path=m "
    for estimator, code in (("gae", 0), ("rloo actor_rollout_ref.rollout.n=2", 0), ("opo", 1)):
        script.write_text(f"{command} algorithm.adv_estimator={estimator}\n")
        found, out, err = run(capsys, "convert", script)
        assert found == code and ("Before it runs: algorithm.adv_estimator" in out) == (code == 1)
        assert ("before it runs\n  algorithm.adv_estimator" in err) == (code == 1)


DOTTED = """python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 --ref.num_nodes 1 --vllm.num_engines 2 --vllm.tensor_parallel_size 2 \\
   --train.colocate_all --actor.model_name_or_path policy --critic.model_name_or_path critic --reward.model_name_or_path judge \\
   --train.batch_size 64 --rollout.batch_size 128 --rollout.n_samples_per_prompt 2 --data.max_len 3072 \\
   --rollout.max_new_tokens 1024 \\
   --actor.adam.lr 5e-7 --critic.adam.lr 8e-6 --critic.adam.weight_decay 0.1 --actor.lr_warmup_ratio 0 --actor.max_norm 0.5 \\
   --algo.kl.init_coef 0.02 --algo.kl.use_loss --algo.kl.estimator k3 --data.prompt_dataset prompts.jsonl --ds.zero_stage 3 \\
   --ds.param_dtype bf16 --actor.gradient_checkpointing_enable --train.dynamic_batch_enable --train.max_tokens_per_gpu 9000 \\
   --ckpt.output_dir /out --ckpt.save_steps 5 --logger.wandb.key secret-key-of-an-account --logger.wandb.run_name first
"""


def test_the_dotted_flags_of_openrlhf_are_read(tmp_path, capsys):
    script, target = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(DOTTED)
    conversion = convert(read_source(script))
    assert len(re.findall(r"--[a-z]+\.", DOTTED)) == 32 == len([row for row in conversion.rows if not row.is_default])
    assert not [row.key for row in conversion.rows if row.outcome is None] and conversion.lost == []
    code, out, err = run(capsys, "convert", script, "-o", target)
    assert code == 0 and "secret-key" not in out + err + target.read_text()
    c = load_config(target)
    assert (c.policy.model, c.critic.model, c.reward_model.model, c.critic.value_head) == ("policy", "critic", "judge", "zero")
    assert (c.policy.optimizer.lr, c.critic.optimizer.lr, c.critic.optimizer.weight_decay) == (5e-7, 8e-6, 0.1)
    assert c.policy.optimizer.clip_grad == 0.5 and value_at(c, "policy.optimizer.lr_schedule.min_ratio") == 0.1
    assert (c.data.prompts_per_step, c.rollout.samples_per_prompt, c.algorithm.mini_batch_size) == (128, 2, 64)
    assert (c.data.max_prompt_tokens, c.rollout.max_response_tokens, c.policy.micro_batch_tokens) == (2048, 1024, 9000)
    assert (c.algorithm.kl.placement, c.algorithm.kl.coef, c.algorithm.kl.estimator) == ("loss", 0.02, "k3")
    assert (c.run.num_ranks, c.rollout.tp, c.run.output_dir, c.run.name, c.checkpoint.save_every) == (4, 2, "/out", "first", 5)
    assert c.telemetry.trackers == ("wandb",)


@pytest.mark.parametrize("section", ["custom_reward_function", "reward.custom_reward_function"])
def test_a_reward_function_of_verl_is_called_through_the_printed_adapter(tmp_path, monkeypatch, section):
    (tmp_path / "mine.py").write_text(
        "WANTED = ('d', 'r', 'a', 3)\n"
        "def judge(data_source, solution_str, ground_truth, extra_info, bonus=0):\n"
        "    return {'score': (data_source, solution_str, ground_truth, extra_info['index']) == WANTED and 1 + bonus}\n"
    )
    monkeypatch.chdir(tmp_path)
    own = {"path": "mine.py", "name": "judge", "reward_kwargs.bonus": 0.5}
    conversion = converted({f"{section}.{key}": value for key, value in own.items()}, VERL)
    assert conversion.values["reward.parts"] == [{"path": "verl_reward.py", "function": "score", "args": {"bonus": 0.5}}]
    lines = conversion.todo[conversion.todo.index("save these lines as verl_reward.py in the working directory:") + 1 :]
    assert len(lines) == 3 and report(conversion).rstrip().endswith(lines[-1])
    names = {}
    exec("\n".join(line.removeprefix("    ") for line in lines), names)
    record = {"data_source": "d", "extra_info": {"index": 3}}
    sample = RewardInput(prompt="", response="r", answer="a", truncated=False, num_tokens=1, record=record, sample_id="0")
    assert names["score"](sample, bonus=0.5) == 1.5


def test_each_of_several_validation_files_is_a_set_of_its_own():
    sampling = {
        f"actor_rollout_ref.rollout.val_kwargs.{key}": value
        for key, value in {"n": 2, "do_sample": True, "temperature": 1.0}.items()
    }
    files = ["a/aime-24.parquet", "b/test.parquet", "c/test.parquet"]
    for extra, drawn in ({}, {}), (sampling, {"n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1}):
        conversion = converted(extra | {"data.val_files": files}, VERL)
        sets = zip(("aime_24", "test_1", "test_2"), files)
        assert conversion.values["evaluations"] == {name: {"data": file, **drawn} for name, file in sets}
        assert "data.eval" not in conversion.values and conversion.lost == []


@pytest.mark.parametrize(
    "written, section",
    [
        ({"n": 4, "do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"n": 4, "temperature": 0.6, "top_p": 0.9, "top_k": -1}),
        ({"n": 4, "do_sample": False, "temperature": 0.6}, {"n": 4, "temperature": 0.0}),
        ({"n": 1, "do_sample": False, "temperature": 0.6}, None),
    ],
)
def test_validation_of_verl_that_is_not_greedy_is_a_set_of_its_own(written, section):
    values = {f"actor_rollout_ref.rollout.val_kwargs.{key}": value for key, value in written.items()}
    conversion = converted(values | {"data.val_files": "val.parquet", "trainer.test_freq": 5}, VERL)
    found = conversion.values.get("evaluations")
    assert found == (section and {"validation": {"data": "val.parquet", **section}}) and conversion.lost == []
