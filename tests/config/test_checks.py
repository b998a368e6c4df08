"""Rules across keys: each refuses its case with the key and the numbers, and lets the nearest good case pass."""

import itertools
import math
import os
from dataclasses import replace

import pytest

from megappo.config import checks
from megappo.config.algorithm_checks import adaptive_kl_problem, mini_batch_problem
from megappo.config.batch import UpdateSchedule, micro_batches_bound, nearest_divisors, step_arithmetic, update_schedule
from megappo.config.checks import check_config, device_notes, problems, step_problems
from megappo.config.errors import ConfigError
from megappo.config.layout_checks import parallel_problems
from megappo.config.loading import explicit_keys
from megappo.config.role_sections import ParallelConfig
from megappo.config.run_directory import check_run_dir
from megappo.config.run_sections import RunConfig
from megappo.parallel.layout import ParallelLayout
from tests.config import evaluation_cases
from tests.config.examples import sft_config, train_config

ADAPTIVE = "algorithm.kl.controller=adaptive"
ROUTE = "reward.route.map={a: [{name: a}], b: [{name: a, weight: 2}, {name: b}]}"
ROUTED = ["reward.route.key=s", ROUTE]
TAUGHT = "algorithm.distillation.coef=0.5"
SMALL_CLIPS = ["algorithm.loss.type=gspo", "algorithm.loss_aggregation=seq-mean-token-mean"]
# beside rollout.partial_rollout_tokens: overrides that need whole responses, what the message must contain, what mends it
WINDOWED = [
    (["algorithm.estimator=reinforce_plus_plus"], "responses that go on have no reward yet", "algorithm.estimator=gae"),
    (["algorithm.estimator=vtrace"], 'algorithm.estimator.type = "vtrace"', "algorithm.estimator=gae"),
    (["algorithm.estimator=grpo", "rollout.samples_per_prompt=2"], 'algorithm.estimator.type = "grpo"', "algorithm.estimator=gae"),
    (["algorithm.estimator.level=turn"], "at a token of an earlier step", "algorithm.estimator.level=token"),
    (
        ["algorithm.dynamic_sampling={}", "rollout.samples_per_prompt=2"],
        "which end in other steps",
        "algorithm.dynamic_sampling=null",
    ),
    (["critics.b.engine=megatron"], "by their places in a step", "critics=null"),
    (SMALL_CLIPS, 'algorithm.loss.type = "gspo"', "algorithm.loss.type=ppo"),
    (
        ["algorithm.importance_sampling.type=tis", "algorithm.importance_sampling.level=sequence"],
        'algorithm.importance_sampling.level = "sequence"',
        "algorithm.importance_sampling.level=token",
    ),
    (["algorithm.kl.controller=adaptive"], "it steers by the KL of whole responses", "algorithm.kl.controller=fixed"),
    (["reference.refresh.above_kl=0.5"], "reference.refresh.above_kl = 0.5", "reference.refresh=null"),
    (["rollout.stop=[x]"], "may lie across two windows", "rollout.stop=[]"),
    (
        ["rollout.environment.path=e.py", "rollout.environment.function=f"],
        "do not go on in later steps",
        "rollout.environment=null",
    ),
]
ENVIRONMENT = ["rollout.environment.path=e.py", "rollout.environment.function=play"]
COMPACTION = [*ENVIRONMENT, "rollout.environment.compaction.max_tokens=600", "rollout.environment.compaction.keep_last=64"]
# beside rollout.environment: overrides that have no meaning, what the message must contain, what mends it
OF_ENVIRONMENTS = [
    (["rollout.environment.max_turns=3"], "rollout.environment.path is missing", "rollout.environment.entry_point=mine"),
    (ENVIRONMENT[:1], "name its function in the key function", ENVIRONMENT[1]),
    ([*ENVIRONMENT, "rollout.environment.entry_point=mine"], "path is set too", "rollout.environment.entry_point=null"),
    (
        ["rollout.environment.entry_point=mine", ENVIRONMENT[1]],
        "an entry point names its function",
        "rollout.environment.function=null",
    ),
    (
        [*ENVIRONMENT, "rollout.environment.turn_tokens=513"],
        "max_response_tokens 512; lower",
        "rollout.environment.turn_tokens=512",
    ),
    (
        [*ENVIRONMENT, "rollout.environment.timeout_s=5"],
        "timeout_s = 5.0: only a process can be ended; set workers",
        "rollout.environment.workers=4",
    ),
    (
        [*ENVIRONMENT, "rollout.environment.join=each"],
        'join = "each": without workers a turn is answered at once',
        "rollout.environment.workers=4",
    ),
    (
        [*ENVIRONMENT, "rollout.environment.observation_tokens=512"],
        "no turn could follow",
        "rollout.environment.observation_tokens=511",
    ),
    (
        [*COMPACTION, "algorithm.estimator=reinforce_plus_plus"],
        "need gae or vtrace; or set rollout.environment.compaction to null",
        "algorithm.estimator=vtrace",
    ),
    (
        [*COMPACTION, "algorithm.dynamic_sampling={}", "rollout.samples_per_prompt=2"],
        "do not replace trajectories of several sequences",
        "algorithm.dynamic_sampling=null",
    ),
    (
        [*COMPACTION, "rollout.environment.compaction.max_tokens=512"],
        "compaction.max_tokens = 512: a new sequence may begin with data.max_prompt_tokens 512",
        "rollout.environment.compaction.max_tokens=513",
    ),
    (
        [*COMPACTION, "rollout.environment.compaction.max_tokens=1024"],
        "no sequence is longer than data.max_prompt_tokens 512 + rollout.max_response_tokens 512",
        "rollout.environment.compaction.max_tokens=1023",
    ),
    (
        [*ENVIRONMENT, "rollout.environment.images=2", "rollout.environment.interface=ids"],
        "images come with messages, not among ids; change it, or set rollout.environment.images to 0",
        "rollout.environment.interface=text",
    ),
    (
        [*ENVIRONMENT, "rollout.environment.images=2", "rollout.environment.observation_tokens=64"],
        "rollout.environment.observation_tokens = 64: it could cut the place of an image",
        "rollout.environment.observation_tokens=null",
    ),
    (
        [*COMPACTION, "rollout.environment.images=2"],
        "it could cut an image; change it, or set rollout.environment.images to 0",
        "rollout.environment.images=0",
    ),
    (
        [*ENVIRONMENT, "rollout.environment.images=2", "rollout.max_staleness=0"],
        "rollout.max_staleness = 0: images of environments are not kept in the log",
        "rollout.max_staleness=null",
    ),
    (
        [*ENVIRONMENT, "rollout.environment.images=2", "reward.parts=[{model: reward_model}]", "reward_model.model=judge"],
        'reward_model.model = "judge": it would see the images of prompts alone',
        "rollout.environment.images=0",
    ),
    (COMPACTION[:-1], "compaction.keep_last is missing", "rollout.environment.compaction.ask=Sum up."),
    (
        [*COMPACTION, "rollout.environment.compaction.ask=Sum up."],
        "compaction.keep_last = 64: the new sequence has the prompt and the summary",
        "rollout.environment.compaction.keep_last=null",
    ),
    (
        [*COMPACTION[:-1], "rollout.environment.compaction.ask=Sum up.", "rollout.stop=[x]"],
        "would end summaries too",
        "rollout.stop=[]",
    ),
    (
        [*COMPACTION, "rollout.environment.compaction.keep_first=449"],
        "with keep_first 449 more than data.max_prompt_tokens 512",
        "rollout.environment.compaction.keep_first=448",
    ),
]
# rule, overrides that break it, what the message must contain, one override more that mends it
BROKEN = [
    (
        "mini_batch_problem",
        ["algorithm.mini_batch_size=100"],
        [
            "algorithm.mini_batch_size = 100",
            "256 samples",
            "256 x rollout.samples_per_prompt 1",
            "56 would be dropped",
            "use 64 or 128",
        ],
        "algorithm.mini_batch_size=128",
    ),
    (
        "mini_batch_problem",
        ["algorithm.mini_batch_size=512"],
        ["not one mini-batch would be full; use 256"],
        "rollout.samples_per_prompt=2",
    ),
    *(
        (
            "group_problem",
            [f"algorithm.estimator={name}"],
            [f'algorithm.estimator.type = "{name}"', "set rollout.samples_per_prompt to 2 or more"],
            "rollout.samples_per_prompt=2",
        )
        for name in ("grpo", "rloo")
    ),
    ("group_problem", ["algorithm.estimator=grpo"], ["or use remax"], "algorithm.estimator=remax"),
    (
        "distillation_problem",
        ["algorithm.distillation.coef=0.5"],
        ["teacher.model = null: algorithm.distillation needs a teacher"],
        "teacher.model=m",
    ),
    (
        "distillation_problem",
        ["algorithm.distillation.coef=0.5", "teacher.model=m", "algorithm.estimator=rloo", "rollout.samples_per_prompt=2"],
        ['algorithm.distillation.placement = "reward": rloo compares whole responses'],
        "algorithm.distillation.placement=advantage",
    ),
    (
        "sequence_loss_problem",
        ["algorithm.loss.type=gspo"],
        ['algorithm.loss_aggregation = "token-mean"', "set it to seq-mean-token-mean"],
        "algorithm.loss_aggregation=seq-mean-token-mean",
    ),
    (
        "sequence_loss_problem",
        [
            "algorithm.loss.type=gspo",
            "algorithm.loss_aggregation=seq-mean-token-mean",
            "algorithm.high_entropy_token_ratio=0.2",
        ],
        ["algorithm.high_entropy_token_ratio = 0.2", "it chooses tokens"],
        "algorithm.loss.type=cispo",
    ),
    (
        "importance_sampling_problem",
        ["algorithm.importance_sampling.type=icepop", "algorithm.importance_sampling.low=2.0"],
        ["algorithm.importance_sampling.low = 2.0", "algorithm.importance_sampling.high = 2"],
        "algorithm.importance_sampling.high=5.0",
    ),
    (
        "importance_sampling_problem",
        ["algorithm.importance_sampling.type=tis", "rollout.sampling.top_k=5", "rollout.sampling.replay_top_k_ids=false"],
        ['algorithm.importance_sampling.type = "tis"', "set rollout.sampling.replay_top_k_ids to true"],
        "rollout.sampling.replay_top_k_ids=true",
    ),
    (
        "importance_sampling_problem",
        ["algorithm.importance_sampling.type=tis", "algorithm.loss.proximal=behaviour"],
        ['algorithm.importance_sampling.type = "tis"', "would weigh it twice; set it to none"],
        "algorithm.loss.proximal=recomputed",
    ),
    (
        "importance_sampling_problem",
        ["algorithm.loss.proximal=behaviour", "rollout.sampling.top_k=5", "rollout.sampling.replay_top_k_ids=false"],
        ['algorithm.loss.proximal = "behaviour"', "set rollout.sampling.replay_top_k_ids to true"],
        "rollout.sampling.replay_top_k_ids=true",
    ),
    (
        "push_problem",
        ["rollout.push_every=3", "rollout.sleep=all"],
        ['rollout.sleep = "all": vLLM would lose its weights', "rollout.push_every = 3", "use cache"],
        "rollout.sleep=cache",
    ),
    (
        "push_problem",
        ["rollout.push_every=3", "data.eval=e.jsonl"],
        ["trainer.eval_every = 10: would evaluate older weights", "rollout.push_every = 3: 9 or 12"],
        "trainer.eval_every=9",
    ),
    (
        "push_problem",
        ["rollout.push_every=3", "evaluations={a: {data: a.jsonl, every: 2}}"],
        ["evaluations.a.every = 2: would evaluate older weights", "a multiple of rollout.push_every = 3: 3"],
        "evaluations.a.every=3",
    ),
    (
        "push_problem",
        ["rollout.push_every=4", "evaluations={a: {data: a.jsonl}}"],
        ["trainer.eval_every = 10: would evaluate older weights", "8 or 12"],
        "evaluations.a.every=0",
    ),
    (
        "push_steps_problem",
        ["rollout.push_every=5", "trainer.steps=5"],
        ["rollout.push_every = 5: the run has 5 steps, so none would sample from trained weights; use less than 5"],
        "trainer.steps=6",
    ),
    (
        "vtrace_problem",
        ["algorithm.estimator=vtrace", "algorithm.estimator.c_bar=1.5"],
        ["algorithm.estimator.c_bar = 1.5", "is above algorithm.estimator.rho_bar = 1"],
        "algorithm.estimator.rho_bar=1.5",
    ),
    (
        "vtrace_problem",
        ["algorithm.estimator=vtrace", "algorithm.importance_sampling.type=tis"],
        ['algorithm.importance_sampling.type = "tis"', "vtrace weighs advantages by the same ratio already"],
        "algorithm.estimator=gae",
    ),
    (
        "vtrace_problem",
        ["algorithm.estimator=vtrace", "algorithm.loss.proximal=behaviour"],
        ['algorithm.loss.proximal = "behaviour"', "set it to recomputed"],
        "algorithm.loss.proximal=recomputed",
    ),
    (
        "vtrace_problem",
        ["algorithm.estimator=vtrace", "rollout.sampling.top_k=5", "rollout.sampling.replay_top_k_ids=false"],
        ['algorithm.estimator.type = "vtrace"', "set rollout.sampling.replay_top_k_ids to true"],
        "rollout.sampling.replay_top_k_ids=true",
    ),
    (
        "dynamic_sampling_problem",
        ["algorithm.dynamic_sampling={}"],
        ["algorithm.dynamic_sampling = {}", "set rollout.samples_per_prompt to 2 or more"],
        "rollout.samples_per_prompt=2",
    ),
    (
        "dynamic_sampling_problem",
        ["algorithm.dynamic_sampling={}", "rollout.samples_per_prompt=2", "algorithm.estimator=remax"],
        ["algorithm.dynamic_sampling = {}", "remax compares with a greedy response"],
        "algorithm.estimator=rloo",
    ),
    (
        "dynamic_sampling_problem",
        [
            "algorithm.dynamic_sampling.metric=acuracy",
            "rollout.samples_per_prompt=2",
        ],
        ['algorithm.dynamic_sampling.metric = "acuracy"', "no part of the reward has this label; name one of exact_match"],
        "algorithm.dynamic_sampling.metric=exact_match",
    ),
    (
        "partial_rollout_problem",
        ["rollout.partial_rollout_tokens=512"],
        ["rollout.partial_rollout_tokens = 512", "none has more than rollout.max_response_tokens 512; lower it, or use null"],
        "rollout.partial_rollout_tokens=511",
    ),
    *(
        (
            "partial_rollout_problem",
            ["rollout.partial_rollout_tokens=64", *broken],
            [said, "or set rollout.partial_rollout_tokens to null"],
            mend,
        )
        for broken, said, mend in WINDOWED
    ),
    *(("environment_problem", broken, [said], mend) for broken, said, mend in OF_ENVIRONMENTS),
    (
        "weight_problem",
        ["data.weight_key=w", "data.shuffle=false"],
        ['data.weight_key = "w"', "set data.shuffle to true"],
        "data.shuffle=true",
    ),
    (
        "critic_mini_batch_problem",
        ["critic.mini_batch_size=100"],
        ["critic.mini_batch_size = 100", "56 would be dropped", "use 64 or 128"],
        "critic.mini_batch_size=128",
    ),
    (
        "critic_mini_batch_problem",
        ["critics.b.dtype=bf16", "critics.b.mini_batch_size=256"],
        ["critics.b.mini_batch_size = 256", "the 128 samples of a step", "/ 2 critics", "use 128"],
        "critics.b.mini_batch_size=128",
    ),
    (
        "critics_problem",
        ["critics.b.dtype=bf16", "algorithm.estimator.level=turn", "algorithm.disagreement_mask_ratio=0.2"],
        ["algorithm.disagreement_mask_ratio = 0.2: it compares values of tokens"],
        "algorithm.disagreement_mask_ratio=null",
    ),
    (
        "critics_problem",
        ["critics.b.dtype=bf16", "data.prompts_per_step=7", "algorithm.mini_batch_size=7"],
        ["data.prompts_per_step = 7: with 2 critics the 7 samples of a step must divide by 2"],
        "critics=null",
    ),
    (
        "critics_problem",
        ["critics.b.dtype=bf16", "data.prompts_per_step=10", "algorithm.mini_batch_size=5"],
        ["algorithm.mini_batch_size = 5: does not divide by the 2 critics", "use a multiple of 2"],
        "algorithm.mini_batch_size=10",
    ),
    (
        "sequence_loss_problem",
        [
            *("critics.b.dtype=bf16", "algorithm.loss.type=gspo", "algorithm.loss_aggregation=seq-mean-token-mean"),
            "algorithm.disagreement_mask_ratio=0.2",
        ],
        ["algorithm.disagreement_mask_ratio = 0.2: it chooses tokens"],
        "algorithm.disagreement_mask_ratio=null",
    ),
    (
        "greedy_problem",
        ["rollout.sampling.temperature=0"],
        ["rollout.sampling.temperature = 0.0"],
        "rollout.sampling.temperature=0.1",
    ),
    *(
        (
            "vllm_temperature_problem",
            [f"rollout.sampling.temperature={given}"],
            [f"temperature = {given}: vLLM samples at 0.01 to 2"],
            mended,
        )
        for given, mended in (("0.005", "rollout.sampling.temperature=0.01"), ("2.5", "rollout.engine=megatron"))
    ),
    (
        "vllm_temperature_problem",
        ["evaluations={b: {data: b.jsonl, n: 4, temperature: 0.001}}"],
        ["evaluations.b.temperature = 0.001: vLLM samples"],
        "evaluations.b.temperature=2",
    ),
    ("average_problem", ["policy.ema.decay=0.9", "policy.lora.rank=4"], ["policy.ema.decay = 0.9", "adapters"], "policy.ema=null"),
    (
        "average_problem",
        ["trainer.evaluate_with=ema"],
        ['trainer.evaluate_with = "ema": policy.ema is not set', "set policy.ema.decay"],
        "policy.ema.decay=0.9",
    ),
    (
        "refresh_problem",
        ["reference.refresh.above_kl=3", "policy.lora.rank=4", "reference.model=m"],
        ["reference.refresh.above_kl = 3", "adapters beside a frozen model"],
        "reference.refresh=null",
    ),
    (
        "refresh_problem",
        ["reference.refresh.every=5", "reference.model=other"],
        ["reference.refresh.every = 5: reference.model is another model"],
        "reference.model=null",
    ),
    (
        "refresh_problem",
        ["reference.refresh.source=policy"],
        ["reference.refresh.above_kl = null: nothing says when to copy; set it or reference.refresh.every"],
        "reference.refresh.every=3",
    ),
    (
        "refresh_problem",
        ["reference.refresh.every=1", "reference.refresh.source=ema"],
        ['reference.refresh.source = "ema": policy.ema is not set'],
        "policy.ema.decay=0.9",
    ),
    (
        "adapter_problem",
        ["policy.engine=fsdp2", "policy.lora.rank=600", "rollout.adapter=separate"],
        ["policy.lora.rank = 600: vLLM applies adapters up to rank 512"],
        "policy.lora.rank=512",
    ),
    (
        "adapter_problem",
        ["policy.engine=fsdp2", "policy.lora.rank=4", "rollout.adapter=separate", "rollout.sleep=all"],
        ['rollout.sleep = "all": vLLM would lose the frozen weights'],
        "rollout.sleep=cache",
    ),
    (
        "adapter_problem",
        ["policy.engine=fsdp2", "policy.lora.base_bits=8", "rollout.adapter=separate"],
        ['rollout.adapter = "separate": policy.lora.base_bits keeps the frozen weights in 8 bits'],
        "policy.lora.base_bits=null",
    ),
    ("top_k_problem", ["rollout.sampling.top_k=0"], ["rollout.sampling.top_k = 0", "-1 for all"], "rollout.sampling.top_k=-1"),
    (
        "top_k_ids_problem",
        ["rollout.sampling.top_p=0.9"],
        ["rollout.sampling.top_p = 0.9", "set top_k too (1 to 128)", "replay_top_k_ids: false"],
        "rollout.sampling.top_k=128",
    ),
    (
        "top_k_ids_problem",
        ["rollout.sampling.top_k=129"],
        ["rollout.sampling.top_k = 129", "at most 128"],
        "rollout.sampling.replay_top_k_ids=false",
    ),
    (
        "replay_problem",
        ["rollout.engine=megatron", "rollout.replay_experts=policy"],
        ['rollout.replay_experts = "policy": Megatron\'s own generation records none', "use none"],
        "rollout.replay_experts=none",
    ),
    (
        "logits_problem",
        ["policy.dtype=fp32", "policy.logits_dtype=bf16"],
        ["policy.logits_dtype", "the logits of vLLM are fp32"],
        "rollout.dtype=bf16",
    ),
    ("logits_problem", ["rollout.dtype=fp32", "policy.logits_dtype=bf16"], ["sample in bf16"], "rollout.dtype=auto"),
    (
        "staleness_problem",
        ["rollout.max_staleness=1"],
        ['rollout.ranks = "all": what generates beside training needs ranks of its own'],
        "rollout.max_staleness=null",
    ),
    ("seed_problem", ["run.seed=4294967296"], ["run.seed = 4294967296", "up to 4294967295"], "run.seed=4294967295"),
    ("stop_problem", ["rollout.stop=['']"], ["rollout.stop", "empty string"], "rollout.stop=[x]"),
    (
        "adaptive_kl_problem",
        [ADAPTIVE, "algorithm.kl.coef=0"],
        ["algorithm.kl.coef = 0.0", "0 stays 0"],
        "algorithm.kl.coef=0.001",
    ),
    (
        "adaptive_kl_problem",
        [ADAPTIVE, "algorithm.kl.controller.horizon=51"],
        ["algorithm.kl.controller.horizon = 51", "256 samples", "at least 52"],
        "algorithm.kl.controller.horizon=52",
    ),
    (
        "value_bins_problem",
        ["critic.loss=two_hot", "critic.loss.low=1", "critic.loss.high=0.5"],
        ["critic.loss.low = 1.0: is not below critic.loss.high 0.5"],
        "critic.loss.high=1.5",
    ),
    ("critic_head_problem", ["critic.value_head=checkpoint"], ["critic.value_head", "needs critic.model"], "critic.model=m"),
    (
        "critic_head_problem",
        ["critic.checkpoint=runs/other", "critic.checkpoint_role=policy", "critic.model=m", "critic.value_head=checkpoint"],
        ["critic.value_head", "has no head; use zero or normal"],
        "critic.value_head=zero",
    ),
    (
        "critic_warmup_problem",
        ["critic.warmup.steps=11", "trainer.steps=10"],
        ["critic.warmup.steps = 11", "10 steps"],
        "trainer.steps=12",
    ),
    (
        "critic_trajectories_problem",
        ["critic.warmup.steps=2", "trainer.steps=10", "critic.warmup.trajectories=runs/x"],
        [
            'critic.warmup.trajectories = "runs/x"',
            "critic.warmup.steps is 2, the run has 10",
            "pretrain-critic CONFIG --trajectories",
        ],
        "critic.warmup.steps=10",
    ),
    (
        "critic_trajectories_problem",
        ["critic.warmup.steps=2", "trainer.epochs=1", "critic.warmup.trajectories=runs/x"],
        ["critic.warmup.steps is 2, trainer.steps is not set"],
        "critic.warmup.trajectories=null",
    ),
    (
        "policy_lr_warmup_problem",
        ["policy.optimizer.warmup_steps=20", "trainer.steps=10", "algorithm.mini_batch_size=128"],
        ["policy.optimizer.warmup_steps = 20", "20 optimizer steps"],
        "trainer.steps=11",
    ),
    (
        "policy_lr_warmup_problem",
        ["policy.optimizer.warmup_steps=9", "trainer.steps=10", "critic.warmup.steps=2"],
        ["8 optimizer steps"],
        "critic.warmup=null",
    ),
    (
        "critic_lr_warmup_problem",
        ["critic.optimizer.warmup_steps=10", "trainer.steps=10"],
        ["critic.optimizer.warmup_steps = 10"],
        "algorithm.ppo_epochs=2",
    ),
    ("training_reward_problem", ["reward.parts=[]"], ["reward.parts = []"], "reward.parts=[{name: exact_match}]"),
    (
        "training_reward_problem",
        ["reward.parts=[{name: a}, {name: a}]"],
        ["a is there twice"],
        "reward.parts=[{name: a}, {name: b}]",
    ),
    (
        "training_reward_problem",
        ["reward.parts=[{weight: 2}]"],
        ["reward.parts.0.name is missing: name a rule, or"],
        "reward.parts=[{name: a}]",
    ),
    (
        "training_reward_problem",
        ["reward.parts=[{name: a, args: {b: 1}}]"],
        ["reward.parts.0.args", "built-in rule"],
        "reward.parts=[{name: a}]",
    ),
    (
        "training_reward_problem",
        ["reward.parts=[{name: a, batch: true}]"],
        ["reward.parts.0.batch = true"],
        "reward.parts=[{name: a}]",
    ),
    ("training_reward_problem", ["reward.parts=[{path: a.py}]"], ["name its function"], "reward.parts=[{path: a.py, function: f}]"),
    (
        "training_reward_problem",
        ["reward.parts=[{path: a.py, function: f, entry_point: g}]"],
        ["reward.parts.0.entry_point", "path is set too"],
        "reward.parts=[{path: a.py, function: f}]",
    ),
    (
        "training_reward_problem",
        ["reward.parts=[{entry_point: g, function: f}]"],
        ["reward.parts.0.function", "a part with entry_point has none; remove it, or set path"],
        "reward.parts=[{entry_point: g}]",
    ),
    (
        "training_reward_problem",
        ["reward.parts=[{path: a.py, function: f}, {path: b/a.py, function: f}]"],
        ["a.f is there twice"],
        "reward.parts=[{path: a.py, function: f}, {path: b/a.py, function: f, name: b}]",
    ),
    ("training_reward_problem", [*ROUTED, "reward.route.map={a: []}"], ["reward.route.map.a = []: a run needs a reward"], ROUTE),
    ("training_reward_problem", [*ROUTED, "reward.route.map={a: [{weight: 2}]}"], ["reward.route.map.a.0.name is missing"], ROUTE),
    ("training_reward_problem", [*ROUTED, 'reward.route.map={" ": [{name: a}]}'], ["a label is a printable line"], ROUTE),
    (
        "training_reward_problem",
        [*ROUTED, "reward.route.map.default=[{name: a, weight: 0}]"],
        ["reward.route.map.default", "every weight is 0"],
        ROUTE,
    ),
    (
        "training_reward_problem",
        [*ROUTED, "reward.route.map={a: [{path: m.py, function: f}], b: [{path: m.py, function: f, batch: true}]}"],
        ['reward.route.map.b.0 = "m.f": has other settings than reward.route.map.a.0'],
        "reward.route.map={a: [{path: m.py, function: f}], b: [{path: m.py, function: f, weight: 2}]}",
    ),
    (
        "training_reward_problem",
        ["reward.parts=[{name: a, weight: 0}]"],
        ["every weight is 0"],
        "reward.parts=[{name: a, weight: 0.1}]",
    ),
    ("training_reward_problem", ["reward.parts=[{name: a, weight: 0}]"], ["every weight is 0"], TAUGHT),
    ("training_reward_problem", ["reward.parts=[]"], ["reward.parts = []: a run needs a reward"], TAUGHT),
    (
        "training_reward_problem",
        ["reward.parts=[{model: reward_model, path: a.py}]", "reward_model.model=m"],
        ['reward.parts.0.model = "reward_model"', "path is set too; keep one of the two"],
        "reward.parts=[{model: reward_model}, {path: a.py, function: f}]",
    ),
    (
        "reward_model_problem",
        ["reward.parts=[{name: a}, {model: reward_model, name: judge}]"],
        ["reward.parts.1.model = ", "reward_model.model is not set"],
        "reward_model.model=m",
    ),
    (
        "length_penalty_problem",
        ["reward.length_penalty={per_token: 0.1, start: 512}"],
        ["reward.length_penalty.start = 512", "512"],
        "reward.length_penalty.start=511",
    ),
    (
        "trajectory_problem",
        ["telemetry.trajectories_per_step=257"],
        ["telemetry.trajectories_per_step = 257", "256 samples"],
        "telemetry.trajectories_per_step=256",
    ),
    (
        "vllm_args_problem",
        ["rollout.vllm_args.enforce_eagre=true"],
        ["rollout.vllm_args.enforce_eagre = true: vLLM has no such argument; did you mean enforce_eager?"],
        "rollout.vllm_args=null",
    ),
    (
        "vllm_args_problem",
        ["rollout.vllm_args={max_num_seqs: 4}"],
        ["rollout.vllm_args.max_num_seqs = 4: megappo sets it; use rollout.max_num_seqs"],
        "rollout.vllm_args=null",
    ),
    (
        "tracker_names_problem",
        ["telemetry.trackers=[wandb, tensorboard, wandb]"],
        ["telemetry.trackers", "wandb is there twice"],
        "telemetry.trackers=[wandb, tensorboard]",
    ),
    (
        "profile_problem",
        ["telemetry.profile_steps=[3, 11]", "trainer.steps=10"],
        ["telemetry.profile_steps = [3, 11]", "step 10"],
        "telemetry.profile_steps=[3, 10]",
    ),
    (
        "profile_problem",
        ["telemetry.profile_steps=[3, 3]"],
        ["telemetry.profile_steps = [3, 3]", "twice"],
        "telemetry.profile_steps=[3, 4]",
    ),
    *evaluation_cases.CASES,
]


