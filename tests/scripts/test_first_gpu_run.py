"""The first run on a GPU, rehearsed on the CPU: its parts fit together, each fails alone, and the page tells what became of
them.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.commands.cli import main
from megappo.telemetry.jsonl import read_lines
from scripts.gpu_run import __main__ as first_gpu_run
from scripts.gpu_run.page import BEGIN, END, into_docs
from scripts.gpu_run.parts import _ON_CPU, PARTS, QUICK_SFT_STEPS, STEP, Part, Place
from scripts.gpu_run.step import STAGES, launched, planned
from scripts.gpu_run.step import page as step_page
from tests.forked_commands import run_code, run_command, run_script

ROOT = Path(__file__).parents[2]


def part(name: str, script: str, *, limit_s: int = 60, short_s: int = 60, **more) -> Part:
    return Part(name, f"Part {name}", lambda place: ["bash", "-c", script.format(place.folder)], limit_s, short_s, **more)


def run(tmp_path: Path, *parts: Part, options: tuple[str, ...] = ()) -> tuple[int, str]:
    code = first_gpu_run.main(["--rehearse", "--out", str(tmp_path / "out"), *options], parts)
    return code, (tmp_path / "out/report.md").read_text()


def test_each_part_fails_alone_and_the_page_says_how(tmp_path, capsys):
    code, page = run(
        tmp_path,
        part("good", "echo fine $PYTHONPATH"),
        part("bad", "echo '```'; echo why >&2; exit 3"),
        part("absent", "exit 1", left_out=lambda place: "needs 8 GPUs"),
        part("last", "echo after"),
    )
    assert code == 1 and "failed: bad" in capsys.readouterr().out
    table, good, bad, last = page.split("## ")
    assert re.search(r"\| Part good \| ok, \d+ s \|", table) and "| Part absent | left out: needs 8 GPUs |" in table
    assert re.search(r"\| Part bad \| FAILED: exit code 3, \d+ s \|", table) and "rehearsal" in table
    assert f"fine {ROOT}" in good and "why" in bad and "after" in last
    assert "needs 8 GPUs" not in bad + last


def test_a_hanging_part_is_killed_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(first_gpu_run, "GRACE_S", 1)
    # Ranks in a hanging collective ignore SIGTERM, and so do these.
    script = "trap '' TERM; (trap '' TERM; echo $BASHPID > ../child; while :; do sleep 0.2; done) & wait; sleep 60"
    code, page = run(tmp_path, part("hang", f"cd {{}}; {script}", limit_s=1), part("next", "echo on"))
    assert code == 1 and "FAILED: killed after 1 s" in page and "| Part next | ok" in page
    child = int((tmp_path / "child").read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


def test_the_page_shows_a_parts_own_page_unless_it_failed(tmp_path):
    write = "echo '| measured |' > {}/own.md; echo noise; exit "
    _, page = run(tmp_path, part("a", write + "0", page="own.md"), part("b", write + "1", page="own.md"))
    shown_good, shown_bad = page.split("## ")[1:]
    assert "| measured |" in shown_good.splitlines() and "````" not in shown_good
    assert "| measured |" not in shown_bad.splitlines() and "noise" in shown_bad


def test_the_page_is_whole_whenever_the_run_is_stopped(tmp_path, capsys):
    """While a part runs it names all of them, for a SIGKILL; SIGTERM ends the part and leaves what it wrote."""
    stop = "cp {0}/report.md {0}/seen.md; echo '| so far |' > {0}/own.md; kill -TERM $PPID; sleep 60"
    code, page = run(tmp_path, part("good", "echo fine"), part("stop", stop, page="own.md"), part("last", "echo never"))
    assert code == 1 and "stopped by SIGTERM" in capsys.readouterr().out
    seen = (tmp_path / "out/seen.md").read_text()
    for text in (seen, page):
        table, *shown = text.split("## ")
        assert re.search(r"\| Part good \| ok, \d+ s \|", table) and "| Part last | not reached |" in table
        assert "| Part stop | was under way when the run was stopped |" in table and "fine" in shown[0]
    assert len(seen.split("## ")) == 2 and "| so far |" in page.splitlines() and not list((tmp_path / "out").glob("*.part"))
    parts = json.loads((tmp_path / "out/report.json").read_text())["parts"]
    assert [(one["title"], one["failed"]) for one in parts] == [("Part good", False), ("Part stop", False), ("Part last", False)]


def test_minutes_are_for_all_parts(tmp_path):
    late = [part("long", "echo never", short_s=60), part("short", "echo in", short_s=1)]
    code, page = run(tmp_path, part("slow", "sleep 60", short_s=1), *late, options=("--minutes", "0.03"))
    assert code == 1 and "| Part slow | FAILED: killed after 1 s |" in page and "| Part short | ok, 0 s |" in page
    assert re.search(r"\| Part long \| left out: [01] s are left of 0.03 minutes \|", page)


def test_the_tables_of_a_run_go_into_the_docs(tmp_path, capsys):
    table = "| ms | a |\n|---|---:|\n| x | 1.5 MiB/s |"
    write = part("bench", f"printf '# Title\n\n{table}\n\n    python -m x --out {{0}}\n' > {{0}}/own.md", page="own.md")
    run(tmp_path, write, part("bad", "echo noise; exit 1", page="own.md"))
    assert first_gpu_run.main(["--into-docs", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "first_gpu_run: a rehearsal has no figure of a GPU\n"
    told = json.loads((tmp_path / "out/report.json").read_text())
    gpu = {"on_gpu": True, "gpu": "NVIDIA H100 80GB HBM3", "num_gpus": 1, "versions": {"torch": "2.11.0"}, "date": "1 May 2026"}
    outcomes = "| part | outcome |\n| --- | --- |\n| Part bench | ok, 0 s |\n| Part bad | FAILED: exit code 1, 0 s |"
    machine = "1 May 2026: one H100 (NVIDIA H100 80GB HBM3), torch 2.11.0; `scripts/first_gpu_run.sh`."
    wanted = f"before\n{BEGIN}\n\n{machine}\n\n{outcomes}\n\n**Part bench**\n\nTitle\n\n{table}\n\n{END}\nafter\n"
    once = into_docs({**told, **gpu}, f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert once == wanted == into_docs({**told, **gpu}, once)
    with pytest.raises(ValueError, match="no marks"):
        into_docs({**told, **gpu}, "before")
    told["parts"][0]["table"] += ["| /home/me/x | 1 |"]
    with pytest.raises(ValueError, match="a folder of the machine is in a table: . /home/me/x"):
        into_docs({**told, **gpu}, once)
    assert BEGIN in (ROOT / first_gpu_run.DOCS).read_text() and "{" not in once


def test_a_long_log_is_cut_to_its_end(tmp_path):
    _, page = run(tmp_path, part("long", "seq 1000"))
    assert "... 880 lines before are in long.log" in page
    assert page.splitlines()[-2] == "1000" and "\n880\n" not in page


def test_launches_and_the_devices_work_are_told_by_stage():
    """Kernels belong to the stage that launched them, whenever they run; work at one time counts once."""

    def event(cat: str, name: str, ts: float, dur: float, **args) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "stage logprobs", 0, 100),
        event("gpu_user_annotation", "stage logprobs", 3, 500),
        event("user_annotation", "stage update_policy", 100, 100),
        event("user_annotation", "stage advantages", 200, 50),
        event("cuda_runtime", "cudaLaunchKernel", 10, 1, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 90, 1, correlation=2),
        event("cuda_runtime", "cudaGraphLaunch", 120, 1, correlation=3),
        event("cuda_runtime", "cudaStreamSynchronize", 130, 60, correlation=4),
        event("kernel", "a", 20, 30, correlation=1),
        event("kernel", "b", 110, 20, correlation=2),
        *(event("kernel", "of a graph", at, 10, correlation=3) for at in (140, 145)),
    ]
    assert launched(events) == {"logprobs": (2, 0.5), "update_policy": (1, 0.15)}


@pytest.mark.parametrize(
    "options, said",
    [
        (["--rehearse", "--only", "doctor,bnch"], "--only bnch: there are machine, build, doctor"),
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


def test_on_gpus_every_part_is_run_or_says_why_not(tmp_path, monkeypatch):
    one, eight, none = (Place("cuda", 1, False, tmp_path), Place("cuda", 8, False, tmp_path), Place("cpu", 0, True, tmp_path))
    monkeypatch.setenv("TE_SITE", "/te")
    monkeypatch.setattr("megappo.ops.implementations.missing", lambda *_: "not built")
    quickstart = ["fsdp2", "te", "bench_step", "verify"]
    assert [p.name for p in PARTS if p.left_out(eight)] == quickstart, "the quickstart did not come so far"
    for ranks in (1, 2):
        (tmp_path / f"quickstart_{ranks}/sft/export").mkdir(parents=True)
        (tmp_path / f"quickstart_{ranks}/model").mkdir()
    assert [p.name for p in PARTS if p.left_out(one)] == ["quickstart_2", "verify"]
    assert not any(p.left_out(eight) for p in PARTS)
    assert [p.name for p in PARTS if p.left_out(none)] == ["build", "quickstart_1", "rollout", "memory", "te", "tests", "verify"]
    monkeypatch.setattr("megappo.ops.implementations.missing", lambda *_: None)
    assert [p.left_out(one) for p in PARTS if p.name == "build"] == ["the CUDA kernels are built"]


def test_commands_for_gpus_name_files_and_overrides_that_exist(tmp_path):
    """Parts that cannot run here are at least accepted: by the configuration, by the shell's syntax, by the file system."""
    from megappo.config.loading import load_config
    from megappo.config.schema import TrainConfig

    place = Place("cuda", 2, False, tmp_path, (9, 0), 12)
    for p in PARTS:
        command = [word for script in p.command(place) for word in shlex.split(script)]
        for word in command:
            if word.startswith(("scripts/", "tests/", "configs/")):
                assert (ROOT / word).exists(), command
        overrides = [word for word in command if re.match(r"[a-z0-9_]+\.[a-z0-9_.]+=", word)]
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


