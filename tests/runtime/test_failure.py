"""The first rank to fail, from what ranks leave behind; the evidence is made by the code and the shell that make it in a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.runtime.failure import ATTEMPT_DIR, KILL_GRACE_S, LOG_BYTES, first_failure, is_first_to_say
from megappo.runtime.life import LAUNCHER_LISTENS
from megappo.runtime.sections import SectionFile, last_section

BEFORE, AT, AFTER = 1_000, 2_000, 3_000
LATER = AFTER + int(KILL_GRACE_S * 1e9)  # when the script has killed the rest


def raised(folder: Path, rank: int, time_ns: int) -> None:
    text = f"Traceback (most recent call last):\nRuntimeError: of rank {rank}\n"
    (folder / f"rank-{rank}.traceback").write_text(json.dumps({"time_ns": time_ns, "host": "n1", "text": text}) + "\n")


def ended(folder: Path, rank: int, code: int, time_ns: int) -> None:
    (folder / f"rank-{rank}.exit").write_text(f"{code} {time_ns} 0 node{rank}\n")
    (folder / f"rank-{rank}.log").write_text(f"last words of {rank}\n")


CASES = {
    "first traceback, although a victim ended before": (
        [("raised", 1, BEFORE), ("raised", 0, AT), ("ended", 0, 1, AT), ("ended", 1, 1, AFTER)],
        1,
    ),
    "killed, although victims raised before it was seen": (
        [("raised", 0, BEFORE), ("ended", 2, 137, AT), ("ended", 0, 1, AFTER)],
        2,
    ),
    "killed with the rest after a failure": ([("raised", 1, BEFORE), ("ended", 1, 1, AT), ("ended", 2, 137, LATER)], 1),
    "killed, and noticed after the end of a victim": ([("raised", 1, BEFORE), ("ended", 1, 1, AT), ("ended", 2, 137, AFTER)], 2),
    "killed, and a victim ended without a traceback": ([("ended", 3, 1, AT), ("ended", 2, 137, AFTER)], 2),
    "aborted by a library after it lost a peer": ([("raised", 1, BEFORE), ("ended", 0, 134, AT), ("ended", 1, 1, AFTER)], 1),
    "aborted by itself": ([("ended", 3, 134, BEFORE), ("raised", 1, AT), ("ended", 1, 1, AFTER)], 3),
    "refused, without a traceback": ([("ended", 0, 2, BEFORE), ("ended", 1, 2, AT)], 0),
    "a traceback whose end nobody saw": ([("raised", 4, AT)], 4),
}


def hung(folder: Path, rank: int, time_ns: int) -> None:
    text = f"megappo: rank {rank} hangs, last words of {rank}\n"
    content = {"time_ns": time_ns, "rank": rank, "host": "n1", "text": text}
    (folder / "verdict.json").write_text(json.dumps(content) + "\n")


def test_the_section_of_a_rank_that_could_not_say_it_is_named(tmp_path: Path) -> None:
    """A rank that ends by itself takes its file along; of a torn or an absent one nothing is said."""
    for rank, section, step in ((1, "loading", 0), (2, "a section with a long name", 3), (3, "save", 3)):
        file = SectionFile(tmp_path, rank)
        file.write("an even longer name of a section before it", 2)
        file.write(section, step)
    file.remove()
    ended(tmp_path, 2, 137, BEFORE)
    failure = first_failure(tmp_path, KILL_GRACE_S)
    assert (
        failure is not None and failure.in_one_line() == "rank 2 on node2: killed by SIGKILL in a section with a long name, step 3"
    )
    assert "see dmesg or sacct) in a section with a long name, step 3; what it said is above" in failure.report()
    assert [last_section(tmp_path, rank) for rank in (1, 3, 4)] == ["loading", None, None]
    (tmp_path / "rank-2.section").write_bytes((tmp_path / "rank-2.section").read_bytes()[:20])
    failure = first_failure(tmp_path, KILL_GRACE_S)
    assert failure is not None and failure.in_one_line() == "rank 2 on node2: killed by SIGKILL"


def test_a_rank_that_hung_counts_although_others_ended_before_it(tmp_path: Path) -> None:
    hung(tmp_path, 2, BEFORE)
    raised(tmp_path, 0, AT)
    for rank, when in ((1, AT), (2, AFTER)):
        ended(tmp_path, rank, 137, when)
    failure = first_failure(tmp_path, KILL_GRACE_S)
    assert failure is not None and (failure.rank, failure.code, failure.hangs) == (2, 137, True)
    assert failure.report() == "megappo: rank 2 hangs, last words of 2\nmegappo: rank 2 on n1 hangs, and the ranks were ended\n"
    assert failure.in_one_line() == "rank 2 hangs, last words of 2", "and not how it was ended"


def test_a_rank_that_raised_before_the_others_waited_for_it_counts(tmp_path: Path) -> None:
    """Negative control: the watchdogs hear nothing of a rank whose process does not end after its exception."""
    raised(tmp_path, 1, BEFORE)
    hung(tmp_path, 1, AT)
    failure = first_failure(tmp_path, KILL_GRACE_S)
    assert failure is not None and failure.rank == 1 and not failure.hangs and "RuntimeError: of rank 1" in failure.text


def test_where_the_rest_is_killed_at_once_the_first_end_counts(tmp_path: Path) -> None:
    raised(tmp_path, 1, BEFORE)
    ended(tmp_path, 1, 1, AT)
    ended(tmp_path, 2, 137, AFTER)
    failure = first_failure(tmp_path)
    assert failure is not None and failure.rank == 1


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_failed_first_is_found(tmp_path: Path, case: str) -> None:
    events, expected = CASES[case]
    for kind, *values in events:
        (raised if kind == "raised" else ended)(tmp_path, *values)
    failure = first_failure(tmp_path, KILL_GRACE_S)
    assert failure is not None and failure.rank == expected
    assert failure.text.strip().endswith((f"of rank {expected}", f"last words of {expected}"))


def test_evidence_that_was_not_written_to_its_end_is_no_evidence(tmp_path: Path) -> None:
    """A full disk, or a rank that was killed meanwhile; an earlier time would make them the first."""
    raised(tmp_path, 0, BEFORE)
    whole = (tmp_path / "rank-0.traceback").read_text()
    for rank, part in enumerate(("", whole[:20], whole[:-1])):
        (tmp_path / f"rank-{rank}.traceback").write_text(part)
    (tmp_path / "rank-4.exit").write_text("")
    (tmp_path / "rank-5.exit").write_text("1 10")
    assert first_failure(tmp_path) is None
    ended(tmp_path, 6, 1, AFTER)
    failure = first_failure(tmp_path)
    assert failure is not None and failure.rank == 6


def test_nothing_is_made_up_where_no_rank_left_anything(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None


@pytest.mark.parametrize("command", ["train", "sft"])
def test_every_rank_of_a_run_keeps_its_exceptions(tmp_path: Path, command: str) -> None:
    """So that ended.json and the launcher's line have the error, and not the exit code alone."""
    code = f"from megappo.commands import cli\nassert cli.main(['{command}', 'absent.yaml']) == 2\nraise KeyError('the culprit')"
    world = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a test"}
    subprocess.run(
        [sys.executable, "-c", code],
        env={ATTEMPT_DIR: str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]), **world},
        capture_output=True,
    )
    failure = first_failure(tmp_path)
    assert failure is not None and failure.in_one_line() == "rank 1: KeyError: 'the culprit'"


