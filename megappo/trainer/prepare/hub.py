"""Models of the Hugging Face hub: names in a configuration become directories of downloaded files, before anything reads them.

huggingface_hub keeps its cache ($HF_HOME) and its locks: ranks of a node download a model once, later runs not at all.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megappo.config.errors import ConfigError, problem
from megappo.config.keys import keys_in, replaced, value_at
from megappo.config.paths import NAMES_MODEL
from megappo.runtime.messages import first_line

Config = TypeVar("Config", bound=BaseModel)

# No pickled weights and no code: neither is ever read.
WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
SHAPES = ["config.json"]
# A folder below (`original/`, `onnx/`) holds the weights in another form once more; so does Mistral's consolidated file.
UNWANTED = ["*/*", "consolidated*"]
_REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"models--.+/snapshots/(?P<commit>[0-9a-f]{40})")


def with_local_models(config: Config, *, shapes_only: bool = False) -> Config:
    """Put the directory of its files in place of every name of the hub, `owner/name` or `owner/name@revision`.

    Downloads what the cache lacks; shapes_only: config.json alone. ConfigError, one line, if that fails.
    """
    return with_values(config, {key: _download(key, name, shapes_only) for key, name in _names(config)})


def local_model(key: str, path: str) -> str:
    """Directory of one model or tokenizer, `path` itself if it is no name of the hub. ConfigError as `with_local_models`."""
    return _download(key, path, shapes_only=False) if _is_name(path) else path


def local_overrides(config: BaseModel, resolved: BaseModel) -> list[str]:
    """Overrides that make `resolved` of `config`: other processes of the run read the same revision, whatever the hub says then."""
    return [f"{key}={json.dumps(value_at(resolved, key))}" for key, _ in _names(config)]


def names_models(config: BaseModel) -> bool:
    """True if a model or tokenizer of the configuration is a name of the hub."""
    return next(_names(config), None) is not None


def pinned_names(config: BaseModel, resolved: BaseModel) -> dict[str, str]:
    """Key -> `owner/name@commit` of every name of the hub in `config`, with the commit that `resolved` has of it."""
    pins = {}
    for key, name in _names(config):
        commit = commit_of(value_at(resolved, key))
        assert commit is not None, "huggingface_hub returns a snapshot of its cache"
        pins[key] = f"{name.partition('@')[0]}@{commit}"
    return pins


def with_values(config: Config, values: Mapping[str, str]) -> Config:
    """Copy of the configuration with other values at these keys."""
    for key, value in values.items():
        config = replaced(config, key.split("."), value)
    return config


def commit_of(path: str) -> str | None:
    """Commit of a model in the cache of the hub; None for any other directory."""
    found = _SNAPSHOT.search(path)
    return found["commit"] if found else None


def _names(config: BaseModel) -> Iterator[tuple[str, str]]:
    """(key, name) of all models and tokenizers that are names of the hub."""
    for key, field in keys_in(config):
        if _names_model(field) and (value := value_at(config, key)) is not None and _is_name(value):
            yield key, value


def _names_model(field: FieldInfo) -> bool:
    kinds = (field, *get_args(field.annotation))  # of `ModelPath | None` the mark is inside the union
    return any(NAMES_MODEL in getattr(kind, name, ()) for kind in kinds for name in ("metadata", "__metadata__"))


def _is_name(value: str) -> bool:
    # `models/mine` beside an existing `models/` is a directory that is missing, no name.
    return _REPOSITORY.fullmatch(value) is not None and not Path(value).exists() and not Path(value).parent.is_dir()


def _download(key: str, name: str, shapes_only: bool) -> str:
    # In seconds imported, and asked for by few runs.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    found = _REPOSITORY.fullmatch(name)
    assert found is not None
    repository, revision = found["name"], found["revision"]
    of_revision = f" --revision {revision}" if revision else ""
    by_hand = f"`hf download {repository}{of_revision}` where there is a connection, with the same HF_HOME, or name a directory"
    try:
        return snapshot_download(
            repository, revision=revision, allow_patterns=SHAPES if shapes_only else WANTED, ignore_patterns=UNWANTED
        )
    except GatedRepoError:
        fix = f"accept the terms of {repository} on the hub, then `hf auth login` or set HF_TOKEN"
    except RevisionNotFoundError:
        fix = f"{repository} has no revision {revision}"
    except RepositoryNotFoundError:
        fix = "no such directory, and no model of that name on the Hugging Face hub (a private one needs HF_TOKEN)"
    except (OSError, ValueError, HfHubHTTPError) as error:  # no connection, offline mode, a full disk
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
            fix = f"no such directory, and not in the cache, which HF_HUB_OFFLINE allows alone; {by_hand}"
        else:
            fix = f"no such directory, and not downloaded from the Hugging Face hub: {first_line(error)}; {by_hand}"
    raise ConfigError(problem(key, name, fix))
