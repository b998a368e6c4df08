"""Prompts of an asynchronous run. Every draw of the loader is a visit, and visits are numbered over the run: those of step s come
when step s - k begins (k is `rollout.max_staleness`), and what replaces some of them when step s is scored, behind those of steps
up to s + k. A choice depends on its number and on scores of steps up to s - 1 - k, and on no clock; k = 0 is the synchronous run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megappo.data.loader import PromptLoader


class AheadLoader(PromptLoader):
    """A run's loader whose cursor is ahead of the steps. arguments: of `PromptLoader`. staleness: steps that may begin early. n:
    samples per prompt. rows: step -> prompts of steps that have begun and were not trained on. asked, trained, left_out: samples of
    the run so far, for the ledger."""

    def __init__(self, *arguments: Any, staleness: int, n: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._staleness, self.n = staleness, n
        self.rows: dict[int, list[int]] = {}
        self.asked, self.trained, self.left_out = 0, 0, Counter[str]()

    def next_step(self, count: int | None = None) -> list[int]:
        rows = super().next_step(count)
        self.asked += self.n * len(rows)
        return rows

    def admit(self, step: int, total_steps: int) -> dict[int, list[int]]:
        """Draw the prompts of the steps that may begin now that `step` is next; return step -> rows of those that are new."""
        last = min(step + self._staleness, total_steps)
        new = {one: self.next_step() for one in range(max(self.rows, default=step - 1) + 1, last + 1)}
        self.rows |= new
        return new

    def ledger(self) -> str:
        """Return a line that accounts for every sample of the run. RuntimeError if one is lost or was trained on twice."""
        in_flight, left = self.n * sum(map(len, self.rows.values())), self.left_out.total()
        reasons = (
            f" ({', '.join(f'{count:,} {reason}' for reason, count in sorted(self.left_out.items()) if count)})" if left else ""
        )
        found = f"{self.trained:,} trained on + {left:,} left out{reasons} + {in_flight:,} in flight"
        if self.asked != self.trained + left + in_flight:
            raise RuntimeError(f"samples were lost or trained on twice: {self.asked:,} asked for, {found}")
        return f"samples: {self.asked:,} asked for = {found}"

    def state_dict(self) -> dict[str, Any]:
        rows = {str(step): rows for step, rows in self.rows.items()}
        ledger = {"asked": self.asked, "trained": self.trained, "left_out": dict(self.left_out)}
        return {**super().state_dict(), "ahead": {"n": self.n, "rows": rows}, "ledger": ledger}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, as `PromptLoader.load_state_dict` does; the numbers of prompts and samples may change only while nothing
        is in flight, and `rollout.max_staleness` may not be less than what is."""
        ahead, ledger = state.get("ahead", {"n": self.n, "rows": {}}), state.get("ledger", {})
        rows = {int(step): rows for step, rows in ahead["rows"].items()}
        if len(rows) > self._staleness:
            raise ValueError(
                f"cannot resume: rollout.max_staleness = {self._staleness}, and the responses of {len(rows)} steps have begun; "
                f"set it to {len(rows)}"
            )
        if rows and (ahead["n"] != self.n or any(len(one) != self.prompts_per_step for one in rows.values())):
            key = "data.prompts_per_step" if ahead["n"] == self.n else "rollout.samples_per_prompt"
            raise ValueError(f"cannot resume: {key} changed, and the responses of {len(rows)} steps have begun; restore it")
        super().load_state_dict({name: value for name, value in state.items() if name != "ahead"})
        self.rows = rows
        self.asked, self.trained = ledger.get("asked", 0), ledger.get("trained", 0)
        self.left_out = Counter(ledger.get("left_out", {}))
