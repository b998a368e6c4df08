"""Mistakes from end to end: exit code 2, one line on stderr that names key and fix, no rank started, nothing written.

Complements `test_cli.py`, which has the mistakes in the keys themselves: here are those in what the keys name (checkpoints,
tokenizers, data, directories, packages), for every command, and the recipes as a user meets them first: without their model.
"""

import itertools
import json
import time
from io import BytesIO
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.runtime import installed
from megappo.runtime.ending import StopRequest
from scripts.arithmetic import train_tokenizer
from tests.commands.plan.checkpoints import SPARSE, TINY, write_checkpoint, write_run
from tests.commands.test_cli import files_of, run
from tests.data.tokenizer_files import write_hf_tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(autouse=True)
def no_rank_is_started(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def train_here(*_, **__):
        raise AssertionError("ranks were started")

    monkeypatch.setattr("megappo.commands.launch.training.train_here", train_here)


def assert_refused(capsys, folder, fragments, *arguments):
    before = files_of(folder)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("megappo: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert all(fragment in err for fragment in fragments), err
    assert files_of(folder) == before


# ---------------------------------------------------------------------------------------------------- what is prepared


def nothing(folder):
    pass


def checkpoint(name="other", *, weights=True, tokenizer=True, **changes):
    return lambda folder: write_checkpoint(folder / name, TINY | changes, weights=weights, tokenizer=tokenizer)


def sparse(folder):
    write_checkpoint(folder / "model", SPARSE)


def pickled(folder):
    (write_checkpoint(folder / "other", weights=False) / "pytorch_model.bin").write_bytes(b"")


def cut_short(folder):
    file = write_checkpoint(folder / "other") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def shard_missing(folder):
    index = write_checkpoint(folder / "other") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}}))


def config_directory(folder):
    (folder / "other" / "config.json").mkdir(parents=True)


def hf_tokenizer(**config):
    """In a model with room for its ids."""

    def prepare(folder):
        write_checkpoint(folder / "model", TINY | {"vocab_size": 512}, tokenizer=False)
        (folder / "model" / "tokenizer.model").unlink()
        write_hf_tokenizer(folder / "model", **config)

    return prepare


def sentencepiece_without_eos(folder):
    from sentencepiece import SentencePieceTrainer

    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["1+2=3"]),
        model_writer=model,
        model_type="char",
        vocab_size=8,
        hard_vocab_limit=False,
        eos_id=-1,
        minloglevel=2,
    )
    (folder / "other.model").write_bytes(model.getvalue())


def data_file(text, name="other.jsonl"):
    return lambda folder: (folder / name).write_text(text)


def other_pieces(name):
    """A model of the policy's sizes, whose tokenizer numbers other pieces; the first four are alike."""

    def prepare(folder):
        write_checkpoint(folder / name, tokenizer=False)
        train_tokenizer(folder / name, "abcdefgh")

    return prepare


def output_file(folder):
    (folder / "runs").write_text("a file")


def link_out(folder):
    (folder / "runs").mkdir()
    (folder / "elsewhere").mkdir()
    (folder / "runs" / "run").symlink_to(folder / "elsewhere")


