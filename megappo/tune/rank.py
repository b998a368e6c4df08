"""Program of one trial rank: `python -m megappo.tune.rank FOLDER NAME...`, under torchrun or as one task of srun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megappo.launch.failure import ATTEMPT_DIR, record_exceptions
from megappo.launch.world import join_srun
from megappo.platform.quiet import quiet_libraries
from megappo.telemetry.console import keep_console
from megappo.tune.trials import world_folder


def main() -> None:
    keep_console()
    quiet_libraries()  # before Megatron-core is imported
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    os.environ[ATTEMPT_DIR] = str(world_folder(folder, names))
    join_srun()
    record_exceptions(int(os.environ.get("RANK", "0")))
    from megappo.tune.trial import main

    main(folder, names)


if __name__ == "__main__":
    main()
