"""Checks of the paths of `megappo generate`, before torch is imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from megappo.config.errors import ConfigError, problem
from megappo.config.run_directory import EXPORTED
from megappo.config.yaml_reader import parse_yaml
from megappo.data.tokenizers import find_tokenizer
from megappo.models.hf_config import read_arch, read_config, text_config
from megappo.runtime.ending import CONFIG
from megappo.trainer.prepare.hub import local_model


def find_model(text: str) -> str:
    """Return the directory of the model that MODEL names: a checkpoint of Hugging Face or its name on the hub, or the export of a
    run. ValueError, one line, if there is none; for a run without an export it is the command that writes one."""
    path = Path(text)
    if path.name.startswith("step-") and ((run := path.parent.parent) / CONFIG).is_file():
        how = f"`megappo export {run} OUTPUT --step {path.name.removeprefix('step-')}` makes it a model"
        raise ConfigError(problem("MODEL", text, f"is a checkpoint of a run; {how}"))
    if (path / CONFIG).is_file() and not (path / "config.json").is_file():
        if not (path / EXPORTED / "config.json").is_file():
            fix = f"is a run without an export; `megappo export {text} OUTPUT` writes the model of its newest checkpoint"
            raise ConfigError(problem("MODEL", text, fix))
        return str(path / EXPORTED)
    model = local_model("MODEL", text)
    read_arch(model)
    return model


def find_tokenizer_of(model: str, option: str | None) -> str:
    """Return the path of the tokenizer: of --tokenizer, else of the model. ValueError, one line, if there is none."""
    path = model if option is None else local_model("--tokenizer", option)
    try:
        find_tokenizer(path, model)
    except ValueError as error:
        raise ConfigError(str(error).replace("data.tokenizer", "--tokenizer")) from None
    return path


def template_args_of(text: str) -> dict[str, Any]:
    """Read --template-args. ConfigError, one line, unless it is a mapping of YAML."""
    found = parse_yaml(text, "--template-args")[0]
    if not isinstance(found, dict):
        raise ConfigError(problem("--template-args", text, "must be a mapping, for example '{enable_thinking: false}'"))
    return found


def dtype_of_weights(model: str) -> Literal["bf16", "fp32"]:
    """Dtype of the checkpoint's weights, as its config.json has it; bf16 for every 16-bit type and where it says nothing."""
    config = text_config(read_config(model))
    return "fp32" if config.get("dtype", config.get("torch_dtype")) == "float32" else "bf16"
