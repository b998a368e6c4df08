"""Commands on a checkpoint: `megappo generate`, `eval`, `export`."""

from __future__ import annotations

import argparse
import os
import sys

from megappo.commands.arguments import positive_int, step_or_best
from megappo.commands.parser import AddCommand
from megappo.commands.prepared import device_of, leave_world, local_models, require_device
from megappo.runtime.exit_codes import DONE


def add_commands(command: AddCommand) -> None:
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
    export.add_argument(
        "--role",
        metavar="ROLE",
        default="policy",
        help="trained role: policy (default) or critic; or ema, the average of the policy (policy.ema)",
    )


def cmd_generate(args: argparse.Namespace) -> int:
    from megappo.commands.generate import answer
    from megappo.trainer.prepare.hub import local_model

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


def cmd_eval(args: argparse.Namespace) -> int:
    from megappo.commands.launch.local import start_ranks
    from megappo.config.loading import load_config
    from megappo.runtime.failure import record_exceptions
    from megappo.runtime.parent import end_with_launcher
    from megappo.runtime.world import is_rank, join_srun, world_size
    from megappo.trainer.prepare.hub import local_overrides

    join_srun()
    if is_rank():
        end_with_launcher()
        record_exceptions(int(os.environ["RANK"]))
    written = load_config(args.config, args.overrides)
    config = local_models(written)
    from megappo.config.output_file import check_output_file
    from megappo.trainer.prepare.evaluate import find_evaluation, plan_evaluation

    output = None if args.output is None else check_output_file("--output", args.output)
    find_evaluation(config, args.checkpoint, args.only)  # before torch is imported, as by the next
    ranks = world_size(config.run)
    require_device(config.run.device)
    planned = plan_evaluation(config, args.checkpoint, args.only, ranks, device_of(config.run.device))
    if not is_rank():
        from megappo.trainer.prepare.surroundings import require_isolation_here, require_servers_here

        require_isolation_here(planned.config)
        require_servers_here(planned.data, resume=False)
        # A live run may save another checkpoint meanwhile: all ranks take this one.
        options = ["--only=" + name for name in args.only] + ([f"--output={args.output}"] if args.output else [])
        overrides = [*args.overrides, *local_overrides(written, config)]
        return start_ranks(ranks, ["eval", str(planned.source.path), args.config, *overrides, *options])
    from megappo.commands.evaluate import evaluate_checkpoint, report

    results = evaluate_checkpoint(planned)
    leave_world()
    if os.environ["RANK"] == "0":
        report(planned, results, output)
    return DONE


def cmd_export(args: argparse.Namespace) -> int:
    from megappo.commands.export import export_checkpoint

    step = export_checkpoint(args.run_dir, args.output, role=args.role, step=args.step)
    print(f"{args.role} of step {step} -> {args.output}")
    return 0
