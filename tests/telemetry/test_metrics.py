"""The catalogue is complete and has nothing too much: what the trainer logs is in it, and what is in it is logged."""

import ast
import functools
import re
from pathlib import Path

import megappo
from megappo.telemetry.metrics import GROUPS, Metric, finite_or_none
from tests.telemetry.catalogue import metric_of

NAME = re.compile(rf"^({'|'.join(GROUPS)})/[a-z0-9_]*$")


@functools.cache  # the tests below ask for the same modules
def logged_names(source: str) -> set[str]:
    """Literals that look like metric names; an f-string counts by its literal beginning, marked with a trailing *."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant) and NAME.match(node.values[0].value):
            names.add(node.values[0].value + "*")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.match(node.value):
            names.add(node.value)
    return {n for n in names if n.endswith("*") or n + "*" not in names}


def family_of(name: str) -> str:
    """critic/value for critic/value_*, reward/score for reward/score_mean: what `Totals.figures` completes."""
    return re.sub(r"_(\*|mean|std|min|max)$", "", name)


def unknown(names: set[str]) -> set[str]:
    """A literal may also be the beginning of a family such as critic/value_*."""
    families = {family_of(m.value) for m in Metric}
    return {
        n
        for n in names
        if metric_of(n.rstrip("*") + ("x" if n.endswith("*") else "")) is None and n.removesuffix("_*") not in families
    }


def sources() -> list[str]:
    root = Path(megappo.__file__).parent
    others = [root / "telemetry" / "runlog.py", root / "rollout" / "half.py"]
    return [path.read_text() for path in sorted([*root.glob("trainer/**/*.py"), *others])]


def never_logged(texts: list[str]) -> set[str]:
    """Entries that no source names: `Metric.X`, the literal, or the beginning of its family."""
    literals = set().union(*map(logged_names, texts))
    used = {name for text in texts for name in re.findall(r"\bMetric\.(\w+)", text)}
    beginnings = {name.rstrip("*_") for name in literals}
    return {m.value for m in Metric if m.name not in used and not {m.value.rstrip("*_"), family_of(m.value)} & beginnings}


def test_every_name_that_is_logged_is_in_the_catalogue():
    assert not set().union(*(unknown(logged_names(text)) for text in sources()))


def test_every_entry_of_the_catalogue_is_logged():
    assert not never_logged(sources())
    assert Metric.KL_COEF.value in never_logged([text.replace("KL_COEF", "KL_COEFFICIENT") for text in sources()])


def test_a_name_outside_the_catalogue_is_noticed():
    source = 'log({"policy/entropee": 1, f"sft/{x}": 2, "policy/entropy": 3})'
    assert unknown(logged_names(source)) == {"policy/entropee", "sft/*"}


def test_groups_and_names():
    assert {m.value.split("/")[0] for m in Metric} == set(GROUPS)
    assert len({m.value for m in Metric}) == len(Metric)
    assert metric_of("timing/step_s") is Metric.STEP_SECONDS and metric_of("timing/generate_s") is Metric.STAGE_SECONDS
    assert metric_of("critic/value_clip") is Metric.CRITIC_VALUE_CLIP and metric_of("critic/value_mean") is Metric.VALUE
    assert {Metric.SCORE_MEAN: 1.0} == {"reward/score_mean": 1.0}


def test_finite_or_none_reaches_into_structures():
    inf = float("inf")
    assert finite_or_none({"a": [1.0, -inf, (inf, "x")], "b": {"c": float("nan")}, "d": 3}) == {
        "a": [1.0, None, [None, "x"]],
        "b": {"c": None},
        "d": 3,
    }
