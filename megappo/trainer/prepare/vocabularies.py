"""Checks that a critic or reference of another checkpoint reads the policy's token ids. Sizes do not tell: two tokenizers of 32,000
pieces may number different ones, and the role would then read noise without an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import is_critic
from megappo.config.schema import TrainConfig
from megappo.data.tokenizers import Tokenizer, find_tokenizer
from megappo.trainer.prepare.layouts import model_paths


def check_vocabularies(config: TrainConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a note for each such role whose checkpoint has no tokenizer to compare. ConfigError, with the first differing id, if a
    role numbers other pieces than `tokenizer`, the run's."""
    for role, (key, path) in model_paths(config).items():
        if not (is_critic(role) or role == "reference") or key == "policy.model" or _same_place(path, config.policy.model):
            continue
        try:
            of_role = find_tokenizer(path)()
        except ValueError:
            yield f"{key} has no tokenizer that can be read: its vocabulary is taken to be that of data.tokenizer"
            continue
        # Ids that only one has are not compared: models pad their vocabulary, and tokenizers add tokens at its end.
        for number, (own, theirs) in enumerate(zip(tokenizer.pieces(), of_role.pieces())):
            if own != theirs:
                fix = f"the {role} reads the policy's ids; use a model with the same tokenizer"
                raise ConfigError(problem(key, path, f"id {number} of its tokenizer is {theirs!r}, of the policy's {own!r}: {fix}"))


def _same_place(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()
