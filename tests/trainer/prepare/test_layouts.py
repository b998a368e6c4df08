"""Layouts that cannot work with a model are refused by key, value and fix, before anything is built."""

import itertools
import json
import re
from pathlib import Path

import pytest
import transformers

from megappo.config.errors import ConfigError
from megappo.config.layout_checks import parallel_problems, world_problems
from megappo.config.loading import load_config
from megappo.config.role_sections import ParallelConfig, section_of
from megappo.config.supervised import SftConfig
from megappo.models.families.registry import FAMILIES
from megappo.models.hf_config import arch_of
from megappo.models.weight_map import local_shapes
from megappo.parallel.layout import ParallelLayout, layout_of
from megappo.trainer.prepare.layouts import check_layouts, check_weights, model_paths, model_problems, read_archs
from tests.commands.plan.checkpoints import SPARSE, TINY, write_checkpoint, write_run
from tests.models.checkpoints import CASES, EXPERT_CASES, hf_config

NONE, SP = "algorithm.kl.placement=none", "policy.parallel.sequence_parallel=true"
SIX = TINY | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 32}
# architecture of the policy, overrides, ranks, what the message must contain
IMPOSSIBLE = [
    (SIX, ["policy.parallel.tp=4"], 4, ["policy.parallel.tp = 4", "6 KV heads nor is a multiple", "largest tp that works is 12"]),
    (SIX, ["critic.parallel.tp=4", "critic.parallel.pp=1"], 4, ["critic.parallel.tp = 4", "6 KV heads"]),
    (TINY, ["reference.parallel.tp=3"], 6, ["reference.parallel.tp = 3", "4 attention heads", "largest tp that works is 4"]),
    (TINY | {"num_key_value_heads": 4, "intermediate_size": 383}, [], 2, ["policy.parallel.tp = 2", "383 MLP columns"]),
    (TINY, ["critic.parallel.pp=3"], 6, ["critic.parallel.pp = 3", "4 layers", "use 2 or 4, or give an uneven split"]),
    (TINY, ["policy.parallel.tp=1", "policy.parallel.pp=8"], 8, ["policy.parallel.pp = 8", "4 layers into stages; use 4"]),
    (
        TINY,
        ["policy.parallel.tp=1", "policy.parallel.pp=2", "policy.parallel.vpp=3"],
        2,
        ["policy.parallel.vpp = 3", "2 layers of a stage (4 layers / pp 2)", "use 2"],
    ),
    (
        TINY,
        ["critic.parallel.vpp=3"],
        2,
        ["critic.parallel.vpp = 3", "2 layers of a stage"],
    ),
    (
        TINY,
        ["critic.parallel.layers_per_stage=[3,2]"],
        2,
        ["critic.parallel.layers_per_stage = [3, 2]", "adds up to 5", "4 layers"],
    ),
    (TINY, ["critic.parallel.layers_per_stage=[4]"], 2, ["critic.parallel.layers_per_stage = [4]", "1 entries", "pp 2 needs 2"]),
    (
        TINY,
        ["critic.parallel.vpp=2", "critic.parallel.layers_per_stage=[2,2]"],
        2,
        ["has 2 entries and pp 2 x vpp 2 needs 4"],
    ),
    (TINY, ["reference.parallel.vpp=2"], 2, ["reference.parallel.vpp = 2", "needs pp > 1"]),
    (
        TINY,
        ["reference.parallel.cp=3"],
        6,
        ["reference.parallel.cp = 3", "a tp rank has 4 attention heads and 2 KV heads (tp 1)", "that work are 1, 2, 4"],
    ),
    (
        TINY,
        ["policy.parallel.cp=4"],
        8,
        ["policy.parallel.cp = 4", "a tp rank has 2 attention heads and 1 KV heads (tp 2)", "that work are 1, 2"],
    ),
    (TINY, ["policy.parallel.cp=2"], 2, ["policy.parallel: tp 2 x cp 2 x pp 1 = 4 does not divide the 2 ranks", "use 4 ranks"]),
    (TINY, ["policy.lora.targets=[q_porj]"], 2, ['policy.lora.targets = ["q_porj"]', "matches no linear layer", "mean q_proj or"]),
    (TINY, ["critic.lora.targets=[lm_head]"], 2, ['critic.lora.targets = ["lm_head"]', "down_proj, gate_proj, k_proj"]),
    (
        TINY,
        ["critic.lora.targets=[layers.3.mlp.up_proj]"],
        2,
        ['critic.lora.targets = ["layers.3.mlp.up_proj"]', "no layer of pipeline stage 0 (layers 0 to 1)", "or lower pp"],
    ),
    (
        TINY,
        ["policy.freeze=[self_attention]"],
        2,
        ['policy.freeze = ["self_attention"]', "matches no weight; did you mean self_attn"],
    ),
    (TINY, ["critic.freeze=[layers.0-4]"], 2, ["layers.0-4 ends beyond the model, which has layers 0 to 3; use 0-3"]),
    (TINY, ["critic.freeze=[score]"], 2, ["score names the value head, which always trains; leave it out"]),
    (TINY, ["policy.freeze=[layers, embed_tokens, norm, lm_head]"], 2, ["freezes every weight, so nothing would train"]),
    (TINY, ["policy.freeze=[q_proj]"], 2, ["q_proj.weight is one parameter with k_proj, v_proj under engine megatron", "to fsdp2"]),
    (
        TINY,
        ["critic.freeze=[embed_tokens, layers.0-1]"],
        2,
        ["critic.freeze = ", "freezes all of pipeline stage 0 (layers 0 to 1), which must train some", "or lower pp"],
    ),
    (TINY, ["critic.parallel.ep=2"], 4, ["critic.parallel.ep = 2", "llama model has none", "set ep to 1"]),
    (TINY, ["policy.parallel.etp=2"], 2, ["policy.parallel.etp = 2", "llama model has none", "set etp to 1"]),
    (TINY, ["critic.router_bias_rate=0.01"], 2, ["critic.router_bias_rate = 0.01", "llama model has no corrections; remove it"]),
    (TINY, ["critic.router_aux_coef=0.01"], 2, ["critic.router_aux_coef = 0.01", "this llama model has none; remove it"]),
    (TINY, ["policy.engine=fsdp2", "policy.parallel.tp=4"], 4, ["policy.parallel.tp = 4", "2 KV heads", "works is 2"]),
    (
        SPARSE,
        ["policy.engine=fsdp2", SP],
        2,
        ["policy.parallel.tp = 2", "plan for qwen3_moe under fsdp2; set tp to 1, or policy.engine to megatron"],
    ),
    (
        SPARSE,
        ["policy.engine=fsdp2", "policy.parallel.tp=1", "policy.compile=true"],
        2,
        ["policy.compile = true: torch.compile does not take the experts of this qwen3_moe model", "remove it"],
    ),
    (
        SPARSE,
        ["policy.engine=fsdp2", "policy.parallel.tp=1", "policy.lora.base_bits=8", "policy.lora.targets=[q_proj]"],
        2,
        [
            "policy.lora.base_bits = 8: weights in 8 bits are of dense models of a family, and this qwen3_moe model is none",
            "remove it",
        ],
    ),
    (SPARSE, [SP, "policy.lora.targets=[gate]"], 2, ['policy.lora.targets = ["gate"]', "mlp.gate chooses or weighs experts"]),
    (SPARSE, [SP, "critic.lora.targets=[experts.3.up_proj]"], 2, ["critic.lora.targets", "1 of 6 experts are named; name up_proj"]),
    (
        SPARSE,
        [SP, "policy.lora.rank=4", "rollout.adapter=separate"],
        2,
        [
            'rollout.adapter = "separate": no push fills vLLM\'s LoRA layers of experts; set it to merged',
            "out of policy.lora.targets",
        ],
    ),
    (SPARSE, [], 2, ["policy.parallel.sequence_parallel = false", "tp 2 with experts needs it", "set it to true"]),
    (SPARSE, [SP, "reference.parallel.tp=2"], 2, ["reference.parallel.sequence_parallel = false", "tp 2 with experts"]),
    (SPARSE, [SP, "policy.parallel.ep=4"], 4, ["policy.parallel.ep = 4", "does not divide the 6 experts", "divisor of 6"]),
    (SPARSE, [SP, "critic.parallel.etp=5"], 10, ["critic.parallel.etp = 5", "does not divide the 96 columns of an expert"]),
    (SPARSE | {"moe_intermediate_size": 90}, [SP, "rollout.tp=4"], 4, ["rollout.tp = 4", "90 columns of an expert"]),
    (TINY | {"intermediate_size": 383}, ["policy.parallel.tp=1", "rollout.tp=2"], 2, ["rollout.tp = 2", "383 MLP columns"]),
    (TINY, ["rollout.tp=3"], 6, ["rollout.tp = 3", "4 attention heads", "use 2 or 4"]),
    (
        SIX,
        ["rollout.tp=4"],
        4,
        ["rollout.tp = 4", "6 KV heads", "neither divides the other", "use 3 or 6"],
    ),
    (TINY, ["policy.parallel.tp=3"], 4, ["policy.parallel: tp 3 x pp 1 = 3 does not divide the 4 ranks"]),
    (
        TINY,
        ["rollout.max_response_tokens=241"],
        2,
        ["rollout.max_response_tokens = 241", "257 tokens", "256 positions of the policy", "at most 240"],
    ),
    (TINY, ["data.max_prompt_tokens=256"], 2, ["data.max_prompt_tokens = 256", "256 positions"]),
]


