"""Models with experts against transformers and a literal fp64 balancing loss: numbers, gradients, load, weight map, refusals.

One world of four ranks serves all: expert groups only differ from the dense ones where a stage has several ranks.
"""

import copy
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megappo.models.arch import check_ep, check_tp
from megappo.models.gpt import expert_name
from megappo.models.hf_config import arch_for, arch_of, read_arch
from megappo.models.moe import RouterState, moe_config
from megappo.models.weight_map import hf_tensors, local_shapes, megatron_pieces
from megappo.parallel.layout import ParallelLayout
from tests.models import moe_worlds
from tests.models.moe_worlds import CASES, COEFFICIENT, NUM_EXPERTS, Job
from tests.worlds import spawn_world

RANKS = 4
SP = dict(tp=2, sequence_parallel=True)


def layout(**sizes: Any) -> ParallelLayout:
    return ParallelLayout(RANKS, **sizes)


# Families that tests/parity holds to transformers in other layouts are here in one, recomputed, with corrections that a second
# forward must not move twice.
PARITY = [
    Job("sparse", layout()),  # dp 4, some micro-batches empty
    Job("sparse", layout(**SP)),  # experts uncut beside cut attention: the tp ranks are data-parallel to them
    Job("mixed", layout(ep=2), budget=1),  # one sequence at a time
    Job("mixed", layout(ep=2), recompute="selective", budget=1000),
    Job("mixed", layout(pp=2, vpp=2, ep=2)),  # one chunk without experts
    Job("mixed", layout(pp=4)),  # stage 1 has no experts
    Job("mixed", layout(tp=4, sequence_parallel=True, ep=2)),  # two ranks to a KV head
    Job("mixtral", layout(**SP, ep=2, etp=2), recompute="full"),
    Job("glm", layout(pp=2, cp=2, ep=2), recompute="full"),
    Job("deepseek", layout(ep=2, etp=2), recompute="full"),
    Job("oss", layout(**SP, cp=2, ep=2), recompute="full"),
    Job("next", layout(**SP, cp=2, etp=2), recompute="selective"),
    Job("qwen3_5", layout(pp=2, cp=2, ep=2), recompute="full"),
]
# Whose pairs of sizes are all in passes above, or whose passes are those of tests/parity: their weight maps alone.
_OF_PARITY = (dict(**SP, ep=4), dict(**SP, ep=2, etp=2), dict(**SP, pp=2, ep=2), dict(pp=2, vpp=2, cp=2, ep=2))
MAPPED = [
    Job("sparse", layout(**sizes)) for sizes in (dict(ep=4), dict(ep=2, etp=2), dict(cp=2, ep=2), dict(pp=2, ep=2), *_OF_PARITY)
]
MAPPED += [Job("deepseek", layout(**SP, cp=2, ep=2)), Job("oss", layout(**SP, pp=2, etp=2)), Job("next", layout(**SP, ep=2))]
SHARDED = [
    Job("sparse", layout(**SP, cp=2, ep=2), distributed=True),
    Job("mixed", layout(tp=4, sequence_parallel=True, ep=2), distributed=True),  # two ranks to a KV head
]
FAULTS = [
    Job("sparse", layout(**SP), fault="Megatron's own mark"),
    Job("sparse", layout(cp=2), fault="padding counts"),
    Job("sparse", layout(), budget=1000, fault="balanced per micro-batch"),
    Job("sparse", layout(), coefficient=0.0),
]
OTHER_ROUTERS = [Job("deepseek", layout(), fault=fault) for fault in moe_worlds.ROUTER_FAULTS]
OSS_FAULTS = [Job("oss", layout(), fault=fault) for fault in moe_worlds.OSS_FAULTS]
NEXT_FAULTS = [Job("next", layout(), fault=fault, budget=1000) for fault in moe_worlds.NEXT_FAULTS]
REPLAYED = [
    Job("sparse", layout(), coefficient=0.0, replay="given"),
    Job("mixed", layout(**SP, ep=2, etp=2), coefficient=0.0, replay="given"),
    Job("sparse", layout(**SP, cp=2, ep=2), recompute="full", coefficient=0.0, replay="given"),
    Job("mixed", layout(pp=2, vpp=2, ep=2), recompute="selective", coefficient=0.0, replay="given"),
]
OWN, SHIFTED = (replace(FAULTS[3], replay=which) for which in ("own", "shifted"))
BF16 = [
    Job("next", layout(ep=2), dtype="bf16"),
    Job("sparse", layout(ep=2), dtype="bf16"),
    Job("mixed", layout(**SP, ep=2, etp=2), dtype="bf16"),
]
# Every linear layer with adapters, those of experts too: cut over etp (copies of A and B), beside tp, cp, pp, shared experts;
# with the distributed optimizer the norm alone is compared. Latent attention with adapters is in tests/parity/test_lora.py.
ADAPTED = [
    Job("sparse", layout(**SP, cp=2, etp=2), recompute="full", lora=True),
    Job("mixed", layout(pp=2, vpp=2, ep=2), lora=True),
    Job("mixtral", layout(**SP, ep=2), lora=True),
    Job("glm", layout(**SP, ep=2, etp=2), lora=True),
    Job("oss", layout(**SP, cp=2, etp=2), recompute="full", lora=True),
    Job("next", layout(**SP, ep=2), lora=True),
    Job("qwen3_5", layout(**SP, ep=2), lora=True),  # of q, k and v in one module tp cuts each
]
ADAPTED_SHARDED = [Job("sparse", layout(**SP, etp=2), distributed=True, lora=True)]
ADAPTED_FAULTS = [Job("glm", layout(**SP, ep=2, etp=2), lora=True, fault=fault) for fault in moe_worlds.LORA_FAULTS]
EXPORTS = [
    ("sparse", layout(ep=2, etp=2)),
    ("mixtral", layout(**SP, pp=2, ep=2)),
    ("mixed", layout(**SP, pp=2, ep=2)),
    ("glm", layout(**SP, ep=2, etp=2)),
    ("deepseek", layout(**SP, pp=2, ep=2)),
    ("oss", layout(**SP, ep=2, etp=2)),
    ("next", layout(**SP, pp=2, ep=2)),
    ("qwen3_5", layout(**SP, pp=2, ep=2)),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(folder with both checkpoints, {case: what transformers computes})"""
    folder = tmp_path_factory.mktemp("moe")
    models = {case: moe_worlds.write_checkpoint(folder, case) for case in CASES}
    batch = moe_worlds.example_batch()
    expected = {case: moe_worlds.reference(model, batch, COEFFICIENT) for case, model in models.items()}
    for case, model in models.items():
        expected[case]["bf16"] = moe_worlds.logprobs(copy.deepcopy(model).bfloat16(), batch)
    for case in {job.case for job in ADAPTED + ADAPTED_SHARDED}:
        expected[case]["adapted"] = moe_worlds.reference_with_adapters(models[case], batch, COEFFICIENT)
    for case in ("sparse", "mixed"):
        given = moe_worlds.example_routes(case)
        expected[case]["given"] = moe_worlds.reference_of_routes(models[case], batch, given)
        free = moe_worlds.reference_of_routes(models[case], batch, torch.full_like(given, -1))
        own = moe_worlds.example_routes(case, free["own"])
        torch.save({"given": given, "own": own, "shifted": own.roll(1, 0)}, folder / f"{case}.routes")
    return folder, expected


@pytest.fixture(scope="module")
def passes(checkpoints):
    """{job: [result of every rank]}; the exports are written on the way."""
    folder, _ = checkpoints
    jobs = [*PARITY, *SHARDED, *FAULTS, *OTHER_ROUTERS, *OSS_FAULTS, *NEXT_FAULTS, *BF16, *REPLAYED, OWN, SHIFTED]
    jobs += [*ADAPTED, *ADAPTED_SHARDED, *ADAPTED_FAULTS]
    exports = [(case, where, f"{case}.out") for case, where in EXPORTS]
    ranks = spawn_world(moe_worlds.run_world, RANKS, str(folder), jobs, exports, timeout_s=600)
    return {job: [rank[index] for rank in ranks] for index, job in enumerate(jobs)}


def gradient_error(results: list[dict], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """{tensor: largest difference relative to its largest gradient}; pieces of all ranks, copies included."""
    errors: dict[str, float] = {}
    for result in results:
        for name, box, values in result["pieces"]:
            wanted = expected[name]
            difference = (values - wanted[box.r0 : box.r1, box.c0 : box.c1]).abs().max() / wanted.abs().max()
            errors[name] = max(errors.get(name, 0.0), float(difference))
    return errors


@pytest.mark.parametrize("job", PARITY, ids=str)
def test_logprobs_and_gradients_equal_transformers(checkpoints, passes, job):
    """fp32, measured 2e-6 at most; the gradient holds the balancing loss of every layer."""
    expected = checkpoints[1][job.case]
    errors = gradient_error(passes[job], expected["gradients"])
    assert errors.keys() == expected["gradients"].keys()
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
    for result in passes[job]:
        for name in ("logprob", "evaluated"):
            torch.testing.assert_close(result[name], expected["logprob"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("job", PARITY + SHARDED, ids=str)
def test_gradient_norm_load_and_balancing_loss_do_not_depend_on_the_layout(checkpoints, passes, job):
    expected = checkpoints[1][job.case]
    norm = torch.cat([gradient.flatten() for gradient in expected["gradients"].values()]).double().norm()
    for result in passes[job]:
        assert result["norm"] == pytest.approx(float(norm), rel=1e-5)
        assert torch.equal(result["tokens"], expected["tokens"])  # counts are exact, padding is not in them
        assert result["loss"] == pytest.approx(float(expected["loss"]), rel=1e-6)
        for layer, found in result["corrections"].items():  # after the step, by the load of the whole batch
            load, before = expected["tokens"][layer], expected["corrections"][layer]
            torch.testing.assert_close(found, before + moe_worlds.BIAS_RATE * (load.mean() - load).sign().float())


@pytest.mark.parametrize("job", BF16, ids=str)
def test_bf16_is_as_close_to_fp32_as_transformers_in_bf16(checkpoints, passes, job):
    """Root mean squares over all tokens, some of which choose another expert after rounding, here and there."""
    expected = checkpoints[1][job.case]
    theirs = (expected["bf16"] - expected["logprob"]).square().mean().sqrt()
    for result in passes[job]:
        assert (result["evaluated"] - expected["logprob"]).square().mean().sqrt() < 1.5 * theirs


def test_replayed_routes_give_the_numbers_of_fixed_routes_in_every_layout(checkpoints, passes):
    """The oracle's autograd takes the given experts; some tokens choose themselves."""
    for job in REPLAYED:
        expected = checkpoints[1][job.case]["given"]
        errors = gradient_error(passes[job], expected["gradients"])
        assert errors.keys() == expected["gradients"].keys() and max(errors.values()) < 1e-5, job
        for result in passes[job]:
            for name in ("logprob", "evaluated"):
                torch.testing.assert_close(result[name], expected["logprob"], rtol=0, atol=1e-5)
            times = 2 if job.recompute == "full" else 1  # a recomputed forward counts again
            assert result["counts"] == tuple(times * count for count in expected["counts"]), job


def test_a_models_own_choice_replayed_changes_no_bit_and_shifted_routes_show(passes):
    plain, own, shifted = (passes[job] for job in (FAULTS[3], OWN, SHIFTED))
    for before, result, other in zip(plain, own, shifted):
        assert torch.equal(before["logprob"], result["logprob"]) and before["norm"] == result["norm"]
        for (name, _, ours), (_, _, wanted) in zip(result["pieces"], before["pieces"], strict=True):
            assert torch.equal(ours, wanted), name
        assert result["counts"][0] > 0 == result["counts"][1]
        assert float((other["logprob"] - before["logprob"]).abs().max()) > 0.1 and other["counts"][1] > 0


def test_the_micro_batches_of_the_table_differ(passes):
    """Otherwise independence of them is not what the table shows."""
    assert len({passes[job][0]["num_micro_batches"] for job in PARITY if job.layout == layout(ep=2)}) == 2


def test_experts_left_with_megatrons_mark_get_a_wrong_gradient(checkpoints, passes):
    """Negative control: with ep 1 Megatron reduces experts over the dense dp group only, though the tp ranks hold copies."""
    errors = gradient_error(passes[FAULTS[0]], checkpoints[1]["sparse"]["gradients"])
    wrong = {name for name, error in errors.items() if error > 1e-2}
    assert wrong == {name for name in errors if ".experts." in name}


def test_counting_padding_is_detected(checkpoints, passes):
    expected, results = checkpoints[1]["sparse"], passes[FAULTS[1]]
    assert all((result["tokens"] > expected["tokens"]).any() for result in results)
    assert max(gradient_error(results, expected["gradients"]).values()) > 1e-4


@pytest.mark.parametrize("job", FAULTS[2:], ids=["balanced per micro-batch", "no balancing loss"])
def test_another_balancing_loss_is_detected(checkpoints, passes, job):
    errors = gradient_error(passes[job], checkpoints[1]["sparse"]["gradients"])
    assert min(error for name, error in errors.items() if name.endswith("mlp.gate.weight")) > 1e-3
    assert errors["lm_head.weight"] < 1e-5  # the loss acts below the routers only


def test_another_router_is_detected(checkpoints, passes):
    """Of a model without corrections, with Megatron-core's rule for groups, with weights that are not scaled."""
    for job in OTHER_ROUTERS:
        result = passes[job][0]
        assert result["corrections"] and float((result["logprob"] - checkpoints[1]["deepseek"]["logprob"]).abs().max()) > 0.1, job


def test_sinks_windows_and_clamps_that_are_left_out_are_detected(checkpoints, passes):
    for job in OSS_FAULTS:
        result = passes[job][0]
        assert float((result["logprob"] - checkpoints[1]["oss"]["logprob"]).abs().max()) > 0.05, job


def test_states_that_run_on_and_gates_that_are_left_out_are_detected(checkpoints, passes):
    for job in NEXT_FAULTS:
        result = passes[job][0]
        assert float((result["logprob"] - checkpoints[1]["next"]["logprob"]).abs().max()) > 0.05, job


@pytest.mark.parametrize("job", ADAPTED + ADAPTED_SHARDED, ids=str)
def test_adapters_of_experts_are_those_of_dense_merged_weights(checkpoints, passes, job):
    """fp32, measured 2e-6 at most; the norm counts every number once."""
    expected = checkpoints[1][job.case]["adapted"]
    if not job.distributed:
        errors = gradient_error(passes[job], expected["gradients"])
        assert errors.keys() == expected["gradients"].keys()
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
    for result in passes[job]:
        assert result["norm"] == pytest.approx(norm_of(expected), rel=1e-5)
        for name in ("logprob", "evaluated"):
            torch.testing.assert_close(result[name], expected["logprob"], rtol=0, atol=1e-5)


def norm_of(expected):
    return float(torch.cat([gradient.flatten() for gradient in expected["gradients"].values()]).double().norm())


@pytest.mark.parametrize("job", ADAPTED_FAULTS, ids=str)
def test_a_mistake_in_adapters_of_experts_is_noticed(checkpoints, passes, job):
    """Negative controls: of another expert, not scaled, copies of an etp rank with a part of their gradient, counted twice in the
    norm, and gradients reduced over the dense ranks."""
    expected, results = checkpoints[1]["glm"]["adapted"], passes[job]
    errors = gradient_error(results, expected["gradients"])
    experts = max(error for name, error in errors.items() if ".experts." in name)
    of_norm = abs(results[0]["norm"] / norm_of(expected) - 1)
    if job.fault == "copies count":
        assert experts < 1e-5 and of_norm > 1e-3
    else:  # the norm of gradients that were summed over other ranks happens to be right here
        assert experts > 1e-2 and (of_norm > 1e-4 or job.fault == "reduced as dense")
    if job.fault in ("adapters of another expert", "experts without scaling"):
        assert float((results[0]["logprob"] - expected["logprob"]).abs().max()) > 1e-2


@pytest.mark.parametrize("case, where", EXPORTS, ids=str)
def test_export_gives_back_the_checkpoint(checkpoints, passes, case, where):
    source, written = (tensors_of(checkpoints[0] / name) for name in (case, f"{case}.out"))
    assert source.keys() == written.keys()
    assert all(torch.equal(source[name], written[name]) for name in source)


def tensors_of(folder):
    """All tensors of a checkpoint, whatever files they are in."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# ------------------------------------------------------------------------------------------------------------ weight map


@pytest.mark.parametrize("case", CASES)
def test_the_weight_map_names_what_transformers_writes(checkpoints, case):
    written = {name: tuple(tensor.shape) for name, tensor in tensors_of(checkpoints[0] / case).items()}
    further = moe_worlds.FURTHER.get(case, "none")
    written = {name: shape for name, shape in written.items() if not name.startswith(further)}
    assert hf_tensors(read_arch(checkpoints[0] / case)) == written


@pytest.mark.parametrize("job", PARITY + MAPPED, ids=str)
def test_pieces_cover_every_tensor_and_fill_every_parameter(checkpoints, job):
    arch, where = read_arch(checkpoints[0] / job.case), job.layout
    copies: dict[str, Counter] = {}
    for rank in range(RANKS):
        filled = Counter()
        for piece in megatron_pieces(arch, where, rank):
            copies.setdefault(piece.hf, Counter())[piece.box] += 1
            filled[piece.local] += piece.box.area
        for name, shape in local_shapes(arch, where, rank).items():
            padding = name.startswith(("embedding", "output_layer"))
            assert filled[name] == torch.Size(shape).numel() or padding, name
    for name, shape in hf_tensors(arch).items():
        assert sum(box.area for box in copies[name]) == torch.Size(shape).numel(), name
        if ".experts." in name:
            assert set(copies[name].values()) == {where.edp}, name


def test_an_ep_rank_holds_a_block_of_experts():
    arch = arch_of(config_of())
    shapes = {rank: local_shapes(arch, layout(ep=2, etp=2), rank) for rank in range(RANKS)}
    held = {
        rank: {int(name.split("local_experts.")[1].split(".")[0]) for name in names if "experts." in name}
        for rank, names in shapes.items()
    }
    assert held == {0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}, 2: {4, 5, 6, 7}, 3: {4, 5, 6, 7}}


@pytest.mark.parametrize(
    "inside", ["mlp.experts.local_experts.1.linear_fc2.weight", "mlp.experts.linear_fc2.weight1"], ids=["local", "grouped"]
)
def test_both_implementations_have_the_same_canonical_names(inside):
    assert expert_name(inside, first=4) == "mlp.experts.local_experts.5.linear_fc2.weight"


# ------------------------------------------------------------------------------------------- architecture and refusals


def config_of(**changes: object) -> dict:
    config = dict(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=131,
        max_position_embeddings=256,
        moe_intermediate_size=24,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
    )
    return {**config, **changes}


@pytest.mark.parametrize(
    "changes, dense",
    [
        ({}, ()),
        ({"mlp_only_layers": [0, 2]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 2, 3)),
    ],
)
def test_dense_layers_among_sparse_ones(changes, dense):
    arch = arch_of(config_of(**changes))
    assert (
        arch.moe is not None
        and arch.moe.dense_layers == dense
        and [arch.kind(i).sparse for i in range(4)] == [i not in dense for i in range(4)]
    )
    assert arch.qk_norm and arch.head_dim == arch.hidden_size // arch.num_heads


def test_the_number_of_experts_is_read_in_both_spellings(checkpoints):
    """The hub says num_experts, transformers 5 writes num_local_experts."""
    spelt = json.loads((checkpoints[0] / "sparse" / "config.json").read_text())
    assert "num_local_experts" in spelt and arch_of(spelt).moe == arch_of(config_of(norm_topk_prob=True)).moe


@pytest.mark.parametrize("stem", ["Mixtral", "GptOss"])
def test_a_base_of_the_rotary_embedding_that_is_left_out_is_what_transformers_takes(stem):
    text = {**config_of(num_attention_heads=8), "num_local_experts": 4, "architectures": [f"{stem}ForCausalLM"]}
    assert arch_of(text).rope.theta == getattr(transformers, f"{stem}Config")(**text).rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "no gradient"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "leave no layer with experts"),
        ({"num_experts": 0}, "num_experts = 0"),
    ],
)
def test_impossible_experts_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        arch_of(config_of(**changes))


def test_other_routers_and_latents_are_refused_with_the_way_out(checkpoints, tmp_path):
    """Before a model is built; what fsdp2 runs is said."""
    config = json.loads((checkpoints[0] / "deepseek" / "config.json").read_text())
    elsewhere = "engine fsdp2 runs any"
    v32 = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 8}
    for changes, message in [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported: transformers' class computes 'sigmoid' whatever"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported.* no engine runs it"),
        ({"rms_norm_eps": 1e-5}, rf"rms_norm_eps 1e-05 is not supported .*only rollout.engine=megatron agrees.; {elsewhere}"),
        ({"rope_interleave": False}, rf"rope_interleave False is not supported.*{elsewhere}"),
        ({"attention_bias": True}, rf"attention_bias = true is not supported.*{elsewhere}"),
        (v32, "DeepseekV32ForCausalLM is not supported.* 'indexed_attention', which see other sequences .*; no engine runs it"),
        ({"index_topk": 64}, "index_topk 64 is not supported: vLLM's class has sparse attention .* use DeepSeek-V3 or R1"),
        ({"topk_group": 1}, "3 of 8 experts with n_group 4 and topk_group 1"),
        ({"n_group": 3}, "3 of 8 experts with n_group 3"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace 4 leaves no layer with experts; use fewer than the 4 layers"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message) as refused:
            arch_for(tmp_path, "megatron")
        assert "\n" not in str(refused.value)


def test_what_gpt_oss_could_not_train_or_sample_is_refused(checkpoints, tmp_path):
    config = json.loads((checkpoints[0] / "oss" / "config.json").read_text())
    for changes, message in [
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types: transformers has the window in the named"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types: transformers has the window in the named"),
        ({"attention_bias": False}, "attention_bias false is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"the checkpoint is quantised \(awq\)"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message) as refused:
            arch_for(tmp_path, "megatron")
        assert "\n" not in str(refused.value)
    arch = arch_of(config | {"layer_types": None})
    assert arch.sliding_layers == (True, False, True, False)
    with pytest.raises(ValueError, match="etp 3 does not divide the 64 hidden channels .* use a divisor of 8"):
        check_ep(arch, 1, 3)


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(ep=3, etp=1), "ep 3 does not divide the 8 experts"),
        (dict(ep=1, etp=5), "etp 5 does not divide the 24 columns of an expert"),
    ],
)
def test_expert_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        check_ep(arch_of(config_of()), **sizes)


@pytest.mark.parametrize("sizes, axis", [(dict(ep=2, etp=1), "ep"), (dict(ep=1, etp=2), "etp")])
def test_expert_parallel_needs_experts(sizes, axis):
    dense = arch_of({**config_of(), "architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(ValueError, match=f"{axis} 2 needs experts .* set {axis} to 1"):
        check_ep(dense, **sizes)


def test_tp_with_experts_needs_sequence_parallel():
    arch = arch_of(config_of())
    with pytest.raises(ValueError, match="tp 2 with experts needs sequence_parallel"):
        moe_config(arch, layout(tp=2))
    assert moe_config(arch, layout(**SP))["expert_tensor_parallel_size"] == 1


def test_the_width_of_absent_dense_layers_limits_no_tp():
    check_tp(arch_of(config_of(intermediate_size=97)), 2)
    with pytest.raises(ValueError, match="97 MLP columns"):
        check_tp(arch_of(config_of(intermediate_size=97, mlp_only_layers=[1])), 2)


# ------------------------------------------------------------------------------------------------------------ statistics


def test_a_pass_starts_from_an_empty_load():
    state = RouterState(2, 3, torch.device("cpu"))
    state.tokens[1] += torch.tensor([1, 2, 0])
    state.loss[1] += 2.0
    state.begin(coefficient=0.5, num_sequences=4)
    assert state.scale == 0.125 and not state.tokens.any() and not state.loss.any()
