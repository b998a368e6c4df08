"""Parts of the first run on a GPU: command, time limit, and the condition for leaving it out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MINUTE = 60
# Of a benchmark: the quickstart trains the critic alone for 10 steps, and its policy warms up for 10 updates, 4 a step, after that.
QUICK_STEPS = 14
# Of PPO itself, with the shortest warm-ups.
QUICK_PPO = [
    "trainer.steps=4",
    "trainer.eval_every=4",
    "critic.warmup.steps=1",
    *(f"{role}.optimizer.warmup_steps=1" for role in ("policy", "critic")),
]
# Of the supervised warm-up before, whose learning rate rises for 20.
QUICK_SFT_STEPS = 30
# Of a response, so that it fits the quickstart's model, which has 64 positions, behind the prompts of measure_agreement.py.
AGREEMENT_TOKENS = 40
Command = list[str]


@dataclass(frozen=True)
class Place:
    """Machine and folder of the parts. device: "cuda", or "cpu" in a rehearsal. quick: the smallest sizes. folder: of logs and
    report."""

    device: str
    num_gpus: int
    quick: bool
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def quickstart(self, ranks: int) -> Path:
        return self.folder / f"quickstart_{ranks}"


@dataclass(frozen=True)
class Part:
    """One command. limit_s: it is killed after so many seconds. page: a Markdown file that it writes itself, shown in place of
    its output. left_out: the reason why it does not run at a place, None if it does."""

    name: str
    title: str
    limit_s: int
    command: Callable[[Place], Command]
    left_out: Callable[[Place], str | None] = lambda place: None
    page: str | None = None


def _python(*arguments: str) -> Command:
    return [sys.executable, *arguments]


def _machine(place: Place) -> Command:
    asked = (
        "nvidia-smi",
        "nvidia-smi topo -m",
        "nvcc --version",
        "lscpu",
        "free -g",
        "df -h . /dev/shm",
        "git log -1 --oneline",
        "git status --short",
        f"{shlex.quote(sys.executable)} -m pip list --format=freeze",
    )
    # Each command for itself: a missing tool must not hide the output of others.
    return ["bash", "-c", "\n".join(f"echo '$ {line}'; {line} 2>&1" for line in asked) + "\ntrue"]


def _layout(ranks: int) -> list[str]:
    """Overrides of configs/quickstart.yaml, which is for two CPU ranks."""
    return ["run.device=cuda", f"run.num_ranks={ranks}", f"policy.parallel.tp={ranks}", f"critic.parallel.pp={ranks}"]


def _quickstart(ranks: int) -> Callable[[Place], Command]:
    def command(place: Place) -> Command:
        steps = QUICK_PPO if place.quick else []
        warm_up = ["--sft-steps", str(QUICK_SFT_STEPS)] if place.quick else []
        where = ["--gpu", str(ranks)] if place.on_gpu else []
        return ["scripts/quickstart.sh", *where, "--out", str(place.quickstart(ranks)), *warm_up, *steps]

    return command


def _needs_gpu(place: Place) -> str | None:
    return None if place.on_gpu else "needs a GPU"


def _needs_two_gpus(place: Place) -> str | None:
    return None if place.num_gpus >= 2 else f"needs 2 GPUs, torch sees {place.num_gpus}"


def _needs_model(place: Place) -> str | None:
    return None if (place.quickstart(1) / "model").exists() else "needs the model of quickstart_1"


def _needs_policy(place: Place) -> str | None:
    ranks = 1 if place.on_gpu else 2
    return None if (place.quickstart(ranks) / "sft/export").exists() else f"needs the trained policy of quickstart_{ranks}"


def _agreement(place: Place) -> Command:
    def measure(model: Path) -> Command:
        return _python("benchmarks/measure_agreement.py", str(model), "--dtype", "bf16", "--tokens", str(AGREEMENT_TOKENS))

    trained = [place.quickstart(ranks) / "sft/export" for ranks in (1, 2)]
    model = next((path for path in trained if path.exists()), None)
    if model is not None:
        return measure(model)
    # The quickstart failed: a random model agrees as well or as badly, only its distribution is flat.
    made = place.folder / "random_model"
    write = _python("scripts/quickstart_model.py", str(made))
    return ["bash", "-c", f"{shlex.join(write)} && {shlex.join(measure(made / 'model'))}"]


def _bench(place: Place) -> Command:
    sizes = [
        "--quick",
        "--repeats",
        "3",
        "--only",
        "gae,value_loss,logprob",
        "--shapes",
        "gae:600,value_loss:1Ki,logprob:24x300",
    ]
    chosen = [*sizes, "--without", "torch.compile,Megatron"] if place.quick else []
    files = ["--markdown", str(place.folder / "bench.md"), "--json", str(place.folder / "bench.json")]
    return _python("benchmarks/bench_ops.py", "--device", place.device, "--check", *files, *chosen)


def _bench_step(place: Place) -> Command:
    folder = place.quickstart(1 if place.on_gpu else 2)
    sizes = ["--steps", str(QUICK_STEPS), "--rounds", "1"] if place.quick else []
    return _python("benchmarks/bench_step.py", str(folder), *sizes, *(_layout(1) if place.on_gpu else []))


def _selfcheck(place: Place) -> Command:
    return _python("-m", "megappo.ops.selfcheck", "--device", place.device)


def _tests(place: Place) -> Command:
    return ["scripts/test.sh", "--gpu"]


def _memory(place: Place) -> Command:
    return _python("-m", "pytest", "-q", "-rA", "-m", "gpu", "tests/commands/plan/test_gpu_memory.py")


def _verify(place: Place) -> Command:
    model = place.quickstart(1) / "model"
    return _python(
        "-m",
        "megappo",
        "verify",
        "configs/quickstart.yaml",
        *_layout(2),
        f"policy.model={model}",
        f"data.tokenizer={model / 'tokenizer.model'}",
    )


PARTS = (
    Part("machine", "Machine and versions", 2 * MINUTE, _machine),
    Part("doctor", "megappo doctor", 20 * MINUTE, lambda place: _python("-m", "megappo", "doctor")),
    Part("selfcheck", "Every kernel against its reference", 30 * MINUTE, _selfcheck),
    Part("tests", "Tests that need a GPU", 40 * MINUTE, _tests, _needs_gpu),
    Part("quickstart_1", "Quickstart on one GPU", 20 * MINUTE, _quickstart(1), _needs_gpu),
    Part(
        "quickstart_2",
        "Quickstart on two ranks (policy tp 2, critic pp 2)",
        20 * MINUTE,
        _quickstart(2),
        lambda place: _needs_two_gpus(place) if place.on_gpu else None,
    ),
    Part(
        "verify",
        "A layout of GPUs against one rank",
        20 * MINUTE,
        _verify,
        lambda place: _needs_two_gpus(place) or _needs_model(place),
    ),
    Part("agreement", "Log-probs of vLLM and of the trainer", 20 * MINUTE, _agreement),
    Part("memory", "Peak memory against the plan", 20 * MINUTE, _memory, _needs_gpu),
    Part("bench", "Kernels beside their peers and limits", 60 * MINUTE, _bench, page="bench.md"),
    Part("bench_step", "Whole steps by kernels", 30 * MINUTE, _bench_step, _needs_policy),
)