def first_problem(config, world_size=1):
    return next(problems(config, explicit_keys(config), world_size), None)


@pytest.mark.parametrize("rule", checks.TRAIN_RULES, ids=lambda rule: rule.__name__)
def test_a_rule_refuses_its_cases_and_nothing_beside_them(tmp_path, rule):
    cases = [case[1:] for case in BROKEN if case[0] == rule.__name__]
    assert cases
    for overrides, fragments, mend in cases:
        text = first_problem(train_config(tmp_path, overrides))
        assert text is not None and "\n" not in text, overrides
        assert all(fragment in text for fragment in fragments), text
        assert rule(train_config(tmp_path, overrides)) == text, "another rule spoke"
        assert rule(train_config(tmp_path, [*overrides, mend])) is None, mend


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_frozen_weights_below_adapters_are_refused(tmp_path, role):
    both = [f"{role}.lora.rank=8", f"{role}.freeze=[embed_tokens]"]
    text = first_problem(train_config(tmp_path, both))
    assert text == f'{role}.freeze = ["embed_tokens"]: {role}.lora freezes the whole model already; remove one of the two'
    assert first_problem(train_config(tmp_path, both[:1])) is None and first_problem(train_config(tmp_path, both[1:])) is None


def test_every_case_has_its_rule():
    assert {case[0] for case in BROKEN} <= {rule.__name__ for rule in checks.TRAIN_RULES}


