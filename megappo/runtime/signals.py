"""Requests to stop at the next step boundary: SIGUSR1 (Slurm, minutes before the time limit) and SIGTERM (preemption, `kill`).
Slurm signals every process of a job step, the ranks' children too. The ranks decide together to stop (`parallel/consensus.py`).
Imports no torch: its threads, started before `listen`, would not block USR1."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """Receiver of requests to stop. received: the first signal that asked this rank to stop, None without one."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def listen(self) -> None:
        """Handle both signals from now on. Call it once, in the main thread, before torch is imported."""
        signal.signal(signal.SIGTERM, self._on_term)
        # A launcher of ours (`commands/launch/processes.py`) blocks it until here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # Children inherit the block and never notice USR1; `helper_process.py` keeps the other signals from them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        # The launcher may ignore USR1, so that it does not end a rank that is still importing; ignored, it would never arrive.
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        threading.Thread(target=self._wait_for_usr1, name="stop-request", daemon=True).start()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.SIGTERM

    def _wait_for_usr1(self) -> None:
        while True:
            received = signal.Signals(signal.sigwait({signal.SIGUSR1}))
            self.received = self.received or received
