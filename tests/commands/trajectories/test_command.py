"""`megappo trajectories` as a user types it, and the guide to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.commands import cli
from tests.commands.trajectories.runs import long_run, record, write_run

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")


def run(capsys, *arguments):
    code = cli.main(["trajectories", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_tables_of_a_run(tmp_path, capsys):
    code, out, err = run(capsys, long_run(tmp_path / "sums"), "--steps", "20..40")
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path / 'sums'}: 48 samples of 3 steps (20 to 40)"
    table = lines.index("by step:")
    assert [line.split()[0] for line in lines[table + 2 : table + 5]] == ["20", "30", "40"]
    titles = [line.split(":")[0] for line in lines if line and not line.startswith(" ")]
    assert titles[1:3] == ["by step", "lowest score"]
    assert "most repetitive" in titles and re.search(r" %  Natalia .* -> \.\.\..* so that is so that is\n", out)
    assert max(map(len, lines)) < 180


def test_many_steps_are_thinned_and_it_is_said(tmp_path, capsys):
    _, out, _ = run(capsys, write_run(tmp_path, {step: [record()] for step in range(1, 101)}))
    rows = out.split("\n\n")[1].splitlines()[2:]
    assert len(rows) == 24 and rows[0].split()[0] == "1" and rows[-1].split()[0] == "100"
    assert "76 steps in between are not shown" in out


def test_control_characters_and_half_pairs_do_not_reach_the_terminal(tmp_path, capsys):
    row = record(response="\x1b[31mred\x07 \ud83d\nnew line", prompt="\x9b2J")
    _, out, _ = run(capsys, write_run(tmp_path, {1: [row]}))
    out.encode()
    assert "?2J -> ?[31mred? ? new line" in out and not set("\x1b\x07\x9b") & set(out)


def test_a_torn_line_is_told(tmp_path, capsys):
    write_run(tmp_path, {1: [record()]})
    with (tmp_path / "trajectories" / "step_000001.jsonl").open("a") as file:
        file.write('{"half')
    _, out, _ = run(capsys, tmp_path)
    assert out.endswith("note: step_000001.jsonl: the last line is cut off (being written, or copied too early); it is left out\n")


@pytest.mark.parametrize(
    "options, said",
    [
        (["--steps", "7-9"], "--steps 7-9: write one step (10) or a range (10..20, 10.., ..20)"),
        (["--steps", "5.."], "has no trajectories of these steps, only of 1"),
        (["--html", "absent/page.html"], "--html absent/page.html: there is no directory absent"),
        (["--html", "page.txt"], "--html page.txt: the name must end in .html"),
        (["--max-samples", "5"], "--max-samples 5 is of the page, and has no effect without --html OUT.html"),
        (["--max-samples", "0", "--html", "x.html"], "0 is not an integer >= 1"),
        (["--worst", "-1"], "-1 is not an integer >= 0"),
        (["--step", "3"], "unrecognized arguments"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, monkeypatch, options, said):
    monkeypatch.chdir(write_run(tmp_path, {1: [record()]}))
    code, out, err = run(capsys, tmp_path, *options)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trajectories"]


def test_a_run_without_trajectories_is_one_line(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("telemetry:\n  trajectories_every: 0\n")
    code, _, err = run(capsys, tmp_path)
    reason = "telemetry.trajectories_every is 0; telemetry.trajectories_every=10 writes them every 10 steps"
    assert code == 2 and err == f"megappo: {tmp_path} holds no trajectories: {reason}\n"


def test_a_fine_tuning_has_no_key_to_set(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("trainer:\n  batch_size: 2\n")
    code, _, err = run(capsys, tmp_path)
    assert code == 2 and err == f"megappo: {tmp_path} holds no trajectories: a fine-tuning (megappo sft) samples none\n"


def test_a_page_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, capsys):
    write_run(tmp_path / "run", {1: [record()]})
    (tmp_path / "page.html.partial").symlink_to("/dev/full")
    code, out, err = run(capsys, tmp_path / "run", "--html", tmp_path / "page.html")
    assert code == 2 and out == "" and "page.html: No space left on device" in err and not (tmp_path / "page.html").exists()


def test_it_needs_no_torch(tmp_path):
    write_run(tmp_path, {1: [record()]})
    code = (
        "import sys; from megappo.commands.cli import main;"
        f"main(['trajectories', {str(tmp_path)!r}, '--html', {str(tmp_path / 'p.html')!r}]);"
        "print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


# ---------------------------------------------------------------------------------------------------------------- the guide


def test_the_guide_lists_the_keys_of_a_record():
    table = GUIDE.split("### The format")[1]
    listed = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))))
    assert listed == set(record()) | {"step"}
