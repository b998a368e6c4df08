"""Start or resume, requeue or end: the decisions of a job script, on run directories that are written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.checkpoint.manifest import Manifest, write_manifest
from megappo.commands.launch.attempt import REQUEUE, SKIPPED, begin, end, main
from megappo.commands.launch.restart import NoProgress
from megappo.config.errors import ConfigError
from megappo.config.run_directory import check_run_dir
from megappo.config.run_sections import RunConfig
from megappo.runtime.ending import FAILED, MISTAKE, STOPPED, UNAVAILABLE, UNRECOVERABLE, Ended, read_end, record_end
from megappo.runtime.lease import Lease
from tests.commands.plan.checkpoints import write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "run"
    (folder / "launch" / "001").mkdir(parents=True)
    return folder


def save(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(step, 1, False, {}, {}))


def fail(run_dir: Path, attempt: int, code: int) -> None:
    (run_dir / "launch" / "001" / f"attempt-{attempt}" / "rank-1.exit").write_text(f"{code} 1 0 n2\n")


def started(run_dir: Path, attempt: int, *, resume: bool = False) -> bool:
    return begin(run_dir / "launch" / "001", RunConfig(name="run", output_dir=str(run_dir.parent)), attempt, resume=resume)


def ended(run_dir: Path, attempt: int, status: int, max_requeues: int = 3) -> tuple[str, int]:
    return end(run_dir / "launch" / "001", run_dir, attempt, status=status, max_requeues=max_requeues)


def test_a_run_that_reached_its_end_is_not_requeued(run_dir: Path) -> None:
    assert not started(run_dir, 0)
    assert ended(run_dir, 0, status=0)[1] == 0


@pytest.mark.parametrize("status", [0, STOPPED, 143])
def test_a_stopped_run_is_requeued_and_resumes(run_dir: Path, status: int) -> None:
    started(run_dir, 0)
    save(run_dir, 12)
    record_end(run_dir, Ended("stopped", 12))
    text, code = ended(run_dir, 0, status=status)
    assert code == REQUEUE and text.endswith("requeue 1 of 3, goes on after step 12")
    assert started(run_dir, 1)


def test_a_failure_after_progress_is_requeued_at_most_so_often(run_dir: Path) -> None:
    for attempt in range(3):
        started(run_dir, attempt)
        save(run_dir, 10 * (attempt + 1))
        fail(run_dir, attempt, 137)
        text, code = ended(run_dir, attempt, status=137, max_requeues=2)
        assert code == (REQUEUE if attempt < 2 else 137)
    assert "rank 1 on n2 failed first (killed by SIGKILL" in text and "not requeued: --max-requeues 2" in text


@pytest.mark.parametrize("stopped, status, expected", [(False, 1, 1), (True, 0, UNRECOVERABLE)])
def test_without_progress_nothing_is_requeued(run_dir: Path, stopped: bool, status: int, expected: int) -> None:
    save(run_dir, 5)
    assert started(run_dir, 0, resume=True)
    if stopped:
        record_end(run_dir, Ended("stopped", 12))
    text, code = ended(run_dir, 0, status)
    assert code == expected and "no checkpoint was saved since this attempt started at step 5" in text


def test_a_mistake_in_the_configuration_is_not_requeued(run_dir: Path) -> None:
    started(run_dir, 0)
    save(run_dir, 5)
    fail(run_dir, 0, 2)
    assert ended(run_dir, 0, status=2)[1] == MISTAKE


def test_attempts_that_slurm_requeued_itself_start_at_the_same_step_three_times_at_most(run_dir: Path) -> None:
    """A lost node ends the script before it could decide anything."""
    save(run_dir, 5)
    for attempt in range(3):
        assert started(run_dir, attempt, resume=True)
    with pytest.raises(NoProgress, match="3 attempts started at step 5 and none reached another checkpoint"):
        started(run_dir, 3)
    save(run_dir, 6)
    assert started(run_dir, 4)


def test_a_checkpoint_from_which_three_attempts_failed_is_passed_over(run_dir: Path) -> None:
    """The job script hands the file to the ranks (`runtime/world.py`)."""
    for step in (5, 10):
        save(run_dir, step)
    skipped = []
    for attempt in range(6):
        assert started(run_dir, attempt, resume=True)
        skipped.append((run_dir / "launch" / "001" / f"attempt-{attempt}" / SKIPPED).read_text())
    assert skipped == ["", "", "", "10", "10", "10"]
    with pytest.raises(NoProgress, match="3 attempts started at step 10 and 3 attempts started at step 5 and none"):
        started(run_dir, 6)


@pytest.mark.parametrize("status, of_rank", [(17, 17), (137, 17), (17, 1)])
def test_a_fault_that_would_come_back_is_not_requeued_and_is_recorded(run_dir: Path, status: int, of_rank: int) -> None:
    started(run_dir, 0)
    save(run_dir, 5)
    fail(run_dir, 0, of_rank)
    (run_dir / "config.yaml").touch()
    text, code = ended(run_dir, 0, status)
    assert code == UNRECOVERABLE and text.endswith("not requeued: it would fail again in the same way")
    end = read_end(run_dir)
    assert end is not None and (end.outcome, end.step, end.code) == ("failed", 5, UNRECOVERABLE)


@pytest.mark.parametrize("status, of_rank", [(69, 69), (137, 69)])
def test_a_run_with_too_few_verdicts_is_not_requeued_and_says_how_it_goes_on(run_dir: Path, status: int, of_rank: int) -> None:
    """Three starts that the reward server fails would set aside a checkpoint that is not at fault."""
    started(run_dir, 0)
    save(run_dir, 5)
    fail(run_dir, 0, of_rank)
    (run_dir / "config.yaml").touch()
    text, code = ended(run_dir, 0, status)
    assert code == UNAVAILABLE and text.endswith(
        "not requeued: mend the reward; `megappo launch ... --resume` goes on after step 5"
    )
    end = read_end(run_dir)
    assert end is not None and (end.outcome, end.step, end.code) == ("failed", 5, UNAVAILABLE)


def test_a_failure_before_the_run_began_leaves_nothing_in_its_directory(run_dir: Path) -> None:
    """Or the next launch under this name would be refused."""
    started(run_dir, 0)
    fail(run_dir, 0, 1)
    assert ended(run_dir, 0, 1)[1] == 1 and read_end(run_dir) is None


def test_what_died_before_its_first_checkpoint_starts_again_and_its_files_are_kept(run_dir: Path) -> None:
    started(run_dir, 0)
    (run_dir / "metrics.jsonl").write_text("of the first attempt")
    run = RunConfig(name="run", output_dir=str(run_dir.parent))
    with pytest.raises(ConfigError, match="holds another run"):
        check_run_dir(run, resume=False)
    assert not started(run_dir, 1)
    kept = run_dir / "launch" / "001" / "attempt-0"
    assert (kept / "metrics.jsonl").read_text() == "of the first attempt"
    assert check_run_dir(run, resume=False) == run_dir


def test_a_script_that_is_submitted_once_more_keeps_what_both_jobs_left(run_dir: Path) -> None:
    """Attempts are numbered by Slurm's count of restarts, which begins anew."""
    for text in ("of the first job", "of the second"):
        assert not started(run_dir, 0)
        (run_dir / "metrics.jsonl").write_text(text)
    assert not started(run_dir, 1)
    kept = sorted((run_dir / "launch" / "001" / "attempt-0").glob("metrics*"))
    assert [path.read_text() for path in kept] == ["of the first job", "of the second"]


