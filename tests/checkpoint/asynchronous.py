"""Cases of `test_asynchronous.py` in its worlds of two ranks. Every case is called on all ranks with its own folder."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.image import GRANULE, SharedBuffer
from megappo.checkpoint.manifest import MANIFEST, fingerprint_file, list_files, read_manifest
from megappo.checkpoint.state import ModelState, ReadGoingOn, StateBox
from megappo.checkpoint.store import SaveFailed
from tests.checkpoint import runs
from tests.checkpoint.runs import differing, message

LAYOUTS = {name: runs.LAYOUTS[name] for name in ("tp2", "pp2", "dp2")}
BF16 = {"dtype": torch.bfloat16, "policy": "dp2", "offload": True}
SMALL = {"num_layers": 2}


def world_main(rank, folder):
    layouts, results = runs.build_layouts(LAYOUTS), {}
    for name, case in CASES.items():
        started = time.monotonic()
        results[name] = case(layouts, Path(folder, name.replace(" ", "-")))
        results[f"{name} seconds"] = time.monotonic() - started
        dist.barrier()
    return results


def begin(run):
    run.store.begin_save(run.step, run.engines, run.components, runs.FACTS)
    return run.store.pending


def held_writer(store):
    """Start the writer process and stop it, so that it reads nothing before `release`."""
    store._writer.start()
    os.kill(store._writer.pid, signal.SIGSTOP)
    return store._writer.pid


def release(pid):
    os.kill(pid, signal.SIGCONT)


def spoil(run):
    """Change every tensor of models and optimizers in place, every component and every generator."""
    for engine in run.engines.values():
        engine.to("device")
        with torch.no_grad():
            for tensor in [*engine.named_parameters().values(), *engine._optimizer.tensors()]:
                tensor.mul_(1.5)  # vocabulary padding stays zero, which is not stored
        engine.offload_idle()
    for component in run.components.values():
        component.advance(-1.0)
    runs.seed_generators(99)


def overlapping(options):
    """Three saves, the second and third of which begin while the one before is in flight; training changes everything at once."""

    def case(layouts, place):
        run = runs.Run(runs.store(place, keep_last=5), layouts, **SMALL, **options)
        wanted, moved, steps = [], [], []
        for _ in range(3):
            run.train(1)
            pid = held_writer(run.store)
            wanted.append(run.digest())
            release(pid)  # of the save before, which this one waits for
            run.store.drain()
            held_writer(run.store)
            pending = begin(run)
            spoil(run)
            moved.append(differing(wanted[-1], run.digest()))
            assert not pending.done()
            steps.append(pending.step)
            release(pid)
        run.store.drain()
        reader = runs.store(place, owner=None)  # which sets no newer checkpoint aside
        again, wrong = runs.Run(reader, layouts, seed=5, **SMALL, **options), []
        for step, digest in zip(steps, wanted):
            reader.restore(reader._verified(step), again.engines, again.components)
            wrong += differing(digest, again.digest())
        run.store.close()
        return {"wrong": wrong, "moved": moved, "steps": steps}

    return case


def late_copy(layouts, place):
    """Training goes on while the state is still to be copied. Whether engines wait for it -> (if `begin_save` did, what the
    checkpoint holds otherwise than the state was at the call).
    """
    take, finish, found = SharedBuffer._take, ReadGoingOn.finish, {}
    for waits in (True, False):
        run = runs.Run(runs.store(place / str(waits)), layouts, **SMALL)
        run.train(1)
        begin(run)  # plans, and waits
        run.train(1)
        wanted = run.digest()
        # Longer than a step of training takes beside other work: the control must have trained before the copy.
        SharedBuffer._take = lambda self, images: (time.sleep(1.5), take(self, images))
        if not waits:
            ReadGoingOn.finish = lambda self: None
        at_once = begin(run).submitted.done()
        run.train(1)
        SharedBuffer._take, ReadGoingOn.finish = take, finish
        run.store.drain()
        again = runs.Run(run.store, layouts, seed=5, **SMALL)
        again.load()
        run.store.close()
        found[waits] = at_once, differing(wanted, again.digest())
    return found


def same_files(layouts, place):
    """An asynchronous save and a synchronous one of the same state: entries of all files that differ; three steps after each."""
    run = runs.Run(runs.store(place / "sync"), layouts, **SMALL)
    run.train(2)
    synchronous = run.save()
    run.store = runs.store(place / "async")
    pending = begin(run)
    run.train(1)
    straight = run.digest()
    while not pending.done():
        time.sleep(0.01)
    asynchronous = run.store.drain()
    assert run.store.pending is None
    first, second = read_manifest(synchronous), read_manifest(asynchronous)
    resumed = []
    for folder in ("sync", "async"):
        again = runs.Run(runs.store(place / folder), layouts, seed=5, **SMALL)
        again.load()
        again.train(1)
        resumed.append(differing(straight, again.digest()))
    run.store.close()
    return {"files": first.files == second.files, "number": len(first.files), "resumed": resumed}


def weights_only(layouts, place):
    run = runs.Run(runs.store(place, save_only_model=True), layouts, **SMALL)
    begin(run)
    saved = run.store.drain()
    fresh = runs.engine(layouts["pp2"], critic=False, seed=5, **SMALL)
    step = run.store.load_weights("policy", fresh)
    run.store.close()
    return step, list_files(saved)


def exchanges(layouts, place):
    """Exchanges with other ranks in three saves of one engine, the second one in the foreground, and one of another engine of the
    same name; how that one's checkpoint differs from it.
    """
    store, found = runs.store(place), []
    one = runs.engine(layouts["tp2"], critic=False, **SMALL)
    for step, engine in enumerate([one, one, one, runs.engine(layouts["tp2"], critic=False, num_layers=4)]):
        save = store.save if step == 1 else store.begin_save
        found.append(exchanges_of(lambda: save(step, {"policy": engine}, {"counter": runs.Counter()}, runs.FACTS)))
        store.drain()
    fresh = runs.engine(layouts["tp2"], critic=False, seed=5, num_layers=4)
    store.load({"policy": fresh}, {"counter": runs.Counter()}, runs.FACTS)
    store.close()
    return found, differing(runs.engine_digest(engine), runs.engine_digest(fresh))


EXCHANGES = ("all_gather_object", "all_gather", "all_reduce", "broadcast", "broadcast_object_list", "barrier", "scatter", "gather")


def exchanges_of(action):
    """Number of calls of torch's collectives."""
    count, usual = [], {name: getattr(dist, name) for name in EXCHANGES}
    for name, function in usual.items():
        setattr(dist, name, lambda *args, _function=function, **kwargs: count.append(None) or _function(*args, **kwargs))
    action()
    for name, function in usual.items():
        setattr(dist, name, function)
    return len(count)


