"""Choice of layers: the message and the effect of a TransformerEngine that does not work, and the layers of a role in fp32."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megappo.commands.plan.run import plan_run
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.role_sections import CriticConfig, LoraConfig, PolicyConfig
from megappo.models import implementation
from megappo.models.implementation import (
    choose_implementation,
    implementation_notes,
    implementation_of_role,
    transformer_engine_fault,
)
from megappo.runtime.libraries import import_fault
from megappo.trainer.prepare.layouts import check_layouts, read_archs
from tests.commands.plan.checkpoints import write_run

SECTIONS = {"policy": PolicyConfig(model="m"), "critic": CriticConfig(dtype="fp32")}
# What lies in site-packages/transformer_engine -> what of its error is told. The messages are those of 2.11.
BROKEN = {
    "another torch": (
        {"__init__.py": "", "pytorch/__init__.py": "raise ImportError('undefined symbol: _ZN3c105ErrorC2E\\nof libtorch')"},
        r"\(ImportError: undefined symbol: _ZN3c105ErrorC2E\)",
    ),
    "no cuDNN": ({"__init__.py": "raise RuntimeError('cudnn shared object not found.')"}, r"RuntimeError: cudnn shared object"),
    "another version": (
        {"__init__.py": "assert False, 'Transformer Engine package version mismatch.'"},
        "AssertionError: Transformer Engine package version mismatch",
    ),
    "no library": ({"__init__.py": "import ctypes; ctypes.CDLL('libtransformer_engine.so')"}, "OSError: libtransformer_engine.so"),
    "no torch part": ({"__init__.py": ""}, "ModuleNotFoundError: No module named 'transformer_engine.pytorch'"),
}


def install(folder: Path, files: dict[str, str]) -> str:
    for name, source in files.items():
        path = folder / "transformer_engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return str(folder)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nothing is remembered of a TransformerEngine, before and after."""

    def forget() -> None:
        transformer_engine_fault.cache_clear()
        import_fault.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]

    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformer_engine"}
    forget()
    yield
    forget()
    sys.modules.update(kept)


@pytest.fixture
def fault(monkeypatch, request) -> str | None:
    monkeypatch.setattr(implementation, "transformer_engine_fault", lambda: request.param)
    return request.param


@pytest.mark.parametrize("case", BROKEN)
def test_one_that_does_not_import_is_told_by_its_error(tmp_path, monkeypatch, forgotten, case: str) -> None:
    files, told = BROKEN[case]
    monkeypatch.syspath_prepend(install(tmp_path, files))
    with pytest.raises(ValueError, match=f"^model.impl = transformer_engine: it does not import .*{told}") as refused:
        choose_implementation("transformer_engine", "cuda")
    assert "\n" not in str(refused.value) and "install_transformer_engine.sh" in str(refused.value)
    assert choose_implementation("auto", "cuda") == choose_implementation("auto", "cpu") == "local"
    (note,) = implementation_notes("auto", "cuda", SECTIONS)
    assert "Megatron-core's own" in note and "does not import" in note
    assert not [*implementation_notes("auto", "cpu", SECTIONS)] and not [*implementation_notes("local", "cuda", SECTIONS)]


def test_one_that_is_absent_is_told_with_the_command(monkeypatch, forgotten) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert transformer_engine_fault().startswith("is not installed; scripts/install_transformer_engine.sh")


@pytest.mark.slow
def test_a_broken_one_does_not_take_megatron_along(tmp_path) -> None:
    """Megatron-core catches ImportErrors alone. Without the look before, its import dies (the control)."""
    place = install(tmp_path, BROKEN["no cuDNN"][0])
    ask = "from megappo.models.implementation import choose_implementation as c; assert c('auto', 'cpu') == 'local'"
    use = "import megatron.core.extensions.transformer_engine as t; assert not t.HAVE_TE"
    # Commands that reach Megatron-core before they choose layers: verify, generate, export, trials.
    start = (
        "from megappo.runtime.libraries import quiet_libraries as q; q(); "
        "import megappo.commands.verify.world, megappo.commands.generate.answer"
    )
    for source, code in ((f"{ask}\n{use}", 0), (f"{start}\n{use}", 0), (use, 1)):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {place!r})\n{source}"], capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
    assert "cudnn shared object not found" in done.stderr


