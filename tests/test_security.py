"""What megappo never does, read from its source: unpickle, run text as code or in a shell, run a checkpoint's code, listen to all.

Each rule has snippets that it must flag. torch.distributed's object collectives unpickle what peers of the same world send
(docs/launch.md, Security): that is torch's call, not ours, and no rule here is about it.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.data.tokenizers import load_tokenizer
from megappo.models.hf_config import read_arch
from tests.commands.plan.checkpoints import TINY, write_checkpoint, write_run
from tests.data.tokenizer_files import write_hf_tokenizer

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("megappo", "scripts", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))

PICKLES = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
# Dotted name -> rule.
FORBIDDEN = {
    **dict.fromkeys(
        ("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile"), "runs text as code"
    ),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), "runs a shell"),
    **dict.fromkeys(("asyncio.create_subprocess_shell", "pty.spawn", "commands.getoutput"), "runs a shell"),
    **dict.fromkeys((f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all")), "loads YAML with tags"),
    **dict.fromkeys((f"yaml.{name}" for name in ("unsafe_load", "unsafe_load_all")), "loads YAML with tags"),
    **dict.fromkeys((f"yaml.{name}" for name in ("Loader", "FullLoader", "UnsafeLoader", "CLoader")), "loads YAML with tags"),
    "tempfile.mktemp": "names a file that others may make first",
}
# Keyword argument (or key of a dictionary of them) -> (the only value that it may have, rule).
KEYWORDS = {
    "weights_only": (True, "unpickles"),
    "allow_pickle": (False, "unpickles"),
    "shell": (False, "runs a shell"),
    "trust_remote_code": (False, "runs a checkpoint's code"),
}
# Names of pickle that read nothing.
WRITES = {"dump", "dumps"}
# Addresses of all interfaces.
EVERYWHERE = ("0.0.0.0", "::", "[::]")
ALLOWED = {
    "megappo/config/foreign/trl.py": {"runs a checkpoint's code"},  # a table of TRL's keys, and why this one has no counterpart
    # A pipe between the rank and a worker that runs the user's own code with the user's rights: neither side gains any.
    "megappo/runtime/helper_process.py": {"unpickles"},
    # Verdicts between the ranks of a job, as torch's exchange of objects sends them, which cannot address one rank each.
    "megappo/trainer/scoring.py": {"unpickles"},
    "megappo/rewards/sandbox/runner.py": {"runs text as code"},  # a program inside the sandbox, which nothing imports
    # The exchange of experience as it was, by pickled objects, and results of its own processes.
    "benchmarks/bench_experience.py": {"unpickles"},
    "benchmarks/bench_engines.py": {"unpickles"},  # what its own ranks measured
    "benchmarks/reliability/page.py": {"listens to all"},  # `::` is the separator of pytest's node ids
}


def faults(source: str) -> Iterator[tuple[int, str]]:
    """(line, rule) of everything forbidden in a module."""
    nodes = list(ast.walk(ast.parse(source)))
    aliases = dict(_aliases(nodes))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} <= WRITES:
                continue
            if any(name.split(".")[0] in PICKLES for name in names):
                yield node.lineno, "unpickles"
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):  # a field may be called `eval`
            if rule := FORBIDDEN.get(_dotted(node, aliases)):
                yield node.lineno, rule
        elif isinstance(node, ast.Call):
            name = _dotted(node.func, aliases)
            if name == "torch.load" and not any(keyword.arg == "weights_only" for keyword in node.keywords):
                yield node.lineno, "unpickles"
            yield from _wrong_keywords([(keyword.arg, keyword.value) for keyword in node.keywords])
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            yield from _wrong_keywords(list(zip(keys, node.values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in EVERYWHERE or "//0.0.0.0" in node.value or "0.0.0.0:" in node.value:
                yield node.lineno, "listens to all"


def _wrong_keywords(pairs: list[tuple[object, ast.expr]]) -> Iterator[tuple[int, str]]:
    for name, value in pairs:
        if isinstance(name, str) and name in KEYWORDS:
            allowed, rule = KEYWORDS[name]
            if not (isinstance(value, ast.Constant) and value.value is allowed):
                yield value.lineno, rule


def _aliases(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Name in the module -> dotted name that was imported under it."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    return f"{_dotted(node.value, aliases)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def test_no_module_does_what_is_forbidden() -> None:
    assert len(SOURCES) > 250
    found = []
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        allowed = ALLOWED.get(name, set())
        seen = set(faults(path.read_text(encoding="utf-8")))
        found += [f"{name}:{line}: {rule}" for line, rule in sorted(seen) if rule not in allowed]
        assert allowed <= {rule for _, rule in seen}, f"{name} needs no exception any more"
    assert not found, "\n".join(found)


# Negative controls: rule -> snippets that it must flag.
FLAGGED = {
    "unpickles": [
        "torch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "from torch import load\nload(path)",
        "load(path, weights_only=flag)",
        "options = {'weights_only': False}",
        "import pickle",
        "import pickle as p\np.loads(text)",
        "from pickle import Unpickler",
        "from pickle import dumps, loads",
        "def f():\n    import cloudpickle",
        "numpy.load(path, allow_pickle=True)",
    ],
    "runs a shell": [
        "subprocess.run(command, shell=True)",
        "subprocess.Popen(command, shell=flag)",
        "import os\nos.system(command)",
        "from os import system as call\ncall(command)",
        "run = os.popen",
        "subprocess.getoutput(command)",
    ],
    "runs text as code": ["eval(text)", "exec(text)", "run = eval", "exec(compile(text, '', 'exec'))", "__import__(name)"],
    "runs a checkpoint's code": [
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=config.trust)",
        "LLM(**{'trust_remote_code': True})",
    ],
    "listens to all": ["socket.bind(('0.0.0.0', 0))", "host = '::'", "url = 'http://0.0.0.0:8000'"],
    "loads YAML with tags": [
        "yaml.load(text, Loader=yaml.Loader)",
        "from yaml import full_load\nfull_load(text)",
        "import yaml as y\ny.unsafe_load(text)",
    ],
    "names a file that others may make first": ["tempfile.mktemp()", "from tempfile import mktemp\nmktemp()"],
}
HARMLESS = """
import os, torch, yaml, importlib
from megappo.x import evaluate
torch.load(path, weights_only=True)
model.eval(); re.compile(pattern); torch.compile(model); ast.literal_eval(text); evaluate(text)
yaml.safe_load(text); yaml.compose(text, Loader=CoreLoader); yaml.dump(data, Dumper=CoreDumper)
subprocess.run(command, shell=False); AutoTokenizer.from_pretrained(path, trust_remote_code=False)
bind(("127.0.0.1", 0)); eval = config.eval; print("a :: b"); importlib.import_module("megappo.x")
"""


def test_the_lint_flags() -> None:
    for rule, snippet in [(rule, snippet) for rule, snippets in FLAGGED.items() for snippet in snippets]:
        assert rule in {found for _, found in faults(snippet)}


def test_the_lint_lets_pass_what_only_looks_alike() -> None:
    assert list(faults(HARMLESS)) == []
    assert set(FLAGGED) == {*FORBIDDEN.values(), *(rule for _, rule in KEYWORDS.values()), "listens to all"}


# ------------------------------------------------------------------------------------------------------ code of a checkpoint

EVIL = """\
import os
from transformers import PretrainedConfig
os.mkdir({marker!r})
class Config(PretrainedConfig):
    model_type = "llama"
