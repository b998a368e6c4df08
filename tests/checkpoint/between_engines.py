"""Cases in which one engine reads what another one saved, for `test_between_engines.py`, in a world of two ranks.

Two oracles: whole Hugging Face tensors of weights and optimizer, gathered from the engines' own tensors (`resharding.py`), and the
run that stays under its first engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megappo.checkpoint import shards
from megappo.config.role_sections import CriticConfig, ModelConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.engine import state_boxes
from megappo.engine.factory import EngineSpec
from megappo.engine.role_engine import RoleEngine
from megappo.engine.whole_batch import pass_whole_batch
from megappo.models.hf_config import arch_for
from tests.checkpoint import runs
from tests.checkpoint.resharding import assemble, differing_tensors, only
from tests.checkpoint.resharding import whole_state as megatron_state

LAYOUTS = {
    "megatron tp2": {"engine": "megatron", "parallel": ParallelConfig(tp=2)},
    "megatron pp2": {"engine": "megatron", "parallel": ParallelConfig(pp=2)},
    "megatron dp2": {"engine": "megatron"},
    "fsdp2 dp2": {"engine": "fsdp2"},
    "fsdp2 tp2": {"engine": "fsdp2", "parallel": ParallelConfig(tp=2)},
    "megatron ep2": {"engine": "megatron", "parallel": ParallelConfig(ep=2)},
    "megatron tp2 sp": {"engine": "megatron", "parallel": ParallelConfig(tp=2, sequence_parallel=True)},
}
FSDP2 = "fsdp2 dp2"
# (checkpoint of tests.models.checkpoints, role)
MODELS = {
    "policy": ("llama", "policy"),
    "policy tied": ("gemma3", "policy"),
    "critic": ("qwen3", "critic"),
}
EXPERTS = {
    "experts": ("mixtral", "policy"),  # under names of their own; those of qwen3_moe are as the next ones
    "critic with experts": ("glm4_moe", "critic"),
    "latent attention": ("deepseek_v3", "policy"),  # and corrections, which no optimizer has
    "stacked experts": ("gpt_oss", "policy"),  # one tensor for all of a layer in the file, a parameter each on Megatron
    "delta nets": ("qwen3_5_moe", "policy"),
    "delta nets by key heads": ("qwen3_next", "policy"),
}
ADAPTERS = ("adapters of the policy", "adapters of the critic")
LORA = {"rank": 4, "alpha": 8.0}
OF_ADAPTERS = (("megatron tp2", "fsdp2 tp2"), (FSDP2, "megatron pp2"), ("fsdp2 tp2", FSDP2))
TOWER = {"tower": ("qwen3_vl", "policy")}  # of tests.models.vision_cases
# The policy's; the others read each layout once. The critic's chain is in bf16, whose main parameters are weights in fp32 as well.
CHAIN = ("megatron tp2", FSDP2, "megatron pp2", "fsdp2 tp2", "megatron dp2", FSDP2, "megatron tp2")
# fsdp2 keeps the experts of a layer in one tensor; tp cuts no columns of experts without etp, and has other routers' copies.
CHAIN_OF_EXPERTS = ("megatron ep2", FSDP2, "megatron tp2 sp", FSDP2, "megatron ep2")
CHAINS_OF_DELTA_NETS = {
    "delta nets": ("megatron ep2", FSDP2, "megatron tp2 sp"),
    "delta nets by key heads": ("megatron ep2", FSDP2, "megatron pp2"),
}
EXPERTS_GO_ON = (("megatron ep2", FSDP2), (FSDP2, "megatron ep2"))
# model -> (writer, reader): every layout by one model, each direction by all.
GOES_ON = {
    "policy": (("megatron tp2", FSDP2), ("megatron pp2", FSDP2), (FSDP2, "megatron dp2")),
    "policy tied": (("megatron pp2", FSDP2), (FSDP2, "megatron tp2")),
    "critic": (("megatron tp2", FSDP2), (FSDP2, "megatron dp2")),
}
BEFORE, AFTER = 2, 2  # updates


class Bench:
    """Builds engines on the checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        from megappo.engine.build import RoleEngines

        self.folder = folder
        self._engines = RoleEngines(ModelConfig(impl="local"), TimeoutsConfig(), torch.device("cpu"))

    def engine(self, model: str, layout: str, *, seed: int = 0, dtype: Any = "fp32", distributed: bool = True) -> Any:
        """A model that trains. seed: of small changes of its weights, so that a load has something to do."""
        lora = {"lora": LORA} if model in ADAPTERS else {}
        checkpoint, role = {**MODELS, **EXPERTS, **TOWER}.get(model.removeprefix("adapters of the "), (model, "policy"))
        path, optimizer = str(self.folder / checkpoint), OptimizerConfig(lr=1e-3, eps=1e-5, warmup_steps=3, distributed=distributed)
        common = dict(dtype=dtype, micro_batch_tokens=64, optimizer=optimizer, **lora, **LAYOUTS[layout])
        section = PolicyConfig(model=path, **common) if role == "policy" else CriticConfig(**common)
        head = "normal" if role == "critic" else None
        engine: Any = self._engines.build(
            EngineSpec(role, path, arch_for(path, section.engine), section, value_head=head, total_updates=10)
        )
        if seed:
            with torch.no_grad():
                for values in engine.named_parameters().values():
                    values.add_(seed * 0.01)
        return engine