def test_the_defaults_pass(tmp_path):
    assert check_config(train_config(tmp_path), frozenset(), 1, "cpu") == []
    assert check_config(sft_config(tmp_path), frozenset(), 1, "cpu") == []


# overrides, ranks, what the message must contain
WORLDS = [
    (["policy.parallel.tp=2"], 3, ["policy.parallel: tp 2 x pp 1 = 2 does not divide the 3 ranks", "2 or 4 ranks"]),
    (["critic.parallel.pp=4"], 2, ["critic.parallel: tp 1 x pp 4 = 4 does not divide the 2 ranks", "use 4 ranks"]),
    (["reference.parallel.tp=2", "reference.parallel.pp=2"], 6, ["reference.parallel: tp 2 x pp 2 = 4", "4 or 8 ranks"]),
    (["rollout.tp=2"], 1, ["rollout.tp = 2", "1 ranks", "use 2 ranks"]),
    (["policy.parallel.sequence_parallel=true"], 1, ["policy.parallel.sequence_parallel", "needs tp > 1"]),
    (["critic.parallel.sequence_parallel=true"], 1, ["critic.parallel.sequence_parallel"]),
    (["run.num_ranks=4"], 2, ["run.num_ranks = 4", "2 ranks"]),
    (["critic.parallel.cp=2"], 3, ["critic.parallel: tp 1 x cp 2 x pp 1 = 2 does not divide the 3 ranks", "use 2 or 4 ranks"]),
    (["policy.parallel.vpp=2"], 2, ["policy.parallel.vpp = 2", "needs pp > 1; set pp, or leave it out"]),
    (["policy.parallel.layers_per_stage=[1,2]"], 2, ["policy.parallel.layers_per_stage = [1, 2]", "2 entries and pp 1 needs 1"]),
    (
        ["policy.parallel.pp=2", "policy.parallel.vpp=2", "policy.parallel.layers_per_stage=[2,2]"],
        2,
        ["policy.parallel.layers_per_stage = [2, 2]", "2 entries and pp 2 x vpp 2 needs 4"],
    ),
    (
        ["policy.parallel.ep=4", "policy.parallel.pp=2"],
        4,
        ["policy.parallel.ep = 4: does not divide the 2 ranks of a pipeline stage (4 ranks / pp 2); use 2"],
    ),
    (
        ["policy.parallel.ep=2", "policy.parallel.etp=2"],
        6,
        ["policy.parallel.ep = 2: x etp 2 = 4 does not divide the 6 ranks of a pipeline stage (6 ranks / pp 1); use 1 or 3"],
    ),
    (["critic.parallel.etp=4"], 6, ["critic.parallel.etp = 4: does not divide the 6 ranks of a pipeline stage", "use 3 or 6"]),
]


