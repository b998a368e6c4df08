"""The page in a headless browser: what it shows, how it answers, and that nothing a model wrote becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.trajectories import page as pages
from megappo.commands.trajectories.analyse import analyse
from megappo.commands.trajectories.page import choose, json_block, page
from megappo.data.images import IMAGE_BASE
from megappo.telemetry.trajectories.read import read_run
from tests.commands.trajectories.browser import Document, open_page
from tests.commands.trajectories.runs import EOS, long_run, record, write_run

ATTACK = "</script><script>document.title='owned'</script><!--<script><img src=x onerror=document.title='owned'> &lt;b&gt; \ud83d"


def page_of(run: Path, target: Path, *options: str) -> Path:
    assert cli.main(["trajectories", str(run), "--html", str(target), *options]) == 0
    return target


# --------------------------------------------------------------------------------------------------------- without a browser


def test_the_page_needs_nothing_but_itself(tmp_path):
    html = page_of(long_run(tmp_path / "run", steps=1), tmp_path / "page.html").read_text()
    assert set(re.findall(r"[a-z]+://[^\s\"'`<]+", html)) == {"http://www.w3.org/2000/svg"}, "the name of a namespace"
    assert not re.search(r"\b(src|href|srcset|action)\s*=|@import|url\(|import\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", html)
    assert "default-src 'none'; script-src 'sha256-" in html and html.count("<script") == 2
    assert "img-src" not in html, "allowed for pictures alone"


def test_no_text_ends_the_block_of_data():
    block = json_block({"a": [ATTACK, "\u2028", 1.5, None]})
    assert not set("<>&\u2028") & set(block) and block.isascii() and json.loads(block) == {"a": [ATTACK, "\u2028", 1.5, None]}


@pytest.mark.parametrize("most", [1, 4, 10, 95, 96, 200])
def test_a_small_page_has_the_worst_of_each_kind_and_others_of_all_steps(tmp_path, most):
    analysis = analyse(read_run(long_run(tmp_path)).trajectories, 2)
    chosen = choose(analysis, most)
    assert len(chosen) == min(most, 96) == len(set(chosen)) and chosen == sorted(chosen)
    on_page = [analysis.samples[index] for index in chosen]
    assert analysis.worst["lowest score"][0] in on_page
    if most >= 10:
        assert all(one in on_page for kind in analysis.worst.values() for one in kind)
    if most >= 95:
        assert {one.trajectory.step for one in on_page} == {10, 20, 30, 40, 50, 60}


def test_no_number_on_the_page_is_longer_than_in_the_file(tmp_path):
    run = write_run(tmp_path / "run", {1: [record(score=0.1 + 0.2, parts={"a": 1 / 3, "b": None})]})
    block = page_of(run, tmp_path / "page.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    (sample,) = json.loads(block)["samples"]
    assert sample["score"] == 0.3 and sample["parts"] == {"a": 0.33333, "b": None}


def test_the_cap_is_told_on_the_page_and_on_the_terminal(tmp_path, capsys):
    html = page_of(long_run(tmp_path / "run"), tmp_path / "page.html", "--max-samples", "5").read_text()
    said = "the page holds 5 of 96 samples: the worst of each kind"
    assert said in html and f"note: {said}" in capsys.readouterr().out


def test_long_responses_make_a_page_of_fewer_samples(tmp_path, monkeypatch):
    analysis = analyse(read_run(long_run(tmp_path)).trajectories, 1)
    monkeypatch.setattr(pages, "MAX_TOKENS", 1000)
    mean_length = sum(one.length for one in analysis.samples) / 96
    assert f"the page holds {int(1000 / mean_length)} of 96" in page(analysis, "run", None, [])[1][0]
    assert page(analysis, "run", 96, [])[1] == [], "but not than was asked for"


def test_the_page_is_read_by_those_who_may_read_the_samples(tmp_path):
    run = write_run(tmp_path / "run", {1: [record()], 2: [record()]})
    target = tmp_path / "page.html"
    assert page_of(run, target).stat().st_mode & 0o777 == 0o644
    (run / "trajectories" / "step_000002.jsonl").chmod(0o600)  # run.permissions: private
    assert page_of(run, target).stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------------------------------------ in the browser

LOOK = """
const all = (query) => [...document.querySelectorAll(query)];
const key = (target, name) => target.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
const set = (id, value, event) => {
  const element = document.getElementById(id);
  element.value = value;
  element.dispatchEvent(new Event(event, {bubbles: true}));
};
const items = () => all("#samples li").map((item) => Number(item.dataset.sample));
const picked = () => all("#samples li[aria-selected=true]").map((item) => Number(item.dataset.sample));
const colours = () => all("#tokens .t:not(.prompt)").map((token) => token.style.backgroundColor);
const seen = {};
seen.field = document.getElementById("field").value;
seen.picked = picked();
seen.items = items();
seen.classes = all("#tokens .t").map((token) => token.className);
seen.tokens = all("#tokens .t:not(.prompt)").map((token) => token.textContent);
seen.prompt = all("#tokens .t.prompt").map((token) => token.textContent).join("");
seen.colours = colours();
seen.background = all("#tokens .t:not(.prompt)").map((token) => getComputedStyle(token).backgroundColor);
seen.legend = document.getElementById("legend").textContent;
seen.charts = all("svg.chart").map((chart) => chart.getAttribute("aria-label") + ": " + chart.querySelectorAll("circle").length);
const heights = (line) => line.getAttribute("points").split(" ").map((point) => Number(point.split(",")[1]));
seen.points = all("svg.chart polyline").map(heights);
document.getElementById("alone").click();
seen.alone = [document.getElementById("legend").textContent, colours()];
document.getElementById("alone").click();
key(document.body, "]");
seen.nextField = [document.getElementById("field").value, colours()];
key(document.body, "[");
const tokens = document.getElementById("tokens");
tokens.focus();
key(tokens, "ArrowRight"); key(tokens, "ArrowRight");
seen.tip = all("#tip tr").map((row) => row.textContent);
seen.cursor = all("#tokens .cursor").map((token) => token.dataset.token);
key(tokens, "Escape");
seen.closed = document.getElementById("tip").hidden;
all("#tokens .t")[2].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
seen.hover = [document.getElementById("tip").hidden, all("#tip tr").map((row) => row.textContent)];
set("order", "score", "change");
seen.byScore = items();
document.getElementById("direction").click();
seen.falling = items();
set("order", "length", "change");
seen.byLength = items();
const list = document.getElementById("samples");
key(list, "Home"); key(list, "ArrowDown");
seen.down = picked();
key(document.body, "k");
seen.up = picked();
set("byEnd", "length", "change");
seen.cut = items();
set("byEnd", "", "change");
set("byStep", "2", "change");
seen.step = items();
set("words", "needle", "input");
seen.none = [items(), document.getElementById("sample").textContent];
set("byStep", "", "change");
seen.words = items();
seen.count = document.getElementById("count").textContent;
all("circle[data-sample='1']")[0].dispatchEvent(new MouseEvent("click", {bubbles: true}));
seen.dot = [picked(), items().length, all("circle.picked").map((dot) => dot.dataset.sample)];
seen.pictures = all("#tokens img").map((one) => [one.alt, one.dataset.token, one.src]);
seen.between = all("#tokens .t.prompt").map((token) => token.tagName + token.textContent);
return seen;
"""


# Two images in a prompt, one of two tokens.
FIRST, SECOND = IMAGE_BASE + 3, IMAGE_BASE
PIXEL = "data:image/jpeg;base64,/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAP/bAEMB/9k="
SHOWN = {
    "prompt_tokens": [1, FIRST, FIRST, 4, SECOND],
    "prompt_texts": ["<s>", "", "", "1+1=", ""],
    "images": {str(FIRST): PIXEL, str(SECOND): PIXEL},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """Four samples of two steps, opened at sample 2 and its advantages, in a browser."""
    folder = tmp_path_factory.mktemp("page")
    rows = {
        1: [record(score=0.5), record((7, 8, 9, EOS), sample=1, score=1.0, finish="length", **SHOWN)],
        2: [
            record(
                (5, 6, 7, 8, EOS),
                score=0.0,
                response_texts=["a\n\n", "", "😀", " given", "</s>"],
                response_mask=[1, 1, 1, 0, 1],
                advantage=[-2.0, 0.0, 1.0, None, 0.12345],
                value=[0.5, 0.25, -0.25, None, 0.0],
            ),
            record(tuple(range(5, 25)), sample=1, score=None, response="a needle"),
        ],
    }
    html = page_of(write_run(folder / "run", rows), folder / "page.html")
    return open_page(html, LOOK, folder / "profile", fragment="#sample=2&field=advantage")


def test_a_link_opens_a_sample_and_a_field(seen):
    assert seen.title == "run: trajectories" and seen.messages == []
    assert (seen.result["field"], seen.result["picked"], seen.result["items"]) == ("advantage", [2], [0, 1, 2, 3])


def test_tokens_are_shown_one_by_one_with_newlines_parts_of_characters_and_special_ones(seen):
    assert seen.result["prompt"] == "<s>1+1="
    assert seen.result["tokens"] == ["a↵\n↵\n", "·", "😀", " given", "</s>"]
    assert seen.result["classes"] == ["t prompt special", "t prompt", "t", "t", "t", "t given", "t special"]


def test_an_image_is_one_picture_in_its_place(seen):
    assert seen.result["pictures"] == [["image of 2 tokens", "p1", PIXEL], ["image of 1 tokens", "p4", PIXEL]]
    assert seen.result["between"] == ["SPAN<s>", "IMG", "SPAN1+1=", "IMG"]


@pytest.mark.parametrize(
    "uri", ["https://elsewhere/a.jpg", "data:image/svg+xml;base64,PHN2Zz4=", 'data:image/jpeg;base64,"onload=x']
)
def test_other_pictures_are_refused(tmp_path, uri, capsys):
    run = write_run(tmp_path / "run", {1: [record(**SHOWN | {"images": {str(FIRST): uri}})]})
    assert cli.main(["trajectories", str(run), "--html", str(tmp_path / "page.html")]) == 2
    assert f"line 1: images.{FIRST}: String should match pattern" in capsys.readouterr().err


def strength(colour: str) -> float:
    """Opacity of a token's colour, negative for the colour of negative numbers."""
    found = re.fullmatch(r"rgba\(var\(--(low|high)\), ([\d.]+)\)", colour)
    assert found, colour
    return float(found[2]) * (-1 if found[1] == "low" else 1)


