"""Loading: what is written is what is set, and every mistake is one line that names its place, its key and the fix."""

import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.config.keys import hint, sections, value_at, value_keys
from megappo.config.loading import explicit_keys, json_schema, load_config, load_run, parse_override
from megappo.config.schema import TrainConfig
from megappo.config.supervised import KINDS, SftConfig
from megappo.config.yaml_reader import CoreDumper, parse_yaml
from tests.config.examples import SFT, TRAIN, train_config, write

# (overrides, what the message must contain)
BAD_OVERRIDES = [
    (["policy.parallel.tp=0"], ["command line: policy.parallel.tp = 0: must be >= 1"]),
    (["policy.parallel.tp=two"], ['policy.parallel.tp = "two": must be an integer']),
    (["policy.parallel.tp='2'"], ['policy.parallel.tp = "2": must be an integer']),
    (["policy.parallel.tp=2.0"], ["policy.parallel.tp = 2.0: must be an integer"]),
    (["policy.parallel.tp=true"], ["policy.parallel.tp = true: must be an integer"]),
    (["policy.parallel.sequence_parallel=1"], ["policy.parallel.sequence_parallel = 1: must be true or false"]),
    (["policy.parallel.sequence_parallel=yes"], ['= "yes": must be true or false']),
    (
        ["checkpoint.save_every=often"],
        ["command line: checkpoint.save_every = \"often\": must be one of 'auto', 'epoch' or 'never', or must be an integer"],
    ),
    (["checkpoint.save_every=-1"], ["checkpoint.save_every = -1: must be one of 'auto', 'epoch' or 'never', or must be >= 0"]),
    (["policy.optimizer.lr=0"], ["policy.optimizer.lr = 0: must be > 0"]),
    (["policy.optimizer.lr=.inf"], ["policy.optimizer.lr", "must be a number"]),
    (["policy.optimizer.lr=1e999"], ["policy.optimizer.lr", "not a number that can be used"]),
    (["policy.optimizer.betas=[1, 0.9]"], ["policy.optimizer.betas.0 = 1: must be < 1"]),
    (["policy.optimizer.betas=[0.9]"], ["policy.optimizer.betas.1 is missing: AdamW's decays of the first and the second moment"]),
    (["policy.optimizer.betas=[0.9, 0.9, 0.9]"], ["policy.optimizer.betas = [0.9, 0.9, 0.9]: must have at most 2 entries"]),
    (["critic.loss=hl_gauss", "critic.loss.low=0"], ["critic.loss.high is missing: High end of the bins"]),
    (["critic.loss.delta=2"], ["critic.loss.type is mse, which has no such key; remove it, or set type to huber"]),
    (["critic.loss=huber", "critic.loss.delta=0"], ["critic.loss.delta = 0: must be > 0"]),
    (["critics.b.loss=two_hot", "critics.b.loss.clip=0.1"], ["critics.b.loss.type is two_hot, which has no such key"]),
    (["telemetry.wandb={mode: offline}"], ["telemetry.wandb = ", "unknown key; wandb is a value of telemetry.trackers"]),
    (["telemetry.wandb.mode=offline"], ["telemetry.wandb.mode = ", "unknown key; wandb is a value of telemetry.trackers"]),
    (["policy.bf16=true"], ["unknown key; bf16 is a value of policy.dtype"]),
    (["algorithm.value_clip=0.1"], ["unknown key; did you mean critic.loss.clip?"]),
    (["critic.warmup.lam=1"], ["critic.warmup.steps is missing: Number of these steps."]),
    (["reference.refresh_from=ema"], ["unknown key; did you mean reference.refresh"]),
    (["critic.huber_delta=2"], ["unknown key; did you mean critic.loss.delta?"]),
    (["policy.optimizer.lr_schedule.min_ratio=0.1"], ["policy.optimizer.lr_schedule.type is constant, which has no such key"]),
    (["policy.optimizer.min_lr_ratio=0.1"], ["unknown key; did you mean ", "optimizer.lr_schedule.min_ratio?"]),
    (["policy.optimizer.beta2=0.9"], ["unknown key; did you mean policy.optimizer.betas?"]),
    (["policy.offload.optimizer=true"], ["policy.offload is set as a whole, for example policy.offload=VALUE"]),
    (["reference.offload=[optimizer]"], ["reference.offload.0 = \"optimizer\": must be 'parameters'"]),
    (["policy.offload_activations=true"], ["unknown key"]),
    (["algorithm.gamma=1.5"], ["algorithm.gamma = 1.5: must be <= 1"]),
    (["algorithm.kl.placement=los"], ['algorithm.kl.placement = "los"', "'reward', 'loss', 'none'"]),
    (["rollout.engine=sglang"], ['rollout.engine = "sglang"', "'vllm' or 'megatron'"]),
    (["rollout.stop=END"], ['rollout.stop = "END": must be a list']),
    (["run.name=../elsewhere"], ['run.name = "../elsewhere"', "letters, digits"]),
    (["run.name=/elsewhere"], ['run.name = "/elsewhere"', "letters, digits"]),
    (['run.name="a; touch x"'], ['run.name = "a; touch x"', "letters, digits"]),
    ([r'run.name="a\n"'], [r'run.name = "a\n"', "letters, digits"]),
    ([r'run.name="a\0"'], [r'run.name = "a\u0000"', "letters, digits"]),
    ([f"run.seed={1 << 63}"], ["run.seed", "not a number that can be used"]),
    ([f"run.seed={'9' * 5000}"], ["run.seed", "not a number that can be used"]),
    (["run.seed=!!python/object/apply:os.system [touch x]"], ["run.seed", "tag", "is not allowed"]),
    ([r'data.system_prompt="\ud800"'], ["data.system_prompt", "half of a surrogate pair"]),
    ([f"rollout.stop={'[' * 3000}"], ["rollout.stop", "nested too deeply"]),
    (["policy.model=" + "x" * 300], ["policy.model", "longer than a file system allows (255 bytes a name)"]),
    (["policy.model=" + "x/" * 2100], ["policy.model", "longer than a file system allows"]),
    (["data.train=https://me:s3cret@host/x.jsonl"], ['data.train = "https://(hidden)@host/x.jsonl"', "holds credentials"]),
    (["run.name=a b"], ['run.name = "a b"', "letters, digits"]),
    (["reward.parts=[{name: exact_match, weigth: 2}]"], ["reward.parts.0.weigth", "unknown key; the keys are name, weight"]),
    (["reward.route.map={a: [{name: b, weigth: 2}]}"], ["reward.route.map.a.0.weigth", "unknown key; the keys are name, weight"]),
    (["reward.route={key: s, map: {a: {name: b}}}"], ["reward.route.map.a", "must be a list"]),
    (["reward.route={key: s, map: {}}"], ["reward.route.map = {}: must have at least 1 entry"]),
    (["reward.route.map={a: [{name: b}]}"], ["reward.route.key is missing: Field of the record"]),
    (["reward.route.maps={}"], ["reward.route.maps", "did you mean reward.route.map?"]),
    (["reward.parts=[{path: 3}]"], ["reward.parts.0.path = 3", "must be a string"]),
    (["reward.parts.0.weight=2"], ["reward.parts is set as a whole"]),
    (["policy.parallel=2"], ["policy.parallel", "is a section; set its keys, for example policy.parallel.tp=VALUE"]),
    (["policy.parallel={tp: 2}"], ["is a section"]),
    (["data.system_prompt='You' are'"], ["data.system_prompt", "not valid YAML"]),
    (["data.train=null"], ["data.train is missing: Training prompts"]),
    (["policy.model=null"], ["policy.model is missing: Directory of a Hugging Face checkpoint"]),
    (["run.seed"], ["run.seed: not an override; write key=value"]),
    (["=3"], ["not an override"]),
    (["policy.optimizer.lr="], ["policy.optimizer.lr=: no value behind the =", "policy.optimizer.lr=null"]),
    (["trainer.steps= "], ["trainer.steps= : no value", """trainer.steps='""' for an empty text"""]),
    (["data.train=~/x.jsonl"], ['data.train = "~/x.jsonl": holds ~, which only a shell replaces']),
    (["run.output_dir='~'"], ['run.output_dir = "~": holds ~']),
    (["policy.model=~me/x"], ['policy.model = "~me/x": holds ~']),
    (["run.output_dir=/data/$USER/runs"], ['= "/data/$USER/runs": holds $USER, which only a shell replaces; write what']),
    (["reward.parts=[{path: '${HOME}/r.py', function: f}]"], ["reward.parts.0.path", "holds ${HOME}"]),
    (["data.train=${oc.env:DATA}/x.jsonl"], ["data.train", "holds ${oc.env:DATA}, which only a shell replaces"]),
    (["rollout.stop=[a"], ["rollout.stop", "not valid YAML"]),
    (["rolle.critic=3"], ["rolle.critic", "unknown key"]),
]


