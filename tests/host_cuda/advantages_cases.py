"""Stage 5 on the host and on the device, for what the runs of `ppo_runs.py` leave out."""

from __future__ import annotations

from typing import Any

import torch

LENGTHS = (7, 5, 9, 6, 8, 4)
PREVIOUS, GROUP = (-1, 0, -1, 2, 3, -1), (0, 0, 0, 1, 1, 1)
CASES: dict[str, dict[str, Any]] = {
    "chains": {},
    "turns": {"estimator": {"type": "gae", "level": "turn"}},
    "the last value": {"bootstrap_truncated": "last"},
    "V-trace": {"estimator": {"type": "vtrace", "rho_bar": 1.5, "c_bar": 0.8}},
    "whole sequences": {"importance_sampling": {"type": "tis", "level": "sequence"}},
    "groups": {"estimator": {"type": "grpo"}},
}


def both(rank: int) -> dict[str, tuple[float, int]]:
    """Case -> (largest difference of a field or metric, number of fields, all on the device)."""
    from megappo.config.schema import AlgorithmConfig
    from megappo.ops import dispatch
    from megappo.trainer.advantages import add_advantages

    found = {}
    with dispatch.using("reference"):
        for name, changes in CASES.items():
            algorithm, experience = AlgorithmConfig(**changes), _experience(grouped=name == "groups", chained=name == "chains")
            score = torch.arange(experience.batch.num_sequences) * 0.5 + rank
            on_host = add_advantages(experience, score, 0.1, algorithm)
            there = add_advantages(experience.to(torch.device("cuda", rank)), score, 0.1, algorithm)
            fields = there.experience.batch.token_fields
            assert all(x.is_cuda for x in fields.values()), name
            differences = [
                (x.double() - fields[field].cpu().double()).abs().amax()
                for field, x in on_host.experience.batch.token_fields.items()
            ]
            differences += [torch.tensor(abs(there.metrics[metric] - x)) for metric, x in on_host.metrics.items()]
            found[name] = float(torch.stack([x.double() for x in differences]).max()), len(fields)
    return found


def _experience(*, grouped: bool, chained: bool) -> Any:
    from megappo.data.packing import PackedBatch, cu_seqlens_of
    from megappo.trainer.experience.experience import Experience

    drawn, total = torch.Generator().manual_seed(1), sum(LENGTHS)
    names = ["logprob", "ref_logprob", "entropy", "rollout_logprob", *([] if grouped else ["value", "value.b"])]
    fields = {name: torch.randn(total, generator=drawn) for name in names}
    fields["response_mask"] = torch.rand(total, generator=drawn) > 0.4
    of_sequences = {"truncated": torch.tensor([1, 0, 1, 0, 0, 1]).bool()}
    of_sequences |= {name: torch.randn(len(LENGTHS), generator=drawn) for name in ("bootstrap", "bootstrap.b")}
    of_sequences |= {"group": torch.tensor(GROUP, dtype=torch.int32)} if grouped else {}
    of_sequences |= {"previous": torch.tensor(PREVIOUS, dtype=torch.int32)} if chained else {}
    return Experience.of_whole(PackedBatch(torch.arange(total), cu_seqlens_of(list(LENGTHS)), fields, of_sequences))
