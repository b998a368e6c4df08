"""Two spawned worlds serve all tests of models/: importing Megatron in each rank costs more than the cases that run in it."""

import pytest
import torch

from tests.models import worlds
from tests.models.cases import (
    ALTERED,
    BF16_CASES,
    BF16_LAYOUTS,
    DENSE_JOBS,
    DENSE_LAYOUT,
    EXPORT_LAYOUTS,
    FP8_CASES,
    GRADIENT_JOBS,
    LEARNING_RATE,
    LOGIT_LAYOUTS,
    OF_ALL_CASES,
    RECOMPUTE_JOBS,
    SHAPE_CASES,
    SHAPE_LAYOUTS,
)
from tests.models.checkpoints import CASES, COMPOSITE, example_sequences, reference_logits, write_checkpoint
from tests.models.fp8_checkpoints import quantise_checkpoint
from tests.worlds import spawn_world


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folder with every case, a reward model, the logits of transformers and the weights of the test loss."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in (*CASES, COMPOSITE):
        torch.save(reference_logits(write_checkpoint(folder / case, case)), folder / f"{case}.pt")
        (folder / case / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        (folder / case / "modeling_custom.py").write_text("raise RuntimeError")
    for name, (case, block, dtype) in FP8_CASES.items():
        write_checkpoint(folder / name, case)
        torch.save(quantise_checkpoint(folder / name, block, dtype), folder / f"{name}.pt")
    write_checkpoint(folder / "reward", "qwen2_tied", head="SequenceClassification", num_labels=1)
    total = sum(len(s) for s in example_sequences())
    torch.save(torch.randn(total, 131, generator=torch.Generator().manual_seed(5)), folder / "weight.pt")
    return folder


@pytest.fixture(scope="session")
def two_ranks(checkpoints):
    """[rank]{"logits", "logits of llama", "altered", "bf16_logits", "gradients", "bf16_step"} of a world of 2."""
    folder = str(checkpoints)
    return spawn_world(
        worlds.run_all,
        2,
        {
            "logits": (worlds.logits_errors, (folder, [*CASES, COMPOSITE], OF_ALL_CASES)),
            "logits of llama": (worlds.logits_errors, (folder, ["llama"], LOGIT_LAYOUTS)),
            "altered": (worlds.altered_errors, (folder, "gemma3", ALTERED)),
            "bf16_logits": (worlds.logits_errors, (folder, BF16_CASES, BF16_LAYOUTS, torch.bfloat16)),
            "gradients": (worlds.gradients, (folder, GRADIENT_JOBS + RECOMPUTE_JOBS)),
            "bf16_step": (worlds.bf16_critic_step, (folder, BF16_LAYOUTS, LEARNING_RATE)),
        },
    )


@pytest.fixture(scope="session")
def four_ranks(checkpoints):
    """[rank]{"shapes", "logits", "gradients", "refused"} of a world of 4, which also exports `<case>.out<layout number>`."""
    folder = str(checkpoints)
    jobs = [
        (case, f"{case}.out{i}", layout, False, "zero", 1 << 30 if i else 60_000)
        for case in CASES
        for i, layout in enumerate(EXPORT_LAYOUTS)
        if i == 2 or case in ("llama", "qwen2_tied")
    ]
    jobs += [(COMPOSITE, f"{COMPOSITE}.out2", EXPORT_LAYOUTS[2], False, "zero", 1 << 30)]
    jobs += [("reward", f"reward.out{i}", layout, True, "checkpoint", 60_000) for i, layout in enumerate(EXPORT_LAYOUTS)]
    jobs += [("llama", f"normal.out{i}", layout, True, "normal", 1 << 30) for i, layout in enumerate(EXPORT_LAYOUTS)]
    jobs += [(name, f"{name}.out", EXPORT_LAYOUTS[2], False, "zero", 1 << 30) for name in FP8_CASES]
    return spawn_world(
        worlds.run_all,
        4,
        {
            "exports": (worlds.export_all, (folder, jobs)),
            "refused": (worlds.refused_exports, (folder,)),
            "shapes": (worlds.built_shapes, (folder, SHAPE_CASES, SHAPE_LAYOUTS)),
            "logits": (worlds.logits_errors, (folder, list(CASES), [DENSE_LAYOUT])),
            "gradients": (worlds.gradients, (folder, DENSE_JOBS)),
        },
    )
