"""The step-time model against trials of fourteen layouts on two CPU ranks, recorded by `record_trials.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy
import pytest
import yaml

from megappo.config.loading import load_config
from megappo.models.arch import arch_of
from megappo.plan.layouts import layout_of
from megappo.plan.memory import count_parameters
from megappo.tune.cost import role_cost, workload_of
from megappo.tune.profiles import hardware_of

from .record_trials import LAYOUTS, MODEL, RANKS, TARGET, write_run

COMMUNICATION = ("tp", "cp", "pp", "dp")


@cache
def record():
    return json.loads(TARGET.read_text())


def predictions(folder, hardware=None, without=()):
    """Layout -> predicted (forward, update) seconds. without: parts of the model to leave out of the update."""
    ((name, values),) = yaml.safe_load("\n".join(record()["profile"])).items()
    hardware = hardware or hardware_of(name, values, "the record")
    path, arch, found = write_run(folder), arch_of(MODEL), {}
    for name, overrides in LAYOUTS.items():
        config = load_config(path, overrides)
        layout = layout_of(config.policy.parallel, RANKS)
        counts = {stage: count_parameters(arch, layout, stage) for stage in range(layout.pp)}
        cost = role_cost("policy", arch, layout, config.policy, workload_of(config), hardware, counts)
        lost = sum(cost.parts.get(part, 0.0) for part in without)
        found[name] = (cost.phases["forward"], cost.phases["update"] - lost)
    return found


def measured():
    return {name: (seconds["forward_s"], seconds["update_s"]) for name, seconds in record()["seconds"].items()}


def correlation(predicted):
    """Spearman's, of the time of a pass and an update."""
    totals = [[sum(times[name]) for name in LAYOUTS] for times in (predicted, measured())]
    return numpy.corrcoef([numpy.argsort(numpy.argsort(column)) for column in totals])[0, 1]


if __name__ == "__main__":
    import tempfile, pathlib
    p=predictions(pathlib.Path(tempfile.mkdtemp())); m=measured()
    for n in sorted(p,key=lambda n:sum(m[n])): print(f"{n:40} {m[n][0]:.3f} {m[n][1]:.3f} {sum(m[n]):.3f} | {p[n][0]:.3f} {p[n][1]:.3f} {sum(p[n]):.3f}  {sum(m[n])/sum(p[n]):.2f}")
    print(correlation(p))
    for w in (COMMUNICATION,("bubble",),("host",),("host","bubble"),(*COMMUNICATION,"bubble"),(*COMMUNICATION,"bubble","host")):
        print(w,correlation(predictions(pathlib.Path(tempfile.mkdtemp()),without=w)))
