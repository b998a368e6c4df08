"""The checks of the GPU stack find what they are for: small doctored inputs, each next to one that passes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megappo.runtime.installed import findings
from scripts.gpu_stack import capability, fake_device, library, names, pip_resolution, te_layers, triton_kernels, vllm_config
from scripts.gpu_stack.main import describe_exit, main, rows_of
from scripts.gpu_stack.rows import MARK, Row, Skipped, Wrong, outcome, rows_in, table
from scripts.gpu_stack.sync import LIST, sync

PTXAS = """== advantages/cuda.cu
ptxas info    : Compiling entry function '_Z3gae' for 'sm_80'
ptxas info    : Function properties for _Z3gae
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z3gae' for 'sm_90a'
ptxas info    : Function properties for _Z3gae
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_a_kernel_that_spills_or_waits_is_named() -> None:
    assert library.register_table(PTXAS) == (
        "sm_80: 1 kernels, 40-40 registers, no spills; sm_90a: 1 kernels, 168-168 registers, no spills"
    )
    with pytest.raises(Wrong, match=r"spills: _Z3gae \(sm_80\): 12 bytes"):
        library.register_table(PTXAS.replace("0 bytes spill stores, 0", "8 bytes spill stores, 4", 1))
    with pytest.raises(Wrong, match="wgmma was serialised"):
        library.register_table(PTXAS + "ptxas warning: wgmma.mma_async instructions are serialized due to ...\n")
    with pytest.raises(Wrong, match="1 of 2 kernels have registers"):
        library.register_table(PTXAS.replace("Used 168 registers", "", 1))
    with pytest.raises(Wrong, match="0 of 0"):
        library.register_table("")


def test_an_architecture_that_was_left_out_is_named() -> None:
    listing = "".join(f"ELF file {i}: _native.{i}.{arch}.cubin\n" for i in (1, 2) for arch in ("sm_80", "sm_90a"))
    sass = library.architectures(listing)
    ptx = library.architectures("PTX file 1: _native.1.sm_80.ptx\nPTX file 2: _native.2.sm_80.ptx\n")
    assert sass == {"sm_80": 2, "sm_90a": 2} and ptx == {"sm_80": 2}
    assert library.code_fault("8.0+PTX;9.0a", sass, ptx, 2) == ""
    assert library.code_fault("8.0+PTX;9.0a;10.0", sass, ptx, 2) == "machine code for sm_100: 0 of 2 files"
    assert library.code_fault("8.0+PTX;9.0a", sass, {}, 2) == "PTX for sm_80: 0 of 2 files"
    assert library.code_fault("8.0+PTX;9.0a", {**sass, "sm_90a": 1}, ptx, 2) == "machine code for sm_90a: 1 of 2 files"


def test_another_cuda_runtime_is_named() -> None:
    assert library.cudart_fault(["libtorch.so", "libcudart.so.13"], "13.0") == ""
    assert "linked to libcudart.so.12, torch needs libcudart.so.13" in library.cudart_fault(["libcudart.so.12"], "13.0")
    assert "linked to no CUDA runtime" in library.cudart_fault(["libtorch.so"], "13.0")


def test_symbols_without_a_home_are_named() -> None:
    libraries = {"libtorch_cpu.so": {"a", "b"}, "libtorch_cuda.so": {"c"}}
    assert library.undefined(["a", "c"], libraries) == ([], {"libtorch_cpu.so": 1, "libtorch_cuda.so": 1})
    assert library.undefined(["a", "d"], libraries)[0] == ["d"]
    # of libraries that every machine has
    libc = next(path for path in library.mapped(r"/libc\.so"))
    assert "malloc" in library.symbols_of(libc, "--defined-only")


def test_an_op_without_a_kernel_for_cuda_is_named() -> None:
    both = {"CPU": {"megappo_native::value_loss"}, "CUDA": {"megappo_native::value_loss"}}
    assert library.without_cuda(both) == []
    assert library.without_cuda({**both, "CUDA": set()}) == ["megappo_native::value_loss"]


