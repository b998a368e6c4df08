"""The implementation that a call runs: by the device of its tensors, by what can be loaded here, and by what is left out."""

import json
import shutil
import subprocess

import pytest
import torch

import megappo.ops.losses  # noqa: F401  registers its ops, as a run does
from megappo.config.errors import ConfigError
from megappo.ops import dispatch, implementations
from megappo.trainer.prepare.checks import check_kernels

BUILT = {
    "torch": "2.13.0+cu130",
    "isas": ["baseline"],
    "cuda": True,
    "cuda_archs": "8.0;9.0a",
    "cuda_reason": "nvcc",
    "cuda_toolkit": "13.0",
}


# ------------------------------------------------------------------------------------------------------- device of a call


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_name_of_the_gpu_counts_for_its_tensors_and_the_host_takes_what_auto_takes(monkeypatch, name):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with dispatch.using("auto"):
        automatic = dispatch.selected("cpu")
        dispatch.select(name, "cuda")
        assert dispatch.selected("cpu") == automatic and automatic["token_advantages"] == "cpp"
        # a run on the CPU alone has nothing that could take it
        dispatch.select(name, "cpu")
        with pytest.raises(ValueError, match="this run is on the CPU"):
            dispatch.selected("cpu")


def test_reference_counts_on_every_device():
    with dispatch.using("auto"):
        dispatch.select("reference", "cuda")
        assert set(dispatch.selected("cpu").values()) == set(dispatch.selected("cuda").values()) == {"reference"}


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_run_on_the_cpu_alone_refuses_names_of_the_gpu_in_its_plan(monkeypatch, name):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="this run is on the CPU; set kernels=auto"):
        check_kernels(name, "cpu")


# ------------------------------------------------------------------------------------------------------- broken libraries


def copy_facts(library, **facts):
    library.with_suffix(".json").write_text(json.dumps(BUILT | facts))


def compile_library(folder, name, source, *others):
    (folder / "source.c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", name, "source.c", *others], cwd=folder, check=True)


def without_its_library(folder):
    """As when CUDA's runtime of the build is not installed: libcudart.so.13 is not found."""
    compile_library(folder, "libgone.so.13", "int gone() { return 0; }")
    compile_library(folder, "_native.so", "int gone(); int f() { return gone(); }", "libgone.so.13")
    (folder / "libgone.so.13").unlink()
    return "libgone.so.13: cannot open shared object file"


def with_an_undefined_symbol(folder):
    """As when it was built for another torch."""
    compile_library(folder, "_native.so", "extern int aoti_torch_another; int *f() { return &aoti_torch_another; }")
    return "undefined symbol: aoti_torch_another"


def truncated(folder):
    (folder / "_native.so").write_bytes(implementations.LIBRARY.read_bytes()[:10])
    return "file too short"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("breakage", [without_its_library, with_an_undefined_symbol, truncated])
def test_a_library_that_cannot_be_loaded_is_done_without_and_said(monkeypatch, tmp_path, breakage):
    said = breakage(tmp_path)
    copy_facts(tmp_path / "_native.so", cuda_toolkit=None)
    monkeypatch.setattr(implementations, "LIBRARY", tmp_path / "_native.so")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with dispatch.using("auto"):
        assert set(dispatch.selected("cpu").values()) == {"reference"}
        assert dispatch.selected("cuda")["policy_loss"] == "triton"
        for kind in ("cpu", "cuda"):
            (line,) = dispatch.unavailable(kind)
            assert line.startswith("the compiled kernels cannot be loaded (") and said in line and "\n" not in line
            assert "install megappo again" in line
    for name, kind in (("cpp", "cpu"), ("cuda", "cuda")):
        with dispatch.using(name), pytest.raises(ValueError, match=f"kernels = {name}: the compiled kernels cannot be loaded"):
            dispatch.selected(kind)
        with pytest.raises(ConfigError, match=r'kernels = "\w+": the compiled kernels cannot be loaded'):
            check_kernels(name, kind)
    assert said in implementations.describe() and "PyTorch references" in implementations.describe()


