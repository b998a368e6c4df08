"""The plan of small runs against hand-computed numbers, its text, and what it refuses."""

import json
import re

import pytest

from megappo.commands import cli
from megappo.commands.plan.activations import micro_batch_bytes
from megappo.commands.plan.estimate import check_plan, values_read, work_out
from megappo.commands.plan.memory import GIB
from megappo.commands.plan.report import checkpoint_bytes, report
from megappo.commands.plan.run import plan_run
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.models.hf_config import arch_of
from megappo.models.weight_map import hf_tensors
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.tables import figures, groups_text, ranks_text, table
from megappo.trainer.prepare.layouts import check_layouts, read_archs
from megappo.trainer.roles import Critic, Policy
from tests.commands.plan.checkpoints import LLAMA_7B, SPARSE, TINY, write_checkpoint, write_prompts, write_run, write_weights


def plan_of(path, overrides=(), ranks=2, device="cpu", memory=None):
    config = load_config(path, overrides)
    archs = read_archs(config)
    return check_plan(work_out(config, archs, check_layouts(config, archs, ranks), ranks, device, memory))


def test_the_quickstart_plan_by_hand(tmp_path):
    plan = plan_of(write_run(tmp_path))
    # parameters: see test_memory.py; the tp rank holds half of the matrices and all 9 norms of 128
    total = 64 * 128 + 4 * (128 * 128 + 2 * 64 * 128 + 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128 + 64 * 128
    policy, critic = plan.memory["policy"], plan.memory["critic"]
    assert [m.parameters for m in policy] == [(total - 9 * 128) // 2 + 9 * 128]
    body = (total - 2 * 64 * 128 - 128) // 2
    assert [m.parameters for m in critic] == [body + 64 * 128, body + 128 + 128]
    assert policy[0].weights == 4 * policy[0].parameters and policy[0].optimizer == 8 * policy[0].parameters
    assert (plan.step.samples, plan.replicas) == (64, 2)
    # 16 sequences of at most 24 tokens, far below 16,384: one micro-batch, and activations of 16 * 24 tokens only
    assert plan.micro_batches == {"policy": 1, "critic": 1, "reference": 1}
    per_layer = 2 * 3 * 128 + (3 * (4 + 2) * 32 + 5 * 384) // 2
    # 64 rows of the output over two tp ranks, twice while they are made; the final norm (3 of 128) and the gradient of its output
    output = 16 * 24 * 32 * 4 * 2 + 32 * 128 * 4 + 16 * 24 * 4 * 4 * 128
    backward = 16 * 24 * 4 * (2 * 384 // 2 + 2 * 128)  # gradients of the MLP's two factors, of the residual and of a norm
    # two micro-batches: ids and places of the tokens (int64), old log-prob, advantage and weight (fp32)
    micro_batches = 2 * 16 * 24 * (2 * 8 + 3 * 4)
    assert policy[0].activations == 16 * 24 * 4 * per_layer * 4 + max(output, backward) + micro_batches
    assert plan.rollout.kv_cache == GIB // 4


def test_the_peak_is_the_sum_of_what_stays_and_the_largest_that_works(tmp_path):
    plan = plan_of(write_run(tmp_path))
    for rank in (0, 1):
        memories = [plan.memory["policy"][0], plan.memory["critic"][rank], plan.memory["reference"][0]]
        stays = sum(m.weights + m.gradients + m.optimizer for m in memories) + plan.rollout.weights + GIB // 4
        assert plan.certain(rank) == stays
        assert plan.peak(rank) == stays + max(max(m.activations, m.forward) for m in memories)
    assert plan.fullest_rank() == max((0, 1), key=lambda rank: plan.peak(rank))


class Asked:
    """An engine that notes which fields of a batch a pass was asked to read, and makes no pass."""

    reads: tuple[str, ...] = ()

    def optimizer_zero_grad(self) -> None:
        pass

    def forward_backward(self, *_: object, reads: tuple[str, ...], **__: object) -> None:
        self.reads = reads
        raise InterruptedError


@pytest.mark.parametrize("placement, coef, of_policy", [("reward", 0.1, 3), ("loss", 0.1, 4), ("loss", 0.0, 3)])
def test_the_plan_counts_the_fields_that_the_roles_read(tmp_path, placement, coef, of_policy):
    config = load_config(write_run(tmp_path), [f"algorithm.kl.placement={placement}", f"algorithm.kl.coef={coef}"])
    policy, critic = Asked(), Asked()
    for role in (Policy(policy, 1.0, config.algorithm), Critic(critic)):
        with pytest.raises(InterruptedError):
            role.update(None, 1.0)
    assert policy.reads[:2] == ("kept", "routes") and len(policy.reads) == 2 + of_policy  # two that most runs have not
    assert values_read(config, "policy") == (0, of_policy)
    assert values_read(config, "critic") == (0, len(critic.reads)) and len(critic.reads) == 3


def test_micro_batches_follow_the_token_budget(tmp_path):
    plan = plan_of(write_run(tmp_path), ["policy.micro_batch_tokens=100", "critic.micro_batch_tokens=10"])
    # 100 tokens hold 4 sequences of 24; a budget below one sequence gives each its own
    assert (plan.micro_batches["policy"], plan.micro_batches["critic"]) == (4, 16)


TEXTS = ["algorithm.ptx.coef=0.1", "algorithm.ptx.data={}", "algorithm.ptx.max_tokens=40", "algorithm.ptx.batch_size=6"]


def with_texts(folder):
    """(configuration file, overrides): 20 texts of 7 to 9 tokens, 6 of them in each of 4 updates of a step."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"{n}+1={n + 1}"}) + "\n" for n in range(20)))
    return write_run(folder), [text.replace("{}", str(folder / "texts.jsonl")) for text in TEXTS]


def test_the_texts_of_the_policys_updates_are_in_its_plan_and_in_no_others(tmp_path):
    path, overrides = with_texts(tmp_path)
    budget = ["policy.micro_batch_tokens=100", "critic.micro_batch_tokens=100"]
    plan, plain = plan_of(path, [*overrides, *budget]), plan_of(path, budget)
    # 16 samples of 24 tokens, 4 to a micro-batch; with 6 texts of 40 tokens 2 of the longest.
    assert (plain.micro_batches["policy"], plan.micro_batches["policy"]) == (4, 11)
    assert plan.micro_batches["critic"] == plain.micro_batches["critic"] == 4
    whole = ["policy.micro_batch_tokens=1000"]
    more = (
        plan_of(path, [*overrides, *whole]).memory["policy"][0].activations - plan_of(path, whole).memory["policy"][0].activations
    )
    arch, layout = read_archs(load_config(path))["policy"], ParallelLayout(2, 2)
    one, other = (
        plan_of(path, [f"policy.micro_batch_tokens={tokens}", "algorithm.mini_batch_size=64"]).memory["policy"][0].activations
        for tokens in (16 * 24 + 6 * 40, 16 * 24)
    )
    assert more == pytest.approx(one - other, rel=0.02) and arch.vocab_size == 64 and layout.tp == 2
    assert values_read(load_config(path, overrides), "policy")[1] == values_read(load_config(path), "policy")[1] + 1


def test_the_report_counts_the_texts(tmp_path):
    path, overrides = with_texts(tmp_path)
    text = plan_run(load_config(path, [*overrides, "trainer.steps=5"]), 2, "cpu").report()
    assert "algorithm.ptx: 6 texts in each update of the policy, 240 tokens at most" in text
    assert "algorithm.ptx: 20 sequences, 161 tokens of 20 texts; 120 drawn = 6.00 passes" in text


def run_7b(folder):
    path = write_run(folder)
    write_checkpoint(folder / "model", LLAMA_7B, tokenizer=False)
    return path


BF16 = ["run.num_ranks=null", "policy.dtype=bf16", "critic.dtype=bf16", "policy.parallel.tp=8", "critic.parallel.pp=1"]


def test_what_cannot_fit_is_refused_with_the_numbers(tmp_path):
    path = run_7b(tmp_path)
    # one H100: policy and critic alone are 2 * 6.7e9 * 18 bytes
    with pytest.raises(
        ConfigError,
        match=r"rank 0 needs \d+ GiB for weights, gradients, optimizer, experience, rollout and reserve and has 80.0 GiB",
    ):
        plan_of(path, [*BF16, "policy.parallel.tp=1"], 1, "cuda", 80 * GIB)
    offloaded = [f"{role}.offload=[parameters,gradients,optimizer]" for role in ("policy", "critic")]
    for more, fix in (
        ([], "raise policy.parallel.tp or .pp, or set policy.offload=\\[optimizer], or lower rollout.memory_share"),
        (offloaded, "or set reference.offload=\\[parameters], or lower rollout.memory_share"),
        ([*offloaded, "reference.offload=[parameters]", "rollout.kv_cache_gib=1"], "tp or .pp, or lower rollout.kv_cache_gib"),
    ):
        with pytest.raises(ConfigError, match=fix + "$"):
            plan_of(path, [*BF16, "policy.parallel.tp=1", "run.device=auto", *more], 1, "cuda", 80 * GIB)
    fits = [*BF16, "critic.parallel.tp=8", "reference.parallel.tp=8", "rollout.tp=8"]
    plan = plan_of(path, fits, 64, "cuda", 80 * GIB)
    assert not plan.warnings and plan.replicas == 8
    # 64 samples of 24 tokens, one a rank: an id, a mask and nine fields; of 8 samples a replica three fields of each role's loss
    assert plan.experience(0) == 24 * (1 * (8 + 1 + 9 * 4) + 2 * 8 * (8 + 1 + 3 * 4)) and plan_of(path, [], 2).experience(0) == 0
    with pytest.raises(ConfigError, match="experience.*lower data.prompts_per_step or rollout.max_response_tokens"):
        plan_of(path, [*fits, "data.prompts_per_step=160000000"], 64, "cuda", 80 * GIB)
    assert plan_of(path, fits, 64, "cuda").rollout.kv_cache is None, "a GPU of unknown size refuses nothing"


def test_vllm_that_cannot_start_is_refused(tmp_path):
    path = run_7b(tmp_path)
    full = [*BF16, "critic.parallel.tp=8", "reference.parallel.tp=8"]
    with pytest.raises(
        ConfigError,
        match="memory_share = 0.1: of 80.0 GiB must hold vLLM's weights .12.6 GiB., and one sequence of 24 .* least 0.16",
    ):
        plan_of(path, [*full, "rollout.memory_share=0.1"], 8, "cuda", 80 * GIB)
    plan_of(path, [*full, "rollout.memory_share=0.16"], 8, "cuda", 80 * GIB)
    with pytest.raises(ConfigError, match="memory_share = 0.4: of 12.0 GiB .* on top; raise rollout.tp, or use larger GPUs"):
        plan_of(path, full, 8, "cuda", 12 * GIB)
    with pytest.raises(ConfigError, match="rollout.kv_cache_gib = 0.01: one sequence of 24 tokens needs 0.0117 GiB"):
        plan_of(path, [*full, "rollout.kv_cache_gib=0.01"], 8, "cuda", 80 * GIB)
    needed = 24 * 512 * 1024 / GIB
    plan_of(path, [*full, f"rollout.kv_cache_gib={needed * 1.001}"], 8, "cuda", 80 * GIB)


def test_a_plan_of_a_machine_without_a_gpu_says_so(tmp_path, capsys):
    """On a head node, where a run of GPUs is planned."""
    path = write_run(tmp_path)
    arguments = ["plan", str(path), "--shapes-only", "run.device=auto"]
    assert cli.main(arguments) == 0
    assert "this machine has no GPU; --gpu-memory-gib plans for GPUs" in capsys.readouterr().out
    assert cli.main([*arguments[:-1], "run.device=cpu"]) == 0 and "has no GPU" not in capsys.readouterr().out
    assert cli.main([*arguments, "--gpu-memory-gib", "80"]) == 0 and "has no GPU" not in capsys.readouterr().out
    write_checkpoint(tmp_path / "model", TINY | {"head_dim": 256, "max_position_embeddings": 32768}, tokenizer=False)
    assert cli.main([*arguments, "data.max_prompt_tokens=20000"]) == 2
    error = capsys.readouterr().err
    assert "rollout.kv_cache_gib = null" in error and "(null is 0.25 on a CPU)" in error and "--gpu-memory-gib plans for" in error


def test_what_training_leaves_out_of_a_checkpoint_is_noted(tmp_path, capsys):
    """A reward model as critic starts with a head of zeros, as the default is."""
    path, facts = write_run(tmp_path), TINY | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    scores = write_checkpoint(tmp_path / "scores", facts)
    arguments = ["plan", str(path), f"critic.model={scores}"]
    lost = "its score.weight is left out, as critic.value_head is zero; critic.value_head=checkpoint starts from it"
    assert cli.main(arguments) == 0 and capsys.readouterr().out.count(f"note: critic.model: {lost}") == 1
    assert cli.main([*arguments, "critic.value_head=checkpoint"]) == 0 and "left out" not in capsys.readouterr().out
    more = {f"model.layers.{layer}.mlp.up_proj.bias": (384,) for layer in range(4)}
    write_weights(tmp_path / "model" / "model.safetensors", hf_tensors(arch_of(TINY)) | more)
    assert cli.main(arguments) == 0
    shown = ", ".join(f"{name} [384]" for name in list(more)[:3])
    left_out = f"policy.model: 4 of its tensors are left out, as a llama model has none of that name: {shown}, ...; if the model"
    assert capsys.readouterr().out.count(left_out) == 1


def test_an_output_projection_other_than_the_embedding_to_which_it_is_tied_is_refused(tmp_path, capsys):
    path, tied = write_run(tmp_path), TINY | {"tie_word_embeddings": True}
    file = write_checkpoint(tmp_path / "model", tied) / "model.safetensors"
    write_weights(file, hf_tensors(arch_of(TINY)))
    assert cli.main(["plan", str(path)]) == 0, "all zeros, so the same"
    with file.open("r+b") as weights:
        weights.seek(-1, 2)  # the last tensor is the projection
        weights.write(b"\x40")
    for arguments, code in [(["plan"], 2), (["plan", "--shapes-only"], 0), (["train"], 2)]:
        capsys.readouterr()
        assert cli.main([arguments[0], str(path), *arguments[1:]]) == code
        out, err = capsys.readouterr()
        if code:
            assert f'policy.model = "{file.parent}": {file}: tensor lm_head.weight differs from the embedding to which it is' in err
        else:
            assert "only shapes were looked at: tensors, tokenizer and data are unchecked" in out


def test_a_world_that_is_not_the_configurations_is_refused_with_both_ways_out(tmp_path, capsys):
    assert cli.main(["plan", str(write_run(tmp_path)), "--world-size", "4"]) == 2
    assert "run.num_ranks = 2: the run has 4 ranks; set it to 4 or leave it out, or start 2" in capsys.readouterr().err


def test_an_estimate_only_warns(tmp_path):
    path = run_7b(tmp_path)
    long = ["data.max_prompt_tokens=2000", "rollout.max_response_tokens=2000", "algorithm.mini_batch_size=64"]
    plan = plan_of(path, [*BF16, "critic.parallel.tp=8", "reference.parallel.tp=8", "rollout.tp=8", *long], 8, "cuda", 64 * GIB)
    assert "rank 0 may run out of memory" in plan.warnings[0]
    full = plan_of(
        path,
        [
            *BF16,
            "critic.parallel.tp=8",
            "reference.parallel.tp=8",
            "rollout.tp=8",
            *long,
            "policy.recompute=full",
            "critic.recompute=full",
        ],
        8,
        "cuda",
        64 * GIB,
    )
    assert not full.warnings and full.peak(0) < plan.peak(0)


def test_the_report_says_what_the_plan_holds_in_100_columns(tmp_path):
    config = load_config(write_run(tmp_path), ["trainer.epochs=3"])
    planned = plan_run(config, 2, "cpu")
    text = planned.report()
    assert all(len(line) <= 100 for line in text.splitlines() if str(tmp_path) not in line)
    for expected in (
        "803,968",
        "402,560",
        "2 ranks on cpu",
        "2 replicas of tp 1 on ranks 0 | 1",
        "32 prompts x 2 samples = 64 samples",
        "4 mini-batches of 16 x 1 epoch = 4 optimizer steps",
        "kept 100 of 100 prompts",
        "100 prompts / 32 per step = 4 steps (its last step takes 28 from the next epoch)",
        "run: 10 steps",  # ceil(300 / 32)
        "one failure in 23.9 h is expected",  # 1 / (1/24 + 2/7680)
    ):
        assert expected in text, expected
    assert planned.data.total_steps == 10


def test_a_checkpoint_is_as_large_as_its_tensors(tmp_path):
    path = write_run(tmp_path)
    layers = 4 * (128 * 128 + 2 * 64 * 128 + 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128
    policy, critic = layers + 2 * 64 * 128, layers + 64 * 128  # and the value head of the critic
    assert checkpoint_bytes(plan_of(path)) == 12 * (policy + critic + 128)
    halves = plan_of(path, ["policy.dtype=bf16", "critic.dtype=bf16"])
    assert checkpoint_bytes(halves) == 14 * (policy + critic) + 12 * 128
    weights = plan_of(path, ["checkpoint.save_only_model=true", "checkpoint.save_every=5"])
    assert checkpoint_bytes(weights) == 4 * (policy + critic + 128)
    assert "one every 5 steps" in report(weights) and "mtbf_hours" not in report(weights)
    for every, says in {"0": "one at the end", "epoch": "one after each epoch", "never": "none but at a stop"}.items():
        assert says in report(plan_of(path, [f"checkpoint.save_every={every}"]))


def test_a_large_world_is_printed_compactly(tmp_path):
    path = run_7b(tmp_path)
    overrides = [
        *BF16,
        "critic.parallel.tp=4",
        "critic.parallel.pp=2",
        "reference.parallel.tp=8",
        "rollout.tp=4",
        "algorithm.mini_batch_size=64",
    ]
    plan = plan_of(path, overrides, 1024, "cuda", 80 * GIB)
    text = report(plan)
    assert all(len(line) <= 100 for line in text.splitlines() if str(tmp_path) not in line)
    assert len(text.splitlines()) < 92
    assert "0-7 | 8-15 | ... | 1016-1023 (128 groups)" in text and "0,512 | 1,513 | ... | 511,1023 (512 groups)" in text


def test_the_report_shows_every_axis_that_a_role_uses(tmp_path):
    path = write_run(tmp_path)
    write_checkpoint(tmp_path / "model", SPARSE, tokenizer=False)
    axes = [
        "policy.parallel.sequence_parallel=true",
        "policy.parallel.cp=2",
        "policy.parallel.ep=3",
        "critic.parallel.vpp=2",
        "critic.parallel.layers_per_stage=[1,1,1,1]",
        "reference.parallel.pp=2",
        "reference.parallel.layers_per_stage=[3,1]",
    ]
    text = report(plan_of(path, ["run.num_ranks=null", *axes], 12))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for expected in (
        "role tp pp dp vpp cp ep",
        "policy 2 sp 1 3 1 2 3",
        "critic 1 2 6 2 1 1",
        "reference 1 2 6 1 1 1",
        "policy cp 0,2 | 1,3 | ... | 9,11 (6 groups)",
        "policy ep 0-2 | 3-5 | 6-8 | 9-11",
        "critic: raised to a multiple of pp 2 (vpp 2); where there are fewer sequences, some are empty",
        "critic: layers of the stages 1 + 1 | 1 + 1",
        "reference: layers of the stages 3 | 1",
    ):
        assert expected in lines, (expected, text)
    assert "2 of 6 x 96" in text and all(len(line) <= 100 for line in text.splitlines() if str(tmp_path) not in line)
    plain = report(plan_of(path, ["policy.parallel.tp=1"], 2))
    assert not {"cp", "ep", "vpp"} & set(plain.split()), "axes that nobody uses are not shown"


def test_padding_for_context_parallel_is_counted(tmp_path):
    """16 sequences of 24 tokens, a multiple of 2 * 3 but not of 2 * 5 (then 30), in one micro-batch."""
    heads = {"num_attention_heads": 15, "num_key_value_heads": 15, "head_dim": 8}
    path = write_run(tmp_path)
    write_checkpoint(tmp_path / "model", TINY | heads, tokenizer=False)

    def activations(cp):
        overrides = ["run.num_ranks=null", "policy.parallel.tp=1", f"critic.parallel.cp={cp}", "critic.parallel.pp=1"]
        # every rank of cp holds whole micro-batches, of three values a token
        micro_batches = micro_batch_bytes(ParallelLayout(cp, cp=cp), 16 * (30 if cp == 5 else 24), 3)
        return plan_of(path, overrides, cp).memory["critic"][0].activations - micro_batches

    assert activations(3) * 3 == activations(1)
    assert activations(5) * 5 == activations(1) * 30 // 24


# what is wrong with the data, what the message must contain
BAD_DATA = [
    (["data.train=absent.jsonl"], ["absent.jsonl does not exist"]),
    (["data.prompts_per_step=112", "algorithm.mini_batch_size=224"], ["data.prompts_per_step=112", "100 prompts"]),
    (["data.prompt_key=question"], ["data.prompt_key=question", "prompt, answer"]),
    (["data.max_prompt_tokens=2"], ["no prompts are left", "kept 0 of 100"]),
    (["data.chat_template=true"], ["no chat template", "data.chat_template=false"]),
    (["data.tokenizer=absent"], ["absent", "data.tokenizer"]),
    (["reward.parts=[{name: exact_mach}]"], ["exact_mach", "did you mean exact_match?"]),
    (["critic.warmup.steps=5"], ["critic.warmup.steps = 5", "4 steps"]),
    (["policy.optimizer.warmup_steps=16"], ["policy.optimizer.warmup_steps = 16", "16 optimizer steps"]),
    (["reference.dtype=fp32", "algorithm.kl.placement=none"], ["reference.dtype", "has no effect"]),
]


@pytest.mark.parametrize("overrides, fragments", BAD_DATA, ids=[case[0][0] for case in BAD_DATA])
def test_bad_input_is_refused_before_anything_is_built(tmp_path, overrides, fragments):
    config = load_config(write_run(tmp_path), overrides)
    with pytest.raises(ValueError) as error:
        plan_run(config, 2, "cpu")
    text = str(error.value)
    assert "\n" not in text and all(fragment in text for fragment in fragments), text


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    path = write_run(tmp_path)
    write_checkpoint(tmp_path / "model", TINY | {"vocab_size": 8}, tokenizer=False)
    with pytest.raises(ConfigError, match="data.tokenizer = .* ids and policy.model only 8"):
        plan_run(load_config(path), 2, "cpu")


def test_missing_packages_are_named_with_the_way_to_install_them(tmp_path, monkeypatch):
    from megappo.runtime import installed

    path = write_run(tmp_path)
    config = load_config(path)
    monkeypatch.setattr(installed, "installed_version", lambda requirement: None if requirement.name == "vllm" else "1")
    with pytest.raises(
        ConfigError,
        match="rollout.engine = \"vllm\": vllm is not installed: pip install 'megappo.vllm.'.*rollout.engine=megatron",
    ):
        plan_run(config, 2, "cpu")
    plan_run(load_config(path, ["rollout.engine=megatron"]), 2, "cpu")
    monkeypatch.setattr(installed, "installed_version", lambda requirement: None if requirement.name == "math-verify" else "1")
    with pytest.raises(ConfigError, match='reward.parts = "math_verify": math-verify is not installed'):
        plan_run(load_config(path, ["reward.parts=[{name: math_verify}]"]), 2, "cpu")


def test_planning_writes_nothing(tmp_path):
    path = write_run(tmp_path)
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    plan_run(load_config(path), 2, "cpu")
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before


def test_a_training_prints_ranks_memory_batches_and_data_in_a_dozen_lines(tmp_path):
    held_out = write_prompts(tmp_path / "eval.jsonl", 30)
    planned = plan_run(load_config(write_run(tmp_path), [f"data.eval={held_out}", "trainer.steps=5"]), 2, "cpu")
    whole, lines = planned.report(), planned.brief("megappo plan x.yaml").splitlines()
    assert lines[0] == "plan (all of it: megappo plan x.yaml)" and len(lines) < 14 < len(whole.splitlines())
    assert lines[1] == "  2 ranks on cpu: policy tp2 pp1 dp1, critic tp1 pp2 dp1, reference tp1 pp1 dp2"
    peak = re.search(r"fullest rank: (\d), about ([\d.]+)", whole)
    assert f"memory of the fullest rank: about {peak[2]} MiB at its peak (rank {peak[1]})" in lines[3]
    assert all(line in whole.splitlines() for line in lines[4:]), "the rest is as the whole plan has it"
    said = "\n".join(lines)
    assert all(word in said for word in ("step: 32 prompts", "updates of policy, critic", "run: 5 steps", "eval: kept 30"))


def test_evaluation_prompts_are_counted_with_their_limit(tmp_path):
    held_out = write_prompts(tmp_path / "eval.jsonl", 30)
    planned = plan_run(load_config(write_run(tmp_path), [f"data.eval={held_out}", "data.eval_prompts=20"]), 2, "cpu")
    assert len(planned.data.eval) == 20 and "eval: kept 20" in planned.report()
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match="no prompts are left of .*empty.jsonl"):
        plan_run(load_config(write_run(tmp_path), [f"data.eval={empty}"]), 2, "cpu")
    empty.write_text(json.dumps({"question": "x"}))
    with pytest.raises(ValueError, match="data.prompt_key=prompt"):
        plan_run(load_config(write_run(tmp_path), [f"data.eval={empty}"]), 2, "cpu")


def test_answers_that_a_rule_cannot_read_are_told(tmp_path):
    path, rule = write_run(tmp_path), "reward.parts=[{name: gsm8k_strict}]"
    assert "cannot read" not in plan_run(load_config(path, [rule]), 2, "cpu").report()
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "answer": "seven"}) + "\n")
    assert re.search(
        r"note: data.train: gsm8k_strict cannot read 1 of .* \(line \d+\); the reference answer 'seven' is not a number",
        plan_run(load_config(path, [rule]), 2, "cpu").report(),
    )


# ------------------------------------------------------------------------------------------------------------------ tables


def test_ranks_are_written_short():
    cases = {
        (0,): "0",
        (0, 1): "0,1",
        (0, 1, 2): "0-2",
        (0, 8): "0,8",
        (0, 8, 16): "0-16 by 8",
        (0, 1, 4, 5): "0,1,4,5",
        (0, 1, 2, 8, 9, 10): "0-2,8-10",
    }
    assert {ranks: ranks_text(ranks) for ranks in cases} == cases
    assert groups_text([[0, 1], [2, 3]]) == "0,1 | 2,3"
    assert groups_text([[n, n + 1] for n in range(0, 12, 2)]) == "0,1 | 2,3 | ... | 10,11 (6 groups)"


def test_figures_keep_three_of_them():
    values = {0: "0", 0.0042143: "0.00421", 0.5: "0.500", 1.567: "1.57", 25.32: "25.3", 141.4: "141", 2048.0: "2048"}
    assert {value: figures(value) for value in values} == values


def test_columns_of_a_table_line_up():
    lines = table(["name", "n"], [["a", "1"], ["longer", "1,000"]])
    assert lines == ["  name        n", "  a           1", "  longer  1,000"]
    assert len({re.search(r"\S+$", line).end() for line in lines}) == 1
