"""Loads the parts of the reward (rules, code of the user, servers) and checks them against the data, before a model is built. A
kind of part is a key of `config.reward_sections.PART_KINDS` with a loader in LOADERS."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from megappo.config.errors import ConfigError, about, problem
from megappo.config.evaluations import STDERR, TURNS
from megappo.config.reward_sections import RemoteConfig, RewardConfig, RewardPart
from megappo.data.prompts import Prompt, PromptSet, answer_field, record_field
from megappo.rewards.base import PreparedPart, RewardError
from megappo.rewards.compose import LENGTH, MISSING_EOS
from megappo.rewards.pool import PoolPart
from megappo.rewards.remote import RemotePart
from megappo.rewards.rules import READS_ANSWER, RULES, hash_of_code, make_part
from megappo.rewards.server import Asker, Server
from megappo.rewards.user import GROUP, OwnProcess, load_rule
from megappo.runtime.installed import missing_package
from megappo.runtime.user_code import OwnCode
from megappo.telemetry.metrics import Metric
from megappo.trainer.prepare.code_rewards import load_code
from megappo.trainer.prepare.reward_routes import places, recipe_of, scored_by

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


def load_own(part: RewardPart) -> PreparedPart:
    """Load the code of a part with a path or an entry point. ValueError, one line, for code that cannot be used."""
    code = OwnCode(GROUP, part.path, part.function, part.entry_point, part.args)
    rule = load_rule(part.label, code, batch=part.batch)
    if not part.workers:
        return PreparedPart(rule.part, rule.requires, rule.sha256, rule.reads_answer)
    make = partial(PoolPart, part.label, partial(OwnProcess, part.label, code.as_read(rule), part.timeout_s), part.workers)
    return PreparedPart(make, rule.requires, rule.sha256, rule.reads_answer)


_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# A part is logged as reward/LABEL and eval/LABEL.
_TAKEN = {metric.value.split("/")[1] for metric in Metric if metric.value.startswith(("reward/", "eval/"))} | {MISSING_EOS, LENGTH}
_TAKEN |= {STDERR, *TURNS}  # of evaluations


def load_parts(reward: RewardConfig) -> dict[str, PreparedPart]:
    """Return label -> part, of all recipes, once each. ConfigError, one line, for a part that cannot be used."""
    return {label: _load(key, part) for label, (key, part) in reward.all_parts.items()}


def _load(key: str, part: RewardPart) -> PreparedPart:
    if part.kind != "name" and (not _LABEL.fullmatch(part.label) or part.label in RULES or part.label in _TAKEN):
        fix = "is no name for a metric of its own (letters, digits and . _ -, no built-in rule or metric); set name to another"
        raise ConfigError(problem(f"{key}.name", part.label, fix))
    with about(f"{key}.{part.kind}", getattr(part, part.kind)):
        return LOADERS[part.kind](part)


def _load_rule(part: RewardPart) -> PreparedPart:
    make = partial(make_part, part.label, part.workers)
    return PreparedPart(make, sha256=hash_of_code(part.label), reads_answer=part.label in READS_ANSWER)


LOADERS: Mapping[str, Callable[[RewardPart], PreparedPart]] = {
    "name": _load_rule,
    "path": load_own,
    "entry_point": load_own,
    "code": load_code,
    "url": load_remote,
    "model": lambda part: PreparedPart(make=None),  # a role: its section names the checkpoint (`prepare/reward_model.py`)
}
"""Kind of part -> loader, which raises ValueError, one line without the key, for a part that cannot be used."""


class AnswerKey(NamedTuple):
    """Field of the records with a set's reference answers, and the key of the configuration that names it."""

    field: str
    option: str = "data.answer_key"


def check_answers(reward: RewardConfig, parts: Mapping[str, PreparedPart], key: AnswerKey, prompts: PromptSet) -> None:
    """ConfigError, one line, for the first record without a reference answer that a part of its recipe reads."""
    readers = {name for name, part in parts.items() if part.reads_answer}
    for prompt in map(prompts.__getitem__, prompts.unanswered if readers else ()):
        recipe = reward.recipes.get(recipe_of(reward, prompt.record), ())
        if (reader := next((part.label for part in recipe if part.label in readers), None)) is not None:
            require_answer(prompt, key, f"the reward {reader}")


def require_answer(prompt: Prompt, key: AnswerKey, reader: str) -> None:
    """ConfigError, one line with what is wrong, if the record has no reference answer under `key`."""
    try:
        answer_field(prompt.record, key.field, key.option, prompt.place)
    except ValueError as error:
        raise ConfigError(f"{error}; {reader} reads it") from None


def check_requirements(reward: RewardConfig, parts: Mapping[str, PreparedPart], sets: Mapping[str, PromptSet]) -> None:
    """ConfigError if a record of `sets` (key of the configuration -> prompts) lacks a field that a part of its recipe requires."""
    for name, part in parts.items():
        for field in part.requires:
            for key, prompts in sets.items():
                scored = scored_by(reward, name, prompts)
                lacking = [prompt for prompt in scored if not _has(prompt, field)]
                if lacking:
                    count = f"{len(lacking):,} of {len(scored):,} records of {key}"
                    raise ConfigError(problem("reward.parts", name, f"requires {field}, which {count} lack: {places(lacking)}"))


def _has(prompt: Prompt, field: str) -> bool:
    """Return True if the record has this field (`a.b` is nested) and it is not null; the field `answer` must hold text."""
    if field == "answer":
        return bool(prompt.answer.strip())
    try:
        return record_field(prompt.record, field, "requires", prompt.id) is not None
    except ValueError:
        return False
