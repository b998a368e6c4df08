"""Parts of the first run on a GPU: command, time limit, and the condition for leaving it out."""

from __future__ import annotations

import importlib.util
import os
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
# Of PPO on a CPU, where nothing is measured: a quarter of the batch, and the fewest steps in which the policy's rate rises.
REHEARSED = ["data.prompts_per_step=32", "data.eval_prompts=64", "trainer.steps=3", "trainer.eval_every=3"]
# Of the supervised warm-up before, whose learning rate rises for 20.
QUICK_SFT_STEPS = 30
BF16 = [f"{role}.dtype=bf16" for role in ("policy", "critic", "reference")]
FSDP2 = [f"{role}.engine=fsdp2" for role in ("policy", "critic", "reference")]
_ON_CPU = ["run.num_ranks=1", "policy.parallel.tp=1", "critic.parallel.pp=1"]
# For scripts/gpu_run/step.py: nothing but steps, the last of them traced, on a GPU with 64 responses of 512 tokens, which a random
# model does not end.
STEP = [
    *QUICK_PPO,
    *("trainer.steps=4", "trainer.eval_every=null", "data.eval=null", "telemetry.profile_steps=[4]"),
    *("checkpoint.save_every=never", "checkpoint.export_at_end=false"),
]
STEP_SIZES = {
    "cuda": [
        *BF16,
        *(
            "data.prompts_per_step=16",
            "algorithm.mini_batch_size=32",
            "rollout.max_response_tokens=512",
            "rollout.sleep=all",
            "rollout.memory_share=0.3",
        ),
        *("critic.micro_batch_tokens=8192", "policy.micro_batch_tokens=8192", "rollout.max_prob_diff=0.05"),
    ],
    "cpu": [*BF16, "data.prompts_per_step=2", "algorithm.mini_batch_size=4", "rollout.max_prob_diff=0.05"],
}
Command = list[str]


@dataclass(frozen=True)
class Place:
    """Machine and folder of the parts. device: "cuda", or "cpu" in a rehearsal. quick: the smallest sizes. folder: of logs and
    report. capability: of the GPU. minutes: for all parts; None for as long as they take."""

    device: str
    num_gpus: int
    quick: bool
    folder: Path
    capability: tuple[int, int] = (0, 0)
    minutes: float | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def quickstart(self, ranks: int) -> Path:
        return self.folder / f"quickstart_{ranks}"


@dataclass(frozen=True)
class Part:
    """One command. limit_s: it is killed after so many seconds, after `short_s` in a run of a few minutes. page: a Markdown file
    that it writes itself, shown in place of its output. left_out: the reason why it does not run at a place, None if it does."""

    name: str
    title: str
    command: Callable[[Place], Command]
    limit_s: int
    short_s: int
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
        steps = [*QUICK_PPO, *([] if place.on_gpu else REHEARSED)] if place.quick else []
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
    trained = [place.quickstart(ranks) / "sft/export" for ranks in (1, 2)]
    model = next((path for path in trained if path.exists()), None)
    if model is None:  # the quickstart failed: a random model agrees as well or as badly, only its distribution is flat
        return _with_random_model("rollout", "agreement")(place)
    return _python("-m", "scripts.gpu_run.rollout", str(model), str(place.folder / "agreement.md"))


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
    short = ["--seconds", "1", "--repeats", "10", "--only", "gae,token_advantages,linear_loss,logprob"]
    chosen = [*sizes, "--without", "torch.compile,Megatron"] if place.quick else short if place.minutes else []
    files = ["--markdown", str(place.folder / "bench.md"), "--json", str(place.folder / "bench.json")]
    return _python("benchmarks/bench_ops.py", "--device", place.device, "--check", *files, *chosen)


def _bench_step(place: Place) -> Command:
    folder = place.quickstart(1 if place.on_gpu else 2)
    sizes = ["--steps", str(QUICK_STEPS), "--rounds", "1"] if place.quick or place.minutes else []
    return _python("benchmarks/bench_step.py", str(folder), *sizes, *(_layout(1) if place.on_gpu else []))


def _selfcheck(place: Place) -> Command:
    return _python("-m", "megappo.ops.selfcheck", "--device", place.device)


def _tests(place: Place) -> Command:
    return ["scripts/test.sh", "--gpu", *(["tests/ops", "--maxfail=20", "-n", "4"] if place.minutes else [])]


def _te(place: Place) -> Command:
    """Its layers beside the local ones, then PPO on them. TE_SITE: a folder that holds TransformerEngine apart from the others."""
    tests = _python("-m", "pytest", "-q", "-rA", "-m", "gpu", "tests/models/test_transformer_engine.py")
    train = _ppo("te", "model.impl=transformer_engine", "rollout.max_prob_diff=0.05", *BF16)(place)
    path = 'export PYTHONPATH="${TE_SITE:+$TE_SITE:}${PYTHONPATH:-}"'
    return ["bash", "-c", f"{path}; {shlex.join(tests)} && {shlex.join(train)}"]


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


