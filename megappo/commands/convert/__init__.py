"""`megappo convert`: turn the settings of another trainer into a configuration, with a report on every key."""

from __future__ import annotations

import argparse
import sys

from megappo.commands.parser import AddCommand
from megappo.config.errors import ConfigError


def add_command(command: AddCommand) -> None:
    convert = command(
        "convert",
        main,
        "Write settings of verl, NeMo-RL, OpenRLHF, LightRFT, TRL or FlowMesh as a configuration, with a report on every key.",
        "FILE is a shell script, a YAML file, or a Python file with a PPOConfig, DPOConfig or RewardConfig; nothing in it is "
        "executed. Exit code: 0; 1 if the configuration is written and a key that changes what is learned is not taken over, or, "
        "with --strict, is unknown; 2 if FILE is none of these.",
        config=None,
    )
    convert.add_argument("file", metavar="FILE", help="shell script (.sh), YAML (.yaml, .yml) or Python (.py)")
    convert.add_argument("-o", "--output", metavar="CONFIG", help="file to write (default: stdout, and the report on stderr)")
    convert.add_argument("--strict", action="store_true", help="exit code 1 if the source has keys that are unknown")


def main(args: argparse.Namespace) -> int:
    """Write the configuration to `--output`, or to stdout with the report on stderr; return 1 if a key that changes what is learned
    is not taken over, or `--strict` finds unknown ones. Raises ConfigError before anything is written."""
    from megappo.commands.convert.conversion import convert
    from megappo.commands.convert.report import configuration, report, unknown
    from megappo.commands.convert.sources import read_source
    from megappo.config.loading import load_run
    from megappo.config.output_file import check_output_file
    from megappo.config.redaction import hide_secrets

    target = None if args.output is None else check_output_file("-o", args.output)
    if target is not None and target.exists():
        raise ConfigError(f"-o {target}: exists, and is not overwritten; remove it or name another file")
    conversion = convert(read_source(args.file))
    said, text = hide_secrets(report(conversion)), hide_secrets(configuration(conversion))
    if target is None:
        print(text, end="")
        print(said, end="", file=sys.stderr)
    else:
        target.write_text(text, encoding="utf-8")
        load_run(target)  # the written file must load
        print(said + f"\n{target}: written; `megappo plan {target}` checks it against model, data and ranks")
    return 1 if conversion.lost or (args.strict and unknown(conversion)) else 0