def test_a_first_attempt_that_finds_another_run_or_nothing_to_resume_is_refused_and_does_not_count(run_dir: Path) -> None:
    """Of a job that was submitted by hand; requeued by hand, it must not take the other run for its own."""
    (run_dir / "metrics.jsonl").write_text("of another run")
    with pytest.raises(ConfigError, match="holds no checkpoint to resume"):
        started(run_dir, 0, resume=True)
    save(run_dir, 5)
    for attempt in range(2):
        with pytest.raises(ConfigError, match="holds another run"):
            started(run_dir, attempt)
    assert (run_dir / "metrics.jsonl").exists() and not (run_dir / "launch" / "001" / "attempts.jsonl").exists()
    assert started(run_dir, 2, resume=True)


def contents(run_dir: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(run_dir)): path.read_bytes() if path.is_file() else None for path in run_dir.rglob("*")}


def unreadable_manifest(run_dir: Path) -> None:
    """A folder in place of the file: permissions do not bind root, who runs these tests."""
    path = run_dir / "checkpoints" / "step-5" / "manifest.json"
    path.unlink()
    path.mkdir()


def missing_mount(run_dir: Path) -> None:
    """The checkpoints lie on a file system that this node does not have."""
    (run_dir / "checkpoints").rename(run_dir.parent / "elsewhere")
    (run_dir / "checkpoints").symlink_to(run_dir.parent / "not mounted")


