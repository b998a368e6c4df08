"""End of a rank together with the launcher that started it: killed, the launcher cannot end its ranks, which would train on alone.

Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from megappo.runtime.helper_process import end_with
from megappo.runtime.lease import LAUNCHER_VARIABLE
from megappo.runtime.lease_record import started_of
from megappo.runtime.world import SlurmTask


def end_with_launcher(env: Mapping[str, str] = os.environ) -> None:
    """Let the kernel kill this rank when its parent ends: torchrun, or the shell of a Slurm task.

    Ranks that somebody starts by hand, with RANK in the environment of a shell, are left alone: the shell may end before them.
    """
    if sys.platform != "linux" or not ("TORCHELASTIC_RUN_ID" in env or SlurmTask.of(env) is not None):
        return
    launcher = env.get(LAUNCHER_VARIABLE)
    # By SIGKILL: TERM asks for a checkpoint, which ranks without a launcher could not agree on.
    end_with(os.getppid())
    # The parent may be another process by now, which has taken over the ranks of a launcher that ended before the call.
    if launcher is not None and started_of(int(launcher)) is None:
        print("megappo: the launcher of this rank has ended", file=sys.stderr, flush=True)
        os._exit(1)