def update(engine: Any, step: int) -> dict[str, Any]:
    """One update on a batch of its own; its numbers, and whole gradients if every rank has them."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        result = pass_whole_batch(engine, runs.batch(step), loss_of(engine), denominator=25.0)
        lr = engine.lr_scheduler_step()
        gradients = {} if engine.adapters is not None else whole_gradients(engine)
        taken = engine.optimizer_step()
        assert taken.applied
    return {"loss": result.sums["loss"], "grad_norm": taken.grad_norm, "lr": lr, **gradients}


def loss_of(engine: Any) -> Any:
    from megappo.engine.losses import LogprobQuery, LossOutput

    def value_loss(values: Any, micro: Any) -> Any:
        loss = (values - 1).square().sum()
        return LossOutput(loss, sums={"loss": loss})

    def language_loss(output: Any, micro: Any) -> Any:
        # Of each token by itself: layouts put others beside it in a micro-batch.
        target = (7 * micro.tokens + 3) % runs.VOCABULARY
        logprob, _ = output.logprobs(LogprobQuery(target, 1.0, want_entropy=False))
        loss = -(logprob * micro.tokens.cos()).sum()
        return LossOutput(loss, sums={"loss": loss})

    return value_loss if engine.value_head else language_loss


def whole_gradients(engine: Any) -> dict[str, Any]:
    """ "gradient NAME" -> whole tensor; none where the distributed optimizer keeps each rank's share."""
    if any(name.startswith("decoder") for name in engine.named_parameters()) and engine.groups.layout.dp > 1:
        return {}
    mine = {name: gradient.float() for name, gradient in engine.named_gradients().items()}
    return {f"gradient {name}": tensor for name, tensor in assemble(mine, engine, engine.groups).items()}


def state_of(engine: Any) -> dict[str, Any]:
    """Whole weights, moments, main parameters of bf16 models, and the number of updates."""
    if not hasattr(engine._optimizer, "moments"):
        return megatron_state(engine, engine.groups)
    engine.to("device")
    kinds = {"weight": {name: shard.detach() for name, shard in engine.named_parameters().items()}}
    for moment, name, values in engine._optimizer.moments():
        kinds.setdefault(moment, {})[name] = values
    whole: dict[str, Any] = {"step": torch.tensor([engine._optimizer.updates])}
    for kind, mine in kinds.items():
        whole |= {f"{kind} {name}": tensor for name, tensor in assemble(mine, engine, engine.groups).items()}
    return whole


# ------------------------------------------------------------------------------------------------------------------- cases


