"""Variables of the chat template: in every prompt of a run, in what decides its data, and as defaults of what it exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from megappo.commands.generate.inputs import template_args_of
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.schema import TrainConfig
from megappo.config.supervised import SftConfig
from megappo.data.cache import Cache
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import PromptFormat
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from megappo.rollout.environment import Conversation
from megappo.trainer.prepare.data import tokenizer_of
from tests.data.record_lists import Records
from tests.data.tokenizer_files import TEMPLATE, write_hf_tokenizer

# As Qwen 3 has it, and a variable in a macro; `style` is set by the template itself.
THINKING = (
    "{%- macro ending() %}{{ suffix }}{% endmacro %}{% set style = 'plain' %}"
    + TEMPLATE
    + "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}"
    "{% generation %}{{ ending() }}{% endgeneration %}"
)
ASKED = [{"role": "user", "content": "1+2"}]
VARIABLES: dict[str, Any] = {"enable_thinking": False, "suffix": 'é\n"\\' + "\U0001f600 %} {{ x }}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_tokenizer(tmp_path_factory.mktemp("thinking"), chat_template=THINKING)


def rendered(folder: Path, **variables: Any) -> str:
    """Text of a prompt by transformers alone."""
    library = transformers.AutoTokenizer.from_pretrained(folder)
    text = library.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, **variables)
    assert isinstance(text, str)
    return text


def test_prompts_and_turns_have_the_variables(folder: Path) -> None:
    plain, without = load_tokenizer(folder), load_tokenizer(folder, template_args={"enable_thinking": False})
    assert plain.decode_all(plain.chat(ASKED)) == rendered(folder)
    assert (
        without.decode_all(without.chat(ASKED)) == rendered(folder, enable_thinking=False) == rendered(folder) + "<think></think>"
    )
    turns = [Conversation(one, True).follow({"role": "user", "content": "3"}, ended=True) for one in (plain, without)]
    assert without.decode_all(turns[1]) == plain.decode_all(turns[0]) + "<think></think>"


def test_they_decide_the_prepared_prompts_and_the_facts_of_a_run(folder: Path, tmp_path: Path) -> None:
    def prompt(tokenizer: Tokenizer) -> str:
        records = Records([{"prompt": "1+2", "answer": "3"}], "s")
        [found] = prompts_of(records, tokenizer, PromptRules("prompt", "answer", PromptFormat(), 99), Cache(tmp_path)).prompts
        return tokenizer.decode_all(found.tokens)

    plain, without = load_tokenizer(folder), load_tokenizer(folder, template_args={"enable_thinking": False})
    assert prompt(without) == prompt(plain) + "<think></think>" == prompt(without), "of one cache"
    empty = load_tokenizer(folder, template_args={})
    assert (empty.identity(), empty.chat_template_sha256) == (plain.identity(), plain.chat_template_sha256)
    assert without.chat_template_sha256 != plain.chat_template_sha256 and without.fingerprint == plain.fingerprint


@pytest.mark.parametrize("first", ["", "\n", "  ", "\n\n  "])
@pytest.mark.parametrize("named", [False, True])
def test_an_export_renders_the_same_prompt_without_them(tmp_path: Path, first: str, named: bool) -> None:
    template: Any = first + THINKING
    if named:
        template = [{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ messages[0]['content'] }}"}]
    trained = load_tokenizer(write_hf_tokenizer(tmp_path / "trained", chat_template=template), template_args=VARIABLES)
    trained.save(tmp_path / "export")
    expected = rendered(tmp_path / "trained", **VARIABLES)
    assert rendered(tmp_path / "export") == expected == trained.decode_all(trained.chat(ASKED)) != rendered(tmp_path / "trained")
    again = load_tokenizer(tmp_path / "export")
    assert again.chat(ASKED) == trained.chat(ASKED) and again.eos_ids == trained.eos_ids
    other = {"enable_thinking": True, "suffix": "!"}
    assert rendered(tmp_path / "export", **other) == rendered(tmp_path / "trained", **other), "they are defaults only"
    assert load_tokenizer(tmp_path / "export", template_args={"suffix": "?"}).chat(ASKED) != again.chat(ASKED)
    assert "chat_template" not in json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    if named:
        library = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
        assert library.apply_chat_template(ASKED, tokenize=False, chat_template="tool_use") == "1+2"


@pytest.mark.parametrize("value", [None, 0.5, 3, [1, "a", None], {"a": [True], "b": {}}])
def test_values_of_every_kind_are_defaults(tmp_path: Path, value: Any) -> None:
    template = "{{ messages[0]['content'] }}{{ budget | tojson }}"
    trained = load_tokenizer(write_hf_tokenizer(tmp_path / "trained", chat_template=template), template_args={"budget": value})
    trained.save(tmp_path / "export")
    assert rendered(tmp_path / "export") == rendered(tmp_path / "trained", budget=value)


def test_without_them_the_files_are_copied_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    load_tokenizer(folder).save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {f.name: f.read_bytes() for f in folder.iterdir()}


@pytest.mark.parametrize(
    "name, says",
    [
        ("enable_thinkng", "reads no enable_thinkng; variables that it reads: enable_thinking, suffix"),
        ("style", "reads no style"),
        ("messages", "messages is set by the tokenizer or by megappo"),
        ("tools", "tools is set by"),
        ("add_generation_prompt", "add_generation_prompt is set by"),
        ("bos_token", "bos_token is set by"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(folder: Path, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^data.template_args: .*{says}"):
        load_tokenizer(folder, template_args={name: 1})


def test_a_run_takes_them_from_its_configuration(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"policy: {{model: m}}\ndata: {{train: t, tokenizer: {folder}}}\n")
    for cls in (TrainConfig, SftConfig):
        config = load_config(file, ["data.template_args.enable_thinking=false"], cls)
        found = tokenizer_of(config)
        assert found.decode_all(found.chat(ASKED)) == rendered(folder, enable_thinking=False)


def test_generate_reads_a_mapping() -> None:
    assert template_args_of("{enable_thinking: false}") == {"enable_thinking": False}
    with pytest.raises(ConfigError, match=r"--template-args = \"no\": must be a mapping"):
        template_args_of("no")