def test_an_untested_megatron_is_named() -> None:
    def versions(**changed: str) -> str:
        tested = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0", "transformers": "5.19.0"}
        return library.version_fault(findings(lambda r: {**tested, **changed}.get(r.name, "9")))

    assert versions() == ""
    assert versions(**{"megatron-core": "0.20.0"}).startswith("megatron-core 0.20.0 (tested: ")


def test_a_gpu_without_code_and_an_op_without_its_kernel_are_named() -> None:
    archs = "8.0+PTX;9.0a"
    assert {name: capability.code_for(archs, gpu) for name, gpu in capability.GPUS.items()} == {
        "A100": "machine code 8.0",
        "L40S": "machine code 8.0",
        "H100": "machine code 9.0a",
        "B200": "PTX 8.0",
        "RTX PRO 6000": "PTX 8.0",
    }
    assert capability.code_for("8.0;9.0a", (10, 0)) is None
    good = {"value_loss": "cuda", "linear_stats": "triton", "linear_backward": "gemm + cuda"}
    assert capability.selection_fault(good, (8, 0)) == ""
    assert capability.selection_fault(good, (9, 0)) == "linear_stats runs by triton, not cuda"
    assert capability.selection_fault({**good, "value_loss": "triton"}, (8, 0)) == "value_loss runs by triton, not cuda"


def test_another_triton_and_a_kernel_that_is_not_compiled_are_named() -> None:
    requires = ["filelock", "triton==3.7.1 ; platform_system == 'Linux'"]
    assert triton_kernels.pin_fault(requires, "3.7.1") is None
    assert "torch pins 3.7.1" in str(triton_kernels.pin_fault(requires, "3.9.0"))
    assert "without CUDA" in str(triton_kernels.pin_fault(["filelock"], "3.9.0"))
    assert triton_kernels.coverage_fault({"_whiten"}, {"_whiten"}) is None
    assert "_scan" in str(triton_kernels.coverage_fault({"_whiten", "_scan"}, {"_whiten"}))


def test_pip_of_the_legacy_way_and_foreign_versions_are_named() -> None:
    modern = f"Obtaining file:///src\n  {pip_resolution.MODERN}: finished\n"
    assert pip_resolution.fault(0, modern + "Would install megappo-0.1.0 onnx-1.2", "") == ""
    legacy = "Obtaining file:///src\n  Preparing metadata (setup.py): finished\n"
    assert pip_resolution.fault(0, legacy, "").startswith("pip takes the legacy way")
    assert "torch-2.12.0" in pip_resolution.fault(0, modern + "Would install megappo-0.1.0 torch-2.12.0", "")
    assert "megatron-core-0.19.2" in pip_resolution.fault(0, modern + "Would install megatron-core-0.19.2 megappo-0.1.0", "")
    assert pip_resolution.fault(1, "", "note: x\nERROR: No matching distribution\n") == "ERROR: No matching distribution"


def test_a_resolution_that_brings_another_torch_is_named() -> None:
    output = (
        "Obtaining file:///src\nWould install Jinja2-3.1.6 megatron_core-0.16.1 torch-2.13.0+cu130 vllm-0.32.0 z3-solver-4.15.4.0\n"
    )
    versions = pip_resolution.resolved(output)
    assert versions["torch"] == "2.13.0" and versions["z3-solver"] == "4.15.4.0" and len(versions) == 5
    assert pip_resolution.resolution_fault(versions) == ""
    assert pip_resolution.resolution_fault({**versions, "torch": "2.12.0"}) == "pip would install torch 2.12.0, not 2.13.0"
    assert pip_resolution.resolution_fault(pip_resolution.resolved("")) == "pip would not install torch, vllm, megatron-core"


def test_options_that_vllm_does_not_know_and_other_paths_are_named() -> None:
    assert vllm_config.unknown({"seed": 0}, ["seed", "model"]) == ""
    assert vllm_config.unknown({"seed": 0, "sleepy": True}, ["seed", "model"]) == "sleepy"
    assert vllm_config.difference({"runner": "v2", "sleep": True}, {"sleep": True}) == ""
    assert vllm_config.difference({"runner": "v2"}, {"runner": "v1"}) == "runner is v2, not v1"


