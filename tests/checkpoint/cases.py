"""Cases that the tests of the store run inside their world. Every case is called on all ranks with its own folder and returns
plain data.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import random
import resource
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from megappo.checkpoint import directory as directory_module
from megappo.checkpoint import store as store_module
from megappo.checkpoint import verification
from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import (
    KEY_VARIABLE,
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    RefusedCheckpoint,
    fingerprint_file,
    list_files,
    read_manifest,
    write_manifest,
)
from megappo.checkpoint.store import SaveFailed
from tests.checkpoint import resharding, runs
from tests.checkpoint.runs import differing, message

DAMAGES = ("bit flip", "truncate", "zero half", "delete")
FILES = (
    "models/policy/00000.safetensors",
    "models/policy/00001.safetensors",
    "models/policy/position.json",
    "rng-00001.safetensors",
    "state.json",
    MANIFEST,
)
# file of step 2, rank on which it fails, error
IO_ERRORS = (
    (MANIFEST, 0, errno.EACCES),
    ("state.json", 0, errno.EIO),
    ("state.json", 1, errno.EIO),
    ("00001.safetensors", 0, errno.ESTALE),
    ("00001.safetensors", 1, errno.ESTALE),
    ("position.json", 0, errno.ENOENT),
    ("position.json", 1, errno.ENOENT),
)
VARIANTS = {
    "fp32": {},
    "fp32 plain optimizer": {"distributed": False},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 plain optimizer, offloaded": {"dtype": torch.bfloat16, "distributed": False, "offload": True},
    "bf16 tied, offloaded": {"dtype": torch.bfloat16, "tied": True, "offload": True},
    "fp32 experts": {"policy": "ep2", "critic": "pp2", "experts": True},
    "bf16 interleaved": {"policy": "pp2 vpp2", "critic": "cp2", "dtype": torch.bfloat16},
}


def world_main(rank, folder):
    layouts = runs.build_layouts()
    results = {}
    for name, case in CASES.items():
        place = Path(folder, name.replace(" ", "-"))
        started = time.monotonic()
        results[name] = case(layouts, place)
        results[f"{name} seconds"] = time.monotonic() - started
        dist.barrier()
    return results


# ------------------------------------------------------------------------------------------------------------------ resume


def resume(options):
    def case(layouts, place):
        straight = runs.Run(runs.store(place), layouts, **options)
        straight.train(3)
        started = time.process_time()
        straight.save()
        seconds = time.process_time() - started
        at_three = straight.digest()
        straight.train(3)
        at_six = straight.digest()
        resumed = runs.Run(runs.store(place), layouts, seed=5, **options)
        fresh = resumed.digest()
        step = resumed.load()
        restored = resumed.digest()
        resumed.train(3)
        return {
            "step": step,
            "after load": differing(at_three, restored),
            "after training": differing(at_six, resumed.digest()),
            "before load": differing(at_three, fresh),
            "moved": differing(at_three, at_six),
            "save seconds": seconds,
        }

    return case


def resume_without(part):
    """Negative control: the same comparison with one part of the restoration left out."""

    def case(layouts, place):
        straight = runs.Run(runs.store(place), layouts)
        straight.train(3)
        straight.save()
        straight.train(3)
        resumed = runs.Run(runs.store(place), layouts, seed=5)
        if part == "rng":
            resumed.store._restore_rng = lambda source, manifest: None
        else:
            for engine in resumed.engines.values():
                load_optimizer_into_copies(engine)
        resumed.load()
        resumed.train(3)
        return differing(straight.digest(), resumed.digest())

    return case


def load_optimizer_into_copies(engine):
    """The reader fills what is thrown away."""
    describe = engine.boxes_to_load

    def boxes(*args, **how):
        return [
            box._replace(values=box.values.clone()) if box.key.startswith("optimizer.") else box for box in describe(*args, **how)
        ]

    engine.boxes_to_load = boxes


def resume_before_the_first_update(layouts, place):
    """A critic warm-up: the policy's optimizer has no moments yet when it is saved."""
    straight = runs.Run(runs.store(place), layouts)
    straight.save()
    straight.train(2)
    resumed = runs.Run(runs.store(place), layouts, seed=5)
    resumed.load()
    resumed.train(2)
    return differing(straight.digest(), resumed.digest())


