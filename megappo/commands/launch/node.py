"""torchrun on one node of a Slurm job, one task per node: `python -m megappo.commands.launch.node TORCHRUN_OPTIONS -m MODULE ...`.

The number of nodes and the c10d rendezvous come from Slurm's variables. USR1 and TERM are left to the ranks (`runtime/ending.py`).
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence

from megappo.runtime.ending import MISTAKE, as_shell, describe_exit
from megappo.runtime.world import SlurmTask, first_host, port_of

# Seconds from the first failure until the other ranks, which may wait forever, are killed.
SHUTDOWN_S = 5


def rendezvous(env: Mapping[str, str]) -> list[str]:
    """Return torchrun's options for this node. Raises ValueError outside of srun, and if srun started several tasks on the node."""
    task = SlurmTask.of(env)
    if task is None:
        raise ValueError("megappo.commands.launch.node is started by srun, one task per node; without Slurm use torchrun itself")
    if task.num_tasks != task.num_nodes:
        raise ValueError(
            f"srun started {task.num_tasks} tasks on {task.num_nodes} nodes: torchrun needs one task per node (--ntasks-per-node=1)"
        )
    # Use Slurm's name of the node. torchrun would take the host's own name, which the other nodes may not know, and would order
    # the ranks by it.
    options = {
        "--nnodes": str(task.num_nodes),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{first_host(task.nodelist)}:{port_of(task.job, task.step)}",
        # Late nodes of an earlier attempt must not join.
        "--rdzv-id": f"{task.job}.{task.step}.{env.get('SLURM_RESTART_COUNT', '0')}",
        "--rdzv-conf": f"is_host={str(task.node == 0).lower()}",
        "--local-addr": env["SLURMD_NODENAME"],
        "--max-restarts": "0",  # a restart is a new attempt of the job, from a checkpoint
        "--signals-to-handle": "SIGINT,SIGHUP,SIGQUIT",
    }
    return [word for option in options.items() for word in option]


def main(arguments: Sequence[str]) -> int:
    """Return the exit code of the first rank that failed here, or 0."""
    try:
        command = [*rendezvous(os.environ), *arguments]
    except ValueError as error:
        print(f"megappo: {error}", file=sys.stderr)
        return MISTAKE
    # Slurm sends both to the ranks as well. torchrun would end at USR1, and kill the ranks seconds after TERM, inside a step.
    for ignored in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    print("torchrun", shlex.join(command), flush=True)
    return run_torchrun(command)


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun's command line; return the exit code of the rank that failed first on this node, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # torchrun's own report of a failing rank says less than the rank's traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"megappo: rank {rank} ended first, {describe_exit(failure.exitcode)}; what it said is above", file=sys.stderr)
        return as_shell(failure.exitcode)
    except SignalException as error:  # torchrun has ended the ranks; its traceback would add nothing
        print(f"megappo: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
