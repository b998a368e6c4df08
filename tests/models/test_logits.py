import torch
import transformers

from tests.models.cases import ALTERED, BF16_CASES, BF16_LAYOUTS, DENSE_LAYOUT, LOGIT_LAYOUTS, OF_ALL_CASES
from tests.models.checkpoints import CASES, COMPOSITE, reference_logits


def test_logits_equal_transformers_in_every_layout(two_ranks, four_ranks):
    """fp32, packed in one batch here and one sequence at a time there; measured errors are about 4e-6."""
    found = [*(rank["logits"] for rank in [*two_ranks, *four_ranks]), *(rank["logits of llama"] for rank in two_ranks)]
    errors = {key: error for each in found for key, (error, _) in each.items()}
    expected = {(case, layout) for case in (*CASES, COMPOSITE) for layout in OF_ALL_CASES}
    expected |= {("llama", layout) for layout in LOGIT_LAYOUTS}
    assert errors.keys() == expected | {(case, DENSE_LAYOUT) for case in CASES}
    assert max(errors.values()) < 1e-4, errors


def test_what_distinguishes_layers_of_gemma3_is_noticed(two_ranks):
    """Negative control: a changed architecture differs by at least ten times what is allowed."""
    errors = two_ranks[0]["altered"]
    assert errors.keys() == ALTERED.keys() and min(errors.values()) > 1e-3, errors


def test_bf16_is_as_close_to_fp32_as_transformers_in_bf16(checkpoints, two_ranks):
    """Both round weights and activations to bf16; errors are compared as root mean squares over all logits."""
    ours = {key: rms for rank in two_ranks for key, (_, rms) in rank["bf16_logits"].items()}
    assert ours.keys() == {(case, layout) for case in BF16_CASES for layout in BF16_LAYOUTS}
    for case in BF16_CASES:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoints / case, dtype=torch.bfloat16, attn_implementation="eager"
        )
        difference = reference_logits(model).float() - torch.load(checkpoints / f"{case}.pt")
        theirs = float(difference.square().mean().sqrt())
        for layout in BF16_LAYOUTS:
            assert ours[case, layout] < 1.5 * theirs, (case, layout, theirs)
