"""The `megappo` command: parse, call, exit code. The configuration is read before torch is imported (seconds), so that a wrong key
is refused at once.

Exit codes: 0 done; 1 failed and may work if started again (`doctor` found something missing, a disk is full); 2 the user's mistake,
one line on stderr before anything was computed; 17 would fail again in the same way (gradients or weights that are not finite,
replicas that differ, restarts without progress); 69 too few samples had a verdict, to be resumed from its checkpoint; 75 stopped
by a signal after a checkpoint, to be resumed; 130 interrupted by Ctrl-C (a training stops with a checkpoint at the first, ends at
the second); 143 ended by a second SIGTERM."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megappo.commands import (
    compare,
    config,
    convert,
    doctor,
    eval,
    export,
    gate,
    generate,
    launch,
    plan,
    pretrain_critic,
    runs,
    serve_reward,
    sft,
    train,
    trajectories,
    tune,
    verify,
)
from megappo.commands.parser import Parser, Run
from megappo.config.errors import ConfigError, ConfigErrors
from megappo.config.redaction import hide_secrets
from megappo.runtime.ending import (
    DONE,
    FAILED,
    INTERRUPTED,
    MISTAKE,
    UNAVAILABLE,
    UNRECOVERABLE,
    Unavailable,
    Unrecoverable,
    is_fault,
)
from megappo.runtime.failure import is_first_to_say
from megappo.runtime.libraries import quiet_libraries
from megappo.runtime.world import is_rank
from megappo.telemetry.console import flush_output, lost_output, open_console

COMMANDS = (train, pretrain_critic, sft, plan, launch, tune, verify, generate, eval, export)
COMMANDS += (runs, trajectories, gate, compare, doctor, convert, config, serve_reward)
"""`megappo X` is `commands/X`, here in the order of `megappo --help`. Each has `add_command` and `main`; what is heavy is imported
by `main`, as the parser of every command is built for each call."""
PACKAGE = Path(__file__).parents[1]
OF_THE_MACHINE = {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS}
"""Errors that need no traceback: permissions, disks and limits. A rank keeps its traceback, which names the stage."""


def build_parser() -> Parser:
    parser = Parser(prog="megappo", description="PPO for large language models on Megatron-core and vLLM.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Run, text: str, more: str = "", *, config: str | None = "CONFIG") -> Parser:
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

    for one in COMMANDS:
        one.add_command(command)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    # argparse returns what it cannot place: overrides after an option, and flags of other trainers, which get a hint.
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_overrides:
        raise ConfigError(f"unrecognized arguments: {' '.join(rest)}; see `megappo {args.command} --help`")
    if args.takes_overrides:
        args.overrides = [*rest, *args.overrides] if any(text.startswith("-") for text in rest) else [*args.overrides, *rest]
    return args


def _require_cwd() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # otherwise libraries fail to load with misleading messages
        raise ConfigError("the current directory has been removed; change to one that exists") from None


def _is_users_mistake(error: ValueError) -> bool:
    """True if megappo itself raised the error before the command accepted its input."""
    if is_fault(error):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # A ValueError out of a library is a fault, and its traceback is needed.
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE)


def main(argv: Sequence[str] | None = None) -> int:
    quiet_libraries()
    open_console()
    code = DONE
    try:
        code = _run(argv)
        flush_output()
    except OSError as error:
        if not lost_output(error):
            too_long = error.errno == errno.ENAMETOOLONG
            if not (too_long or error.errno in OF_THE_MACHINE) or is_rank():
                raise
            print(f"megappo: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
            return MISTAKE if too_long else FAILED
        # The reader (head, less) has exited. That is no failure: return the code that the command would have returned.
        if not isinstance(error, BrokenPipeError):
            print(f"megappo: standard output cannot be written: {error.strerror}", file=sys.stderr)
            return FAILED
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = _parse(argv)
        _require_cwd()
        return args.run(args)
    except ValueError as error:
        if not _is_users_mistake(error):
            raise
        lines = error.lines if isinstance(error, ConfigErrors) else [str(error)]
        text = "".join(f"megappo: {hide_secrets(' '.join(line.split()))}\n" for line in lines)
        if is_first_to_say(text):
            print(text, end="", file=sys.stderr)  # one write: other ranks write there too
        return MISTAKE
    except (Unrecoverable, Unavailable) as error:
        sys.excepthook(type(error), error, error.__traceback__)  # prints and records it like an uncaught error
        return UNRECOVERABLE if isinstance(error, Unrecoverable) else UNAVAILABLE
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
