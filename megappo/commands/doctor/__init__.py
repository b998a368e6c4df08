"""`megappo doctor`: what is installed on this machine, what works, and what is missing."""

from __future__ import annotations

import argparse

from megappo.commands.parser import AddCommand


def add_command(command: AddCommand) -> None:
    command("doctor", main, "List installed packages, working features, and missing packages with their purpose.", config=None)


def main(args: argparse.Namespace) -> int:
    from megappo.commands.doctor.doctor import report

    text, code = report()
    print(text, end="")
    return code
