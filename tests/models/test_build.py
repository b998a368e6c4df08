"""The really built model: its parameters are those the weight map announces, and its gradients are those of transformers."""

import pytest
import torch
import transformers

from megappo.models.hf_config import read_arch
from megappo.models.pieces import as_2d
from megappo.models.weight_map import local_shapes
from tests.models.cases import (
    DENSE_JOBS,
    GRADIENT_CASES,
    GRADIENT_JOBS,
    LEARNING_RATE,
    RECOMPUTE_JOBS,
    SHAPE_CASES,
    SHAPE_LAYOUTS,
    place,
)
from tests.models.checkpoints import example_sequences


def test_parameters_are_those_of_the_weight_map(checkpoints, four_ranks):
    for results in (rank["shapes"] for rank in four_ranks):
        assert len(results) == len(SHAPE_CASES) * len(SHAPE_LAYOUTS) * 2
        for case, (tp, pp, sp), critic, tp_rank, stage, facts in results:
            arch = read_arch(checkpoints / case)
            mine, whole = (local_shapes(arch, *place(n, pp, r, stage), critic) for n, r in ((tp, tp_rank), (1, 0)))
            assert {name: fact[0] for name, fact in facts.items()} == mine
            for name, (shape, dtype, sharded, sequence_parallel) in facts.items():
                assert dtype == torch.float32
                assert sharded == (shape != whole[name]) or tp == 1, name
                assert sequence_parallel == (sp and ("norm" in name or name == "value_head.weight")), name


def hf_gradients(folder, case, critic):
    """Gradient of the same loss by transformers' autograd, with the value head that seed 0 gives, and its values [T, 1]."""
    weight = torch.load(folder / "weight.pt")
    kind = transformers.AutoModelForTokenClassification if critic else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder / case, attn_implementation="eager", **({"num_labels": 1} if critic else {})).eval()
    if critic:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            hidden = model.config.hidden_size
            model.score.weight.copy_(torch.randn(1, hidden, generator=generator) * (hidden + 1) ** -0.5)
            model.score.bias.zero_()
    outputs = torch.cat([model(input_ids=tokens[None]).logits[0] for tokens in example_sequences()])
    (outputs[:, 0] * weight[:, 0] if critic else outputs * weight).sum().backward()
    gradients = {name: as_2d(p.grad) for name, p in model.named_parameters()}
    return gradients | ({"values": outputs.detach()} if critic else {})


def gathered(ranks, jobs):
    """{job: pieces of all ranks}"""
    return {job: [piece for rank in ranks for piece in rank["gradients"][i]] for i, job in enumerate(jobs)}


def worst_error(pieces, expected):
    """Largest |difference| relative to the largest gradient of the tensor."""
    return max(
        ((values - expected[name][box.r0 : box.r1, box.c0 : box.c1]).abs().max() / expected[name].abs().max()).item()
        for name, box, values in pieces
    )


MODELS = [(case, critic) for case in GRADIENT_CASES for critic in (False, True)] + [("gemma3", False), ("qwen3_5", False)]


@pytest.mark.parametrize("case, critic", MODELS, ids=[f"{case}-{'critic' if critic else 'policy'}" for case, critic in MODELS])
def test_gradients_equal_transformers_in_every_layout(checkpoints, two_ranks, four_ranks, case, critic):
    expected = hf_gradients(checkpoints, case, critic)
    by_job = {**gathered(two_ranks, GRADIENT_JOBS + RECOMPUTE_JOBS), **gathered(four_ranks, DENSE_JOBS)}
    for job, pieces in by_job.items():
        if job[0] == case and job[2] == critic:
            assert {name for name, *_ in pieces} >= {n for n in expected if n != "score.bias"} - {"lm_head.weight"}
            assert worst_error(pieces, expected) < 2e-5, job


@pytest.mark.parametrize("fault", ["doubled value head", "halved norm"])
def test_the_comparison_detects_double_counting(checkpoints, two_ranks, fault):
    """Negative control: what a missing or doubled reduction under sequence parallel would give."""
    job = ("llama", (2, 1, True), True, "none")
    name, factor = {"doubled value head": ("score.weight", 2.0), "halved norm": ("model.norm.weight", 0.5)}[fault]
    pieces = [(n, box, values * factor if n == name else values) for n, box, values in gathered(two_ranks, GRADIENT_JOBS)[job]]
    assert worst_error(pieces, hf_gradients(checkpoints, "llama", True)) > 0.1


def test_an_fp32_value_head_trains_inside_a_bf16_critic(two_ranks):
    """Adam's first step is lr * sign(gradient): 1e-4 on weights of 0.1 would be lost if the head were rounded to bf16."""
    heads = []
    for rank in two_ranks:
        for moved, head in rank["bf16_step"]:
            assert moved
            if head is not None:
                change, dtype, after = head
                assert dtype == torch.float32
                torch.testing.assert_close(change.abs(), torch.full_like(change, LEARNING_RATE), rtol=0.01, atol=0)
                heads.append(after)
    assert len(heads) == 5 and torch.equal(heads[0], heads[3])  # dp 2: both ranks; tp 2: both ranks; pp 2: the last stage
