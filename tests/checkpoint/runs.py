"""A small training run inside a test world: policy (tp=2) and critic (pp=2) on two ranks, a KL controller and a cursor."""

from __future__ import annotations

import hashlib
import random
from functools import partial

import numpy
import torch
import torch.distributed as dist

from megappo.checkpoint.store import CheckpointStore
from megappo.config.role_sections import OptimizerConfig
from megappo.data.packing import PackedBatch
from megappo.engine.losses import LossOutput
from megappo.engine.whole_batch import pass_whole_batch
from megappo.parallel.layout import ParallelLayout

FACTS = {
    "reference": {"path": "a/model", "sha256": "abc"},
    "tokenizer": "def",
    "config": "run: {name: test}",
    "layouts": {"policy": {"tp": 2}},
}


VOCABULARY = 51  # odd, so that tp=2 pads it

_SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {},
    "cp2": {"cp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp2 uneven": {"pp": 2, "layers_per_stage": (3, 1)},
    "ep2": {"ep": 2},
    "tp2 sp": _SP,
    "tp2 sp ep2": {**_SP, "ep": 2},
    "tp2 sp etp2": {**_SP, "etp": 2},
}
"""Layouts of the two ranks (sizes of ParallelLayout). The default etp is 1: under "tp2 sp" both ranks hold every expert whole."""


class Counter:
    """A component: a number that the run advances."""

    def __init__(self) -> None:
        self.count, self.history = 0, []

    def advance(self, value: float) -> None:
        self.count += 1
        self.history.append(value)

    def state_dict(self) -> dict:
        return {"count": self.count, "history": list(self.history)}

    def load_state_dict(self, state: dict) -> None:
        self.count, self.history = state["count"], state["history"]


def arch(tied=False, num_layers=4, experts=False, hidden=32):
    """`experts`: a mixture of experts in the upper half of the layers, so that the first of two stages has none, and one KV head,
    of which tp ranks hold copies.
    """
    from megappo.models.arch import ModelArch, MoeArch, Rope

    sizes = (num_layers, hidden, 4, 1 if experts else 2, 8, 2 * hidden, VOCABULARY, 64, tied, 1e-6, Rope())
    if not experts:
        return ModelArch("llama", "LlamaForCausalLM", *sizes)
    moe = MoeArch(num_experts=4, top_k=2, ffn_size=16, norm_topk_prob=True, dense_layers=tuple(range(num_layers // 2)))
    return ModelArch("qwen3_moe", "Qwen3MoeForCausalLM", *sizes, qk_norm=True, moe=moe)


def engine(
    groups,
    *,
    critic,
    dtype=torch.float32,
    tied=False,
    distributed=True,
    offload=False,
    seed=0,
    num_layers=4,
    experts=False,
    hidden=32,
):
    from megappo.engine.megatron import MegatronEngine
    from megappo.engine.megatron_optimizer import Optimizer, wrap_with_ddp
    from megappo.engine.role_engine import EngineSettings
    from megappo.models.build import build_model

    chunks = build_model(arch(tied, num_layers, experts, hidden), groups, dtype=dtype, value_head=critic)
    fill(chunks, groups, critic, seed)
    wrapped = wrap_with_ddp(chunks, groups, distributed_optimizer=distributed)
    config = OptimizerConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1, distributed=distributed)
    return MegatronEngine(
        "critic" if critic else "policy",
        wrapped,
        groups,
        EngineSettings(torch.device("cpu"), 24, ("parameters", "gradients", "optimizer") if offload else ()),
        optimizer=Optimizer(wrapped, groups, config, total_steps=20),
        balance=(0.01 if experts else 0.0, 0.0),
    )


def fill(chunks, groups, critic, seed):
    """The same model in every layout: values are drawn for the Hugging Face tensors and cut as an import does it."""
    from megappo.models.gpt import named_parameters
    from megappo.models.pieces import as_2d
    from megappo.models.weight_map import hf_tensors, megatron_pieces

    model, parameters = chunks[0].arch, named_parameters(chunks)
    whole = {name: drawn(name, shape, seed) for name, shape in hf_tensors(model, critic).items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()  # padding of the vocabulary
        for piece in megatron_pieces(model, groups.layout, groups.position, critic):
            box = piece.box
            target = as_2d(parameters[piece.local])[piece.row : piece.row + box.rows, piece.col : piece.col + box.cols]
            target.copy_(as_2d(whole[piece.hf])[box.r0 : box.r1, box.c0 : box.c1])


def drawn(name, shape, seed):
    digest = hashlib.sha256(f"{name} {seed}".encode()).digest()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))
    return 1 + 0.1 * values if len(shape) == 1 else 0.1 * values


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 5, 9, 4])
    cu_seqlens = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    return PackedBatch(torch.randint(0, VOCABULARY, (int(lengths.sum()),), generator=generator), cu_seqlens)


