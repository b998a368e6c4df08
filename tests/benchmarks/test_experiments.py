"""benchmarks/experiments: arms differ in what they say, tables and pictures are those of the runs, the page is the script's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.experiments import __main__ as command
from benchmarks.experiments import page, results, rewards, tasks
from benchmarks.experiments.arms import ARMS, EXPERIMENTS, keys_of, overrides
from benchmarks.experiments.runs import directory
from megappo.config.checks import check_config
from megappo.config.loading import explicit_keys, load_config
from tests.commands.runs.folders import write_end

CONFIG = tasks.ROOT / "configs" / "quickstart.yaml"
SAMPLES = {"sums": 256, "long": 128, "turns": 128}
TIS = {f"algorithm.importance_sampling.{key}": value for key, value in {"type": "tis", "level": "token", "high": 2.0}.items()}
APART = {"run.num_ranks": 2, "rollout.ranks": "1", **{f"{role}.ranks": "0" for role in ("policy", "critic", "reference")}}
# Written anew: keys of the resolved configuration that differ from the baseline's.
DIFFERENT = {
    "baseline": {},
    "pretrained": {"critic.warmup.steps": 6, "critic.warmup.lam": 1.0},
    "k2": {"critic.ppo_epochs": 2},
    "unshifted": {},
    "n1": {"rollout.samples_per_prompt": 1, "data.prompts_per_step": None},  # four times as many
    "age2": {"rollout.push_every": 3},
    "age2_tis": {"rollout.push_every": 3, **TIS},
    "age4": {"rollout.push_every": 5},
    "age4_tis": {"rollout.push_every": 5, **TIS},
    **{
        f"stale{k}{'_tis' * corrected}": {**APART, "rollout.max_staleness": k, **(TIS if corrected else {})}
        for k in (1, 4, 8)
        for corrected in (False, True)
    },
}


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, value in section.items():
        keys |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return keys


def resolved(task: str, arm: str) -> dict[str, Any]:
    """All keys; ConfigError if the checks refuse them."""
    config = load_config(CONFIG, list(overrides(keys_of(task, arm))))
    check_config(config, explicit_keys(config), config.run.num_ranks or 1, "cpu")
    return flat(config.model_dump(mode="json"))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_arms_are_accepted_and_differ_from_the_baseline_in_their_keys_alone(task):
    baseline = resolved(task, "baseline")
    assert baseline["data.prompts_per_step"] * baseline["rollout.samples_per_prompt"] == SAMPLES[task]
    for arm, keys in DIFFERENT.items():
        found = {key: value for key, value in resolved(task, arm).items() if value != baseline.get(key)}
        if arm == "n1":
            assert found.pop("data.prompts_per_step") == SAMPLES[task]
            keys = {"rollout.samples_per_prompt": 1}
        assert found == keys, arm
    grpo = {key: value for key, value in resolved(task, "grpo").items() if value != baseline.get(key)}
    in_loss = {key: value for key, value in resolved(task, "grpo_loss").items() if value != baseline.get(key)}
    assert in_loss == {**grpo, "algorithm.kl.placement": "loss", "algorithm.kl.estimator": "k3"}
    assert grpo.pop("algorithm.estimator.type") == "grpo" and grpo.pop("algorithm.estimator.divide_by_group_std") is True
    assert all(key.startswith("critic.") or key == "algorithm.lam" for key in grpo)
    assert {*DIFFERENT, "grpo", "grpo_loss"} == set(ARMS) and not ARMS["unshifted"].shifted


def test_every_arm_is_in_an_experiment():
    assert set(ARMS) == {arm for experiment in EXPERIMENTS.values() for arm in experiment.arms}


# ------------------------------------------------------------------------------------------------------------------- tasks


def test_a_pupil_forgets_carries_alone():
    assert tasks.doubling("7430", lambda: False) == "4960" and tasks.doubling("7430", lambda: True) == "4860"  # 347
    assert tasks.doubling("9999", lambda: False) == "8999"  # 19998 of four digits


@pytest.mark.parametrize("task", ["long", "turns"])
def test_data_has_answers_that_the_reward_takes_for_right(task, tmp_path):
    tasks.TASKS[task].write(tmp_path)
    lines = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("eval", "sft")}
    assert len(lines["eval"]) == 500 and not {one["prompt"] for one in lines["eval"]} & {one["prompt"] for one in lines["sft"]}
    shown = {name: sum(score(task, line) for line in some) / len(some) for name, some in lines.items()}
    assert shown["eval"] == 1 and 0.1 < shown["sft"] < 0.4


def score(task: str, line: dict[str, str]) -> float:
    if task == "long":
        return rewards.doubled(SimpleNamespace(prompt=line["prompt"], response=line["answer"]), 4, 6)
    numbers = [int(line[key][:0:-1]) for key in ("prompt", "then")]
    first, second = (str(2 * number % 10_000).zfill(4)[::-1] for number in numbers)
    return rewards.both_turns(SimpleNamespace(full_response=f"{line['answer']}</s>", answer=f"{first}+{line['then']}{second}"))


def test_a_doubling_counts_from_the_number_before_it():
    def share(response: str) -> float:
        return rewards.doubled(SimpleNamespace(prompt="=10", response=response), 2, 3)

    assert share("204080") == 1 and share("204070") == pytest.approx(2 / 3)
    assert share("304080") == pytest.approx(1 / 3), "10, 03, 04, 08 from the last digit: 4 is not twice 3, 8 is twice 4"
    assert share("2040") == share("20408x") == 0


# ----------------------------------------------------------------------------------------------------------------- results


def write_run(folder: Path, task: str, arm: str, seed: int, rewards: list[float], outcome: str = "finished") -> None:
    run_dir = directory(folder, task, arm, seed)
    run_dir.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"step": step, "reward/score_mean": reward, "critic/explained_variance": reward / 2 if arm != "grpo" else None}
        for step, reward in enumerate(rewards, 1)
    ]
    rows[-1]["eval/score"] = rewards[-1] + 0.01
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_end(run_dir, outcome)


@pytest.fixture
def made_up(tmp_path) -> dict[str, Any]:
    """The baseline of sums reaches 0.8 with one seed of two, K = 2 with both, GRPO's run of long was stopped."""
    rising = [0.5, 0.8, 0.9, 0.95, 0.9, 0.95, 0.95]
    write_run(tmp_path, "sums", "baseline", 1, [0.5] * 7)
    write_run(tmp_path, "sums", "baseline", 2, rising)
    write_run(tmp_path, "sums", "k2", 1, [0.96] * 7)
    write_run(tmp_path, "sums", "k2", 2, [0.98] * 7)
    write_run(tmp_path, "sums", "grpo", 1, rising)
    write_run(tmp_path, "long", "grpo", 1, rising, outcome="stopped")
    return results.read_results(tmp_path, [1, 2])


