"""Predictions of kernels are what docs/kernels.md says, and are counted of the code that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import predict_kernels
from benchmarks.predict_kernels import SOURCE, Rule, compiled_scan, count, gae_table, linear_rows, weights
from megappo.runtime.versions import nvcc_path

PAGE = (Path(__file__).parents[2] / "docs/kernels.md").read_text(encoding="utf-8")


def test_the_page_has_the_predictions_of_the_linear_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, parts in linear_rows().items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} "))
        assert float(re.split(r" *\| *", row)[6].split(" / ")[0]) == pytest.approx(sum(parts), abs=0.06), row
    # A quarter of the columns in a block: four times the sums of dhidden.
    before = linear_rows()["cuda, backward"][2]
    monkeypatch.setitem(predict_kernels.BLOCK_LOGITS, "cuda", predict_kernels.BLOCK_LOGITS["cuda"] // 4)
    assert linear_rows()["cuda, backward"][2] == pytest.approx(4 * before, rel=0.03)


def test_instructions_are_counted_by_the_lines_that_run() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    lines = source.splitlines()

    def said(*chain: str) -> str:
        numbers = [next(i for i, line in enumerate(lines, 1) if text in line) for text in chain]
        whole = [f'\t//## File "/x/csrc/advantages/cuda.cu", line {number} inlined at "cuda.cu", line 1' for number in numbers]
        return "\n".join(whole) + "\n        /*0010*/              @!P1 DFMA R4, R2, R6 ;\n"

    run = "run_chunk(a, scratch, chunk, spot,"
    walked, border = "token(i, run, std::true_type{});", "token(i, run, std::false_type{});"
    once = said(walked, run) + said("publish(scratch, ticket, from_warp);")
    assert count(once + said(border, run) + said("constexpr int kTile") + "WARPSYNC.COLLECTIVE" + once, source) == {"DFMA": 1.125}
    with pytest.raises(ValueError, match="no lines from 'nowhere'"):
        weights(source, [Rule("nowhere", "anywhere", 1)])


@pytest.mark.skipif(nvcc_path() is None, reason="needs nvcc")
def test_the_page_has_the_prediction_of_gae() -> None:
    pytest.importorskip("triton")  # it brings nvdisasm
    scan = compiled_scan()
    assert scan.blocks == 3 and 60 < scan.per_token < 120
    assert 2 * 8 <= scan.by_opcode["DFMA"] < 80, "two fused operations a token and lambda, in two walks, and the scans"
    for line in gae_table(scan)[2:]:
        name = line.split("|")[1]
        said = next(row for row in PAGE.splitlines() if row.startswith(f"|{name}|"))
        # Another nvcc may take other instructions.
        assert _numbers(said, name) == pytest.approx(_numbers(line, name), rel=0.1), line


def _numbers(row: str, name: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", row.replace(name, ""))]
