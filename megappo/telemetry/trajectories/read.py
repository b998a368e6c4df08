"""Trajectories of a run, read from its files: every record is checked, and the line at fault is named."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError

from megappo.config.errors import ConfigError
from megappo.telemetry.jsonl import read_whole_lines
from megappo.telemetry.trajectories.files import FORMAT, TOKEN_FIELDS, files_by_step

_FLOATS = TypeAdapter(list[float | None], config=ConfigDict(strict=True))
_IDS = TypeAdapter(list[Annotated[int, Field(ge=-(2**63), lt=2**63)]], config=ConfigDict(strict=True))

Number = Annotated[float, BeforeValidator(lambda value: float("nan") if value is None else value)]
"""A number; null, which stands for one that was not finite, becomes NaN."""
Numbers = Annotated[np.ndarray, PlainValidator(lambda value: np.array(_FLOATS.validate_python(value), np.float64))]
Ids = Annotated[np.ndarray, PlainValidator(lambda value: np.array(_IDS.validate_python(value), np.int64))]
# Millions of tokens, and a vocabulary of thousands.
Texts = Annotated[list[str], AfterValidator(lambda texts: list(map(sys.intern, texts)))]


PICTURE = r"^data:image/jpeg;base64,[A-Za-z0-9+/]*={0,2}$"


class Trajectory(BaseModel):
    """One sample. Arrays and lists have one entry per token of the response, from the first sampled token on."""

    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True)

    step: int
    sample: int
    """Index in its step."""
    id: str = ""
    prompt: str = ""
    answer: str = ""
    response: str = ""
    score: Number = float("nan")
    """NaN without a score, or if it was not finite."""
    reason: str = ""
    """Why it has no score, else empty."""
    parts: dict[str, Number] = {}
    recipe: str = ""
    finish: Literal["stop", "length", "window"]
    version: int
    kl_coef: Number = float("nan")
    prompt_tokens: list[int]
    prompt_texts: Texts
    tokens: Ids = Field(alias="response_tokens")
    texts: Texts = Field(alias="response_texts")
    mask: Annotated[Numbers, AfterValidator(lambda numbers: numbers == 1)] = Field(alias="response_mask")
    """bool, true on sampled tokens."""
    fields: dict[str, Numbers]
    """Name -> fp64, NaN where the mask is false; a run without a reference lacks ref_logprob, one without a teacher
    teacher_logprob."""
    images: dict[str, Annotated[str, Field(pattern=PICTURE)]] = {}
    """Id of an image's tokens in the prompt -> a small picture of it, as a data: URI."""
    special: frozenset[int] = Field(alias="special_tokens", strict=False)
    """Ids that stand for no text."""

    @property
    def length(self) -> int:
        return int(self.mask.sum())

    @property
    def is_truncated(self) -> bool:
        return self.finish == "length"

    @property
    def kl(self) -> np.ndarray | None:
        """log pi - log pi_ref of every token (k1), in nats; its sum over a response is that of `kl/per_response`."""
        return self._difference("logprob", "ref_logprob")

    @property
    def teacher_kl(self) -> np.ndarray | None:
        """log pi - log teacher of every token (k1), in nats."""
        return self._difference("logprob", "teacher_logprob")

    @property
    def value_error(self) -> np.ndarray | None:
        """Value less return of every token, before the step's updates."""
        return self._difference("value", "returns")

    @property
    def log_ratio(self) -> np.ndarray | None:
        """Trainer's less sampler's log-prob of every token, nats: 0 but for rounding and top-p."""
        return self._difference("logprob", "rollout_logprob")

    def _difference(self, name: str, other: str) -> np.ndarray | None:
        return self.fields[name] - self.fields[other] if {name, other} <= self.fields.keys() else None


@dataclass(frozen=True)
class Sampled:
    """Trajectories in the order of steps. notes: one line for everything left out. mode: permission bits that all files share."""

    trajectories: list[Trajectory]
    notes: list[str]
    mode: int


