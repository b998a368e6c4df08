"""A headless browser that opens a page from the disk, without a network, and gives back its document."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",  # it refuses to run as root otherwise, as in CI
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]
RESULT = "result-of-test"


def find_browser() -> str:
    """Path of a browser. Skips the test with the reason if there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no browser: the page is opened in chromium, which scripts/test.sh installs as root (apt-get install chromium)")
    return found


@dataclass(frozen=True)
class Document:
    """Elements of the document after its scripts ran. tags: tag -> count. result: what the test's script returned. messages: of the
    browser's console."""

    title: str
    tags: Counter[str]
    result: Any
    messages: list[str]


def open_page(page: Path, script: str, profile: Path, *flags: str, fragment: str = "") -> Document:
    """Open a copy of the page that runs `script` (a function's body; its result is JSON) after its own, and read the document."""
    body = (
        f"const result = (() => {{ {script} }})(); const place = document.createElement('pre'); place.id = '{RESULT}';"
        "place.textContent = JSON.stringify(result); document.body.append(place);"
    )
    copy = page.with_name(f"{page.stem}.test.html")
    copy.write_text(with_script(page.read_text(encoding="utf-8"), body), encoding="utf-8")
    command = [find_browser(), *FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", f"{copy.as_uri()}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    parser = Reader()
    parser.feed(done.stdout)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    result = json.loads("".join(parser.text_of["result"])) if parser.text_of["result"] else None
    return Document("".join(parser.text_of["title"]), parser.tags, result, messages)


def with_script(html: str, body: str) -> str:
    """The page with one more script at its end, which its policy allows."""
    digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    return html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1).replace("</body>", f"<script>{body}</script></body>")


class Reader(HTMLParser):
    """Tags, the title, and the text of the test's result."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.text_of: dict[str, list[str]] = {"title": [], "result": []}
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag == "title" and self.tags["title"] == 1:
            self._inside = "title"
        if dict(attrs).get("id") == RESULT:
            self._inside = "result"

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text_of[self._inside].append(data)
