"""The process behind `world.run_world`: imports once, forks the ranks, runs the scenarios in each. Runs in the CUDA environment.

python -m tests.host_cuda.drive FOLDER WORLD_SIZE [MODULE...]
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import time
import traceback
from pathlib import Path

from megappo.runtime.libraries import freeze_imports, quiet_libraries


def rank_main(rank: int, world_size: int, folder: Path) -> None:
    """All scenarios on this rank. One that fails ends the world, unless all ranks fail alike: they could not meet again."""
    import torch

    from megappo.parallel.device import start_distributed

    torch.set_num_threads(1)
    # torch forbids CUDA after a fork once devices were counted, for the driver's sake. There is no driver.
    torch.cuda._is_in_bad_fork = lambda: False
    start_distributed(torch.device("cuda", rank))
    results = {}
    for name, function, args in pickle.loads(folder.joinpath("scenarios").read_bytes()):
        module, _, attribute = function.partition(":")
        began = time.monotonic()
        try:
            results[name] = getattr(importlib.import_module(module), attribute)(rank, *args), None
        except Exception:
            results[name] = None, traceback.format_exc()
            print(f"rank {rank}, {name}:\n{traceback.format_exc()}", flush=True)
        print(f"rank {rank}: {name} took {time.monotonic() - began:.1f} s", flush=True)
    folder.joinpath(f"result{rank}").write_bytes(pickle.dumps(results))
    torch.distributed.destroy_process_group()


def main() -> None:
    folder, world_size = Path(sys.argv[1]), int(sys.argv[2])
    quiet_libraries()
    for module in sys.argv[3:]:
        importlib.import_module(module)
    freeze_imports()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    ranks = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            status = 1
            try:
                rank_main(rank, world_size, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        ranks.append(child)
    sys.exit(watch(ranks))


def watch(ranks: list[int]) -> int:
    """0 once all ranks are done; at the first that fails, the others have ten seconds."""
    failed, deadline = 0, float("inf")
    while ranks:
        for child in list(ranks):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                ranks.remove(child)
                if status and not failed:
                    failed, deadline = 1, time.monotonic() + 10
        if time.monotonic() > deadline:
            for child in ranks:
                os.kill(child, 9)
        time.sleep(0.05)
    return failed


if __name__ == "__main__":
    main()
