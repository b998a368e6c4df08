"""`megappo generate` on a checkpoint: its own dtype, the length that its model takes, and the export of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.commands.generate import answer as module
from megappo.commands.generate.inputs import dtype_of_weights, find_model
from tests.commands.plan.checkpoints import TINY, write_checkpoint


class Started(Exception):
    pass


def asked_of_the_engines(monkeypatch: pytest.MonkeyPatch, model: Path, **how: Any) -> tuple[str, int]:
    """(dtype of the engine, longest response) that `answer` asks for."""
    found: dict[str, Any] = {}

    class Engines:
        def __init__(self, *_: object) -> None:
            pass

        def build(self, spec: Any) -> object:
            found["dtype"] = spec.section.dtype
            return object()

    def build_rollout(config: Any, *_: object, **__: object) -> None:
        raise Started(found.setdefault("tokens", config.rollout.max_response_tokens))

    monkeypatch.setattr(module, "start_alone", lambda device: None)
    monkeypatch.setattr(module, "build_rollout", build_rollout)
    defaults: dict[str, Any] = dict(engine="megatron", max_tokens=None, temperature=0.0, dtype=None)
    with pytest.raises(Started):
        module.answer(str(model), ["1+1="], module.Texts(chat_template=False), **{**defaults, **how}, engines=Engines)
    return found["dtype"], found["tokens"]


@pytest.mark.parametrize("facts, dtype", [({"torch_dtype": "float32"}, "fp32"), ({"dtype": "bfloat16"}, "bf16"), ({}, "bf16")])
def test_the_dtype_is_that_of_the_checkpoint_unless_it_is_asked_for(monkeypatch, tmp_path, facts, dtype):
    plain = {key: value for key, value in TINY.items() if key not in ("dtype", "torch_dtype")}
    model = write_checkpoint(tmp_path / "model", plain | facts)
    assert dtype_of_weights(str(model)) == dtype
    assert asked_of_the_engines(monkeypatch, model)[0] == dtype
    assert asked_of_the_engines(monkeypatch, model, dtype="fp32")[0] == "fp32"


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_way_out(tmp_path):
    model = write_checkpoint(tmp_path / "model", TINY)
    with pytest.raises(ValueError, match=f"^the tokenizer {model} has no chat template; prompts go as they are with --raw$"):
        module.Texts(chat_template=True).load(str(model))
    assert module.Texts(chat_template=False).load(str(model)).encode("1+1=")


@pytest.mark.parametrize("positions, tokens", [(64, 64), (4096, 256)])
def test_the_default_length_is_256_or_what_the_model_takes(monkeypatch, tmp_path, positions, tokens):
    model = write_checkpoint(tmp_path / "model", TINY | {"max_position_embeddings": positions})
    found = asked_of_the_engines(monkeypatch, model)[1]
    assert found == 256 if tokens == 256 else 0 < positions - found < 10, "what the prompt leaves"
    with pytest.raises(ValueError, match=f"--max-tokens {positions}: .* use at most"):
        asked_of_the_engines(monkeypatch, model, max_tokens=positions)


def test_a_run_is_its_export(tmp_path):
    write_checkpoint(tmp_path / "export", TINY)
    (tmp_path / "config.yaml").write_text(json.dumps({}))
    assert find_model(str(tmp_path)) == str(tmp_path / "export")
    assert find_model(str(tmp_path / "export")) == str(tmp_path / "export")
