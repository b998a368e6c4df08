"""The small version of a run: every feature kept, every size divisible, within the ranks that there are."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megappo.commands.verify.recording import LONGEST_SEQUENCE
from megappo.commands.verify.shrink import Run, features, on_one_rank, one_at_a_time, small_run
from megappo.commands.verify.shrink_layouts import fit_layouts, fit_placed, ranks_needed, split_layers
from megappo.commands.verify.shrink_model import DELTA_NORM_EPS
from megappo.config.layout_checks import parallel_problems, roles_in_use
from megappo.config.loading import validated
from megappo.config.rank_ranges import ranges_of, ranks_of
from megappo.config.role_sections import ParallelConfig, section_of
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.hf_config import read_arch
from megappo.models.hf_tensors import CheckpointReader
from megappo.models.vision_families import tower_shape
from megappo.models.weight_map import hf_tensors
from megappo.trainer.prepare.layouts import model_problems
from tests.commands.verify.models import MODELS, write_config_json

SP = dict(tp=2, sequence_parallel=True)
# (policy, critic, reference): the sizes of their layouts
LAYOUTS: dict[str, tuple[dict, dict, dict]] = {
    "tp and pp": (SP, dict(pp=2), {}),
    "interleaved": (dict(pp=2, vpp=2), dict(**SP, cp=2), dict(pp=4)),
    "uneven": (
        dict(pp=2, layers_per_stage="uneven"),
        dict(pp=2, vpp=2, layers_per_stage="uneven"),
        dict(pp=3, layers_per_stage="uneven"),
    ),
    "large": (dict(tp=8, pp=4, sequence_parallel=True, layers_per_stage="uneven"), dict(pp=2, vpp=2, cp=2), dict(cp=4)),
}


def configured(folder: Path, model: str, layout: str, **policy: Any) -> TrainConfig:
    """A run with these layouts as far as the model allows them."""
    path = write_config_json(folder / "model", model)
    arch = read_arch(path)
    roles = dict(zip(("policy", "critic", "reference"), LAYOUTS[layout]))
    sections: dict[str, dict] = {}
    for role, given in roles.items():
        sizes = dict(given)
        sizes["tp"] = math.gcd(sizes.get("tp", 1), arch.num_kv_heads)
        sizes["sequence_parallel"] = sizes["tp"] > 1
        if arch.delta is not None:
            sizes.pop("cp", None)
        if arch.moe is not None:
            sizes |= dict(ep=2, etp=sizes["tp"])
        if sizes.get("layers_per_stage"):
            sizes["layers_per_stage"] = uneven(arch.num_layers, sizes["pp"] * sizes.get("vpp", 1))
        elif arch.num_layers % (sizes.get("pp", 1) * sizes.get("vpp", 1)):
            sizes |= dict(pp=2, vpp=1)
        sections[role] = {"parallel": sizes}
    sections["policy"] |= {"model": path, **policy}
    return validated({**sections, "data": {"train": "absent.jsonl"}}, TrainConfig)


def uneven(layers: int, parts: int) -> tuple[int, ...]:
    """Later stages have one layer more, the last also the rest."""
    sizes = [layers // parts - 1] + [layers // parts] * (parts - 1)
    return (*sizes[:-1], sizes[-1] + layers - sum(sizes))


def archs_of(run: Run) -> dict[str, ModelArch]:
    return {role: read_arch(section_of(run.config, role).model) for role in roles_in_use(run.config)}


def faults(run: Run) -> list[str]:
    """The check of a real run that would refuse this one."""
    archs = archs_of(run)
    return [
        message
        for role, parallel in roles_in_use(run.config).items()
        for message in (
            *parallel_problems(role, parallel, run.world_size),
            *model_problems(role, parallel, archs[role], "local"),
        )
    ]


@pytest.mark.parametrize("model", MODELS)
def test_small_runs_fit_their_world_and_keep_the_features_of_the_model(tmp_path, model: str) -> None:
    for layout, max_ranks in product(LAYOUTS, (2, 8)):
        folder = tmp_path / layout / str(max_ranks)
        config = configured(folder, model, layout)
        run, notes = small_run(config, folder, max_ranks, "local")
        for one in (run, on_one_rank(run), *one_at_a_time(run).values()):
            assert 1 <= one.world_size <= max_ranks and not faults(one)
        for role, parallel in roles_in_use(run.config).items():
            changed = sizes(parallel) != sizes(section_of(config, role).parallel)
            assert changed == any(note.startswith(f"{role}: ") for note in notes)
            assert not features(on_one_rank(run).config, role, 1)
        check_features(read_arch(config.policy.model), archs_of(run)["policy"])


def sizes(parallel: ParallelConfig) -> ParallelConfig:
    return parallel.model_copy(update={"layers_per_stage": ()})


def check_features(theirs: Any, small: Any) -> None:
    """Of architectures: optional parts that one has, the other has too."""
    for feature in ("family", "qkv_bias", "qk_norm", "tied_embeddings", "sliding_rope", "activation"):
        assert getattr(small, feature) == getattr(theirs, feature), feature
    assert small.norm_eps == (theirs.norm_eps if theirs.delta is None else DELTA_NORM_EPS)
    for feature in ("type", "theta", "factor", "low_freq_factor", "mscale", "llama4_beta"):
        assert getattr(small.rope, feature) == getattr(theirs.rope, feature), feature
    if theirs.rope.original_max_positions is not None:
        assert small.rope.original_max_positions < LONGEST_SEQUENCE, "scaled positions are never reached"
    assert (small.heads_per_group > 1) == (theirs.heads_per_group > 1)
    assert small.output_gate == theirs.output_gate and (small.delta is None) == (theirs.delta is None)
    if theirs.delta is not None:
        shared = [arch.delta.value_heads // arch.delta.key_heads for arch in (small, theirs)]
        assert len(set(small.delta.layers)) == 2 and shared[0] == shared[1]
        assert small.delta.by_key_head == theirs.delta.by_key_head
    scales = [
        arch.softmax_scale and arch.softmax_scale * (1 if arch.latent is None else arch.key_dim**0.5) for arch in (small, theirs)
    ]
    assert scales[0] == pytest.approx(scales[1]) and (small.latent is None) == (theirs.latent is None)
    assert set(small.sliding_layers) == set(theirs.sliding_layers)
    if theirs.sliding_window is not None:
        assert small.sliding_window < LONGEST_SEQUENCE, "the window hides nothing"
    if theirs.moe is not None:
        for feature in ("norm_topk_prob", "sigmoid", "scaling", "shared_gate"):
            assert getattr(small.moe, feature) == getattr(theirs.moe, feature), feature
        assert (small.moe.groups > 1) == (theirs.moe.groups > 1) and bool(small.moe.shared_size) == bool(theirs.moe.shared_size)
        assert bool(small.moe.dense_layers) == bool(theirs.moe.dense_layers)
        assert 4 <= small.moe.num_experts and 1 < small.moe.top_k < small.moe.num_experts
    if theirs.vision is not None:
        shapes = [tower_shape(arch.vision) for arch in (small, theirs)]
        assert len({(one.gated, one.window is None, one.whole < one.depth) for one in shapes}) == 1
        for feature in ("merge", "frames", "interleaved"):
            assert getattr(small.vision, feature) == getattr(theirs.vision, feature), feature
        assert bool(small.vision.tile) == bool(theirs.vision.tile)
        assert bool(small.vision.deepstack) == bool(theirs.vision.deepstack) and len(small.vision.sections) == len(
            theirs.vision.sections
        )
        assert small.vision.image_token < small.vocab_size
    parameters = sum(math.prod(shape) for shape in hf_tensors(small).values())
    assert parameters < 1_000_000


@pytest.mark.parametrize("model", MODELS)
def test_layouts_that_fit_are_kept_as_they_are(tmp_path, model: str) -> None:
    config = configured(tmp_path, model, "uneven")
    run, _ = small_run(config, tmp_path / "small", 24, "local")
    for role, parallel in roles_in_use(config).items():
        small = section_of(run.config, role).parallel
        assert sizes(small) == sizes(parallel)
        assert len(set(small.layers_per_stage)) > 1, "an uneven split became even"


def test_the_written_checkpoint_has_every_tensor(tmp_path) -> None:
    run, _ = small_run(configured(tmp_path, "qwen3_moe", "tp and pp"), tmp_path / "small", 4, "local")
    reader = CheckpointReader(run.config.policy.model)
    for name, shape in hf_tensors(archs_of(run)["policy"]).items():
        reader.slice(name, shape)


def test_roles_with_checkpoints_of_their_own_keep_them_apart(tmp_path) -> None:
    config = configured(tmp_path, "qwen2", "tp and pp")
    other = config.critic.model_copy(update={"model": write_config_json(tmp_path / "other", "llama3")})
    run, _ = small_run(config.model_copy(update={"critic": other}), tmp_path / "small", 4, "local")
    families = {role: arch.family for role, arch in archs_of(run).items()}
    assert families == {"policy": "qwen2", "critic": "llama", "reference": "qwen2"}
    assert run.config.policy.model == run.config.reference.model != run.config.critic.model


def test_settings_of_the_run_are_kept_and_switched_off_on_one_rank(tmp_path) -> None:
    settings = dict(recompute="full", offload=["optimizer"], optimizer={"clip_grad": 0.3})
    config = configured(tmp_path, "llama", "tp and pp", **settings)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"logits_dtype": "bf16"})})
    run, _ = small_run(config, tmp_path / "small", 4, "local")
    assert run.config.policy.logits_dtype == "fp32", "rounding would turn the order of a sum into steps of 1/8"
    kept, alone = run.config.policy, on_one_rank(run).config.policy
    assert (kept.recompute, kept.offload, kept.optimizer.distributed) == ("full", ("optimizer",), True)
    assert (alone.recompute, alone.offload, alone.optimizer.distributed) == ("none", (), False)
    assert kept.optimizer.clip_grad == alone.optimizer.clip_grad == 0.3
    assert {"recompute", "offload", "optimizer.distributed", "micro_batch_tokens", "tp", "pp", "dp"} <= set(one_at_a_time(run))


@pytest.mark.parametrize(
    "given, expected",
    [
        ([(10, 9, 9, 8)], (8, [(3, 2, 2, 1)])),
        ([(22, 26)], (3, [(1, 2)])),
        ([(22, 26), (16, 32)], (3, [(1, 2), (1, 2)])),
        ([(22, 26), ()], (4, [(1, 3), ()])),  # the other layout has two even stages
        ([(5, 5)], (2, [()])),
        ([()], (2, [()])),
    ],
)
def test_uneven_splits_keep_their_order(given, expected) -> None:
    parallels = [ParallelConfig(pp=len(split) or 2, layers_per_stage=split) for split in given]
    layers, small = split_layers(parallels)
    assert (layers, [parallel.layers_per_stage for parallel in small]) == expected


@pytest.mark.parametrize(
    "sizes, max_ranks, expected",
    [
        (dict(tp=8), 8, dict(tp=8)),
        (dict(tp=8, pp=4), 8, dict(tp=2, pp=4)),
        (dict(tp=8, pp=4, sequence_parallel=True), 2, dict(tp=1, pp=2)),
        (dict(pp=4, vpp=2), 2, dict(pp=2, vpp=2)),
        (dict(pp=2, vpp=2), 1, dict()),
        (dict(tp=3), 2, dict()),
        (dict(pp=4, layers_per_stage=(8, 8, 7, 7)), 2, dict(pp=2, layers_per_stage=(16, 14))),
        (dict(pp=4, layers_per_stage=(7, 8, 8, 7)), 2, dict(pp=2, layers_per_stage=(16, 15))),
        (dict(ep=8), 4, dict(ep=4)),
    ],
)
def test_layouts_are_halved_until_they_fit(sizes, max_ranks, expected) -> None:
    fitted = fit_layouts({"policy": ParallelConfig(**sizes)}, max_ranks)
    assert fitted.parallel["policy"] == ParallelConfig(**expected) and fitted.world_size <= max_ranks
    assert len(fitted.notes) == (sizes != expected)


def test_two_replicas_are_made_where_they_fit() -> None:
    roles = {"policy": ParallelConfig(tp=2), "critic": ParallelConfig(pp=2)}
    assert [fit_layouts(roles, ranks).world_size for ranks in (2, 3, 4, 8)] == [2, 2, 4, 4]


TP, PP, LARGE = ParallelConfig(tp=2, sequence_parallel=True), ParallelConfig(pp=2), ParallelConfig(tp=8, pp=4)
APART = {"policy": "0-31", "reference": "0-31", "critic": "32-63"}


@pytest.mark.parametrize(
    "policy, ranks, world, replicas, max_ranks, expected",
    [
        (TP, APART, 64, 1, 8, {"policy": "0-3", "reference": "0-3", "critic": "4-7"}),
        (TP, APART, 64, 1, 7, {"policy": "0-1", "reference": "0-1", "critic": "2-3"}),
        (TP, APART, 64, 2, 7, None),  # one replica of two ranks
        (TP, APART, 64, 1, 3, None),  # together they have room for tp 2 and pp 2
        (LARGE, APART, 64, 1, 8, {"policy": "0-3", "reference": "0-3", "critic": "4-7"}),
        (TP, {"policy": "0-1", "reference": "0-1", "critic": "2-5"}, 6, 1, 5, None),  # a third of the ranks would lose tp
        (TP, dict.fromkeys(APART, "0-3"), 8, 1, 4, dict.fromkeys(APART, "0-1")),  # vLLM alone on the others
        # Each of two ranks has another pair of roles.
        (
            TP,
            {"policy": "0-1", "critic": "1-2", "reference": "0,2"},
            3,
            1,
            4,
            {"policy": "0-1", "critic": "1-2", "reference": "0,2"},
        ),
    ],
)
def test_roles_keep_ranks_of_their_own(policy, ranks, world, replicas, max_ranks, expected) -> None:
    roles = {"policy": policy, "critic": PP, "reference": ParallelConfig()}
    held = {role: ranges_of(ranks[role]) for role in roles}
    fitted = fit_placed(roles, held, dict.fromkeys(roles, 1) | {"policy": replicas}, world, max_ranks)
    assert (fitted and fitted.ranks) == expected
    if fitted is None:
        return
    assert fitted.world_size <= max_ranks and len(fitted.notes) == (policy is LARGE)
    small = {role: set(ranks_of(text, fitted.world_size)) for role, text in fitted.ranks.items()}
    whole = {role: set(ranks_of(text, world)) for role, text in ranks.items()}
    for role, others in ((role, other) for role in roles for other in roles):  # whom a role meets is what placements are about
        assert bool(small[role] & small[others]) == bool(whole[role] & whole[others])
        assert (small[role] <= small[others]) == (whole[role] <= whole[others])
    assert all(len(small[role]) % ranks_needed(fitted.parallel[role]) == 0 for role in roles)