class Boxes:
    """A model on all ranks: key -> (first row, values [rows, cols]) of this rank; its position beside them."""

    def __init__(self, boxes, position):
        self.boxes, self.position, self.host_group, self.released = boxes, position, dist.group.WORLD, 0

    def save_state(self, *, with_optimizer):
        return ModelState(self._described(), {}, self.position)

    def _described(self):
        return [StateBox(key, row, 0, values) for key, (row, values) in self.boxes.items()]

    def release_state(self, read=None):
        self.released += 1
        if read is not None:
            read()

    def boxes_to_load(self, stored, **how):
        return self._described()

    def boxes_loaded(self, position):
        self.position = position


RANK = dist.get_rank


def rows(seed, shape=(6, 4), dtype=torch.float32):
    """This rank's half of the rows of a tensor."""
    whole, half = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype), shape[0] // 2
    return RANK() * half, whole[RANK() * half :][:half].clone()


def turned(seed):
    """Values that do not lie in a row."""
    row, values = rows(seed)
    return row, values.T.contiguous().T


def uneven(seed):
    """Four rows on the first rank, two on the second."""
    whole, first = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)), 4 * RANK()
    return first, whole[first : first + 4].clone()


def changes():
    """(what changed since the save before, boxes, position)."""

    def base(seed, **other):
        return {"a": rows(seed), "b": rows(seed + 1), **other}

    return [
        ("first", base(0), {"step": 9}),
        ("nothing", base(0), {"step": 9}),
        ("tensors of other values", base(10), {"step": 10}),
        ("more digits", base(20), {"step": 10**9}),
        ("not contiguous", base(30, a=turned(30)), {}),
        ("one more", base(40, d=rows(43)), {}),
        ("one less", base(50), {}),
        ("names exchanged", {"b": rows(61), "a": rows(62)}, {}),
        ("another shape of as many values", base(70, a=rows(70, (4, 6))), {}),
        ("another type", base(80, a=rows(80, dtype=torch.bfloat16)), {}),
        ("cut elsewhere", base(90, a=uneven(90)), {}),
        ("and back", base(110), {}),
    ]


