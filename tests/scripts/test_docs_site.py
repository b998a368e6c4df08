"""The documentation is a site: built strictly, its picture drawn from the code that it shows."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import draw_architecture
from scripts.draw_architecture import LOOP, stages_of

ROOT = Path(__file__).parent.parent.parent


def test_the_picture_of_a_step_is_the_code_s():
    drawn = draw_architecture.draw(stages_of(LOOP.read_text(encoding="utf-8")))
    assert draw_architecture.PICTURE.read_text(encoding="utf-8") == drawn


def test_the_stages_are_the_designs_eight():
    stages = stages_of(LOOP.read_text(encoding="utf-8"))
    assert [stage.number for stage in stages] == list(range(1, 9))
    assert ("PromptSource.draw", "trainer.prompt_source") in stages[0].calls
    assert ("RolloutEngine.push_weights", "rollout.types") in stages[6].calls, "methods of the loop's sides are followed"
    assert "drawn" in stages[1].leaves and "record" in stages[2].leaves and "record.experience" in stages[4].leaves


def test_a_changed_loop_changes_the_picture():
    source = LOOP.read_text(encoding="utf-8")
    changed = source.replace('timers.stage("score")', 'timers.stage("judge")')
    assert changed != source and stages_of(changed)[2].names == ("judge",)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The repository with a copy of docs/ that a test may change."""
    folder = tmp_path_factory.mktemp("site")
    for entry in ("megappo", "scripts", "benchmarks", "tests", "examples", "README.md", "AGENTS.md"):
        (folder / entry).symlink_to(ROOT / entry)
    for entry in ("CONTRIBUTING.md", "CHANGELOG.md"):  # included: links in them are resolved from where the file really is
        shutil.copy(ROOT / entry, folder / entry)
    shutil.copytree(ROOT / "docs", folder / "docs")
    return folder


def build(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", "out"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_site_builds_without_a_warning(site):
    done = build(site)
    assert done.returncode == 0, done.stderr
    assert (site / "out" / "architecture.html").is_file()


def test_a_broken_link_is_an_error(site):
    page = site / "docs" / "architecture.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[gone](no_such_page.md)\n", encoding="utf-8")
    done = build(site)
    assert done.returncode != 0 and "no_such_page" in done.stderr
