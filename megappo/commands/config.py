"""`megappo config`: the resolved configuration, a recipe or the schema."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from megappo.commands.parser import AddCommand
from megappo.commands.sft import COMMANDS
from megappo.config.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def add_command(command: AddCommand) -> None:
    config = command("config", main, "Print the resolved configuration, a recipe or the schema.", config="[CONFIG]")
    for kind, (name, _) in COMMANDS.items():
        about = f"for `megappo {name}`: its schema, or a file without `kind: {kind}`"
        config.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=about)
    config.add_argument("--schema", action="store_true", help="print the JSON schema instead")
    config.add_argument("--recipe", metavar="NAME", help="print this file of configs/recipes instead, for example grpo")


def main(args: argparse.Namespace) -> int:
    import json

    from megappo.config.dump import dump_yaml
    from megappo.config.loading import json_schema, load_run
    from megappo.config.schema import TrainConfig
    from megappo.config.supervised import KINDS

    if args.recipe is not None:
        if args.config is not None or args.kind or args.schema:
            raise ConfigError(f"--recipe {args.recipe}: prints that file alone; save it, then set keys over it")
        print(recipe(args.recipe), end="")
        return 0
    cls = TrainConfig if args.kind is None else KINDS[args.kind]
    if args.schema:
        print(json.dumps(json_schema(cls), indent=1))
    elif args.config is None:
        raise ConfigError("config: name a YAML file, or ask for --schema or --recipe")
    else:
        print(dump_yaml(load_run(args.config, args.overrides, args.kind)), end="")
    return 0


def recipe(name: str) -> str:
    """Return the text of a recipe, comments included. Raises ConfigError for an unknown name."""
    known = {path.stem: path for path in sorted(_folder().glob("*.yaml"))}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--recipe {name}: no such recipe; {hint}known: {', '.join(known)}")
    return known[name].read_text(encoding="utf-8")


def _folder() -> Path:
    # An installed package has a copy (setup.py). A checkout, and an editable installation of it, have the files themselves.
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs" / "recipes"
