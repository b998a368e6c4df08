from tests.models.cases import LOGIT_LAYOUTS
from tests.models.checkpoints import CASES


def test_logits_equal_transformers_in_every_layout(two_ranks):
    """fp32, packed in one batch here and one sequence at a time there; measured errors are about 4e-6."""
    errors = {key: error for rank in two_ranks for key, error in rank["logits"].items()}
    assert errors.keys() == {(case, layout) for case in CASES for layout in LOGIT_LAYOUTS}
    assert max(errors.values()) < 1e-4, errors