def test_a_library_without_its_facts_is_none(monkeypatch, tmp_path):
    (tmp_path / "_native.so").write_bytes(b"")
    monkeypatch.setattr(implementations, "LIBRARY", tmp_path / "_native.so")
    assert "the compiled kernels are missing" in implementations.missing("cpp", "cpu")


# ---------------------------------------------------------------------------------------------- another CUDA, another GPU


@pytest.mark.parametrize(
    "archs, capability, served",
    [
        ("8.0;9.0a", (8, 0), True),
        ("8.0;9.0a", (8, 6), True),
        ("8.0;9.0a", (8, 9), True),
        ("8.0;9.0a", (9, 0), True),
        ("8.0;9.0a", (7, 5), False),
        ("8.0;9.0a", (10, 0), False),
        ("8.0;9.0a", (12, 0), False),
        ("8.6", (8, 0), False),
        ("9.0a", (9, 0), True),
        ("9.0a+PTX", (10, 0), False),
        ("8.0;9.0+PTX", (9, 0), True),
        ("8.0;9.0+PTX", (12, 0), True),
        ("8.0+PTX", (9, 0), True),
        ("8.0; 9.0+PTX;", (10, 3), True),
        ("9.0+PTX", (8, 9), False),
        ("", (8, 0), False),
    ],
)
def test_machine_code_serves_its_generation_and_ptx_what_comes_after(archs, capability, served):
    assert implementations.serves(archs, capability) == served


def on_a_gpu(monkeypatch, tmp_path, capability, cuda="13.0", **facts):
    """The message about a library with these facts, beside a torch for this CUDA and a GPU."""
    library = tmp_path / "_native.so"
    library.touch()
    copy_facts(library, **facts)
    monkeypatch.setattr(implementations, "LIBRARY", library)
    monkeypatch.setattr(implementations, "_unloadable", lambda path: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    return implementations.missing("cuda", "cuda")


def test_a_gpu_that_the_library_does_not_serve_is_named_with_the_build_that_does(monkeypatch, tmp_path):
    assert on_a_gpu(monkeypatch, tmp_path, (12, 0)) == (
        "this GPU is sm_120, and the CUDA kernels are for 8.0;9.0a: install megappo again for it "
        "(MEGAPPO_CUDA_ARCHS=12.0 MEGAPPO_CUDA=1 pip install --no-build-isolation -e .)"
    )
    assert on_a_gpu(monkeypatch, tmp_path, (8, 6)) is None
    assert on_a_gpu(monkeypatch, tmp_path, (12, 0), cuda_archs="8.0;9.0+PTX") is None
    assert on_a_gpu(monkeypatch, tmp_path, None) is None  # a plan for another machine
    with dispatch.using("auto"):
        on_a_gpu(monkeypatch, tmp_path, (12, 0))
        assert dispatch.selected("cuda")["policy_loss"] == "triton" and "sm_120" in dispatch.unavailable("cuda")[0]
    with pytest.raises(ConfigError, match="this GPU is sm_120"):
        check_kernels("cuda", "cuda")


def test_a_library_of_another_cuda_is_named_with_the_build_that_fits(monkeypatch, tmp_path):
    assert on_a_gpu(monkeypatch, tmp_path, (9, 0), cuda_toolkit="12.8") == (
        f"megappo was built with CUDA 12.8, and torch {torch.__version__} is for CUDA 13.0: install it again with nvcc 13 "
        "on PATH (MEGAPPO_CUDA=1 pip install --no-build-isolation -e .)"
    )
    assert "has no CUDA: install it again with a CUDA torch" in on_a_gpu(monkeypatch, tmp_path, None, cuda=None)
    assert on_a_gpu(monkeypatch, tmp_path, (9, 0), cuda_toolkit="13.2") is None
    assert on_a_gpu(monkeypatch, tmp_path, (9, 0), cuda_toolkit=None) is None  # built before this was written down
