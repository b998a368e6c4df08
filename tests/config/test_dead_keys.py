"""A key that would be ignored is an error exactly when the user wrote it; a dump leaves it out and loads again."""

import pytest
import yaml

from megappo.config.checks import check_config, dead_key_problems, problems
from megappo.config.dead_keys import RULES, dead_keys
from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError, ConfigErrors
from megappo.config.keys import value_keys
from megappo.config.loading import explicit_keys, load_config
from megappo.config.schema import TrainConfig
from megappo.config.supervised import DpoConfig, RewardTrainingConfig, SftConfig
from megappo.config.yaml_reader import CoreDumper
from tests.config.examples import SFT, TRAIN, dpo_config, reward_config, sft_config, train_config, write

EVAL, ADAPTIVE, NONE = "data.eval=e.jsonl", "algorithm.kl.controller=adaptive", "algorithm.kl.placement=none"
MEGATRON, LORA = "rollout.engine=megatron", "policy.lora.rank=8"
GRPO, GAE = ["algorithm.estimator=grpo", "rollout.samples_per_prompt=2"], "algorithm.estimator=gae"
# overrides that set the scene, the key that is dead there (with a value), an override that brings it to life
DEAD = [
    ([NONE], "reference.model=m", "algorithm.kl.placement=reward"),
    ([NONE], "reference.parallel.tp=1", "algorithm.kl.placement=reward"),
    ([], "teacher.model=m", "algorithm.distillation.coef=1.0"),
    ([], "policy.parallel.layers_per_stage=[4]", "policy.parallel.pp=2"),
    ([], "critic.parallel.layers_per_stage=[1,3]", "critic.parallel.pp=2"),
    (["critics.b.dtype=bf16"], "critics.b.parallel.layers_per_stage=[1,3]", "critics.b.parallel.pp=2"),
    ([], "reference.parallel.layers_per_stage=[4]", "reference.parallel.pp=2"),
    ([], "reward_model.model=m", "reward.parts=[{model: reward_model}]"),
    ([], "reward_model.clip=2", "reward.parts=[{model: reward_model}]"),
    (
        ["reward.parts=[{model: reward_model}]", "reward_model.model=m"],
        "reward_model.parallel.layers_per_stage=[4]",
        "reward_model.parallel.pp=2",
    ),
    (["algorithm.lam_length_alpha=0.05", "algorithm.lam_value=1.0"], "algorithm.lam=0.9", "algorithm.lam_value=null"),
    (GRPO, "critic.parallel.tp=1", GAE),
    (GRPO, "critic.warmup.steps=2", GAE),
    (GRPO, "critic.optimizer.lr=0.1", GAE),
    (GRPO, "algorithm.lam=0.9", GAE),
    (GRPO, "algorithm.lam_value=1.0", "algorithm.estimator=gae"),
    (GRPO, "critic.loss.clip=0.1", GAE),
    (GRPO, "algorithm.bootstrap_truncated=true", GAE),
    (["algorithm.estimator=reinforce_plus_plus"], "algorithm.lam_length_alpha=0.05", GAE),
    (GRPO, "algorithm.gamma=0.9", "algorithm.estimator=reinforce_plus_plus"),
    (["algorithm.estimator=remax"], "algorithm.gamma=1.0", GAE),
    (GRPO, "algorithm.bootstrap_truncated=last", "algorithm.estimator=vtrace"),
    ([*GRPO, "algorithm.loss.type=gspo"], "algorithm.loss.sequence_advantages=true", GAE),
    ([], "algorithm.target_kl=0.1", "algorithm.ppo_epochs=2"),
    ([LORA], "reference.parallel.tp=1", "reference.model=m"),
    ([], "rollout.adapter=merged", LORA),
    ([], "rollout.cache_after_push=keep", "rollout.max_staleness=0"),
    (
        ["rollout.environment.path=e.py", "rollout.environment.workers=2", "rollout.max_staleness=0"],
        "rollout.environment.join=each",
        "rollout.max_staleness=null",
    ),
    ([MEGATRON], "rollout.tp=1", "rollout.engine=vllm"),
    ([MEGATRON], "rollout.dtype=bf16", "rollout.engine=vllm"),
    ([MEGATRON], "rollout.max_num_seqs=8", "rollout.engine=vllm"),
    ([MEGATRON], "rollout.memory_share=0.5", "rollout.engine=vllm"),
    ([MEGATRON], "rollout.kv_cache_gib=1.0", "rollout.engine=vllm"),
    ([MEGATRON], "rollout.vllm_args={enforce_eager: true}", "rollout.engine=vllm"),
    ([MEGATRON], "rollout.push_every=2", "rollout.engine=vllm"),
    (["rollout.kv_cache_gib=1.0"], "rollout.memory_share=0.5", "rollout.kv_cache_gib=null"),
    ([], "rollout.sampling.replay_top_k_ids=true", "rollout.sampling.top_k=5"),
    ([], "trainer.eval_every=5", EVAL),
    ([], "trainer.eval_before=false", EVAL),
    ([], "data.eval_prompts=5", EVAL),
    (["evaluations={a: {data: a.jsonl, every: 3}}"], "trainer.eval_every=5", "evaluations.a.every=null"),
    (["evaluations={a: {data: a.jsonl, before: true}}"], "trainer.eval_before=true", "evaluations.a.before=null"),
    ([EVAL, "checkpoint.save_every=0"], "checkpoint.keep_last=3", "trainer.keep_best=eval/score"),
    (["trainer.eval_every=0", "trainer.eval_before=false"], EVAL, "trainer.eval_before=true"),
    (["trainer.steps=5"], "trainer.epochs=2", "trainer.steps=null"),
    (["data.chat_template=false"], "data.system_prompt=hello", "data.chat_template=true"),
    (["data.chat_template=false"], "data.template_args={a: 1}", "data.chat_template=true"),
    (["reward.route={key: s, map: {a: [{name: b}]}}"], "reward.parts=[{name: c}]", "reward.route=null"),
    ([], "critics.b.checkpoint_role=critic", "critics.b.checkpoint=runs/other"),
    (["critics.b.checkpoint=runs/other"], "critics.b.value_head=normal", "critics.b.checkpoint_role=policy"),
    ([], "algorithm.value_of_critics=min", "critics.b.dtype=bf16"),
    ([], "algorithm.disagreement_mask_ratio=0.2", "critics.b.dtype=bf16"),
    (["critics.b.dtype=bf16"], "algorithm.disagreement_entropy_ratio=0.2", "algorithm.entropy.coef=0.01"),
    ([], "critic.checkpoint_role=critic", "critic.checkpoint=runs/other"),
    (["critic.checkpoint=runs/other"], "critic.value_head=normal", "critic.checkpoint_role=policy"),
    (["checkpoint.save_every=never"], "checkpoint.asynchronous=false", "checkpoint.save_every=epoch"),
    (["checkpoint.save_every=0"], "checkpoint.keep_last=3", "checkpoint.save_every=5"),
    (["checkpoint.save_every=0"], "checkpoint.keep_last=3", "checkpoint.save_every=auto"),
    (["checkpoint.save_every=0"], "checkpoint.asynchronous=false", "checkpoint.save_every=5"),
    (["telemetry.trajectories_every=0"], "telemetry.trajectories_per_step=4", "telemetry.trajectories_every=5"),
    (["trainer.steps=4", "critic.warmup.steps=4"], "algorithm.ptx.data=t.jsonl", "critic.warmup.steps=2"),
    (["policy.ema.decay=0.9"], "trainer.evaluate_with=ema", EVAL),
    (["trainer.steps=4", "critic.warmup.steps=4"], "policy.ema.decay=0.9", "critic.warmup.steps=2"),
    (["telemetry.trackers=[]"], "telemetry.histograms_every=5", "telemetry.trackers=[tensorboard]"),
]
DEAD.append(([], "data.image_root=pictures", "data.image_key=images"))
ALL_FSDP2 = [f"{role}.engine=fsdp2" for role in ("policy", "critic", "reference")]
DEAD.append((ALL_FSDP2, "model.impl=local", "critic.engine=megatron"))
DEAD_SUPERVISED = [
    (["policy.engine=fsdp2"], "model.impl=local", "policy.engine=megatron"),
    ([], "policy.parallel.layers_per_stage=[4]", "policy.parallel.pp=2"),
    (["data.chat_template=false"], "data.system_prompt=hello", "data.chat_template=true"),
    (["data.chat_template=false"], "data.template_args={a: 1}", "data.chat_template=true"),
    ([], "policy.logits_dtype=bf16", None),
    ([], "policy.ema.decay=0.9", None),
    ([], "telemetry.trajectories_every=5", None),
    (["trainer.steps=4"], "trainer.epochs=2", "trainer.steps=null"),
    (["checkpoint.save_every=0"], "checkpoint.keep_last=2", "checkpoint.save_every=5"),
    ([], "trainer.eval_every=5", "data.eval=held_out.jsonl"),
    (["trainer.eval_every=0", "trainer.eval_before=false"], "data.eval=held_out.jsonl", "trainer.eval_every=5"),
]
DEAD_SFT = [
    *DEAD_SUPERVISED,
    (["data.messages_key=m"], "data.prompt_key=p", "data.messages_key=null"),
    (["data.tokens_key=t"], "data.messages_key=m", "data.tokens_key=null"),
    ([], "data.turns=last", "data.messages_key=m"),
    ([], "data.mask_key=m", "data.tokens_key=t"),
    ([], "teacher.engine=fsdp2", "distillation.top_k=8"),
    ([], "data.max_image_pixels=4096", "data.image_key=images"),
    (["data.messages_key=m"], "data.image_key=images", "data.messages_key=null"),
    ([MEGATRON], "rollout.sleep=cache", "rollout.engine=vllm"),
    ([], "rollout.adapter=separate", LORA),
    (["rollout.kv_cache_gib=1.0"], "rollout.memory_share=0.5", "rollout.kv_cache_gib=null"),
    (["reward.route={key: s, map: {a: [{name: b}]}}"], "reward.parts=[{name: c}]", "reward.route=null"),
    ([], "data.answer_key=gold", "rollout.engine=vllm"),
    ([], "reward.above_max=redraw", None),
]
LORA = "policy.lora.rank=4"
DEAD_DPO = [
    *DEAD_SUPERVISED,
    (["loss=simpo"], "reference.every_step=true", "loss=ipo"),
    ([LORA], "reference.micro_batch_tokens=64", "reference.model=other/model"),
    ([], "reference.parallel.tp=2", "reference.every_step=true"),
    (["loss=kto"], "data.rejected_key=worse", "loss=sigmoid"),
    ([], "data.label_key=good", "loss=kto"),
    ([], "data.image_root=pictures", "data.image_key=images"),
]
DEAD_REWARD = [
    *(
        ([text.replace("policy.", "reward_model.") for text in scene], dead, alive and alive.replace("policy.", "reward_model."))
        for scene, dead, alive in DEAD_SUPERVISED
        if not dead.startswith("policy.")
    ),
    (["data.responses_key=answers"], "data.margin_key=by", "data.responses_key=null"),
    ([], "loss.tie_margin=0.5", "data.tie_key=even"),
    ([], "data.image_root=pictures", "data.image_key=images"),
]
KINDS_OF_CASES = {
    TrainConfig: (train_config, DEAD),
    SftConfig: (sft_config, DEAD_SFT),
    DpoConfig: (dpo_config, DEAD_DPO),
    RewardTrainingConfig: (reward_config, DEAD_REWARD),
}