# In place of Python: takes note of its arguments.
NOTES = """#!/bin/bash
printf '%s\\0' "$@" END >>{calls}
"""


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Folder of a rehearsal without the parts whose commands others run here: doctor, selfcheck, step, fsdp2, bench, bench_step.
    The commands of the quickstart's script are run as it would run them, and the agreement by itself, in forks."""
    folder = tmp_path_factory.mktemp("rehearsal") / "out"
    assert first_gpu_run.main(["--rehearse", "--out", str(folder), "--only", "machine"]) == 0
    here, parts = Place("cpu", 0, True, folder), {one.name: one for one in PARTS}
    script, *words = parts["quickstart_2"].command(here)
    make_model, *trainings = noted(tmp_path_factory.mktemp("venv"), ROOT / script, *words)
    made = run_script(ROOT / make_model[0], *make_model[1:], cwd=ROOT)
    assert made.returncode == 0, made.stderr
    for options, (command, *arguments) in ((words[:3], words[3:]) for words in trainings):
        assert options == ["-P", "-m", "megappo"]
        done = run_command(command, *arguments, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / f"{command}.log").write_text(done.stdout)
    python, option, module, *words = parts["agreement"].command(here)
    assert (python, option, parts["agreement"].page) == (sys.executable, "-m", "agreement.md") and words[0].endswith(
        "/quickstart_2/sft/export"
    )
    code = f"import runpy, sys; sys.argv[1:] = {words}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    agreed = run_code(code, cwd=ROOT)
    assert agreed.returncode == 0, agreed.stdout + agreed.stderr
    return folder