@pytest.mark.parametrize(
    "requested, device, fault, expected",
    [
        ("auto", "cpu", None, "local"),
        ("auto", "cuda", None, "transformer_engine"),
        ("auto", "cuda", "is not", "local"),
        ("local", "cuda", None, "local"),
        ("transformer_engine", "cuda", None, "transformer_engine"),
        ("transformer_engine", "cpu", None, "needs a CUDA device"),
        ("transformer_engine", "cuda", "is not here", "is not here"),
    ],
    indirect=["fault"],
)
def test_layer_implementation_is_chosen_or_refused(fault, requested, device, expected) -> None:
    if expected in ("local", "transformer_engine"):
        assert choose_implementation(requested, device) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            choose_implementation(requested, device)


@pytest.mark.parametrize("fault", [None], indirect=True)
def test_a_role_with_weights_in_8_bits_has_local_layers(fault) -> None:
    policy = PolicyConfig(model="m", lora=LoraConfig(base_bits=8))
    assert implementation_of_role("transformer_engine", "auto", policy) == "local"
    (note,) = implementation_notes("auto", "cuda", {"policy": policy})
    assert note.startswith("policy.lora.base_bits = 8: its layers are Megatron-core's own")
    in_other_layers = PolicyConfig(model="m", lora=LoraConfig(base_bits=8), engine="fsdp2")
    assert not [*implementation_notes("auto", "cuda", {"policy": in_other_layers})]


@pytest.mark.parametrize("fault", [None], indirect=True)
def test_a_role_in_fp32_has_local_layers_unless_the_others_are_requested(fault) -> None:
    policy, critic = SECTIONS.values()
    assert implementation_of_role("transformer_engine", "auto", policy) == "transformer_engine"
    assert implementation_of_role("transformer_engine", "auto", critic) == "local"
    assert implementation_of_role("transformer_engine", "transformer_engine", critic) == "transformer_engine"
    (note,) = implementation_notes("auto", "cuda", SECTIONS)
    assert note.startswith("critic.dtype = fp32: its layers are Megatron-core's own")
    (note,) = implementation_notes("transformer_engine", "cuda", SECTIONS)
    assert "pads its sequences" in note and "model.impl=auto" in note


@pytest.mark.parametrize("fault", [None], indirect=True)
def test_the_plan_tells_it_and_checks_the_layout_of_the_layers_that_run(tmp_path, fault) -> None:
    path = write_run(tmp_path)
    given = ["run.num_ranks=null", "critic.dtype=fp32", "policy.dtype=bf16", "reference.dtype=bf16", "rollout.engine=megatron"]
    notes = plan_run(load_config(path, given), 2, "cuda", shapes_only=True).notes
    assert any(note.startswith("critic.dtype = fp32") for note in notes)
    # cp 4 does not divide the heads: the ring of TransformerEngine alone can do it, and not in fp32.
    config = load_config(path, [*given, "critic.parallel.tp=2", "critic.parallel.pp=1", "critic.parallel.cp=4"])
    with pytest.raises(ConfigError, match="critic.parallel.cp = 4.*heads"):
        check_layouts(config, read_archs(config), 8, "transformer_engine")
    config = load_config(path, [*given, "policy.parallel.cp=4"])
    assert check_layouts(config, read_archs(config), 8, "transformer_engine")["policy"].cp == 4
    config = load_config(path, [*given, "critic.parallel.cp=2", "model.impl=transformer_engine"])
    with pytest.raises(ConfigError, match="critic.parallel.cp = 2: TransformerEngine has no context parallelism in fp32"):
        check_layouts(config, read_archs(config), 8, "transformer_engine")
    in_8_bits = [*given, "policy.lora.base_bits=8", "model.impl=transformer_engine"]
    config = load_config(path, in_8_bits)
    with pytest.raises(ConfigError, match="policy.lora.base_bits = 8: TransformerEngine's layers have no weights in 8 bits; set"):
        check_layouts(config, read_archs(config), 8, "transformer_engine")
    check_layouts(load_config(path, in_8_bits[:-1]), read_archs(config), 8, "transformer_engine")
