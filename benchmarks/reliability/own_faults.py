"""Faults that only a rank itself can have: an exception, and NaN in its gradients.

A rank then, before each optimizer step, or each engine step of a rollout half, leaves its process id in the folder that
MEGAPPO_CHAOS names (`rank-RANK`), looks there for `raise-RANK` and `nan-RANK`, removes them and commits that fault once. megappo
has no hook for this: `scripts/after_import` replaces the method as soon as its module has been imported. Nothing is imported here
that a rank does not have.
"""

import os
from pathlib import Path

HOOK = "megappo.engine.megatron=benchmarks.reliability.own_faults:install"
HOOK += " megappo.rollout.server=benchmarks.reliability.own_faults:install_in_server"
"""AFTER_IMPORT of the ranks."""


def install(module):
    wrap(module.MegatronEngine, Path(os.environ["MEGAPPO_CHAOS"]))


def wrap(engine_class, folder):
    plain, lives = engine_class.optimizer_step, sign_of_life(folder)

    def optimizer_step(engine):
        rank = lives()
        if took(folder / f"nan-{rank}"):
            for gradient in engine.named_gradients().values():  # all: a distributed optimizer reads only its own part
                gradient.fill_(float("nan"))
        return plain(engine)

    engine_class.optimizer_step = optimizer_step


def install_in_server(module):
    plain, lives = module._Server._begin, sign_of_life(Path(os.environ["MEGAPPO_CHAOS"]))

    def begin(server):
        lives()
        return plain(server)

    module._Server._begin = begin


def sign_of_life(folder):
    """What announces this process the first time, has the exception that it was told to have, and returns its rank."""
    announced = []

    def lives():
        rank = os.environ["RANK"]
        if os.getpid() not in announced:  # a rank may be forked from a process that has imported the engine
            announced.append(os.getpid())
            announce(folder, rank)
        if took(folder / f"raise-{rank}"):
            raise RuntimeError(f"chaos: an exception on rank {rank}, on purpose")
        return rank

    return lives


def announce(folder, rank):
    partial = folder / f"rank-{rank}.{os.getpid()}"
    partial.write_text(str(os.getpid()))
    os.replace(partial, folder / f"rank-{rank}")


def took(path):
    """True once for each time that the file was made."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