def generators(layouts, place):
    """Generators in the middle of a pair of normal draws, and Megatron's named states."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draw():
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(3).tolist()
        return [random.gauss(0, 1), random.random(), *numpy.random.normal(size=3).tolist(), *torch.randn(3).tolist(), *tracked]

    run = runs.Run(runs.store(place), layouts)
    random.gauss(0, 1)
    numpy.random.normal()
    run.save()
    first = draw()
    run.load()
    return first, draw()


# ------------------------------------------------------------------------------------------------------------------ refusals


def other_architecture(layouts, place):
    """Symmetric on all ranks: both get the ValueError."""
    kept = runs.store(place)
    kept.save(1, {"model": runs.engine(layouts["tp2"], critic=False, num_layers=2)}, {}, runs.FACTS)
    return message(ValueError, lambda: kept.load({"model": runs.engine(layouts["tp2"], critic=False)}, {}, runs.FACTS))


# ------------------------------------------------------------------------------------------------------------------ damage


class Policy:
    """One engine and one component: enough for the cases about files."""

    def __init__(self, layouts, place, seed=0, **options):
        self.store = runs.store(place, **options)
        self.engines = {"policy": runs.engine(layouts["tp2"], critic=False, seed=seed)}
        self.components = {"trainer": runs.Counter()}

    def save(self, step, facts=runs.FACTS):
        self.components["trainer"].count = step
        with torch.no_grad():
            for parameter in self.engines["policy"].named_parameters().values():
                parameter.mul_(1 + step / 8)  # vocabulary padding stays zero, which is not stored
        return self.store.save(step, self.engines, self.components, facts)

    def load(self, facts=runs.FACTS):
        return self.store.load(self.engines, self.components, facts)

    def at(self, place, **options):
        self.store = runs.store(place, **options)
        return self

    def load_weights(self, step=None):
        return self.store.load_weights("policy", self.engines["policy"], step)


class Collector(logging.Handler):
    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def emit(self, record):
        self.texts.append(record.getMessage())


def newest_step(place):
    return CheckpointDirectory(place).newest().step


def on_one_rank(action):
    dist.barrier()  # the others have looked at what the action changes
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def damage(path, how):
    if how == "delete":
        return path.unlink()
    content = bytearray(path.read_bytes())
    if how == "bit flip":
        content[len(content) // 2] ^= 1
    elif how == "truncate":
        del content[len(content) * 2 // 3 :]
    else:
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)


def corruption(layouts, place):
    """(file, damage) -> what a load did where step 2 is damaged and step 1 is not"""
    policy = Policy(layouts, place / "pristine")
    policy.save(1)
    older = runs.engine_digest(policy.engines["policy"])
    policy.save(2)
    opened, results, warnings = [], {}, []
    verification.logger.addHandler(collector := Collector(warnings))
    unwatched = store_module.load_engine

    def watched(engine, directory, **how):
        opened.append(directory.parts[-3])
        return unwatched(engine, directory, **how)

    store_module.load_engine = watched
    for file in FILES:
        for how in DAMAGES:
            scratch = place / f"{file.replace('/', '-')} {how}"
            on_one_rank(lambda: shutil.copytree(place / "pristine", scratch))
            on_one_rank(lambda: damage(scratch / "step-2" / file, how))
            opened.clear()
            warnings.clear()
            step = policy.at(scratch).load()
            digest = runs.engine_digest(policy.engines["policy"])
            results[file, how] = {
                "step": step,
                "differs": differing(older, digest),
                "set aside": (scratch / "bad-step-2").is_dir(),
                "latest": (scratch / "LATEST").read_text(),
                "opened": sorted(set(opened)),
                "warnings": list(warnings),
            }
            on_one_rank(lambda: shutil.rmtree(scratch))
    store_module.load_engine = unwatched
    verification.logger.removeHandler(collector)
    return results


def verified_meanwhile(layouts, place):
    """A flipped bit in the newest of two checkpoints, found while something else goes on: what a resume does with it."""
    policy = Policy(layouts, place)
    policy.save(1)
    older = runs.engine_digest(policy.engines["policy"])
    policy.save(2)
    on_one_rank(lambda: flip_a_weight(place / "step-2/models/policy/00001.safetensors"))
    before = runs.engine_digest(policy.engines["policy"])
    found = {}
    for owner in (None, "a1b2"):
        run = policy.at(place, owner=owner)
        manifest = run.store.find_resumable(runs.FACTS, wait=False)
        told = message(DamagedCheckpoint, lambda: run.store.restore(manifest, run.engines, run.components))
        untouched = differing(before, runs.engine_digest(policy.engines["policy"]))
        dist.barrier()
        found[owner] = manifest.step, told, untouched, (place / "bad-step-2").is_dir()
        dist.barrier()
    step = run.load()
    return {**found, "then": (step, differing(older, runs.engine_digest(policy.engines["policy"])))}


def corruption_without_hashes(layouts, place):
    """Negative control: with sizes only, a flipped bit in a weight is loaded without a word."""
    policy = Policy(layouts, place)
    policy.save(1)
    policy.save(2)
    before = runs.engine_digest(policy.engines["policy"])
    on_one_rank(lambda: flip_a_weight(place / "step-2/models/policy/00000.safetensors"))
    checked = verification.find_wrong_content
    verification.find_wrong_content = lambda *_: None
    step = policy.load()
    verification.find_wrong_content = checked
    return step, differing(before, runs.engine_digest(policy.engines["policy"]))


def flip_a_weight(path):
    """Change one bit of the largest tensor of a safetensors file: the middle of the file may be its header."""
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:begin]).values()
    first, last = max((entry["data_offsets"] for entry in entries), key=lambda one: one[1] - one[0])
    content[begin + (first + last) // 2] ^= 1
    path.write_bytes(content)


def none_valid(layouts, place):
    policy = Policy(layouts, place)
    empty = message(ValueError, policy.load)
    policy.save(1)
    on_one_rank(lambda: damage(place / "step-1/state.json", "truncate"))
    return empty, message(ValueError, policy.load)


def leftovers(layouts, place):
    """A process was killed while it wrote step 2."""
    policy = Policy(layouts, place)
    policy.save(1)
    left = place / ".tmp-step-2.deadbeef"
    on_one_rank(lambda: shutil.copytree(place / "step-1", left))
    latest = newest_step(place)
    step = policy.load()
    after_load = left.exists()
    dist.barrier()
    on_one_rank(lambda: shutil.copytree(place / "step-1", left))
    policy.save(2)
    return {"latest": latest, "step": step, "after load": after_load, "entries": sorted(path.name for path in place.iterdir())}


# ------------------------------------------------------------------------------------------------------- I/O errors, readers


def names_in(place):
    return sorted(path.name for path in place.iterdir())


@contextmanager
def unreadable_on(rank, name, number=errno.EACCES):
    """Opening, and for ENOENT also looking at, a file of this name fails on one rank, as the kernel would report it."""

    def failing(original):
        def call(self, *args, **kwargs):
            if dist.get_rank() == rank and self.name == name and "step-2" in self.parts:
                raise OSError(number, os.strerror(number), str(self))
            return original(self, *args, **kwargs)

        return call

    usual, sees = (Path.open, Path.lstat), os.path.lexists
    Path.open = failing(Path.open)
    if number == errno.ENOENT:
        Path.lstat = failing(Path.lstat)
        os.path.lexists = lambda path: sees(path) and not (dist.get_rank() == rank and str(path).endswith(name))
    try:
        yield
    finally:
        Path.open, Path.lstat = usual
        os.path.lexists = sees


def io_errors(layouts, place):
    """(file, rank, error) -> what a resume and a reader said before anything is loaded; nothing may change"""
    policy = Policy(layouts, place)
    policy.save(1), policy.save(2)
    before, results = names_in(place), {}
    for name, rank, number in IO_ERRORS:
        with unreadable_on(rank, name, number):
            resumed = message(RefusedCheckpoint, lambda: policy.store.find_resumable(runs.FACTS))
            read = message(RefusedCheckpoint, lambda: verification.newest_verified(CheckpointDirectory(place)))
        results[name, rank, number] = resumed, read, names_in(place) == before
        dist.barrier()
    results["afterwards"] = policy.load()
    return results


def readers(layouts, place):
    """A reader beside a run that is writing, where the newest checkpoint is damaged."""
    policy = Policy(layouts, place)
    policy.save(1), policy.save(2)
    on_one_rank(lambda: damage(place / "step-2/state.json", "truncate"))
    on_one_rank(lambda: shutil.copytree(place / "step-1", place / ".tmp-step-3.f00d"))
    before = names_in(place)
    dist.barrier()
    reader = policy.at(place, owner=None)
    found = {
        "newest": reader.load_weights(),
        "damaged": message(DamagedCheckpoint, lambda: reader.load_weights(2)),
        "absent": message(ValueError, lambda: reader.load_weights(7)),
        "unchanged": names_in(place) == before,
    }
    dist.barrier()
    return found


def going_on_from_an_older_one(layouts, place):
    """With skip, then a refused resume, then one that works; saving the same steps again."""
    policy = Policy(layouts, place)
    for step in (1, 2, 3):
        policy.save(step)
    before = names_in(place)
    refused = message(ValueError, lambda: policy.store.find_resumable(runs.FACTS | {"tokenizer": "other"}, skip=(3,)))
    kept = names_in(place) == before
    none_left = message(ValueError, lambda: policy.store.find_resumable(runs.FACTS, skip=(1, 2, 3)))
    manifest = policy.store.find_resumable(runs.FACTS, skip=(3, 2))
    chosen = names_in(place) == before
    dist.barrier()
    step = policy.store.restore(manifest, policy.engines, policy.components)
    dist.barrier()
    resumed = names_in(place)
    latest = (place / "LATEST").read_text()
    dist.barrier()
    policy.save(2), policy.save(3)
    return {
        "step": step,
        "refused": (refused, kept),
        "none left": none_left,
        "chosen": chosen,
        "resumed": resumed,
        "latest": latest,
        "entries": names_in(place),
    }


def undeletable(layouts, place):
    """An old checkpoint, or a leftover, of which a file cannot be removed."""
    policy = Policy(layouts, place, keep_last=1)
    policy.save(1)
    stuck = []
    usual = os.unlink

    def unlink(path, *args, **kwargs):
        if Path(path).name == "position.json":
            stuck.append(path)
            raise OSError(errno.EPERM, "Operation not permitted", str(path))
        usual(path, *args, **kwargs)

    os.unlink = unlink
    warnings = []
    directory_module.logger.addHandler(collector := Collector(warnings))
    try:
        policy.save(2), policy.save(3)
        step = policy.load()
    finally:
        os.unlink = usual
        directory_module.logger.removeHandler(collector)
    dist.barrier()
    entries = names_in(place)
    dist.barrier()
    policy.save(4)
    return {"step": step, "stuck": len(stuck), "warnings": warnings, "entries": entries, "afterwards": names_in(place)}


def signed(layouts, place):
    """S3: saved and loaded with a key, with another one, and without."""
    policy, said = Policy(layouts, place), {}
    os.environ[KEY_VARIABLE] = "correct horse"
    policy.save(1)
    said["same key"] = policy.load()
    for name, key in (("another key", "battery staple"), ("no key", None)):
        os.environ.pop(KEY_VARIABLE)
        if key is not None:
            os.environ[KEY_VARIABLE] = key
        said[name] = message(RefusedCheckpoint, policy.load)
        said[f"{name} entries"] = names_in(place)
    return said


# ------------------------------------------------------------------------------------------------------------------ hostile


class Attack:
    """Unpickled, it creates a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def hostile(layouts, place):
    """kind -> (message of the refusal, what the attack made). The manifest is rewritten to match: whoever writes files can
    do that.
    """
    policy = Policy(layouts, place / "pristine")
    policy.save(1)
    results = {}
    for kind, write in HOSTILE.items():
        scratch, marker = place / kind, place / f"{kind} was run"
        on_one_rank(lambda: shutil.copytree(place / "pristine", scratch))
        on_one_rank(lambda: write(scratch / "step-1/models/policy", marker))
        on_one_rank(lambda: rewrite_manifest(scratch / "step-1"))
        results[kind] = (message(ValueError, policy.at(scratch).load), marker.exists())
        dist.barrier()
    return results