def refused(config):
    return list(dead_key_problems(config, explicit_keys(config)))


@pytest.mark.parametrize("kind", KINDS_OF_CASES, ids=lambda kind: kind.__name__)
def test_a_written_key_without_effect_is_refused_and_passes_where_it_acts(tmp_path, kind):
    make, cases = KINDS_OF_CASES[kind]
    for scene, dead, alive in cases:
        start = f"{dead.partition('=')[0]} = "
        mine = [text for text in refused(make(tmp_path, [*scene, dead])) if text.startswith(start)]
        assert len(mine) == 1 and "has no effect: " in mine[0] and "\n" not in mine[0], (dead, mine)
        assert not [text for text in refused(make(tmp_path, scene)) if text.startswith(start)], "nobody wrote it"
        if alive is not None:
            assert not [text for text in refused(make(tmp_path, [*scene, dead, alive])) if text.startswith(start)], alive


def test_check_config_refuses_them(tmp_path):
    config = train_config(tmp_path, ["trainer.steps=4", "trainer.epochs=2"])
    with pytest.raises(ConfigError, match="trainer.epochs = 2: has no effect: trainer.steps sets"):
        check_config(config, explicit_keys(config), 1, "cpu")


SEVERAL = [
    (["trainer.steps=4"], ["data.eval_prompts=5", "trainer.eval_every=5", "trainer.epochs=2"], 3),
    (GRPO, ["critic.dtype=fp32", "critic.warmup.steps=2", "critic.loss.clip=0.1", "critic.optimizer.lr_schedule=cosine"], 1),
    (["trainer.steps=4", "critic.warmup.steps=4"], ["policy.ema.decay=0.9", "algorithm.ptx.data=t.jsonl"], 1),
    (["critics.b.dtype=bf16"], ["critics.b.checkpoint_role=critic", "algorithm.target_kl=0.1"], 2),
]


