"""scripts/first_hour.sh: docs/own_task.md and the mistakes of a newcomer, from a wheel in an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_step_of_the_first_hour_passes() -> None:
    done = subprocess.run([ROOT / "scripts/first_hour.sh"], capture_output=True, text=True, errors="replace")
    print(done.stdout, done.stderr)
    steps = [line.split(" ")[0] for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert done.returncode == 0 and len(steps) > 20 and set(steps) == {"PASS"}


def test_a_step_that_sees_something_else_fails(tmp_path: Path) -> None:
    """Negative control: the script's own function."""
    script = (ROOT / "scripts/first_hour.sh").read_text("utf-8")
    step = script[script.index("step() {") : script.index("# mistake NAME")]
    for call, failed in (("0 yes echo yes", 0), ("0 no echo yes", 1), ("2 yes echo yes", 1), ("0 yes echo yes; echo Traceback", 1)):
        code = call.split(" ")[0]
        command = f"step name {code} {call.split(' ')[1]} bash -c '{' '.join(call.split(' ')[2:])}'"
        done = subprocess.run(
            ["bash", "-euc", f"folder={tmp_path} failed=0\n{step}\n{command}\nexit $failed"], capture_output=True, text=True
        )
        assert done.returncode == failed, (call, done.stdout, done.stderr)