def _needs_build(place: Place) -> str | None:
    if not place.on_gpu:
        return "needs a GPU"
    from megappo.ops import implementations

    return None if implementations.missing("cuda", "cuda") else "the CUDA kernels are built"


def _build(place: Place) -> Command:
    """Compile the CUDA kernels in the checkout, for this GPU alone."""
    major, minor = place.capability
    archs = f"MEGAPPO_CUDA_ARCHS={major}.{minor}{'a' if major == 9 else ''}"
    command = shlex.join(_python("setup.py", "-q", "build_ext", "--inplace"))
    return ["bash", "-c", f"MEGAPPO_CUDA=1 {archs} {command} && {shlex.join(_python('-m', 'megappo.ops.implementations'))}"]


def _with_random_model(module: str, name: str) -> Callable[[Place], Command]:
    """Run a module of this package, which writes NAME.md, with a random model; the first part that needs that one makes it."""

    def command(place: Place) -> Command:
        folder = place.folder / "random"
        write = _python("-m", "scripts.gpu_run.random_model", "1b" if place.on_gpu else "tiny", str(folder))
        model = folder if module == "step" else folder / "model"
        measure = _python("-m", f"scripts.gpu_run.{module}", str(model), str(place.folder / f"{name}.md"))
        sizes = [*STEP, *STEP_SIZES[place.device], *(_layout(1) if place.on_gpu else _ON_CPU)] if module == "step" else []
        return [
            "bash",
            "-c",
            f"[ -e {shlex.quote(str(folder / 'data'))} ] || {shlex.join(write)}; {shlex.join([*measure, *sizes])}",
        ]

    return command


def _ppo(name: str, *overrides: str) -> Callable[[Place], Command]:
    """A few steps of PPO on what a quickstart trained, in a folder of its own."""

    def command(place: Place) -> Command:
        folder = place.quickstart(1 if place.on_gpu else 2)
        files = [
            f"run.output_dir={place.folder / name}",
            f"policy.model={folder / 'sft/export'}",
            f"data.train={folder / 'data/train.jsonl'}",
            f"data.eval={folder / 'data/eval.jsonl'}",
            f"data.tokenizer={folder / 'model/tokenizer.model'}",
        ]
        where = _layout(1) if place.on_gpu else _ON_CPU
        return _python("-m", "megappo", "train", "configs/quickstart.yaml", *files, *where, *QUICK_PPO, *overrides)

    return command


def _needs_transformer_engine(place: Place) -> str | None:
    found = importlib.util.find_spec("transformer_engine") is not None or "TE_SITE" in os.environ
    return _needs_policy(place) or _needs_gpu(place) or (None if found else "needs TransformerEngine")


PARTS = (
    Part("machine", "Machine and versions", _machine, 2 * MINUTE, 20),
    Part("build", "The CUDA kernels, compiled", _build, 30 * MINUTE, 150, _needs_build),
    Part("doctor", "megappo doctor", lambda place: _python("-m", "megappo", "doctor"), 20 * MINUTE, 90),
    Part("quickstart_1", "Quickstart on one GPU, with vLLM", _quickstart(1), 20 * MINUTE, 220, _needs_gpu),
    Part(
        "quickstart_2",
        "Quickstart on two ranks (policy tp 2, critic pp 2)",
        _quickstart(2),
        20 * MINUTE,
        220,
        lambda place: _needs_two_gpus(place) if place.on_gpu else None,
    ),
    Part(
        "rollout",
        "vLLM beside the trainer: push, sleep",
        _with_random_model("rollout", "rollout"),
        20 * MINUTE,
        150,
        _needs_gpu,
        "rollout.md",
    ),
    Part("agreement", "Log-probs of vLLM and of the trainer", _agreement, 20 * MINUTE, 90, page="agreement.md"),
    Part("selfcheck", "Every kernel against its reference", _selfcheck, 30 * MINUTE, 150),
    Part("step", "A step of a random model by stage", _with_random_model("step", "step"), 20 * MINUTE, 150, page="step.md"),
    Part("memory", "Peak memory against the plan", _memory, 20 * MINUTE, 90, _needs_gpu),
    Part("fsdp2", "PPO on engine fsdp2", _ppo("fsdp2", *FSDP2), 20 * MINUTE, 90, _needs_policy),
    Part("te", "TransformerEngine's layers", _te, 20 * MINUTE, 120, _needs_transformer_engine),
    Part("bench", "Kernels beside their peers and limits", _bench, 60 * MINUTE, 150, page="bench.md"),
    # The seven that failed on the first visit are among them.
    Part("tests", "Tests that need a GPU", _tests, 40 * MINUTE, 240, _needs_gpu),
    Part("bench_step", "Whole steps by kernels", _bench_step, 30 * MINUTE, 120, _needs_policy),
    Part(
        "verify",
        "A layout of GPUs against one rank",
        _verify,
        20 * MINUTE,
        120,
        lambda place: _needs_two_gpus(place) or _needs_model(place),
    ),
)
