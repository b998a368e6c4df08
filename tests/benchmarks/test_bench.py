"""The benchmarks run, say what is absent, count right, and with --check notice an op that computes something else."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import (
    bench_gae,
    bench_linear_logprob,
    bench_linear_loss,
    bench_logprob,
    bench_losses,
    bench_ops,
    bench_placements,
    bench_policy_terms,
    bench_step,
)
from benchmarks.harness import candidates, clock
from benchmarks.harness.bars import MET, NOT_MEASURED, NOT_MET, bars
from benchmarks.harness.harness import Settings, measure, prepare
from benchmarks.harness.model import Calls, Candidate, Line, Report, Timing, worst, worst_row
from megappo.ops import advantages as advantages_op
from megappo.ops import linear_logprob as linear_op

ROOT = Path(__file__).parents[2]
# system-malloc: the process of the tests goes on afterwards
QUICK = ["--device", "cpu", "--quick", "--repeats", "2", "--threads", "1", "--system-malloc"]
SCRIPTS = {
    "logprob": (bench_logprob, "24x300,16x96/4", ["--without", "Megatron-core"]),
    "linear": (bench_linear_logprob, "24x16x300", []),
    "linear_loss": (bench_linear_loss, "24x16x300", []),
    "gae": (bench_gae, "600,3x70", []),
    "losses": (bench_losses, "1Ki", []),
}


@pytest.fixture(scope="module", autouse=True)
def small_cache():
    """Emptying the real cache takes longer than these problems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "last_level_cache_bytes", lambda device: 2**20)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory, small_cache):
    """Output of each script, checked against the oracle."""
    folder = tmp_path_factory.mktemp("bench")
    found = {}
    for name, (script, shapes, more) in SCRIPTS.items():
        path = folder / f"{name}.json"
        assert script.main([*QUICK, "--check", "--shapes", shapes, "--json", str(path), *more]) == 0
        found[name] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_candidate_is_measured_or_says_why_not(written, name):
    for case in written[name]["cases"]:
        for line in case["lines"]:
            assert line["status"] in ("measured", "absent"), line
            assert line["times"] if line["status"] == "measured" else line["reason"]
        by_kind = {line["kind"] for line in case["lines"] if line["status"] == "measured"}
        assert {"ours", "torch"} <= by_kind