@pytest.mark.parametrize("overrides, ranks, fragments", WORLDS)
def test_a_layout_that_does_not_fit_the_world_is_refused_with_what_fits(tmp_path, overrides, ranks, fragments):
    text = first_problem(train_config(tmp_path, overrides), ranks)
    assert text is not None and all(fragment in text for fragment in fragments), text


@pytest.mark.parametrize(
    "overrides, ranks",
    [
        (["policy.parallel.tp=2", "critic.parallel.pp=2", "policy.parallel.sequence_parallel=true", "rollout.tp=2"], 2),
        (["reference.parallel.tp=4", "algorithm.kl.placement=none", "reference=null"], 1),
        (["rollout.engine=megatron"], 3),
        (["run.num_ranks=2"], 2),
        (["policy.parallel.cp=2", "critic.parallel.ep=2", "critic.parallel.etp=2", "reference.parallel.ep=4"], 4),
        (["policy.parallel.pp=2", "policy.parallel.vpp=2", "policy.parallel.layers_per_stage=[1,2,2,1]"], 2),
    ],
)
def test_a_layout_that_fits_passes(tmp_path, overrides, ranks):
    assert first_problem(train_config(tmp_path, overrides), ranks) is None


def test_sizes_are_refused_exactly_where_no_layout_exists():
    """The rules against the layout itself: whatever it refuses is refused with its key before, and nothing else is."""
    for ranks, tp, cp, pp, ep, etp in itertools.product((1, 2, 4, 6), (1, 2), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2)):
        sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
        text = next(parallel_problems("policy.parallel", ParallelConfig(**sizes), ranks), None)
        try:
            ParallelLayout(ranks, **sizes)
        except ValueError:
            assert text is not None, (ranks, sizes)
        else:
            assert text is None, (ranks, sizes, text)