SP = "policy.parallel.sequence_parallel=true"
PTX = ["algorithm.ptx.coef=0.1", "algorithm.ptx.max_tokens=64"]
GOOD = json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"
LONG = json.dumps({"prompt": "1+" * 40, "answer": "40"}) + "\n"
# what is prepared, overrides ({} is the folder), what stderr must contain
BAD = {
    "critic checkpoint missing": (nothing, ["critic.model=absent"], ['critic.model = "absent"', "is not a directory"]),
    "reference of another kind": (
        checkpoint(architectures=["GPT2LMHeadModel"]),
        ["reference.model={}/other"],
        ["reference.model", "GPT2LMHeadModel is not supported", "LlamaForCausalLM", "Ministral3ForCausalLM"],
    ),
    "weights missing": (
        checkpoint(weights=False),
        ["policy.model={}/other"],
        ["policy.model", "no .safetensors weights", "incomplete"],
    ),
    "weights cut short": (
        cut_short,
        ["policy.model={}/other"],
        ["policy.model", "model.safetensors cannot be read", "the download may be incomplete"],
    ),
    "a shard missing": (
        shard_missing,
        ["policy.model={}/other"],
        ["policy.model", "model-2.safetensors is missing, which model.safetensors.index.json names"],
    ),
    "config.json that is a directory": (
        config_directory,
        ["policy.model={}/other"],
        ["policy.model", "other has no config.json"],
    ),
    "a byte of another encoding": (nothing, ["policy.model=\udcff"], ["policy.model: byte 0xff is no character in this locale"]),
    "a place where nothing can be made": (
        nothing,
        ["run.output_dir=/proc/x"],
        ['run.output_dir = "/proc/x": /proc cannot be written to', "choose another directory"],
    ),
    "pickled weights": (pickled, ["policy.model={}/other"], ["policy.model", "pytorch_model.bin", "save_pretrained"]),
    "quantised weights": (
        checkpoint(quantization_config={"quant_method": "awq"}),
        ["policy.model={}/other"],
        ["policy.model", "quantised (awq)", "bf16, fp16, fp32 or fp8"],
    ),
    "critic of another vocabulary": (checkpoint(vocab_size=32), ["critic.model={}/other"], ["critic.model", "32 tokens", "64"]),
    "critic of another tokenizer": (
        other_pieces("critic"),
        ["critic.model={}/critic"],
        ["critic.model = ", "id 4 of its tokenizer is 'a', of the policy's '", "the critic reads the policy's ids"],
    ),
    "reference of another tokenizer": (
        other_pieces("reference"),
        ["reference.model={}/reference"],
        ["reference.model = ", "id 4 of its tokenizer is 'a', of the policy's '", "the reference reads the policy's ids"],
    ),
    "teacher of another tokenizer": (
        other_pieces("teacher"),
        ["teacher.model={}/teacher", "algorithm.distillation.coef=1"],
        ["teacher.model = ", "id 4 of its tokenizer is 'a', of the policy's '", "the teacher reads the policy's ids"],
    ),
    "teacher of a smaller vocabulary": (
        checkpoint(vocab_size=32),
        ["teacher.model={}/other", "algorithm.distillation.coef=1"],
        ["teacher.model: its vocabulary has 32 tokens and the policy's 64"],
    ),
    "no teacher": (nothing, ["algorithm.distillation.coef=1"], ["teacher.model = null", "algorithm.distillation needs a teacher"]),
    "head that no checkpoint holds": (nothing, ["critic.value_head=checkpoint"], ["critic.value_head", "needs critic.model"]),
    "tokenizer missing": (nothing, ["data.tokenizer=absent"], ["tokenizer absent does not exist", "data.tokenizer"]),
    "tokenizer without eos": (hf_tokenizer(eos_token=None), [], ["tokenizer_config.json", "no eos_token", '"eos_token": "</s>"']),
    "sentencepiece without eos": (
        sentencepiece_without_eos,
        ["data.tokenizer={}/other.model"],
        ["other.model", "no end-of-sequence piece", "--eos_id"],
    ),
    "tokenizer that runs code": (hf_tokenizer(auto_map={"AutoTokenizer": "x.Y"}), [], ["auto_map", "remove the key"]),
    "tokenizer of a larger model": (
        lambda folder: write_hf_tokenizer(folder / "big"),
        ["data.tokenizer={}/big"],
        ["data.tokenizer", "policy.model only 64"],
    ),
    "template missing": (
        hf_tokenizer(chat_template=None),
        ["data.chat_template=true"],
        ["no chat template", "data.chat_template=false"],
    ),
    "system prompt without template": (nothing, ["data.system_prompt=Hello"], ["data.system_prompt", "chat_template"]),
    "column that no metric has": (
        nothing,
        ["telemetry.progress=[reward/score_mean, reward/exact_mach/std]"],
        ['telemetry.progress = "reward/exact_mach/std"', "did you mean reward/exact_match/std?"],
    ),
    "profile of a step after the last epoch": (
        nothing,
        ["trainer.steps=null", "trainer.epochs=1", "telemetry.profile_steps=[9999]"],
        ["telemetry.profile_steps = [9999]", "the run ends with step"],
    ),
    "data of another type": (data_file("x", "other.csv"), ["data.train={}/other.csv"], ["other.csv", ".jsonl", ".parquet"]),
    "broken line": (data_file(GOOD + "{"), ["data.train={}/other.jsonl"], ["other.jsonl line 2 is not valid JSON"]),
    "line of another type": (data_file("[1]\n"), ["data.train={}/other.jsonl"], ["line 1 is a JSON list, not an object"]),
    "deep line": (
        data_file(GOOD + '{"a":' + "[" * 5000 + "\n"),
        ["data.train={}/other.jsonl"],
        ["other.jsonl line 2 is nested more than 100 levels deep"],
    ),
    "null answer": (
        data_file(GOOD + '\n{"prompt": "1", "answer": null}\n'),
        ["data.train={}/other.jsonl"],
        ["data.answer_key=answer", "other.jsonl#1 (line 3) holds null, not a string or a number"],
    ),
    "half a surrogate pair": (
        data_file(GOOD + r'{"prompt": "\ud800", "answer": "1"}'),
        ["data.train={}/other.jsonl"],
        ["other.jsonl#1 (line 2): the prompt holds \\ud800 at character 0"],
    ),
    "half a pair in a held-out answer": (
        data_file(GOOD + r'{"prompt": "1", "answer": "\udca9"}'),
        ["data.eval={}/other.jsonl"],
        ["other.jsonl#1 (line 2): the answer holds \\udca9"],
    ),
    "nan in data": (data_file('{"prompt": "1", "answer": NaN}'), ["data.train={}/other.jsonl"], ["line 1", "NaN is no number"]),
    "utf-16": (
        lambda folder: (folder / "other.jsonl").write_text(GOOD, encoding="utf-16"),
        ["data.train={}/other.jsonl"],
        ["other.jsonl line 1", "byte 0 is not UTF-8; save it as UTF-8"],
    ),
    "directory of data": (
        lambda folder: (folder / "other.jsonl").mkdir(),
        ["data.train={}/other.jsonl"],
        ["other.jsonl is a directory"],
    ),
    "nul in a path": (nothing, [r'policy.model="a\0b"'], [r'policy.model = "a\u0000b": holds the character \x00']),
    "line break in a path": (nothing, [r'data.eval="a\nb"'], [r"data.eval", r"holds the character \n"]),
    "long name": (nothing, ["data.train=" + "x" * 300 + ".jsonl"], ["data.train", "longer than a file system allows"]),
    "config.json nested deeply": (
        lambda folder: (folder / "model" / "config.json").write_text("[" * 100_000),
        [],
        ["policy.model", "config.json is not valid JSON: nested too deeply"],
    ),
    "config.json of a huge integer": (
        lambda folder: (folder / "model" / "config.json").write_text('{"hidden_size": ' + "9" * 5000 + "}"),
        [],
        ["policy.model", "config.json is not valid JSON"],
    ),
    "config.json that is binary": (
        lambda folder: (folder / "model" / "config.json").write_bytes(b"\xff\xfe"),
        [],
        ["policy.model", "config.json is not valid JSON"],
    ),
    "tokenizer nested deeply": (
        lambda folder: (folder / "model" / "tokenizer_config.json").write_text('{"a":' + "[" * 100_000),
        ["data.tokenizer=null"],
        ["tokenizer_config.json is not valid JSON: nested too deeply"],
    ),
    "broken parquet": (
        data_file("x", "other.parquet"),
        ["data.train={}/other.parquet"],
        ["other.parquet cannot be read as parquet"],
    ),
    "empty data": (data_file(""), ["data.train={}/other.jsonl"], ["no prompts are left of", "kept 0 of 0 prompts"]),
    "all filtered": (
        data_file(LONG * 3),
        ["data.train={}/other.jsonl"],
        ["no prompts are left", "kept 0 of 3 prompts; 3 longer than data.max_prompt_tokens=16"],
    ),
    "overlong refused": (
        data_file(GOOD * 40 + LONG),
        ["data.train={}/other.jsonl", "data.overlong=error"],
        ["1 of 41 prompts are longer than data.max_prompt_tokens=16", "other.jsonl#40", "data.overlong=filter"],
    ),
    "answer key absent": (nothing, ["data.answer_key=gold"], ["data.answer_key=gold", "prompt, answer"]),
    "texts missing": (
        nothing,
        ["algorithm.ptx.coef=0.1", "algorithm.ptx.data=absent.jsonl"],
        ["algorithm.ptx.data: data file absent.jsonl does not exist"],
    ),
    "texts without their key": (
        nothing,
        [*PTX, "algorithm.ptx.data={}/train.jsonl"],
        ["algorithm.ptx.data: algorithm.ptx.text_key=text", "it has prompt, answer"],
    ),
    "fewer texts than an update takes": (
        data_file('{"text": "1+1=2"}\n'),
        [*PTX, "algorithm.ptx.data={}/other.jsonl"],
        ["algorithm.ptx.batch_size = 64: is more than the 1 sequences, 7 tokens of 1 texts"],
    ),
    "texts longer than the model": (
        nothing,
        ["algorithm.ptx.coef=0.1", "algorithm.ptx.data={}/train.jsonl", "algorithm.ptx.max_tokens=300"],
        ["algorithm.ptx.max_tokens = 300: the policy has 256 positions"],
    ),
    "held-out prompts missing": (nothing, ["data.eval=absent.jsonl"], ["data.eval: data file absent.jsonl does not exist"]),
    "held-out key absent": (
        data_file('{"question": "x"}\n'),
        ["data.eval={}/other.jsonl"],
        ["data.prompt_key=prompt", "question"],
    ),
    "sequence longer than the model": (
        nothing,
        ["rollout.max_response_tokens=1000"],
        ["rollout.max_response_tokens = 1000", "at most 240"],
    ),
    "windows that vLLM has not": (
        checkpoint(
            "model",
            architectures=["Qwen2ForCausalLM"],
            use_sliding_window=True,
            sliding_window=64,
            max_window_layers=2,
        ),
        [],
        ["rollout.engine: vLLM has no sliding attention in some layers only of a qwen2 model", "set rollout.engine: megatron"],
    ),
    "layers that no stage count divides": (
        nothing,
        ["run.num_ranks=6", "critic.parallel.pp=3"],
        ["critic.parallel.pp = 3", "4 layers", "use 2 or 4"],
    ),
    "chunks without stages": (
        nothing,
        ["reference.parallel.vpp=2"],
        ["reference.parallel.vpp = 2: interleaves", "needs pp > 1; set pp, or leave it out"],
    ),
    "chunks that do not divide the layers": (
        nothing,
        ["critic.parallel.vpp=4"],
        ["critic.parallel.vpp = 4: does not divide the 2 layers of a stage (4 layers / pp 2) into chunks; use 2"],
    ),
    "a split of another length": (
        nothing,
        ["critic.parallel.layers_per_stage=[1,2,1]"],
        ["critic.parallel.layers_per_stage = [1, 2, 1]: has 3 entries and pp 2 needs 2"],
    ),
    "a split of other layers": (
        nothing,
        ["critic.parallel.layers_per_stage=[1,2]"],
        ["critic.parallel.layers_per_stage = [1, 2]: adds up to 3 and the model has 4 layers"],
    ),
    "a split of one stage": (
        nothing,
        ["policy.parallel.layers_per_stage=[4]"],
        ["policy.parallel.layers_per_stage = [4]: has no effect: policy.parallel.pp is 1", "remove it, or set pp"],
    ),
    "cp without the ranks": (
        nothing,
        ["policy.parallel.cp=2"],
        ["policy.parallel: tp 2 x cp 2 x pp 1 = 4 does not divide the 2 ranks; lower the sizes or use 4 ranks"],
    ),
    "cp that heads do not fit": (
        nothing,
        ["run.num_ranks=8", "policy.parallel.cp=4"],
        ["policy.parallel.cp = 4: cp 4 does not divide the heads", "2 attention heads and 1 KV heads (tp 2)", "are 1, 2"],
    ),
    "experts over more ranks than a stage has": (
        nothing,
        ["critic.parallel.ep=2"],
        ["critic.parallel.ep = 2: does not divide the 1 ranks of a pipeline stage (2 ranks / pp 2); use 1"],
    ),
    "ep without experts": (
        nothing,
        ["policy.parallel.ep=2"],
        ["policy.parallel.ep = 2: ep 2 needs experts and this llama model has none; set ep to 1"],
    ),
    "etp without experts": (
        nothing,
        ["policy.parallel.etp=2"],
        ["policy.parallel.etp = 2: etp 2 needs experts", "set etp to 1"],
    ),
    "balancing without experts": (
        nothing,
        ["policy.router_aux_coef=0.001"],
        ["policy.router_aux_coef = 0.001: has no effect", "llama model has none; remove it"],
    ),
    "ep that does not divide the experts": (
        sparse,
        ["run.num_ranks=4", SP, "policy.parallel.ep=4"],
        ["policy.parallel.ep = 4: ep 4 does not divide the 6 experts of this qwen3_moe model; use a divisor of 6"],
    ),
    "etp that does not divide an expert": (
        sparse,
        ["run.num_ranks=10", SP, "policy.parallel.etp=5"],
        ["policy.parallel.etp = 5: etp 5 does not divide the 96 columns of an expert"],
    ),
    "experts and tp without sequence parallel": (
        sparse,
        [],
        ["policy.parallel.sequence_parallel = false: tp 2 with experts needs it", "set it to true"],
    ),
    "critic of no checkpoint": (
        nothing,
        ["critic.checkpoint=runs/absent"],
        ['critic.checkpoint = "runs/absent": is not a directory; name a run directory (runs/NAME) or a checkpoint of it'],
    ),
    "critic of a hugging face checkpoint": (
        nothing,
        ["critic.checkpoint={}/model"],
        ["critic.checkpoint", "set critic.model to it instead"],
    ),
    "role without a checkpoint": (
        nothing,
        ["critic.checkpoint_role=policy"],
        ["critic.checkpoint_role", "has no effect: critic.checkpoint is not set"],
    ),
    "rollout that heads do not fit": (nothing, ["run.num_ranks=6", "rollout.tp=3"], ["rollout.tp = 3", "4 attention heads"]),
    "cache too small for one sequence": (
        nothing,
        ["rollout.kv_cache_gib=0.00001"],
        ["rollout.kv_cache_gib", "one sequence of 24 tokens"],
    ),
    "true for a number": (nothing, ["run.seed=true"], ["run.seed = true", "integer"]),
    "no number": (nothing, ["policy.optimizer.lr=.nan"], ["policy.optimizer.lr"]),
    "kernels of a gpu": (nothing, ["kernels=cuda"], ['kernels = "cuda"', "this run is on the CPU", "set kernels=auto"]),
    "triton without a gpu": (nothing, ["kernels=triton"], ['kernels = "triton"', "run on a GPU", "set kernels=auto"]),
    "kernels that there are not": (nothing, ["kernels=cutlass"], ["kernels", "cpp", "reference"]),
    "role that there is not": (nothing, ["judge.model=x"], ["judge.model", "unknown key"]),
    "key of a reward part": (nothing, ["reward.parts=[{name: exact_match, factor: 2}]"], ["factor", "name, weight"]),
    "output directory is a file": (output_file, [], ["run.output_dir", "is a file"]),
    "run that leads elsewhere": (link_out, [], ["run.name", "leads out of run.output_dir"]),
}


