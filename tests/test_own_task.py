"""docs/own_task.md: a user copies its files and commands, and they work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.trainer.small_run import write_small_task

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "own_task.md").read_text("utf-8")
STEPS = 2

pytestmark = pytest.mark.slow  # starts ranks without `spawn_world`


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def commands() -> list[str]:
    """The indented lines of the page, without their comments."""
    lines = (line.split("  #")[0].strip() for line in PAGE.splitlines() if line.startswith("    "))
    return [line for line in lines if line[:7] in ("megappo", "python ")]


def test_the_files_of_the_page_train_a_model_that_its_commands_show(tmp_path: Path) -> None:
    write_small_task(tmp_path)
    shutil.copytree(tmp_path / "model", tmp_path / "runs" / "quickstart" / "sft" / "export")
    (tmp_path / "reward.py").write_text(block("python"))
    config = yaml.safe_load(block("yaml"))
    assert config["trainer"]["steps"] > STEPS and block("json").strip()[0] == "{"
    config["trainer"]["steps"] = STEPS
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    first, *others = commands()
    names = [line.split()[1] for line in others]
    assert names == ["plan", "train", "trajectories", "generate", "export"]
    # `megappo` and `python` of the environment that is activated on the page.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = {}
    for line in (first, *others):
        line = re.sub(r"^python ", f"{sys.executable} ", re.sub(r"^megappo ", f"{sys.executable} -P -m megappo ", line))
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        said[line.split(" megappo ")[-1].split()[0]] = done.stdout
    assert len((tmp_path / "task.jsonl").read_text().splitlines()) == 400
    assert f"{STEPS}/{STEPS}" in said["train"] and f"samples of step {STEPS}" in said["trajectories"]
    assert said["generate"].strip()
    assert (tmp_path / "close-model" / "model.safetensors").exists()
