"""Program of one rank: trials of the tuner by processor time, which other work on the machine does not lengthen.

`python -m benchmarks.harness.processor_trials FOLDER NAME...`, beside which `measure` starts the ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megappo.commands.tune.trials import Measured, Trial
from megappo.runtime.libraries import quiet_libraries

ROOT = Path(__file__).resolve().parents[2]


def measure(folder: Path, trials: Mapping[str, Trial], num_ranks: int) -> dict[str, Measured]:
    """Processor seconds of the trials, of the rank with the most. RuntimeError if a rank fails."""
    from megappo.commands.launch.local import start_ranks
    from megappo.commands.tune.trials import read_outcome, write_trial

    folder.mkdir(parents=True, exist_ok=True)
    for name, trial in trials.items():
        write_trial(folder, name, trial)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    code = start_ranks(num_ranks, [str(folder), *trials], module=__name__)
    if code != 0:
        raise RuntimeError(f"a rank ended with exit code {code}; what it said is above")
    found = {name: read_outcome(folder, name) for name in trials}
    return {name: one for name, one in found.items() if isinstance(one, Measured)}


def main(folder: Path, names: list[str]) -> None:
    quiet_libraries()  # before Megatron-core is imported
    import torch
    import torch.distributed as dist

    from megappo.commands.tune.trial import TIMEOUTS, run_trial
    from megappo.commands.tune.trials import read_trial, write_outcome
    from megappo.parallel.device import select_device, start_distributed
    from megappo.trainer.kernel_selection import choose_kernels

    device = select_device("cpu")
    start_distributed(device, TIMEOUTS)
    choose_kernels("auto", device)
    for name in names:
        own = run_trial(read_trial(folder, name), device, clock=time.process_time)
        most = torch.tensor([own.forward_s, own.update_s or 0.0])
        trains = torch.tensor(int(own.update_s is not None))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(trains, op=dist.ReduceOp.MAX)
        forward_s, update_s = most.tolist()
        if dist.get_rank() == 0:
            write_outcome(folder, name, Measured(forward_s=forward_s, update_s=update_s if trains else None))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
