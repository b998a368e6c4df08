"""One line of an error: the same for every message of the package, and written once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megappo.runtime.messages import first_line

ROOT = Path(__file__).parents[2]
# An error's text that is cut to its first line by hand, as it stood in eight files.
BY_HAND = re.compile(r"str\((error|exc|e)\b.*\)\s*\.?(splitlines\(\)\[0\]|partition\(\"\\n\"\)\[0\]|split\(\"\\n\", 1\)\[0\])")


@pytest.mark.parametrize(
    ("error", "plain", "with_kind"),
    [
        (OSError("disk full"), "disk full", "OSError: disk full"),
        (OSError("\n  no http://host\nmore"), "no http://host", "OSError: no http://host"),
        (TimeoutError(), "TimeoutError", "TimeoutError"),
        (ValueError(" \n\t"), "ValueError", "ValueError"),
    ],
    ids=("one line", "several", "without a message", "blank"),
)
def test_a_message_is_its_first_line_with_text(error: Exception, plain: str, with_kind: str) -> None:
    assert first_line(error) == plain
    assert first_line(error, kind=True) == with_kind


def test_nobody_cuts_a_message_by_hand() -> None:
    sources = [path for part in ("megappo", "scripts", "benchmarks", "examples") for path in sorted((ROOT / part).rglob("*.py"))]
    found = [str(path.relative_to(ROOT)) for path in sources if BY_HAND.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_a_cut_by_hand_is_found() -> None:
    assert BY_HAND.search("reason = (str(error).strip() or type(error).__name__).splitlines()[0]")
    assert BY_HAND.search('text = str(error).strip().partition("\\n")[0]')
    assert not BY_HAND.search("description=__doc__.splitlines()[0]")