def hostile_shard(directory, marker):
    torch.save({"lm_head.weight": Attack(marker)}, directory / "00000.safetensors")


def hostile_position(directory, marker):
    (directory / "position.json").write_bytes(pickle.dumps(Attack(marker)))


def hostile_header(directory, marker):
    """An entry that lies outside of the file."""
    header = json.dumps({"a@0,0": {"dtype": "F32", "shape": [1 << 40, 1], "data_offsets": [0, 1 << 42]}}).encode()
    (directory / "00001.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


HOSTILE = {"shard": hostile_shard, "position": hostile_position, "header": hostile_header}


def rewrite_manifest(directory):
    manifest = read_manifest(directory)
    files = {name: fingerprint_file(directory / name) for name in list_files(directory)}
    write_manifest(directory, Manifest(manifest.step, manifest.world_size, manifest.model_only, manifest.facts, files))


# ------------------------------------------------------------------------------------------------------------------ failed saves


def failed_saves(layouts, place):
    """fault -> (message, entries afterwards, the earlier checkpoint is untouched)"""
    policy = Policy(layouts, place)
    policy.save(1)
    before = {name: fingerprint_file(place / "step-1" / name) for name in [*list_files(place / "step-1"), MANIFEST]}
    results = {}
    for fault, broken in {
        "shard on rank 1": lambda: limited(1, 100_000),
        "all of rank 0": lambda: limited(0, 500),
        "state is not plain": lambda: spoiled(policy, {"tensor": torch.zeros(1)}),
        "state is not finite": lambda: spoiled(policy, {"kl": float("nan")}),
        "state has tuples": lambda: spoiled(policy, {"pair": (1, 2)}),
        "state differs by rank": lambda: spoiled(policy, {"rank": dist.get_rank()}),
    }.items():
        repair = broken()
        text = message(SaveFailed, lambda: policy.save(2))
        repair()
        after = {name: fingerprint_file(place / "step-1" / name) for name in before}
        results[fault] = (text, sorted(path.name for path in place.iterdir()), before == after)
        dist.barrier()
    results["exists"] = message(SaveFailed, lambda: policy.save(1))
    policy.save(3)
    results["afterwards"] = policy.load()
    return results


def limited(rank, size):
    """The disk of one rank is full after `size` bytes of any file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def spoiled(policy, state):
    policy.components["trainer"].state_dict = lambda: state

    def repair():
        del policy.components["trainer"].state_dict

    return repair


def only_model(layouts, place):
    policy = Policy(layouts, place / "weights", save_only_model=True)
    saved = policy.save(1)
    whole = Policy(layouts, place / "all").save(1)
    return {
        "bytes": (read_manifest(saved).total_bytes, read_manifest(whole).total_bytes),
        "files": list_files(saved),
        "message": message(ValueError, policy.load),
        "latest": newest_step(place / "weights"),
    }


def facts(layouts, place):
    policy = Policy(layouts, place)
    policy.save(1)
    moved = {**runs.FACTS, "reference": {"path": "elsewhere", "sha256": "abc"}, "config": "changed", "layouts": {}}
    return {
        "moved": policy.load(moved),
        "reference": message(ValueError, lambda: policy.load({**runs.FACTS, "reference": {"path": "a/model", "sha256": "xyz"}})),
        "tokenizer": message(ValueError, lambda: policy.load({**runs.FACTS, "tokenizer": "xyz"})),
        "components": message(ValueError, lambda: policy.store.load(policy.engines, {}, runs.FACTS)),
        "saved": json.loads((place / "step-1" / MANIFEST).read_text())["facts"],
    }


def retention(layouts, place):
    policy = Policy(layouts, place, keep_last=2)
    seen = []
    for step in (8, 9, 10, 11):
        policy.save(step)
        seen.append(sorted(path.name for path in place.iterdir()))
        dist.barrier()
    return seen, (place / "LATEST").read_text()


CASES = {
    **{f"resume {name}": resume(options) for name, options in VARIANTS.items()},
    "resume without optimizer": resume_without("optimizer"),
    "resume without rng": resume_without("rng"),
    "resume before the first update": resume_before_the_first_update,
    "generators": generators,
    **resharding.CASES,
    "other architecture": other_architecture,
    "corruption": corruption,
    "corruption without hashes": corruption_without_hashes,
    "verified meanwhile": verified_meanwhile,
    "none valid": none_valid,
    "leftovers": leftovers,
    "I/O errors": io_errors,
    "readers": readers,
    "going on from an older one": going_on_from_an_older_one,
    "undeletable": undeletable,
    "signed": signed,
    "hostile": hostile,
    "failed saves": failed_saves,
    "only model": only_model,
    "facts": facts,
    "retention": retention,
}