def test_a_mini_batch_is_right_exactly_when_it_divides_the_samples(tmp_path):
    for prompts, samples, size in [(6, 2, s) for s in range(1, 15)] + [(7, 3, s) for s in (1, 3, 7, 21, 20)]:
        overrides = [
            f"data.prompts_per_step={prompts}",
            f"rollout.samples_per_prompt={samples}",
            f"algorithm.mini_batch_size={size}",
        ]
        refused = mini_batch_problem(train_config(tmp_path, overrides)) is not None
        assert refused == (prompts * samples % size != 0), (prompts, samples, size)


def test_the_horizon_bound_is_where_the_controller_turns_negative(tmp_path):
    # Ziegler et al. 2019: beta <- beta * (1 + clip(error, -0.2, 0.2) * samples / horizon)
    for samples in (5, 256, 1024):
        for horizon in range(1, 260, 3):
            overrides = [ADAPTIVE, f"algorithm.kl.controller.horizon={horizon}", f"data.prompts_per_step={samples}"]
            refused = adaptive_kl_problem(train_config(tmp_path, overrides)) is not None
            assert refused == (1 - 0.2 * samples / horizon <= 1e-12), (samples, horizon)


def test_rules_on_the_length_wait_for_the_data(tmp_path):
    config = train_config(tmp_path, ["critic.warmup.steps=40", "trainer.epochs=2"])
    assert first_problem(config) is None
    assert list(step_problems(config, 40)) == []
    assert "40" in next(step_problems(config, 39))


