"""Where the next attempt starts, and when there is none: on lists of starts and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.checkpoint.manifest import Manifest, write_manifest
from megappo.commands.launch.restart import NoProgress, Start, next_start, read_starts, record_start, saved_steps, set_aside

EARLY, LATE = 100.0, 300.0  # before and after the starts, which are at 200


def starts(*steps: int, skipped: tuple[int, ...] = ()) -> list[Start]:
    """One for each step; those below the first one skipped it."""
    return [Start(n, step, 200.0, "", skipped if step < steps[0] else ()) for n, step in enumerate(steps)]


CASES = {
    "a new run": ([], {}, (0, ())),
    "a run that is resumed": ([], {20: EARLY, 10: EARLY}, (20, ())),
    "progress": (starts(0), {5: LATE}, (5, ())),
    "twice no progress": (starts(5, 5), {5: EARLY}, (5, ())),
    "three starts at one checkpoint fall back": (starts(20, 20, 20), {20: EARLY, 10: EARLY}, (10, (20,))),
    "and stay there while it has not been renamed": (
        starts(20, 20, 20, 10, skipped=(20,)),
        {20: EARLY, 10: EARLY},
        (10, (20,)),
    ),
    "or has been": (starts(20, 20, 20, 10, skipped=(20,)), {10: EARLY}, (10, ())),
    "the same step, saved again, is progress": (starts(20, 20, 20, 10, skipped=(20,)), {20: LATE, 10: EARLY}, (20, ())),
    "progress from the older one": (starts(20, 20, 20, 10, 10, skipped=(20,)), {15: LATE, 10: EARLY}, (15, ())),
    "starts before the progress do not count": (starts(5, 5, 5, 20, 20), {20: EARLY}, (20, ())),
    "a damaged checkpoint": (starts(20), {10: EARLY}, (10, ())),
}


@pytest.mark.parametrize("case", CASES)
def test_the_next_attempt_starts_where_it_may_get_on(case: str) -> None:
    before, saved, expected = CASES[case]
    start = next_start(before, saved, attempt=7)
    assert (start.step, start.skipped) == expected and start.attempt == 7


GIVEN_UP = {
    "no checkpoint at all": (starts(0, 0, 0), {}, "3 attempts started at step 0 and none reached another checkpoint"),
    "no older one": (starts(20, 20, 20), {20: EARLY}, "3 attempts started at step 20"),
    "six in all": (
        starts(20, 20, 20, 10, 10, 10, skipped=(20,)),
        {10: EARLY, 5: EARLY},
        "3 attempts started at step 20 and 3 attempts started at step 10 and none reached",
    ),
    "six in all, and the newest is still there": (starts(20, 20, 20, 10, 10, 10, skipped=(20,)), {20: EARLY, 10: EARLY}, "step 10"),
    "six in all, with a damaged one between": (starts(20, 20, 10, 10, 10, 5), {5: EARLY, 4: EARLY}, "not tried again"),
}


@pytest.mark.parametrize("case", GIVEN_UP)
def test_a_run_without_progress_is_given_up_after_six_attempts_at_most(case: str) -> None:
    before, saved, said = GIVEN_UP[case]
    with pytest.raises(NoProgress, match=said):
        next_start(before, saved, attempt=7)


def test_a_start_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    written = [Start(0, 20, 1.0, "n[1-2]"), Start(1, 10, 2.0, "n1", (20, 15))]
    for start in written:
        record_start(tmp_path, start)
    (tmp_path / "attempts.jsonl").open("a").write('{"attempt": 2, "step": 5, "time": 3.0, "nodes": ""}\n')  # of an older megappo
    assert read_starts(tmp_path) == [*written, Start(2, 5, 3.0)]
    assert written[1].environment() == {"MEGAPPO_SKIP_STEPS": "20,15"}


def test_a_start_that_was_written_in_part_does_not_count(tmp_path: Path) -> None:
    record_start(tmp_path, Start(0, 20, 1.0))
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 1, "st')
    assert read_starts(tmp_path) == [Start(0, 20, 1.0)]
    record_start(tmp_path, Start(2, 20, 2.0))
    assert read_starts(tmp_path) == [Start(0, 20, 1.0), Start(2, 20, 2.0)]


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    for step in (3, 6):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    write_manifest(tmp_path / "checkpoints" / "step-3", Manifest(3, 1, False, {}, {}))
    assert list(saved_steps(tmp_path)) == [3] and saved_steps(tmp_path / "absent") == {}


def test_what_an_attempt_left_is_moved_and_what_is_the_launchers_stays(tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "run" / "launch" / "001" / "attempt-0"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "lease.json", ".lease.json.after-1"):
        (run_dir / name).touch()
    set_aside(run_dir, folder)
    assert sorted(path.name for path in run_dir.iterdir()) == [".lease.json.after-1", "launch", "lease.json"]
    assert (folder / "config.yaml").exists()