@pytest.mark.parametrize("case", BAD)
def test_train_refuses_what_its_keys_name(case, tmp_path, capsys):
    prepare, overrides, fragments = BAD[case]
    path = write_run(tmp_path)
    prepare(tmp_path)
    assert_refused(capsys, tmp_path, fragments, "train", path, *[text.replace("{}", str(tmp_path)) for text in overrides])


@pytest.mark.parametrize("case", ["empty data", "all filtered"])
def test_data_that_is_too_short_is_refused_within_a_second(case, tmp_path, capsys):
    """F13. Of processor time, once everything is imported: other programs may have this machine's cores."""
    prepare, overrides, fragments = BAD[case]
    path = write_run(tmp_path)
    prepare(tmp_path)
    command = ["train", path, *[text.replace("{}", str(tmp_path)) for text in overrides]]
    assert_refused(capsys, tmp_path, fragments, *command)
    started = time.process_time()
    assert_refused(capsys, tmp_path, fragments, *command)
    assert time.process_time() - started <= 1


APART = ["run.num_ranks=4", "policy.ranks=0-1", "critic.ranks=2-3", "reference.ranks=0-1", "rollout.ranks=0-1"]
# overrides of APART, what stderr must contain
MISPLACED = {
    "outside the world": (["critic.ranks=2-4"], ['critic.ranks = "2-4": 2-4 is outside the world', "name ranks below 4"]),
    "twice": (["critic.ranks=2-3,3"], ['critic.ranks = "2-3,3": the ranges 2-3 and 3 overlap; name every rank once']),
    "backwards": (["critic.ranks=3-2"], ['critic.ranks = "3-2": the range 3-2 runs backwards; write 2-3']),
    "no ranks": (
        ["critic.ranks=half"],
        ['critic.ranks = "half"', "write all, a range (0-47), several (0-15,32-47) or one rank (3)"],
    ),
    "a rank without work": (
        ["critic.ranks=0-1"],
        ['rollout.ranks = "0-1": ranks 2-3 of the world would have no role and generate nothing; add them here or to policy.ranks'],
    ),
    "another layout": (
        ["critic.ranks=1-3"],
        ["critic.parallel: tp 1 x pp 2 = 2 does not divide the 3 ranks of critic.ranks = 1-3", "use 2 or 4 ranks (critic.ranks)"],
    ),
    "another replica": (["rollout.ranks=0-2", "rollout.tp=2"], ["rollout.tp = 2", "the 3 ranks of rollout.ranks = 0-2"]),
    "offload for nobody": (
        ["critic.offload=[gradients]"],
        ['critic.offload = ["gradients"]: makes room for others, and none shares critic.ranks = 2-3; leave it out, or share'],
    ),
    "sleep for nobody": (
        ["policy.ranks=2-3", "reference.ranks=2-3", "rollout.sleep=cache"],
        ['rollout.sleep = "cache": makes room for models, and none is on rollout.ranks = 0-1; use none, or share ranks'],
    ),
    "generation without the policy": (
        ["rollout.engine=megatron", "rollout.ranks=2-3"],
        ['rollout.ranks = "2-3": rollout.engine megatron', "set it to policy.ranks, 0-1"],
    ),
    "a role that is not there": (
        ["reward_model.ranks=0"],
        ['reward_model.ranks = "0": has no effect', "remove it, or add the part"],
    ),
}
COMMANDS = {"train": [], "plan": [], "launch": ["--nodes", "2", "--gpus-per-node", "2", "--dry-run"]}


