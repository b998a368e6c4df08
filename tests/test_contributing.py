"""The worked examples of CONTRIBUTING.md run as they stand; those that edit files, in a copy of the tree."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from tests.forked_commands import run_code
from tests.trainer.small_run import SIZES, small_config, write_small_task

ROOT = Path(__file__).parent.parent
SECTIONS = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.M)[1:]
BLOCKS = {section.splitlines()[0]: re.findall(r"^```python\n(.*?)^```$", section, flags=re.M | re.S) for section in SECTIONS}
THIRD_PARTIES = [
    "torch",
    "triton.language",
    "pytest",
    "hypothesis",
    "transformers.models.auto.modeling_auto",
    "megatron.core.optimizer",
]
THIRD_PARTIES += ["megatron.core.models.gpt", "transformers.models.qwen2.modeling_qwen2", "pandas", "pyarrow.compute", "yaml"]
ESTIMATOR, FAMILY = "Add an advantage estimator", "Add a model family"
EXAMPLES = {
    section.splitlines()[0]: "\n".join(re.findall(r"^```python\n(.*?)^```$", section, flags=re.M | re.S))
    for section in SECTIONS
    if section.startswith("Add ") and not section.startswith(ESTIMATOR)
}


def test_every_kind_of_extension_has_an_example():
    assert ESTIMATOR in BLOCKS
    wanted = {"Add a reward", "Add a KL estimator", "Add a model family", "Add an op", "Add an engine"}
    assert EXAMPLES.keys() == wanted and all("assert" in code for code in EXAMPLES.values())


@pytest.mark.slow
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs(title):
    """In a process of its own: examples register what no other test should see."""
    done = run_code(EXAMPLES[title], cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("title", [*EXAMPLES, ESTIMATOR])
def test_files_that_an_example_names_exist(title):
    section = next(section for section in SECTIONS if section.startswith(title))
    named = re.findall(r"`((?:megappo|csrc|tests|scripts|benchmarks)/[\w/.]+)`", section)
    missing = [name for name in named if "NAME" not in name and not (ROOT / name).exists()]
    assert named and not missing


def replace_once(file: Path, old: str, new: str) -> None:
    text = file.read_text("utf-8")
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new), "utf-8")


def add_estimator(tree: Path) -> None:
    """As the recipe has it: the section before its union, the others after the table that they enter."""
    section, *others = BLOCKS[ESTIMATOR]
    schema = tree / "megappo/config/schema.py"
    replace_once(schema, "\nEstimatorConfig = ", f"\n{section}\n\nEstimatorConfig = ")
    replace_once(schema, " | ReMaxConfig\n", " | ReMaxConfig | MedianConfig\n")
    for block in others:
        with (tree / block.splitlines()[0].removeprefix("# ")).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{block}")


def add_family(tree: Path) -> None:
    lines = [
        line for line in BLOCKS[FAMILY][0].splitlines() if re.match(r"TOY = |from megappo.models.(family|weight_rules) ", line)
    ]
    (tree / "megappo/models/families/toy.py").write_text("\n".join(lines) + "\n", "utf-8")
    registry = tree / "megappo/models/families/registry.py"
    replace_once(registry, "DEEPSEEK_V3,\n)", "DEEPSEEK_V3,\n    TOY,\n)")
    replace_once(
        registry,
        "from megappo.models.family import",
        "from megappo.models.families.toy import TOY\nfrom megappo.models.family import",
    )


def write_toy_checkpoint(folder: Path) -> None:
    """Qwen2, which is the recipe's family under other keys, in place of the small task's llama."""
    config = transformers.Qwen2Config(
        **SIZES,
        tie_word_embeddings=False,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    for ours, toys in (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer")):
        written[toys] = written.pop(ours)
    (folder / "config.json").write_text(json.dumps({**written, "architectures": ["ToyForCausalLM"], "attention_bias": True}))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with the recipes' estimator and family."""
    tree = tmp_path_factory.mktemp("copy") / "tree"
    kept = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("megappo", "tests", "scripts", "configs", "docs", "benchmarks", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=kept)
    for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md"):
        shutil.copyfile(ROOT / name, tree / name)
    add_estimator(tree)
    add_family(tree)
    return tree


