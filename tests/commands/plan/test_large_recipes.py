"""The recipes for large runs, planned from the facts of their models alone, and every rank's model built on the meta device."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.plan.memory import count_parameters
from megappo.config.loading import load_config
from megappo.config.role_sections import section_of
from megappo.models.hf_config import read_arch
from megappo.models.weight_map import local_shapes
from megappo.parallel.layout import ParallelLayout, layout_of
from tests.models.meta import parameters_of_rank

CONFIGS = Path(__file__).parents[3] / "configs"
FACTS = CONFIGS / "models"
PAGE = (CONFIGS.parent / "docs" / "layouts.md").read_text()
# recipe, facts, GPUs, parameters by the weight files of the published checkpoint
RECIPES = [
    ("llama3.1_70b_64gpu", "Llama-3.1-70B-Instruct", 64, 70_553_706_496),
    ("qwen2.5_32b_32gpu", "Qwen2.5-32B-Instruct", 32, 32_763_876_352),
    ("qwen3_30b_a3b_32gpu", "Qwen3-30B-A3B", 32, 30_532_122_624),
    ("llama3.1_405b_256gpu", "Llama-3.1-405B-Instruct", 256, 405_853_388_800),
    ("gpt_oss_120b_64gpu", "gpt-oss-120b", 64, 116_829_156_672),
    ("qwen3_next_80b_a3b_64gpu", "Qwen3-Next-80B-A3B-Instruct", 64, 79_674_391_296),
    ("glm4.5_256gpu", "GLM-4.5", 256, 352_797_829_024),
    ("deepseek_v3_512gpu", "DeepSeek-V3", 512, 671_026_419_200),
]
BY_NAME = pytest.mark.parametrize("recipe, facts, gpus, parameters", RECIPES, ids=[name for name, *_ in RECIPES])


def test_every_large_recipe_is_here():
    assert {path.stem for path in (CONFIGS / "large").glob("*.yaml")} == {name for name, *_ in RECIPES}


@BY_NAME
def test_plan_accepts_it_from_the_facts_alone_and_refuses_a_third_of_the_memory(recipe, facts, gpus, parameters, capsys):
    path, model = CONFIGS / "large" / f"{recipe}.yaml", FACTS / facts
    arguments = ["plan", str(path), "--shapes-only", f"policy.model={model}", "--gpu-memory-gib"]
    assert cli.main([*arguments, "80"]) == 0
    text = capsys.readouterr().out
    assert f"{parameters:,}" in text and f"{gpus} ranks on cuda" in text
    assert "WARNING" not in text and "would relieve it" in text
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{recipe}.yaml` |"))
    (peak,) = re.findall(r"fullest rank: \d+, about ([\d.]+) of", text)
    host, (size,) = re.findall(r"a rank, (\d+) on a node of 8", text), re.findall(r"about (\d+) GiB each", text)
    assert f"| {gpus} |" in row and row.endswith(f"| {peak} | {' + '.join(host)} | {size} GiB |"), "the table of the page"
    command = f"    megappo plan configs/large/{recipe}.yaml --shapes-only --gpu-memory-gib 80 "
    if command in PAGE:  # what the page shows is what is printed
        after = PAGE.split(command)[1].splitlines()[1:]
        shown = [line.removeprefix("    ") for line in takewhile(lambda line: line.startswith("    ") or not line, after)]
        assert len(shown) >= 25 and [line for line in shown if line.strip() != "..." and line not in text.splitlines()] == []
    assert cli.main([*arguments, "27"]) == 2, "negative control"
    assert "GiB" in capsys.readouterr().err


@BY_NAME
def test_without_the_flag_the_missing_weights_are_named(recipe, facts, gpus, parameters, capsys):
    path = CONFIGS / "large" / f"{recipe}.yaml"
    assert cli.main(["plan", str(path), f"policy.model={FACTS / facts}", "--gpu-memory-gib", "80"]) == 2
    assert "holds no .safetensors weights" in capsys.readouterr().err


@pytest.mark.slow
@BY_NAME
def test_the_model_of_every_kind_of_rank_is_built_on_the_meta_device(recipe, facts, gpus, parameters):
    config, arch = load_config(CONFIGS / "large" / f"{recipe}.yaml"), read_arch(FACTS / facts)
    assert count_parameters(arch, ParallelLayout(1), 0).total == parameters
    for role in ("policy", "critic", "reference"):
        layout, value_head = layout_of(section_of(config, role).parallel, gpus), role == "critic"
        built_kinds = set()
        for rank in range(gpus):
            at = layout.coordinates(rank)
            # One rank of each stage in full. Of the others a layer of each chunk, which is what their tp and ep ranks decide: every
            # ep rank in the last stage, since the first layers may have no experts. Their place in dp and cp changes no shape.
            full = rank == layout.rank_of(pp=at.pp)
            kind = (at.tp, at.etp, at.ep) if at.pp == layout.pp - 1 else (at.tp, at.pp == 0)
            if not full and kind in built_kinds:
                continue
            if not full:
                built_kinds.add(kind)
            small = arch if full else replace(arch, num_layers=layout.pp * layout.vpp)
            there = layout if full else replace(layout, layers_per_stage=())
            built = parameters_of_rank(small, there, rank, value_head=value_head)
            expected = local_shapes(small, there, rank, value_head)
            assert {name: tuple(p.shape) for name, p in built.items()} == {n: tuple(s) for n, s in expected.items()}, (role, rank)
