"""The README's line for GPUs, as pip reads it: by the pip of a fresh Python 3.11 environment (23.2) and by the newest.

`pip install --dry-run` prepares megappo's metadata by its build backend and resolves what the line asks for beside what is here;
nothing is installed. Without pyproject.toml pip 23.2 takes a legacy way that builds in isolation, so the way taken is looked at.
One more resolves everything anew, as for an empty environment: 3 GB where the index has no metadata beside its files. Each runs
once for an environment, lists and pip.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from megappo.runtime.versions import EXACT
from scripts.gpu_stack.rows import Check, Skipped, Wrong, run

GROUP = "pip_resolution"
ROOT = Path(__file__).resolve().parents[2]
OLD = "23.2.1"
CONSTRAINTS = "requirements/constraints-cuda.txt"
EXTRAS = ("vllm,math", "vllm,gpu,math")
MODERN = "Preparing editable metadata (pyproject.toml)"


@cache
def pip_folder(version: str) -> str:
    """A folder that holds this version of pip alone ("" for the newest); this environment keeps its own."""
    folder = tempfile.mkdtemp()
    wanted = f"pip=={version}" if version else "pip"
    done = _pip("", "install", "--upgrade", "--no-deps", "--target", folder, wanted)
    if done.returncode != 0:
        raise Skipped(f"{wanted} is not to be had: {last_line(done.stderr)}")
    return folder


def pip_name(folder: str) -> str:
    """As `pip --version` calls the pip of a `pip_folder`."""
    (facts,) = Path(folder).glob("pip-*.dist-info")
    return f"pip {facts.name.removeprefix('pip-').removesuffix('.dist-info')}"


def _pip(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "NVTE_FRAMEWORK": "pytorch"}
    if folder:
        environ["PYTHONPATH"] = folder
    return subprocess.run([sys.executable, "-m", "pip", *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def fault(returncode: int, output: str, errors: str) -> str:
    """Fault that a dry run of the line shows; "" if none."""
    if returncode != 0:
        said = [line for line in errors.splitlines() if line.startswith("ERROR") or "error:" in line]
        return said[0] if said else last_line(errors)
    if MODERN not in output:
        return "pip takes the legacy way, which ignores --no-build-isolation: pyproject.toml is missing or names no build backend"
    foreign = re.search(r"Would install.*\b((?:torch|vllm|megatron-core)-\S+)", output)
    return f"pip would install {foreign[1]} in place of the tested version" if foreign else ""


def resolved(output: str) -> dict[str, str]:
    """Distribution -> version, without its local part, of what pip would install."""
    would = re.search(r"^Would install (.*)$", output, re.MULTILINE)
    pairs = [item.rpartition("-") for item in (would[1].split() if would else [])]
    return {name.lower().replace("_", "-"): version.partition("+")[0] for name, _, version in pairs}


def resolution_fault(versions: Mapping[str, str]) -> str:
    """Fault of what an empty environment would get; "" if none. Another torch would replace that of the README's first line."""
    lacks = [name for name in ("torch", "vllm", "megatron-core") if name not in versions]
    if lacks:
        return f"pip would not install {', '.join(lacks)}"
    return "" if versions["torch"] == EXACT["torch"] else f"pip would install torch {versions['torch']}, not {EXACT['torch']}"


def once(what: str, name: str, resolve: Callable[[], str]) -> str:
    """Run `resolve` once for this environment, the lists and a pip's `name`; later return what it said. What fails is run again."""
    files = ("setup.py", "pyproject.toml", "megappo/runtime/versions.py", CONSTRAINTS)
    installed = sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))
    facts = "\n".join([what, name, *((ROOT / file).read_text() for file in files), *installed])
    mark = Path(sys.prefix, f".megappo-resolved-{hashlib.sha256(facts.encode()).hexdigest()[:16]}")
    if not mark.exists():
        mark.write_text(resolve())
    return mark.read_text()


def anew() -> str:
    folder = pip_folder("")
    name = pip_name(folder)

    def resolve() -> str:
        flags = ("--dry-run", "--ignore-installed", "--no-build-isolation", "-c", CONSTRAINTS)
        done = _pip(folder, "install", *flags, "-e", f".[{EXTRAS[0]}]")
        if done.returncode != 0:
            raise Wrong(fault(done.returncode, done.stdout, done.stderr))
        versions = resolved(done.stdout)
        wrong = resolution_fault(versions)
        if wrong:
            raise Wrong(wrong)
        told = ", ".join(f"{key} {versions[key]}" for key in ("torch", "vllm", "megatron-core", "transformers"))
        return f"{name}: {len(versions)} distributions, {told}"

    return once("anew", name, resolve)


def line(version: str, extras: str) -> Callable[[], str]:
    def resolve() -> str:
        folder = pip_folder(version)
        # The flags of the README's line; the versions that are tested together are given as the environment was made with them.
        flags = ("--dry-run", "--no-build-isolation", "-c", CONSTRAINTS)
        done = _pip(folder, "install", *flags, "-e", f".[{extras}]")
        wrong = fault(done.returncode, done.stdout, done.stderr)
        if wrong:
            raise Wrong(wrong)
        would = re.search(r"Would install (.*)", done.stdout)
        others = [name for name in (would[1].split() if would else []) if not name.startswith("megappo-")]
        return f"{pip_name(folder)}: " + (f"would add {', '.join(others)}" if others else "nothing is missing")

    return lambda: once(extras, f"pip {version}" if version else pip_name(pip_folder("")), resolve)


CHECKS: Sequence[Check] = (
    *((f"pip {version or 'newest'}, [{extras}]", line(version, extras)) for version in (OLD, "") for extras in EXTRAS),
    (f"pip newest, [{EXTRAS[0]}], all anew", anew),
)

if __name__ == "__main__":
    run(GROUP, CHECKS)