@pytest.mark.parametrize("facts, overrides, ranks, fragments", IMPOSSIBLE)
def test_an_impossible_layout_is_refused_with_what_works(tmp_path, facts, overrides, ranks, fragments):
    path = write_run(tmp_path)
    write_checkpoint(tmp_path / "model", facts, tokenizer=False)
    config = load_config(path, ["run.num_ranks=null", *overrides])
    text = next(world_problems(config, ranks), None)
    if text is None:
        with pytest.raises(ConfigError) as error:
            check_layouts(config, read_archs(config), ranks)
        text = str(error.value)
    assert "\n" not in text and all(fragment in text for fragment in fragments), text


def test_fsdp2_exchanges_heads_under_any_implementation(tmp_path):
    path = write_run(tmp_path)
    write_checkpoint(tmp_path / "model", TINY, tokenizer=False)
    config = load_config(path, ["run.num_ranks=null", "policy.engine=fsdp2", "policy.parallel.cp=4", "policy.dtype=bf16"])
    with pytest.raises(ConfigError, match="policy.parallel.cp = 4: .*2 attention heads and 1 KV heads .tp 2.; .* are 1, 2"):
        check_layouts(config, read_archs(config), 8, "transformer_engine")
    megatron = load_config(path, ["run.num_ranks=null", "policy.parallel.cp=4", "policy.dtype=bf16"])
    check_layouts(megatron, read_archs(megatron), 8, "transformer_engine")  # passes keys and values round a ring


