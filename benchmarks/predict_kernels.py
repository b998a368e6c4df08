"""What kernels should take on an H100, counted without one: `python benchmarks/predict_kernels.py`.

GAE: nvcc compiles csrc/advantages/cuda.cu for sm_90a; the instructions of a tile's way through the kernel are counted in the
machine code, by the source lines that they come from, beside the bytes that must move. The time is between the longest of what runs
side by side (all that a block waits for is hidden by the others) and the sum of all (nothing is). Linear ops: bytes beyond the
matrix products, by the sizes of the ops' own blocks. Rates are those measured on the H100 of docs/kernels.md. A prediction is no
measurement: `benchmarks/bench_ops.py --device cuda --check` measures.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megappo.ops.linear_blocks import BLOCK_LOGITS, BLOCK_TOKENS
from megappo.ops.linear_loss import CHUNK_TOKENS
from megappo.runtime.versions import nvcc_path
from scripts.gpu_stack.library import cuobjdump, kernels_of

COPY = 3.0e12  # bytes a second
# Milliseconds of the matrix products [8192 x 4096] x [4096 x 151936], and of the fused kernel's.
LOGITS_PRODUCT, GRADIENT_PRODUCTS, FUSED_PRODUCT = 14.0, 28.4, 13.7

# ------------------------------------------------------------------------------------------------------------------------- GAE

SOURCE = ROOT / "csrc/advantages/cuda.cu"
TILE, THREADS, WARP = 2048, 256, 32
BYTES = 21  # of a token: value, mask, reward of the token, and three outputs
FOUR_MI = 1 << 22
# The H100: SMs, their clock at boost, instructions a clock, registers, bytes of shared memory.
SMS, CLOCK_HZ, ISSUED, REGISTERS, SHARED = 132, 1.755e9, 4, 65536, 227 * 1024
# Clocks from a tile's tokens in shared memory to its results, if it runs alone: two walks of 8 tokens with two fp64 operations of 8
# clocks behind each other, two scans of 5 steps and one of 3 of about 50, a map's way through L2 of about 700, three barriers and
# what lies between.
WAITING = 2 * 8 * 2 * 8 + 13 * 50 + 700 + 350
# Around the tiles: setting the words of maps, the start, the first tile's way from memory, the last block's sums.
AROUND_US = 7.0


@dataclass(frozen=True)
class Rule:
    """Lines of the source from each that holds `first` to the next that holds `last`, and how often a warp runs them for a tile
    without borders, without a KL, where all tokens are sampled."""

    first: str
    last: str
    times: float


# Lines of several rules run as seldom as the rarest; lines of none once.
RULES = (
    # Once for a block.
    Rule("__shared__ unsigned next_ticket", "while (ticket < scratch.num_tiles)", 0),
    Rule("if (warp == 2 && done < scratch.num_tiles) add_warps", "finish(a, scratch, of_warps);", 0),
    # Tiles that are not whole; chunks with a border or with tokens that were not sampled; the KL.
    Rule("for (int i = 0; i < kPerThread; ++i) x[i] = i < count ? at[i]", "x[i] = i < count", 0),
    Rule("uint2 bytes{0, 0};", "return bytes;", 0),
    Rule("  if (!vectors) {", "    return;", 0),
    Rule("  if (start > chunk.first + chunk.count - 1)", "  return {sequence, false};", 0),
    Rule("  if (chunk.count == 0) return;", "token(i, run, std::false_type{});", 0),
    Rule("        if (!inner && !in.seen)", "        if (!inner", 0),
    Rule("    const double log_ratio = ", "    chunk.reward[i] =", 0),
    Rule("  if (a.kl != Kl::none) {", "  }", 0),
    # What one of the eight warps does; groups of tiles are asked for by few, borders in three rounds of 32.
    Rule("ended = border(a, of_last + 1)", "ended =", 1 / 8),
    Rule("      const bool found = has_fault(", "fault = found;", 1 / 8),
    Rule("  for (std::int64_t g = group - 1;", "  }", 1 / 8 / 8),
    Rule("    if (warp == 0) {", "    } else if (warp == 1", 1 / 8),
    Rule("      const std::int64_t found = find_sequence(a, last_of(next)", "next_sequence = found;", 3 / 8),
    Rule("      add_warps(scratch, done, of_warps, lane);", "add_warps", 1 / 8),
)


def weights(source: str, rules: Sequence[Rule] = RULES) -> dict[int, float]:
    """Line -> how often it runs. ValueError for a rule whose lines are not there."""
    lines: list[str] = source.splitlines()
    found: dict[int, float] = {}
    for rule in rules:
        begins = [i for i, line in enumerate(lines) if rule.first in line]
        ends = [next((i for i in range(begin, len(lines)) if rule.last in lines[i]), None) for begin in begins]
        if not begins or None in ends:
            raise ValueError(f"{SOURCE.name}: no lines from {rule.first!r} to {rule.last!r}; mend RULES")
        for begin, end in zip(begins, ends):
            for number in range(begin + 1, (end or 0) + 2):
                found[number] = min(found.get(number, 1.0), rule.times)
    return found


def instructions(listing: str, source_name: str) -> Iterator[tuple[str, list[int]]]:
    """(opcode, lines of the source, innermost first) of each instruction in the output of `nvdisasm -gi`."""
    chain: list[int] = []
    fresh = True
    for line in listing.splitlines():
        if "//## File" in line:
            if fresh:
                chain, fresh = [], False
            if source_name in line:
                name, number = re.findall(r'"([^"]*)", line (\d+)', line)[0]
                chain += [int(number)] if name.endswith(source_name) else []
        elif (found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", line)) is not None:
            fresh = True
            yield found[1], chain


def count(listing: str, source: str) -> dict[str, float]:
    """Opcode -> instructions of a warp for one tile. listing: of one kernel."""
    of_line = weights(source)
    begin = next(i for i, line in enumerate(source.splitlines()) if "advantages_kernel(" in line) + 1
    found: defaultdict[str, float] = defaultdict(float)
    # Behind this is what a shuffle does where a warp's lanes came apart.
    for opcode, chain in instructions(listing.partition("WARPSYNC.COLLECTIVE")[0], SOURCE.name):
        # The compiler names no call in the kernel for the merged loops over borders.
        if chain and chain[-1] >= begin:
            found[opcode] += min((of_line[line] for line in chain if line in of_line), default=1.0)
    return found


@dataclass(frozen=True)
class Scan:
    """The kernel without steps, weights and traces: instructions of a warp for a tile, registers of a thread, bytes of shared
    memory of a block."""

    by_opcode: dict[str, float]
    registers: int
    shared: int

    @property
    def per_token(self) -> float:
        """Instructions of a thread for a token."""
        return sum(self.by_opcode.values()) * THREADS / TILE

    @property
    def blocks(self) -> int:
        """Blocks on an SM at one time."""
        return min(REGISTERS // (self.registers * THREADS), SHARED // self.shared, 2048 // THREADS)

    def bounds(self, tokens: int) -> tuple[float, float]:
        """(least, most) microseconds."""
        moved = 1e6 * BYTES * tokens / COPY
        issued = 1e6 * self.per_token * tokens / WARP / ISSUED / SMS / CLOCK_HZ
        waited = 1e6 * tokens / TILE / SMS / self.blocks * WAITING / CLOCK_HZ
        return AROUND_US + max(moved, issued, waited), AROUND_US + moved + issued + waited


def scan_of(compiled: str, listing: str, source: str) -> Scan:
    """compiled: what ptxas said (`-Xptxas -v`). listing: of `nvdisasm -gi`. ValueError for spills."""
    name, _, registers, spilled = next(kernel for kernel in kernels_of(compiled) if "ILb0E" in kernel[0])
    if spilled:
        raise ValueError(f"{SOURCE.name}: {spilled} bytes of registers are spilled")
    static = int(re.findall(rf"Compiling entry function '{name}'.*?(\d+) bytes smem", compiled, re.DOTALL)[0])
    code = next(part for part in listing.split("//--------------------- .text.") if part.startswith(name))
    return Scan(count(code, source), registers, static + TILE * 9)


def compiled_scan() -> Scan:
    """Compile the kernel and count. FileNotFoundError without nvcc."""
    nvcc = nvcc_path()
    if nvcc is None:
        raise FileNotFoundError("nvcc was not found (set CUDA_HOME or PATH)")
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "advantages.cubin"
        flags = ["-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas", "-v", f"-I{ROOT / 'csrc'}"]
        command = [nvcc, *flags, "-gencode", "arch=compute_90a,code=sm_90a", "-cubin", str(SOURCE), "-o", str(binary)]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
        nvdisasm = Path(cuobjdump()).with_name("nvdisasm")
        listing = subprocess.run([nvdisasm, "-gi", "-c", binary], check=True, capture_output=True, text=True).stdout
    return scan_of(said.stdout + said.stderr, listing, SOURCE.read_text(encoding="utf-8"))


def gae_table(scan: Scan) -> list[str]:
    lines = ["| GAE, tokens | floor, ms | bar, 1.5 of it | predicted |", "|---|---:|---:|---:|"]
    for name, tokens in (("`[512 x 4096]`", 512 * 4096), ("packed 4 Mi", FOUR_MI), ("`[4096 x 8192]`", 4096 * 8192)):
        floor = 1e3 * BYTES * tokens / COPY
        least, most = (each / 1e3 for each in scan.bounds(tokens))
        lines.append(f"| {name} | {floor:.3f} | {1.5 * floor:.3f} | {least:.3f} to {most:.3f} |")
    return lines


# ------------------------------------------------------------------------------------------------------------------ linear ops

TOKENS, HIDDEN, VOCAB = 8192, 4096, 151936
FP32, BF16 = 4, 2
LOGITS = TOKENS * VOCAB  # numbers


def milliseconds(moved: float) -> float:
    return 1e3 * moved / COPY


def sums_of_dhidden() -> float:
    """Bytes: every block of columns reads and writes dhidden in fp32, but the first."""
    columns = max(BLOCK_LOGITS["cuda"] // min(TOKENS, BLOCK_TOKENS["cuda"]), 256)
    return (2 * -(-VOCAB // columns) - 1) * TOKENS * HIDDEN * FP32


def linear_rows() -> dict[str, tuple[float, float, float, float]]:
    """Name -> milliseconds of (products, logits to gradient, sums of dhidden, factor of the loss)."""
    assert TOKENS <= min(BLOCK_TOKENS["cuda"], 2 * CHUNK_TOKENS["cuda"]), "dweight is one product"
    sums = milliseconds(sums_of_dhidden())
    to_gradient = LOGITS * (FP32 + BF16)  # fp32 in, bf16 out
    wider = LOGITS * (FP32 - BF16)  # the product's logits in fp32, where its floor writes bf16
    kept = LOGITS * 3 * FP32  # logits copied to where they are kept, and read for the statistics
    factor = milliseconds(2 * VOCAB * HIDDEN * BF16)  # dweight times the upstream number
    return {
        "cuda, backward": (FUSED_PRODUCT + GRADIENT_PRODUCTS, 0.0, sums, 0.0),
        "cuda, kept logits, backward": (GRADIENT_PRODUCTS, milliseconds(to_gradient), sums, 0.0),
        "triton, backward": (LOGITS_PRODUCT + GRADIENT_PRODUCTS, milliseconds(to_gradient + wider), sums, 0.0),
        "PPO loss, cuda": (FUSED_PRODUCT + GRADIENT_PRODUCTS, milliseconds(to_gradient), 0.0, factor),
        "PPO loss, triton": (LOGITS_PRODUCT + GRADIENT_PRODUCTS, milliseconds(to_gradient + wider + kept), 0.0, factor),
    }


def linear_table() -> list[str]:
    lines = ["| ms | products | logits to gradient | sums of `dhidden` | factor of the loss | predicted |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, parts in linear_rows().items():
        lines.append(f"| {name} | " + " | ".join(f"{part:.1f}" for part in (*parts, sum(parts))) + " |")
    return lines


def main() -> int:
    print("\n".join(linear_table()))
    try:
        scan = compiled_scan()
    except FileNotFoundError as error:
        print(f"predict_kernels: no count of GAE: {error}", file=sys.stderr)
        return 2
    print("\n" + "\n".join(gae_table(scan)))
    print(f"\n{scan.per_token:.0f} instructions a token, {scan.registers} registers, {scan.blocks} blocks on an SM")
    often = sorted(((times, opcode) for opcode, times in scan.by_opcode.items()), reverse=True)
    print("of a warp for a tile:", ", ".join(f"{times:.0f} {opcode}" for times, opcode in often[:16]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
