"""The ranks of trials, with a critic whose passes take at least a pause: `python -m tests.commands.tune.slow_critic_rank FOLDER
NAME...`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from megappo.commands.tune.trial import main
from megappo.trainer.roles import Critic

PAUSE_S = 0.5


def slowly(self: Critic, batch: Any, plain: Any = Critic.values) -> Any:
    time.sleep(PAUSE_S)
    return plain(self, batch)


if __name__ == "__main__":
    Critic.values = slowly  # type: ignore[method-assign]
    main(Path(sys.argv[1]), sys.argv[2:])