def noted(venv: Path, script: Path, *words: str) -> list[list[str]]:
    """Arguments of every call of Python by a script that runs in an environment as this one."""
    real = Path(os.environ.get("MEGAPPO_VENV") or ROOT / ".venv")
    for mark in real.glob(".megappo-*"):  # it is set up
        (venv / mark.name).touch()
    (venv / "bin").mkdir()
    (venv / "bin/python").write_text(NOTES.format(calls=venv / "calls"))
    (venv / "bin/python").chmod(0o755)
    environment = os.environ | {"MEGAPPO_VENV": str(venv)}
    done = subprocess.run([script, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (venv / "calls").read_text().split("\0END\0")
    return [call.split("\0") for call in calls[:-1]]


def test_a_rehearsal_runs_ppo_and_compares_with_vllm(rehearsal):
    assert (rehearsal / "report.md").read_text().count("| ok, ") == 1
    assert "held-out score:" in (rehearsal / "train.log").read_text()
    agreement = (rehearsal / "agreement.md").read_text()
    assert agreement.count("checksums equal") == 4
    assert re.search(r"^\| traced push \| .* aten::\w+ \d\S* s, ", agreement, re.MULTILINE), "by its parts"
    means = [float(mean) for mean in re.findall(r"\| log-probs.* difference: mean (\S+),", agreement)]
    assert len(means) == 4 and all(0 < mean < 0.05 for mean in means), "whole and cut distributions, before and after sleep"
    losses = [row["sft/loss"] for row in read_lines(rehearsal / "quickstart_2/sft/metrics.jsonl")]
    assert len(losses) == QUICK_SFT_STEPS and losses[-1] < 0.8 * losses[0]


def test_the_stages_of_a_step_stand_beside_the_plan(rehearsal, capsys):
    folder = rehearsal / "quickstart_2"
    files = [f"policy.model={folder / 'model'}", f"data.train={folder / 'data/train.jsonl'}"]
    files += [f"data.tokenizer={folder / 'model/tokenizer.model'}"]
    assert main(["plan", "configs/quickstart.yaml", "--gpu-memory-gib", "80", *STEP, *_ON_CPU, *files]) == 0
    plan = planned(capsys.readouterr().out)
    assert {phase for phases in STAGES.values() for phase in phases} <= plan.keys() and 30 < min(plan.values()) < 80
    page = step_page(read_lines(folder / "ppo/metrics.jsonl")[-1], plan, {"logprobs": (1200, 0.4)})
    stages = re.findall(r"^\| (\w+) \| \d\S* \| .* \| \d\S* \| (?:-|1200) \| (?:-|40%) \|$", page, re.MULTILINE)
    assert set(stages) == STAGES.keys() - {"advantages"}, "each is timed and planned"
