"""LoRA in the parity matrix: policy and critic with adapters in layouts of two ranks, against one rank and the step written out.

`tests/engine/test_lora.py` holds single updates in more layouts, recomputed and offloaded, to PEFT. B starts at random numbers
here, not at 0, where the gradient of A would be 0 in every layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.commands.verify.measure import Measured, measure
from megappo.commands.verify.recording import record_rollouts
from megappo.engine.base import Engine
from megappo.models.arch import ModelArch
from megappo.models.lora import ADAPTER_A, ADAPTER_B, adapted_modules, adapter_shapes, initial_a
from megappo.models.pieces import rectangle
from megappo.models.weight_map import hf_tensors
from tests.parity.matrix import SEQUENCES, SP, VARIANTS, VOCABULARY, Case, config_of, engines_in, roles_of, title

RANK, ALPHA = 4, 8.0
SCALE = ALPHA / RANK
ALL = {"rank": RANK, "alpha": ALPHA}
# Some modules of every fused linear, and another scale: 24 / 4 = 6.
SOME = {"rank": RANK, "alpha": 24.0, "targets": ["k_proj", "up_proj", "down_proj"]}
# Policy and critic have the same adapters, so each takes a layout of its own. tp without sequence parallel is that of PARTLY, and
# under FSDP2 that of tests/engine/test_lora.py.
CASES: dict[int, list[Case]] = {
    1: [{}],
    2: [(SP, {"pp": 2, "vpp": 2}), ({"cp": 2}, SP)],
}
# Projections that every tp rank has whole, and one of each other kind; no experts, whose layouts are those of the rows with ALL.
LATENT = {"rank": RANK, "alpha": ALPHA, "targets": ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
EXPERTS: Case = ({**SP, "ep": 2}, {**SP, "etp": 2})
PARTLY: Case = {"tp": 2}
FSDP2 = {"policy__engine": "fsdp2", "critic__engine": "fsdp2"}
OF_FSDP2: dict[str, Case] = {"fsdp2 / critic tp2 sp": ({}, SP)}
STEPS = 5
REPLAYED: Case = SP
# Whole mini-batches take half of the time; that their split changes nothing is the matrix's to show.
REPLAY = {
    "policy__optimizer__distributed": True,
    "critic__optimizer__distributed": True,
    **VARIANTS["whole batch"],
}


@contextmanager
def forgotten_sum_of_a() -> Iterator[None]:
    """Each tp rank has some rows of B, so the gradient that it has for A is a part of it; it stays so."""
    from megappo.models import lora_linear

    with mock.patch.object(lora_linear, "copy_to_tensor_model_parallel_region", lambda hidden, group: hidden):
        yield


@contextmanager
def forgotten_sum_over_tokens() -> Iterator[None]:
    """Under sequence parallel each tp rank multiplies A with its own tokens; the gradient stays that of these."""
    from megappo.models import lora_linear

    right = lora_linear.LinearAdapters.__init__

    def forget(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.sequence_parallel = False

    with mock.patch.object(lora_linear.LinearAdapters, "__init__", forget):
        yield


@contextmanager
def rows_in_the_order_of_the_file() -> Iterator[None]:
    """Outputs of q, k and v follow each other, as in the checkpoint; Megatron's rows go by KV group."""
    from megappo.models import lora_linear

    def in_order(self: Any) -> Tensor:
        return torch.block_diag(*(adapter.lora_B for adapter in self.each()))

    with mock.patch.object(lora_linear.LinearAdapters, "b", in_order):
        yield


@contextmanager
def forgotten_sum_of_copies() -> Iterator[None]:
    """Under fsdp2 every tp rank has a part of the gradient of the A or B that it has a copy of; it stays so."""
    from megappo.engine.fsdp2_model import ShardedModel

    with mock.patch.object(ShardedModel, "sum_partial_gradients", lambda self: None):
        yield


