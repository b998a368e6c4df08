"""The `megappo` command: parse, call, exit code. Every command imports its code only when it is chosen.

The configuration is read before anything that imports torch (seconds): a wrong key is refused at once.

Exit codes: 0 done; 1 ran and failed (or `doctor` found something missing), starting again may help; 2 mistake of the user, one
line on stderr before anything was computed; 17 failed, and would fail again in the same way: gradients or weights that are not
finite, replicas that differ, restarts without progress; 75 stopped by a signal after a checkpoint, to be resumed; 130 interrupted
(Ctrl-C; a training stops at the first, with a checkpoint, and ends at the second); 143 ended by a second SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from megappo.arguments import positive_float, positive_int, step_or_best
from megappo.config.errors import ConfigError
from megappo.config.redaction import hide_secrets
from megappo.launch.exit_codes import DONE, INTERRUPTED, MISTAKE, UNRECOVERABLE
from megappo.launch.options import add_max_restarts
from megappo.launch.options import add_options as add_launch_options
from megappo.platform.quiet import quiet_libraries
from megappo.resilience.faults import Unrecoverable
from megappo.resilience.run_time import is_fault
from megappo.telemetry.console import is_kept, keep_console
from megappo.trajectories.options import add_options as add_trajectories_options
from megappo.tune.options import add_options as add_tune_options

if TYPE_CHECKING:  # what a command needs is imported when it is chosen
    from megappo.config.checks import Device
    from megappo.config.schema import SftConfig, TrainConfig
    from megappo.plan.memory import Counter
    from megappo.plan.run import PlannedRun
    from megappo.resilience.signals import StopRequest

Arguments = argparse.Namespace
Config = TypeVar("Config", "TrainConfig", "SftConfig")
PACKAGE = Path(__file__).parent


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def cmd_train(args: Arguments) -> int:
    from megappo.config.checks import check_run_dir
    from megappo.config.loading import load_config
    from megappo.launch.training import train_here
    from megappo.launch.world import is_rank, join_srun, world_size
    from megappo.platform.permissions import apply_permissions
    from megappo.prepare.hub import local_overrides
    from megappo.prepare.inputs import check_inputs
    from megappo.resilience.lease import held_lease
    from megappo.resilience.signals import StopRequest

    keep_console()
    join_srun()
    stop = StopRequest()
    if is_rank():
        _enter_rank(stop)
        if args.max_restarts:
            raise ConfigError(
                f"--max-restarts {args.max_restarts}: these ranks were started by torchrun or srun; only `megappo train` or "
                "`megappo launch --local` itself can restart them (under Slurm: --max-requeues)"
            )
    written = load_config(args.config, args.overrides)
    config = _local_models(written)
    check_inputs(config)
    ranks = world_size(config.run)
    if not is_rank():
        from megappo.prepare.remote_run import fetch, find_copies
        from megappo.prepare.surroundings import require_isolation_here, require_servers_here, require_storage

        # Check everything here once, so that a mistake is one line and not a launcher's traceback.
        if args.max_restarts:
            from megappo.launch.submit import require_resumable

            require_resumable(config, "a restart", "--max-restarts 0")
        copies = find_copies(config, resume=args.resume)
        run_dir = check_run_dir(config.run, args.resume and copies is None)
        _require_device(config.run.device)
        require_isolation_here(config)
        planned = _plan(config, ranks, None, resume=args.resume)
        assert planned.data is not None, "only a plan of shapes has no data"
        require_servers_here(planned.data, resume=args.resume)
        require_storage(config)
        if copies is not None:
            fetch(copies, run_dir)
        apply_permissions(config.run.permissions)
        folder, command = None, ["train", args.config, *args.overrides, *local_overrides(written, config)]
        if args.max_restarts:
            from megappo.launch.submit import record

            folder = record(config, run_dir)  # before the lease, which it refuses
            # Every restart reads the recorded configuration: later edits of the file do not reach it.
            command = ["train", str(folder / "config.yaml")]
        with held_lease(run_dir, f"megappo train {args.config}"):
            return train_here(ranks, command, run_dir, resume=args.resume, max_restarts=args.max_restarts, record=folder)
    planned = _plan(config, ranks, None, resume=args.resume)
    _print_on_rank_0(planned.report())
    from megappo.trainer.main import train

    assert planned.data is not None, "only a plan of shapes has no data"
    train(planned.plan.config, planned.data, resume=args.resume, stop=stop)
    _leave_world()
    # After a stop too: with another code, torchrun or srun would treat the first rank to exit as failed and kill the others.
    return DONE


def cmd_sft(args: Arguments) -> int:
    from megappo.config.checks import check_run_dir
    from megappo.config.loading import load_config
    from megappo.config.schema import SftConfig
    from megappo.launch.failure import record_exceptions
    from megappo.launch.training import train_here
    from megappo.launch.world import is_rank, join_srun, world_size
    from megappo.platform.permissions import apply_permissions
    from megappo.prepare.hub import local_overrides
    from megappo.prepare.inputs import check_inputs
    from megappo.resilience.lease import held_lease
    from megappo.resilience.parent import end_with_launcher

    keep_console()
    join_srun()
    if is_rank():
        end_with_launcher()
        record_exceptions(int(os.environ["RANK"]))
    written = load_config(args.config, args.overrides, SftConfig)
    config = _local_models(written)
    check_inputs(config)
    from megappo.plan.run import plan_sft

    ranks = world_size(config.run)
    if not is_rank():
        run_dir = check_run_dir(config.run, resume=False)
        _require_device(config.run.device)
        plan_sft(config, ranks, _device(config.run.device))
        apply_permissions(config.run.permissions)
        command = ["sft", args.config, *args.overrides, *local_overrides(written, config)]
        with held_lease(run_dir, f"megappo sft {args.config}"):
            return train_here(ranks, command, run_dir, stoppable=False)
    planned = plan_sft(config, ranks, _device(config.run.device))
    _print_on_rank_0(planned.report())
    from megappo.trainer.sft import train_sft

    train_sft(config, planned.data)
    return DONE


def cmd_plan(args: Arguments) -> int:
    from megappo.config.loading import load_config
    from megappo.launch.world import world_size
    from megappo.prepare.hub import with_local_models
    from megappo.prepare.inputs import check_inputs

    config = with_local_models(load_config(args.config, args.overrides), shapes_only=args.shapes_only)
    check_inputs(config, shapes_only=args.shapes_only)
    from megappo.plan.counted import counter_of_built_models
    from megappo.plan.plot import check_plot, plot

    target = None if args.plot is None else check_plot(args.plot)
    ranks = args.world_size if args.world_size is not None else world_size(config.run)
    planned = _plan(
        config, ranks, args.gpu_memory_gib, resume=args.resume, shapes_only=args.shapes_only, counter=counter_of_built_models()
    )
    print(planned.report(), end="")
    if planned.plan.device == "cpu" and config.run.device == "auto":
        print("\nplanned for CPUs: run.device is auto and this machine has no GPU; --gpu-memory-gib plans for GPUs")
    if target is not None:
        plot(planned.plan, target)
        print(f"\npicture: {target}")
    return 0


def cmd_launch(args: Arguments) -> int:
    from megappo.launch.command import launch, launch_here

    return launch_here(args, _plan) if args.local else launch(args, _plan)


def cmd_verify(args: Arguments) -> int:
    from megappo.config.loading import load_config
    from megappo.launch.world import is_rank
    from megappo.prepare.hub import with_local_models
    from megappo.prepare.inputs import check_model_files

    if is_rank():
        raise ConfigError("verify starts its own ranks; run it once, without torchrun (RANK and WORLD_SIZE are set here)")
    config = with_local_models(load_config(args.config, args.overrides), shapes_only=True)
    check_model_files(config, need_weights=False)
    from megappo.verify.run import verify

    _require_device(config.run.device)
    device = _device(config.run.device)
    return verify(config, device, max_ranks=args.max_ranks, tolerance=args.tolerance, bisect=args.bisect)


def cmd_tune(args: Arguments) -> int:
    from megappo.tune.options import check_options

    check_options(args)
    config = None
    if args.config is not None:
        from megappo.config.loading import load_config
        from megappo.prepare.hub import with_local_models
        from megappo.prepare.inputs import check_model_files

        config = with_local_models(load_config(args.config, args.overrides), shapes_only=True)
        check_model_files(config, need_weights=False)
    from megappo.tune.run import tune

    return tune(args, config)


def cmd_generate(args: Arguments) -> int:
    from megappo.prepare.hub import local_model
    from megappo.trainer.generate import answer

    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    answers = answer(
        local_model("MODEL", args.model),
        prompts,
        tokenizer_path=None if args.tokenizer is None else local_model("--tokenizer", args.tokenizer),
        engine=args.engine,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        chat_template=not args.raw,
        dtype=args.dtype,
    )
    for prompt, text in zip(prompts, answers):
        print(f"{prompt}\n{text}\n" if len(prompts) > 1 else text)
    return 0


def cmd_eval(args: Arguments) -> int:
    from megappo.config.loading import load_config
    from megappo.launch.failure import record_exceptions
    from megappo.launch.local import start_ranks
    from megappo.launch.world import is_rank, join_srun, world_size
    from megappo.prepare.hub import local_overrides
    from megappo.resilience.parent import end_with_launcher

    join_srun()
    if is_rank():
        end_with_launcher()
        record_exceptions(int(os.environ["RANK"]))
    written = load_config(args.config, args.overrides)
    config = _local_models(written)
    from megappo.prepare.evaluate import check_output, plan_evaluation

    ranks, output = world_size(config.run), check_output(args.output)
    _require_device(config.run.device)
    planned = plan_evaluation(config, args.checkpoint, args.only, ranks, _device(config.run.device))
    if not is_rank():
        from megappo.prepare.surroundings import require_isolation_here, require_servers_here

        require_isolation_here(planned.config)
        require_servers_here(planned.data, resume=False)
        # A live run may save another checkpoint meanwhile: all ranks take this one.
        options = ["--only=" + name for name in args.only] + ([f"--output={args.output}"] if args.output else [])
        overrides = [*args.overrides, *local_overrides(written, config)]
        return start_ranks(ranks, ["eval", str(planned.source.path), args.config, *overrides, *options])
    from megappo.trainer.evaluate import evaluate_checkpoint, report

    results = evaluate_checkpoint(planned)
    _leave_world()
    if os.environ["RANK"] == "0":
        report(planned, results, output)
    return DONE


def cmd_export(args: Arguments) -> int:
    from megappo.trainer.export import export_checkpoint

    step = export_checkpoint(args.run_dir, args.output, role=args.role, step=args.step)
    print(f"{args.role} of step {step} -> {args.output}")
    return 0


def cmd_doctor(args: Arguments) -> int:
    from megappo.doctor import report

    text, code = report()
    print(text, end="")
    return code


def cmd_runs(args: Arguments) -> int:
    from megappo.runs.report import show_runs, show_verified

    match args.words:
        case ["verify", run_dir]:
            return show_verified(Path(run_dir), args.step, as_json=args.json)
        case ["verify", *_]:
            raise ConfigError("runs verify: name one run, as in `megappo runs verify runs/NAME` (a directory `verify`: ./verify)")
        case [] | [_] if args.step is None:
            return show_runs(Path(*args.words or ["runs"]), as_json=args.json)
        case [] | [_]:
            raise ConfigError(f"--step {args.step} is of `megappo runs verify RUN`, and has no effect without it")
        case _:
            raise ConfigError(f"runs: one directory, not {len(args.words)} ({' '.join(args.words)})")


def cmd_trajectories(args: Arguments) -> int:
    from megappo.trajectories.command import show_trajectories

    return show_trajectories(args)


def cmd_gate(args: Arguments) -> int:
    from megappo.runs.gate import show_gates

    return show_gates(Path(args.run_dir), Path(args.gates))


def cmd_config(args: Arguments) -> int:
    import json

    from megappo.config.dump import dump_yaml
    from megappo.config.loading import json_schema, load_config
    from megappo.config.schema import SftConfig, TrainConfig

    cls = SftConfig if args.sft else TrainConfig
    if args.schema:
        print(json.dumps(json_schema(cls), indent=1))
    elif args.config is None:
        raise ConfigError("config: name a YAML file, or ask for --schema")
    else:
        print(dump_yaml(load_config(args.config, args.overrides, cls)), end="")
    return 0


def cmd_convert(args: Arguments) -> int:
    from megappo.convert.command import convert_file

    return convert_file(args.file, args.output, strict=args.strict)


# ------------------------------------------------------------------------------------------------------------------ shared


def _enter_rank(stop: StopRequest) -> None:
    """Set up signals and tracebacks of a rank, and its end with its launcher, before anything heavy is imported."""
    from megappo.launch.failure import record_exceptions
    from megappo.resilience.parent import end_with_launcher

    end_with_launcher()
    stop.listen()
    record_exceptions(int(os.environ["RANK"]))


def _local_models(config: Config) -> Config:
    """`with_local_models`. Ranks of torchrun or srun join their world for it: one of them asks the hub."""
    from megappo.launch.world import is_rank
    from megappo.prepare.hub import names_models, with_local_models

    if not is_rank() or not names_models(config):  # ranks that megappo starts are told directories
        return with_local_models(config)
    from megappo.platform.device import select_device, start_distributed
    from megappo.trainer.hub_models import local_models_of_ranks

    start_distributed(select_device(config.run.device), config.run.timeouts)
    return local_models_of_ranks(config)


def _leave_world() -> None:
    """Leave a world that was joined before the training; one that the training joined, it has left."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _print_on_rank_0(text: str) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


