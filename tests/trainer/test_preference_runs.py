"""Runs that learn from preferences on two ranks: every loss in two layouts, a reward model in five, every kind resumed to the bit
after a SIGKILL; against transformers' log-probs and scores; and a reward model of one layout that serves PPO in another."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from megappo.data.tokenizers import load_tokenizer
from megappo.rollout.vllm_process import EngineState, vllm_running
from megappo.trainer.kinds import reference
from megappo.trainer.kinds.kind import Drawn
from megappo.trainer.supervised import Supervised
from tests.trainer.preference_runs import rows, run_all, run_config, write_experts, write_preferences
from tests.trainer.small_run import run_many, small_config
from tests.worlds import WorldError, spawn_world

LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss.label_smoothing": 0.1, "loss.nll_coef": 0.5},
    "ipo": {"loss.type": "ipo", "loss.beta": 0.5},
    "simpo": {"loss.type": "simpo", "loss.nll_coef": 0.1},
    "orpo": {"loss.type": "orpo", "loss.beta": 0.5},
    "kto": {
        "loss.type": "kto",
        "loss.undesirable_weight": 1.2,
        "data.train": "labels",
        "data.eval": "labels",
        "trainer.batch_size": 16,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {"role.parallel.tp": 2, "role.parallel.sequence_parallel": True},
    "pp": {"role.parallel.pp": 2},
    "cp": {"role.parallel.cp": 2},
    "fsdp2": {"role.engine": "fsdp2"},
}
# The other layout of each loss, and where its reference is: computed once, or in every step in a layout of its own.
OTHER: dict[str, dict[str, Any]] = {
    "sigmoid": {**LAYOUTS["tp"], "reference.every_step": True, "reference.dtype": "fp32", "reference.parallel.pp": 2},
    "ipo": {**LAYOUTS["cp"]},
    "simpo": LAYOUTS["fsdp2"],
    "orpo": LAYOUTS["pp"],
    "kto": {**LAYOUTS["tp"], "reference.every_step": True, "reference.dtype": "fp32"},
}
RANKED = {
    "data.margin_key": "by",
    "data.tie_key": "even",
    "loss.tie_margin": 0.3,
    "loss.centring": 0.01,
    "role.value_head": "normal",
}
LISTS = {"data.responses_key": "responses", "data.train": "lists", "data.eval": "lists"}
EXPERTS: dict[str, dict[str, Any]] = {"dpo": {}, "reward_model": {}, "sft": {"data.response_key": "chosen"}}
SAVED = {"checkpoint.save_every": 2, "checkpoint.asynchronous": False, "trainer.steps": 3}
# Of the runs that are killed in their third step, and resumed: kind and keys.
KILLED: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("dpo", {**SAVED, "policy.lora.rank": 2}),
    "ranked_tp": ("reward_model", {**SAVED, **RANKED, **LAYOUTS["tp"]}),
    "tuned": ("sft", {**SAVED, **EXPERTS["sft"], **LAYOUTS["pp"]}),
}


def configs(folder: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    def config(kind: str, name: str, **keys: Any) -> dict[str, Any]:
        files = {key: str(folder / "data" / f"{value}.jsonl") for key, value in keys.items() if key in ("data.train", "data.eval")}
        return run_config(folder, kind, name, **{**keys, **files})

    for loss, keys in LOSSES.items():
        yield config("dpo", f"{loss}_dp", **keys), False
        yield config("dpo", f"{loss}_other", **keys, **OTHER[loss]), False
    for kind in EXPERTS:
        for layout in ("dp", "ep"):
            keys = {
                **EXPERTS[kind],
                "role.model": str(folder / "experts"),
                "trainer.steps": 2,
                "role.parallel.ep": 2 if layout == "ep" else 1,
            }
            yield config(kind, f"{kind}_experts_{layout}", **keys), False
    for layout, keys in LAYOUTS.items():
        saved = {**SAVED, "checkpoint.export_at_end": True} if layout == "tp" else {}
        yield config("reward_model", f"ranked_{layout}", **RANKED, **keys, **saved), False
    yield config("reward_model", "lists_dp", **LISTS), False
    yield config("reward_model", "lists_pp", **LISTS, **LAYOUTS["pp"]), False
    for name in ("whole", "tuned"):  # "ranked_tp" is among the layouts
        kind, keys = KILLED[name]
        yield config(kind, name, **keys), False
    exported = {"role.model": str(folder / "runs" / "ranked_tp" / "export"), "role.value_head": "checkpoint", "trainer.steps": 1}
    yield config("reward_model", "again", **RANKED | exported), False


def world(rank: int, folder: Path) -> None:
    run_all(rank, list(configs(folder)))
    for name, (kind, keys) in KILLED.items():
        run_all(rank, [(run_config(folder, kind, f"{name}_resumed", **keys), True)])
    share = Drawn.share
    with mock.patch.object(Drawn, "share", lambda *args: replace(share(*args), together=())):  # a micro-batch may divide pairs
        run_all(rank, [(run_config(folder, "dpo", "split", **LOSSES["simpo"]), False)])
    judge = {"reward.parts": [{"model": "reward_model"}], "reward_model.model": str(folder / "runs" / "ranked_tp" / "export")}
    judge |= {"reward_model.dtype": "fp32", "reward_model.parallel.pp": 2, "reward_model.chat_template": False}
    judge |= {"rollout.engine": "megatron", "critic.model": judge["reward_model.model"], "critic.value_head": "checkpoint"}
    judge |= {"checkpoint.export_at_end": False, "checkpoint.save_every": "never", "telemetry.trackers": []}
    run_many(rank, [(small_config(folder, "ppo", steps=1, **judge), False)])


def killed(rank: int, folder: Path, name: str) -> None:
    """A run whose rank 1 is killed after the forward passes of its third step."""
    kind, keys = KILLED[name]
    plain = Supervised.update

    def update(self: Supervised, *args: Any) -> Any:
        if rank == 1 and self.state.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args)

    with mock.patch.object(Supervised, "update", update):
        run_all(rank, [(run_config(folder, kind, f"{name}_resumed", **keys), False)])


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_preferences(folder)
    write_experts(folder)
    for name in KILLED:
        with pytest.raises(WorldError):
            spawn_world(killed, 2, folder, name)
        assert [row["step"] for row in rows(folder, f"{name}_resumed")] == [0, 1, 2], "it was killed in its third step"
    spawn_world(world, 2, folder)
    return folder


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Figures of a row of metrics that no layout and no clock changes; None, which JSON has for nan, as nan."""
    chosen = {key: value for key, value in row.items() if key.split("/")[0] in ("dpo", "reward_model", "sft", "eval")}
    return {key: math.nan if value is None else value for key, value in chosen.items()}