def changed_state(layouts, place):
    """change -> (what the checkpoint holds otherwise than the state was at the call, how often the model was released)."""
    found, store = {}, runs.store(place, keep_last=99)
    for step, (change, boxes, position) in enumerate(changes()):
        model = Boxes(boxes, position)
        wanted = {key: values.clone() for key, (_, values) in boxes.items()}
        store.begin_save(step, {"m": model}, {}, runs.FACTS)
        for _, values in boxes.values():
            values.add_(1)
        store.drain()
        reader = Boxes({key: (row, torch.zeros_like(values)) for key, (row, values) in boxes.items()}, {})
        store.restore(store._verified(step), {"m": reader}, {})
        wrong = [key for key, values in wanted.items() if not torch.equal(reader.boxes[key][1], values)]
        found[change] = wrong, reader.position == position, model.released
    store.close()
    return found


def buffers_stay(layouts, place):
    """Descriptors and bytes of this rank's host buffers after each of three saves; the excess of all ranks' over the files, and how
    much of it rounding explains.
    """
    run, seen = runs.Run(runs.store(place, keep_last=9), layouts, **SMALL), []
    for _ in range(3):
        run.train(1)
        begin(run)
        saved = run.store.drain()
        held = list(run.store._buffers.values())
        seen.append((sorted(buffer.descriptor for buffer in held), sum(buffer.nbytes for buffer in held)))
    sizes = [path.stat().st_size for path in saved.rglob("*") if path.is_file() and path.name != MANIFEST]
    run.store.close()
    return seen, sum(runs.gathered(seen[-1][1])) - sum(sizes), GRANULE * sum(runs.gathered(len(held)))


def failed(layouts, place):
    """fault -> message, seconds, entries afterwards, if the earlier checkpoint is untouched; then a save that works."""
    run = runs.Run(runs.store(place), layouts, **SMALL)
    run.train(1)
    run.save()
    before = contents(place / "step-1")
    results = {}
    faults = {"killed": killed, "full disk": full_disk, "no memory": no_memory, "no copy": no_copy, "shorter": shorter}
    for fault, hurt in faults.items():
        run.train(1)
        mend = hurt(run.store)
        started = time.monotonic()
        text = message(SaveFailed, lambda: (begin(run), spoil(run), run.store.drain()))
        seconds = time.monotonic() - started
        mend()
        entries = sorted(path.name for path in place.iterdir())
        results[fault] = (text, seconds, entries, before == contents(place / "step-1"), run.store.drain())
        dist.barrier()
    wanted = run.digest()
    begin(run)
    spoil(run)
    saved = run.store.drain()
    again = runs.Run(run.store, layouts, seed=5, **SMALL)
    again.load()
    wrong = differing(wanted, again.digest())
    run.train(1)
    run.store._directory.retain = unreadable
    begin(run)
    kept = run.store.drain()
    run.store.close()
    return {**results, "afterwards": (saved.name, wrong), "old ones stay": (saved.name, kept.name)}


def unreadable(*args, **kwargs):
    raise PermissionError("[Errno 13] Permission denied: the checkpoints' directory")


