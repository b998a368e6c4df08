"""`megappo convert FILE [-o CONFIG] [--strict]`: settings of another trainer as a configuration, with a report on every key."""

from __future__ import annotations

import sys

from megappo.commands.convert.conversion import convert
from megappo.commands.convert.report import configuration, report, unknown
from megappo.commands.convert.sources import read_source
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.output_file import check_output_file
from megappo.config.redaction import hide_secrets


def convert_file(path: str, output: str | None, *, strict: bool) -> int:
    """Write the configuration to `output`, or to stdout with the report on stderr. Returns 1 if `strict` finds unknown keys.

    Raises ConfigError, before anything is written.
    """
    target = None if output is None else check_output_file("-o", output)
    if target is not None and target.exists():
        raise ConfigError(f"-o {target}: exists, and is not overwritten; remove it or name another file")
    conversion = convert(read_source(path))
    said, text = hide_secrets(report(conversion)), hide_secrets(configuration(conversion))
    if target is None:
        print(text, end="")
        print(said, end="", file=sys.stderr)
    else:
        target.write_text(text, encoding="utf-8")
        load_config(target)  # what is written, loads
        print(said + f"\n{target}: written; `megappo plan {target}` checks it against model, data and ranks")
    return 1 if strict and unknown(conversion) else 0