def _require_device(requested: Literal["auto", "cpu", "cuda"]) -> None:
    """ValueError if the run needs a GPU and there is none. Not for `plan`, which may be for another machine."""
    from megappo.platform.device import select_device

    select_device(requested)


def _device(requested: Literal["auto", "cpu", "cuda"]) -> Device:
    """Device that the ranks will choose: cpu or cuda."""
    if requested != "auto":
        return requested
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _plan(
    config: TrainConfig,
    ranks: int,
    gpu_memory_gib: float | None,
    *,
    resume: bool = False,
    shapes_only: bool = False,
    device: Device | None = None,
    counter: Counter | None = None,
) -> PlannedRun:
    """Check and plan a run. `gpu_memory_gib` or `device` plans for GPUs of another machine.

    shapes_only: see `plan.run.plan_run`. counter: see `plan.memory.Counter`; None counts by shapes.
    """
    from megappo.plan.estimate import bytes_of_gib
    from megappo.plan.memory import count_parameters
    from megappo.plan.run import plan_run

    how = {"resume": resume, "shapes_only": shapes_only, "counter": counter or count_parameters}
    if gpu_memory_gib is not None:
        return plan_run(config, ranks, "cuda", bytes_of_gib(gpu_memory_gib), **how)
    device = device or _device(config.run.device)
    memory = None
    if device == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return plan_run(config, ranks, device, memory, **how)


