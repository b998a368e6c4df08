"""The newest Megatron-core of the tested range trains as the pinned one: the first steps of the golden curves in every layout, and
every family with experts or delta nets as transformers computes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megappo.parallel.layout import ParallelLayout
from megappo.runtime.versions import range_of
from tests.models import moe_worlds
from tests.models.checkpoints import write_checkpoint
from tests.models.moe_worlds import Job
from tests.models.test_moe import gradient_error
from tests.parity.replay import distance_to_golden
from tests.parity.test_replay import CURVE_TOLERANCE
from tests.worlds import spawn_world

NEWEST = "0.19.2"
ROOT = Path(__file__).resolve().parents[2]
SP = {"tp": 2, "sequence_parallel": True}
EXPERTS, DENSE = ParallelLayout(2, **SP, ep=2), ParallelLayout(2, **SP)
# Beside the llama of the golden curves; the other families' layers are its own.
WITHOUT_EXPERTS = ("gemma3", "qwen3_5", "ministral3_tied")
JOBS = [Job(case, EXPERTS) for case in moe_worlds.CASES]
JOBS += [Job(f"dense {case}", DENSE, coefficient=0.0) for case in WITHOUT_EXPERTS]


def worst_of_families() -> dict[str, float]:
    """Job -> largest difference of its log-probs and gradients to those of transformers."""
    batch = moe_worlds.example_batch()
    with tempfile.TemporaryDirectory() as name:
        models = {case: moe_worlds.write_checkpoint(Path(name), case) for case in moe_worlds.CASES}
        models |= {f"dense {case}": write_checkpoint(Path(name, f"dense {case}"), case) for case in WITHOUT_EXPERTS}
        expected = {job: moe_worlds.reference(models[job.case], batch, job.coefficient) for job in JOBS}
        ranks = spawn_world(moe_worlds.run_world, 2, name, JOBS, [])
    found = {}
    for job, *results in zip(JOBS, *ranks, strict=True):
        far = max(float((result["logprob"] - expected[job]["logprob"]).abs().max()) for result in results)
        found[str(job)] = max(far, *gradient_error(results, expected[job]["gradients"]).values())
    return found


def report() -> None:
    print(json.dumps([distance_to_golden(steps=4), worst_of_families()]))


def test_the_newest_megatron_core_is_on_the_golden_curves_and_runs_every_family(tmp_path: Path) -> None:
    """Its wheels ask for Python 3.12; what a CPU run imports of them is Python that 3.11 reads."""
    wheel = [
        "--python-version",
        "3.12",
        "--only-binary",
        ":all:",
        "--no-deps",
        "--ignore-requires-python",
        "--target",
        str(tmp_path),
        f"megatron-core=={NEWEST}",
    ]
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", *wheel], check=True, timeout=300)
    assert range_of("megatron-core").endswith(f"<0.{int(NEWEST.split('.')[1]) + 1}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    used = "import megatron.core as core; print(core.__version__)"
    run = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", used], **run).stdout.split()[-1] == NEWEST
    ask = "from tests.parity.test_newest_megatron import report; report()"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", ask], **run, timeout=900)
    assert found.returncode == 0, found.stdout[-3000:]
    of_curves, of_families = json.loads(found.stdout.splitlines()[-1])
    assert of_curves <= CURVE_TOLERANCE
    assert of_families.keys() == set(map(str, JOBS)) and max(of_families.values()) < 1e-5, of_families
