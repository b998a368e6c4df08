"""Trials that take their world down: what was measured is kept, the others go on, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megappo.commands.tune import trials
from megappo.commands.tune.trials import (
    Failed,
    Measured,
    Trial,
    outcome_file,
    ranks_here,
    read_outcome,
    run_trials,
    write_outcome,
    write_trial,
)
from megappo.config.loading import validated
from megappo.config.schema import TrainConfig

STUB = Path(__file__).with_name("stub_rank.py")
ROOT = Path(__file__).parents[3]
CONFIG = validated({"policy": {"model": "none"}, "data": {"train": "none"}}, TrainConfig)


def write_trials(folder, *names):
    for name in names:
        write_trial(folder, name, Trial(config=CONFIG, role="policy", label=name, samples=1, prompt_tokens=1, response_tokens=1))
    return list(names)


def start_stubs(folder, names):
    """Two ranks without a world; the first that fails ends the other, and gives the exit code."""
    environments = [os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)} for rank in range(2)]
    command = [sys.executable, str(STUB), str(folder), *names]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for environment in environments]
    while not any(codes := [rank.poll() for rank in ranks]) and None in codes:
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
        rank.wait()
    code = next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code


def test_a_trial_that_takes_its_world_down_does_not_take_the_others_along(tmp_path, capsys):
    names = write_trials(tmp_path, "a", "b-fails", "c", "d-killed", "e")
    assert run_trials(tmp_path, names, start_stubs) == 0
    starts = [line.split() for line in (tmp_path / "starts").read_text().splitlines()]
    assert starts == [names, names[2:], names[4:]], "one start for each trial that failed"
    found = [read_outcome(tmp_path, name) for name in names]
    assert [type(one) for one in found] == [Measured, Failed, Measured, Failed, Measured]
    assert found[1].reason == "rank 1: MemoryError: of this rank" and "killed by SIGKILL" in found[3].reason
    assert "  b-fails: failed: rank 1: MemoryError: of this rank\n" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.world")) and not list(tmp_path.glob("*.partial"))
    assert run_trials(tmp_path, names, start_stubs) == 0 and len((tmp_path / "starts").read_text().splitlines()) == 3


def test_a_world_that_ends_outside_of_a_trial_blames_none(tmp_path):
    names = write_trials(tmp_path, "a-nowhere", "b")
    assert run_trials(tmp_path, names, start_stubs) == 1
    assert [read_outcome(tmp_path, name) for name in names] == [None, None]
    assert len((tmp_path / "starts").read_text().splitlines()) == 1, "the next one would end in the same way"


def test_a_job_that_is_ended_blames_none(tmp_path):
    names = write_trials(tmp_path, "a", "b-preempted", "c")
    assert run_trials(tmp_path, names, start_stubs) == 143
    assert [type(read_outcome(tmp_path, name)) for name in names] == [Measured, type(None), type(None)]
    assert not list(tmp_path.glob("*.world"))


@pytest.mark.parametrize("code", [130, 143])
def test_the_users_end_is_no_trials_failure(tmp_path, monkeypatch, code):
    names = write_trials(tmp_path, "a", "b")

    def start_ranks(num_ranks, arguments, module):
        assert (num_ranks, module, arguments) == (2, "megappo.commands.tune.rank", [str(tmp_path), "a", "b"])
        write_outcome(tmp_path, "a", Measured(forward_s=1.0, update_s=None))
        (tmp_path / "a.world" / "running").write_text("b")
        return code

    monkeypatch.setattr(trials, "start_ranks", start_ranks)
    with pytest.raises(KeyboardInterrupt):
        run_trials(tmp_path, names, ranks_here(2))
    assert read_outcome(tmp_path, "b") is None and not (tmp_path / "a.world").exists()
    assert isinstance(read_outcome(tmp_path, "a"), Measured)


def test_a_reason_is_one_line_of_bounded_length(tmp_path):
    """As torch says it: one sentence, and advice."""
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. "
    text = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n' + said + "advice " * 100
    failure = trials.Failure(3, "node", 1, text)
    reason = trials.reason_of(failure, 1)
    assert reason.startswith("rank 3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert len(reason) < 260 and "\n" not in reason
    assert trials.reason_of(None, 139) == "a rank ended (killed by SIGSEGV)"
    victim = trials.Failure(0, "node", None, text.replace(said, "RuntimeError: Connection closed by peer"))
    assert trials.reason_of(victim, 137) == "a rank ended (killed by SIGKILL)", "torchrun saw it, and the victim's word is second"


def test_outcomes_are_told_apart(tmp_path):
    for outcome in (Measured(forward_s=1.0, update_s=None), Measured(forward_s=1.0, update_s=2.0), Failed(reason="no room")):
        write_outcome(tmp_path, "a", outcome)
        assert read_outcome(tmp_path, "a") == outcome
    outcome_file(tmp_path, "a").unlink()
    assert read_outcome(tmp_path, "a") is None