def chain(bench: Bench, place: Path, model: str, dtype: str, layouts: Sequence[str] = CHAIN) -> dict[str, Any]:
    """From engine to engine and back without a step between: what differs from the first, on every hop."""
    current = bench.engine(model, layouts[0], dtype=dtype)
    for step in range(BEFORE):
        update(current, step)
    wanted, wrong = state_of(current), []
    for hop, layout in enumerate(layouts[1:]):
        kept = runs.store(place / str(hop))
        kept.save(1, {"model": current}, {}, runs.FACTS)
        # The plain optimizer keeps whole moments, the distributed one parts: both read and write.
        current = bench.engine(model, layout, seed=1, dtype=dtype, distributed=hop != 3)
        kept.load({"model": current}, {}, runs.FACTS)
        found = state_of(current)
        if layout.startswith("fsdp2") and dtype == "bf16":  # its weights are Megatron's main parameters
            found = {**found, **{f"main {n.removeprefix('weight ')}": t for n, t in only(found, "weight ").items()}}
            found |= {n: t.bfloat16().float() for n, t in only(found, "weight ").items() if f"main {n[7:]}" in wanted}
            found = {name: tensor for name, tensor in found.items() if name in wanted}
        wrong += [f"{layout}: {part}" for part in differing_tensors(wanted, found)]
    return {"wrong": wrong, "parts": sorted(wanted)}


def goes_on(
    bench: Bench, place: Path, model: str, writer: str, reader: str, *, after: int = AFTER, spoil: Any = None
) -> dict[str, float]:
    """name -> largest difference of the run that changes its engine to the one that does not, relative to the largest number.

    after: updates since the change.
    """
    first = bench.engine(model, writer)
    for step in range(BEFORE):
        update(first, step)
    kept = runs.store(place)
    kept.save(1, {"model": first}, {}, runs.FACTS)
    second = bench.engine(model, reader, seed=model not in ADAPTERS)  # adapters stand on the same base
    with spoil or mock.MagicMock():
        kept.load({"model": second}, {}, runs.FACTS)
    differences: dict[str, float] = {}
    for step in range(BEFORE, BEFORE + after):
        stays, changes = update(first, step), update(second, step)
        compare(stays, changes, differences)
    if model not in ADAPTERS:
        compare(state_of(first), state_of(second), differences)
    return differences


def compare(wanted: dict[str, Any], found: dict[str, Any], differences: dict[str, float]) -> None:
    for name in wanted.keys() & found.keys():
        a, b = (torch.as_tensor(values, dtype=torch.float64) for values in (wanted[name], found[name]))
        kind = name.split()[0]
        scale = float(a.abs().max()) or 1.0
        differences[kind] = max(differences.get(kind, 0.0), float((a - b).abs().max()) / scale)


def swapped_moments() -> Any:
    real = state_boxes.key_of
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    return mock.patch.object(state_boxes, "key_of", lambda kind, name: real(other.get(kind) or kind, name))


def one_row_off() -> Any:
    real = state_boxes._boxes

    def shifted(held: Any, pieces: Any) -> Any:
        for part, piece, box in real(held, pieces):
            yield part, piece, box._replace(row=box.row - (box.row > 0))

    return mock.patch.object(state_boxes, "_boxes", shifted)


def forgotten_position() -> Any:
    real = RoleEngine.boxes_loaded
    return mock.patch.object(RoleEngine, "boxes_loaded", lambda self, position: real(self, dict.fromkeys(position, 0)))


SPOILS = {"swapped moments": swapped_moments, "one row off": one_row_off, "forgotten position": forgotten_position}


def from_checkpoint(bench: Bench, place: Path) -> dict[str, Any]:
    """Critics that start from another engine's policy and critic, and what is refused."""
    kept = runs.store(place)
    policy, critic = bench.engine("qwen3", "megatron pp2"), bench.engine("critic", FSDP2, seed=2)
    kept.save(1, {"policy": policy, "critic": critic}, {}, runs.FACTS)
    sources = {name: only(state_of(engine), "weight ") for name, engine in (("policy", policy), ("critic", critic))}
    found: dict[str, Any] = {}
    for role, layout in (("policy", FSDP2), ("critic", "megatron tp2")):
        engine = bench.engine("critic", layout, seed=1)
        own_head = only(state_of(engine), "weight score")
        kept.load_weights(role, engine, 1, with_head=role == "critic")
        state = only(state_of(engine), "weight ")
        found[role] = differing_tensors(sources[role], state)
        found[f"{role} head is its own"] = not differing_tensors(own_head, only(state, "weight score"))
    refused = {
        "head": lambda: kept.load_weights("policy", bench.engine("critic", FSDP2), 1),
        "other model": lambda: kept.load_weights("policy", bench.engine("policy", FSDP2), 1),
        "other sizes": lambda: kept.load_weights("policy", bench.engine("qwen3 wide", FSDP2), 1),
        "value model": lambda: kept.load_weights("critic", bench.engine("qwen3", "megatron tp2"), 1),
    }
    return {**found, "refused": {name: runs.message(ValueError, action) for name, action in refused.items()}}


