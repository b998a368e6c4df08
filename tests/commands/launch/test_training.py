"""`megappo train` with real ranks on this machine: restarts after faults, a console that goes away, a request to stop."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from megappo.commands.launch.fork_server import reason_not_to_fork, serve
from megappo.commands.launch.restart import read_starts
from megappo.commands.runs.report import checkpoints_of, verify_checkpoint
from megappo.runtime.ending import read_end
from tests.commands.launch import fault_injection
from tests.forked_commands import start_command
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.trainer.test_resume import metrics
from tests.worlds import spawn_world

STEPS = 8
LONGEST_S = 400  # a run takes 20 s of processor time; the machine may be busy with other tests
# A save in the background is complete one step later or two, as the machine is busy: then faults meet other steps.
SYNCHRONOUS: Mapping[str, object] = {"checkpoint.asynchronous": False}
ONE_RANK = {"run.num_ranks": 1, "policy.parallel.tp": 1, "critic.parallel.pp": 1}


@dataclass
class Trained:
    """A run that has ended. faults: name -> time at which it happened."""

    folder: Path
    name: str
    code: int
    said: str
    faults: dict[str, float] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name


def train(folder: Path, name: str, faults: str, *options: str, anew: object = False, **overrides: object) -> Trained:
    """Run `megappo train` in a session of its own, whose standard output is closed after the first line of a rank: the launcher has
    printed its plan by then. anew: by a new interpreter and its own server of ranks; else launcher and ranks are forks of the
    tests' server (`forked_commands.py`)."""
    config = small_config(folder, name, steps=STEPS, **{"checkpoint.save_every": 2, "rollout.engine": "megatron", **overrides})
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    done, errors, console = (folder / f"{name}.{ending}" for ending in ("faults", "err", "console"))
    done.mkdir()
    os.mkfifo(console)
    words = ["train", str(folder / f"{name}.yaml"), *options]
    environment = os.environ | fault_injection.environment(faults, done) | {"MEGAPPO_CACHE": str(folder / f"{name}.cache")}
    with contextlib.ExitStack() as stack:
        if anew:
            # The shell opens the pipe, which waits for the reader below. A fault may signal the whole session.
            command = ["sh", "-c", 'exec "$@" >"$0"', str(console), sys.executable, "-m", "megappo", *words]
            stderr = stack.enter_context(errors.open("w"))
            started = subprocess.Popen(command, env=environment, stderr=stderr, start_new_session=True)
        else:
            forked = start_command(*words, output=console, errors=errors, environment=environment)
        with console.open("rb") as printed:
            if not any(line.startswith(b"layers:") for line in printed):
                pytest.fail(f"no rank printed: {errors.read_text()}")
        if anew:
            code: int | None = started.wait(LONGEST_S)
        else:
            forked.join(LONGEST_S)
            code = forked.exitcode
    assert code is not None, f"it has not ended: {errors.read_text()}"
    happened = {file.name: float(file.read_text()) for file in done.iterdir()}
    return Trained(folder, name, code, errors.read_text(), happened)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    write_small_task(folder)
    return folder


@pytest.fixture(scope="module")
def broken(folder: Path) -> Trained:
    """A ValueError in step 3, a kill while the checkpoint of step 6 gets its name, three crashes over that of step 4, and a kill
    in the policy's first update after them."""
    faults = ["error=1:megappo.trainer.rollout_side:score_responses:3:value_error"]
    faults += ["kill=0:megappo.checkpoint.directory:CheckpointDirectory.publish:2:kill"]
    # Of the first load of a process, in the third attempt and later: the second one is the first to load.
    faults += [f"load{n}=1:megappo.checkpoint.store:CheckpointStore.restore:1:kill:kill" for n in range(3)]
    faults += ["update=1:megappo.trainer.roles:Policy._loss_of:1:kill:load2"]
    return train(folder, "broken", " ".join(faults), "--max-restarts", "7", **SYNCHRONOUS)


@pytest.fixture(scope="module")
def reference(folder: Path, broken: Trained, ended_twice: Trained) -> None:
    """The same run without faults, one of another seed, and the rest of the run that was ended."""
    overrides = {"checkpoint.save_every": 2, "rollout.engine": "megatron"}
    whole = small_config(folder, "whole", steps=STEPS, **overrides)
    other = small_config(folder, "other_seed", steps=2, **overrides, **{"run.seed": 5})
    rest = small_config(folder, "ended_twice", steps=STEPS, **overrides, **WATCHED)
    spawn_world(run_many, 2, [(whole, False), (other, False), (rest, True)], timeout_s=LONGEST_S)