def test_sft_rules(tmp_path):
    assert "policy.optimizer.warmup_steps = 100" in first_problem(sft_config(tmp_path, ["policy.optimizer.warmup_steps=100"]))
    assert first_problem(sft_config(tmp_path, ["policy.optimizer.warmup_steps=99"])) is None
    assert 'policy.offload = ["optimizer", "gradients"]' in first_problem(
        sft_config(tmp_path, ["policy.offload=[optimizer,gradients]"])
    )
    assert first_problem(sft_config(tmp_path, ["policy.offload=[optimizer]"])) is None
    answered = ["data.eval=e.jsonl", "reward.parts=[{name: exact_match}]", "rollout.tp=1"]
    assert first_problem(sft_config(tmp_path, [*answered, "policy.offload=[optimizer,gradients]"])) is None, "beside vLLM"
    for wrong, said in (
        ("rollout.vllm_args.seed=1", "rollout.vllm_args.seed = 1: megappo sets it; use run.seed"),
        ("rollout.stop=['']", "an empty string would end every response"),
        ("reward.parts=[]", "reward.parts = []: a run needs a reward"),
        ("evaluations={score: e.jsonl}", "eval/score is a metric of data.eval"),
    ):
        assert said in first_problem(sft_config(tmp_path, [*answered, wrong]))
    assert "policy.parallel: tp 2" in first_problem(sft_config(tmp_path, ["policy.parallel.tp=2"]), 3)


