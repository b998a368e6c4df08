"""Commands on the installation and on configurations: `megappo doctor`, `convert`, `config`."""

from __future__ import annotations

import argparse

from megappo.commands.parser import AddCommand
from megappo.config.errors import ConfigError


def add_commands(command: AddCommand) -> None:
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
    config = command("config", cmd_config, "Print the resolved configuration, a recipe or the schema.", config="[CONFIG]")
    config.add_argument("--sft", action="store_true", help="the file is a configuration of `megappo sft`")
    config.add_argument("--schema", action="store_true", help="print the JSON schema instead")
    config.add_argument("--recipe", metavar="NAME", help="print this file of configs/recipes instead, for example grpo")


def cmd_doctor(args: argparse.Namespace) -> int:
    from megappo.commands.doctor.doctor import report

    text, code = report()
    print(text, end="")
    return code


def cmd_convert(args: argparse.Namespace) -> int:
    from megappo.commands.convert.command import convert_file

    return convert_file(args.file, args.output, strict=args.strict)


def cmd_config(args: argparse.Namespace) -> int:
    import json

    from megappo.config.dump import dump_yaml
    from megappo.config.loading import json_schema, load_config
    from megappo.config.recipes import recipe
    from megappo.config.schema import SftConfig, TrainConfig

    if args.recipe is not None:
        if args.config is not None or args.sft or args.schema:
            raise ConfigError(f"--recipe {args.recipe}: prints that file alone; save it, then set keys over it")
        print(recipe(args.recipe), end="")
        return 0
    cls = SftConfig if args.sft else TrainConfig
    if args.schema:
        print(json.dumps(json_schema(cls), indent=1))
    elif args.config is None:
        raise ConfigError("config: name a YAML file, or ask for --schema or --recipe")
    else:
        print(dump_yaml(load_config(args.config, args.overrides, cls)), end="")
    return 0