def test_the_end_of_a_log_of_gigabytes_is_read_alone(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:
        file.truncate(8 << 30)  # a hole: it takes no space
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast words\n")
    (tmp_path / "rank-0.exit").write_text("3 1 0 n1\n")
    failure = first_failure(tmp_path)
    assert failure is not None and failure.text.endswith("\nlast words") and len(failure.text) <= LOG_BYTES


def test_an_exception_is_kept_with_its_whole_traceback(tmp_path: Path) -> None:
    code = "from megappo.runtime.failure import record_exceptions\nrecord_exceptions(7)\nraise KeyError('the culprit')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={ATTEMPT_DIR: str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    failure = first_failure(tmp_path)
    assert failure is not None and failure.rank == 7 and failure.text == done.stderr and "the culprit" in failure.text


def test_a_mistake_that_all_ranks_of_a_machine_find_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT_DIR, str(tmp_path))
    monkeypatch.delenv(LAUNCHER_LISTENS, raising=False)
    assert [is_first_to_say("a"), is_first_to_say("a")] == [True, True], "ranks of a job have logs of their own"
    monkeypatch.setenv(LAUNCHER_LISTENS, "1")
    assert [is_first_to_say(text) for text in ("a", "a", "\udcff", "a")] == [True, False, True, False]
    monkeypatch.setenv(ATTEMPT_DIR, str(tmp_path / "absent"))
    assert is_first_to_say("a")