def noise():
    """A number that all ranks agree on and that depends on every generator of every rank."""
    drawn = torch.rand(())
    dist.all_reduce(drawn)
    return drawn.item() + random.random() + numpy.random.rand()


def squares(weight, output, micro):
    values = output if isinstance(output, torch.Tensor) else output.hidden.float().square().mean(-1)
    return LossOutput(loss_sum=(values.float() - 1).square().sum() * weight)


class Run:
    """Work of the trainer between two checkpoints."""

    def __init__(self, store, groups, seed=0, policy="tp2", critic="pp2", **options) -> None:
        self.store = store
        self.engines = {
            "policy": engine(groups[policy], critic=False, seed=seed, **options),
            "critic": engine(groups[critic], critic=True, seed=seed, **options),
        }
        self.components = {"trainer": Counter(), "kl_controller": Counter()}
        seed_generators(seed)

    @property
    def step(self):
        return self.components["trainer"].count

    def train(self, steps):
        for _ in range(steps):
            for one in self.engines.values():
                with one.train_mode():
                    one.optimizer_zero_grad()
                    pass_whole_batch(one, batch(self.step), partial(squares, noise()), denominator=25.0)
                    one.lr_scheduler_step()
                    result = one.optimizer_step()
                    assert result.applied
            self.components["trainer"].advance(random.random())
            self.components["kl_controller"].advance(result.grad_norm)

    def save(self, facts=FACTS):
        return self.store.save(self.step, self.engines, self.components, facts)

    def load(self, facts=FACTS):
        return self.store.load(self.engines, self.components, facts)

    def digest(self):
        """SHA-256 by part, of everything that the next step depends on, on this rank."""
        parts = {}
        for name, one in self.engines.items():
            parts |= {f"{name} {part}": digest for part, digest in engine_digest(one).items()}
        parts["torch"] = sha256([torch.get_rng_state()])
        _, words, position, _, _ = numpy.random.get_state()
        parts["numpy"] = sha256([torch.from_numpy(words.astype(numpy.int64)), torch.tensor(position)])
        parts["python"] = sha256([torch.tensor(random.getstate()[1])])
        parts["components"] = sha256([torch.tensor(component.history) for component in self.components.values()])
        return parts


def engine_digest(one):
    one.to("device")
    optimizer = one._optimizer
    digest = {
        "model": sha256([tensor for chunk in one.chunks for tensor in chunk.state_dict().values()]),
        "optimizer": sha256(list(optimizer.tensors())),
        "schedule": optimizer._scheduler.num_steps,
    }
    one.release_state()
    return digest


def differing(one, other):
    return sorted(part for part in one if one[part] != other[part])


def message(kind, action):
    """Text of the exception, None if there is none."""
    try:
        action()
    except kind as error:
        return str(error)
    return None


def sha256(tensors):
    return hashlib.sha256(b"".join(raw(tensor) for tensor in tensors)).hexdigest()


def raw(tensor):
    return bytes(tensor.detach().clone().flatten().view(torch.uint8).numpy()) if tensor is not None else b""


def seed_generators(seed):
    torch.manual_seed(10 * seed + dist.get_rank())  # each rank its own stream
    random.seed(seed)
    numpy.random.seed(seed)


def build_layouts(layouts=LAYOUTS):
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    from megappo.parallel.groups import build_groups

    return {name: build_groups(ParallelLayout(dist.get_world_size(), **sizes)) for name, sizes in layouts.items()}


def store(path, keep_last=3, owner="a1b2", **options):
    return CheckpointStore(path, keep_last, owner=owner, **options)


def gathered(value, group=None):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
