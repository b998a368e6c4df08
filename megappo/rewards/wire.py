"""JSON of remote rewards, version 1: requests to a reward server and its answers (docs/rewards.md). Opens no connection.
Both the client (`remote.py`) and `megappo serve-reward` use it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megappo.rewards.base import Result, RewardInput
from megappo.rewards.verdict import LARGEST, PER_TOKEN, plain

VERSION = 1
# Name in the request -> field of RewardInput.
FIELDS = {
    "id": "sample_id",
    **{
        name: name
        for name in ("prompt", "response", "answer", "truncated", "num_tokens", "full_response", "tokens", "turns", "record")
    },
}
_DEFAULTS = {"prompt": "", "answer": "", "truncated": False, "num_tokens": 0, "record": {}, "sample_id": ""}
_ANSWER = '{"scores": [a number, or null for undecided, per sample]}'


class BadScore(ValueError):
    """An answer whose value for one sample is no score. index: of the sample in the request."""

    def __init__(self, text: str, index: int) -> None:
        super().__init__(text)
        self.index = index


def request_body(samples: Sequence[RewardInput], send: Sequence[str]) -> bytes:
    """Body of a request about these samples. Raises ValueError, without the sample, for a record that JSON does not hold."""
    listed = [{name: getattr(sample, FIELDS[name]) for name in send} for sample in samples]
    try:
        # ASCII: half of a surrogate pair, which a record may hold, has no bytes in UTF-8.
        return json.dumps({"version": VERSION, "samples": listed}, allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"a record cannot be sent as JSON: {error}") from None


def results_of(body: bytes, num_samples: int) -> list[Result]:
    """Results of the answer, in the order of the samples: {score, parts, per_token}, a number if it is alone, None for undecided.
    Raises ValueError, one line, for anything but `num_samples` finite numbers or nulls. `verdict_of` counts per_token."""
    answer = _parsed(body, "the answer")
    if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
        raise ValueError(f"the answer is {_shown(answer)}, not {_ANSWER}")
    if unknown := sorted(answer.keys() - {"scores", "parts", PER_TOKEN, "version"}):
        raise ValueError(f"the answer holds {_shown(unknown[0])} beside scores; known are scores, parts, per_token and version")
    if answer.get("version", VERSION) != VERSION:
        raise ValueError(f"the answer is of version {_shown(answer['version'])} of the protocol, not {VERSION}")
    scores = _numbers(answer["scores"], "scores", num_samples)
    parts = answer.get("parts") or {}
    if not isinstance(parts, dict):
        raise ValueError(f"parts of the answer is {_shown(parts)}, not a list of numbers for each name")
    columns = {name: _numbers(values, f"parts.{name}", num_samples) for name, values in parts.items()}
    tokens = _of_tokens(answer.get(PER_TOKEN), num_samples)
    return [_result(score, {name: values[i] for name, values in columns.items()}, tokens[i]) for i, score in enumerate(scores)]


def _result(score: float | None, parts: Mapping[str, float | None], per_token: list[float] | None) -> Result:
    if score is None:
        return None
    given = {name: value for name, value in parts.items() if value is not None}
    beside = {**({"parts": given} if given else {}), **({PER_TOKEN: per_token} if per_token is not None else {})}
    return {"score": score, **beside} if beside else score


def _of_tokens(rows: Any, count: int) -> list[list[float] | None]:
    """Rewards of the sampled tokens of each sample; None for a sample, or for all, without."""
    if rows is None:
        return [None] * count
    for i, row in enumerate(_of_length(rows, PER_TOKEN, count)):
        if row is None:
            continue
        if not isinstance(row, list):
            raise BadScore(f"the answer has {_shown(row)} as {PER_TOKEN}[{i}], not a list of numbers", i)
        for value in row:
            if not _is_number(value):
                raise BadScore(f"the answer has {_shown(value)} in {PER_TOKEN}[{i}], not a finite number", i)
    return [None if row is None else [float(value) for value in row] for row in rows]


def _numbers(values: Any, what: str, count: int) -> list[float | None]:
    for i, value in enumerate(_of_length(values, what, count)):
        if value is not None and not _is_number(value):
            raise BadScore(f"the answer has {_shown(value)} as {what}[{i}], not a finite number", i)
    return [None if value is None else float(value) for value in values]


def _of_length(values: Any, what: str, count: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, list) else _shown(values)
        raise ValueError(f"the answer has {got} in {what} for {count} samples")
    return values


def _is_number(value: Any) -> bool:
    # A bool is an int to Python; comparing keeps integers of a thousand digits exact, and leaves NaN out.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _parsed(body: bytes, what: str) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except _Constant as error:
        raise ValueError(f"{what} holds {error}, which is no number of JSON; numbers are finite") from None
    except (ValueError, RecursionError):  # no UTF-8, no JSON, an integer of a million digits, brackets in brackets in brackets
        raise ValueError(f"{what} is no JSON: {_shown(body[:200].decode('utf-8', 'replace'))}") from None


class _Constant(Exception):
    """NaN or Infinity, which Python's parser takes and JSON does not have."""


