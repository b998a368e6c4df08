"""A resume whose checkpoint turns out to be damaged, or not finite, after the models were built: the one before, or one line that
says why not.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megappo.checkpoint.manifest import DamagedCheckpoint
from megappo.trainer.checkpoints import Checkpoints, NonFiniteWeights


class Store:
    """Checkpoint 7 is damaged. older: what there is besides."""

    def __init__(self, older: list[int]) -> None:
        self.older, self.skipped, self.loaded = older, [], []

    def restore(self, manifest: Any, *_: Any) -> int:
        if manifest.step == 7:
            raise DamagedCheckpoint("a.safetensors does not match its BLAKE3 hash")
        self.loaded.append(manifest.step)
        return manifest.step

    def find_resumable(self, facts: Any, skip: Any = ()) -> Any:
        self.skipped.append(skip)
        left = [step for step in self.older if step not in skip]
        if not left:
            raise ValueError("run/checkpoints holds no checkpoint")
        return SimpleNamespace(step=left[0], facts={})

    def steps(self) -> list[int]:
        return self.older


def resumed(
    store: Store, monkeypatch: pytest.MonkeyPatch, skip: tuple[int, ...] = (), not_finite: tuple[int, ...] = ()
) -> Checkpoints:
    checkpoints = object.__new__(Checkpoints)
    nothing = SimpleNamespace(resume=lambda *_: None, expect=lambda *_: None, resume_after=lambda *_: None, note=lambda *_: None)
    checkpoints._store, checkpoints._facts, checkpoints._components, checkpoints._models = store, {}, {}, {}
    checkpoints._best = checkpoints._schedule = checkpoints._log = nothing
    checkpoints._epochs_done = lambda: 0
    monkeypatch.setattr(checkpoints, "_held_in", lambda manifest: {})
    monkeypatch.setattr(checkpoints, "_non_finite", lambda: "a.weight is NaN" if store.loaded[-1] in not_finite else "")
    monkeypatch.setattr("megappo.trainer.checkpoints.on_rank_zero", lambda what, action: action())
    monkeypatch.setattr("megappo.trainer.checkpoints.warn_once", lambda *_: None)
    checkpoints.resume(SimpleNamespace(step=7), skip)
    return checkpoints


def test_the_one_before_is_taken_but_none_that_was_not_to_be_taken(monkeypatch):
    store = Store([6, 5])
    assert resumed(store, monkeypatch, skip=(6,))._saved_step == 5
    assert store.loaded == [5] and store.skipped == [(6,)]


def test_without_another_the_error_names_the_damage(monkeypatch):
    store = Store([])
    with pytest.raises(
        ValueError, match=r"^step-7 is damaged \(a.safetensors does not .*\), and run/checkpoints holds no checkpoint$"
    ):
        resumed(store, monkeypatch)
    assert store.loaded == []


def test_after_one_that_is_not_finite_none_is_taken_that_was_not_to_be_taken(monkeypatch):
    store = Store([6, 5, 4])
    assert resumed(store, monkeypatch, skip=(5,), not_finite=(6,))._saved_step == 4
    assert store.loaded == [6, 4] and store.skipped == [(5,), (5, 6)]
    with pytest.raises(NonFiniteWeights, match=r"^no checkpoint to go on from: a.weight is NaN in step-6; run/checkpoints holds"):
        resumed(Store([6]), monkeypatch, not_finite=(6,))