@pytest.mark.parametrize("scene, dead, reasons", SEVERAL)
def test_keys_without_effect_are_refused_together_with_the_overrides_that_clear_them(tmp_path, scene, dead, reasons):
    config = train_config(tmp_path, [*scene, *dead])
    with pytest.raises(ConfigErrors) as refusal:
        check_config(config, explicit_keys(config), 1, "cpu")
    *lines, way_out = refusal.value.lines
    assert len(lines) == reasons and all("no effect: " in line and "\n" not in line for line in lines), lines
    assert all(text.split("=")[0] in "".join(lines) for text in dead)
    prefix, _, overrides = way_out.rpartition(": ")
    assert prefix == "to clear the keys without effect"
    cleared = train_config(tmp_path, [*scene, *dead, *overrides.split()])
    check_config(cleared, explicit_keys(cleared), 1, "cpu")


def test_every_row_of_the_table_has_a_case(tmp_path):
    for cls, (make, cases) in KINDS_OF_CASES.items():
        fired, known = set(), [key for key, _ in value_keys(cls)]
        for scene, dead, _ in cases:
            config, key = make(tmp_path, [*scene, dead]), dead.split("=")[0]
            for row in RULES[cls]:
                if row.when(config) and any(key == k or (k.endswith(".*") and key.startswith(k[:-1])) for k in row.keys):
                    fired.add(row)
        assert fired == {row for row in RULES[cls] if any(key.startswith(k.rstrip("*")) for k in row.keys for key in known)}