def test_a_run_gets_over_its_faults_and_is_restarted_from_its_newest_checkpoint(broken: Trained) -> None:
    assert broken.code == 0, broken.said
    restarts = re.findall(r"megappo: (rank \d[^;]*); restart (\d) of 7 from step (\d).*, [\d.]+ s after the failure", broken.said)
    assert [restart[1:] for restart in restarts] == [
        ("1", "2"),
        ("2", "4"),
        ("3", "4"),
        ("4", "4"),
        ("5", "2"),
        ("6", "2"),
    ], broken.said
    assert restarts[0][0] == "rank 1: ValueError: injected in stage score, on rank 1"
    assert restarts[1][0].startswith("rank 0 on ")
    ends = [restart[0].partition(": ")[2] for restart in restarts[1:6]]
    killed, loading = "killed by SIGKILL in checkpoint, step 6", "killed by SIGKILL in loading"
    assert ends == [killed, loading, loading, loading, "killed by SIGKILL in update_policy, step 3"]
    end = read_end(broken.run)
    assert end is not None and (end.outcome, end.step, end.code) == ("finished", STEPS, 0)


def test_a_checkpoint_that_crashes_three_attempts_is_passed_over(broken: Trained) -> None:
    starts = read_starts(broken.run / "launch" / "001")
    assert [(start.step, start.skipped) for start in starts[2:]] == [(4, ()), (4, ()), (4, ()), (2, (4,)), (2, ())]
    assert "restart 5 of 7 from step 2, passing over step 4" in broken.said
    assert (broken.run / "checkpoints" / "abandoned-step-4").is_dir(), "it is kept, as no damage was found"


def test_a_value_error_in_mid_run_has_a_traceback_and_is_no_mistake_of_the_user(broken: Trained) -> None:
    before = broken.said[: broken.said.index("restart 1 of 7")]
    assert "Traceback (most recent call last)" in before and "ValueError: injected" in before
    assert (broken.run / "launch" / "001" / "attempt-0" / "rank-1.exit").read_text().startswith("1 ")


def test_training_goes_on_where_nobody_reads_its_console(broken: Trained) -> None:
    """The pipe was closed after a rank's first line, as `| grep -m 1` does; each attempt that prints says so."""
    assert broken.said.count("standard output is lost") == 7


def test_a_killed_rank_is_noticed_in_two_seconds_and_the_next_step_is_done_in_thirty(broken: Trained) -> None:
    starts = read_starts(broken.run / "launch" / "001")
    assert starts[2].time - broken.faults["kill"] < 2
    rows = [json.loads(line) for line in (broken.run / "metrics.jsonl").read_text().splitlines()]
    again = next(row for row in rows if row["step"] == 5)  # the first one of the last attempt
    assert 0 < again["time"] - starts[-1].time < 30


HEARTBEAT_S = 3.0
WATCHED: Mapping[str, object] = {**SYNCHRONOUS, "run.timeouts": {"heartbeat_s": HEARTBEAT_S}}
RAISED = ("data", "loss", "save")


@pytest.fixture(scope="module")
def ended_twice(folder: Path) -> Trained:
    """Rank 1 is stopped in step 3, raises in the data of step 5, in a loss of step 5 and in the save of step 6. Then a request to
    stop comes in step 5, and another one while its checkpoint gets its name."""
    faults = "stop=1:megappo.trainer.rollout_side:score_responses:3:stop"
    faults += " data=1:megappo.data.loader:PromptLoader.next_step:3:assertion_error:stop"
    faults += " loss=1:megappo.trainer.roles:Policy._loss_of:1:assertion_error:data"
    faults += " save=1:megappo.checkpoint.store:encode_rng:1:assertion_error:loss"
    faults += " ask=0:megappo.trainer.rollout_side:score_responses:1:term:save"
    faults += " insist=0:megappo.checkpoint.directory:CheckpointDirectory.publish:1:insist:ask"
    return train(folder, "ended_twice", faults, "--max-restarts", "9", **WATCHED)


def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on(ended_twice: Trained) -> None:
    """RELIABILITY F2: noticed in the limit and five seconds, and nothing is left after twenty."""
    record, stopped = ended_twice.run / "launch" / "001", ended_twice.faults["stop"]
    said = r"megappo: rank 1 on \S+ hangs \(last seen in score, step 3, \d+ s\): .*; restart 1 of 9 from step 2, "
    assert re.search(said, ended_twice.said), ended_twice.said
    verdict = json.loads((record / "attempt-0" / "verdict.json").read_text())
    assert verdict["rank"] == 1 and verdict["time_ns"] / 1e9 - stopped < HEARTBEAT_S + 5
    assert read_starts(record)[1].time - stopped < 20
    assert all((record / "attempt-0" / f"rank-{rank}.stacks").stat().st_size for rank in range(2))


