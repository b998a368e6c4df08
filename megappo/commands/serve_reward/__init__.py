"""`megappo serve-reward`: a reward server for `reward.parts: [{url: ...}]`."""

from __future__ import annotations

import argparse
import json

from megappo.commands.parser import AddCommand


def add_command(command: AddCommand) -> None:
    parser = command(
        "serve-reward",
        main,
        "Serve a reward function of yours, or a Hugging Face reward model, over HTTP for `reward.parts: [{url: ...}]`.",
        "It answers POST /score and GET /health (docs/rewards.md, Remote rewards), and listens on this machine alone unless told "
        "otherwise; on another address only with a token and a certificate.",
        config=None,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--function", metavar="FILE:FUNCTION", help="score by a function of a Python file (docs/rewards.md)")
    what.add_argument("--model", metavar="DIR", help="score by a Hugging Face sequence-classification checkpoint with one label")
    parser.add_argument("--batch", action="store_true", help="the function takes a list of samples and returns a list")
    parser.add_argument("--args", type=json.loads, default={}, metavar="JSON", help="keyword arguments of the function")
    parser.add_argument("--device", default="cpu", help="of the model: cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the model (default: fp32)")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="padded tokens of one pass of the model (default: 32768)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--token-env", metavar="NAME", help="environment variable with the token that requests must carry")
    parser.add_argument("--certificate", metavar="PEM", help="certificate for https")
    parser.add_argument("--key", metavar="PEM", help="key of the certificate")
    parser.add_argument("--max-request-mib", type=float, default=64.0, help="largest request (default: 64)")


def main(args: argparse.Namespace) -> int:
    from megappo.config.errors import ConfigError
    from megappo.runtime.installed import missing_package
    from megappo.runtime.versions import EXTRAS

    for name in EXTRAS["server"]:
        if (missing := missing_package(name)) is not None:
            raise ConfigError(f"serve-reward: {missing}")
    from megappo.commands.serve_reward.server import serve_until_stopped

    return serve_until_stopped(args)