def contents(directory):
    return {name: fingerprint_file(directory / name) for name in [*list_files(directory), MANIFEST]}


def killed(store):
    if dist.get_rank() == 1:
        submit = store._writer.submit

        def kill_it(*args):
            os.kill(store._writer.pid, signal.SIGSTOP)
            submit(*args)
            os.kill(store._writer.pid, signal.SIGKILL)
            del store._writer.submit

        store._writer.submit = kill_it
    return lambda: None


def full_disk(store):
    """The disk of rank 1's writer is full after 100 kB of any file."""
    if dist.get_rank() != 1:
        return lambda: None
    store._writer.start()
    pid, free = store._writer.pid, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    return lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, free)


def no_memory(store):
    """Rank 0 cannot have a buffer for its snapshot."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        store._buffers.clear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def no_copy(store):
    """Rank 1 cannot read what it is to copy."""
    take = SharedBuffer._take

    def fail(buffer, images):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def mend():
        SharedBuffer._take = take

    if dist.get_rank() == 1:
        SharedBuffer._take = fail
    return mend


def shorter(store):
    """A file of rank 1 has lost its end when it is to be committed: on another node's disk, or by another hand."""
    if dist.get_rank() != 1:
        return lambda: None
    result = store._writer.result

    def cut(place=store._directory.path):
        entries = result()
        (shard,) = [
            path for path in place.rglob("00001.safetensors") if path.parts[-4].startswith(".tmp-") and "policy" in path.parts
        ]
        os.truncate(shard, 10)
        return entries

    def mend():
        del store._writer.result

    store._writer.result = cut
    return mend


CASES = {
    "overlapping": overlapping({}),
    "overlapping bf16, offloaded": overlapping(BF16),
    "late copy": late_copy,
    "same files": same_files,
    "weights only": weights_only,
    "exchanges": exchanges,
    "changed state": changed_state,
    "buffers stay": buffers_stay,
    "failed": failed,
}


# ------------------------------------------------------------------------------------------------------------------ kills

MOMENTS = ("before the first byte", "in the middle of the files", "written", "before the rename", "after the rename")


def killed_main(rank, folder, moment):
    """Save step 1, then kill all ranks at a moment of the asynchronous save of step 2. Never returns."""
    layouts, place = runs.build_layouts({"dp2": {}}), Path(folder)
    store, engine = runs.store(place), runs.engine(layouts["dp2"], critic=False, hidden=256, **SMALL)
    store.begin_save(1, {"policy": engine}, {}, runs.FACTS)
    store.drain()
    Path(f"{folder}.writer{rank}").write_text(str(store._writer.pid))
    if moment == "before the first byte":
        held_writer(store)
    store.begin_save(2, {"policy": engine}, {}, runs.FACTS)
    pending = store.pending
    if moment == "in the middle of the files":
        while not any(path.is_file() for path in pending.place.rglob("*")):
            pass
    elif moment != "before the first byte":
        pending.writer.is_done(timeout_s=None)
    if "rename" in moment:
        rename = os.rename

        def die(source, target):
            if moment == "after the rename":
                rename(source, target)
            os.kill(os.getpid(), signal.SIGKILL)

        os.rename = die  # rank 0 comes there
    try:
        store.drain() if "rename" in moment else dist.barrier()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def survivors_main(rank, folders):
    """Step that each folder's newest valid checkpoint is loaded from, and what is left beside it."""
    layouts, found = runs.build_layouts({"dp2": {}}), {}
    for folder in folders:
        store, engine = runs.store(folder), runs.engine(layouts["dp2"], critic=False, hidden=256, seed=5, **SMALL)
        wanted = runs.engine_digest(runs.engine(layouts["dp2"], critic=False, hidden=256, **SMALL))["model"]
        step = store.load({"policy": engine}, {}, runs.FACTS)
        intact = runs.engine_digest(engine)["model"] == wanted
        store.save(3, {"policy": engine}, {}, runs.FACTS)
        found[folder] = (step, intact, sorted(CheckpointDirectory(Path(folder)).steps()), sorted(os.listdir(folder)))
    return found