def test_keys_for_gpus_are_noted_on_the_cpu_only(tmp_path):
    config = train_config(tmp_path, ["rollout.memory_share=0.5", "policy.offload=[optimizer]"])
    notes = check_config(config, explicit_keys(config), 1, "cpu")
    assert [note.split(" = ")[0] for note in notes] == ["rollout.memory_share", "policy.offload"]
    for role, recompute in (("policy", "offload"), ("critic", "full")):
        away = train_config(tmp_path, [f"{role}.engine=fsdp2", f"{role}.recompute={recompute}"])
        assert any("recompute" in note for note in device_notes(away, explicit_keys(away), "cpu")) == (recompute == "offload")
    freed = train_config(tmp_path, ["policy.offload=[gradients]", "critic.offload=[gradients,parameters]"])
    assert device_notes(freed, explicit_keys(freed), "cpu") == ['critic.offload = ["parameters"]: for GPUs, no effect on the CPU']
    assert device_notes(config, explicit_keys(config), "cuda") == []
    assert device_notes(config, frozenset(), "cpu") == [], "nobody wrote them"


def test_batch_arithmetic_by_hand(tmp_path):
    # the deepseek recipe: 1024 prompts, mini-batches of 256, 512 + 512 tokens
    overrides = [
        "data.prompts_per_step=1024",
        "algorithm.mini_batch_size=256",
        "algorithm.ppo_epochs=2",
        "rollout.max_response_tokens=512",
    ]
    config = train_config(tmp_path, overrides)
    step, schedule = step_arithmetic(config), update_schedule(config, "policy")
    assert (step.samples, step.max_sequence_tokens) == (1024, 1024)
    assert (schedule.mini_batches(step.samples), schedule.optimizer_steps(step.samples)) == (4, 8)


