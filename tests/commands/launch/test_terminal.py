"""Ctrl-C at a terminal, and SIGTERM to the whole process group, where real vLLM generates on two ranks: the run saves and ends.

vLLM's ranks share memory, for which Python starts its resource tracker, and that start lets INT and TERM through again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from megappo.commands.runs.report import checkpoints_of, verify_checkpoint
from megappo.runtime.ending import Ended, read_end
from tests.commands.launch import fault_injection
from tests.forked_commands import start_command
from tests.trainer.small_run import small_config, write_small_task

pytestmark = pytest.mark.slow  # starts ranks without `spawn_world`

LONGEST_S = 400
CTRL_C = b"\x03"
KEYS = {
    "rollout.tp": 2,
    "rollout.kv_cache_gib": 0.03,
    "trainer.eval_every": 1,
    "trainer.eval_before": False,
    "checkpoint.save_every": 1,
    "checkpoint.asynchronous": False,
}


@dataclass(frozen=True)
class Stop:
    """A request to stop when this call begins in rank 0. key: what is typed; None for SIGTERM to the group. step: the last one."""

    where: str
    command: tuple[str, ...]
    step: int
    key: bytes | None = CTRL_C


# One run, that each goes on with.
STOPS = {
    "vLLM's start": Stop("vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model:1", ("train",), 1),
    "generation": Stop("megappo.rollout.vllm_engine:VllmEngine.poll:4", ("launch", "--local", "--resume"), 2),
    "evaluation": Stop("megappo.trainer.evaluation:Evaluator.run:1", ("train", "--resume"), 3),
    "a save": Stop("megappo.checkpoint.directory:CheckpointDirectory.publish:1", ("train", "--resume"), 5, key=None),
}


@dataclass(frozen=True)
class Stopped:
    code: int | None
    said: str
    end: Ended | None
    asked: bool


def run_at_terminal(folder: Path, name: str, stop: Stop) -> Stopped:
    """Run the command in the foreground of a terminal of its own, and ask it to stop."""
    done = folder / f"{name}.done"
    done.mkdir()
    ours, theirs = os.openpty()
    environment = os.environ | fault_injection.environment(f"asked=0:{stop.where}:pause", done)
    terminal = os.ttyname(theirs)
    process = start_command(*stop.command, folder / "run.yaml", output=terminal, errors=terminal, environment=environment)
    said: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(ours, said))
    reader.start()
    until = time.monotonic() + LONGEST_S
    while process.is_alive() and not (done / "asked").exists() and time.monotonic() < until:
        time.sleep(0.02)
    asked = process.is_alive()
    if asked and stop.key is not None:
        os.write(ours, stop.key)
    elif asked and process.pid is not None:
        os.killpg(process.pid, signal.SIGTERM)
    process.join(LONGEST_S)
    code = process.exitcode
    process.kill()
    os.close(theirs)
    reader.join()
    os.close(ours)
    return Stopped(code, b"".join(said).decode(), read_end(folder / "runs" / "run"), asked)


def read_all(descriptor: int, said: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # EIO: no process has the terminal any more
        while text := os.read(descriptor, 4096):
            said.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    write_small_task(folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(small_config(folder, "run", steps=20, **KEYS)))
    return folder


@pytest.mark.parametrize("where", STOPS)
def test_a_request_to_stop_saves_and_ends_without_a_traceback(folder: Path, where: str) -> None:
    found, step = run_at_terminal(folder, where, STOPS[where]), STOPS[where].step
    assert found.asked and found.code == 75, found.said
    assert found.end is not None and (found.end.outcome, found.end.step) == ("stopped", step), found.said
    assert "Traceback" not in found.said and "KeyboardInterrupt" not in found.said, found.said
    assert checkpoints_of(folder / "runs" / "run")[-1] == step
    assert verify_checkpoint(folder / "runs" / "run", step).is_sound