def test_a_bad_override_is_one_line_with_key_value_and_fix(tmp_path):
    for overrides, fragments in BAD_OVERRIDES:
        with pytest.raises(ConfigError) as error:
            pytest.fail(f"{overrides} passed: {train_config(tmp_path, overrides)}")
        text = str(error.value)
        assert "\n" not in text and all(fragment in text for fragment in fragments), (overrides, text)


# (file, what the message must contain)
BAD_FILES = [
    ("", ["policy.model is missing"]),
    ("- a\n- b\n", ["must hold sections"]),
    ("policy: {}\ndata: {train: t}\n", ["policy.model is missing"]),
    (TRAIN + "critic:\n", [":3: critic = null: is an empty section"]),
    (TRAIN + "critic: 3\n", [":3: critic = 3: is a section"]),
    (TRAIN + "algorithm:\n  gama: 1.0\n", [":4: algorithm.gama = 1.0: unknown key; did you mean algorithm.gamma?"]),
    (TRAIN + "algorithm:\n  gamma: -1\n", [":4: algorithm.gamma = -1: must be >= 0"]),
    (TRAIN + "policy: {model: b}\n", [":3: policy is written twice (first on line 1)"]),
    (TRAIN + "rollout:\n  tp: 1\n  tp: 2\n", [":5: rollout.tp is written twice (first on line 4)"]),
    (TRAIN + "1: 2\n", [":3: a key must be a plain name"]),
    (TRAIN + "[a, b]: 2\n", ["a key must be a plain name"]),
    (TRAIN + "run: {name: !!python/object/apply:os.system [ls]}\n", [":3: tag", "is not allowed"]),
    (TRAIN + "run: {seed: !!int abc}\n", ["'abc' is not a number"]),
    (TRAIN + "run: [1\n", ["not valid YAML"]),
    ("\x01", ["not valid YAML"]),
    ("[" * 5000, ["nested too deeply"]),
    ("a: &a [x, *a]\n", ["unfolds to more than"]),
    (TRAIN + 'run: {seed: "\\UFFFFFFFF"}\n', ["not valid YAML"]),
    (f"%YAML 1.{'9' * 5000}\n---\n" + TRAIN, ["not valid YAML"]),
    ("a: [" + "x, " * 30_000 + "]\n", ["not valid YAML: more than 20000 values"]),
    ("---\na: 1\n---\nb: 2\n", ["not valid YAML"]),
]


