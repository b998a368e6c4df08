import pytest
import torch

from tests.models.checkpoints import CASES, reference_logits, write_checkpoint
from tests.models.worlds import logits_errors
from tests.worlds import spawn_world

LAYOUTS = {1: [(1, 1, False)], 2: [(2, 1, False), (2, 1, True), (1, 2, False)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in CASES:
        model = write_checkpoint(folder / case, case)
        torch.save(reference_logits(model), folder / f"{case}.pt")
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
def test_logits_equal_transformers(folder, world_size):
    results = spawn_world(logits_errors, world_size, str(folder), list(CASES), LAYOUTS[world_size])
    errors = {key: error for result in results for key, error in result.items()}
    assert len(errors) == len(CASES) * len(LAYOUTS[world_size])
    print({k: f"{v:.1e}" for k, v in errors.items()})
    assert max(errors.values()) < 1e-4, errors