@pytest.mark.parametrize(
    "overrides, ranks",
    [
        (["rollout.tp=4", "policy.parallel.tp=1"], 4),  # vLLM repeats the two KV heads
        (["policy.parallel.pp=2", "critic.parallel.pp=4"], 8),
        (["rollout.max_response_tokens=240"], 2),
        (["rollout.engine=megatron"], 6),
        (["policy.parallel.cp=2", "critic.parallel.vpp=2", "reference.parallel.cp=4"], 4),
        (["critic.parallel.layers_per_stage=[1,3]", "reference.parallel.pp=2", "reference.parallel.layers_per_stage=[3,1]"], 4),
        (
            ["policy.parallel.pp=4", "policy.parallel.tp=1", "critic.parallel.vpp=2", "critic.parallel.layers_per_stage=[1,1,1,1]"],
            4,
        ),
        ([NONE, "policy.parallel.tp=1"], 2),
        (["policy.engine=fsdp2", SP, "policy.parallel.cp=2", "critic.engine=fsdp2", "critic.parallel.pp=1"], 8),
    ],
)
def test_a_layout_that_works_passes(tmp_path, overrides, ranks):
    config = load_config(write_run(tmp_path), ["run.num_ranks=null", *overrides])
    layouts = check_layouts(config, read_archs(config), ranks)
    assert set(layouts) == ({"policy", "critic"} if NONE in overrides else {"policy", "critic", "reference"})
    assert all(layouts[role].tp == section_of(config, role).parallel.tp and layouts[role].world_size == ranks for role in layouts)


@pytest.mark.parametrize(
    "overrides, ranks",
    [
        ([SP, "policy.parallel.ep=2", "policy.router_aux_coef=0.001"], 2),
        ([SP, "policy.parallel.ep=3", "policy.parallel.etp=2", "critic.parallel.ep=3", "reference.parallel.etp=3"], 6),
        (["policy.parallel.tp=1", "policy.parallel.cp=2", "policy.parallel.ep=2", "rollout.tp=2"], 2),
    ],
)
def test_a_layout_of_experts_that_works_passes(tmp_path, overrides, ranks):
    path = write_run(tmp_path)
    write_checkpoint(tmp_path / "model", SPARSE, tokenizer=False)
    config = load_config(path, ["run.num_ranks=null", *overrides])
    assert set(check_layouts(config, read_archs(config), ranks)) == {"policy", "critic", "reference"}


