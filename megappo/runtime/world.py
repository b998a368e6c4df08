"""The world that this process is a rank of: torchrun's, srun's (one task per rank), or none yet. torchrun sets RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; for tasks of a Slurm step they are derived here from Slurm's variables,
equally on every rank and without asking Slurm's controller. Also ends ranks with their launcher. Runs before torch is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from megappo.config.run_sections import RunConfig
from megappo.runtime.helper_process import end_with
from megappo.runtime.lease import LAUNCHER_VARIABLE
from megappo.runtime.lease_record import started_of

# Below the ephemeral ports of Linux (32768 and up), so that no outgoing connection holds one by chance.
FIRST_PORT, NUM_PORTS = 10000, 20000
_PORTS_PER_JOB = 37  # a prime that shares no factor with NUM_PORTS: jobs of neighbouring ids keep their steps apart
_RANK_VARIABLES = ("RANK", "WORLD_SIZE")
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun alone
_THIS_HOST = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class SlurmTask:
    """One task of a Slurm step, from the environment that slurmstepd sets. tasks_here: on this node. nodelist: in Slurm's
    compressed form."""

    job: int
    step: int
    rank: int
    num_tasks: int
    local_rank: int
    tasks_here: int
    num_nodes: int
    node: int
    nodelist: str

    @classmethod
    def of(cls, env: Mapping[str, str]) -> SlurmTask | None:
        """Return this process's task; None outside of a step."""
        # A batch script has SLURM_PROCID too, but no step of its own.
        if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_PROCID" not in env:
            return None
        node = int(env["SLURM_NODEID"])
        return cls(
            job=int(env["SLURM_JOB_ID"]),
            step=int(env["SLURM_STEP_ID"]),
            rank=int(env["SLURM_PROCID"]),
            num_tasks=int(env["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(env["SLURM_LOCALID"]),
            tasks_here=tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[node],
            num_nodes=int(env["SLURM_STEP_NUM_NODES"]),
            node=node,
            nodelist=env["SLURM_STEP_NODELIST"],
        )


def is_rank() -> bool:
    """True in a process that a launcher started as one rank of a world; in a task of srun after `join_srun`."""
    return all(name in os.environ for name in _RANK_VARIABLES)


def join_srun(env: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables in a task that srun started as one rank. Call it first in a process that may be a rank. ValueError,
    one line: torchrun and srun describe different worlds; a job of several nodes without srun or torchrun; a MASTER_ADDR that every
    node would take for itself."""
    task = SlurmTask.of(env)
    described = all(name in env for name in _RANK_VARIABLES)
    if task is None and not described and int(env.get("SLURM_JOB_NUM_NODES", "1")) > 1:
        raise ValueError(
            f"this Slurm job has {env['SLURM_JOB_NUM_NODES']} nodes, and only this one would be used: start the ranks with srun, "
            "or submit the run by `megappo launch`"
        )
    if task is None or task.num_tasks == 1:  # a step of one task may start torchrun, or the ranks of its node
        return
    if described:
        _require_agreement(env, task)
        if _TORCHRUN in env:
            return
    visible = [device for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    # One task on a node with one GPU needs no such rule: its local rank is 0 anyway.
    bound = len(visible) == 1 and task.tasks_here > 1
    env.update(
        RANK=str(task.rank),
        WORLD_SIZE=str(task.num_tasks),
        # A task that Slurm shows one GPU (--gpus-per-task, --gpu-bind=single:1) finds it as device 0.
        LOCAL_RANK="0" if bound else str(task.local_rank),
        LOCAL_WORLD_SIZE=str(task.tasks_here),
    )
    # Kept if set, by the user or by enroot's hook for PyTorch images (which sets RANK and WORLD_SIZE, but not all six).
    env.setdefault("MASTER_ADDR", first_host(task.nodelist))
    env.setdefault("MASTER_PORT", str(port_of(task.job, task.step)))
    if task.num_nodes > 1 and env["MASTER_ADDR"] in _THIS_HOST and env["MASTER_ADDR"] != first_host(task.nodelist):
        raise ValueError(
            f"MASTER_ADDR={env['MASTER_ADDR']} is set, which each of the {task.num_nodes} nodes takes for itself: unset it (a "
            f"job script or a shell start-up file exports it), or set it to {first_host(task.nodelist)}"
        )


def _require_agreement(env: Mapping[str, str], task: SlurmTask) -> None:
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if _TORCHRUN not in env:
        if (rank, size) != (task.rank, task.num_tasks):
            raise ValueError(
                f"RANK={rank} and WORLD_SIZE={size} are set, but this is task {task.rank} of {task.num_tasks} of srun: unset "
                "both (a job script or a shell start-up file exports them), or start one task per node that runs torchrun"
            )
        return
    local_size = int(env["LOCAL_WORLD_SIZE"])
    if size == local_size:
        raise ValueError(
            f"srun started {task.num_tasks} tasks, and torchrun in each of them a world of its own of {size} ranks: "
            f"give torchrun --nnodes {task.num_nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id {task.job}"
        )
    if task.num_tasks != task.num_nodes:
        raise ValueError(
            f"srun started {task.num_tasks} tasks on {task.num_nodes} nodes, and torchrun {local_size} ranks in each: "
            "start torchrun in one task per node (--ntasks-per-node=1), or one task per rank without torchrun"
        )


def world_size(run: RunConfig) -> int:
    """Return the run's number of ranks: the launcher's world, or `run.num_ranks`, or one per GPU, or 1. ValueError if the
    launcher's world and `run.num_ranks` differ."""
    if is_rank():
        started = int(os.environ["WORLD_SIZE"])
        if run.num_ranks not in (None, started):
            raise ValueError(
                f"run.num_ranks = {run.num_ranks}: the launcher started {started} ranks; set run.num_ranks={started} or null"
            )
        return started
    if run.num_ranks is not None:
        return run.num_ranks
    if run.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


# ------------------------------------------------------------------------------------------------------- Slurm's notations


def port_of(job: int, step: int) -> int:
    """Return the TCP port of a step, distinct among the jobs that share a host."""
    return FIRST_PORT + (job * _PORTS_PER_JOB + step) % NUM_PORTS


def first_host(nodelist: str) -> str:
    """Return the first host: `gpu[03-06,9],login1` -> `gpu03`; a name may hold several brackets. ValueError if it is no list of
    hosts."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodelist}: not a list of hosts")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> list[int]:
    """Parse `2(x3),1` to [2, 2, 2, 1]. ValueError for another form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}: not in the form 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# Steps, separated by commas, from the launcher or the job script to the ranks; not for users, hence no option.
SKIP_STEPS = "MEGAPPO_SKIP_STEPS"


def steps_to_skip() -> frozenset[int]:
    """Return the steps that this attempt must not resume from."""
    return frozenset(int(step) for step in os.environ.get(SKIP_STEPS, "").split(",") if step)


def end_with_launcher(env: Mapping[str, str] = os.environ) -> None:
    """Let the kernel kill this rank when its parent ends: torchrun, or the shell of a Slurm task. Ranks started by hand from a
    shell with RANK set are left alone: the shell may end before them."""
    if sys.platform != "linux" or not ("TORCHELASTIC_RUN_ID" in env or SlurmTask.of(env) is not None):
        return
    launcher = env.get(LAUNCHER_VARIABLE)
    # By SIGKILL: TERM asks for a checkpoint, which ranks without a launcher could not agree on.
    end_with(os.getppid())
    # If the launcher ended before the call, another process has become the parent.
    if launcher is not None and started_of(int(launcher)) is None:
        print("megappo: the launcher of this rank has ended", file=sys.stderr, flush=True)
        os._exit(1)
