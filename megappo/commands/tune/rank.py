"""Program of one trial rank: `python -m megappo.commands.tune.rank FOLDER NAME...`, under torchrun or as one task of srun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megappo.commands.tune.trials import world_folder
from megappo.runtime.failure import ATTEMPT_DIR, record_exceptions
from megappo.runtime.helper_process import stay_deaf
from megappo.runtime.libraries import quiet_libraries
from megappo.runtime.world import join_srun
from megappo.telemetry.console import keep_console


def main() -> None:
    stay_deaf()
    keep_console()
    quiet_libraries()  # before Megatron-core is imported
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    os.environ[ATTEMPT_DIR] = str(world_folder(folder, names))
    join_srun()
    record_exceptions(int(os.environ.get("RANK", "0")))
    from megappo.commands.tune.trial import main

    main(folder, names)


if __name__ == "__main__":
    main()
