"""Models of the Hugging Face hub: replaces names in a configuration by directories of downloaded files. huggingface_hub keeps the
cache ($HF_HOME) and its locks, so the ranks of a node download a model once."""

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
# Subfolders (`original/`, `onnx/`) hold the weights again in another format, as does Mistral's consolidated file.
UNWANTED = ["*/*", "consolidated*"]
_REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"models--.+/snapshots/(?P<commit>[0-9a-f]{40})")


def with_local_models(config: Config, *, shapes_only: bool = False) -> Config:
    """Replace every hub name, `owner/name` or `owner/name@revision`, by the directory of its files, downloading what the cache
    lacks. shapes_only: only config.json. ConfigError, one line, if a download fails."""
    return with_values(config, {key: _download(key, name, shapes_only) for key, name in _names(config)})


def local_model(key: str, path: str) -> str:
    """Return the directory of one model or tokenizer, or `path` itself if it is no hub name. ConfigError as `with_local_models`."""
    return _download(key, path, shapes_only=False) if _is_name(path) else path


def local_overrides(config: BaseModel, resolved: BaseModel) -> list[str]:
    """Return the overrides that turn `config` into `resolved`, so other processes of the run read the same revision."""
    return [f"{key}={json.dumps(value_at(resolved, key))}" for key, _ in _names(config)]


def names_models(config: BaseModel) -> bool:
    """Return True if a model or tokenizer of the configuration is a hub name."""
    return next(_names(config), None) is not None


def pinned_names(config: BaseModel, resolved: BaseModel) -> dict[str, str]:
    """Return key -> `owner/name@commit` for every hub name in `config`, with the commit found in `resolved`."""
    pins = {}
    for key, name in _names(config):
        commit = commit_of(value_at(resolved, key))
        assert commit is not None, "huggingface_hub returns a snapshot of its cache"
        pins[key] = f"{name.partition('@')[0]}@{commit}"
    return pins


def with_values(config: Config, values: Mapping[str, str]) -> Config:
    for key, value in values.items():
        config = replaced(config, key.split("."), value)
    return config


def commit_of(path: str) -> str | None:
    """Return the commit of a model in the hub cache; None for any other directory."""
    found = _SNAPSHOT.search(path)
    return found["commit"] if found else None


def _names(config: BaseModel) -> Iterator[tuple[str, str]]:
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
    # The import takes seconds, and few runs need it.
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