def test_colours_are_symmetric_and_grow_with_the_number(seen):
    """The scale is the 98th percentile of |advantage| over all samples: 1, as 30 of the 31 numbers are at most that."""
    first, second, third, given, last = seen.result["colours"]
    assert given == "" and strength(second) == 0
    assert strength(first) == -0.72 and strength(third) == 0.72 and strength(last) == pytest.approx(0.72 * 0.12345, abs=1e-3)
    assert seen.result["background"][0].startswith("rgba(214, 96, 10, 0.7"), "the browser knows the colour"
    assert seen.result["legend"] == "≤ -1≥ 1"
    legend, colours = seen.result["alone"]
    assert legend == "≤ -1≥ 1" or legend == "≤ -2≥ 2"
    assert strength(colours[0]) == -0.72


def test_the_next_field_has_its_own_colours(seen):
    field, colours = seen.result["nextField"]
    assert field == "value" and strength(colours[0]) > strength(colours[1]) > 0 > strength(colours[2]) and colours[3] == ""


def test_the_numbers_of_a_token_are_shown_by_key_and_by_mouse(seen):
    assert seen.result["cursor"] == ["1"] and seen.result["closed"] is True
    tip = seen.result["tip"]
    assert tip[:2] == ['token""  (6)', "place2 of 5"]
    assert {"log-prob-2", "KL: log π − log π_ref0.25", "advantage0", "value0.25", "return1", "value − return-0.75"} <= set(tip)
    assert seen.result["hover"][0] is False and seen.result["hover"][1][0] == 'token"a\\n\\n"  (5)'


