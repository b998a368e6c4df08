"""V(x_<t), the value of a token, is the head's output one place before it: where values are computed and where they are trained.

transformers is the oracle: each sequence alone through its model, the shift by slicing. Outputs at the tokens themselves,
which have seen them, do not pass in either place: the negative control. Their cost to a run: benchmarks/ablate_right_shift.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.experiments.arms import unshifted
from megappo.config.role_sections import CriticConfig, MSELossConfig
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.engine.factory import EngineSpec
from megappo.models.hf_config import read_arch
from megappo.trainer import roles
from megappo.trainer.roles import Critic
from tests.engine.toy_engine import ToyEngine
from tests.models.checkpoints import write_checkpoint

LENGTHS = (5, 2, 7)
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("critic") / "llama"
    write_checkpoint(folder, "llama", num_hidden_layers=1)
    return folder


@pytest.fixture
def engine(path) -> ToyEngine:
    section = CriticConfig(dtype="fp32")
    return ToyEngine(EngineSpec("critic", str(path), read_arch(path), section, value_head="normal", total_updates=1))


def batch() -> PackedBatch:
    """Sequences whose first two tokens are the prompt, with random returns."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 50, (sum(LENGTHS),), generator=generator)
    fields = {name: torch.randn(len(tokens), generator=generator) for name in ("value", "returns")}
    fields["weight"] = torch.cat([(torch.arange(n) >= min(2, n - 1)).float() for n in LENGTHS])
    return PackedBatch(tokens, cu_seqlens_of(LENGTHS), fields)


def values_before(engine: ToyEngine, packed: PackedBatch) -> Tensor:
    """V(x_<t) [T], differentiable, 0 at the first token of a sequence."""
    alone = [engine._model(ids[None]).logits[0, :, 0] for ids in packed.tokens.split(list(LENGTHS))]
    return torch.cat([torch.cat((output.new_zeros(1), output[:-1])) for output in alone])


def check_inference(engine: ToyEngine) -> None:
    packed = batch()
    value, bootstrap = Critic(engine).values(packed)
    with torch.no_grad():
        after = [engine._model(ids[None]).logits[0, -1, 0] for ids in packed.tokens.split(list(LENGTHS))]
        assert torch.allclose(value, values_before(engine, packed), atol=TOLERANCE)
    assert torch.allclose(bootstrap, torch.stack(after), atol=TOLERANCE)


def check_training(engine: ToyEngine) -> None:
    """Loss and gradients of an update, those of half the squared error of V(x_<t) by autograd."""
    packed = batch()
    error = values_before(engine, packed) - packed["returns"]
    loss = 0.5 * (packed["weight"] * error.square()).sum() / packed["weight"].sum()
    wanted = dict(zip(engine.named_parameters(), torch.autograd.grad(loss, list(engine.named_parameters().values()))))
    engine._settings = engine._settings.model_copy(update={"clip_grad": 0.0})
    found = Critic(engine, MSELossConfig(clip=None)).update(packed, denominator=float(packed["weight"].sum()))
    assert found.losses.sums["loss_sum"] / float(packed["weight"].sum()) == pytest.approx(float(loss), rel=1e-5)
    gradients = engine.named_gradients()
    assert all(torch.allclose(gradients[name], one, atol=1e-6, rtol=1e-4) for name, one in wanted.items())


def test_values_are_those_of_the_state_before_the_token(engine) -> None:
    check_inference(engine)


def test_the_critic_learns_the_state_before_the_token(engine) -> None:
    check_training(engine)


@pytest.fixture
def without_the_shift(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(roles, "align_values", unshifted)
    yield


@pytest.mark.parametrize("check", [check_inference, check_training])
def test_the_state_after_the_token_is_noticed(engine, without_the_shift, check) -> None:
    with pytest.raises(AssertionError):
        check(engine)
