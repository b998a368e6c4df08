"""The process of one trial rank: `python -m megappo.tune.rank FOLDER NAME...`, under torchrun or as one task of srun."""

from __future__ import annotations

import sys

from megappo.launch.world import join_srun
from megappo.platform.quiet import quiet_libraries


def main() -> None:
    quiet_libraries()  # before Megatron-core is imported
    join_srun()
    from megappo.tune.trial import main

    main(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