def test_samples_are_ordered_and_filtered(seen):
    r = seen.result
    assert r["byScore"] == [2, 0, 1, 3] and r["falling"] == [1, 0, 2, 3], "without a score last, in both directions"
    assert r["byLength"] == [3, 2, 1, 0] or r["byLength"][:1] == [3]
    assert r["down"] == r["byLength"][1:2] and r["up"] == r["byLength"][:1]
    assert r["cut"] == [1] and sorted(r["step"]) == [2, 3]
    assert r["none"][0] == [3] and r["words"] == [3] and r["count"] == "1 of 4 samples"


def test_pictures_are_drawn_and_a_dot_opens_its_sample(seen):
    assert seen.result["charts"] == [
        "score against length: 3",  # the fourth has no score
        "entropy by position, nats: 10",
        "KL by position, nats per token: 10",
        "value and return by position: 20",
    ]
    assert all(0 <= y <= 220 for line in seen.result["points"] for y in line) and len(seen.result["points"]) == 4
    assert seen.result["dot"] == [[1], 4, ["1"]], "it takes the filters away that hide it"


HOSTILE = """
return {
  owned: document.title === "owned", items: document.querySelectorAll("#samples li").length,
  shown: document.querySelector("#tokens").textContent, facts: document.querySelector("dl").textContent,
  heading: document.querySelector("#sample h2").textContent, notes: document.querySelector("header").textContent,
  dark: getComputedStyle(document.body).backgroundColor, wide: document.documentElement.scrollWidth, window: window.innerWidth,
};
"""