def missing_folder(run_dir: Path) -> None:
    (run_dir / "checkpoints").rename(run_dir.parent / "elsewhere")


def empty_mount_point(run_dir: Path) -> None:
    missing_folder(run_dir)
    (run_dir / "checkpoints").mkdir()
    record_end(run_dir, Ended("stopped", 12))


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (unreadable_manifest, "step-5/manifest.json: Is a directory"),
        (missing_mount, "checkpoints: No such file or directory"),
        (missing_folder, "checkpoints does not exist, though the run has started"),
        (empty_mount_point, "holds no complete checkpoint, though ended.json says"),
    ],
)
def test_checkpoints_that_cannot_be_read_stop_the_job_and_nothing_is_moved(
    run_dir: Path, tmp_path: Path, capsys, lose, said
) -> None:
    """Taken for a run without a checkpoint, the whole run was moved away, and the job started anew."""
    config, launch_dir = write_run(tmp_path), str(run_dir / "launch" / "001")
    assert not started(run_dir, 0)
    (run_dir / "config.yaml").write_text("")
    (run_dir / "metrics.jsonl").write_text("of the first attempt")
    save(run_dir, 5)
    lose(run_dir)
    before = contents(run_dir)
    assert main(["begin", launch_dir, str(config)]) == MISTAKE
    text = capsys.readouterr().err
    assert said in text and "nothing was" in text and text.count("\n") == 1
    assert contents(run_dir) == before
    assert main(["end", launch_dir, "--status", "1", str(config)]) == 0
    log = capsys.readouterr()
    assert log.out == "1\n", "the exit code of the ranks: a lost disk is no mistake of the user"
    lines = log.err.splitlines()
    assert lines[0] == "megappo: the ranks ended with exit code 1" and lines[1].startswith("megappo: not requeued: ")
    assert said in lines[1] and len(lines) == 2 and contents(run_dir) == before


@pytest.mark.parametrize(("status", "code"), [(137, 137), (0, FAILED)])
def test_a_job_whose_run_directory_has_gone_says_so(run_dir: Path, tmp_path: Path, capsys, status: int, code: int) -> None:
    """Also after ranks that ended well: nobody can see what they saved."""
    config, launch_dir = write_run(tmp_path), run_dir / "launch" / "001"
    started(run_dir, 0)
    run_dir.rename(tmp_path / "elsewhere")
    assert main(["end", str(launch_dir), "--status", str(status), "--max-requeues", "3", str(config)]) == 0
    log = capsys.readouterr()
    assert log.out == f"{code}\n"
    assert f"not requeued: {launch_dir} holds no record of attempt 0" in log.err and "is its file system still there?" in log.err
    (tmp_path / "elsewhere").rename(run_dir)
    config.unlink()
    assert main(["end", str(launch_dir), "--status", str(status), str(config)]) == 0
    log = capsys.readouterr()
    assert log.out == f"{code}\n" and f"not requeued: {config}" in log.err, "a configuration that begin has read"


def test_a_run_that_somebody_writes_to_is_not_started_and_not_moved(run_dir: Path, tmp_path: Path, capsys) -> None:
    config, launch_dir = write_run(tmp_path), str(run_dir / "launch" / "001")
    assert not started(run_dir, 0)
    (run_dir / "metrics.jsonl").write_text("being written")
    with Lease.acquire(run_dir, "megappo train by_hand.yaml"):
        before = contents(run_dir)
        assert main(["begin", launch_dir, str(config)]) == MISTAKE
        assert "in use by `megappo train by_hand.yaml`" in capsys.readouterr().err
        assert contents(run_dir) == before
    assert not started(run_dir, 1)
    assert not (run_dir / "metrics.jsonl").exists() and not list(run_dir.glob("*lease*"))


def test_a_job_script_gets_words_for_its_log_and_a_number_for_itself(run_dir: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    config, launch_dir = write_run(tmp_path), str(run_dir / "launch" / "001")
    given = [str(config), "--resume"]
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert main(["begin", launch_dir, *given]) == MISTAKE
    assert "holds no run to resume" in capsys.readouterr().err
    save(run_dir, 5)
    assert main(["begin", launch_dir, *given]) == 0 and capsys.readouterr().out == "--resume\n"
    save(run_dir, 6)
    fail(run_dir, 0, 1)
    assert main(["end", launch_dir, "--status", "1", "--max-requeues", "1", *given]) == 0
    said = capsys.readouterr()
    assert said.out == "75\n" and said.err.endswith("megappo: requeue 1 of 1, goes on after step 6\n")