def parse_steps(text: str) -> tuple[int, int | None]:
    """Return first and last step of `10`, `10..20`, `10..` or `..20`; None: to the end. ConfigError otherwise."""
    found = re.fullmatch(r"(\d{1,18})|(\d{0,18})\.\.(\d{0,18})", text)
    if found is None or text == "..":
        raise ConfigError(f"--steps {text}: write one step (10) or a range (10..20, 10.., ..20)")
    if found[1] is not None:
        return int(found[1]), int(found[1])
    first, last = int(found[2] or 0), int(found[3]) if found[3] else None
    if last is not None and last < first:
        raise ConfigError(f"--steps {text}: the last step comes before the first; write {last}..{first}")
    return first, last


def read_run(run: Path, steps: tuple[int, int | None] = (0, None)) -> Sampled:
    """Read a run, or a folder with the files alone. ConfigError, one line, if there is nothing to read or a record is broken."""
    files = files_by_step(run)
    first, last = steps
    chosen = {step: file for step, file in files.items() if step >= first and (last is None or step <= last)}
    if not chosen:
        known = f"{min(files)} to {max(files)}" if len(files) > 1 else str(min(files))
        raise ConfigError(f"--steps: {run} has no trajectories of these steps, only of {known}")
    trajectories: list[Trajectory] = []
    notes: list[str] = []
    mode = 0o666
    for step, file in sorted(chosen.items()):
        records, is_torn = _records(file)
        mode &= file.stat().st_mode
        if is_torn:
            notes.append(f"{file.name}: the last line is cut off (being written, or copied too early); it is left out")
        trajectories += [_trajectory(record, step, file, line) for line, record in enumerate(records, 1)]
    if not trajectories:
        raise ConfigError(f"{run}: no whole record in {', '.join(file.name for file in chosen.values())}")
    ended = [one for one in trajectories if one.finish != "window"]
    if not ended:
        raise ConfigError(f"{run}: all {len(trajectories)} responses go on in a later step; name later ones (--steps)")
    if len(ended) < len(trajectories):
        notes.append(f"{len(trajectories) - len(ended)} responses go on in a later step, without a score yet; they are left out")
    scored = [one for one in ended if not one.reason]
    if not scored:
        raise ConfigError(f"{run}: none of {len(ended)} responses has a score ({_reasons(ended)}); name other steps (--steps)")
    if len(scored) < len(ended):
        notes.append(f"{len(ended) - len(scored)} responses have no score ({_reasons(ended)}); they are left out")
    return Sampled(scored, notes, mode)


def _reasons(trajectories: Sequence[Trajectory]) -> str:
    counts = Counter(one.reason for one in trajectories if one.reason)
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))


def _records(file: Path) -> tuple[list[dict[str, Any]], bool]:
    try:
        return read_whole_lines(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}; it is no file of trajectories") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply; it is no file of trajectories") from None
    except ValueError as error:  # a broken line, or a number with thousands of digits
        raise ConfigError(str(error) if str(file) in str(error) else f"{file}: {error}") from None


# ------------------------------------------------------------------------------------------------------------- one record


def _trajectory(record: Any, step: int, file: Path, line: int) -> Trajectory:
    place = f"{file}, line {line}"
    if not isinstance(record, dict):
        raise ConfigError(f"{place}: not a JSON object")
    if record.get("format") != FORMAT:
        raise ConfigError(f"{place}: format is {str(record.get('format'))[:40]}, and this megappo reads {FORMAT}")
    fields = {name: record[name] for name in TOKEN_FIELDS if name in record}
    try:
        read = Trajectory.model_validate({**record, "step": step, "fields": fields})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{place}: {'.'.join(map(str, first['loc'])).removeprefix('fields.')}: {first['msg']}") from None
    tokens = len(read.tokens)
    for name, entries in {"response_mask": read.mask, "response_texts": read.texts, **read.fields}.items():
        if len(entries) != tokens:
            raise ConfigError(f"{place}: {name} has {len(entries)} entries for {tokens} tokens of the response")
    if len(read.prompt_texts) != len(read.prompt_tokens):
        raise ConfigError(f"{place}: prompt_texts has {len(read.prompt_texts)} entries for {len(read.prompt_tokens)} tokens")
    for numbers in read.fields.values():
        numbers[~read.mask] = np.nan  # computed for the whole sequence, and meant for what the policy sampled
    return read
