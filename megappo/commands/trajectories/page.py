"""Page of trajectories: one self-contained HTML file, which opens without a server or a network.

A model's text is untrusted: it is in a JSON block that no text can end, page.js shows it as text nodes, and the page's policy runs
no other script and loads nothing. Pictures of prompts are inside it, as data: URIs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from megappo.commands.trajectories.analyse import Analysis, Sample
from megappo.telemetry.metrics import finite_or_none
from megappo.telemetry.trajectories.files import rounded
from megappo.telemetry.trajectories.read import Trajectory

MAX_SAMPLES = 200
MAX_TOKENS = 400_000  # for a page without --max-samples: 40 MB
HERE = Path(__file__).parent
MOST_DOTS = 2000  # dots in a picture; more overlap and slow the browser


def page(analysis: Analysis, name: str, max_samples: int | None, notes: Sequence[str]) -> tuple[str, list[str]]:
    """Return the HTML of at most `max_samples` samples (None: as many as a browser handles), and notes on what is left out."""
    mean_length = sum(sample.length for sample in analysis.samples) / len(analysis.samples)
    chosen = choose(analysis, max_samples or min(MAX_SAMPLES, max(1, int(MAX_TOKENS / max(mean_length, 1)))))
    more = []
    if len(chosen) < len(analysis.samples):
        more.append(
            f"the page holds {len(chosen):,} of {len(analysis.samples):,} samples: the worst of each kind, the others evenly over "
            "the steps; --max-samples N for more, --steps A..B for fewer"
        )
    places = {index: place for place, index in enumerate(chosen)}
    data = {
        "run": name,
        "notes": [*notes, *more],
        "total": len(analysis.samples),
        "byToken": analysis.by_token,
        "positions": [one._asdict() for one in analysis.positions],
        "dots": [
            [sample.length, sample.trajectory.score, sample.trajectory.is_truncated, places.get(index)]
            for index, sample in _dots(analysis.samples, chosen)
        ],
        "samples": [_facts(analysis.samples[index], analysis) for index in chosen],
    }
    pictures = any(analysis.samples[index].trajectory.images for index in chosen)
    return _html(name, finite_or_none(data), pictures=pictures), more


def choose(analysis: Analysis, most: int) -> list[int]:
    """Choose ascending indices of at most `most` samples: the worst of each kind, and others evenly over the steps."""
    samples = analysis.samples
    place = {id(sample): index for index, sample in enumerate(samples)}
    kinds = list(analysis.worst.values())
    # Take turns, so that a small page has some of every kind.
    turns = [kind[rank] for rank in range(max(map(len, kinds), default=0)) for kind in kinds if rank < len(kind)]
    worst = list(dict.fromkeys(place[id(sample)] for sample in turns))[:most]
    rest = [index for index in range(len(samples)) if index not in set(worst)]
    room = min(most - len(worst), len(rest))
    return sorted([*worst, *(rest[i * len(rest) // room] for i in range(room))])


def _dots(samples: Sequence[Sample], chosen: Sequence[int]) -> list[tuple[int, Sample]]:
    others = [index for index in range(len(samples)) if index not in set(chosen)]
    room = max(0, min(MOST_DOTS - len(chosen), len(others)))
    return [(index, samples[index]) for index in sorted([*chosen, *(others[i * len(others) // room] for i in range(room))])]


def _facts(sample: Sample, analysis: Analysis) -> dict[str, Any]:
    trajectory = sample.trajectory
    shown = {"step", "sample", "id", "prompt", "answer", "response", "recipe", "finish", "version"}
    return {
        **trajectory.model_dump(include=shown | {"prompt_tokens", "prompt_texts", "texts", "images"}),
        "score": _short(trajectory.score),
        "parts": {name: _short(score) for name, score in trajectory.parts.items()},
        "tokens": trajectory.tokens.tolist(),
        "mask": trajectory.mask.astype(int).tolist(),
        "special": sorted(trajectory.special),
        "fields": {name: rounded(numbers.tolist()) for name, numbers in _numbers(trajectory).items()},
        "length": sample.length,
        "repetition": round(sample.repetition, 4),
        "kl": None if math.isnan(sample.kl) else _short(sample.kl),
        "entropy": _short(sample.entropy),
        "worst": [kind for kind, samples in analysis.worst.items() if any(one is sample for one in samples)],
    }


def _short(number: Any) -> Any:
    # 0.1 + 0.2 is 0.3 on the page; a part may be a text, or nothing.
    return rounded([number])[0] if isinstance(number, float) else number


def _numbers(trajectory: Trajectory) -> dict[str, np.ndarray]:
    own = {name: numbers for name, numbers in trajectory.fields.items() if name == "logprob" or "logprob" not in name}
    derived = {
        "kl": trajectory.kl,
        "teacher_kl": trajectory.teacher_kl,
        "value_error": trajectory.value_error,
        "log_ratio": trajectory.log_ratio,
    }
    return own | {name: numbers for name, numbers in derived.items() if numbers is not None}


def json_block(data: Any) -> str:
    """Write JSON that is safe inside a <script> element: no text in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # In JSON < > & occur only inside strings, where the escapes mean the same.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _html(name: str, data: Any, *, pictures: bool) -> str:
    style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    policy += "; img-src data:" if pictures else ""
    title = escape(name.encode("utf-8", "replace").decode())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}: trajectories</title>
<style>{style}</style>
</head>
<body>
<noscript>This page is drawn by a script of its own; allow scripts for this file.</noscript>
<script type="application/json" id="data">{json_block(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    """Source for a Content-Security-Policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