def test_names_and_keywords_that_a_version_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sources of a library, found through imports, tables of lazy imports and base classes; and in the installed ones, whole."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(
        "LAZY = {'LLM': '.llm:LLM'}\nfrom vllm.inner import *\nif True:\n    def f(a, *, b): pass\n"
    )
    (package / "inner.py").write_text("class Base:\n    def sleep(self, level): self.core = 1\ndef g(*args): pass\n")
    (package / "llm.py").write_text(
        "from .inner import Base\nclass LLM(Base):\n    depth: int\n    def __init__(self, model): pass\n"
    )
    sources = names.Sources(tmp_path)
    good = [
        ("vllm.LLM.sleep", 0, ("level",)),
        ("vllm.LLM.core", 0, ()),
        ("vllm.f", 1, ("b",)),
        ("vllm.g", 9, ()),
        ("vllm.LLM", 1, ()),
    ]
    assert [names._fault(sources, names.Use(name, "", *given)) for name, *given in good] == [""] * len(good)
    assert names._fault(sources, names.Use("vllm.f", "", 0, ("c",))) == "vllm.f takes a, b; not c"
    assert names._fault(sources, names.Use("vllm.f", "", 3)) == "vllm.f takes a, b; not 3 by position"
    assert names._fault(sources, names.Use("vllm.LLM.wake_up", "")) == "vllm.LLM.wake_up is not there"
    assert names._fault(sources, names.Use("vllm.inner.h", "")) == "vllm.inner.h is not there"
    found = names.uses()
    assert {"vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher", "torch.distributed.new_subgroups"} <= {
        u.name for u in found
    }
    for name, module in names.LIBRARIES.items():
        place = importlib.util.find_spec(module)
        assert place is not None and place.origin is not None, name
        assert names.faults(Path(place.origin).parents[module.count(".") + 1], module, found) == []


def test_a_default_that_vllm_changes_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    check = dict(vllm_config.CHECKS)["defaults"]
    monkeypatch.setattr(vllm_config, "configuration", lambda *args: None)
    for changed in ("runner", "async scheduling", "attention", "CUDA graphs"):
        monkeypatch.setattr(vllm_config, "facts_of", lambda config: {**vllm_config.DEFAULTS, changed: "other"})
        with pytest.raises(Wrong, match=f"^{changed} is other, not "):
            check()
    monkeypatch.setattr(vllm_config, "facts_of", lambda config: dict(vllm_config.DEFAULTS))
    assert check().startswith("runner v2, async scheduling True, attention FLASH_ATTN")


def test_parameters_that_part_are_named() -> None:
    local = {"norm": (64,), "qkv": (96, 64)}
    assert te_layers.difference(local, dict(local)) == ""
    assert te_layers.difference(local, {**local, "qkv": (96, 32)}) == "qkv: local (96, 64), TransformerEngine (96, 32)"
    assert te_layers.difference(local, {"qkv": (96, 64)}) == "norm: local (64,), TransformerEngine has none"


def test_a_product_that_would_not_add_to_main_grad_is_named() -> None:
    def product(**switches: bool) -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        for name, value in switches.items():
            setattr(module, name, value)
        return module

    good = product(fuse_wgrad_accumulation=True, disable_parameter_transpose_cache=True)
    assert te_layers.switch_fault({"qkv": good}) == ""
    rounded = product(fuse_wgrad_accumulation=False, disable_parameter_transpose_cache=True)
    assert te_layers.switch_fault({"qkv": good, "fc1": rounded}) == "fc1: fuse_wgrad_accumulation is False, not True"
    overwritten = product(fuse_wgrad_accumulation=True, disable_parameter_transpose_cache=False)
    assert te_layers.switch_fault({"fc1": overwritten}) == "fc1: disable_parameter_transpose_cache is False, not True"
    assert te_layers.switch_fault({"fc1": product()}) == "fc1: fuse_wgrad_accumulation is not there, not True"
    assert te_layers.switch_fault({}) == "no product of TransformerEngine"