def check_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(map(numbers, ours), map(numbers, theirs), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=2e-5, nan_ok=True)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_has_the_same_numbers_in_another_layout_and_learns(task: Path, loss: str) -> None:
    ours = rows(task, f"{loss}_dp")
    check_same(ours, rows(task, f"{loss}_other"))
    assert ours[-1]["eval/loss"] < ours[0]["eval/loss"]
    assert ours[-1]["eval/margin"] > ours[0]["eval/margin"]


def test_divided_pairs_would_be_seen(task: Path) -> None:
    ours, split = rows(task, "simpo_dp"), rows(task, "split")
    assert split[-1]["eval/loss"] != pytest.approx(ours[-1]["eval/loss"], rel=1e-3)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dp"])
def test_a_reward_model_has_the_same_numbers_in_every_layout(task: Path, layout: str) -> None:
    check_same(rows(task, "ranked_dp"), rows(task, f"ranked_{layout}"))


def test_lists_have_the_same_numbers_in_two_layouts(task: Path) -> None:
    check_same(rows(task, "lists_dp"), rows(task, "lists_pp"))
    assert rows(task, "lists_dp")[-1]["eval/loss"] < rows(task, "lists_dp")[0]["eval/loss"]


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_over_ranks_have_the_same_numbers(task: Path, kind: str) -> None:
    check_same(rows(task, f"{kind}_experts_dp"), rows(task, f"{kind}_experts_ep"))


@pytest.mark.parametrize("name", KILLED)
def test_a_run_that_was_killed_and_resumed_has_the_same_bits(task: Path, name: str) -> None:
    resumed, whole = rows(task, f"{name}_resumed"), rows(task, name)
    assert list(map(numbers, resumed)) == list(map(numbers, whole)) and resumed[-1]["step"] == 3


def pairs(task: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task / "data" / "held.jsonl").read_text().splitlines()]


def test_the_first_losses_are_those_of_transformers_logprobs(task: Path) -> None:
    """SimPO and ORPO, whose losses differ from a constant before the first update."""
    model = transformers.AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64).eval()
    tokenizer = load_tokenizer(task / "model" / "tokenizer.model")

    def mean_logprob(prompt: str, response: str) -> float:
        before, ids = tokenizer.encode_prompt(prompt), [*tokenizer.encode(response), tokenizer.eos_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *ids]])).logits[0].log_softmax(-1)
        return sum(float(logits[len(before) - 1 + i, token]) for i, token in enumerate(ids)) / len(ids)

    found = [[mean_logprob(one["prompt"], one[side]) for side in ("chosen", "rejected")] for one in pairs(task)]
    simpo = sum(math.log1p(math.exp(1.0 - 2.0 * (c - r))) for c, r in found) / len(found)
    odds = [[p - math.log1p(-math.exp(p)) for p in one] for one in found]
    orpo = sum(0.5 * math.log1p(math.exp(r - c)) for c, r in odds) / len(odds)
    first = {loss: rows(task, f"{loss}_dp")[0] for loss in ("simpo", "orpo")}
    lengths = [len(one["chosen"]) + 1 for one in pairs(task)]
    nll = _mean_nll_by_batches([-c for c, _ in found], lengths, 12)
    assert first["simpo"]["eval/loss"] == pytest.approx(simpo + 0.1 * nll, rel=1e-5)
    assert first["orpo"]["eval/loss"] == pytest.approx(orpo + nll, rel=1e-5)