def _refuse_constant(name: str) -> NoReturn:
    raise _Constant(name)


def _shown(value: Any) -> str:
    # One line of ASCII: the value comes from elsewhere, and goes to a terminal.
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 1e30 else "a very large integer"
    return text if len(text) <= 120 else text[:117] + "..."


# ---------------------------------------------------------------------------------------------------------- side of a server


def samples_of(body: bytes) -> list[RewardInput]:
    """Samples of a request; fields that it lacks are empty. Raises ValueError, one line, for anything but a request."""
    asked = _parsed(body, "the request")
    if not isinstance(asked, dict) or not isinstance(asked.get("samples"), list):
        raise ValueError('the request is not {"version": 1, "samples": [...]}')
    if asked.get("version") != VERSION:
        raise ValueError(f"the request has version {_shown(asked.get('version'))} of the protocol, not {VERSION}")
    return [_sample_of(item, f"samples[{i}]") for i, item in enumerate(asked["samples"])]


def answer_body(results: Sequence[Any]) -> dict[str, Any]:
    """Answer with these results of a function. Raises ValueError for one that is no score."""
    scores, columns = [], dict[str, list[float | None]]()
    tokens: list[list[float] | None] = [None] * len(results)
    for i, result in enumerate(results):
        beside = result if isinstance(result, Mapping) else {"score": result}
        if unknown := set(beside) - {"score", "parts", PER_TOKEN}:
            raise ValueError(f"returned {sorted(unknown)[0]} beside score, parts and per_token")
        score, parts = beside.get("score"), beside.get("parts", {})
        for name, value in {"the score": score, **parts}.items():
            if value is not None:
                _require_finite(value, name)
        if (rewards := plain(beside.get(PER_TOKEN))) is not None:
            if not isinstance(rewards, (list, tuple)):
                raise ValueError(f"returned {rewards!r} as per_token, not a list of numbers")
            for at, value in enumerate(rewards):
                _require_finite(value, f"per_token[{at}]")
            tokens[i] = [float(value) for value in rewards]
        scores.append(None if score is None else float(score))
        for name, value in parts.items():
            columns.setdefault(name, [None] * len(results))[i] = float(value)
    of_tokens = {PER_TOKEN: tokens} if any(rewards is not None for rewards in tokens) else {}
    return {"version": VERSION, "scores": scores, **({"parts": columns} if columns else {}), **of_tokens}


def _require_finite(value: Any, name: str) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise ValueError(f"returned {value!r} as {name}, not a finite number")


def _sample_of(item: Any, where: str) -> RewardInput:
    if not isinstance(item, dict) or not isinstance(item.get("response"), str):
        raise ValueError(f"{where} is {_shown(item)}, not an object with a response")
    if unknown := sorted(item.keys() - FIELDS.keys()):
        raise ValueError(f"{where} has the unknown field {_shown(unknown[0])}; known are {', '.join(FIELDS)}")
    given = {FIELDS[name]: value for name, value in item.items()}
    for name, value in given.items():
        kind = {"truncated": bool, "num_tokens": int, "record": dict, "tokens": list, "turns": list}.get(name, str)
        if not isinstance(value, kind):
            raise ValueError(f"{where} has {name} = {_shown(value)}, not a {kind.__name__}")
    for i, turn in enumerate(given.get("turns", ())):
        if not isinstance(turn, str):
            raise ValueError(f"{where} has turns[{i}] = {_shown(turn)}, not a str")
    given |= {name: tuple(given[name]) for name in ("tokens", "turns") if name in given}
    return RewardInput(**{**_DEFAULTS, **given})
