"""The two layer implementations hold the same parameters under the same names and compute the same function. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.models.checkpoints import example_sequences, write_checkpoint
from tests.worlds import spawn_world

pytestmark = pytest.mark.gpu
CASES = ("llama", "qwen2_tied", "qwen3", "ministral3_tied")
# bf16 has 8 bits: hidden states of order 1 through two layers in another order of operations.
TOLERANCE = 0.06


def both(rank: int, path: str) -> dict[str, dict]:
    """implementation -> {"shapes", "hidden"} of a policy loaded from `path`."""
    from megappo.data.packing import pack
    from megappo.models.build import build_model
    from megappo.models.hf_config import read_arch
    from megappo.models.hf_import import load_pretrained
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    torch.cuda.set_device(0)
    groups, arch = build_groups(ParallelLayout(1)), read_arch(path)
    batch = pack([s.tolist() for s in example_sequences()], device="cuda")
    results = {}
    for implementation in ("local", "transformer_engine"):
        (model,) = build_model(arch, groups, dtype=torch.bfloat16, implementation=implementation)
        load_pretrained([model], arch, groups, path)
        with torch.no_grad():
            hidden = model(batch.tokens, batch.cu_seqlens)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        results[implementation] = {"shapes": shapes, "hidden": hidden.float().cpu()}
    return results


@pytest.mark.parametrize("case", CASES)
def test_layers_of_both_libraries_are_interchangeable(tmp_path, case: str) -> None:
    write_checkpoint(tmp_path / case, case)
    (results,) = spawn_world(both, 1, str(tmp_path / case))
    local, fused = results["local"], results["transformer_engine"]
    assert local["shapes"] == fused["shapes"]
    scale = local["hidden"].abs().max()
    assert (local["hidden"] - fused["hidden"]).abs().max() < TOLERANCE * scale