@pytest.mark.parametrize("facts", [TINY, SPARSE], ids=["dense", "experts"])
def test_sizes_are_refused_exactly_where_a_model_cannot_be_cut_so(facts):
    """The rules against the weight maps: what they refuse is refused with its key before, and nothing else is."""
    arch, refused = arch_of(facts | {"num_attention_heads": 8}), 0  # two for each of four ranks
    for tp, cp, pp, vpp, ep, etp in itertools.product((1, 2, 3, 4), (1, 2), (1, 2, 3), (1, 2, 4), (1, 3, 4), (1, 2, 5)):
        world = tp * cp * pp * ep * etp
        sizes = ParallelConfig(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp, sequence_parallel=tp > 1)
        if next(parallel_problems("policy.parallel", sizes, world), None) is not None:
            continue
        text = next(model_problems("policy.parallel", sizes, arch, "local"), None)
        try:
            layout = layout_of(sizes, world)
            for stage in range(pp):
                local_shapes(arch, layout, layout.rank_of(pp=stage))
        except ValueError:
            assert text is not None and text.startswith("policy.parallel."), sizes
            refused += 1
        else:
            assert text is None, (sizes, text)
    assert refused > 50


def test_every_parallel_key_reaches_the_layout():
    sizes = {"tp": 2, "pp": 2, "vpp": 2, "cp": 2, "ep": 4, "etp": 2, "sequence_parallel": True, "layers_per_stage": (1, 2, 2, 1)}
    assert set(sizes) == set(ParallelConfig.model_fields), "a new key needs a place in the layout and here"
    layout = layout_of(ParallelConfig(**sizes), 16)
    assert layout == ParallelLayout(16, **sizes)
    assert all(layout_of(ParallelConfig(**sizes | {key: default}), 16) != layout for key, default in _defaults().items())


def _defaults():
    """Without the two keys that others need: sequence parallel needs tp, the split needs pp and vpp."""
    fields = ParallelConfig.model_fields
    return {key: fields[key].default for key in ("cp", "ep", "etp", "sequence_parallel", "layers_per_stage")}


def test_the_heads_bound_cp_only_where_attention_is_an_all_to_all(tmp_path):
    """TransformerEngine passes keys and values round a ring, which needs no heads to spare."""
    config = load_config(write_run(tmp_path), ["run.num_ranks=null", "policy.parallel.cp=4", "policy.dtype=bf16"])
    archs = read_archs(config)
    assert check_layouts(config, archs, 8, "transformer_engine")["policy"].cp == 4
    with pytest.raises(ConfigError, match="policy.parallel.cp = 4"):
        check_layouts(config, archs, 8, "local")


# what is wrong with the directory, what the message must contain
BROKEN_CHECKPOINTS = [
    (lambda p: None, ["policy.model", "is not a directory"]),
    (lambda p: p.mkdir(), ["has no config.json"]),
    (
        lambda p: write_checkpoint(p, TINY | {"architectures": ["GPT2LMHeadModel"]}),
        ["GPT2LMHeadModel is not supported", "LlamaForCausalLM", "Qwen2ForCausalLM"],
    ),
    (lambda p: write_checkpoint(p, TINY | {"hidden_act": "gelu"}), ["hidden_act", "gelu"]),
    (lambda p: write_checkpoint(p, weights=False), ["holds no .safetensors", "incomplete"]),
    (
        lambda p: (write_checkpoint(p, weights=False) / "pytorch_model.bin").write_bytes(b""),
        ["holds pytorch_model.bin", "save_pretrained"],
    ),
    (lambda p: (write_checkpoint(p) / "config.json").write_text("{"), ["not valid JSON"]),
]