def _mean_nll_by_batches(nll: list[float], lengths: list[int], size: int) -> float:
    """Mean per token in each batch of an evaluation, weighted by its pairs."""
    found = 0.0
    for start in range(0, len(nll), size):
        tokens = lengths[start : start + size]
        found += len(tokens) * sum(one * count for one, count in zip(nll[start : start + size], tokens)) / sum(tokens)
    return found / len(nll)


def scores_of_export(task: Path) -> list[list[float]]:
    export = task / "runs" / "ranked_tp" / "export"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(export)
    with torch.no_grad():
        return [
            [
                float(model(torch.tensor([tokenizer.encode_prompt(one["prompt"] + one[side])])).logits)
                for side in ("chosen", "rejected")
            ]
            for one in pairs(task)
        ]


def test_the_export_gives_the_scores_in_transformers(task: Path) -> None:
    scores = scores_of_export(task)
    assert json.loads((task / "runs" / "ranked_tp" / "export" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
    last = rows(task, "ranked_tp")[-1]
    margin = sum(c - r for (c, r), one in zip(scores, pairs(task)) if not one["even"]) / sum(not one["even"] for one in pairs(task))
    assert last["eval/margin"] == pytest.approx(margin, rel=1e-4, abs=1e-6)
    assert last["eval/score_mean"] == pytest.approx(sum(map(sum, scores)) / 2 / len(scores), rel=1e-4, abs=1e-6)
    again = rows(task, "again")[0]
    for name in ("eval/loss", "eval/margin", "eval/score_mean", "eval/calibration_error"):
        assert again[name] == pytest.approx(last[name], rel=1e-4, abs=1e-6), name


def scores_in_vllm(rank: int, export: Path, prompts: list[list[int]]) -> list[float]:
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "RANK": "0", "WORLD_SIZE": "1"}
    with vllm_running(EngineState(torch.device("cpu")), own):
        from vllm import LLM, PoolingParams

        llm = LLM(str(export), runner="pooling", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=16)
        params = PoolingParams(task="classify", use_activation=False)
        read = llm.encode([{"prompt_token_ids": ids} for ids in prompts], params, pooling_task="classify", use_tqdm=False)
        return [float(one.outputs.data) for one in read]


def test_the_export_gives_the_scores_in_vllm(task: Path) -> None:
    export = task / "runs" / "ranked_tp" / "export"
    tokenizer = load_tokenizer(export)
    prompts = [tokenizer.encode_prompt(one["prompt"] + one[side]) for one in pairs(task) for side in ("chosen", "rejected")]
    (ours,) = spawn_world(scores_in_vllm, 1, export, prompts)
    theirs = sum(scores_of_export(task), [])
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6) and len(set(theirs)) > len(theirs) / 2
    assert ours[1:] != pytest.approx(theirs[:-1], rel=1e-2)


def test_the_reward_model_serves_ppo_in_another_layout(task: Path) -> None:
    first = next(row for row in rows(task, "ppo") if "policy/loss" in row)
    assert first["reward/score_mean"] == pytest.approx(first["reward/reward_model"]) and math.isfinite(first["critic/loss"])


def test_the_reference_is_computed_once_and_kept(task: Path) -> None:
    """The second run of the same data and model reads what the first one kept; both losses start at log 2 or its like."""
    assert rows(task, "ipo_dp")[0]["eval/margin"] == pytest.approx(0.0, abs=1e-6)
    assert rows(task, "sigmoid_dp")[1]["dpo/margin"] == pytest.approx(0.0, abs=1e-6)


def test_weights_are_hashed_again_only_if_a_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a file of another content with the size and the date of before has changed."""
    monkeypatch.setenv("MEGAPPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reference, "SETTLED_S", 0.0)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(b"1" * 64)
    config.write_text("{}")
    reads = []
    plain = reference.content_of
    monkeypatch.setattr(reference, "content_of", lambda files: reads.append(1) or plain(files))
    first = reference.weights_of(str(tmp_path))
    assert reference.weights_of(str(tmp_path)) == first and len(reads) == 1
    before = weights.stat()
    weights.write_bytes(b"2" * 64)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = reference.weights_of(str(tmp_path))
    assert second != first and len(reads) == 2
    monkeypatch.setattr(reference, "SETTLED_S", 10.0)
    weights.write_bytes(b"3" * 64)  # a moment ago: another write may follow in the same tick
    assert len({reference.weights_of(str(tmp_path)) for _ in range(2)} | {first, second}) == 3 and len(reads) == 4
