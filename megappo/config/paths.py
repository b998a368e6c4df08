"""Types of paths in a configuration: one printable line that a file system can hold. Of megappo, imports only the redaction."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from megappo.config.redaction import hide_secrets

UTF_8_LOCALE = "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
LONGEST_PATH, LONGEST_NAME = 4096, 255  # bytes: PATH_MAX and NAME_MAX of Linux
# `~`, `~/x`, `~name/x`, but not `~x.jsonl`; `$HOME` and `${HOME}`, but no single `$`.
FOR_A_SHELL = re.compile(r"^~(?=$|[A-Za-z0-9_.-]*/)|\$\w+|\$\{[^}]*\}?")


def odd_character(text: str) -> str | None:
    """Return the first character that ends or hides a line, escaped; None if there is none."""
    # Control characters, line separators, half surrogate pairs: they break a job script or a log, or have no bytes at all.
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            return repr(character)[1:-1]
    return None


def _check_path(path: str) -> str:
    if (character := odd_character(path)) is not None:
        raise PydanticCustomError("path", "holds the character {character}; a path is one printable line", {"character": character})
    try:
        names = [len(os.fsencode(name)) for name in path.split("/")]
    except UnicodeEncodeError as error:
        text = "holds {character}, and names of files have the characters of {codec} in this locale; {fix}"
        context = {"character": repr(error.object[error.start]), "codec": error.encoding, "fix": UTF_8_LOCALE}
        raise PydanticCustomError("path", text, context) from None
    if sum(names) + len(names) > LONGEST_PATH or max(names) > LONGEST_NAME:
        raise PydanticCustomError("path", "is longer than a file system allows ({longest} bytes a name)", {"longest": LONGEST_NAME})
    if (word := FOR_A_SHELL.search(path)) is not None:  # would make a folder `~`, and someone would `rm -r ~`
        text = "holds {word}, which only a shell replaces; write what it stands for"
        raise PydanticCustomError("path", text, {"word": word.group()})
    if "://" in path and hide_secrets(path) != path:  # the configuration is written to the run directory as it is
        raise PydanticCustomError("path", "holds credentials, which the run would record; download it and name the file", {})
    return path


PathText = Annotated[str, AfterValidator(_check_path)]
# Made absolute: a job script's copy of the configuration, and a resume from another directory, mean the same file.
FilePath = Annotated[str, AfterValidator(_check_path), AfterValidator(os.path.abspath)]
NAMES_MODEL = "names a model"


def _absolute_if_there(path: str) -> str:
    return os.path.abspath(path) if os.path.exists(path) else path


# A directory, or a Hugging Face name that `trainer/prepare/hub.py` replaces by a local directory. A directory is made absolute, as
# a FilePath: `megappo export` and `eval` of a run read its configuration from another directory.
PathIfThere = Annotated[str, AfterValidator(_check_path), AfterValidator(_absolute_if_there)]
ModelPath = Annotated[PathIfThere, NAMES_MODEL]
# Records: a file or the name of a Hugging Face dataset, or a list of them. Files are made absolute, for the same reason.
DataPaths = PathIfThere | Annotated[tuple[PathIfThere, ...], Field(min_length=1)]
