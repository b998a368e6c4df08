"""The first run on a GPU, rehearsed on the CPU: its parts fit together, each fails alone, and the page tells what became of
them.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.telemetry.jsonl import read_lines
from scripts.gpu_run import __main__ as first_gpu_run
from scripts.gpu_run.parts import PARTS, QUICK_SFT_STEPS, Part, Place

ROOT = Path(__file__).parents[2]


def part(name: str, script: str, *, limit_s: int = 60, **more) -> Part:
    return Part(name, f"Part {name}", limit_s, lambda place: ["bash", "-c", script], **more)


def run(tmp_path: Path, *parts: Part, options: tuple[str, ...] = ()) -> tuple[int, str]:
    code = first_gpu_run.main(["--rehearse", "--out", str(tmp_path / "out"), *options], parts)
    return code, (tmp_path / "out/report.md").read_text()


def test_each_part_fails_alone_and_the_page_says_how(tmp_path, capsys):
    code, page = run(
        tmp_path,
        part("good", "echo fine"),
        part("bad", "echo '```'; echo why >&2; exit 3"),
        part("absent", "exit 1", left_out=lambda place: "needs 8 GPUs"),
        part("last", "echo after"),
    )
    assert code == 1 and "failed: bad" in capsys.readouterr().out
    table, good, bad, last = page.split("## ")
    assert re.search(r"\| Part good \| ok, \d+ s \|", table) and "| Part absent | left out: needs 8 GPUs |" in table
    assert re.search(r"\| Part bad \| FAILED: exit code 3, \d+ s \|", table) and "rehearsal" in table
    assert "fine" in good and "why" in bad and "after" in last
    assert "needs 8 GPUs" not in bad + last


def test_a_hanging_part_is_killed_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(first_gpu_run, "GRACE_S", 1)
    # Ranks in a hanging collective ignore SIGTERM, and so do these.
    script = "trap '' TERM; (trap '' TERM; echo $BASHPID > child; while :; do sleep 0.2; done) & wait; sleep 60"
    code, page = run(tmp_path, part("hang", f"cd {tmp_path}; {script}", limit_s=1), part("next", "echo on"))
    assert code == 1 and "FAILED: killed after 1 s" in page and "| Part next | ok" in page
    child = int((tmp_path / "child").read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


def test_the_page_shows_a_parts_own_page_unless_it_failed(tmp_path):
    write = "echo '| measured |' > {}; echo noise; exit {}"
    good = Part("a", "A", 60, lambda place: ["bash", "-c", write.format(place.folder / "a.md", 0)], page="a.md")
    bad = Part("b", "B", 60, lambda place: ["bash", "-c", write.format(place.folder / "b.md", 1)], page="b.md")
    _, page = run(tmp_path, good, bad)
    shown_good, shown_bad = page.split("## ")[1:]
    assert "| measured |" in shown_good.splitlines() and "````" not in shown_good
    assert "| measured |" not in shown_bad.splitlines() and "noise" in shown_bad


def test_a_long_log_is_cut_to_its_end(tmp_path):
    _, page = run(tmp_path, part("long", "seq 1000"))
    assert "... 880 lines before are in long.log" in page
    assert page.splitlines()[-2] == "1000" and "\n880\n" not in page


@pytest.mark.parametrize(
    "options, said",
    [
        (["--rehearse", "--only", "doctor,bnch"], "--only bnch: there are machine, doctor"),
        (["--rehearse", "--out", "{full}"], "it is not empty; name a new folder"),
        (["--frobnicate"], "--frobnicate"),
        ([], "docs/gpu.md, or --rehearse"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(options, said, tmp_path, capsys):
    import torch

    if not options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "file").touch()
    assert first_gpu_run.main([option.format(full=tmp_path) for option in options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_on_gpus_every_part_is_run_or_says_why_not(tmp_path):
    one, eight, none = (Place("cuda", 1, False, tmp_path), Place("cuda", 8, False, tmp_path), Place("cpu", 0, True, tmp_path))
    assert [p.name for p in PARTS if p.left_out(eight)] == ["verify", "bench_step"], "the quickstart did not come so far"
    for ranks in (1, 2):
        (tmp_path / f"quickstart_{ranks}/sft/export").mkdir(parents=True)
        (tmp_path / f"quickstart_{ranks}/model").mkdir()
    assert [p.name for p in PARTS if p.left_out(one)] == ["quickstart_2", "verify"]
    assert not any(p.left_out(eight) for p in PARTS)
    assert [p.name for p in PARTS if p.left_out(none)] == ["tests", "quickstart_1", "verify", "memory"]


def test_commands_for_gpus_name_files_and_overrides_that_exist(tmp_path):
    """Parts that cannot run here are at least accepted: by the configuration, by the shell's syntax, by the file system."""
    from megappo.config.loading import load_config
    from megappo.config.schema import TrainConfig

    place = Place("cuda", 2, False, tmp_path)
    for p in PARTS:
        command = p.command(place)
        for word in command:
            if word.startswith(("scripts/", "tests/", "configs/")):
                assert (ROOT / word).exists(), command
        overrides = [word for word in command if word.split("=")[0].replace(".", "").replace("_", "").isalpha() and "=" in word]
        if overrides:
            config = load_config(ROOT / "configs/quickstart.yaml", overrides, TrainConfig)
            assert config.run.device == "cuda", p.name


def test_the_quickstart_refuses_what_it_does_not_know():
    for options, said in [
        (["--gpu", "3"], "--gpu 3: 1 or 2 GPUs"),
        (["--gpus"], "--gpus: unknown option"),
        (["--out"], "--out needs"),
        (["--sft-steps"], "--sft-steps needs"),
    ]:
        done = subprocess.run(["scripts/quickstart.sh", *options], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode != 0 and said in done.stderr and "[setup" not in done.stdout


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Folder of a rehearsal without the parts whose commands others run here: doctor, bench and bench_step."""
    folder = tmp_path_factory.mktemp("rehearsal") / "out"
    only = "machine,selfcheck,quickstart_2,agreement"
    command = [sys.executable, "-m", "scripts.gpu_run", "--rehearse", "--out", str(folder), "--only", only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + (folder / "report.md").read_text()
    return folder


def test_a_rehearsal_runs_ppo_and_compares_with_vllm(rehearsal):
    page = (rehearsal / "report.md").read_text()
    assert page.count("| ok, ") == 4 and "held-out score:" in page
    agreement = (rehearsal / "agreement.log").read_text()
    assert "sft/export" in page and agreement.splitlines()[-1].split()[0] == "bf16"
    assert float(agreement.splitlines()[-1].split()[1]) < 0.05
    assert (rehearsal / "quickstart_2/ppo/metrics.jsonl").exists()


def test_the_warm_up_of_a_rehearsal_learns(rehearsal):
    losses = [row["sft/loss"] for row in read_lines(rehearsal / "quickstart_2/sft/metrics.jsonl")]
    assert len(losses) == QUICK_SFT_STEPS and losses[-1] < 0.8 * losses[0]
