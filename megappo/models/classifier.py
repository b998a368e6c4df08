"""Checks of a checkpoint that scores whole sequences: a text-only sequence classifier of transformers with one label."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.models.families.registry import FAMILIES
from megappo.models.hf_config import read_config
from megappo.models.hf_tensors import CheckpointReader
from megappo.models.weight_map import VALUE_HEAD

HEAD = "SequenceClassification"
_BIAS = VALUE_HEAD.removesuffix("weight") + "bias"
_SHOWN = 4  # labels that a message names


def is_classifier(config: Mapping[str, Any]) -> bool:
    return str((config.get("architectures") or [""])[0]).endswith(f"For{HEAD}")


def check_classifier(path: str | Path) -> None:
    """Raise ValueError unless config.json is that of a sequence classifier with one label."""
    config = read_config(path)
    if not is_classifier(config):
        found = (config.get("architectures") or ["no architecture"])[0]
        known = ", ".join(family.architecture(HEAD) for family in FAMILIES.values())
        raise ValueError(f"is a {found} and has no score of a sequence; use a checkpoint of {known}")
    labels = labels_of(config)
    if len(labels) != 1:
        shown = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
        raise ValueError(f"has {len(labels)} labels ({shown}); a reward model has one (num_labels = 1 in config.json)")


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """Names of the head's rows as transformers reads them: id2label, otherwise num_labels, 2 by default."""
    # num_labels is written by old versions only; transformers prefers it where it contradicts id2label.
    names, count = config.get("id2label") or {}, config.get("num_labels")
    if names and (count is None or count == len(names)):
        return [str(name) for name in names.values()]
    return [f"LABEL_{index}" for index in range(2 if count is None else int(count))]


def check_head(path: str | Path, hidden_size: int) -> None:
    """Raise ValueError unless the weight files hold the head `score.weight` [1, hidden_size], without a bias."""
    reader = CheckpointReader(path)
    if reader.find(VALUE_HEAD) is None:
        raise ValueError(f"holds no {VALUE_HEAD}, the head that gives the score; export the whole classifier, not its base model")
    reader.slice(VALUE_HEAD, (1, hidden_size))  # raises, with both shapes
    if reader.find(_BIAS) is not None:
        raise ValueError(f"holds {_BIAS}, which transformers' sequence classifiers do not have; it would be left out")


def pad_id_of(path: str | Path) -> int | None:
    """Read `pad_token_id` of config.json: transformers takes the score at the last token that is not padding."""
    return read_config(path).get("pad_token_id")