"""
CODE = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config", "AutoTokenizer": ["evil.Config", None]}}
KERNELS = {"_attn_implementation_internal": "someone/kernels"}


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """A directory that exists once the checkpoint's code has run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "marker"


def write_evil(folder: Path, marker: Path, keys: dict) -> Path:
    write_checkpoint(folder, TINY | keys)
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    return folder


@pytest.mark.parametrize(
    "keys", [CODE, KERNELS, {"rope_parameters": {"rope_type": "default", **CODE}}], ids=["files", "hub", "inside"]
)
def test_a_checkpoint_with_code_is_refused_and_its_code_does_not_run(tmp_path, monkeypatch, capsys, marker, keys) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = write_run(tmp_path)
    model = write_evil(tmp_path / "evil", marker, keys)
    with pytest.raises(ValueError, match=r"(auto_map|_attn_implementation_internal) \(remote code\), which is never run"):
        read_arch(model)
    for command in ("train", "plan", "verify"):
        for role in ("policy", "critic", "reference"):
            assert cli.main([command, str(path), f"{role}.model={model}"]) == 2
            assert "never run" in capsys.readouterr().err
    assert not marker.exists()


def test_a_tokenizer_beside_code_loads_without_it(tmp_path, marker) -> None:
    folder = write_hf_tokenizer(tmp_path / "tokenizer")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **CODE}))
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    load_tokenizer(folder)
    assert not marker.exists()


def test_the_code_of_the_checkpoint_would_run_if_it_were_trusted(tmp_path, marker) -> None:
    """Negative control of the marker."""
    from transformers import AutoConfig

    AutoConfig.from_pretrained(write_evil(tmp_path / "evil", marker, CODE), trust_remote_code=True)
    assert marker.exists()


# ------------------------------------------------------------------------------------------------------- names of runs


SHELL = ("a;touch gone", "$(touch gone)", "`touch gone`", "a\ntouch gone", "-rf", "a b")
ELSEWHERE = ("../gone", "..", "/gone", ".hidden", "a/b", "a\0b", "run\n", "x" * 65)


@pytest.mark.parametrize("name", SHELL + ELSEWHERE)
def test_a_run_name_with_a_meaning_for_a_shell_is_refused(tmp_path, monkeypatch, capsys, name) -> None:
    path = write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(os.listdir(tmp_path))
    commands = [["train"], ["plan"], ["launch", "--nodes", "1", "--gpus-per-node", "1", "--dry-run"]]
    for command, *options in commands:
        assert cli.main([command, str(path), *options, f"run.name={json.dumps(name)}"]) == 2
        captured = capsys.readouterr()
        assert "run.name" in captured.err and captured.out == ""
    if "\0" not in name:  # which no argument of a process can hold
        assert cli.main(["runs", f"runs/{name}"]) == 2
    assert set(os.listdir(tmp_path)) == before