def test_the_critic_has_the_policys_schedule_but_for_its_own_keys(tmp_path):
    shared = ["algorithm.ppo_epochs=2", "algorithm.mini_batch_size=8", "algorithm.loss_aggregation=seq-mean-token-mean"]
    own = {"ppo_epochs": 3, "mini_batch_size": 4, "loss_aggregation": "token-mean"}
    config = train_config(tmp_path, shared)
    assert update_schedule(config, "critic") == update_schedule(config, "policy") == UpdateSchedule(2, 8, "seq-mean-token-mean")
    for name, value in own.items():
        config = train_config(tmp_path, [*shared, f"critic.{name}={value}"])
        assert update_schedule(config, "policy") == UpdateSchedule(2, 8, "seq-mean-token-mean")
        field = "epochs" if name == "ppo_epochs" else name
        assert update_schedule(config, "critic") == replace(update_schedule(config, "policy"), **{field: value})


def test_micro_batches_bound_is_reached_by_full_sequences_and_never_passed_by_shorter_ones():
    from megappo.parallel.shares import plan_micro_batches

    for count, longest, budget in [(32, 1024, 16384), (7, 100, 250), (5, 300, 200), (1, 1, 1), (64, 24, 100)]:
        bound = micro_batches_bound(count, longest, budget)
        assert len(plan_micro_batches([longest] * count, budget)) == bound
        assert bound == math.ceil(count / max(1, budget // longest))
        shorter = [1 + (i * 7919) % longest for i in range(count)]
        assert len(plan_micro_batches(shorter, budget)) <= bound


def test_nearest_divisors():
    assert [nearest_divisors(256, 100), nearest_divisors(32, 3), nearest_divisors(28, 28), nearest_divisors(7, 9)] == [
        [64, 128],
        [2, 4],
        [28],
        [7],
    ]


# ---------------------------------------------------------------------------------------------------------- run directory


def test_a_directory_that_holds_another_run_is_refused_and_left_alone(tmp_path):
    run = RunConfig(name="first", output_dir=str(tmp_path))
    assert check_run_dir(run, resume=False) == tmp_path / "first"
    assert not (tmp_path / "first").exists(), "checking writes nothing"
    (tmp_path / "first").mkdir()
    check_run_dir(run, resume=False)  # empty is free
    (tmp_path / "first" / "metrics.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match=r"first holds another run, without a checkpoint; use run.name=first-2 for a new one$"):
        check_run_dir(run, resume=False)
    (tmp_path / "first" / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"first holds another run; use run.name=first-2 .* or continue it with --resume"):
        check_run_dir(run, resume=False)
    with pytest.raises(ConfigError, match=r"use run.name=first-2 for a new one$"):
        check_run_dir(run, resume=False, resumable=False)
    (tmp_path / "first-2").mkdir()
    with pytest.raises(ConfigError, match="run.name=first-3"):
        check_run_dir(run, resume=False)
    assert check_run_dir(run, resume=True) == tmp_path / "first"
    assert (tmp_path / "first" / "metrics.jsonl").read_text() == "precious"


@pytest.mark.parametrize(
    "files, frees",
    [
        ({"ended.json": "{}"}, True),
        ({"ended.json": "{}", "metrics.jsonl": '{"step": 0}\n'}, True),  # the evaluation before the first step
        ({"ended.json": "{}", "metrics.jsonl": '{"step": 0}\n{"step": 1}\n'}, False),
        ({"ended.json": "{}", "metrics.jsonl": "precious"}, False),
        ({"ended.json": "{}", "lease.json": "{}"}, False),  # started again
        ({"config.yaml": "run: {}"}, False),  # it may be running
        ({"ended.json": "{}", "checkpoints/step-1/manifest.json": "{}"}, False),
    ],
)
def test_the_line_that_frees_a_name_is_said_of_a_run_that_ended_before_its_first_step(tmp_path, files, frees):
    for name, text in files.items():
        (tmp_path / "my runs" / "first" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "my runs" / "first" / name).write_text(text)
    with pytest.raises(ConfigError, match="holds another run") as refusal:
        check_run_dir(RunConfig(name="first", output_dir=str(tmp_path / "my runs")), resume=False)
    assert str(refusal.value).endswith(f"before its first step: rm -r '{tmp_path}/my runs/first'") == frees


def test_resume_needs_a_run_and_lists_those_there(tmp_path):
    (tmp_path / "runs" / "other").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no run to resume .runs there: other"):
        check_run_dir(RunConfig(name="first", output_dir=str(tmp_path / "runs")), resume=True)
    with pytest.raises(ConfigError, match="there are no runs there"):
        check_run_dir(RunConfig(name="first", output_dir=str(tmp_path / "absent")), resume=True)


def test_a_run_stays_below_its_output_directory(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="leads out of run.output_dir"):
        check_run_dir(RunConfig(name="first", output_dir=str(tmp_path / "runs")), resume=False)


def test_an_output_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run.output_dir = .* is a file"):
        check_run_dir(RunConfig(output_dir=str(tmp_path / "file")), resume=False)
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="no permission to write"):
        check_run_dir(RunConfig(output_dir=str(locked)), resume=False)


@pytest.mark.parametrize("name", ["start_s", "meeting_s"])
def test_no_limit_is_shorter_than_that_of_an_exchange_inside_a_pass(tmp_path, name):
    broken = train_config(tmp_path, [f"run.timeouts.{name}=60"])
    (message,) = problems(broken, frozenset(), 1)
    assert message.startswith(f"run.timeouts.{name} = 60.0: is below run.timeouts.pass_s = 120; raise it")
    mended = train_config(tmp_path, [f"run.timeouts.{name}=60", "run.timeouts.pass_s=60"])
    assert not list(problems(mended, frozenset(), 1))


def test_a_silent_rank_is_noticed_before_a_meeting_gives_up(tmp_path):
    broken = train_config(tmp_path, ["run.timeouts.heartbeat_s=200", "run.timeouts.meeting_s=200"])
    (message,) = problems(broken, frozenset(), 1)
    assert message == ("run.timeouts.heartbeat_s = 200.0: is not below run.timeouts.meeting_s = 200; lower it, or raise meeting_s")
    mended = train_config(tmp_path, ["run.timeouts.heartbeat_s=200", "run.timeouts.meeting_s=201"])
    assert not list(problems(mended, frozenset(), 1))