# Imports once what is not of the tree, and is a Python with these arguments (-c CODE or -m MODULE ...) in a fork for each line.
SERVER = f"""
import importlib, json, os, runpy, sys
os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py imports it
for name in {THIRD_PARTIES}:
    importlib.import_module(name)
del os.environ["TRITON_INTERPRET"]
for line in sys.stdin:
    (option, *words), environment, output = json.loads(line)
    if (child := os.fork()) == 0:
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.environ.update(environment)
        if option == "-c":
            sys.argv = ["-c"]
            exec(words[0], {{"__name__": "__main__"}})
        else:
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Runner = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def run(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """(exit code, what was printed) of a Python with these arguments in the copy, and there with these variables."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=copy, env=environment, **pipes) as server:
        assert server.stdin is not None and server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def run_there(*arguments: str, **variables: str) -> tuple[int, str]:
            said = tmp_path_factory.mktemp("said") / "said"
            print(json.dumps([arguments, variables, str(said)]), file=requests, flush=True)
            return int(answers.readline()), said.read_text("utf-8")

        yield run_there
        requests.close()


@pytest.mark.slow
def test_an_estimator_of_the_recipe_passes_the_tests_it_names_and_every_table_has_it(copy: Path, run: Runner) -> None:
    tests = ["tests/trainer/test_estimators.py", "tests/algo/test_groups.py", "tests/config/test_keys_are_read.py"]
    named = "(median or every_key_is_read) and not ranks"
    code, said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", named)
    assert code == 0 and int(re.findall(r"(\d+) passed", said)[0]) >= 4, said
    pages = "import sys; sys.argv = ['scripts/reference_pages.py']; runpy.run_path(sys.argv[0], run_name='__main__')"
    code, said = run("-c", f"import runpy; from tests.parity.matrix import ALGORITHMS; print(ALGORITHMS['median']); {pages}")
    assert code == 0 and said.startswith("{'algorithm__estimator': 'median'}\n"), said
    assert "Compares a response with the median" in (copy / "docs/config.md").read_text("utf-8")
    # Negative control: the loop finds a formula that is wrong.
    replace_once(copy / "megappo/algo/groups.py", "return scale * (exact - median)", "return scale * exact - median")
    replace_once(copy / "megappo/config/schema.py", "scale: PositiveFloat = 1.0", "scale: PositiveFloat = 2.0")
    code, said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests[:2], "-k", "median and not ranks")
    assert code == 1 and "test_advantages_are_those_of_the_loops" in said, said


@pytest.mark.slow
def test_a_family_of_the_recipe_trains_its_attention_bias_by_the_recipes_estimator(run: Runner, tmp_path: Path) -> None:
    write_small_task(tmp_path)
    write_toy_checkpoint(tmp_path / "model")
    config = small_config(tmp_path, "toy", steps=2)
    config["run"]["num_ranks"], config["policy"]["parallel"], config["algorithm"] = (
        1,
        {},
        {"estimator": "median", "mini_batch_size": 16},
    )
    config["rollout"] |= {"engine": "megatron", "samples_per_prompt": 4}
    config["trainer"] = {"steps": 2}
    config.pop("critic")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    code, said = run("-m", "megappo", "plan", str(tmp_path / "run.yaml"), "algorithm.lam=0.9", "algorithm.gamma=0.9")
    assert code == 2 and "algorithm.estimator does not discount" in said and "algorithm.lam" in said
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A rank of its own: `megappo train` would start another process.
    alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code, said = run("-m", "megappo", "train", str(tmp_path / "run.yaml"), **alone)
    assert code == 0, said
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", tmp_path / "runs/toy/export"))
    assert before.keys() == after.keys()
    biases = [name for name in before if name.endswith("bias")]
    assert len(biases) == 2 * 3 and not any(torch.equal(before[name], after[name].float()) for name in biases)
