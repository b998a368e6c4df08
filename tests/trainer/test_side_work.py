"""Runs of one rank whose disk is full for two steps, whose data changes before a resume, and whose environment holds secrets."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.reliability.compare import MEASURED
from tests.trainer.small_run import small_config, write_small_task
from tests.worlds import spawn_world

ONE_RANK = {
    "run.num_ranks": 1,
    "policy.parallel.tp": 1,
    "critic.parallel.pp": 1,
    "rollout.engine": "megatron",
    "data.prompts_per_step": 8,
    "algorithm.mini_batch_size": 8,
    "trainer.eval_before": False,
    "checkpoint.save_every": 2,
    "checkpoint.keep_last": 9,
    "telemetry.trajectories_every": 1,
}
SECRETS = {"HF_PASS": "s3cret-1", "MEGAPPO_PAT": "s3cret-2", "TORCH_BEARER": "s3cret-3", "VLLM_PASSPHRASE": "s3cret-4"}
SECRETS |= {"HF_ENDPOINT": "https://me:s3cret-5@host.example", "PIP_INDEX_URL": "https://s3cret-6@host/simple"}
FULL = (2, 3)  # steps at which the disk is full


def train(config: dict[str, Any], *, resume: bool = False) -> None:
    from megappo.commands.plan.run import plan_run
    from megappo.config.loading import load_config
    from megappo.trainer import main

    path = Path(config["run"]["output_dir"]).parent / f"{config['run']['name']}.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_config(str(path), [])
    main.train(loaded, plan_run(loaded, 1, "cpu", resume=resume).data, resume=resume)


def refusal(config: dict[str, Any]) -> str:
    try:
        train(config, resume=True)
    except ValueError as error:
        return str(error)
    return ""


def disk_that_is_full_at(steps: tuple[int, ...]) -> Any:
    """A log around whose writes no file can grow beyond a few bytes more than metrics.jsonl has."""
    from megappo.telemetry.runlog import RunLog

    class FullDisk(RunLog):
        def _when_full(self, step: int, write: Any) -> None:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if step in steps:
                resource.setrlimit(resource.RLIMIT_FSIZE, ((self._root / "metrics.jsonl").stat().st_size + 40, hard))
            try:
                write()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        def step(self, metrics: Any, step: int, total_steps: int, timeline: Any = ()) -> None:
            self._when_full(step, lambda: RunLog.step(self, metrics, step, total_steps, timeline))

        def trajectories(self, step: int, rows: Any) -> None:
            rows = [{**row, "response": "\ud800" * 1000} for row in rows]  # half a pair, and no room for it
            self._when_full(step, lambda: RunLog.trajectories(self, step, rows))

    return FullDisk


def runs(rank: int, folder: Path) -> dict[str, str]:
    """Texts of refusals by name; the rest is in the run directories."""
    from unittest import mock

    from megappo.commands.launch import submit
    from megappo.config.loading import load_config
    from megappo.rewards import rules
    from megappo.trainer import main, run_facts
    from megappo.trainer.prepare import reward_parts

    said: dict[str, str] = {}
    warned: list[str] = []
    train(small_config(folder, "clean", steps=4, **ONE_RANK))
    limited = small_config(folder, "limited", steps=4, **ONE_RANK)
    with mock.patch.object(main, "RunLog", disk_that_is_full_at(FULL)):
        train(limited)
    with mock.patch("sys.argv", ["megappo", "launch", "--token", "s3cret-7", "--sbatch=--export=HF_TOKEN=s3cret-8"]):
        submit.record(load_config(str(folder / "limited.yaml")), folder / "runs" / "limited")

    longer = small_config(folder, "limited", steps=5, **ONE_RANK)
    data = folder / "data" / "train.jsonl"
    right = data.read_text()
    wrong = "".join(json.dumps(json.loads(line) | {"answer": "7"}) + "\n" for line in right.splitlines())
    data.write_text(wrong)
    said["data"] = refusal(longer)
    data.write_text(right)
    said["format"] = refusal(small_config(folder, "limited", steps=5, **ONE_RANK, **{"data.prompt_suffix": " "}))
    with (
        mock.patch.object(reward_parts, "hash_of_code", lambda name: rules.hash_of_code(name) if name == "has_eos" else "changed"),
        mock.patch.object(run_facts.logger, "warning", lambda text, *values: warned.append(text % values)),
    ):
        said["code"] = refusal(longer)
    said["warned"] = "\n".join(warned)
    return said


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("side")
    write_small_task(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        (said,) = spawn_world(runs, 1, folder)
    yield folder / "runs", said


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_full_disk_loses_records_and_nothing_of_the_training(done: tuple[Path, dict[str, str]]) -> None:
    root, _ = done
    clean, limited = (records(root / name / "metrics.jsonl") for name in ("clean", "limited"))
    assert [row["step"] for row in clean] == [1, 2, 3, 4] and [row["step"] for row in limited] == [1, 4, 5]
    assert not any(row["telemetry/lost_records"] for row in clean)
    assert limited[1]["telemetry/lost_records"] >= 2 * len(FULL), "records and trajectories"
    same = [name for name in clean[3] if not name.startswith((*MEASURED, "telemetry/", "rollout/push"))]
    assert len(same) > 40 and {name: clean[3][name] for name in same} == {name: limited[1][name] for name in same}
    shards = sorted(
        path.relative_to(root / "clean") for path in (root / "clean" / "checkpoints" / "step-4").rglob("models/*/*.safetensors")
    )
    assert shards
    for shard in shards:
        assert (root / "clean" / shard).read_bytes() == (root / "limited" / shard).read_bytes()
    assert sorted(path.name for path in (root / "limited" / "trajectories").iterdir()) == [
        f"step_00000{step}.jsonl" for step in (1, 4, 5)
    ]


def test_other_data_of_the_same_length_is_not_resumed(done: tuple[Path, dict[str, str]]) -> None:
    _, said = done
    text = said["data"]
    assert "was written with data.train = " in text and text.count("train.jsonl (SHA-256 ") == 2
    assert "restore it, or start a new run" in text and "\n" not in text
    assert 'data.prompt_suffix = "", this run has " "' in said["format"]


def test_rewards_of_other_code_are_resumed_and_told(done: tuple[Path, dict[str, str]]) -> None:
    _, said = done
    assert said["code"] == "" and said["warned"] == (
        "the code of the reward rule exact_match has changed since step-4: scores may not be comparable"
    )


def test_no_secret_is_in_the_run_directory(done: tuple[Path, dict[str, str]]) -> None:
    root, _ = done
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) > 30 and (root / "limited" / "launch" / "001" / "launch.json").is_file()
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    shown = json.loads((root / "limited" / "launch" / "001" / "launch.json").read_text())
    assert shown["environment"]["HF_PASS"] == "(hidden)" and shown["environment"]["HF_ENDPOINT"] == "https://(hidden)@host.example"
    assert shown["command"][-2:] == ["(hidden)", "--sbatch=--export=HF_TOKEN=(hidden)"]


def two_copies(rank: int, folder: Path) -> str:
    from megappo.trainer.run_facts import require_equal_data

    same = {"train": {"path": "t.jsonl", "sha256": "a"}, "eval": None, "evaluations": {}, "ptx": None, "tokens": "x"}
    code = {"code": {"rewards/mine.py": "c"}}
    facts = {"data": same, "reward": code, "commits": {"policy": "d"}, "environment": {"code": "f"}}
    require_equal_data(facts)
    said = []
    others = (
        {"data": {**same, "train": {"path": "t.jsonl", "sha256": "b"}}},
        {"data": {**same, "tokens": "y"}},
        {"reward": {"code": {"rewards/mine.py": "d"}}},
        {"commits": {"policy": "e"}},
        {"environment": {"code": "g"}},
        {"environment": {"code": "f", "max_turns": 3}},
        {"data": {**same, "format": {"prompt_key": "question"}}},
    )
    for other in others:
        try:
            require_equal_data({**facts, **other} if rank == 1 else facts)
        except ValueError as error:
            said.append(str(error))
    return "\n".join(said)


def test_ranks_that_read_different_copies_are_refused_on_all(tmp_path: Path) -> None:
    first, second = spawn_world(two_copies, 2, tmp_path, timeout_s=60)
    assert first == second
    assert "data.train: rank 0 has t.jsonl (SHA-256 a), rank 1 has t.jsonl (SHA-256 b); put one copy on a file system" in first
    assert 'data.train as prompts (tokens): rank 0 has "x", rank 1 has "y"' in first
    assert 'reward: code of rewards/mine.py: rank 0 has "c", rank 1 has "d"' in first
    assert "policy.model's commit: rank 0 has " in first and len(first.splitlines()) == 7
    assert first.count("keys of data, evaluations or rollout.environment: rank 0 has others than rank 1; put one copy") == 2
    assert "rollout.environment's code: rank 0 has " in first


def test_the_limit_is_that_of_a_process(tmp_path: Path) -> None:
    """Negative control: Python ignores SIGXFSZ, so a write beyond the limit is an error and not the end of the process."""
    import signal

    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN and os.name == "posix"