@pytest.mark.parametrize("text, fragments", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_is_one_line_with_its_line_number(tmp_path, text, fragments):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    message = str(error.value)
    assert "\n" not in message and message.startswith(str(path))
    assert all(fragment in message for fragment in fragments), message


PATHS = {
    "algorithm.ptx.data",
    "checkpoint.remote",
    "policy.model",
    "critic.model",
    "critic.checkpoint",
    "critic.warmup.trajectories",
    "reference.model",
    "reward_model.model",
    "reward_model.tokenizer",
    "teacher.model",
    "data.train",
    "data.eval",
    "data.tokenizer",
    "data.image_root",
    "rollout.environment.path",
    "run.output_dir",
    "telemetry.hardware",
}


BESIDE = {"critic.warmup.trajectories": ["critic.warmup.steps=1"]}  # what a section requires


def test_a_control_character_in_a_path_is_refused(tmp_path):
    """It would be a line of a job script, or an error of the system in the middle of a run."""
    for key, escape in itertools.product(sorted({*PATHS, "critics.b.model"}), r"\n \0 \r \t \e \L \N \x7f".split()):
        with pytest.raises(ConfigError, match=f"^command line: {key} = .* holds the character .*; a path is one printable line$"):
            train_config(tmp_path, [*BESIDE.get(key, []), f'{key}="x{escape}touch PWNED"'])
    for key in PATHS:
        kept = value_at(train_config(tmp_path, [*BESIDE.get(key, []), f'{key}="a b; $(x) é"']), key)
        assert kept.removeprefix(f"{Path.cwd()}/") == "a b; $(x) é", "what quotes can keep is allowed; code has its whole path"


def test_a_model_that_is_a_directory_is_absolute_and_a_name_of_the_hub_stays_one(tmp_path, monkeypatch):
    """`megappo export` reads the configuration of a run from another directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "sums.model").touch()
    overrides = ["policy.model=models/a", "critic.model=some/name", "data.tokenizer=sums.model"]
    config = train_config(tmp_path, overrides)
    assert config.policy.model == str(tmp_path / "models" / "a") and config.critic.model == "some/name"
    assert config.data.tokenizer == str(tmp_path / "sums.model")


def test_every_other_text_is_none_that_a_script_or_a_file_system_sees(tmp_path):
    """So that a new key is noticed: tried on all keys that take a text at all."""

    def takes(key, value):
        try:
            return value_at(train_config(tmp_path, [*BESIDE.get(key, []), f'{key}="{value}"']), key) is not None
        except ConfigError:
            return False

    texts = {key for key, _ in value_keys(TrainConfig) if takes(key, "a")}
    assert texts - {key for key in texts if takes(key, r"a\nb")} == PATHS | {"run.name"}
    assert {key for key in texts if takes(key, r"a\nb")} == {
        "data.prompt_key",
        "data.answer_key",
        "data.image_key",
        "data.weight_key",
        "data.system_prompt",
        "data.prompt_suffix",
        "algorithm.dynamic_sampling.metric",
        "rollout.environment.entry_point",
        "rollout.environment.function",
        "trainer.keep_best",  # refused by the checks unless it is a metric of the run
    }


def test_a_small_file_cannot_take_long(tmp_path):
    laughs = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 50)}]" for n in range(1, 12)]
    for text in (
        "\n".join(laughs),
        "[x, " * 50_000,
        "- x\n" * 50_000,
        "{" * 20_000,
        "? " * 5_000,
        '"' + "x\\\n" * 50_000 + '"',
    ):
        started = time.process_time()
        with pytest.raises(ConfigError):
            load_config(write(tmp_path, text))
        assert time.process_time() - started < 5  # 0.1 to 1 s on an idle core; without the limits a minute and more


WHOLE = """policy: {model: m, optimizer: {lr: 1e-6}, parallel: {tp: 2}}
data:
  train: t.jsonl  # a comment
  system_prompt: "You \\"are\\" \\u00e9"
reward:
  parts: [{name: exact_match}, {name: has_eos, weight: 0.5}]
rollout: &r {stop: ["a", 'b'], max_response_tokens: 64}
"""


@pytest.mark.slow
def test_mutated_files_load_or_are_refused_in_one_line(tmp_path):
    random, outcomes = Random(0), Counter()
    tokens = [
        "!!python/object/apply:os.system ['touch gone']",
        "&a",
        "*a",
        "*r",
        "\\ud800",
        '"\\U00110000"',
        "[" * 2000,
        "? ",
        "\0",
    ]
    tokens += [
        "\t",
        "\ud800",
        "|",
        ">-",
        "---\n",
        "...",
        "%YAML 9",
        "9" * 5000,
        "1e999",
        ".nan",
        "!!binary x",
        "<<: *r",
        "null",
        ": ",
    ]
    for _ in range(250):
        text = WHOLE
        for _ in range(random.randint(1, 2)):
            start = random.randrange(len(text) + 1)
            end = start + random.randint(0, 6)
            text = text[:start] + random.choice([*tokens, "", text[start:end] * 2, chr(random.randrange(256))]) + text[end:]
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            load_config(path)
            outcomes["loaded"] += 1
        except ConfigError as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error) and str(path) in str(error), error
    assert min(outcomes["loaded"], outcomes["refused"]) > 10, outcomes
    assert not list(tmp_path.glob("gone"))


def test_aliases_cannot_unfold_without_bound(tmp_path):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    started = time.process_time()
    with pytest.raises(ConfigError, match="unfolds to more than 10000 values"):
        load_config(write(tmp_path, "\n".join(levels)))
    assert time.process_time() - started < 1, "0.02 s; RELIABILITY S5"
    shared = TRAIN + "critic: {optimizer: &o {lr: 2e-5}}\n"
    assert (
        train_config(tmp_path, text=shared.replace("model: some/model", "model: m, optimizer: {lr: 1e-6}")).critic.optimizer.lr
        == 2e-5
    )


@pytest.mark.parametrize(
    "make, fragment",
    [
        (lambda p: p / "absent.yaml", "no such file"),
        (lambda p: p, "is a directory"),
        (lambda p: (p / "big.yaml").write_bytes(b"#" * (1 << 20) + b"\n") and p / "big.yaml", "larger than"),
        (lambda p: (p / "latin.yaml").write_bytes(b"a: \xe9\n") and p / "latin.yaml", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, make, fragment):
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=fragment) as error:
        load_config(path)
    assert str(path) in str(error.value)


# plain scalar -> value by YAML 1.2; the last column: PyYAML's YAML 1.1 loader says something else
SCALARS = [
    ("1e-6", 1e-6, True),
    ("1E3", 1000.0, True),
    ("12:30", "12:30", True),
    ("no", "no", True),
    ("on", "on", True),
    ("010", 10, True),
    ("1_000", "1_000", True),
    ("2024-01-01", "2024-01-01", True),
    (".inf", ".inf", True),
    ("true", True, False),
    ("null", None, False),
    ("~", None, False),
    ("-7", -7, False),
    ("0.5", 0.5, False),
    (".5", 0.5, False),
    ("hello world", "hello world", False),
    ("gsm8k:main:train", "gsm8k:main:train", False),
]


@pytest.mark.parametrize("text, value, differs", SCALARS)
def test_scalars_follow_yaml_1_2(text, value, differs):
    found, _ = parse_yaml(text, "here")
    assert found == value and type(found) is type(value)
    assert (yaml.safe_load(text) != value) == differs  # negative control: the ordinary loader would set another value


# written key -> the key that was meant
SUGGESTIONS = [
    ("policy.tp", "policy.parallel.tp"),
    ("critic.lr", "critic.optimizer.lr"),
    ("policy.modle", "policy.model"),
    ("policy.optimizer.weight_deacy", "policy.optimizer.weight_decay"),
    ("algorithm.kl_coef", "algorithm.kl.coef"),
    ("algorithm.kl.coeff", "algorithm.kl.coef"),
    ("rollout.temperature", "rollout.sampling.temperature"),
    ("data.prompts_per_steps", "data.prompts_per_step"),
    ("trainer.total_epochs", "trainer.epochs"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.mini_batch_size"),
    ("checkpoint.save_freq", "checkpoint.save_every"),
    ("--tensor-model-parallel-size", "policy.parallel.tp"),
    ("--pipeline-model-parallel-size", "policy.parallel.pp"),
    ("--sequence-parallel", "policy.parallel.sequence_parallel"),
    ("--lr", "policy.optimizer.lr"),
    ("--global-batch-size", "data.prompts_per_step"),
    ("--recompute-granularity", "policy.recompute"),
    ("--save-interval", "checkpoint.save_every"),
    ("zzzzzz", None),
]


@pytest.mark.parametrize("written, meant", SUGGESTIONS)
def test_an_unknown_key_names_the_nearest_known_one(written, meant):
    assert hint(written, TrainConfig) == (f"did you mean {meant}?" if meant else "")


@pytest.mark.parametrize("written, meant", [one for one in SUGGESTIONS if one[1]])
def test_suggestions_reach_the_message(tmp_path, written, meant):
    override = written if written.startswith("--") else f"{written}=1"
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        train_config(tmp_path, [override])


# Keys of other trainers whose hints were wrong or absent: the key as a user may write it here, and the hint.
FOREIGN = [
    ("rollout.tensor_model_parallel_size", "did you mean rollout.tp?"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size", "did you mean rollout.tp?"),
    ("rollout.name", "did you mean rollout.engine?"),
    ("critic.enable_gradient_checkpointing", "did you mean critic.recompute?"),
    ("critic.model.enable_gradient_checkpointing", "did you mean critic.recompute?"),
    ("actor.param_offload", "did you mean policy.offload?"),
    ("policy.param_offload", "did you mean policy.offload?"),
    ("actor_rollout_ref.actor.fsdp_config.param_offload", "did you mean policy.offload?"),
    ("critic.param_offload", "did you mean critic.offload?"),
    ("algorithm.use_kl_in_reward", "did you mean algorithm.kl.placement?"),
    ("data.filter_overlong_prompts", "did you mean data.overlong?"),
    ("data.truncation", "did you mean data.overlong?"),
    ("trainer.logger", "did you mean telemetry.trackers?"),
    ("trainer.project_name", "did you mean run.output_dir?"),
    ("trainer.experiment_name", "did you mean run.name?"),
    ("trainer.nnodes", "did you mean run.num_ranks?"),
    ("algorithm.adv_estimator", "did you mean algorithm.estimator.type?"),
    ("trainer.use_legacy_worker_impl", "verl has it; not needed here: each role names its engine (see policy.engine)"),
    ("--max-epochs", "did you mean algorithm.ppo_epochs?"),
    ("max_epochs", "did you mean algorithm.ppo_epochs?"),
    ("padding_side", "FlowMesh has it; implied here: batches are always packed, without padding (see policy.micro_batch_tokens)"),
    (
        "data.padding_side",
        "FlowMesh has it; implied here: batches are always packed, without padding (see policy.micro_batch_tokens)",
    ),
]


@pytest.mark.parametrize("written, says", FOREIGN)
def test_keys_of_other_trainers_are_answered(written, says):
    assert hint(written, TrainConfig) == says


@pytest.mark.parametrize("key", ["policy.dtype", "rollout.dtype"])
@pytest.mark.parametrize("name", ["fp16", "float16"])
def test_fp16_is_refused_with_the_reason(tmp_path, key, name):
    with pytest.raises(ConfigError, match=rf'{key} = "{name}": fp16 is not supported: .* loss scaling; use bf16'):
        train_config(tmp_path, [f"{key}={name}"])


def test_other_trainers_names_lead_to_keys_that_exist():
    assert "algorithm.kl.coef" not in hint("kl_coef", SftConfig), "fine-tuning has no such key"
    assert "algorithm.kl.coef" in hint("kl_coef", TrainConfig)


def test_a_file_of_a_kind_is_loaded_as_such(tmp_path):
    path = write(tmp_path, SFT + "kind: sft\n")
    assert isinstance(load_run(path), SftConfig) and isinstance(load_run(path, (), "sft"), SftConfig)
    assert isinstance(load_run(write(tmp_path, SFT), (), "sft"), SftConfig)
    assert isinstance(load_run(write(tmp_path, SFT), ["kind=sft"]), SftConfig)
    assert isinstance(load_run(write(tmp_path, TRAIN)), TrainConfig)
    with pytest.raises(
        ConfigError, match=r'config.yaml: kind = "stf": is no kind of run; use sft or reward_model or dpo, or leave it out for'
    ):
        load_run(write(tmp_path, TRAIN + "kind: stf\n"))
    with pytest.raises(ConfigError, match=r'config.yaml:4: kind = "sft": this command takes PPO runs alone'):
        load_config(write(tmp_path, SFT + "kind: sft\n"))
    assert load_run(write(tmp_path, dump_yaml(load_run(path)))) == load_run(write(tmp_path, SFT + "kind: sft\n"))


def test_every_known_key_is_accepted_as_an_override():
    for cls in (TrainConfig, *KINDS.values()):
        for key, field in value_keys(cls):
            assert field.annotation is not None
            schema = TypeAdapter(field.annotation).json_schema()
            kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
            # A list of texts is written in brackets.
            lists = [kind for kind in kinds if len(kinds) > 1 and kind.get("items", {}).get("type") == "string"]
            texts = [kind for kind in kinds if kind.get("type") == "string" and not {"enum", "const"} & set(kind)]
            is_text = bool(texts) and len(texts) + len(lists) == len(kinds)
            assert parse_override(f"{key}=1", cls) == (key, "1" if is_text else 1)
        for key, _ in sections(cls):
            assert parse_override(f"{key}=null", cls) == (key, None)


@pytest.mark.parametrize("path", ["~x.jsonl", "./~/x.jsonl", "a~b/c~", "cost in $.jsonl", "/data/$(x)/y.jsonl", "a$"])
def test_a_name_with_a_shells_characters_is_a_path(tmp_path, path):
    assert train_config(tmp_path, [f"data.train={path}"]).data.train == path


@pytest.mark.parametrize(
    "cls, key, said",
    [
        (TrainConfig, "data.max_tokens", "unknown key; `megappo sft` has it; did you mean algorithm.ptx.max_tokens?"),
        (SftConfig, "data.prompts_per_step", "unknown key; `megappo train` has it; did you mean data.prompt_key?"),
        (SftConfig, "nothing.like", "unknown key; `megappo config --sft --schema` lists the keys"),
    ],
)
def test_a_key_of_the_other_command_is_known_as_such(cls, key, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_override(f"{key}=3", cls)


@pytest.mark.parametrize(
    "text",
    [
        " Put it after ####.",
        "a # b",
        "You: are",
        "7",
        "1e-5",
        "true",
        "[INST]",
        "{answer}",
        "- a",
        "*a",
        "&a b",
        "!x",
        "|",
        "a'b",
        '"',
        "'",
        "x\ty ",
    ],
)
def test_the_override_of_a_text_is_that_text(tmp_path, text):
    keys = ("data.prompt_suffix", "data.system_prompt", "evaluations.hard.prompt_suffix")
    config = train_config(tmp_path, ["evaluations={hard: {data: x}}", *(f"{key}={text}" for key in keys)])
    assert (config.data.prompt_suffix, config.data.system_prompt, config.evaluations["hard"].prompt_suffix) == (text, text, text)


def test_quotes_and_null_of_a_text_are_yaml(tmp_path):
    quoted = [r'data.prompt_suffix="\nGo. "', "data.system_prompt='it''s'", 'run.name="7"', 'evaluations.hard.prompt_suffix=" "']
    config = train_config(tmp_path, ["evaluations={hard: {data: x}}", *quoted])
    assert (config.data.prompt_suffix, config.data.system_prompt, config.run.name) == ("\nGo. ", "it's", "7")
    assert config.evaluations["hard"].prompt_suffix == " "
    for null in ("null", "~", " null "):
        taken = train_config(
            tmp_path, [f"data.system_prompt={null}", f"data.prompt_suffix={null}"], TRAIN + "algorithm: {lam: 1.0}\n"
        )
        assert taken.data.system_prompt is None and taken.data.prompt_suffix == "", "the default, for a key that cannot be null"
    assert train_config(tmp_path, ["data.system_prompt='null'"]).data.system_prompt == "null"


def test_overrides_win_in_order_and_null_takes_back(tmp_path):
    text = TRAIN + "algorithm: {gamma: 0.5, lam: 0.5, kl: {coef: 1.0}}\ncritic: {model: other}\nreference: {dtype: fp32}\n"
    overrides = ["algorithm.lam=0.6", "algorithm.lam=0.7", "algorithm.gamma=null", "critic.model=null", "reference=null"]
    config = train_config(tmp_path, overrides, text)
    assert (config.algorithm.lam, config.algorithm.gamma, config.algorithm.kl.coef) == (0.7, 1.0, 1.0)
    assert config.critic.model is None and config.reference.dtype == "bf16"
    written = {"policy.model", "data.train", "algorithm.lam", "algorithm.kl.placement", "algorithm.kl.coef", "critic.model"}
    assert explicit_keys(config) == written


def test_explicit_keys_are_exactly_those_written(tmp_path):
    assert explicit_keys(train_config(tmp_path)) == {"policy.model", "data.train"}
    config = train_config(tmp_path, ["rollout.sampling.top_p=1.0", "rollout.stop=[a]"])  # one of them at its default
    assert explicit_keys(config) == {"policy.model", "data.train", "rollout.sampling.top_p", "rollout.stop"}


def test_a_loaded_configuration_is_frozen(tmp_path):
    config = train_config(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        config.policy.parallel.tp = 2


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30))
def test_any_text_survives_dump_and_load(text):
    dumped = yaml.dump({"key": text}, Dumper=CoreDumper, allow_unicode=True)
    assert parse_yaml(dumped, "here")[0] == {"key": text}
    assert yaml.safe_load(dumped) == {"key": text}  # other readers see the same


@settings(max_examples=150, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_survives_dump_and_load(number):
    assert parse_yaml(yaml.dump({"key": number}, Dumper=CoreDumper), "here")[0] == {"key": number}


def refs_in(here):
    """Names of the sections that a key may be, null and words aside."""
    options = [here, *(option for name in ("anyOf", "oneOf") for option in here.get(name, []))]
    refs = [option["$ref"] for option in options if "$ref" in option]
    return [ref.rsplit("/", 1)[-1] for ref in refs] or [ref for one in options[1:] for ref in refs_in(one)]


def test_the_json_schema_knows_every_key_and_refuses_others(tmp_path):
    schema = json_schema(TrainConfig)
    json.dumps(schema)
    for key, field in value_keys(TrainConfig):
        here = [schema]
        for part in key.split("."):
            here = [section["properties"][part] for section in here if part in section["properties"]]
            here = [schema["$defs"][ref] for one in here if (refs := refs_in(one)) for ref in refs] or here
        assert here[0].get("description", field.description) == field.description, key
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["AlgorithmConfig"]["properties"]["kl"]["anyOf"][0] == {"enum": ["loss", "none", "reward"]}


def test_loading_needs_neither_torch_nor_megatron(tmp_path):
    path = write(tmp_path, TRAIN)
    code = (
        "import sys; from megappo.config.loading import load_config; from megappo.config.checks import check_config\n"
        f"load_config({str(path)!r}); heavy = {{'torch', 'megatron', 'vllm', 'transformers'}} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_resolved_dump_loads_to_an_equal_configuration(tmp_path):
    overrides = ["run.name='1e-6'", "data.system_prompt='yes: # no'", "rollout.stop=['\n', '\"']", "policy.optimizer.lr=3e-7"]
    config = train_config(tmp_path, overrides)
    again = train_config(tmp_path, text=dump_yaml(config))
    assert again == config
    assert value_at(again, "run.name") == "1e-6"
    assert dump_yaml(again) == dump_yaml(config), "the order is stable"