def test_no_rank_outlives_one_that_raises_and_its_traceback_comes_first(ended_twice: Trained) -> None:
    """RELIABILITY F3: five seconds; in data, loss and save. `broken` has the reward."""
    record = ended_twice.run / "launch" / "001"
    starts = read_starts(record)
    assert [start.step for start in starts] == [0, 2, 4, 4, 4], ended_twice.said
    assert set(RAISED) <= set(ended_twice.faults)
    for attempt in range(1, len(RAISED) + 1):
        code, time_ns, *_ = (record / f"attempt-{attempt}" / "rank-1.exit").read_text().split()
        assert code == "1" and starts[attempt + 1].time - int(time_ns) / 1e9 < 5, "all are gone before the next start"
        said = ended_twice.said.partition(f"restart {attempt} of 9")[2].partition(f"restart {attempt + 1} of 9")[0]
        errors = re.findall(r"^\[rank(\d)\]: (\w+Error: .*)", said, re.MULTILINE)  # torch names the rank on each line
        assert errors[0] == ("1", "AssertionError: injected"), said
        assert "megappo: rank 1: AssertionError: injected" in said


def test_a_second_request_during_the_save_ends_at_once_and_harms_nothing(ended_twice: Trained) -> None:
    """RELIABILITY F10."""
    assert ended_twice.code == 143 and "restart 5" not in ended_twice.said, ended_twice.said
    end = read_end(ended_twice.run)
    assert end is not None and (end.outcome, end.step, end.message) == ("failed", 4, "ended by SIGTERM")
    verified = [verify_checkpoint(ended_twice.run, step) for step in checkpoints_of(ended_twice.run)]
    assert [one.step for one in verified] == [2, 4] and all(one.is_sound for one in verified)
    assert list((ended_twice.run / "checkpoints").glob(".tmp-step-5*")), "the save was under way"


@pytest.mark.parametrize("name", ["broken", "ended_twice"])
def test_the_end_is_that_of_a_run_without_faults_to_the_last_bit(folder: Path, reference: None, name: str) -> None:
    assert metrics(folder, name) == metrics(folder, "whole")
    first, second = (folder / "runs" / one for one in ("whole", name))
    shards = sorted(path.relative_to(first) for path in first.rglob(f"step-{STEPS}/models/*/*.safetensors"))
    assert shards and all((first / shard).read_bytes() == (second / shard).read_bytes() for shard in shards)
    exported = "export/model.safetensors"
    assert (first / exported).read_bytes() == (second / exported).read_bytes()
    assert metrics(folder, "other_seed") != metrics(folder, "whole")[:2], "negative control"


def test_a_request_to_stop_of_the_whole_process_group_saves_also_with_helpers(folder: Path) -> None:
    """The worker of math_verify is in the group too, and the step in which the signal comes needs it."""
    faults = "stop=0:megappo.trainer.rollout_side:score_responses:2:term"
    reward: Mapping[str, object] = {"reward.parts": [{"name": "math_verify"}], "checkpoint.save_every": 0}
    stopped = train(folder, "stopped", faults, "--max-restarts", "1", anew=True, **ONE_RANK, **reward)
    assert stopped.code == 75, stopped.said
    end = read_end(stopped.run)
    assert end is not None and (end.outcome, end.step) == ("stopped", 2)
    assert end.signals["0"] in ("SIGTERM", "SIGUSR1"), "the rank's own, or the one that the launcher handed on"
    assert (stopped.run / "checkpoints" / "step-2" / "manifest.json").exists()
    assert "Traceback" not in stopped.said and "restart" not in stopped.said


def test_what_ranks_are_forked_from_is_looked_at(monkeypatch) -> None:
    """The run above would have said if its imports had started a thread; this process has some (torch, pytest's own)."""
    import threading

    wait = threading.Event()
    thread = threading.Thread(target=wait.wait)
    thread.start()
    try:
        assert "threads" in (reason_not_to_fork() or "")
    finally:
        wait.set()
        thread.join()


def test_the_server_of_ranks_ends_quietly_though_its_launcher_left_words_unread() -> None:
    """Its traceback once followed the last words of a run that was stopped."""
    launchers, servers = multiprocessing.Pipe()
    servers.send((1, 0))
    launchers.close()
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        assert serve(servers) is None
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, handler)


@pytest.fixture(scope="module")
def lost_replica(folder: Path) -> Trained:
    """Rank 1 of a replica of two ranks is killed when the first step's responses are half done."""
    replica: Mapping[str, object] = {
        "rollout.engine": "vllm",
        "rollout.tp": 2,
        "rollout.kv_cache_gib": 0.03,
        "trainer.eval_before": False,
    }
    fault = "kill=1:megappo.rollout.vllm_engine:VllmEngine.poll:4:kill"
    return train(folder, "lost_replica", fault, "--max-restarts", "0", **replica)


def test_a_killed_rank_of_a_replica_in_mid_generation_ends_all_ranks_and_is_named(lost_replica: Trained) -> None:
    """Its peer waits for it inside the engine; nobody waits for the limit of an exchange."""
    assert lost_replica.code not in (0, 75), lost_replica.said
    assert "megappo: rank 1 ended first, killed by SIGKILL in generate, step 1; what it said is above" in lost_replica.said
    last_words = (lost_replica.folder / "lost_replica.err").stat().st_mtime
    assert last_words - lost_replica.faults["kill"] < 10
    assert not list((lost_replica.run / "checkpoints").glob("step-*")), "it was in its first step"
