"""The worked examples of CONTRIBUTING.md run as they stand."""

import re
from pathlib import Path

import pytest

from tests.forked_commands import run_code

ROOT = Path(__file__).parent.parent
SECTIONS = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.M)[1:]
EXAMPLES = {
    section.splitlines()[0]: "\n".join(re.findall(r"^```python\n(.*?)^```$", section, flags=re.M | re.S))
    for section in SECTIONS
    if section.startswith("Add ")
}


def test_every_kind_of_extension_has_an_example():
    wanted = {"Add a reward", "Add a KL estimator", "Add a model family", "Add an op", "Add an engine"}
    assert EXAMPLES.keys() == wanted and all("assert" in code for code in EXAMPLES.values())


@pytest.mark.slow
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs(title):
    """In a process of its own: examples register what no other test should see."""
    done = run_code(EXAMPLES[title], cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("title", EXAMPLES)
def test_files_that_an_example_names_exist(title):
    section = next(section for section in SECTIONS if section.startswith(title))
    named = re.findall(r"`((?:megappo|csrc|tests|scripts|benchmarks)/[\w/.]+)`", section)
    missing = [name for name in named if "NAME" not in name and not (ROOT / name).exists()]
    assert named and not missing