def test_the_rows_name_keys_that_exist():
    for rows in RULES.values():
        known = [key for cls in RULES for key, _ in value_keys(cls)]  # rows of several kinds name keys that only some have
        for row in rows:
            for pattern in row.keys:
                assert any(key == pattern or (pattern.endswith(".*") and key.startswith(pattern[:-1])) for key in known), pattern


def test_a_key_written_as_null_states_no_intent(tmp_path):
    assert refused(train_config(tmp_path, ["algorithm.target_kl=null", "data.eval_prompts=null"])) == []


EVERY = [scene for scene, _, _ in DEAD] + [[*scene, alive] for scene, _, alive in DEAD] + [[EVAL, ADAPTIVE], []]
SCENES = [list(scene) for scene in dict.fromkeys(map(tuple, EVERY))]  # half of the rows have the scene of another one


def test_a_dump_loads_to_an_equal_configuration_that_passes_again(tmp_path):
    """Of every scene that alone is a valid run: only those are dumped."""
    dumped = 0
    for scene in SCENES:
        config = train_config(tmp_path, scene)
        if next(problems(config, explicit_keys(config), 1), None) is None:
            again = load_config(write(tmp_path, dump_yaml(config)))
            assert again == config, scene
            assert refused(again) == [], f"{scene}: every key of the dump counts as written"
            dumped += 1
    assert dumped > len(SCENES) / 3


def test_a_dump_with_dead_keys_would_be_refused(tmp_path):
    """Negative control for the test above."""
    config = train_config(tmp_path, text=TRAIN)
    full = yaml.dump(config.model_dump(mode="json"), Dumper=CoreDumper)
    assert refused(load_config(write(tmp_path, full))) != []


def test_a_dump_of_fine_tuning_loads_again(tmp_path):
    config = sft_config(tmp_path, ["data.chat_template=false"])
    again = load_config(write(tmp_path, dump_yaml(config)), (), SftConfig)
    assert again == config and refused(again) == []
    assert "policy.logits_dtype" in dead_keys(again)
    assert load_config(write(tmp_path, SFT), (), SftConfig) != again
