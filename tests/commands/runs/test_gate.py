"""`megappo gate`: a table of gates with their values, exit codes, and what is no gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.gate.gates import hold, parse_gate

# Scores of steps 1 to 10 are 0.1 to 1.0; evaluated at 0, 5 and 10; the loss of step 7 was NaN; an evaluation with its own line.
ROWS = [{"step": 0, "time": 1.0, "eval/score": 0.2}]
ROWS += [{"step": n, "time": 1.0, "reward/score_mean": n / 10, "policy/loss": None if n == 7 else 0.5} for n in range(1, 11)]
ROWS += [{"step": 5, "time": 1.0, "eval/score": 0.6}, {"step": 10, "time": 1.0, "eval/score": 0.7}]

# gate -> the value by hand (None: there is none), and if it passes
TABLE = [
    ("reward/score_mean > 0.3 at 4", 0.4, True),
    ("reward/score_mean > 0.4 at 4", 0.4, False),
    ("reward/score_mean >= 0.4 at 4", 0.4, True),
    ("reward/score_mean<=0.4 at 4", 0.4, True),
    ("reward/score_mean < 0.4 at 4", 0.4, False),
    ("reward/score_mean > -1e-3 at last", 1.0, True),
    ("eval/score > 0.65 at last", 0.7, True),
    ("eval/score > 0.1 at 0", 0.2, True),
    ("eval/score > 0.65 at 5", 0.6, False),
    ("eval/score > 0.1 at 6", None, False),
    ("eval/score > 0.1 at 11", None, False),
    ("reward/score_mean > 0.55 mean over 4..8", 0.6, True),
    ("reward/score_mean > 0.79 max over 4..8", 0.8, True),
    ("reward/score_mean < 0.41 min over 4..8", 0.4, True),
    ("reward/score_mean > 0 mean over 4..11", None, False),
    ("eval/score > 0.5 mean over last 2", 0.65, True),
    ("eval/score > 0.5 mean over last 4", None, False),
    ("eval/score > 0.5 mean over 6..9", None, False),
    ("policy/loss < 1 at 7", None, False),
    ("policy/loss < 1 max over 6..8", None, False),
    ("policy/loss < 1 max over 8..9", 0.5, True),
    ("kl/per_token < 1 at 4", None, False),
]


def merged():
    rows: dict[int, dict] = {}
    for row in ROWS:
        rows.setdefault(row["step"], {}).update(row)
    return rows


@pytest.mark.parametrize("text, value, passes", TABLE)
def test_a_gate_finds_the_value_and_decides(text, value, passes):
    outcome = hold(parse_gate(text, "gate"), merged())
    assert outcome.value == (None if value is None else pytest.approx(value))
    assert outcome.passed == passes
    assert bool(outcome.reason) == (value is None)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    torn = '{"step": 11, "eval/sc'
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + torn)
    return tmp_path / "run"


def gate(capsys, run_dir, text) -> tuple[int, str, str]:
    file = run_dir.parent / "gates.yaml"
    file.write_text(text)
    code = cli.main(["gate", str(run_dir), str(file)])
    return (code, *capsys.readouterr())


def test_all_pass_is_0_and_the_table_has_the_values(run_dir, capsys):
    text = "# comment\n- eval/score > 0.65 at 10\n- reward/score_mean   >= 0.7 mean over last 5\n"
    code, out, _ = gate(capsys, run_dir, text)
    assert code == 0
    assert [line.split()[-2:] for line in out.splitlines()[:3]] == [["value", "result"], ["0.7", "pass"], ["0.8", "pass"]]
    assert "2 of 2 gates pass" in out


def test_one_failure_is_1_with_its_reason(run_dir, capsys):
    code, out, _ = gate(capsys, run_dir, "- eval/score > 0.65 at 10\n- eval/score > 0.65 at 40\n- policy/loss < 1 at 7\n")
    assert code == 1
    assert "eval/score > 0.65 at 40: step 40 was never reached; the run's last step is 10" in out
    assert "policy/loss < 1 at 7: was not finite at step 7" in out
    assert "1 of 3 gates pass" in out


@pytest.mark.parametrize(
    "text, message",
    [
        ("- eval/scor > 0.65 at 10\n", "has no metric eval/scor; did you mean eval/score?"),
        ("- eval/score = 0.65 at 10\n", 'gate 1 = "eval/score = 0.65 at 10": is no gate; write METRIC > NUMBER at STEP'),
        ("- eval/score > high at 10\n", "is no gate"),
        ("- eval/score > 0.65\n", "is no gate"),
        ("- eval/score > 0.65 at -1\n", "is no gate"),
        ("- eval/score > 0.65 median over last 3\n", "is no gate"),
        ("- eval/score > 0.65 at last\n- 7\n", "gate 2 = 7: is no gate"),
        ("- eval/score > 0.65 mean over 9..3\n", "9..3 is no range; write 3..9"),
        ("- eval/score > 0.65 mean over last 0\n", "over last 0 is over nothing"),
        ("- eval/score > 1e999 at 3\n", "not a finite number"),
        ("gates: 3\n", "must be a YAML list"),
        ("", "must be a YAML list"),
    ],
)
def test_what_is_no_gate_is_one_line_and_2(run_dir, capsys, text, message):
    code, out, err = gate(capsys, run_dir, text)
    assert code == 2 and not out
    assert message in err and err.count("\n") == 1


def test_no_run_and_no_file_are_one_line_and_2(run_dir, capsys, tmp_path):
    assert cli.main(["gate", str(tmp_path / "absent"), str(tmp_path / "gates.yaml")]) == 2
    (tmp_path / "gates.yaml").write_text("- eval/score > 0 at 1\n")
    assert cli.main(["gate", str(tmp_path / "absent"), str(tmp_path / "gates.yaml")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "gates.yaml: No such file" in errors[0] and "name the directory of a run" in errors[1]
