"""What a run needs of its machines: a rank that lacks something is named on all ranks, and none waits for another."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megappo.commands import cli
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.rewards.base import PreparedPart, RewardError
from megappo.trainer import preflight
from megappo.trainer.preflight import require_preflight
from megappo.trainer.prepare import code_rewards
from tests.commands.plan.checkpoints import write_run
from tests.worlds import spawn_world

CODE = "reward: {parts: [{code: {tests_key: tests}}]}\n"


def server(is_down: bool) -> dict[str, PreparedPart]:
    def ask(budget_s: float) -> None:
        if is_down:
            raise RewardError("reward rm: http://localhost:1: connection refused")

    return {"rm": PreparedPart(None, ask=ask)}


def cases(rank: int, path: str, elsewhere: str) -> dict[str, Any]:
    """Case -> what a rank says; both ranks meet the same cases."""
    plain, code = load_config(path), load_config(path, ["reward.parts=[{code: {tests_key: tests}}]"])
    copied = load_config(path, [f"checkpoint.remote=file://{elsewhere}/ok"])
    blocked = load_config(path, [f"checkpoint.remote=file://{elsewhere}/file/below"])
    opened: list[str] = []

    def outcome(config: Any, *, data_down: bool = False, set_down: bool = False, isolated: bool = True) -> str:
        sets = (SimpleNamespace(reward_parts=server(set_down)),)
        data: Any = SimpleNamespace(reward_parts=server(data_down), evaluations=sets)
        reason = None if isolated else "unshare: Operation not permitted"
        opens = mock.patch.object(preflight, "open_storage", side_effect=lambda url: (opened.append(url), plain_open(url)))
        with mock.patch.object(code_rewards, "reason_against", lambda limits: reason), opens:
            try:
                require_preflight(config, data, resume=False)
            except ConfigError as error:
                return str(error)
        return "ready"

    plain_open = preflight.open_storage
    return {
        "nothing lacks": outcome(plain),
        "isolation": outcome(code, isolated=rank == 0),
        "isolated": outcome(code),
        "server": outcome(plain, data_down=rank == 1),
        "server of an evaluation": outcome(plain, set_down=rank == 1),
        "storage": outcome(copied),
        "storage refused": outcome(blocked),
        "opened": list(opened),
    }


def test_what_one_rank_lacks_is_said_on_all_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = write_run(tmp_path)
    first, second = spawn_world(cases, 2, str(path), str(tmp_path))
    opened = first.pop("opened"), second.pop("opened")
    assert first == second, "all ranks raise, or none"
    assert first["nothing lacks"] == first["isolated"] == first["storage"] == "ready"
    assert first["isolation"].startswith("rank 1: reward.parts.0.code.i_accept_no_isolation = false: no program can be isolated")
    for case in ("server", "server of an evaluation"):
        assert first[case].startswith("rank 1: reward.parts: reward rm: http://localhost:1: connection refused")
    assert first["storage refused"].startswith("rank 0: checkpoint.remote = ")
    assert [len(urls) for urls in opened] == [2, 0], "rank 0 copies, and asks the storage alone"


def test_a_plan_leaves_the_storage_of_copies_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, there = write_run(tmp_path), tmp_path / "elsewhere"
    with mock.patch.dict(os.environ):
        assert cli.main(["plan", str(path), f"checkpoint.remote=file://{there}"]) == 0, capsys.readouterr().err
    assert not there.exists()
    capsys.readouterr()
    assert cli.main(["plan", str(path), "checkpoint.remote=nosuch://bucket"]) == 2
    assert 'checkpoint.remote = "nosuch://bucket": cannot be used: Protocol not known' in capsys.readouterr().err
