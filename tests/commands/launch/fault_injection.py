"""Faults in real ranks: a Python process in this `environment` obeys FAULTS. Imports nothing that a rank does not have.

FAULTS holds faults, separated by blanks: NAME=RANK:MODULE:ATTRIBUTE:N:ACTION[:AFTER]. In rank RANK the N-th call of
MODULE.ATTRIBUTE since its process started does ACTION instead, once the fault AFTER has happened: kill, stop (SIGSTOP), term
(SIGTERM to the process group), insist (the same a while later, and waits for its end), pause (a second), value_error or
assertion_error (which no wrapper of a save takes for a fault of the disk). Each happens once: it leaves the file
FAULTS_DONE/NAME, with the time.
"""

import functools
import os
import signal
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Fault:
    def __init__(self, text):
        self.name, _, rest = text.partition("=")
        self.rank, self.module, self.attribute, number, self.action, *after = rest.split(":")
        self.number, self.calls, self.after = int(number), 0, after

    def install(self, module):
        *owners, last = self.attribute.split(".")
        owner = functools.reduce(getattr, owners, module)
        original = getattr(owner, last)

        @functools.wraps(original)
        def faulty(*args, **kwargs):
            self.happen_if_due()
            return original(*args, **kwargs)

        setattr(owner, last, faulty)

    def happen_if_due(self):
        if os.environ.get("RANK") != self.rank:
            return
        self.calls += 1
        done = Path(os.environ["FAULTS_DONE"], self.name)
        if self.calls != self.number or done.exists():
            return
        if not all(done.with_name(name).exists() for name in self.after):
            return
        if self.action == "stop":
            time.sleep(1.0)  # the watchdog's sign of life tells the place
        done.write_text(repr(time.time()))
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)  # it is continued for a moment, so that it writes its stacks
        elif self.action == "term":
            os.killpg(0, signal.SIGTERM)
        elif self.action == "insist":
            time.sleep(1.5)  # sooner it would be the same request (commands/launch/local.py)
            os.killpg(0, signal.SIGTERM)
            time.sleep(1000)
        elif self.action == "pause":
            time.sleep(1.0)
        elif self.action == "value_error":
            raise ValueError("injected")
        elif self.action == "assertion_error":
            raise AssertionError("injected")


def environment(faults, done):
    """Variables of a process whose ranks have these faults. done: folder for the files of those that have happened."""
    modules = dict.fromkeys(Fault(text).module for text in faults.split())
    calls = " ".join(f"{module}={__name__}:install" for module in modules)
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "after_import")])
    return {"PYTHONPATH": path, "AFTER_IMPORT": calls, "FAULTS": faults, "FAULTS_DONE": str(done)}


def install(module):
    for fault in map(Fault, os.environ["FAULTS"].split()):
        if fault.module == module.__name__:
            fault.install(module)