def build_parser() -> Parser:
    parser = Parser(prog="megappo", description="PPO for large language models on Megatron-core and vLLM.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, run, text: str, more: str = "", *, config: str | None = "CONFIG") -> Parser:
        sub = commands.add_parser(name, help=text, description=f"{text} {more}".strip(), allow_abbrev=False)
        sub.set_defaults(run=run, takes_overrides=config is not None)
        if config is not None:
            sub.add_argument(
                "config", metavar="CONFIG", nargs="?" if config == "[CONFIG]" else None, help="YAML file, see docs/config.md"
            )
            sub.add_argument(
                "overrides", metavar="key=value", nargs="*", help="keys set over the file, for example policy.parallel.tp=2"
            )
        return sub

    train = command("train", cmd_train, "Train with PPO. Starts the ranks itself unless torchrun or srun has.")
    train.add_argument("--resume", action="store_true", help="continue the run of this name after its last checkpoint")
    add_max_restarts(train)
    command("sft", cmd_sft, "Fine-tune on demonstrations with the same engine.")
    plan = command("plan", cmd_plan, "Print ranks, memory, batch arithmetic and steps of a run, and refuse what cannot work.")
    plan.add_argument(
        "--world-size", type=positive_int, metavar="N", help="ranks to plan for (default: run.num_ranks, or one per GPU)"
    )
    plan.add_argument("--gpu-memory-gib", type=positive_float, metavar="GIB", help="plan for GPUs of this size, on any machine")
    plan.add_argument(
        "--shapes-only",
        action="store_true",
        help="read config.json of the models alone: weights, tokenizer and data may be missing",
    )
    plan.add_argument("--plot", metavar="FILE", help="draw rank grids and pipelines (.png, .svg or .pdf)")
    plan.add_argument("--resume", action="store_true", help="plan to continue a run: inputs that only its start reads may be gone")
    add_launch_options(
        command(
            "launch",
            cmd_launch,
            "Check a run here, write its job script, and submit it to Slurm.",
            "One rank per GPU. The script, the resolved configuration and the launch's environment are kept in the run directory.",
        )
    )
    add_tune_options(
        command(
            "tune",
            cmd_tune,
            "Rank the parallel layouts of a run on given GPUs by a model of its step time, and print the best as overrides.",
            "docs/tuning.md explains the tables. Without CONFIG, --probe measures this machine and prints its profile.",
            config="[CONFIG]",
        )
    )
    verify = command(
        "verify",
        cmd_verify,
        "Measure a small version of a run in its layout and on one rank, and print where the numbers differ.",
        "The version has the run's families, layouts and algorithm and tiny random models. Printed is the largest difference of "
        "everything that must not depend on the layout: log-probs, values, advantages, losses, gradients, parameters after three "
        "steps. Reads config.json of the models, no weights and no data. Exit code: 0 if all numbers agree, 1 if some differ, "
        "2 for a configuration that cannot work.",
    )
    verify.add_argument(
        "--max-ranks",
        type=positive_int,
        default=8,
        metavar="N",
        help="most ranks to start (default: 8, and never more than there are GPUs; run.device=cpu needs none); larger layouts "
        "are halved, with a note",
    )
    verify.add_argument(
        "--tolerance",
        type=positive_float,
        default=1e-5,
        metavar="X",
        help="largest relative difference (default: 1e-5; ten times this for the parameters after the steps)",
    )
    verify.add_argument("--bisect", action="store_true", help="also measure every axis and setting alone, to find the culprit")
    generate = command("generate", cmd_generate, "Answer prompts with a checkpoint.", config=None)
    generate.add_argument("model", metavar="MODEL", help="Hugging Face checkpoint directory")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt (may be repeated; default: lines of stdin)")
    generate.add_argument("--max-tokens", type=positive_int, default=256, metavar="N", help="longest response")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    generate.add_argument("--tokenizer", metavar="PATH", help="tokenizer directory or SentencePiece .model (default: MODEL)")
    generate.add_argument("--engine", choices=("vllm", "megatron"), default="vllm", help="engine that generates")
    generate.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    generate.add_argument("--raw", action="store_true", help="do not apply the chat template")
    evaluate = command(
        "eval",
        cmd_eval,
        "Evaluate a checkpoint on data.eval and the sets of `evaluations`, without a training.",
        "CHECKPOINT is a run (its newest checkpoint), one checkpoint of it (RUN/checkpoints/step-N), or a Hugging Face checkpoint. "
        "The layout is that of the policy in CONFIG and may differ from the run's. docs/evaluation.md explains the figures.",
        config=None,
    )
    evaluate.set_defaults(takes_overrides=True)
    evaluate.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of a run, of one of its checkpoints, or of a model")
    evaluate.add_argument("config", metavar="CONFIG", help="YAML file, see docs/config.md")
    evaluate.add_argument("overrides", metavar="key=value", nargs="*", help="keys set over the file")
    evaluate.add_argument("--only", action="append", default=[], metavar="SET", help="evaluate this set alone (may be repeated)")
    evaluate.add_argument("-o", "--output", metavar="FILE", help="write settings and results as JSON")
    export = command("export", cmd_export, "Write a run's checkpoint as a Hugging Face checkpoint.", config=None)
    export.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run (output_dir/name)")
    export.add_argument("output", metavar="OUTPUT", help="directory to write")
    export.add_argument(
        "--step", type=step_or_best, metavar="N", help="step of the checkpoint, or best, by trainer.keep_best (default: the last)"
    )
    export.add_argument("--role", metavar="ROLE", default="policy", help="trained role: policy (default) or critic")
    runs = command(
        "runs",
        cmd_runs,
        "List the runs below a directory: state, last step, last checkpoint, size on disk, and why a run ended.",
        "`megappo runs verify RUN` reads every byte of a run's checkpoints and compares it with the manifests. Neither changes a "
        "file, and both work beside a live run. Exit code of verify: 0 if all are sound, 1 if one is damaged or unverified.",
        config=None,
    )
    runs.usage = "megappo runs [DIR] [--json]\n       megappo runs verify RUN [--step N] [--json]"
    runs.add_argument("words", metavar="DIR", nargs="*", help="run.output_dir, or one run in it (default: runs)")
    runs.add_argument("--step", type=positive_int, metavar="N", help="verify this checkpoint alone")
    runs.add_argument("--json", action="store_true", help="print JSON for scripts: one object per run or checkpoint")
    add_trajectories_options(
        command(
            "trajectories",
            cmd_trajectories,
            "Analyse a run's sampled trajectories: repetition, score against length, entropy and KL by position, worst samples.",
            "--html writes a page that shows their tokens coloured by log-prob, advantage, value and others. Reads the run's files "
            "alone, also beside a live run; docs/trajectories.md explains the tables.",
            config=None,
        )
    )
    gate = command(
        "gate",
        cmd_gate,
        "Hold the metrics of a run against limits.",
        "GATES is a YAML list of lines such as `eval/score > 0.65 at 40`, `kl/per_token < 0.1 max over 1..40` and "
        "`reward/score_mean >= 0.7 mean over last 10`. Exit code: 0 if all pass, 1 if one fails.",
        config=None,
    )
    gate.add_argument("run_dir", metavar="RUN", help="directory of a run (output_dir/name)")
    gate.add_argument("gates", metavar="GATES", help="YAML file, see docs/evaluation.md")
    command(
        "doctor", cmd_doctor, "List installed packages, working features, and missing packages with their purpose.", config=None
    )
    convert = command(
        "convert",
        cmd_convert,
        "Write settings of verl, NeMo-RL, OpenRLHF, LightRFT, TRL or FlowMesh as a configuration, with a report on every key.",
        "FILE is a shell script, a YAML file or a Python file with a PPOConfig; nothing in it is executed. Exit code: 0, or 1 with "
        "--strict if keys are unknown; 2 if FILE is none of these.",
        config=None,
    )
    convert.add_argument("file", metavar="FILE", help="shell script (.sh), YAML (.yaml, .yml) or Python (.py)")
    convert.add_argument("-o", "--output", metavar="CONFIG", help="file to write (default: stdout, and the report on stderr)")
    convert.add_argument("--strict", action="store_true", help="exit code 1 if the source has keys that are unknown")
    config = command("config", cmd_config, "Print the resolved configuration.", config="[CONFIG]")
    config.add_argument("--sft", action="store_true", help="the file is a configuration of `megappo sft`")
    config.add_argument("--schema", action="store_true", help="print the JSON schema instead")
    return parser


def _parse(argv: Sequence[str] | None) -> Arguments:
    parser = build_parser()
    # argparse returns the rest that it cannot place: overrides after an option, and other trainers' flags, which get a hint.
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_overrides:
        raise ConfigError(f"unrecognized arguments: {' '.join(rest)}; see `megappo {args.command} --help`")
    if args.takes_overrides:
        args.overrides = [*rest, *args.overrides] if any(text.startswith("-") for text in rest) else [*args.overrides, *rest]
    return args


def _is_users_mistake(error: ValueError) -> bool:
    """True if megappo itself raised the error, before the command had accepted its input."""
    if is_fault(error):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # A ValueError out of a library is a fault, and its traceback is needed.
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    quiet_libraries()
    try:
        args = _parse(argv)
        return args.run(args)
    except ValueError as error:
        if not _is_users_mistake(error):
            raise
        print(f"megappo: {hide_secrets(' '.join(str(error).split()))}", file=sys.stderr)
        return MISTAKE
    except Unrecoverable as error:
        sys.excepthook(type(error), error, error.__traceback__)  # and recorded, as of an error that reaches the top
        return UNRECOVERABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has exited; without devnull Python fails again when it closes stdout
        if is_kept():  # a pipe to a helper process
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


if __name__ == "__main__":
    sys.exit(main())
