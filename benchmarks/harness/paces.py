"""Halves of an asynchronous run as slow as devices of their own would make them: they sleep, and a sleep takes no core from the
other half. megappo has no hook for this: `scripts/after_import` replaces the methods. Nothing is imported here that a rank does not
have."""

import os
import time

HOOK = "megappo.rollout.vllm_engine=benchmarks.harness.paces:slow_engine"
HOOK += " megappo.trainer.training_side=benchmarks.harness.paces:slow_training"
"""AFTER_IMPORT of the ranks. MEGAPPO_PACES: least seconds of an engine step, and further seconds of a step's training."""


def slow_engine(module):
    plain, least_s = module.VllmEngine.poll, float(os.environ["MEGAPPO_PACES"].split()[0])

    def poll(engine):
        end = time.monotonic() + least_s
        responses = plain(engine)
        time.sleep(max(0.0, end - time.monotonic()))
        return responses

    module.VllmEngine.poll = poll


def slow_training(module):
    plain, more_s = module.TrainingSide.add_logprobs, float(os.environ["MEGAPPO_PACES"].split()[1])

    def add_logprobs(side, record):
        time.sleep(more_s)
        plain(side, record)

    module.TrainingSide.add_logprobs = add_logprobs
