"""`megappo convert`: every key of the deepseek-7b script, the other trainers' runs, unknown keys."""

import re
from pathlib import Path

import pytest

from megappo.commands.cli import main
from megappo.commands.convert.conversion import class_of, convert
from megappo.commands.convert.report import configuration, report, unknown
from megappo.commands.convert.sources import READ, Source, Unread, read_source
from megappo.config.checks import problems
from megappo.config.foreign.nemo_rl import NEMO_RL
from megappo.config.foreign.openrlhf import OPENRLHF
from megappo.config.foreign.rule import Outcome
from megappo.config.foreign.trl import TRL
from megappo.config.foreign.verl import VERL
from megappo.config.keys import value_at
from megappo.config.loading import explicit_keys, load_config, validated
from megappo.config.yaml_reader import parse_yaml

ROOT = Path(__file__).parents[3]
SOURCES = Path("tests/commands/convert/sources")
DEEPSEEK = SOURCES / "deepseek_7b_gsm8k.sh"

AOR = "actor_rollout_ref"
# All 39 keys of verl's example: our key and value, or the outcome.
DEEPSEEK_KEYS = {
    "algorithm.adv_estimator": Outcome.IMPLIED,
    "data.train_files": ("data.train", "data/gsm8k/train.parquet"),
    "data.val_files": ("data.eval", "data/gsm8k/test.parquet"),
    "data.train_batch_size": ("data.prompts_per_step", 1024),
    "data.max_prompt_length": ("data.max_prompt_tokens", 512),
    "data.max_response_length": ("rollout.max_response_tokens", 512),
    "data.filter_overlong_prompts": ("data.overlong", "filter"),
    "data.truncation": ("data.overlong", "filter"),
    f"{AOR}.model.path": ("policy.model", "deepseek-ai/deepseek-llm-7b-chat"),
    f"{AOR}.actor.optim.lr": ("policy.optimizer.lr", 1e-6),
    f"{AOR}.model.use_remove_padding": Outcome.IMPLIED,
    f"{AOR}.actor.ppo_mini_batch_size": ("algorithm.mini_batch_size", 256),
    f"{AOR}.actor.ppo_micro_batch_size_per_gpu": ("policy.micro_batch_tokens", 16 * (512 + 512)),
    f"{AOR}.actor.fsdp_config.param_offload": ("policy.offload", []),
    f"{AOR}.actor.fsdp_config.optimizer_offload": ("policy.offload", []),
    f"{AOR}.actor.use_kl_loss": ("algorithm.kl.placement", "none"),
    f"{AOR}.model.enable_gradient_checkpointing": ("policy.recompute", "full"),
    f"{AOR}.rollout.log_prob_micro_batch_size_per_gpu": Outcome.UNNEEDED,
    f"{AOR}.rollout.tensor_model_parallel_size": ("rollout.tp", 4),
    f"{AOR}.rollout.name": ("rollout.engine", "vllm"),
    f"{AOR}.rollout.gpu_memory_utilization": ("rollout.memory_share", 0.4),
    "critic.optim.lr": ("critic.optimizer.lr", 1e-5),
    "critic.model.use_remove_padding": Outcome.IMPLIED,
    "critic.model.path": ("critic.model", "deepseek-ai/deepseek-llm-7b-chat"),
    "critic.model.enable_gradient_checkpointing": ("critic.recompute", "full"),
    "critic.ppo_micro_batch_size_per_gpu": ("critic.micro_batch_tokens", 32 * (512 + 512)),
    "critic.model.fsdp_config.param_offload": ("critic.offload", []),
    "critic.model.fsdp_config.optimizer_offload": ("critic.offload", []),
    "algorithm.use_kl_in_reward": ("algorithm.kl.placement", "none"),
    "trainer.critic_warmup": Outcome.IMPLIED,
    "trainer.logger": ("telemetry.trackers", []),
    "trainer.project_name": ("run.output_dir", "runs/verl_example_gsm8k"),
    "trainer.experiment_name": ("run.name", "deepseek_llm_7b_function_rm"),
    "trainer.n_gpus_per_node": ("run.num_ranks", 8),
    "trainer.nnodes": ("run.num_ranks", 8),
    "trainer.save_freq": ("checkpoint.save_every", 20),
    "trainer.test_freq": ("trainer.eval_every", 1),
    "trainer.use_legacy_worker_impl": Outcome.UNNEEDED,
    "trainer.total_epochs": ("trainer.epochs", 15),
}
# verl's defaults that this script relies on, where megappo's are others.
DEEPSEEK_DEFAULTS = {
    "algorithm.lam": 1.0,
    "algorithm.loss.dual_clip": 3.0,
    "critic.loss.clip": 0.5,
    "policy.optimizer.weight_decay": 0.01,
    "policy.optimizer.betas": [0.9, 0.999],
    "critic.optimizer.weight_decay": 0.01,
    "critic.optimizer.betas": [0.9, 0.999],
    "rollout.sleep": "all",
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("DATA_DIR", "WANDB_TOKEN_OF_NOBODY"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def converted(values, trainer=VERL):
    return convert(Source("here", trainer, values))


def test_all_39_keys_of_the_deepseek_script_are_right():
    conversion = convert(read_source(DEEPSEEK))
    rows = {row.key: row for row in conversion.rows if not row.is_default}
    assert len(rows) == len(DEEPSEEK_KEYS) == 39
    found = {key: next(iter(row.sets.items())) if row.outcome is Outcome.TAKEN else row.outcome for key, row in rows.items()}
    assert found == DEEPSEEK_KEYS
    assert all(row.note for row in rows.values() if row.outcome is not Outcome.TAKEN), "each with its reason"
    assert {key: value for row in conversion.rows if row.is_default for key, value in row.sets.items()} == DEEPSEEK_DEFAULTS
    assert conversion.todo == []


def test_the_recipe_is_what_the_script_converts_to():
    path = ROOT / "configs" / "gsm8k_deepseek_7b_verl.yaml"
    assert path.read_text() == configuration(convert(read_source(DEEPSEEK)))
    config = load_config(path)
    for expected in (*DEEPSEEK_KEYS.values(), *DEEPSEEK_DEFAULTS.items()):
        if not isinstance(expected, Outcome):
            value = value_at(config, expected[0])
            assert (list(value) if isinstance(value, tuple) else value) == expected[1]
    assert (config.policy.parallel.tp, config.critic.parallel.tp) == (4, 4)
    assert list(problems(config, explicit_keys(config), 8)) == []


# source -> keys of ours that matter, keys without a rule, and the start of what is learned otherwise
OTHERS = {
    "nemo_rl.yaml": (
        {
            "data.prompts_per_step": 32,
            "rollout.samples_per_prompt": 16,
            "algorithm.mini_batch_size": 512,
            "policy.micro_batch_tokens": 16384,
            "policy.parallel.pp": 2,
            "policy.optimizer.lr_schedule.min_ratio": 0.1,
            "policy.optimizer.betas": (0.9, 0.999),
            "critic.warmup.steps": 5,
            "algorithm.loss.clip_high": 0.28,
            "algorithm.lam_value": 1.0,
            "algorithm.kl.placement": "none",
            "policy.recompute": "full",
            "rollout.memory_share": 0.6,
        },
        ["loss_fn.some_new_loss"],
        ["ppo.reward_shaping.enabled = true"],
    ),
    "openrlhf.sh": (
        {
            "data.prompts_per_step": 1024,
            "algorithm.mini_batch_size": 128,
            "algorithm.ppo_epochs": 2,
            "trainer.epochs": 1,
            "algorithm.loss.clip_low": 0.2,
            "algorithm.loss.clip_high": 0.28,
            "algorithm.kl.coef": 0.01,
            "policy.micro_batch_tokens": 8 * 2048,
            "critic.optimizer.lr": 9e-6,
            "policy.offload": ("optimizer",),
            "run.num_ranks": 8,
            "checkpoint.save_every": 0,
            "run.output_dir": "/data/llama3-8b",
        },
        ["no_such_flag"],
        ["the default lr_warmup_ratio = 0.03"],
    ),
    "lightrft.sh": (
        {
            "run.num_ranks": 8,
            "algorithm.ppo_epochs": 1,
            "trainer.epochs": 30,
            "rollout.tp": 2,
            "critic.loss.clip": 0.2,
            "data.prompts_per_step": 256,
            "algorithm.ptx.coef": 0.1,
            "algorithm.ptx.data": "/data/pile.jsonl",
            "data.system_prompt": "Think in <think></think>, then \\boxed{the answer}. It costs $5.",
        },
        [],
        ["the default lr_warmup_ratio = 0.03"],
    ),
    "trl_config.py": (
        {
            "data.prompts_per_step": 128,
            "algorithm.mini_batch_size": 32,
            "trainer.steps": 79,
            "algorithm.kl.estimator": "k3",
            "rollout.sampling.temperature": 0.7,
            "critic.optimizer.lr": 3e-6,
            "reward.missing_eos_penalty": 1.0,
        },
        ["seeds"],
        [],
    ),
    "flowmesh.yaml": (
        {
            "run.num_ranks": 2,
            "trainer.steps": 50,
            "algorithm.mini_batch_size": 2,
            "checkpoint.save_every": 25,
            "rollout.max_response_tokens": 128,
            "policy.model": "mistralai/Ministral-3-3B-Instruct-2512",
        },
        [],
        ["spec.reward_model.identifier", "spec.reward_model.type"],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_runs_of_the_other_trainers_become_configurations_that_load(name, tmp_path, capsys):
    wanted, strangers, lost = OTHERS[name]
    target = tmp_path / "run.yaml"
    code, out, err = run(capsys, "convert", SOURCES / name, "-o", target)
    assert (code, err) == (1 if lost else 0, "") and f"{len(strangers)} unknown" in out.splitlines()[0]
    config = load_config(target)
    assert {key: value_at(config, key) for key in wanted} == wanted
    conversion = convert(read_source(SOURCES / name))
    assert [row.key for row in unknown(conversion)] == strangers
    assert len(conversion.lost) == len(lost) and all(map(str.startswith, conversion.lost, lost)), conversion.lost
    assert list(problems(config, explicit_keys(config), config.run.num_ranks or 1)) == []
    assert all(row.note or row.sets for row in conversion.rows), "every key has a fate"
    written = [row for row in conversion.rows if not row.is_default]
    assert all(re.search(rf"^  {re.escape(row.key)} = ", out, re.MULTILINE) for row in written)


# foreign keys, what a row says or sets
ARITHMETIC = [
    ({f"{AOR}.actor.ppo_mini_batch_size": 64, f"{AOR}.rollout.n": 5}, {"algorithm.mini_batch_size": 320}),
    (
        {f"{AOR}.actor.ppo_mini_batch_size": 64, "critic.ppo_mini_batch_size": 32, f"{AOR}.rollout.n": 5},
        {"algorithm.mini_batch_size": 320, "critic.mini_batch_size": 160},
    ),
    (
        {f"{AOR}.actor.ppo_epochs": 2, "critic.ppo_epochs": 3, "critic.loss_agg_mode": "seq-mean-token-mean"},
        {"algorithm.ppo_epochs": 2, "critic.ppo_epochs": 3, "critic.loss_aggregation": "seq-mean-token-mean"},
    ),
    ({f"{AOR}.actor.ppo_epochs": 2, "critic.ppo_epochs": 2}, {"algorithm.ppo_epochs": 2, "critic.ppo_epochs": None}),
    (
        {"data.train_batch_size": 64, "critic.ppo_mini_batch_size": 16, "critic.optim.lr_warmup_steps": 3},
        {"critic.optimizer.warmup_steps": 12},
    ),
    (
        {f"{AOR}.model.lora_rank": 8, f"{AOR}.model.target_modules": ["q_proj"], "critic.model.lora_rank": 0},
        {"policy.lora.rank": 8, "policy.lora.alpha": 16, "policy.lora.targets": ["q_proj"], "critic.lora.alpha": None},
    ),
    ({f"{AOR}.model.lora_rank": 0, f"{AOR}.model.lora_alpha": 64}, {"policy.lora.rank": None, "policy.lora.alpha": None}),
    (
        {f"{AOR}.actor.use_kl_loss": True},
        {"algorithm.kl.placement": "loss", "algorithm.kl.estimator": "k3"},
    ),
    (
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1},
        {"algorithm.kl.placement": "reward", "algorithm.kl.coef": 0.1},
    ),
    (
        {f"{AOR}.actor.clip_ratio": 0.1, f"{AOR}.actor.clip_ratio_high": 0.3},
        {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.3},
    ),
    ({f"{AOR}.actor.optim.lr_warmup_steps": 10}, {"policy.optimizer.warmup_steps": 40}),
    ({f"{AOR}.actor.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 100}, {"policy.optimizer.warmup_steps": 40}),
    (
        {f"{AOR}.actor.megatron.tensor_model_parallel_size": 2, f"{AOR}.actor.megatron.sequence_parallel": True},
        {"policy.parallel.tp": 2},
    ),
    (
        {
            f"{AOR}.actor.use_dynamic_bsz": True,
            f"{AOR}.actor.ppo_max_token_len_per_gpu": 8192,
            f"{AOR}.actor.ulysses_sequence_parallel_size": 2,
        },
        {"policy.micro_batch_tokens": 16384, "policy.parallel.cp": 2},
    ),
    ({"trainer.nnodes": 2}, {"run.num_ranks": 16}),
    ({"trainer.logger": ["console", "tensorboard"]}, {"telemetry.trackers": ["tensorboard"]}),
    ({"data.filter_overlong_prompts": False, "data.truncation": "error"}, {"data.overlong": "error"}),
    (
        {f"{AOR}.model.path": "Qwen/Qwen2.5-VL-7B-Instruct", "data.image_key": "images", f"{AOR}.actor.freeze_vision_tower": True},
        {"data.image_key": "images", "policy.freeze": ["visual"]},
    ),
    ({f"{AOR}.model.path": "Qwen/Qwen2.5-7B-Instruct", "data.image_key": "images"}, {"data.image_key": None}),
    ({f"{AOR}.model.path": "models/mine", "data.image_key": "photos"}, {"data.image_key": "photos"}),
]


@pytest.mark.parametrize("foreign, wanted", ARITHMETIC, ids=range(len(ARITHMETIC)))
def test_units_change_with_the_other_keys(foreign, wanted):
    values = converted(foreign).values
    assert {key: values.get(key) for key in wanted} == wanted


# The keys of verl's section `reward` with its values, as its trainer prints them in November 2026.
REWARD = {
    "num_workers": 8,
    "num_cpus_per_worker": 0.25,
    "compute_score_kwargs": {},
    "custom_reward_function.path": None,
    "custom_reward_function.name": "compute_score",
    "reward_manager.source": "register",
    "reward_manager.name": "naive",
    "reward_manager.module.path": None,
    "reward_manager.module.name": "custom_reward_manager",
    "reward_model.enable": False,
    "reward_model.enable_resource_pool": False,
    "reward_model.model_path": None,
    "reward_model.n_gpus_per_node": 8,
    "reward_model.nnodes": 0,
    "reward_model.rollout.name": "vllm",
    "reward_model.rollout.temperature": 1.0,
    "reward_model.rollout.disaggregation.enabled": False,
    "sandbox_fusion.url": None,
    "sandbox_fusion.max_concurrent": 64,
    "sandbox_fusion.memory_limit_mb": 1024,
}
JUDGE = {"reward_model.model": "judge", "reward.parts": [{"model": "reward_model"}]}


def test_verl_s_reward_is_read_under_its_older_and_its_newer_names():
    older = {"reward_model.enable": True, "reward_model.model.path": "judge"}
    assert JUDGE.items() <= converted(older).values.items()
    assert "reward_model.model" not in converted(older | {"reward_model.enable": False}).values
    newer = {f"reward.{key}": value for key, value in REWARD.items()}
    printed = newer | dict.fromkeys([*older, "reward_model.reward_manager", "sandbox_fusion.url"])
    used = {"reward.reward_model.enable": True, "reward.reward_model.model_path": "judge"}
    assert JUDGE.items() <= converted(printed | used).values.items()
    for off in (printed, printed | used | {"reward.reward_model.enable": False}):
        conversion = converted(off)
        assert "reward_model.model" not in conversion.values and not conversion.lost
        assert not [row for row in conversion.rows if row.outcome in (None, Outcome.MISSING) and not row.is_default]
    buffer = {"enable": True, "len": 200, "penalty_factor": 0.5}
    values = converted({f"reward.reward_kwargs.overlong_buffer_cfg.{key}": value for key, value in buffer.items()}).values
    assert (values["reward.length_penalty.per_token"], values["reward.length_penalty.start"]) == (0.5 / 200, 512 - 200)
    own = {"reward.reward_manager.source": "importlib", "reward.compute_score_kwargs.method": "flexible"}
    assert {row.key for row in converted(printed | own).rows if row.outcome is Outcome.MISSING} == own.keys()


@pytest.mark.parametrize("strategy, every", {"steps": 25, "epoch": "epoch", "no": "never", False: "never"}.items())
def test_the_strategy_of_saving_and_its_steps_are_one_key(strategy, every):
    conversion = converted({"save_steps": 25, "save_strategy": strategy}, TRL)
    assert conversion.values["checkpoint.save_every"] == every
    assert not [row for row in conversion.rows if row.outcome is Outcome.MISSING and not row.is_default]


NO_EQUIVALENT = [
    ({"algorithm.adv_estimator": "opo"}, "there are gae, vtrace, grpo, rloo"),
    ({f"{AOR}.actor.policy_loss.loss_mode": "clip_cov"}, "there are ppo, gspo, cispo and dis"),
    ({f"{AOR}.actor.use_kl_loss": True, f"{AOR}.actor.kl_loss_type": "kl"}, "algorithm.kl.estimator cannot be that here"),
    ({f"{AOR}.rollout.name": "sglang"}, "vLLM generates"),
    ({"data.truncation": "left"}, "never truncated"),
    ({"critic.ulysses_sequence_parallel_size": 2, "critic.megatron.context_parallel_size": 4}, "critic.parallel.cp is already 2"),
    ({f"{AOR}.actor.optim.lr": "fast"}, "policy.optimizer.lr"),
    ({f"{AOR}.actor.ppo_mini_batch_size": "many"}, "not a number that can be counted with"),
    ({"reward_model.reward_manager": "prime"}, "scores come from rules"),
    ({f"{AOR}.actor.optim.lr_warmup_steps_ratio": 0.1}, "set policy.optimizer.warmup_steps"),
]


@pytest.mark.parametrize("foreign, says", NO_EQUIVALENT, ids=range(len(NO_EQUIVALENT)))
def test_what_has_no_equivalent_says_why(foreign, says):
    conversion = converted(foreign)
    (row,) = (row for row in conversion.rows if row.outcome is Outcome.MISSING and not row.is_default)
    assert says in row.note and not row.sets
    assert f"# {row.key} = " in configuration(conversion), "and the configuration says it too"


@pytest.mark.parametrize("trainer", READ, ids=lambda trainer: f"{trainer.name} {trainer.kind}".strip())
def test_nonsense_in_every_key_is_a_row_and_never_an_error(trainer):
    for value in ("abc", [1], {"a": 1}, 0, 1e30, Unread("$X")):
        conversion = converted(dict.fromkeys(trainer.rules, value), trainer)
        data, _ = parse_yaml(configuration(conversion), "configuration")
        validated(data, class_of(trainer))
        assert report(conversion).count("\n") > len(trainer.rules), value


@pytest.mark.parametrize(
    "trainer, foreign",
    [
        (VERL, {"trainer.project_name": "my runs", "trainer.logger": ["console", "wandb"]}),
        (OPENRLHF, {"logger.wandb.project": "my runs"}),
        (NEMO_RL, {"logger.wandb.project": "my runs"}),
    ],
)
def test_the_project_of_wandb_is_a_line_to_run(trainer, foreign):
    assert "export WANDB_PROJECT='my runs'" in converted(foreign, trainer).todo
    silent = {key: value for key, value in foreign.items() if key != "trainer.logger"} if trainer is VERL else {}
    assert not [line for line in converted(silent, trainer).todo if "WANDB_PROJECT" in line]


def test_data_that_is_named_and_not_taken_over_is_not_called_unnamed():
    (line,) = (line for line in converted({"data.train_files": ["a.parquet", 7]}, VERL).todo if line.startswith("data.train"))
    assert line.startswith('data.train: NAME IT: data.train_files = ["a.parquet", 7]: data.train')


@pytest.mark.parametrize(
    "trainer, key", [(VERL, "data.apply_chat_template_kwargs"), (NEMO_RL, "policy.tokenizer.chat_template_kwargs")]
)
def test_variables_of_the_chat_template_are_taken_over(trainer, key):
    expected = {"enable_thinking": False, "budget": 5}
    for foreign in (
        {key: expected},
        {f"{key}.enable_thinking": False, f"{key}.budget": 5},
        {key: {"budget": 5}, f"{key}.enable_thinking": False},
    ):
        conversion = converted(foreign, trainer)
        assert conversion.values["data.template_args"] == expected
        assert not [row for row in conversion.rows if row.outcome is Outcome.MISSING and not row.is_default]
    for nothing in (None, {}):
        assert "data.template_args" not in converted({key: nothing}, trainer).values


@pytest.mark.parametrize(
    "trainer, key, value, train",
    [
        (VERL, "data.train_files", ["a.parquet", "b.parquet"], ["a.parquet", "b.parquet"]),
        (VERL, "data.train_files", ["a.parquet"], "a.parquet"),
        (OPENRLHF, "prompt_data", "owner/name, b.jsonl", ["owner/name", "b.jsonl"]),
        (OPENRLHF, "data.prompt_dataset", "b.jsonl", "b.jsonl"),
    ],
)
def test_several_train_files_are_taken_over(trainer, key, value, train):
    conversion = converted({key: value}, trainer)
    assert conversion.values["data.train"] == train
    data, _ = parse_yaml(configuration(conversion), "configuration")
    assert data["data"]["train"] == train and not [line for line in conversion.todo if line.startswith("data.train")]


def test_keys_without_effect_are_left_out_with_the_reason():
    conversion = converted({"trainer.total_training_steps": 5, "trainer.total_epochs": 2})
    assert "trainer.epochs" not in conversion.values
    (row,) = (row for row in conversion.rows if row.key == "trainer.total_epochs")
    assert row.outcome is Outcome.IMPLIED and "trainer.steps sets the length" in row.note


def test_unknown_keys_are_counted_and_strict_fails(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo data.train_batch_sise=8 trainer.nnodes=1 qqq.zzz=1\n")
    code, out, err = run(capsys, "convert", script)
    assert code == 0 and "2 unknown" in err and "nearest: data.train_batch_size" in err and "nothing is near" in err
    assert "# data.train_batch_sise = 8: unknown (nearest: data.train_batch_size)" in out
    assert run(capsys, "convert", script, "--strict")[0] == 1
    script.write_text("python -m verl.trainer.main_ppo trainer.nnodes=1 data.train_batch_size=8\n")
    assert run(capsys, "convert", script, "--strict")[0] == 0


def test_the_command_refuses_in_one_line_and_writes_nothing(tmp_path, capsys):
    target = tmp_path / "run.yaml"
    target.write_text("mine")
    unclosed = tmp_path / "unclosed.sh"
    unclosed.write_text("python -m verl.trainer.main_ppo data.train_files='a\n")
    for arguments, says in (
        ([DEEPSEEK, "-o", target], "exists, and is not overwritten"),
        ([DEEPSEEK, "-o", tmp_path / "absent" / "run.yaml"], "there is no directory"),
        ([unclosed], "not a shell script (no closing quotation)"),
        ([tmp_path / "absent.sh"], "no such file"),
    ):
        code, out, err = run(capsys, "convert", *arguments)
        assert (code, out) == (2, "") and says in err and err.count("\n") == 1, err
    assert target.read_text() == "mine" and {path.name for path in tmp_path.iterdir()} == {"run.yaml", "unclosed.sh"}


def test_keys_of_accounts_are_not_repeated(tmp_path, capsys):
    script = tmp_path / "run.sh"
    command = "python -m openrlhf.cli.train_ppo_ray --pretrain m --use_wandb $KEY --seed 1 --lr_warmup_ratio 0"
    script.write_text(f"KEY=0123456789abcdef0123\n{command}\n")
    code, out, err = run(capsys, "convert", script)
    assert code == 0 and "0123456789abcdef" not in out + err and "use_wandb" in err


# --------------------------------------------------------------------------------------------------------------------- engines


def engines_of(conversion) -> dict[str, str]:
    return {role: engine for role in ("policy", "critic", "reference") if (engine := conversion.values.get(f"{role}.engine"))}


WITH_KL = {f"{AOR}.actor.use_kl_loss": True, "data.train_files": "train.parquet", f"{AOR}.model.path": "m"}
FSDP2 = {f"{AOR}.actor.strategy": "fsdp2", "critic.strategy": "fsdp2"}


@pytest.mark.parametrize(
    "written, engines",
    [
        (FSDP2, dict.fromkeys(("policy", "critic", "reference"), "fsdp2")),
        ({f"{AOR}.actor.strategy": "fsdp2"}, dict.fromkeys(("policy", "reference"), "fsdp2")),
        ({"critic.strategy": "fsdp2"}, {"critic": "fsdp2"}),
        (FSDP2 | {f"{AOR}.ref.strategy": "megatron"}, {"policy": "fsdp2", "critic": "fsdp2", "reference": "megatron"}),
        (FSDP2 | {f"{AOR}.actor.use_kl_loss": False}, dict.fromkeys(("policy", "critic"), "fsdp2")),
        ({f"{AOR}.actor.strategy": "megatron"}, dict.fromkeys(("policy", "reference"), "megatron")),
        ({f"{AOR}.actor.strategy": "fsdp", "critic.strategy": "fsdp"}, {}),
    ],
)
def test_a_strategy_of_verl_names_the_engine(written, engines):
    conversion = converted(WITH_KL | written)
    assert engines_of(conversion) == engines
    assert conversion.todo == [] or all("engine" not in line for line in conversion.todo)
    # Sharded as FSDP does, a model is not cut as vLLM is.
    tp = {role: conversion.values.get(f"{role}.parallel.tp", 1) for role in ("policy", "critic")}
    assert tp == {role: 1 if engines.get(role) == "fsdp2" else 2 for role in tp}


def test_what_has_no_engine_is_said():
    rows = {row.key: row for row in converted(WITH_KL | {f"{AOR}.actor.strategy": "veomni", "critic.strategy": "fsdp"}).rows}
    assert rows[f"{AOR}.actor.strategy"].outcome is Outcome.MISSING
    assert rows["critic.strategy"].outcome is Outcome.IMPLIED and "strategy=fsdp2 is engine fsdp2" in rows["critic.strategy"].note


def test_keys_of_a_verl_section_of_fsdp():
    fsdp = f"{AOR}.actor.fsdp_config"
    keys = {"offload_policy": True, "fsdp_size": -1, "reshard_after_forward": True, "model_dtype": "fp32", "dtype": "bfloat16"}
    conversion = converted(WITH_KL | FSDP2 | {f"{fsdp}.{key}": value for key, value in keys.items()})
    rows = {row.key: row.outcome for row in conversion.rows}
    assert {key: rows[f"{fsdp}.{key}"] for key in keys} == {
        "offload_policy": Outcome.TAKEN,
        "fsdp_size": Outcome.IMPLIED,
        "reshard_after_forward": Outcome.IMPLIED,
        "model_dtype": Outcome.IMPLIED,
        "dtype": Outcome.TAKEN,
    }
    assert conversion.values["policy.offload"] == ["parameters", "gradients", "optimizer"]
    other = converted(WITH_KL | FSDP2 | {f"{fsdp}.fsdp_size": 4, f"{fsdp}.model_dtype": "bf16", f"{fsdp}.offload_policy": False})
    rows = {row.key: row.outcome for row in other.rows}
    assert rows[f"{fsdp}.fsdp_size"] is rows[f"{fsdp}.model_dtype"] is Outcome.MISSING
    assert rows[f"{fsdp}.offload_policy"] is Outcome.UNNEEDED and "policy.offload" not in other.values


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_the_enabled_backend_of_nemo_rl_is_the_engine(backend):
    enabled = {f"{role}.{name}_cfg.enabled": name == backend for role in ("policy", "value") for name in ("dtensor", "megatron")}
    cpu = {f"{role}.dtensor_cfg.cpu_offload": True for role in ("policy", "value")}
    kl = {"loss_fn.reference_policy_kl_penalty": 0.01, "policy.model_name": "m", "data.train.dataset_name": "d"}
    conversion = converted(kl | enabled | cpu | {"policy.dtensor_cfg.tensor_parallel_size": 1}, NEMO_RL)
    roles = ("policy", "critic", "reference") if backend == "dtensor" else ()
    assert engines_of(conversion) == dict.fromkeys(roles, "fsdp2")
    offloaded = {key: value for key, value in conversion.values.items() if ".offload" in key}
    parts = ["parameters", "gradients", "optimizer"]
    assert offloaded == ({f"{role}.offload": parts for role in ("policy", "critic")} if backend == "dtensor" else {})


def test_the_decays_of_adam_join_to_one_list():
    conversion = converted({"adam_beta1": 0.85, "output_dir": "o"}, TRL)
    assert conversion.values["policy.optimizer.betas"] == conversion.values["critic.optimizer.betas"] == [0.85, 0.999]
    assert (
        "adam_beta1 = 0.85" in conversion.comments["policy.optimizer.betas"]
        and "adam_beta2" in conversion.comments["policy.optimizer.betas"]
    )
    adam = {"policy.megatron_cfg.optimizer.adam_beta1": 0.8, "policy.optimizer.kwargs.betas": [0.7, 0.97]}
    for backend, wanted in (("megatron", [0.8, 0.95]), ("dtensor", [0.7, 0.97])):
        enabled = {f"policy.{name}_cfg.enabled": name == backend for name in ("dtensor", "megatron")}
        assert converted(adam | enabled, NEMO_RL).values["policy.optimizer.betas"] == wanted


def test_switches_of_parts_join_to_one_list():
    fsdp = f"{AOR}.actor.fsdp_config"
    conversion = converted(
        WITH_KL | {f"{fsdp}.optimizer_offload": True, f"{fsdp}.param_offload": True, f"{fsdp}.grad_offload": False}
    )
    assert conversion.values["policy.offload"] == ["parameters", "optimizer"]
    comment = conversion.comments["policy.offload"]
    assert f"{fsdp}.optimizer_offload = true" in comment and f"{fsdp}.param_offload = true" in comment
