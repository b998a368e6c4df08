"""Text files are UTF-8 in every locale: every open of one names its encoding."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "megappo"
TEXT = {"open", "fdopen", "read_text", "write_text"}


def unnamed(source: str) -> Iterator[int]:
    """Lines of calls that take the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        owner = of.id if isinstance(of, ast.Name) else ""
        modes = [each.value for each in (*node.args, *(one.value for one in node.keywords)) if isinstance(each, ast.Constant)]
        is_binary = any(isinstance(mode, str) and "b" in mode and len(mode) <= 3 for mode in modes)
        is_popen = owner == "subprocess" and any(keyword.arg == "text" for keyword in node.keywords)
        if (name in TEXT and owner not in ("os", "TokenRows") and not is_binary) or is_popen:
            yield node.lineno


def test_every_text_file_is_opened_as_utf_8() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    found = {str(path.relative_to(PACKAGE)): list(unnamed(path.read_text(encoding="utf-8"))) for path in modules}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_what_takes_the_locales_encoding_is_found() -> None:
    wrong = ["path.read_text()", "path.write_text(text)", "open(path)", "path.open('a+')", "subprocess.run(command, text=True)"]
    assert [len(list(unnamed(line))) for line in wrong] == [1] * len(wrong)
    right = ["path.read_text(encoding='utf-8')", "open(path, 'rb')", "path.open('r+b')", "os.open(path, 0)", "subprocess.run(x)"]
    assert [len(list(unnamed(line))) for line in right] == [0] * len(right)
