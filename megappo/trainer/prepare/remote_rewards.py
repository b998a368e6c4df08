"""Prepares rewards of a server: their token, and a first request before a model is built."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from megappo.config.errors import ConfigError, problem
from megappo.config.reward_sections import RemoteConfig, RewardPart
from megappo.rewards.base import PreparedPart, RewardError
from megappo.rewards.remote import RemotePart
from megappo.rewards.server import Asker, Server
from megappo.runtime.installed import missing_package

# Seconds for which a new run tries to reach its servers, which many ranks ask at once. A resumed run waits as long as its requests.
START_BUDGET_S = 3.0


def load_remote(part: RewardPart) -> PreparedPart:
    """Prepare a part that a server scores. ValueError, one line, if httpx2 or the certificates are missing."""
    if (how := missing_package("httpx2")) is not None:
        raise ValueError(how)
    assert part.url is not None
    name, url, settings = part.label, part.url, part.remote
    try:
        Asker(Server(name, url, settings))
    except ValueError as error:
        raise ValueError(f"remote.ca_file = {settings.ca_file} {error}") from None

    # The token is read only here: `megappo plan` and `launch` work without it.
    def make() -> RemotePart:
        return RemotePart(_server(name, url, settings))

    def ask(retry_budget_s: float) -> None:
        asyncio.run(_ask(_server(name, url, settings), min(retry_budget_s, settings.retry_budget_s)))

    return PreparedPart(make, ask=ask)


def require_reachable(parts: Mapping[str, PreparedPart], *, resume: bool) -> None:
    """ConfigError, one line, if a part's server is down or refuses requests from this machine. Not collective."""
    for part in parts.values():
        if part.ask is None:
            continue
        try:
            part.ask(float("inf") if resume else START_BUDGET_S)
        except RewardError as error:
            fix = "start the server, or correct url; it must answer a request without samples too"
            raise ConfigError(f"reward.parts: {error}; {fix}") from error


def _server(name: str, url: str, settings: RemoteConfig) -> Server:
    """Build the server with the environment's token. ConfigError if the settings name a token that is missing or malformed."""
    token = None
    if settings.token_env is not None:
        token = os.environ.get(settings.token_env, "").strip()
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            how = "holds what no HTTP header can" if token else "is not set"  # without its value
            fix = f"this environment variable {how} (reward {name}); set it to the token where the ranks start"
            raise ConfigError(problem("remote.token_env", settings.token_env, fix))
    return Server(name, url, settings, token)


async def _ask(server: Server, retry_budget_s: float) -> None:
    asker = Asker(server)
    try:
        await asker.results([], retry_budget_s)
    finally:
        await asker.close()