# Each mistake by one command in turn: what is checked is the same function in all of them, and each is seen to ask it.
@pytest.mark.parametrize("case, command", zip(MISPLACED, itertools.cycle(COMMANDS)))
def test_ranks_of_roles_that_cannot_work_are_refused_by_every_command(case, command, tmp_path, capsys):
    overrides, fragments = MISPLACED[case]
    assert_refused(capsys, tmp_path, fragments, command, write_run(tmp_path), *COMMANDS[command], *APART, *overrides)


def test_the_placement_that_the_mistakes_are_made_in_works(tmp_path, capsys):
    """Negative control."""
    code, out, err = run(capsys, "plan", write_run(tmp_path), *APART)
    assert code == 0 and "critic: on ranks 2-3" in out, err


def test_a_data_set_is_refused_with_its_reason_where_there_is_no_network(tmp_path, capsys, monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    path = write_run(tmp_path)
    says = ["cannot load the Hugging Face dataset openai/gsm8k:main:train", "Couldn't reach the Hub", ".jsonl or .parquet path"]
    assert_refused(capsys, tmp_path, says, "train", path, "data.train=openai/gsm8k:main:train")


# package that is absent, overrides, what stderr must contain
ABSENT = [
    ("vllm", [], ["rollout.engine", "vllm is not installed: pip install", "rollout.engine=megatron"]),
    ("math-verify", ["reward.parts=[{name: math_verify}]"], ["reward.parts", "math-verify is not installed: pip install"]),
]


@pytest.mark.parametrize("package, overrides, fragments", ABSENT, ids=[case[0] for case in ABSENT])
def test_an_absent_package_is_named_with_the_way_to_install_it(tmp_path, capsys, monkeypatch, package, overrides, fragments):
    version_of = installed.installed_version
    monkeypatch.setattr(installed, "installed_version", lambda need: None if need.name == package else version_of(need))
    assert_refused(capsys, tmp_path, fragments, "train", write_run(tmp_path), *overrides)


def test_vllm_without_its_module_is_refused(tmp_path, capsys, monkeypatch):
    """Metadata that an interrupted removal left behind is no installation."""
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest))
    assert_refused(capsys, tmp_path, ["rollout.engine", "pip install"], "train", write_run(tmp_path))