def test_every_term_of_the_policys_loss_is_measured(tmp_path):
    path = tmp_path / "terms.json"
    assert bench_policy_terms.main([*QUICK, "--check", "--dtypes", "fp32", "--shapes", "24x16x300", "--json", str(path)]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    assert {line["status"] for line in case["lines"]} == {"measured"}
    assert len(case["lines"]) == len(bench_policy_terms.TERMS) + 1 + len(bench_policy_terms.CORRECTIONS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_floors_come_from_the_probes_of_the_run_and_ratios_from_the_floors(written, name):
    for case in written[name]["cases"]:
        assert case["copy_bytes_per_s"] > 0 and case["probes"]["copy"]["count"] == 2
        moved = case["copy_bytes_per_s"] * case["probes"]["copy"]["median"]
        assert moved == pytest.approx(2 * 32 * 2**20)
        for line in case["lines"]:
            for phase, timing in line["times"].items():
                if phase not in case["floors"]:  # the backward of linear_loss hands out what the forward made
                    assert case["benchmark"] == "linear_loss" and phase not in line["ratios"]
                    continue
                assert line["ratios"][phase] == pytest.approx(timing["median"] / case["floors"][phase])
                assert 0 < timing["best"] <= timing["median"] and timing["spread"] >= 0


def test_floor_counts_the_bytes_that_must_move(written):
    cases = written["logprob"]["cases"] + written["gae"]["cases"]
    by_shape = {(case["benchmark"], case["shape"], case["dtype"]): case for case in cases}
    for key, phase, num_bytes in [
        (("logprob", "24x300", "float32"), "forward", 24 * 300 * 4),
        (("logprob", "24x300", "bfloat16"), "both", 3 * 24 * 300 * 2),
        (("logprob", "16x96/4", "float32"), "backward", 2 * 16 * 24 * 4),
        (("gae", "3x70", "float32"), "forward", 3 * 70 * 21),
        (("token_advantages", "600", "float32"), "forward", 600 * 25),
    ]:
        case = by_shape[key]
        assert case["floors"][phase] * case["copy_bytes_per_s"] == pytest.approx(num_bytes)


def test_linear_floor_is_the_bare_products(written):
    for case in written["linear"]["cases"]:
        logits, dhidden, dweight = (case["probes"][f"{name} product"]["median"] for name in ("logits", "dhidden", "dweight"))
        assert case["floors"]["both"] == pytest.approx(logits + dhidden + dweight)
        assert case["floors"]["fwd+bwd, logits recomputed"] == pytest.approx(2 * logits + dhidden + dweight)


def test_peers_that_are_not_installed_are_listed(written, monkeypatch):
    names = {line["candidate"]: line for line in written["logprob"]["cases"][0]["lines"]}
    for peer in ("Liger cross entropy", "QuACK cross entropy", "TransformerEngine cross entropy"):
        assert names[peer]["status"] == "absent"
    assert names["torch.compile, log_softmax"]["reason"] == "left out"


def test_megatron_core_is_measured_where_it_is_installed(capsys):
    pytest.importorskip("megatron.core")
    assert bench_logprob.main([*QUICK, "--check", "--shapes", "24x300", "--without", "torch"]) == 0
    assert "Megatron-core unfused  " in capsys.readouterr().out
    assert not torch.distributed.is_initialized()


row_ops = bench_logprob.row_ops


def wrong_entropy(*args, **kwargs):
    logprob, entropy = row_ops(*args, **kwargs)
    return logprob, entropy + 1e-3


def unsummed_dweight(hidden, weight, *args, **kwargs):
    """The gradient of the weight misses the last token."""
    detached = torch.cat((weight[None], weight[None].detach()))
    first, second = (linear_op.linear_logprob(hidden, w, *args, **kwargs) for w in detached)
    keep = torch.arange(hidden.shape[0]) < hidden.shape[0] - 1
    return tuple(torch.where(keep, a, b) for a, b in zip(first, second))


def decayed_over_masked(rewards, value, mask, cu_seqlens, *rest):
    """GAE that takes a masked step for a step, a fault that others shipped."""
    reward, *_ = advantages_op.token_advantages(rewards, value, mask, cu_seqlens, *rest)
    made = rewards._replace(ref_logprob=None, score=torch.zeros_like(rewards.score), token_reward=reward)
    return advantages_op.token_advantages(made, torch.where(mask, value, 0.0), torch.ones_like(mask), cu_seqlens, *rest)


@pytest.mark.parametrize(
    "script,name,broken,shapes,said",
    [
        (bench_logprob, "row_ops", wrong_entropy, "24x300", "24x300 float32: megappo reference wrong: entropy"),
        (bench_linear_logprob, "linear_logprob", unsummed_dweight, "24x16x300", "wrong: dweight"),
        (bench_gae, "token_advantages", decayed_over_masked, "600", "gae 600 float32: megappo reference wrong: returns"),
    ],
)
def test_check_catches_an_op_that_computes_something_else(script, name, broken, shapes, said, monkeypatch, capsys):
    monkeypatch.setattr(script, name, broken)
    leave_out = ["--without", "torch,Megatron,Python", "--dtypes", "fp32"]
    assert script.main([*QUICK, *leave_out, "--shapes", shapes, "--check"]) == 1
    assert said in capsys.readouterr().err
    assert script.main([*QUICK, *leave_out, "--shapes", shapes]) == 0  # nobody looked


@pytest.mark.parametrize(
    "script,argv,said",
    [
        (bench_logprob, ["--shapes", "2048"], "shape '2048': want tokens x vocabulary"),
        (bench_logprob, ["--shapes", "8x10/3"], "10 columns do not divide by 3"),
        (bench_linear_logprob, ["--shapes", "8x0x10"], "shape '8x0x10'"),
        (bench_gae, ["--shapes", "1Gi"], "shape '1Gi'"),
        (bench_losses, ["--shapes", "-5"], "shape '-5'"),
        (bench_losses, ["--only", "gae"], "--only gae: there are policy_loss, value_loss"),
        (bench_ops, ["--shapes", "ppo:1Mi"], "ppo is not one of logprob"),
        (bench_logprob, ["--dtypes", "int8"], "--dtypes int8: use fp32, bf16, fp16"),
        (bench_logprob, ["--repeats", "0"], "--repeats 0: at least 1"),
        (bench_logprob, ["--repeats", "many"], "--repeats"),
        (bench_logprob, ["--json", "missing/folder/x.json"], "there is no folder"),
        (bench_logprob, ["--frobnicate"], "--frobnicate"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(script, argv, said, capsys):
    assert script.main([*argv]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_cuda_without_a_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_logprob.main(["--device", "cuda"]) == 2
    assert "this torch sees no GPU" in capsys.readouterr().err


def test_plot_is_written(tmp_path):
    path = tmp_path / "x.png"
    assert bench_losses.main([*QUICK, "--only", "value_loss", "--shapes", "1Ki", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_candidate_that_fails_is_reported_and_the_others_are_measured():
    def broken() -> Calls:
        raise RuntimeError("no such thing\nsecond line")

    benchmark = bench_losses.VALUE_LOSS
    with_broken = replace(benchmark, candidates=lambda p: [Candidate("broken", "peer", broken), *benchmark.candidates(p)])
    watch, settings = clock.Clock(torch.device("cpu"), 2**20), Settings(repeats=2, leave_out=("torch",))
    report = measure(prepare(with_broken, "1Ki", torch.float32, watch, settings), watch, settings)
    assert (report.lines[0].status, report.lines[0].reason) == ("failed", "RuntimeError: no such thing")
    assert any(line.times for line in report.lines)


def test_a_first_call_that_takes_too_long_is_stopped():
    with pytest.raises(candidates.TooSlow), candidates.time_limit(0.05):
        while True:
            pass


def peaks() -> tuple[int, int]:
    """Peak bytes of three tensors of 16 MiB one after the other (and one of 4), and of three at the same time."""
    memory = clock.Memory(torch.device("cpu"))
    mib = 2**20

    def one_after_the_other():
        for _ in range(3):
            torch.ones(16 * mib, dtype=torch.uint8)
        return torch.ones(4 * mib, dtype=torch.uint8)

    def together():
        return [torch.ones(16 * mib, dtype=torch.uint8) for _ in range(3)]

    clock.set_freed_memory("returned")
    apart, both = memory.peak(one_after_the_other), memory.peak(together)
    return apart[0], both[0]


def test_peak_memory_counts_what_lives_at_the_same_time():
    """In a process of its own, as the scripts are: what other tests freed would be taken again without the set growing."""
    if clock.Memory(torch.device("cpu")).method is None:
        pytest.skip("the peak of the resident set cannot be reset here")
    script = "from tests.benchmarks.test_bench import peaks; print(*peaks())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    apart, both = (int(value) / 2**20 for value in done.stdout.split()[-2:])
    assert 15 < apart < 24 and 46 < both < 56


def test_nan_and_a_wrong_row_are_beyond_the_tolerance():
    want = torch.ones(100, 8, dtype=torch.float64)
    assert not worst("x", want.float(), want, 1e-6).wrong
    assert worst("x", torch.where(torch.arange(8) == 3, torch.nan, want).float(), want, 1e-6).wrong
    off = want.clone()
    off[7] *= 1.1
    assert worst_row("x", off, want, 0.01).wrong and not worst_row("x", off, want, 0.2).wrong


def report_of(benchmark, shape, dtype, times, floors, kinds, phase="both"):
    lines = []
    for (name, seconds), kind in zip(times.items(), kinds):
        line = Line(name, kind, times={phase: Timing(seconds, seconds, 0.0, seconds, 1)}, result_bytes=0)
        line.peak_bytes = 1000 if kind == "torch" else 50
        line.ratios = {phase: seconds / floors[phase]}
        lines.append(line)
    return Report(benchmark, shape, dtype, floors, {}, 1.0, lines)


@pytest.mark.parametrize("ours_s,verdict", [(0.9, MET), (1.3, NOT_MET)])
def test_bar_of_the_logprob_op(ours_s, verdict):
    times = {"megappo cpp": ours_s, "torch eager, log_softmax": 5.0, "torch.compile, log_softmax": 2.0}
    report = report_of("logprob", "2048x32000", "float32", times, {"both": 0.5}, ["ours", "torch", "compile"])
    found = {bar.name: bar.verdict for bar in bars([report], "cpu")}
    assert found.pop("log-prob and entropy fwd+bwd [2048 x 32000] float32") == verdict
    assert set(found.values()) == {NOT_MEASURED}


def test_bar_against_torch_compile_is_open_without_it():
    times = {"megappo cpp": 1.0, "torch eager, log_softmax": 5.0}
    report = report_of("logprob", "2048x32000", "float32", times, {"both": 0.5}, ["ours", "torch"])
    assert bars([report], "cpu")[0].verdict == NOT_MEASURED


def test_bars_of_the_linear_op_and_gae():
    times = {"megappo cpp": 1.1, "torch eager, log_softmax": 5.0}
    floors = {"both": 0.75, "fwd+bwd, logits recomputed": 1.0}
    linear = report_of("linear_logprob", "1024x512x32000", "float32", times, floors, ["ours", "torch"])
    times = {"megappo cpp": 1.0, "torch eager, doubling": 2.9, "Python loop over numbers": 100.0}
    gae = report_of("gae", "1Mi", "float32", times, {"forward": 0.5}, ["ours", "torch", "torch"], "forward")
    found = [bar.verdict for bar in bars([linear, gae], "cpu") if bar.verdict != NOT_MEASURED]
    assert found == [MET, MET, MET, NOT_MET]  # time, memory; 100x the Python loop, not 3x the best PyTorch


def test_gpu_targets_are_about_the_named_implementation():
    shape = "8192x4096x151936"
    times = {"megappo cuda": 0.015, "megappo triton": 0.015}
    report = report_of("linear_logprob", shape, "bfloat16", times, {"forward": 0.0129}, ["ours", "ours"], "forward")
    found = {bar.name: bar.verdict for bar in bars([report], "cuda")}
    assert found[f"linear_logprob {shape} forward, megappo cuda"] == NOT_MET
    assert found[f"linear_logprob {shape} forward, megappo triton"] == MET
    assert found["gae 4Mi forward"] == NOT_MEASURED

    for ours_s, want in ((0.057, MET), (0.061, NOT_MET)):  # 1.15 of 0.052 s
        times = {"megappo cuda": ours_s, "torch.compile, logsumexp": 0.052}
        report = report_of("linear_logprob", shape, "bfloat16", times, {"both": 0.042}, ["ours", "compile"])
        assert {bar.name: bar.verdict for bar in bars([report], "cuda")}[f"linear_logprob {shape} both"] == want


def test_best_is_shown_where_asked_for():
    seconds = [3.0, 1.0, 2.0, 9.0, 2.0]
    assert clock.summary(seconds).shown == 2.0 and clock.summary(seconds, show_best=True).shown == 1.0
    assert clock.summary(seconds, 10.0).spread == pytest.approx(10.0) and clock.summary(seconds).count == 5


def test_all_ops_in_one_run_end_with_the_bars(capsys, tmp_path):
    argv = ["--only", "value_loss,logprob", "--shapes", "value_loss:1Ki,logprob:8x40", "--without", "torch,Megatron"]
    page = tmp_path / "x.md"
    assert bench_ops.main([*QUICK, *argv, "--markdown", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert any(line.startswith("**value_loss 1Ki float32**") for line in lines)
    assert any(line.startswith("| megappo reference | ") for line in lines)
    out = capsys.readouterr().out
    assert "value_loss 1Ki float32" in out and "bars:" in out and "not measured" in out


def test_step_benchmark_compares_medians_with_the_references(tmp_path, capsys):
    samples = {"reference": {"timing/step_s": [1.0, 1.2, 9.0]}, "auto": {"timing/step_s": [1.1, 1.1, 1.1]}}
    assert "kernels=auto is not slower than with reference: 0.917x: met" in bench_step.report(samples)
    samples["auto"]["timing/step_s"] = [1.3, 1.3, 1.3]
    assert "1.083x: not met" in bench_step.report(samples)
    assert bench_step.main([str(tmp_path)]) == 2
    assert "run scripts/quickstart.sh first" in capsys.readouterr().err


def test_placements_are_reported_beside_both_predictions(capsys) -> None:
    stages = bench_placements.Stages
    timed = bench_placements.Timed(stages(1.0, 2.0, 2.5, 0.5), stages(1.0, 2.0, 2.0, 0.0), stages(1.0, 2.0, 2.5, 0.5), whole_s=6.5)
    lines = bench_placements.report({"critic apart": timed}).splitlines()
    assert lines[1].split() == ["critic", "apart", "measured", "1.00", "2.00", "2.50", "0.500", "6.00", "6.50"]
    assert lines[2].split() == ["predicted", "1.00", "2.00", "2.00", "0", "5.00", "1.20"]
    assert lines[3].split()[-1] == "1.00"
    assert bench_placements.main(["--steps", "2"]) == 2
    assert capsys.readouterr().err == "bench_placements: --steps 2: more than the 2 that do not count\n"
