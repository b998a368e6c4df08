"""Cases of `test_spread.py` in its worlds: the writer of every byte of a checkpoint, and the memory that writing takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from megappo.checkpoint import shards
from megappo.checkpoint.shards import StoredTensors
from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.memory import role_memory
from megappo.engine import state_boxes
from megappo.parallel.layout import ParallelLayout
from tests.checkpoint import resharding, runs
from tests.checkpoint.cases import load_optimizer_into_copies
from tests.commands.plan.live import Live

LAYOUTS = {
    "dp4": {},
    "tp2 dp2": {"tp": 2},
    "pp2 dp2": {"pp": 2},
    "ep2 edp2": {"ep": 2},
    "pp2 ep2": {"pp": 2, "ep": 2},
    "tp2 sp edp4": {"tp": 2, "sequence_parallel": True},
}
HIDDEN = 240  # of the model whose memory is measured
BF16, PLAIN, UNEVEN = {"dtype": torch.bfloat16}, {"distributed": False}, {"hidden": 40}
# name -> (role is critic, layout that writes, layout that reads, options of runs.engine, options that differ in the reader)
CASES = {
    "bf16 critic, fp32 head": (True, "dp4", "tp2 dp2", {**BF16, **UNEVEN}, {}),
    "bf16, tied": (False, "pp2 dp2", "dp4", {**BF16, "tied": True, **UNEVEN}, {}),
    "fp32, experts": (False, "ep2 edp2", "pp2 ep2", {"experts": True}, {}),
    "bf16 critic, replicated experts": (True, "tp2 sp edp4", "ep2 edp2", {"experts": True, **BF16}, {}),
    "plain to distributed": (False, "dp4", "pp2 dp2", {**BF16, **PLAIN, **UNEVEN}, {"distributed": True}),
    "more ranks than some tensors have rows": (True, "dp4", "dp4", {"num_layers": 1, **BF16, **UNEVEN}, {}),
}


def world_main(rank, folder):
    layouts = runs.build_layouts(LAYOUTS)
    results = {name: spread(layouts, Path(folder, str(number)), *case) for number, (name, case) in enumerate(CASES.items())}
    results["written by mains"] = spread(layouts, Path(folder, "mains"), *CASES["plain to distributed"], share=by_mains)
    return results


def spread(layouts, place, critic, writes, reads, options, changed, share=state_boxes._share):
    """One layout writes, itself and another one read; where the bytes went."""
    first = runs.engine(layouts[writes], critic=critic, **options)
    resharding.train(first)
    wanted = resharding.whole_state(first, layouts[writes])
    kept = runs.store(place)
    state_boxes._share, usual = share, state_boxes._share
    saved = kept.save(1, {"model": first}, {}, runs.FACTS)
    state_boxes._share = usual
    other = runs.engine(layouts[reads], critic=critic, seed=9, **{**options, **changed})
    kept.load({"model": other}, {}, runs.FACTS)
    again = runs.engine(layouts[writes], critic=critic, seed=7, **options)
    fresh = runs.engine_digest(again)
    kept.load({"model": again}, {}, runs.FACTS)
    at_once = runs.differing(runs.engine_digest(first), runs.engine_digest(again))
    resharding.train(first, steps=1)
    resharding.train(again, steps=1)
    return {
        "wrong": resharding.differing_tensors(wanted, resharding.whole_state(other, layouts[reads])),
        "resumed": at_once + runs.differing(runs.engine_digest(first), runs.engine_digest(again)),
        "fresh": runs.differing(runs.engine_digest(first), fresh),
        **places(saved / "models/model"),
    }


def by_mains(boxes, number, index):
    """The first data-parallel rank writes everything as a whole."""
    return boxes if index == 0 else []


def places(directory):
    """bytes: of tensors, by rank. writers: by how many ranks tensors were written. inside a row: boxes that cut the last axis."""
    sizes, writers, inside, whole = Counter(), {}, 0, StoredTensors(directory).shapes
    for path in directory.glob("*.safetensors"):
        rank = int(path.stem)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                key, values = name.rpartition("@")[0], file.get_tensor(name)
                sizes[rank] += values.nbytes
                writers.setdefault(key, set()).add(rank)
                inside += values.shape[1] != whole[key][1]
    numbers = {len(ranks) for ranks in writers.values()}
    return {"bytes": [sizes[rank] for rank in range(dist.get_world_size())], "writers": sorted(numbers), "inside a row": inside}


# ------------------------------------------------------------------------------------------------------------------ memory


def memory_main(rank, folder):
    """The most bytes that tensors made by a save or a load of this rank take at once; its own share, its largest tensor."""
    (groups,) = runs.build_layouts({"dp": {}}).values()
    engine = runs.engine(groups, critic=False, dtype=torch.bfloat16, hidden=HIDDEN, num_layers=2)
    engine.save_state(with_optimizer=True)  # creates the moments
    kept = runs.store(Path(folder), keep_last=9)
    steps = iter(range(9))

    def save():
        kept.save(next(steps), {"model": engine}, {}, runs.FACTS)

    def load():
        kept.restore(manifest, {"model": engine}, {})

    save()
    manifest = kept.find_resumable(runs.FACTS)
    found = {"save": peak(save, engine), "load": peak(load, engine)}
    shards._content, usual = lambda boxes: usual([box._replace(values=box.values.clone()) for box in boxes]), shards._content
    kept._files.clear()
    found["save of copies"] = peak(save, engine)
    shards._content = usual
    load_optimizer_into_copies(engine)
    found["load into copies"] = peak(load, engine)
    written = places(Path(folder, f"step-{manifest.step}/models/model"))["bytes"][rank]
    layout = ParallelLayout(dist.get_world_size())
    planned = role_memory(
        runs.arch(hidden=HIDDEN, num_layers=2),
        layout,
        0,
        RoleWork(dtype="bf16", trained=True, micro_batch_tokens=1, num_micro_batches=1),
    )
    return {
        **found,
        "written": written,
        "planned": planned.written,
        "share": sum(tensor.nbytes for tensor in engine._optimizer.tensors()),
        "largest": max(4 * parameter.numel() for parameter in engine.named_parameters().values()),
    }


def peak(action, engine):
    known = [*engine._optimizer.tensors(), *engine.named_parameters().values()]
    with Live(known) as live:
        action()
    return live.peak