def test_tables_say_what_the_runs_were(made_up, tmp_path):
    rows = {row[1]: row for row in page.result_rows(made_up, ["baseline", "k2", "grpo"])}
    # 0.5, 0.8, 0.9 have the mean 0.733, and the three after 0.5 the mean 0.883: step 4, of 256 responses.
    assert rows["baseline"] == [
        "sums",
        "baseline",
        "1 of 2: 4",
        "0.715 (0.500..0.930)",
        "0.735 (0.510..0.960)",
        "0.36 (0.25..0.47)",
    ]
    assert rows["K = 2"][2:4] == ["3 (3..3) <", "0.970 (0.960..0.980) >"]
    assert rows["GRPO, n = 4"][3:] == ["0.930 (0.930..0.930)", "0.960 (0.960..0.960)", "-"]
    assert "long" not in made_up, "a run that was stopped is no result"
    assert results.read_results(tmp_path, [1], made_up) == made_up == results.read_results(tmp_path / "none", [1], made_up)
    left = results.missing(made_up, [1, 2])
    assert left["sums"]["grpo"] == [2] and left["long"]["grpo"] == [1, 2] and "k2" not in left["sums"]
    assert "sums: 6 steps of value pretraining (seed 1, 2)" in page.missing_text(made_up, [1, 2])


def test_ranges_that_overlap_say_nothing():
    low, high, both = results.Spread((1, 2)), results.Spread((3, math.inf)), results.Spread((2, 3))
    assert (low.against(high), high.against(low), both.against(low), both.against(high)) == ("lower", "higher", "within", "within")
    assert results.Spread((math.inf, math.inf)).text(0) == "never"
    assert page.marked(low, both, 0) == "2 (1..2)" and page.marked(low, high, 0).endswith(" <")


def test_a_picture_has_a_column_for_each_task(made_up, tmp_path):
    text = page.draw(made_up, "critic_updates", tmp_path).read_text()
    for words in ("sums: reward", "turns: explained variance", ">K = 2<", ">baseline<"):
        assert words in text
    assert len(text) < 60_000
    curves = page.panel(made_up, "sums", ["baseline", "grpo"], "explained").lines
    assert list(curves["baseline"][0].values()) == [0.25] * 7 and curves["GRPO, n = 4"] == []


def test_the_page_is_the_template_with_the_stored_figures():
    figures = json.loads(page.FIGURES.read_text("utf-8"))
    template = page.TEMPLATE.read_text("utf-8")
    assert page.PAGE.read_text("utf-8") == page.render(template, figures)
    figures["results"]["sums"]["baseline"]["1"]["held_out"] /= 2
    assert page.PAGE.read_text("utf-8") != page.render(template, figures), "a changed figure makes the page stale"
    with pytest.raises(ValueError, match="the template asks for speed, which is no figure"):
        page.render("{{machine}} {{speed}}", figures)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--arms", "baseline,k3"], "--arms baseline,k3: there is no k3; there are baseline, pretrained, k2, "),
        (["--tasks", "chess"], "--tasks chess: there is no chess; there are sums, long, turns"),
        (["--seeds", "1,x"], "--seeds 1,x: name whole numbers"),
        ([], "--folder: name a directory"),
    ],
)
def test_a_mistake_names_what_there_is(words, line, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(words)
    assert end.value.code == 2 and line in capsys.readouterr().err
