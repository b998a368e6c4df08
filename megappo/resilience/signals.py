"""Requests to stop at the next step boundary: SIGUSR1 (Slurm, minutes before the time limit) and SIGTERM (preemption, `kill`).

Slurm sends its signal to every process of a job step: to the ranks, and to whatever they started (a reward's worker, a compiler).
So a rank blocks USR1, which its children inherit and never notice, and takes it in a thread that waits for it. TERM has to end
children, so that is a plain handler; it does not end the rank either. Whether all ranks stop is decided by all of them together
(`agreement.py`). Imports no torch: threads that exist before `listen` would not block USR1.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """received: the last signal that asked this rank to stop, None where none did."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def listen(self) -> None:
        """Take both signals from now on. Call it in the main thread, before torch is imported; once in a process."""
        signal.signal(signal.SIGTERM, self._on_term)
        # A launcher may have the signal ignored until here, so that it does not end a rank that is still importing.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        threading.Thread(target=self._wait_for_usr1, name="stop-request", daemon=True).start()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.SIGTERM

    def _wait_for_usr1(self) -> None:
        while True:
            self.received = signal.Signals(signal.sigwait({signal.SIGUSR1}))
