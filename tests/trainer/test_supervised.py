"""Supervised runs on two ranks: the same numbers in every layout and packing, in both engines; a resume; held-out data."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from safetensors.torch import load_file

from megappo.commands import cli
from megappo.commands.plan.run import plan_run
from megappo.commands.tune.written import lines_of_plan
from megappo.config.loading import load_run
from megappo.data.tokenizers import load_tokenizer
from megappo.runtime.ending import StopRequest
from megappo.telemetry.hardware import load_hardware
from megappo.telemetry.summary import run_summary
from megappo.trainer import evaluation, main
from megappo.trainer.supervised import Supervised
from tests.trainer.evaluation_runs import evaluated
from tests.trainer.small_run import branch_off, run_many, set_keys, small_config, write_small_task, write_teacher
from tests.worlds import spawn_world

STEPS, HALF, BATCH = 4, 2, 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2 sp": {"policy.parallel": {"tp": 2, "sequence_parallel": True}},
    "pp2": {"policy.parallel": {"pp": 2}},
    "cp2": {"policy.parallel": {"cp": 2}},
    "fsdp2": {"policy.engine": "fsdp2"},
    "one sequence a micro-batch": {"policy.micro_batch_tokens": 1},
    "many in a micro-batch": {"policy.micro_batch_tokens": 512},
}
# With a teacher, whose layout is another one than the policy's.
TEACHER = "teacher.parallel"
TAUGHT: dict[str, dict[str, Any]] = {
    "taught dp2": {},
    "taught tp2 sp": {"policy.parallel": {"tp": 2, "sequence_parallel": True}, TEACHER: {"pp": 2}},
    "taught pp2": {"policy.parallel": {"pp": 2}, TEACHER: {"tp": 2}},
    "taught cp2": {"policy.parallel": {"cp": 2}, "policy.micro_batch_tokens": 512, "teacher.engine": "fsdp2"},
    "taught fsdp2 tp2": {"policy.engine": "fsdp2", "policy.parallel": {"tp": 2}, "teacher.ranks": "1", TEACHER: {}},
}
# With generated answers, of which the last two are compared with an evaluation of the export alone.
VLLM = {"rollout.engine": "vllm"}
ANSWERED: dict[str, dict[str, Any]] = {
    "answered tp2 by vllm tp2": {**VLLM, "policy.parallel": {"tp": 2}, "rollout.tp": 2, "rollout.sleep": "cache"},
    "answered fsdp2 by vllm": {**VLLM, "policy.engine": "fsdp2"},
    "answered pp2": {"policy.parallel": {"pp": 2}},
    "answered lora by vllm apart": {**VLLM, "policy.lora": {"rank": 4}, "policy.ranks": "0", "rollout.ranks": "1"},
}
UNPUSHED = 2  # step whose evaluation of the run by FSDP2 is left without its push


SHORT = {"trainer.steps": 2, "checkpoint": {"save_every": "never", "export_at_end": False}}
"""Keys of the runs that are compared with one another and not resumed."""


def taught(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    teacher = {"teacher": {"model": str(folder / "teacher"), "dtype": "fp32", "micro_batch_tokens": 48}}
    teacher["data.eval"] = str(folder / "data" / "eval.jsonl")
    short = {"trainer.steps": 2} if name in ("taught_tp2_sp", "taught_halves") else SHORT
    return config(folder, name, **teacher, **short, distillation={"divergence": "jsd", "top_k": 5, "coef": 0.75}, **changes)


def answered(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "data.eval": str(folder / "data" / "eval.jsonl"),
        "evaluations": {"again": str(folder / "data" / "sft.jsonl")},
        "rollout": {"engine": "megatron", "max_response_tokens": 6},
        "reward": {"parts": [{"name": "exact_match"}, {"name": "has_eos", "weight": 0.5}]},
        "trainer.eval_every": 2,
        "trainer.keep_best": "eval/score",
        "policy.optimizer": {"lr": 1e-2},  # at which the answers change in two steps
        "checkpoint.export_at_end": True,
    }
    return config(folder, name.replace(" ", "_"), **keys | changes)


def as_ppo(folder: Path) -> dict[str, Any]:
    """The PPO run whose evaluations those of `answered` are."""
    made = small_config(folder, "ppo", steps=1, **{"rollout.engine": "megatron", "data.max_prompt_tokens": 26})
    return set_keys(made, {"evaluations": {"again": {"data": str(folder / "data" / "sft.jsonl")}}, "run.seed": 7})


@contextmanager
def one_push_left_out(step: int) -> Iterator[None]:
    """Evaluate after `step` without pushing the weights."""
    plain = evaluation.push_policy

    def push(rollout: Any, policy: Any, version: int) -> dict[str, float]:
        return {} if version == step else plain(rollout, policy, version)

    with mock.patch.object(evaluation, "push_policy", push):
        yield


def config(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    made = {
        "kind": "sft",
        "run": {"name": name, "output_dir": str(folder / "runs"), "num_ranks": 2, "device": "cpu", "seed": 1},
        "policy": {
            "model": str(folder / "model"),
            "dtype": "fp32",
            "optimizer": {"lr": 1e-3},
            "micro_batch_tokens": 32,
        },
        "data": {
            "train": str(folder / "data" / "sft.jsonl"),
            "tokenizer": str(folder / "model" / "tokenizer.model"),
            "chat_template": False,
            "max_tokens": 32,
        },
        "trainer": {"steps": STEPS, "batch_size": BATCH},
        "checkpoint": {"save_every": 1, "keep_last": STEPS, "export_at_end": False},
        "telemetry": {"trackers": []},
    }
    return set_keys(made, changes)


@contextmanager
def asked_to_stop(step: int) -> Iterator[None]:
    """Rank 1 gets a SIGTERM in the midst of this step."""
    stop, plain = StopRequest(), Supervised.update

    def update(self: Supervised, *args: Any) -> Any:
        if dist.get_rank() == 1 and self.state.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args)

    before = signal.signal(signal.SIGTERM, stop._on_term)
    with mock.patch.object(main, "StopRequest", lambda: stop), mock.patch.object(Supervised, "update", update):
        yield
    signal.signal(signal.SIGTERM, before)


def runs(rank: int, folder: Path) -> None:
    for name, changes in LAYOUTS.items():
        run_many(rank, [(config(folder, name.replace(" ", "_"), **SHORT, **changes), False)])
    for name, changes in TAUGHT.items():
        run_many(rank, [(taught(folder, name.replace(" ", "_"), **changes), False)])
    branch_off(folder, "taught_tp2_sp", "taught_halves", 1)
    run_many(rank, [(taught(folder, "taught_halves", **TAUGHT["taught tp2 sp"]), True)])
    for name, changes in ANSWERED.items():
        with one_push_left_out(UNPUSHED if "fsdp2" in name else -1):
            run_many(rank, [(answered(folder, name, **changes), False)])
    branch_off(folder, "answered_pp2", "answered_halves", HALF)
    run_many(rank, [(answered(folder, "answered_halves", **ANSWERED["answered pp2"]), True)])
    for name in list(ANSWERED)[-2:]:
        found = evaluated(rank, as_ppo(folder), folder / "runs" / name.replace(" ", "_") / "export")
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
    held_out = {"data.eval": str(folder / "data" / "eval.jsonl"), "evaluations": {"again": str(folder / "data" / "sft.jsonl")}}
    best = {**held_out, "trainer.eval_every": 1, "trainer.keep_best": "min eval/again/loss", "checkpoint.export_at_end": True}
    run_many(rank, [(config(folder, "whole", **best), False)])
    branch_off(folder, "whole", "halves", HALF)
    run_many(rank, [(config(folder, "halves", **best), True)])
    stopped = {**best, "checkpoint.save_every": 0}  # a checkpoint at the end alone, and at a stop
    with asked_to_stop(HALF):
        run_many(rank, [(config(folder, "stopped", **stopped), False)])
    if rank == 0:
        (folder / "stopped").write_text(json.dumps(numbers(folder, "stopped")))
    run_many(rank, [(config(folder, "stopped", **stopped), True)])
    branch_off(folder, "whole", "moved", HALF)
    run_many(rank, [(config(folder, "moved", **best, **{"policy.engine": "fsdp2", "policy.parallel": {"tp": 2}}), True)])
    branch_off(folder, "whole", "other", HALF)
    try:
        run_many(rank, [(config(folder, "other", **best, **{"run.seed": 2}), True)])
    except ValueError as error:
        if rank == 0:
            (folder / "refused").write_text(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    write_small_task(folder)
    write_teacher(folder)
    spawn_world(runs, 2, folder)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name.replace(" ", "_") / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def numbers(folder: Path, name: str) -> list[dict[str, float]]:
    keys = ("sft/loss", "sft/grad_norm", "sft/lr", "eval/loss", "eval/again/loss")
    return [{key: row[key] for key in ("step", *keys) if key in row} for row in rows(folder, name)]


@pytest.mark.parametrize("name", list(LAYOUTS)[1:])
def test_every_layout_engine_and_packing_has_the_same_loss_and_gradient(folder: Path, name: str) -> None:
    """To five digits; sequences that saw each other in a micro-batch would differ from the first step on."""
    for mine, other in zip(numbers(folder, name), numbers(folder, "dp2"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_the_loss_of_the_first_step_is_that_of_transformers(folder: Path) -> None:
    """On the examples of the loader's order, one by one, without packing."""
    tokenizer = load_tokenizer(folder / "model" / "tokenizer.model")
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    total = count = 0.0
    for line in (folder / "data" / "eval.jsonl").read_text().splitlines():
        record = json.loads(line)
        prompt = tokenizer.encode_prompt(record["prompt"])
        ids = torch.tensor([[*prompt, *tokenizer.encode(record["answer"]), tokenizer.eos_id]])
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        learned = ids[0, len(prompt) :]
        total, count = total - float(logprobs.gather(1, learned[:, None]).sum()), count + len(learned)
    before = rows(folder, "whole")[0]
    assert before["step"] == 0 and before["eval/loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("name", list(TAUGHT)[1:])
def test_a_teacher_in_any_layout_gives_the_same_loss_and_gradient(folder: Path, name: str) -> None:
    for mine, other in zip(numbers(folder, name), numbers(folder, "taught dp2"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_the_divergence_is_that_of_transformers_distributions(folder: Path) -> None:
    """Of the teacher's five likeliest tokens among the policy's, and of all others as one, over the held-out examples."""
    tokenizer = load_tokenizer(folder / "model" / "tokenizer.model")
    policy, teacher = (
        transformers.LlamaForCausalLM.from_pretrained(folder / one, dtype=torch.float64) for one in ("model", "teacher")
    )
    found, shifted, nll, count = 0.0, 0.0, 0.0, 0
    for line in (folder / "data" / "eval.jsonl").read_text().splitlines():
        record = json.loads(line)
        prompt = tokenizer.encode_prompt(record["prompt"])
        ids = torch.tensor([[*prompt, *tokenizer.encode(record["answer"]), tokenizer.eos_id]])
        with torch.no_grad():
            p = policy(ids).logits[0, len(prompt) - 1 : -1].softmax(-1)
            all_q = teacher(ids).logits[0, :, : p.shape[1]].softmax(-1)
        found += float(half_and_half(all_q[len(prompt) - 1 : -1], p).sum())
        shifted += float(half_and_half(all_q[len(prompt) :], p).sum())
        nll, count = nll - float(p.gather(1, ids[0, len(prompt) :, None]).log().sum()), count + len(p)
    before = rows(folder, "taught dp2")[0]
    means = {"eval/divergence": found, "eval/nll": nll, "eval/loss": 0.75 * found + 0.25 * nll}
    assert {name: before[name] for name in means} == pytest.approx({name: x / count for name, x in means.items()}, rel=1e-5)
    assert abs(shifted - found) > 0.01 * found, "negative control: the teacher's of the next token are others"
    assert [row["eval/loss"] for row in rows(folder, "taught dp2") if "eval/loss" in row][-1] < before["eval/loss"]


def half_and_half(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Jensen and Shannon's divergence by its definition, of probabilities."""
    ids = q.topk(5).indices
    q, p = (torch.cat((x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)), 1) for x in (q, p))
    return sum((x * (x / ((p + q) / 2)).log()).sum(1) for x in (p, q)) / 2


def answers(folder: Path, name: str) -> dict[int, dict[str, float]]:
    """Step -> figures of the generated answers."""
    found = {row["step"]: {key: row[key] for key in row if key.startswith("eval/")} for row in rows(folder, name)}
    return {step: {key: x for key, x in row.items() if not key.endswith("/loss")} for step, row in found.items() if row}


@pytest.mark.parametrize("name", list(ANSWERED)[-2:])
def test_generated_answers_score_what_an_evaluation_of_the_export_says(folder: Path, name: str) -> None:
    of_run = answers(folder, name)
    assert list(of_run) == [0, 2, STEPS] and "eval/score" in of_run[0] and "eval/again/mean@1" in of_run[0]
    for rank in range(2):
        assert json.loads((folder / f"{name}.{rank}.json").read_text()) == of_run[STEPS]
    assert len({tuple(one.values()) for one in of_run.values()}) == 3, "negative control: the answers of other steps are others"


@pytest.mark.parametrize("name", list(ANSWERED)[:2])
def test_every_layout_and_sampler_generates_the_same_answers_of_the_weights_that_were_pushed(folder: Path, name: str) -> None:
    found, expected = answers(folder, name), answers(folder, "answered pp2")
    if "fsdp2" in name:
        assert found[UNPUSHED] == found[0] != expected[UNPUSHED], "negative control: without a push those of the weights before"
        found[UNPUSHED] = expected[UNPUSHED]
    assert found == expected
    for mine, other in zip(numbers(folder, name), numbers(folder, "answered pp2"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_generated_answers_choose_the_best_checkpoint_and_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "runs" / "answered_pp2"
    scores = {step: row["eval/score"] for step, row in answers(folder, "answered pp2").items() if step}
    best = json.loads((run / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())["facts"]["best"]
    assert (best["step"], best["value"]) == max(scores.items(), key=lambda item: item[1])
    assert any(line.startswith("held-out score:") for line in run_summary(run))
    assert cli.main(["compare", str(run), str(folder / "runs" / "answered_halves"), "--metric", "eval/score"]) == 0
    assert f"{scores[STEPS]:.3g}" in capsys.readouterr().out


def test_the_plan_counts_what_generates(tmp_path: Path) -> None:
    write_small_task(tmp_path)
    path = tmp_path / "answered.yaml"
    path.write_text(yaml.safe_dump(answered(tmp_path, "planned", **ANSWERED["answered tp2 by vllm tp2"])))
    planned = plan_run(load_run(str(path)), 2, "cpu")
    alone = plan_run(load_run(str(path), ["rollout=null", "reward=null", "trainer.keep_best=null"]), 2, "cpu")
    said = planned.report()
    assert "held-out answers by vllm: 1 replica of tp 2 on ranks 0,1" in said and "answers again: kept 20 of 20 prompts" in said
    assert "no rollout: the examples are given" in alone.report()
    assert planned.plan.peak(0) > planned.plan.rollout_bytes() > alone.plan.peak(0)
    steps = [lines_of_plan(one.plan, load_hardware("cpu"), frozenset({"policy"})) for one in (planned, alone)]
    assert steps[0][0].split(", evaluations unknown")[0] == steps[1][0], "no step generates"


@pytest.mark.parametrize(
    "one, other", [("whole", "halves"), ("taught_tp2_sp", "taught_halves"), ("answered_pp2", "answered_halves")]
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(folder: Path, one: str, other: str) -> None:
    assert numbers(folder, other) == numbers(folder, one) and answers(folder, other) == answers(folder, one)
    last = rows(folder, one)[-1]["step"]
    whole, halves = (folder / "runs" / name / "checkpoints" / f"step-{last}" for name in (one, other))
    assert json.loads((whole / "state.json").read_text()) == json.loads((halves / "state.json").read_text())
    shards = sorted(path.relative_to(whole) for path in whole.rglob("models/*/*.safetensors"))
    assert shards and all((whole / one).read_bytes() == (halves / one).read_bytes() for one in shards)


def test_a_run_that_was_asked_to_stop_ends_its_step_and_goes_on_with_the_same_bits(folder: Path) -> None:
    assert [row["step"] for row in json.loads((folder / "stopped").read_text())] == list(range(HALF + 1))
    assert numbers(folder, "stopped") == numbers(folder, "whole")


def test_a_run_goes_on_in_another_layout_and_engine(folder: Path) -> None:
    for mine, other in zip(numbers(folder, "moved"), numbers(folder, "whole"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert numbers(folder, "moved")[-1] != numbers(folder, "whole")[-1], "negative control: it did not copy the numbers"


def test_another_order_is_refused(folder: Path) -> None:
    assert "run.seed was 1 at step-2, and is 2" in (folder / "refused").read_text()


def test_the_best_checkpoint_is_the_one_of_the_smallest_held_out_loss(folder: Path) -> None:
    losses = {row["step"]: row["eval/again/loss"] for row in rows(folder, "whole")}
    state = json.loads((folder / "runs" / "whole" / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())
    best = state["facts"]["best"]
    assert best["step"] == min(list(losses)[1:], key=losses.__getitem__) and best["value"] == losses[best["step"]]


def test_the_export_is_the_trained_model(folder: Path) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", folder / "runs" / "whole" / "export"))
    assert before.keys() == after.keys() and not all(torch.equal(one, after[name]) for name, one in before.items())


def test_statistics_are_those_of_a_ppo_run(folder: Path) -> None:
    last = rows(folder, "dp2")[-1]
    wanted = ("timing/update_policy_s", "perf/tflops/update_policy", "memory/host_peak_gib", "checkpoint/failed_saves")
    assert {*wanted, "throughput/tokens_per_s"} <= last.keys()
    assert last["perf/work_tflop/update_policy/policy"] > 0
