"""Final answers of math_verify as text: where a response names one, and the spelling of it that the math-verify package reads.
It takes `2.5e-3` for 2.5 and `12\\,345` for 12 times 345, and joins boxes that are near each other. docs/rewards.md has the table
of what is decided. No sympy is needed here."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

# `####` marks an answer if a number follows: digits, or LaTeX's fractions, roots and pi. `#### Step 1` is a heading of Markdown.
_MARKED = re.compile(r"####[^\S\n]*(?=[-+\u2212]?[ ]?(?:\\?\$)?[ ]?[-\u2212]?[ ]?(?:\.?[0-9]|\\(?:[dt]?frac|sqrt|pi)))([^\n]*)")
_BOX_PARTS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_EMPTY = re.compile(r"(?:\s|~|\$|\\[,;:! ]|\\q?quad)*")
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(?:\s|~|\$|\\[,;:! ])*\}")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)

_SPACE = r"(?:\\[,;:> ]|\\thinspace(?![a-zA-Z])|[~\u00a0\u2009\u202f])"
_ANY_SPACE = rf"(?:{_SPACE}|\\!|\s)"
_DELIMITER = re.compile(r"(?<!\\)(?:\$+|\\[()\[\]])")
_GROUPED = r"(?<![\w.,{{^])([0-9]{{1,3}})((?:{space}[0-9]{{3}})+)(?![0-9]|\s*/)"
_GROUPED_LATEX, _GROUPED_PLAIN = re.compile(_GROUPED.format(space=_SPACE)), re.compile(_GROUPED.format(space=f"(?:{_SPACE}| )"))
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+\u2212]?[0-9]{1,9})(?!\w|\.[0-9])")
_TIMES_TEN = rf"{_ANY_SPACE}*\\(?:times|cdot)(?![a-zA-Z]){_ANY_SPACE}*10\^"
_POWER_OF_TEN = re.compile(rf"(?<![\w.\\^])([0-9]+(?:\.[0-9]+)?|\.[0-9]+){_TIMES_TEN}\{{?([-+\u2212]?[0-9]{{1,9}})(?![0-9])\}}?")
_MIXED_LATEX = re.compile(
    rf"(?<![\w.}}/^)])([0-9]{{1,40}}){_ANY_SPACE}*\\[dtc]?frac{_ANY_SPACE}*(?:\{{([0-9]{{1,40}})\}}\{{([0-9]{{1,40}})\}}|([0-9])([0-9])(?![0-9]))"
)
_MIXED_PLAIN = re.compile(r"(?<![\w.}/^)])([0-9]{1,40}) +([0-9]{1,40})/([0-9]{1,40})(?![\w/^.]\w)")
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_COUNT = r"(?:[0-9]{1,3}(?:\{?,\}?[0-9]{3})+|[0-9]{1,40})(?:\.[0-9]{1,40})?|\.[0-9]{1,40}"
_WORD = rf"{_ANY_SPACE}*(\\(?:text|mathrm|mbox)\{{\s*)?({'|'.join(_POWERS)})s?(?![a-zA-Z])"
_SIZES = (
    re.compile(rf"()(?<![\w.\\^/])({_COUNT})((?:/[0-9]{{1,40}})?){_WORD}", re.IGNORECASE),
    re.compile(rf"(\\[dtc]?frac\{{)([0-9]{{1,40}})(\}}\{{[0-9]{{1,40}}\}}){_WORD}", re.IGNORECASE),
)
_REPEATING = re.compile(r"(?<![\w.])([0-9]{0,40})\.([0-9]{0,40})\\overline\{([0-9]{1,40})\}")
_DEGREE = re.compile(
    r"\s*(?:\\(?:text|mathrm)\{\s*\u00b0\s*\}|\u00b0|\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|\\degrees?(?![a-zA-Z]))(?:\s*[CF]\b)?"
)
_DEGREES = re.compile(rf"([0-9]+(?:\.[0-9]+)?){_DEGREE.pattern}")
_ANGLES = re.compile(r"sin|cos|tan|cot|cis|e\^")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|percent|per cent)\s*\}|\b(?:percent|per cent|pct))\s*$")
_SQUARE = r"\^(?:[23]|\{[23]\})"
_UNIT = re.compile(rf"(?<=[0-9}}]){_ANY_SPACE}*(?:(?:mm|cm|dm|km|ft|yd|units?|dollars?|dozens?)(?:{_SQUARE})?|(?:m|in){_SQUARE})$")
_PERIOD = re.compile(r"(?<!\.)\.\s*(\}?)\s*$")
_SAID = r"(?:\b(?:is|are|equals?)\b\s*:?|[:=])"
_WORDS_BEFORE = re.compile(rf"\\text(?:bf|it|rm)?\{{[^{{}}]*{_SAID}\s*\}}{_ANY_SPACE}*(?=\S)")
_SENTENCE = re.compile(r"(?:[A-Za-z][^0-9={}\\:]*\b(?:is|are|equals?)\b\s*:?|[A-Za-z ]*[A-Za-z]{3}:)\s+(\S.*)", re.DOTALL)
_TEXT = re.compile(r"\\text(?:bf|it|rm)?\{([^{}]*)\}")
_SET = re.compile(r"\\(?:left\s*\\)?\{(.*?)\\(?:right\s*\\)?\}", re.DOTALL)
_SUCH_THAT = re.compile(r"\\mid(?![a-zA-Z])|\\middle\s*\||\\vert(?![a-zA-Z])|\||:|\\colon(?![a-zA-Z])")
_REAL = re.compile(r"\s*[A-Za-z]\s*(?:\\in\s*(?:\\R(?![a-zA-Z])|\\(?:mathbb|Bbb|mathbf)\s*\{?\s*R\s*\}?)\s*)?")
_CIS = re.compile(rf"{_ANY_SPACE}*(?:\\(?:operatorname\*?|text|mathrm|mbox)\{{\s*cis\s*\}}|\\?\bcis\b){_ANY_SPACE}*")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])|\u00b1")
_MINUS_PLUS = re.compile(r"\\mp(?![a-zA-Z])|\u2213")
_VARIABLE = re.compile(r"\s*[A-Za-z]\s*=\s*")


class Form(NamedTuple):
    """Text for math-verify, and how it is to be read."""

    text: str
    is_expression: bool = True
    """All of the text is the answer; if not, math-verify looks for one in it."""
    is_percent: bool = False
    """The text is the number before the percent sign."""
    is_literal: bool = False
    """Compared letter by letter: a set-builder that is no condition on a real number, which math-verify reads as a number of it."""


def final_answer(response: str) -> str:
    """The part of a response that names its answer: `\\boxed{...}` if it is an expression, else a text to look for one in.
    That is the last box, or <answer>, that is not empty; else the line after the last `####` that a number follows; else all."""
    start, end = _last_marked(response)
    if end:
        inner = response[start:end]
        if _last_marked(inner)[1]:
            return final_answer(inner)
        return f"\\boxed{{{inner.strip()}}}"
    marked = _MARKED.findall(response)
    if marked:
        return marked[-1].strip().replace("\\$", "")  # money before a number is no LaTeX
    return _EMPTY_BOX.sub("", response)  # that of an instruction: math-verify would take it for the answer


def reference(answer: str) -> str:
    """The expression of a reference answer, as `final_answer` has those of responses."""
    start, end = _last_marked(answer)
    if end:
        return final_answer(answer)
    bare = re.sub(r"^\$+|(?<!\\)\$+$", "", answer.strip())
    parts = re.split(r"(?<!\\)\$+", answer.strip())
    if len(parts) < 3 or len(parts) % 2 == 0:  # no formula, or money
        return f"\\boxed{{{bare}}}"
    around = " ".join(parts[::2])
    if re.search(r"[A-Za-z]", re.sub(r"\b(?:and|or|percent)\b", "", around)):
        return answer  # a sentence: its last formula, as math-verify finds it
    return f"\\boxed{{{''.join(parts)}}}"  # `20 $cm^2$` is one quantity, and `$5$;$10$` two


def form(text: str) -> Form:
    """Spelling of what `final_answer` or `reference` returned."""
    if not text.startswith("\\boxed{") or _last_box(text)[1] != len(text) - 1:
        return Form(_numbers(text, _GROUPED_LATEX), is_expression=False)
    return _expression(text[len("\\boxed{") : -1])


def _last_marked(text: str) -> tuple[int, int]:
    """Start and end of the content of the box or <answer> that ends last and is not empty; (0, 0) if there is none."""
    return max(_last_box(text), _last_tag(text), key=lambda place: place[1])


def _last_box(text: str) -> tuple[int, int]:
    # One pass: a response may repeat itself thousands of times. A response that was cut inside its box has no such box.
    depth, boxes, last = 0, [], (0, 0)  # boxes: (depth, start of the content) of those that are open
    for match in _BOX_PARTS.finditer(text):
        token = match[0]
        if token in ("\\{", "\\}"):
            continue  # a brace to print
        if token != "}":
            depth += 1
            if token != "{":
                boxes.append((depth, match.end()))
        elif depth:
            if boxes and boxes[-1][0] == depth:
                start = boxes.pop()[1]
                empty = _EMPTY.match(text, start)
                if last[0] < start and not (empty and empty.end() == match.start()):  # of boxes in each other the inner one
                    last = start, match.start()
            depth -= 1
    return last


def _last_tag(text: str) -> tuple[int, int]:
    start, last = None, (0, 0)
    for match in _TAG.finditer(text):
        if not match[1]:
            start = match.end()
        elif start is not None:
            last = (start, match.start()) if text[start : match.start()].strip() else last
            start = None
    if start is not None and text[start:].strip():
        return start, len(text)  # `</answer>` is often a stop string, which is no part of the response
    return last


def _numbers(text: str, grouped: re.Pattern[str]) -> str:
    text = text.replace("\\text{:}", ":")  # math-verify reads `3\text{:}30` as 3
    text = grouped.sub(lambda match: match[1] + re.sub(r"[^0-9]", "", match[2]), text)
    text = _POWER_OF_TEN.sub(_positional, _SCIENTIFIC.sub(_positional, text))
    text = _REPEATING.sub(_fraction, text)
    text = _MIXED_LATEX.sub(lambda match: _improper(match, r"\frac{%d}{%d}"), text)
    text = _MIXED_PLAIN.sub(lambda match: _improper(match, "%d/%d"), text)
    for size in 2 * _SIZES:  # `2 hundred thousand`
        text = size.sub(_scaled, text)
    return text


def _scaled(match: re.Match[str]) -> str:
    begin, count, rest, text, word = match.groups()
    return f"{begin}{Decimal(re.sub('[{},]', '', count) + f'E{_POWERS[word.lower()]}'):f}{rest}{text or ''}"


def _positional(match: re.Match[str]) -> str:
    exponent = int(match[2].replace("\u2212", "-"))
    if abs(exponent) > 40:  # digits would be too many
        return f"{match[1]}*10^({exponent})"
    return f"{Decimal(f'{match[1]}E{exponent}'):f}"


def _fraction(match: re.Match[str]) -> str:
    before, once, again = match.groups()
    above = int(before + once + again) - int(before + once or 0)
    return f"\\frac{{{above}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


def _improper(match: re.Match[str], fraction: str) -> str:
    whole, above, below = (int(group) for group in match.groups() if group is not None)
    return fraction % (whole * below + above, below) if above < below else match[0]


def _expression(text: str) -> Form:
    text = _without_words(_PERIOD.sub(r"\1", " ".join(_DELIMITER.sub("", text).split())))
    literal = _set_builder(text)
    if isinstance(literal, Form):
        return literal
    text = re.sub(r"(?<!\\);", ",", _numbers(literal, _GROUPED_PLAIN)).replace("~", " ")
    text = re.sub(r"(?<=[0-9])i(?![a-zA-Z])", " i", text)  # math-verify finds the imaginary unit as a word of its own
    bare = _PERCENT.sub("", text)
    if bare != text and bare and not _PERCENT.search(bare) and "," not in bare:
        return Form(_radians(bare).strip(), is_percent=True)
    text = _UNIT.sub("", _radians(text).strip())
    return Form(_each(_each(text, _cis), _pair))


def _without_words(text: str) -> str:
    """The value that follows `\\text{The answer is }`, or the same words without LaTeX."""
    text = _WORDS_BEFORE.sub("", text, count=1) if _WORDS_BEFORE.match(text) else text
    whole = _TEXT.fullmatch(text)
    sentence = _SENTENCE.fullmatch(whole[1] if whole else text)
    if sentence is None:
        return whole[1] if whole and re.match(r"\s*-?[0-9]", whole[1]) else text
    value = sentence[1].strip()
    return value if re.match(r"[-+\u2212]?[0-9.\\(\[$]", value) else f"\\text{{{value}}}"


def _set_builder(text: str) -> str | Form:
    """The condition of a set of real numbers, which math-verify compares with intervals; other texts as they are."""
    found = _SET.fullmatch(text)
    bar = _SUCH_THAT.search(found[1]) if found else None
    if found is None or bar is None or not re.search(r"[A-Za-z]", found[1][: bar.start()]):
        return text
    if _REAL.fullmatch(found[1][: bar.start()]) and re.search(r"[<>]|\\(?:le|ge|lt|gt|ne)(?:q|qslant)?(?![a-zA-Z])", found[1]):
        return found[1][bar.end() :].strip()
    bare = re.sub(rf"\\(?:left|right|middle|mid|vert|colon)(?![a-zA-Z])|[|:]|{_ANY_SPACE}", " ", text)
    return Form("".join(bare.split()), is_literal=True)


def _radians(text: str) -> str:
    """A degree is a unit, which answers may leave out; inside of a sine it is pi / 180."""
    if _ANGLES.search(text):
        text = _DEGREES.sub(r"\\frac{\1\\pi}{180}", text)
    return _DEGREE.sub("", text)


def _each(text: str, change: Callable[[str], str]) -> str:
    """Change the elements of a list, or of a set, one by one."""
    braces = _SET.fullmatch(text)
    inner = braces[1] if braces else text
    depth, ends = 0, []
    for match in re.finditer(r"\\[^{}]|[{}()\[\],]", inner):  # `\,` is a space
        depth += (match[0] in "{([") - (match[0] in "})]")
        if match[0] == "," and depth == 0:
            ends.append(match.start())
    elements = [inner[start:end] for start, end in zip([0, *(end + 1 for end in ends)], [*ends, len(inner)])]
    changed = [change(element) for element in elements]
    return text if changed == elements else ",".join(changed)


def _cis(element: str) -> str:
    parts = _CIS.split(element)
    if len(parts) != 2 or not parts[1].strip():
        return element
    angle = re.sub(r"(?<!\\)\bpi\b", r"\\pi", parts[1])
    return f"{parts[0]}(\\cos({angle})+i\\sin({angle}))"


def _pair(element: str) -> str:
    """Both numbers of a plus-minus, without `x =`; several signs of the kind may mean two numbers or four, and stay."""
    if len(_PLUS_MINUS.findall(element)) != 1:
        return element
    bare = _VARIABLE.sub("", element, count=1) if _VARIABLE.match(element) else element
    first = _MINUS_PLUS.sub("-", _PLUS_MINUS.sub("+", bare))
    second = _MINUS_PLUS.sub("+", _PLUS_MINUS.sub("-", bare))
    first = re.sub(r"(^|[(,{=])\s*\+", r"\1", first)  # `+3` alone is no number to math-verify
    return f"{first},{second}"
