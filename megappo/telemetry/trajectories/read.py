"""Trajectories of a run, read from its files: every record is checked, and the line at fault is named."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megappo.config.errors import ConfigError
from megappo.telemetry.jsonl import read_whole_lines
from megappo.telemetry.trajectories.files import FORMAT, TOKEN_FIELDS, files_by_step


@dataclass(frozen=True)
class Trajectory:
    """One sample. Arrays and lists have one entry per token of the response, from the first sampled token on."""

    step: int
    sample: int
    """Index in its step."""
    id: str
    prompt: str
    answer: str
    response: str
    score: float
    """NaN without a score, or if it was not finite."""
    reason: str
    """Why it has no score, else empty."""
    parts: dict[str, float]
    recipe: str
    finish: str
    version: int
    kl_coef: float
    prompt_tokens: list[int]
    prompt_texts: list[str]
    tokens: np.ndarray
    """int64 ids."""
    texts: list[str]
    mask: np.ndarray
    """bool, true on sampled tokens."""
    fields: dict[str, np.ndarray]
    """Name -> fp64, NaN where the mask is false; a run without a reference lacks ref_logprob."""
    special: frozenset[int]
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


class _Faulty(Exception):
    """A record that is not of the format."""


def _trajectory(record: Any, step: int, file: Path, line: int) -> Trajectory:
    try:
        if not isinstance(record, dict):
            raise _Faulty("not a JSON object")
        if record.get("format") != FORMAT:
            raise _Faulty(f"format is {str(record.get('format'))[:40]}, and this megappo reads {FORMAT}")
        return _of_record(record, step)
    except _Faulty as fault:
        raise ConfigError(f"{file}, line {line}: {fault}") from None


def _of_record(record: Mapping[str, Any], step: int) -> Trajectory:
    tokens = _ids(record, "response_tokens")
    prompt_tokens = _ids(record, "prompt_tokens").tolist()
    mask = _numbers(record, "response_mask", len(tokens)) == 1
    parts = record.get("parts", {})
    if not isinstance(parts, dict):
        raise _Faulty("parts is not an object")
    fields = {name: _numbers(record, name, len(tokens)) for name in TOKEN_FIELDS if name in record}
    return Trajectory(
        step=step,
        sample=_integer(record, "sample"),
        id=_text(record, "id"),
        prompt=_text(record, "prompt"),
        answer=_text(record, "answer"),
        response=_text(record, "response"),
        score=_number(record, "score"),
        reason=_text(record, "reason"),
        recipe=_text(record, "recipe"),
        parts={name: _number(parts, name) for name in parts},
        finish=_finish(record),
        version=_integer(record, "version"),
        kl_coef=_number(record, "kl_coef"),
        prompt_tokens=prompt_tokens,
        prompt_texts=_texts(record, "prompt_texts", len(prompt_tokens)),
        tokens=tokens,
        texts=_texts(record, "response_texts", len(tokens)),
        mask=mask,
        fields={name: np.where(mask, numbers, np.nan) for name, numbers in fields.items()},
        special=frozenset(_ids(record, "special_tokens").tolist()),
    )


def _finish(record: Mapping[str, Any]) -> str:
    finish = record.get("finish")
    if finish not in ("stop", "length", "window"):
        raise _Faulty("finish is neither stop, length nor window")
    return finish


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key, "")
    if not isinstance(value, str):
        raise _Faulty(f"{key} is not a text")
    return value


def _integer(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if type(value) is not int:
        raise _Faulty(f"{key} is not an integer")
    return value


def _number(record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    if value is None:  # not finite
        return float("nan")
    if not isinstance(value, (int, float)):
        raise _Faulty(f"{key} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise _Faulty(f"{key} is larger than any number of this run") from None


def _ids(record: Mapping[str, Any], key: str) -> np.ndarray:
    value = record.get(key)
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise _Faulty(f"{key} is not a list of token ids")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise _Faulty(f"{key} holds a number that is no token id") from None


def _numbers(record: Mapping[str, Any], key: str, count: int) -> np.ndarray:
    value = record.get(key)
    if not isinstance(value, list) or len(value) != count:
        what = f"{len(value)} numbers" if isinstance(value, list) else "no list"
        raise _Faulty(f"{key} has {what} for {count} tokens of the response")
    if not set(map(type, value)) <= {int, float, type(None)}:
        raise _Faulty(f"{key} is not a list of numbers")
    try:
        return np.array(value, dtype=np.float64)  # null becomes NaN
    except OverflowError:
        raise _Faulty(f"{key} holds a number that is larger than any of a run") from None


def _texts(record: Mapping[str, Any], key: str, count: int) -> list[str]:
    value = record.get(key)
    if not isinstance(value, list) or len(value) != count or not set(map(type, value)) <= {str}:
        raise _Faulty(f"{key} is not a list of {count} texts, one per token")
    return list(map(sys.intern, value))  # millions of tokens, and a vocabulary of thousands
