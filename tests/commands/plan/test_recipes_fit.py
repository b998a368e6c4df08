"""The recipes with the published shapes of their models (`configs/models`): they are planned and verified without a download, and
those of GSM8K have the known number of parameters and fit on 80 GiB GPUs."""

import re
import socket
from pathlib import Path

import pytest
import torch
import transformers

from megappo.commands import cli
from megappo.commands.convert.shell import parse_shell
from megappo.commands.plan.estimate import check_plan, work_out
from megappo.commands.plan.memory import GIB, count_parameters
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config, load_run
from megappo.models.arch import ModelArch
from megappo.models.hf_config import arch_of, read_arch
from megappo.parallel.layout import ParallelLayout
from megappo.trainer.prepare.layouts import check_layouts, model_paths
from tests.trainer.public_models import PUBLIC

CONFIGS = Path(__file__).parents[3] / "configs"
FACTS = sorted(CONFIGS.glob("models/*/config.json"))
# All but those of the quickstart, which makes its model, and the gates.
OF_PUBLIC_MODELS = sorted(
    str(path.relative_to(CONFIGS))
    for path in CONFIGS.rglob("*.yaml")
    if path.parent.name != "gates" and not path.stem.startswith("quickstart")
)
# A recipe that `megappo convert` wrote names its model on the hub.
LOCAL = {"gsm8k_deepseek_7b_verl.yaml": [f"{role}.model=models/deepseek-llm-7b-chat" for role in ("policy", "critic")]}
# recipe -> its model's config.json, number of parameters by its weight files
RECIPES = {name: of_model[:2] for name, of_model in PUBLIC.items()}
RECIPES["gsm8k_deepseek_7b_verl"] = RECIPES["gsm8k_deepseek_7b_chat"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_on_its_gpus_and_not_on_a_tenth_of_them(name):
    shape, parameters = RECIPES[name]
    config = load_config(CONFIGS / f"{name}.yaml")
    arch = arch_of(shape)
    assert count_parameters(arch, ParallelLayout(1), 0).total == parameters
    archs: dict[str, ModelArch] = dict.fromkeys(("policy", "critic", "reference"), arch)
    world = config.run.num_ranks
    assert world is not None
    layouts = check_layouts(config, archs, world)
    plan = check_plan(work_out(config, archs, layouts, world, "cuda", 80 * GIB))
    assert not plan.warnings and plan.rollout is not None and plan.rollout.kv_cache is not None
    assert plan.rollout.kv_cache // plan.rollout.kv_bytes_per_token >= plan.step.max_sequence_tokens
    small = make_plan_on(config, archs, layouts, world, plan.certain(plan.fullest_rank()) // 10)
    assert small is None, "negative control"


def make_plan_on(config, archs, layouts, world, memory):
    """The plan, None if it is refused."""
    try:
        return check_plan(work_out(config, archs, layouts, world, "cuda", memory))
    except ConfigError:
        return None


# Their published counts are held by tests/models/test_delta.py.
WITHOUT_RECIPE = {"Qwen3.5-27B", "Qwen3.5-35B-A3B"}


def test_there_are_facts_of_the_models_that_the_recipes_name_and_of_no_others():
    named = {Path(model).name for path in OF_PUBLIC_MODELS for _, model in model_paths(load_run(CONFIGS / path)).values()}
    named |= {model_of(words) for words in commands_of("ppo_images")}
    assert named | WITHOUT_RECIPE == {path.parent.name for path in FACTS} and not named & WITHOUT_RECIPE


def test_the_facts_give_the_parameters_that_their_page_states():
    stated = re.findall(r"^\| (\S+) \| ([\d,]*\d)", (CONFIGS / "models/README.md").read_text(), re.MULTILINE)
    counted = {path.parent.name: count_parameters(read_arch(path.parent), ParallelLayout(1), 0).total for path in FACTS}
    assert dict(stated) == {name: f"{total:,}" for name, total in counted.items()}


@pytest.fixture
def offline(monkeypatch):
    """In configs/, whose models/ the recipes find, without a network and outside of a world of ranks."""

    def refused(self, address):
        raise OSError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(CONFIGS)


@pytest.mark.parametrize("recipe", OF_PUBLIC_MODELS)
def test_every_recipe_is_planned_and_verified_from_the_facts_of_its_models(recipe, offline, monkeypatch, capsys):
    arguments = [recipe, *LOCAL.get(recipe, [])]
    assert cli.main(["plan", *arguments, "--shapes-only", "--gpu-memory-gib", "80"]) == 0
    assert "tensors, tokenizer and data are unchecked" in capsys.readouterr().out
    # Up to the ranks, which tests/commands/verify starts.
    monkeypatch.setattr("megappo.commands.verify.run._measure", lambda runs, folder, module: 77)
    assert cli.main(["verify", *arguments]) == 77
    assert "3 PPO steps of" in capsys.readouterr().out


def test_the_plan_of_an_asynchronous_run_says_the_smallest_staleness_that_reaches_its_floor(offline, capsys):
    """As `megappo tune` says it, also of a run with another max_staleness; negative control: a synchronous one."""
    command = ["plan", "recipes/async_ppo.yaml", "--shapes-only", "--gpu", "h100"]
    said = []
    for k in (0, 2):
        assert cli.main([*command, f"rollout.max_staleness={k}"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        step = re.search(r"about ([\d.]+) s a step", out)
        enough = re.search(r"rollout.max_staleness=(\d+) reaches ([\d.]+) s", out)
        assert step is not None and enough is not None
        said.append((float(step[1]), enough.groups()))
    (slow, first), (fast, second) = said
    assert first == second == ("1", f"{fast:.3g}") and slow > 1.1 * fast
    assert cli.main([*command, "rollout.max_staleness=null"]) == 0
    assert "max_staleness=" not in capsys.readouterr().out


# Recipes whose head has the commands for another model, or for several GPUs.
OF_PAIRS = ("dpo", "reward_model")


def commands_of(recipe: str) -> list[list[str]]:
    """The commands that a recipe's head says, as `megappo plan` takes them in configs/."""
    head = "\n".join(re.findall(r"^# +(\w+=.*|megappo .*)$", (CONFIGS / "recipes" / f"{recipe}.yaml").read_text(), re.MULTILINE))
    words = [one[2:] for one in parse_shell(head, recipe, {}).commands]
    return [[path.removeprefix("configs/"), *overrides] for path, *overrides in words]


def model_of(words: list[str]) -> str:
    return Path(next((one for one in words if one.startswith("policy.model=")), "Qwen2.5-VL-3B-Instruct")).name


def test_images_fit_with_the_towers_of_every_model_in_the_head(offline, capsys):
    stated = dict(re.findall(r"^\| (\S+) \| ([\d,]*\d)", (CONFIGS / "models/README.md").read_text(), re.MULTILINE))
    commands = commands_of("ppo_images")
    assert [model_of(words) for words in commands] == [
        *(f"Qwen2.5-VL-{size}-Instruct" for size in ("3B", "7B")),
        *(f"Qwen3-VL-{size}-Instruct" for size in ("4B", "8B")),
    ]
    for words in commands:
        assert cli.main(["plan", *words, "--shapes-only", "--gpu-memory-gib", "80"]) == 0
        out = capsys.readouterr().out
        assert "WARNING" not in out and f"  policy     qwen{model_of(words)[4]}" in out and f" {stated[model_of(words)]} " in out
        assert "one image of data.max_image_pixels" in out and "8,192 patches" not in out
    experts = "recipes/ppo_images_moe.yaml"
    assert commands_of("ppo_images_moe") == [[experts]]
    assert cli.main(["plan", experts, "--shapes-only", "--gpu-memory-gib", "80"]) == 0
    out = capsys.readouterr().out
    assert "WARNING" not in out and "one image of data.max_image_pixels" in out and "features of frozen towers" in out
    trained = ["policy.freeze=[]", "critic.freeze=[]"]
    assert cli.main(["plan", *commands[0], *trained, "--shapes-only", "--gpu-memory-gib", "80"]) == 0
    assert "WARNING" in capsys.readouterr().out, "negative control: the activations of towers that train are counted"


@pytest.mark.parametrize("recipe", OF_PAIRS)
def test_every_command_in_the_head_of_a_recipe_fits_on_its_gpus(recipe, offline, capsys):
    commands = commands_of(recipe)
    assert {Path(next((one for one in words if ".model=" in one), "Llama-3.2-1B-Instruct")).name for words in commands} == {
        "Llama-3.2-1B-Instruct",
        "Ministral-3-3B-Instruct-2512",
    }
    assert [words[-1] == "run.num_ranks=8" for words in commands] == [False, True] * 2
    for words in commands:
        assert cli.main(["plan", *words, "--shapes-only", "--gpu-memory-gib", "80"]) == 0
        out = capsys.readouterr().out
        assert "WARNING" not in out and f"{8 if 'run.num_ranks=8' in words else 1} ranks on cuda" in out
    without = [one for one in commands[2] if ".recompute=" not in one]
    assert cli.main(["plan", *without, "--shapes-only", "--gpu-memory-gib", "80"]) == 0
    assert "WARNING" in capsys.readouterr().out, "negative control"


def test_fine_tuning_fits_on_its_gpus(offline, capsys):
    assert cli.main(["plan", "recipes/sft.yaml", "--shapes-only", "--gpu-memory-gib", "80"]) == 0
    assert "WARNING" not in capsys.readouterr().out


def test_a_reward_model_is_planned_with_its_head_in_place_of_the_output(offline, capsys):
    config = transformers.AutoConfig.from_pretrained("models/Llama-3.2-1B-Instruct", num_labels=1)
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert cli.main(["plan", "recipes/reward_model.yaml", "--shapes-only", "--gpu-memory-gib", "80"]) == 0
    assert f" {total:,} " in capsys.readouterr().out


def test_a_model_that_is_not_there_is_a_connection(offline, capsys):
    """Negative control."""
    assert cli.main(["plan", next(iter(LOCAL)), "--shapes-only"]) == 2
    assert "not downloaded from the Hugging Face hub" in capsys.readouterr().err