@pytest.mark.parametrize("make, fragments", BROKEN_CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_used_is_named_by_its_key(tmp_path, make, fragments):
    path = write_run(tmp_path)
    make(tmp_path / "broken")
    for key in ("policy.model", "critic.model", "reference.model"):
        config = load_config(path, [f"{key}={tmp_path / 'broken'}"])
        with pytest.raises(ConfigError) as error:
            check_weights(config, read_archs(config))
        text = str(error.value)
        assert text.startswith(f"{key} = ") and str(tmp_path / "broken") in text and "\n" not in text
        assert all(fragment in text for fragment in fragments if fragment != "policy.model"), text


def test_roles_without_a_model_of_their_own_use_the_policys(tmp_path):
    other = write_checkpoint(tmp_path / "other", TINY | {"num_hidden_layers": 2}, tokenizer=False)
    config = load_config(write_run(tmp_path), [f"critic.model={other}"])
    assert {role: key for role, (key, _) in model_paths(config).items()} == {
        "policy": "policy.model",
        "critic": "critic.model",
        "reference": "policy.model",
    }
    assert {role: arch.num_layers for role, arch in read_archs(config).items()} == {"policy": 4, "critic": 2, "reference": 4}


def test_roles_must_read_the_policys_tokens(tmp_path):
    path = write_run(tmp_path)
    larger = write_checkpoint(tmp_path / "larger", TINY | {"vocab_size": 65}, tokenizer=False)
    smaller = write_checkpoint(tmp_path / "smaller", TINY | {"vocab_size": 63}, tokenizer=False)
    cases = [("critic", larger, True), ("critic", smaller, False), ("reference", larger, False)]
    for key, model, works in [*cases, ("teacher", larger, True), ("teacher", smaller, False)]:
        config = load_config(path, [f"{key}.model={model}", "algorithm.distillation.coef=1.0"])
        if works:
            check_layouts(config, read_archs(config), 2)
        else:
            with pytest.raises(ConfigError, match=f"{key}.model: its vocabulary has 6[35] tokens and the policy's 64"):
                check_layouts(config, read_archs(config), 2)


def test_fine_tuning_is_checked_alike(tmp_path):
    model = write_checkpoint(tmp_path / "model", SIX, tokenizer=False)
    path = tmp_path / "sft.yaml"
    path.write_text(
        json.dumps({"policy": {"model": str(model), "parallel": {"tp": 4}}, "data": {"train": "t.jsonl", "max_tokens": 200}})
    )
    config = load_config(path, (), SftConfig)
    with pytest.raises(ConfigError, match="policy.parallel.tp = 4"):
        check_layouts(config, read_archs(config), 4)
    long = load_config(path, ["policy.parallel.tp=1", "data.max_tokens=257"], SftConfig)
    with pytest.raises(ConfigError, match="data.max_tokens = 257: the policy has 256 positions"):
        check_layouts(long, read_archs(long), 4)
    assert set(check_layouts(load_config(path, ["policy.parallel.tp=2"], SftConfig), read_archs(config), 4)) == {"policy"}


PAGE = (Path(__file__).parents[3] / "docs/engines.md").read_text()
ROWS = re.findall(r"^\| ([\w, ]+) \| (yes|no) \| (yes|no) \| (yes|no|without experts') \| (yes|no), (yes|no) \|$", PAGE, re.M)
STATED = {family: tuple(cells) for families, *cells in ROWS for family in families.split(", ")}
WHOLE = ["policy.parallel.tp=1", "critic.parallel.pp=1"]
FSDP2 = [*WHOLE, *(f"{role}.engine=fsdp2" for role in ("policy", "critic", "reference"))]
ADAPTED = [*WHOLE, NONE, "policy.lora.rank=8"]
OF_ATTENTION = "policy.lora.targets=[q_proj, o_proj]"


def test_the_page_has_every_family():
    assert STATED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_page_says_of_a_family_is_what_a_run_is_told(tmp_path, family):
    """By the checks of a run; of exports by the classes that transformers has."""
    stem = FAMILIES[family].stem
    facts = hf_config(next(case for case, (of, _) in {**CASES, **EXPERT_CASES}.items() if of == stem))
    facts = facts.to_dict() | {"architectures": [FAMILIES[family].architecture()]}
    path = write_run(tmp_path)
    write_checkpoint(tmp_path / "model", facts, weights=False, tokenizer=False)

    def works(*changes):
        config = load_config(path, list(changes))
        try:
            return bool(check_layouts(config, read_archs(config), 2))
        except ConfigError as error:
            assert "\n" not in str(error)
            return False

    assert works(*ADAPTED) and works(*FSDP2), "negative control: what is refused below is so for one key"
    separate = works(*ADAPTED, "rollout.adapter=separate"), works(*ADAPTED, OF_ATTENTION, "rollout.adapter=separate")
    found = [
        works(*FSDP2, "policy.parallel.tp=2", SP),
        works(*ADAPTED, "policy.lora.base_bits=8"),
        {(True, True): True, (False, True): "without experts'", (False, False): False}[separate],
        *(hasattr(transformers, FAMILIES[family].architecture(head)) for head in ("TokenClassification", "SequenceClassification")),
    ]
    assert tuple({True: "yes", False: "no"}.get(cell, cell) for cell in found) == STATED[family]
