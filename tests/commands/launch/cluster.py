"""A real Slurm of two nodes on this machine, in a scratch folder, with a munge of its own: nothing outside the folder is touched,
and nothing is left running, even where pytest is killed (`guard.py`).

The nodes are called 127.0.0.1 and 127.0.0.2. Both are addresses of this machine, so a rank that takes the first node's name for
the master address finds it, as it would on a cluster.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
NODES = ("127.0.0.1", "127.0.0.2")
CPUS_PER_NODE = 8
START_S = 30.0
GUARD = Path(__file__).with_name("guard.py")
REQUEUE_S = 3.0


def missing_programs() -> list[str]:
    """Those of Slurm and munge that are not installed. Debian puts the daemons where only root's PATH looks."""
    return [name for name in PROGRAMS if _program(name) is None]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass
class Cluster:
    """A running Slurm. `environment` is what its commands need."""

    folder: Path
    environment: dict[str, str]
    _daemons: list[subprocess.Popen] = field(default_factory=list)

    def command(self, *arguments: str) -> str:
        """stdout of a Slurm command, which must succeed."""
        done = subprocess.run(arguments, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Facts of `scontrol show job` about a job: JobState, Reason, Restarts, ExitCode, ..."""
        words = self.command("scontrol", "show", "job", "-o", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float, log: Path | None = None) -> None:
        """Poll until the condition holds. AssertionError, with the end of `log`, after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert all(daemon.poll() is None for daemon in self._daemons), "a daemon of the cluster ended"
            if time.monotonic() > deadline:
                said = "\n".join(log.read_text().splitlines()[-40:]) if log is not None and log.exists() else ""
                raise AssertionError(
                    f"{what}: not within {timeout_s:.0f} s\n{self.command('squeue')}\n{self.command('sinfo', '-R')}\n{said}"
                )
            time.sleep(0.2)

    def has_ended(self, job_id: str) -> bool:
        return self.job(job_id)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def release_requeued(self, job_id: str) -> bool:
        """Slurm keeps a requeued job back for two minutes; True once this one was requeued, and let go after seconds."""
        job = self.job(job_id)
        if job["JobState"] != "PENDING" or job["Restarts"] == "0":
            return False
        # Not at once: a node takes a start in the second of the requeue, or before, for the one that was revoked.
        time.sleep(REQUEUE_S)
        self.command("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        return True

    def _spawn(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        with (self.folder / f"{name}.out").open("a") as out:
            self._daemons.append(subprocess.Popen([program, *arguments], env=self.environment, stdout=out, stderr=out))

    def _start(self, munge_socket: Path, key: Path) -> None:
        # --force: the scratch folder's parents may be writable by others, which a production munged refuses.
        self._spawn(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={munge_socket}",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )
        self.wait_for_daemons("munge", munge_socket.exists)
        self._spawn("slurmctld", "-D")
        for node in NODES:
            self._spawn("slurmd", "-D", "-N", node)
        self.wait_for_daemons("the nodes", self._is_idle)

    def wait_for_daemons(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.out"))
                raise AssertionError(f"Slurm does not start ({what}); ended: {dead}\n{logs}")
            time.sleep(0.1)

    def _is_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%D %t"], env=self.environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout.split() == [str(len(NODES)), "idle"]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def _configuration(folder: Path, munge_socket: Path) -> str:
    host, user = socket.gethostname().split(".")[0], getpass.getuser()
    controller, *ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs={CPUS_PER_NODE} State=UNKNOWN"
        for node, port in zip(NODES, ports)
    )
    return f"""\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={munge_socket}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
# A machine under load answers late: no node is taken for dead, or out of service for a process that takes long to end.
SlurmdTimeout=0
MessageTimeout=60
UnkillableStepTimeout=600
# Seconds between SIGTERM and SIGKILL: so many that a job that waited for them would be noticed. No pause before a job is looked at.
KillWait=60
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
{nodes}
PartitionName=main Nodes={",".join(NODES)} Default=YES MaxTime=24:00:00 State=UP
"""


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """Start Slurm in `folder`, which is empty, and stop it again."""
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    # A path of a socket holds 107 characters, and pytest's folders are long.
    munge_socket = folder / "munge"
    assert len(str(munge_socket)) < 100, f"{folder} is too long for a socket"
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (folder / "slurm.conf").write_text(_configuration(folder, munge_socket))
    # What a test inherits from a Slurm job that it may run in would lead to that job's cluster.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    configuration = str(folder / "slurm.conf")
    # In a session of its own: what interrupts pytest does not interrupt it.
    guard = subprocess.Popen([sys.executable, GUARD, configuration], env=clean, stdin=subprocess.PIPE, start_new_session=True)
    cluster = Cluster(folder, clean | {"SLURM_CONF": configuration})
    try:
        cluster._start(munge_socket, key)
        yield cluster
    finally:
        guard.communicate()
        for daemon in cluster._daemons:
            daemon.wait()
