"""Every recipe in configs/ loads, passes the rules across keys for a world that it can run on, and dumps to itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megappo.commands import cli
from megappo.config.checks import problems
from megappo.config.dump import dump_yaml
from megappo.config.loading import explicit_keys, load_config
from megappo.config.schema import TrainConfig
from megappo.config.supervised import KINDS, AnyConfig

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent != CONFIGS / "gates")
WORLDS = (1, 2, 4, 8, 16, 32, 64)


def kind_of(path: Path) -> type[AnyConfig]:
    """Recipes of `megappo sft` have sft in their name, those of other kinds name it."""
    kind = yaml.safe_load(path.read_text()).get("kind", "sft" if "sft" in path.stem else None)
    return TrainConfig if kind is None else KINDS[kind]


@pytest.mark.parametrize("path", RECIPES, ids=[path.name for path in RECIPES])
def test_a_recipe_is_right_for_some_world(path, tmp_path):
    config = load_config(path, (), kind_of(path))
    worlds = WORLDS if config.run.num_ranks is None else (config.run.num_ranks,)
    found = {world: list(problems(config, explicit_keys(config), world)) for world in worlds}
    assert any(not texts for texts in found.values()), found
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "resolved.yaml", (), kind_of(path)) == config


@pytest.mark.parametrize("name", ["quickstart", "quickstart_sft"])
def test_a_recipe_with_a_wrong_key_is_refused(name, tmp_path):
    """Negative control, of each kind."""
    path = CONFIGS / f"{name}.yaml"
    data = yaml.safe_load(path.read_text())
    data["policy"]["optimizer"] = {**data["policy"].get("optimizer", {}), "learning_rte": 1}
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match="policy.optimizer.learning_rte = 1: unknown key"):
        load_config(tmp_path / "broken.yaml", (), kind_of(path))


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_recipe_is_printed_as_it_stands(capsys):
    for path in (CONFIGS / "recipes").glob("*.yaml"):
        assert run(capsys, "config", "--recipe", path.stem) == (0, path.read_text(), "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "gprpo"], "--recipe gprpo: no such recipe; did you mean grpo? known: "),
        (["--recipe", "../quickstart"], "--recipe ../quickstart: no such recipe; "),
        (["--recipe", "grpo", "run.name=x"], "--recipe grpo: prints that file alone; save it"),
    ],
    ids=["typo", "path", "override"],
)
def test_what_is_no_recipe_is_refused_in_one_line(capsys, arguments, said):
    code, out, err = run(capsys, "config", *arguments)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_an_installed_package_has_the_recipes(tmp_path):
    """Without the repository beside it."""
    repository = CONFIGS.parent
    built = ["setup.py", "-q", "build_py", "--build-lib", tmp_path / "site"]  # what `build` does but for the kernels
    subprocess.run([sys.executable, *built], cwd=repository, check=True, capture_output=True)
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "megappo", "config", "--recipe", "grpo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == (CONFIGS / "recipes/grpo.yaml").read_text()