def test_a_launcher_of_another_size_is_refused(tmp_path, capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    # A rank blocks USR1 for good; what later tests start from this process would inherit that.
    monkeypatch.setattr(StopRequest, "listen", lambda self: None)
    assert_refused(capsys, tmp_path, ["run.num_ranks = 2", "started 4 ranks"], "train", write_run(tmp_path))


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("gsm8k_*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_without_its_model_says_which_is_missing(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_refused(capsys, tmp_path, ['policy.model = "', "directory"], "train", recipe)


# --------------------------------------------------------------------------------------------------------- other commands


def sft_run(folder, **data):
    """A configuration of `megappo sft` whose parts are all there."""
    model = write_checkpoint(folder / "model")
    (folder / "train.jsonl").write_text(GOOD * 80)
    keys = {"train": str(folder / "train.jsonl"), "chat_template": False, "max_tokens": 32} | data
    if "eval" in keys:
        keys["eval"] = str(folder / keys["eval"])
    path = folder / "sft.yaml"
    path.write_text(
        json.dumps(
            {
                "run": {"output_dir": str(folder / "runs"), "device": "cpu", "num_ranks": 1},
                "policy": {"model": str(model)},
                "data": keys,
                "trainer": {"steps": 2, "batch_size": 8},
            }
        )
    )
    return path


ANSWERED = ["rollout.max_response_tokens=8", "reward.parts=[{name: exact_match}]"]
BAD_SFT = {
    "data missing": ({"train": "absent.jsonl"}, [], ["absent.jsonl does not exist"]),
    "response key absent": ({"response_key": "gold"}, [], ["data.response_key=gold", "prompt, answer"]),
    "nothing short enough": ({"max_tokens": 2}, [], ["data.max_tokens"]),
    "fewer than a batch": (
        {},
        ["trainer.batch_size=81"],
        ["trainer.batch_size = 81: more than the 80 demonstrations of", "jsonl ("],
    ),
    "checkpoint missing": ({}, ["policy.model=absent"], ['policy.model = "absent"', "is not a directory"]),
    "kernels of a gpu": ({}, ["kernels=cuda"], ['kernels = "cuda"', "this run is on the CPU"]),
    "key of ppo": ({}, ["critic.engine=fsdp2"], ["critic.engine", "unknown key"]),
    "answers in turns": ({}, ["rollout.environment.path=e.py"], ["rollout.environment", "unknown key"]),
    "answers without a reward": ({}, ["rollout.tp=1"], ["reward is missing", "add it, or remove rollout"]),
    "a reward without answers": ({}, ["reward.parts=[{name: has_eos}]"], ["rollout is missing", "add it, or remove reward"]),
    "answers to nothing": ({}, ANSWERED, ["data.eval is missing: rollout answers held-out prompts"]),
    "answers to conversations": (
        {},
        [*ANSWERED, "data.messages_key=messages", "data.chat_template=true"],
        ['data.messages_key = "messages": rollout answers prompts, which data.prompt_key names'],
    ),
    "answers without an end": (
        {},
        [*ANSWERED, "data.eval=train.jsonl", "rollout.max_response_tokens=32"],
        ["rollout.max_response_tokens = 32: leaves no prompt of the data.max_tokens 32"],
    ),
    "answers that nothing compares": (
        {"eval": "train.jsonl", "answer_key": "gold"},
        [*ANSWERED, "rollout.engine=megatron"],
        ["data.answer_key=gold"],
    ),
    "a score like a loss": (
        {"eval": "train.jsonl"},
        [*ANSWERED, "reward.parts=[{name: loss, path: mine.py, function: f}]"],
        ['reward.parts = "loss": eval/loss is a figure of the held-out data'],
    ),
    "a score by a model": (
        {"eval": "train.jsonl"},
        [*ANSWERED, "reward.parts=[{model: reward_model}]"],
        ["reward.parts.0.model", "only `megappo train` builds a reward model"],
    ),
    "a best score of no set": (
        {"eval": "train.jsonl"},
        [*ANSWERED, "trainer.keep_best=eval/hard/mean@1"],
        ['trainer.keep_best = "eval/hard/mean@1": is no metric of an evaluation', "eval/score"],
    ),
    "impossible layout": ({}, ["policy.parallel.tp=2"], ["policy.parallel: tp 2", "1 ranks"]),
    "chunks without stages": ({}, ["policy.parallel.vpp=2"], ["policy.parallel.vpp = 2", "needs pp > 1"]),
    "cp without the ranks": ({}, ["policy.parallel.cp=2"], ["tp 1 x cp 2 x pp 1 = 2 does not divide the 1 ranks", "use 2 ranks"]),
    "experts of a dense model": (
        {},
        ["run.num_ranks=2", "policy.parallel.ep=2"],
        ["policy.parallel.ep = 2", "llama model has none", "set ep to 1"],
    ),
    "layers that do not add up": (
        {},
        ["run.num_ranks=2", "policy.parallel.pp=2", "policy.parallel.layers_per_stage=[2,3]"],
        ["policy.parallel.layers_per_stage = [2, 3]: adds up to 5 and the model has 4 layers"],
    ),
}


@pytest.mark.parametrize("case", BAD_SFT)
def test_sft_refuses_the_same_way(case, tmp_path, capsys):
    data, overrides, fragments = BAD_SFT[case]
    assert_refused(capsys, tmp_path, fragments, "sft", sft_run(tmp_path, **data), *overrides)


def test_sft_refuses_a_teacher_that_does_not_fit(tmp_path, capsys):
    path, model = sft_run(tmp_path), f"teacher.model={tmp_path / 'model'}"
    other_pieces("teacher")(tmp_path)
    for overrides, fragments in (
        (["distillation.top_k=4"], ["teacher.model = null: distillation needs a teacher"]),
        (["distillation.top_k=65", model], ["distillation.top_k = 65: the vocabulary has 64 tokens"]),
        (["distillation.top_k=4", f"teacher.model={tmp_path / 'teacher'}"], ["id 4 of its tokenizer is 'a', of the policy's '"]),
        ([model], ["teacher.model = ", "has no effect: distillation is not set"]),
    ):
        assert_refused(capsys, tmp_path, fragments, "sft", path, *overrides)


def test_a_reward_model_without_the_head_that_it_is_to_start_from_names_its_own_key(tmp_path, capsys):
    path = sft_run(tmp_path)
    config = json.loads(path.read_text())
    model = {**config.pop("policy"), "value_head": "checkpoint"}
    path.write_text(json.dumps({**config, "kind": "reward_model", "reward_model": model}))
    said = ["reward_model.model", "has no value head", "set reward_model.value_head to zero or normal"]
    assert_refused(capsys, tmp_path, said, "train-reward-model", path)


def test_generate_needs_a_checkpoint_a_tokenizer_and_room(tmp_path, capsys):
    model = write_checkpoint(tmp_path / "model")
    bare = write_checkpoint(tmp_path / "bare", tokenizer=False)
    prompt = ("--prompt", "1+1=")
    assert_refused(capsys, tmp_path, ["absent", "is not a directory"], "generate", "absent", *prompt)
    assert_refused(capsys, tmp_path, ["bare holds no tokenizer"], "generate", bare, *prompt)
    assert_refused(capsys, tmp_path, ["no chat template; prompts go as they are with --raw"], "generate", model, *prompt)
    half = ["prompt 1: the prompt holds \\udcff at character 0, half of a surrogate pair"]  # of a shell that is not in UTF-8
    assert_refused(capsys, tmp_path, half, "generate", model, "--raw", "--prompt", "\udcff")
    assert_refused(capsys, tmp_path, ["--max-tokens 400"], "generate", model, "--raw", "--max-tokens", "400", *prompt)


def test_unchanged_the_configurations_are_accepted(tmp_path, capsys, monkeypatch):
    """Negative control: what the tables change is what is refused."""
    started = []
    monkeypatch.setattr(
        "megappo.commands.launch.training.train_here", lambda ranks, arguments, *_, **__: started.append(arguments[0]) or 0
    )
    assert cli.main(["train", str(write_run(tmp_path))]) == 0
    assert cli.main(["sft", str(sft_run(tmp_path))]) == 0
    assert started == ["train", "sft"]
