"""Program of one probing rank: `python -m megappo.commands.tune.probe_rank FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megappo.runtime.libraries import quiet_libraries
from megappo.telemetry.console import keep_console


def main() -> None:
    keep_console()
    quiet_libraries()  # before Megatron-core is imported
    import torch.distributed as dist

    from megappo.commands.tune.probe import measure_rates
    from megappo.parallel.device import select_device, start_distributed
    from megappo.trainer.kernel_selection import choose_kernels

    device = select_device("auto")
    start_distributed(device)
    choose_kernels("auto", device)
    rates = measure_rates(device, sys.argv[1])
    if dist.get_rank() == 0:
        Path(sys.argv[1], "rates.json").write_text(json.dumps(rates), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
