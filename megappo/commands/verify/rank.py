"""Program of one measuring rank: `python -m megappo.commands.verify.rank FOLDER NAME...`."""

from __future__ import annotations

import sys

from megappo.runtime.helper_process import stay_deaf
from megappo.runtime.libraries import quiet_libraries
from megappo.telemetry.console import keep_console


def main() -> None:
    stay_deaf()
    keep_console()
    quiet_libraries()  # before Megatron-core is imported
    from megappo.commands.verify.world import main

    main(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