def test_results_in_another_place_or_type_are_named() -> None:
    right = torch.zeros(fake_device.NUM_TOKENS)
    assert fake_device.placement_fault({"logprob": right}, "cpu") == ""
    assert fake_device.placement_fault({"logprob": right}, "cuda").startswith("logprob is torch.float32 [60] on cpu")
    assert "torch.bfloat16" in fake_device.placement_fault({"logprob": right.bfloat16()}, "cpu")
    assert fake_device.placement_fault({"logprob": right[1:]}, "cpu").startswith("logprob is torch.float32 [59]")


def test_outcomes_of_a_check() -> None:
    def skipped() -> str:
        raise Skipped("no nvcc")

    def wrong() -> str:
        raise Wrong("a spill")

    def broken() -> str:
        raise KeyError("missing")

    assert outcome("g", ("n", lambda: "fine")) == Row("g", "n", "ok", "fine")
    assert outcome("g", ("n", skipped)) == Row("g", "n", "skipped", "no nvcc")
    assert outcome("g", ("n", wrong)) == Row("g", "n", "FAILED", "a spill")
    assert outcome("g", ("n", broken)) == Row("g", "n", "FAILED", "KeyError: 'missing'")


CRASH = "import os, sys; sys.path.insert(0, '{root}'); from scripts.gpu_stack.rows import run; "
CRASH += "run('g', [('first', lambda: 'fine'), ('second', lambda: os.abort())])"


def test_a_crash_and_a_hang_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    rows = rows_of("g", 60, [sys.executable, "-c", CRASH.format(root=root)])
    assert [(row.name, row.result) for row in rows] == [("first", "ok"), ("second", "FAILED")]
    assert "SIGABRT" in rows[1].detail
    rows = rows_of("g", 1, [sys.executable, "-c", "import time; time.sleep(60)"])
    assert [(row.name, row.result, row.detail) for row in rows] == [("all of it", "FAILED", "not done within 1 s")]
    assert describe_exit(1, 9, "Traceback\nImportError: libcuda.so.1\n\n") == "ended with status 1: ImportError: libcuda.so.1"


def test_the_table_is_one_line_a_row_and_the_status_counts_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        Row("library", "loads", "ok", "x " * 200),
        Row("library", "NEEDED", "FAILED", "two\nlines"),
        Row("other", "a", "skipped", "why"),
    ]
    lines = list(table(rows))
    assert [line.split()[0] for line in lines] == ["library", "loads", "NEEDED", "other", "a"]
    assert lines[2].endswith("FAILED   two lines") and lines[1].endswith("...")
    assert rows_in(f"noise\n{MARK}" + '{"started": "n"}\n') == ([], "n")
    for result, status in (("ok", 0), ("FAILED", 1)):
        row = Row("library", "loads", result, "")  # type: ignore[arg-type]
        monkeypatch.setattr("scripts.gpu_stack.main.rows_of", lambda *args, row=row: [row])
        assert main(["--only", "library", "--json", str(tmp_path / "rows.json")]) == status
    assert "1 FAILED" in capsys.readouterr().out and '"result": "FAILED"' in (tmp_path / "rows.json").read_text()


def test_a_copy_follows_the_checkout_and_keeps_what_was_built(tmp_path: Path) -> None:
    checkout, target = tmp_path / "checkout", tmp_path / "src"
    checkout.mkdir()
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    for name, text in {".gitignore": "*.so\n", "a.py": "1", "sub/b.py": "2", "c.so": "3"}.items():
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text(text)
    assert sync(checkout, target) == 3
    (target / "native.so").write_text("built")
    assert sorted(p.name for p in target.rglob("*") if p.is_file()) == [".gitignore", LIST, "a.py", "b.py", "native.so"]
    assert sync(checkout, target) == 0
    (checkout / "a.py").write_text("changed")
    (checkout / "sub/b.py").unlink()
    assert sync(checkout, target) == 2
    assert (target / "a.py").read_text() == "changed" and not (target / "sub/b.py").exists() and (target / "native.so").exists()