def hostile_page(folder: Path, attack: str = ATTACK) -> Path:
    """Every text of a record attacks the page, and the name of the run too."""
    texts = ("id", "prompt", "answer", "response")
    row = record((5, 6), **dict.fromkeys(texts, attack), parts={attack: 1.0}, response_texts=[attack, "x" * 3000])
    run = write_run(folder / "<img src=x onerror=document.title='owned'>", {1: [row | {"prompt_texts": [attack, attack]}]})
    return page_of(run, folder / "page.html")


def is_harmless(document: Document) -> bool:
    """True if the attack is text and nothing else: our scripts alone, no picture, and a script of the page that ran to its end."""
    result = document.result
    return (
        document.tags["script"] == 3  # data, the page's, and the test's
        and document.tags["img"] == 0
        and result is not None
        and not result["owned"]
        and "owned" not in document.title.removeprefix("<img src=x onerror=document.title='owned'>")
    )


@pytest.mark.slow
def test_what_a_model_wrote_is_text(tmp_path):
    """Also in the dark, and on a narrow window."""
    shown = open_page(hostile_page(tmp_path), HOSTILE, tmp_path / "profile", "--force-dark-mode", "--window-size=420,900")
    assert is_harmless(shown) and shown.messages == []
    text = ATTACK[:-1] + "\ufffd"  # half of a pair has no UTF-8
    assert text in shown.result["shown"] and text in shown.result["facts"] and text in shown.result["heading"]
    assert shown.result["items"] == 1 and "<img src=x" in shown.result["notes"]
    assert shown.result["dark"] == "rgb(19, 20, 22)" and shown.result["wide"] <= shown.result["window"]


def without_policy(html: Path) -> Path:
    html.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html.read_text()))
    return html


@pytest.mark.slow
def test_without_the_escapes_it_is_markup_and_the_policy_alone_holds_it(tmp_path, monkeypatch):
    """Negative control: the test above notices, and without the policy the attack runs."""
    monkeypatch.setattr(pages, "json_block", lambda data: json.dumps(data))
    html = hostile_page(tmp_path)
    guarded = open_page(html, HOSTILE, tmp_path / "profile")
    assert not is_harmless(guarded) and guarded.title != "owned"
    open_to_all = open_page(without_policy(html), HOSTILE, tmp_path / "profile")
    assert not is_harmless(open_to_all) and open_to_all.title == "owned"


@pytest.mark.slow
def test_texts_as_markup_would_be_noticed(tmp_path):
    """Negative control: a page.js that parses what it shows."""
    html = without_policy(hostile_page(tmp_path, ATTACK[:-1]))
    script = html.read_text()
    appended = "element.append(...children.flat().filter((child) => child != null).map(whole));"
    assert appended in script
    parsing = (
        "for (const c of children.flat()) if (typeof c === 'string') element.innerHTML += c; else if (c != null) element.append(c);"
    )
    html.write_text(script.replace(appended, parsing))
    assert not is_harmless(open_page(html, HOSTILE, tmp_path / "profile"))
