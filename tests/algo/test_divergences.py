"""Divergences over a few ids and the rest, against their definitions over the whole vocabulary."""

import pytest
import torch

from megappo.algo.divergences import DIVERGENCES, divergence


def distributions(vocab: int = 9):
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(4, vocab, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))


def by_definition(teacher, student, kind):
    q, p = teacher.exp(), student.exp()
    mean = (p + q) / 2
    pairs = {"forward_kl": [(q, p)], "reverse_kl": [(p, q)], "jsd": [(q, mean), (p, mean)]}[kind]
    return sum((a * (a / b).log()).sum(-1) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_over_all_ids_it_is_the_definition_and_over_some_no_more(kind):
    teacher, student = distributions()
    whole = divergence(teacher, student, kind)
    torch.testing.assert_close(whole, by_definition(teacher, student, kind), rtol=0, atol=1e-9)
    some = divergence(teacher[:, :3], student[:, :3], kind)
    bucketed = [torch.cat((x[:, :3], x[:, 3:].logsumexp(-1, keepdim=True)), -1) for x in (teacher, student)]
    torch.testing.assert_close(some, by_definition(*bucketed, kind), rtol=0, atol=1e-9)
    assert bool((some <= whole).all()) and bool((some > 0).all())


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_distributions_have_none_and_no_gradient(kind):
    teacher, _ = distributions()
    student = teacher[:, :3].clone().requires_grad_()
    found = divergence(teacher[:, :3], student, kind)
    found.sum().backward()
    assert student.grad is not None and float(found.detach().abs().max()) < 1e-12 and float(student.grad.abs().max()) < 1e-12


def test_the_directions_differ_and_an_unknown_one_is_refused():
    teacher, student = distributions()
    found = [divergence(teacher[:, :3], student[:, :3], kind) for kind in DIVERGENCES]
    assert all(float((one - other).abs().min()) > 1e-3 for i, one in enumerate(found) for other in found[:i])
    with pytest.raises(ValueError, match="divergence 'js' is not one of forward_kl, reverse_kl, jsd"):
        divergence(teacher, student, "js")