def bytes_read(bench: Bench, place: Path) -> dict[str, int]:
    """Bytes that this rank reads of the files, and those of its own state."""
    kept = runs.store(place)
    kept.save(1, {"model": bench.engine("policy", "megatron tp2")}, {}, runs.FACTS)
    engine = bench.engine("policy", FSDP2, seed=1)
    counted = 0

    real = shards.safe_open

    class Counted:
        def __init__(self, stored: Any) -> None:
            self.stored, self.get_shape = stored, stored.get_shape

        def __getitem__(self, place: Any) -> Any:
            nonlocal counted
            found = self.stored[place]
            counted += found.nbytes
            return found

    @contextmanager
    def opened(*args: Any, **how: Any) -> Iterator[Any]:
        with real(*args, **how) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=lambda name: Counted(file.get_slice(name)))

    with mock.patch.object(shards, "safe_open", opened):
        kept.load({"model": engine}, {}, runs.FACTS)
    own = 3 * sum(shard.nbytes for shard in engine.named_parameters().values())
    return {"read": counted, "own": own}


def world_main(rank: int, folder: str) -> dict[str, Any]:
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    bench, place, found = Bench(Path(folder)), Path(folder, "kept"), {}
    for model in MODELS:
        if model != "critic":
            found[f"chain {model}"] = chain(
                bench, place / f"chain-{model}", model, "fp32", CHAIN if model == "policy" else CHAIN[:5]
            )
        for number, (writer, reader) in enumerate(GOES_ON[model]):
            found[f"{model}: {writer} to {reader}"] = goes_on(bench, place / f"{model}-{number}", model, writer, reader)
    found["chain experts"] = chain(bench, place / "chain-experts", "experts", "bf16", CHAIN_OF_EXPERTS)
    found["chain critic with experts"] = chain(
        bench, place / "chain-critic-experts", "critic with experts", "fp32", CHAIN_OF_EXPERTS[:3]
    )
    found["chain latent attention"] = chain(bench, place / "chain-latent", "latent attention", "fp32", CHAIN_OF_EXPERTS[:3])
    found["chain stacked experts"] = chain(bench, place / "chain-stacked", "stacked experts", "fp32", CHAIN_OF_EXPERTS[:2])
    found["chain tower"] = chain(bench, place / "chain-tower", "tower", "fp32", CHAIN[:3])
    for model, layouts in CHAINS_OF_DELTA_NETS.items():
        found[f"chain {model}"] = chain(bench, place / f"chain-{model}", model, "bf16", layouts)
    for number, (writer, reader) in enumerate(EXPERTS_GO_ON):
        found[f"experts: {writer} to {reader}"] = goes_on(bench, place / f"experts-{number}", "experts", writer, reader)
    for model in ADAPTERS:
        for number, (writer, reader) in enumerate(OF_ADAPTERS):
            found[f"{model} {number}"] = goes_on(bench, place / f"{model}-{number}", model, writer, reader)
    found["chain bf16"] = chain(bench, place / "bf16", "critic", "bf16", CHAIN[:5])
    for name, spoil in SPOILS.items():
        found[name] = goes_on(bench, place / name, "policy", "megatron tp2", FSDP2, after=0, spoil=spoil())
    found["from checkpoint"] = from_checkpoint(bench, place / "from")
    found["bytes"] = bytes_read(bench, place / "bytes")
    return found