FAULTS: dict[str, tuple[Case, dict[str, str], Callable[[], Any]]] = {
    "forgotten sum of A's gradient": ({"tp": 2}, {}, forgotten_sum_of_a),
    "forgotten sum of A's gradient over tokens": (SP, {}, forgotten_sum_over_tokens),
    "rows in the order of the file": ({"tp": 2}, {}, rows_in_the_order_of_the_file),
    "forgotten sum of fsdp2's copies": ({"tp": 2}, FSDP2, forgotten_sum_of_copies),
}


def changes_of(lora: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"policy__lora": dict(lora), "critic__lora": dict(lora), **more}


def started(name: str, shape: tuple[int, ...]) -> Tensor:
    """Start of a B, by its name."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little"))
    return torch.randn(shape, generator=generator) * 0.1


def adapters_at_start(arch: ModelArch, lora: Any, seed: int) -> dict[str, Tensor]:
    """Every adapter's tensors, whole."""
    modules = adapted_modules(hf_tensors(arch), lora.targets)
    tensors = {module + ADAPTER_A: initial_a(module, columns, lora.rank, seed) for module, (_, columns) in modules.items()}
    shapes = adapter_shapes(modules, lora.rank)
    return tensors | {name: started(name, shape) for name, shape in shapes.items() if name.endswith(ADAPTER_B)}


def start(engine: Engine | None, lora: Any, seed: int) -> None:
    """Set this rank's parts of every B."""
    if engine is None:
        return
    whole, parameters = adapters_at_start(engine.arch, lora, seed), engine.named_parameters()
    assert engine.adapters is not None
    for piece in engine.adapters.pieces()[engine.placement.position_of(dist.get_rank())]:
        if piece.hf.endswith(ADAPTER_B):
            box = piece.box
            part = rectangle(parameters[piece.local].data, piece.slot, piece.row, piece.col, box.rows, box.cols)
            part.copy_(whole[piece.hf][box.r0 : box.r1, box.c0 : box.c1])


def measure_lora(folder: str, case: Case, changes: Mapping[str, Any], steps: int = 1, **wanted: bool) -> Measured:
    """Collective."""
    config = config_of(Path(folder), **changes)
    rollouts = record_rollouts(steps, sequences=SEQUENCES, vocab_size=VOCABULARY)
    with roles_of(case) as roles:
        engines = engines_in(roles, torch.device("cpu"))
        build = engines.build

        def build_started(spec: Any) -> Engine | None:
            engine = build(spec)
            if spec.total_updates is not None:
                # Offloaded parameters have no memory outside of a mode.
                with engine.train_mode():
                    start(engine, spec.section.lora, spec.seed)
            return engine

        engines.build = build_started
        return measure(config, rollouts, engines, **{"gradients": True, "parameters": True, **wanted})


def run_lora(rank: int, folder: str, sparse: str, latent: str) -> dict[str, Measured]:
    """title -> Measured of the cases of this world size; "some": adapters on some modules; "replayed": STEPS steps; on two ranks
    also OF_FSDP2 and every mistake of FAULTS. folder, sparse, latent: of models without experts, with them ("experts"), and with
    latent attention too ("latent"). Of rank 0.
    """
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    size = dist.get_world_size()
    found = {title(case, size): measure_lora(folder, case, changes_of(ALL)) for case in CASES[size]}
    if size == 1:
        found["some"] = measure_lora(folder, {}, changes_of(SOME))
    else:
        found["some"] = measure_lora(folder, PARTLY, changes_of(SOME))
        for name, case in OF_FSDP2.items():
            found[name] = measure_lora(folder, case, changes_of(ALL, **FSDP2))
        for name, (case, engines, fault) in FAULTS.items():
            with fault():
                found[name] = measure_lora(folder, case, changes_of(ALL, **engines), parameters=False)
    found["experts"] = measure_lora(sparse, EXPERTS if size > 1 else {}, changes_of(ALL))
    found["latent"] = measure_lora(latent, {**SP, "ep": 2} if size > 1 else {}, changes_of(LATENT))
    replayed = REPLAYED if size > 1 else {}
    found["replayed"] = measure_lora(folder, replayed, changes_of(ALL, **REPLAY), STEPS, gradients=False)
    return found if rank == 0 else {}
