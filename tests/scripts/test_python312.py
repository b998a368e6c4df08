"""Python 3.12, which GPU containers ship: everything imports, doctor answers and PPO runs, on the CPU.

In the environment of scripts/setup_cuda_env.sh, so with the CUDA build of torch on a machine that may have no GPU.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from tests.commands.launch.test_ppo_on_slurm import write_quickstart
from tests.cuda_environment import ROOT, cuda_environment

# Every file of the package; the library beside them is no Python module. Then the doctor, in the process that has imported it all.
IMPORTS_AND_DOCTOR = """
import importlib, pathlib, sys, megappo
root = pathlib.Path(megappo.__file__).parent
files = [p.relative_to(root) for p in sorted(root.rglob("*.py")) if p.stem != "__main__"]
names = [".".join(("megappo", *p.with_suffix("").parts)) for p in files]
for name in names:
    importlib.import_module(name.removesuffix(".__init__"))
print(len(names), "modules", flush=True)
from megappo.commands import cli
sys.exit(cli.main(["doctor"]))
"""


def run(*command: str) -> str:
    """Standard output of a program of the environment, run in its copy of this checkout without GPUs; it must end well."""
    folder = cuda_environment()
    # The environment's own megappo, not that of the tests.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    program, *arguments = command
    done = subprocess.run([folder / "bin" / program, *arguments], cwd=folder / "src", env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def python312() -> None:
    version = run("python", "-c", "import sys; print(*sys.version_info[:2])").split()
    if version != ["3", "12"]:
        pytest.skip(f"the environment has Python {'.'.join(version)} (MEGAPPO_CUDA_PYTHON)")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(folder with a model and data, overrides of the quickstart: two steps from them)"""
    folder = tmp_path_factory.mktemp("quickstart")
    write_quickstart(folder)
    return folder, [
        f"run.output_dir={folder}",
        f"policy.model={folder}/model",
        f"data.tokenizer={folder}/model/tokenizer.model",
        f"data.train={folder}/data/train.jsonl",
        f"data.eval={folder}/data/eval.jsonl",
        "data.prompts_per_step=16",
        # vLLM's GPU wheel has no CPU.
        "rollout.engine=megatron",
        "algorithm.mini_batch_size=32",
        "trainer.steps=2",
        "trainer.eval_every=2",
        "critic.warmup=null",
        "policy.optimizer.warmup_steps=0",
        "critic.optimizer.warmup_steps=0",
    ]


def test_every_module_imports_and_doctor_finds_a_machine_that_runs_ppo() -> None:
    files = [path for path in (ROOT / "megappo").rglob("*.py") if path.stem != "__main__"]
    text = run("python", "-W", "ignore", "-c", IMPORTS_AND_DOCTOR)
    assert f"{len(files)} modules\n" in text and len(files) > 100
    assert "PPO can run on this machine" in text and "Python 3.12" in text


def test_two_steps_of_ppo_on_two_ranks(quickstart: tuple[Path, list[str]]) -> None:
    """Forks of one process, as `--max-restarts` has them: Python 3.12 warns of those that have threads."""
    folder, overrides = quickstart
    run("megappo", "train", "configs/quickstart.yaml", "--max-restarts", "1", *overrides)
    lines = [json.loads(line) for line in (folder / "ppo/metrics.jsonl").read_text().splitlines()]
    losses = [line["critic/loss"] for line in lines if "critic/loss" in line]
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
