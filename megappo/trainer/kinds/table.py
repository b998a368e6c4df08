"""Table of the kinds. A new one needs an entry here, in `config.supervised.KINDS`, `prepare.supervised.READERS` and
`commands.sft.COMMANDS`."""

from __future__ import annotations

from typing import Any

from megappo.trainer.kinds.dpo import Dpo
from megappo.trainer.kinds.kind import Kind
from megappo.trainer.kinds.reward_model import RewardTraining
from megappo.trainer.kinds.sft import Sft

KINDS: dict[str, type[Kind[Any]]] = {"sft": Sft, "reward_model": RewardTraining, "dpo": Dpo}
"""Kind -> its class."""
