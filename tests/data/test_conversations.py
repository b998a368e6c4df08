"""The assistant's tokens in conversations: six families of chat templates, with and without generation markers; tool calls."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from megappo.data.cache import Cache
from megappo.data.conversations import learned_tokens
from megappo.data.prompts import PromptFormat
from megappo.data.texts import DemonstrationRules, DemonstrationSet, demonstrations_of
from megappo.data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from tests.data.record_lists import Records
from tests.data.tokenizer_files import write_hf_tokenizer

# Each writes an assistant's turn as OPEN, WHAT IT SAYS, CLOSE; the markers enclose what is said and its end.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}OPEN{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>CLOSE{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<head>{{ m.role }}</head>\n\n"
    "{% if m.role == 'assistant' %}OPEN{{ m.content | trim }}</s>CLOSE{% else %}{{ m.content | trim }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<head>assistant</head>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
    "OPEN {{ m.content }}</s>CLOSE{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}OPEN{{ m.content | trim }}<|im_end|>CLOSE{% else %}{{ m.content | trim }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}OPEN{{ m.content }}<|im_end|>CLOSE"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}OPEN{{ m.content }}</s>CLOSE"
    "{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Writes thoughts in the last turn only, as Qwen3 does.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "phi": PHI, "zephyr": ZEPHYR}
TALK = [
    {"role": "user", "content": "What is 12 + 34?"},
    {"role": "assistant", "content": "The answer is 46."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Twice as much."},
]


def plain(template: str) -> str:
    return template.replace("OPEN", "").replace("CLOSE", "")


def marked(template: str) -> str:
    return template.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, made = tmp_path_factory.mktemp("templates"), dict[str, Tokenizer]()

    def make(template: str) -> Tokenizer:
        if template not in made:
            made[template] = load_tokenizer(write_hf_tokenizer(folder / str(len(made)), chat_template=template))
        return made[template]

    return make


def said(tokenizer: Tokenizer, ids: list[int], spans: list[int]) -> list[str]:
    return [tokenizer.decode_all(ids[begin:end]) for begin, end in zip(spans[::2], spans[1::2])]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_assistant_says_is_what_the_markers_of_the_template_enclose(family: str, tokenizer_of: Any) -> None:
    """The mask from prefixes of the plain template against transformers' own of the marked one, which megappo reads too."""
    without, marks = tokenizer_of(plain(FAMILIES[family])), tokenizer_of(marked(FAMILIES[family]))
    assert isinstance(marks, HuggingFaceTokenizer)
    found = marks._tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    ids, spans = learned_tokens(TALK, None, "all", without)
    mask = [int(any(begin <= place < end for begin, end in zip(spans[::2], spans[1::2]))) for place in range(len(ids))]
    assert ids == list(found["input_ids"]) and mask == list(found["assistant_masks"]) and sum(mask) > 4
    assert learned_tokens(TALK, None, "all", marks) == (ids, spans)
    end = "<|im_end|>" if "<|im_end|>" in FAMILIES[family] else "</s>"
    assert [text.strip() for text in said(without, ids, spans)] == [f"{message['content']}{end}" for message in TALK[1::2]]
    assert learned_tokens(TALK, None, "last", without) == (ids, spans[-2:])
    assert ids == without.conversation(TALK)


def test_a_prompt_before_the_turn_has_the_tokens_of_a_rollout(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of(plain(CHATML))
    ids, spans = learned_tokens(TALK, None, "all", tokenizer)
    assert ids[: spans[0]] == tokenizer.chat(TALK[:1]) and ids[: spans[2]] == tokenizer.chat(TALK[:3])


def test_a_template_that_writes_earlier_turns_otherwise_learns_the_last_alone(tokenizer_of: Any) -> None:
    talk = [TALK[0], {"role": "assistant", "content": "<think>3 + 1</think>46"}, *TALK[2:]]
    tokenizer = tokenizer_of(THINKING)
    with pytest.raises(ValueError, match="writes message 1 otherwise once others follow; set data.turns to last"):
        learned_tokens(talk, None, "all", tokenizer)
    ids, spans = learned_tokens(talk, None, "last", tokenizer)
    assert said(tokenizer, ids, spans) == ["Twice as much.<|im_end|>"]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 34}}}


def test_calls_of_tools_are_learned_and_their_answers_are_not(tokenizer_of: Any) -> None:
    talk = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "46"}, TALK[1]]
    built = build([{"messages": talk}], tokenizer_of(plain(CHATML)))
    tokens, spans = built[0].tokens, built[0].spans
    texts = said(tokenizer_of(plain(CHATML)), list(tokens), list(spans))
    assert texts == ['<call>add {"a": 12, "b": 34}</call><|im_end|>', "The answer is 46.<|im_end|>"]
    mask = built.packed([0])["response_mask"]
    assert mask.sum() == spans[1] - spans[0] + spans[3] - spans[2] and not mask[: spans[0]].any()


def build(records: list, tokenizer: Tokenizer, **keys: Any) -> DemonstrationSet:
    rules = DemonstrationRules("prompt", "answer", PromptFormat(), 200, **{"messages_key": "messages", **keys})
    return demonstrations_of(Records(records, "s"), tokenizer, rules, Cache())


def test_a_system_message_is_put_before_a_conversation_without_one(tokenizer_of: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(plain(CHATML))
    rules = DemonstrationRules("p", "a", PromptFormat(system_prompt="Be brief."), 200, messages_key="messages")
    built = demonstrations_of(Records([{"messages": TALK}], "s"), tokenizer, rules, Cache())
    assert tokenizer.decode_all(built[0].tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>")


@pytest.mark.parametrize(
    "messages, says",
    [
        ("hello", "data.messages_key=messages: s#0 holds no list of chat messages"),
        ([], "data.messages_key=messages: s#0 holds no list of chat messages"),
        ([{"content": "hello"}], "message 0 of s#0 is no chat message"),
        ([TALK[0], {"role": "assistant"}], "message 1 of s#0 has neither a text as content nor tool_calls"),
        ([TALK[0], {"role": "assistant", "content": ""}], "message 1 of s#0, of the assistant, is empty"),
        (TALK[:3], "s#0 ends with a message of the user, after which nothing is learned"),
    ],
)
def test_bad_conversations_give_one_line(messages: Any, says: str, tokenizer_of: Any) -> None:
    with pytest.raises(ValueError) as caught:
        build([{"messages": messages}], tokenizer_of(plain(CHATML)))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_template_that_refuses_the_messages_names_the_record(tokenizer_of: Any) -> None:
    with pytest.raises(ValueError, match="^s#0: the chat template of .* refuses the messages: only user and assistant"):
        build([{"messages": [{"role": "system", "content": "x"}, *TALK]}], tokenizer_of(plain(MISTRAL)))


def test_the_example_shows_what_is_learned(tokenizer_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.setenv("MEGAPPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALK}))
    tokenizer = tokenizer_of(plain(ZEPHYR))
    config = f"policy: {{model: {tokenizer.path}}}\ndata: {{train: {tmp_path / 'talks.jsonl'}, messages_key: messages}}\n"
    (tmp_path / "sft.yaml").write_text(config)
    importlib.import_module("learned_tokens").main(str(tmp_path / "sft.yaml"))
    shown = capsys.readouterr().out
    assert "</s><|assistant|>\n[The answer is 46.</s>]<|user|>\nHow many?</s><|assistant|>\n[Twice as much.</s>]" in shown


# -------------------------------------------------------------------------------------------------------------- token ids


def ids_of(records: list, tokenizer: Tokenizer, **keys: Any) -> DemonstrationSet:
    return build(records, tokenizer, messages_key=None, tokens_key="ids", **keys)


def test_token_ids_are_used_as_they_are(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of(plain(CHATML))
    built = ids_of([{"ids": [5, 6, 7, 8], "mask": [1, 0, 1, 1]}], tokenizer, mask_key="mask")
    assert built[0].tokens == (5, 6, 7, 8) and built[0].spans == (2, 4), "the first has no prefix"
    assert ids_of([{"ids": [5, 6, 7]}], tokenizer)[0].spans == (1, 3)


@pytest.mark.parametrize(
    "record, says",
    [
        ({"ids": "5 6"}, "data.tokens_key=ids: s#0 holds no list of token ids"),
        ({"ids": [5, 10**6]}, "data.tokens_key=ids: s#0 holds no list of token ids"),
        ({"ids": [5, True]}, "data.tokens_key=ids: s#0 holds no list of token ids"),
        ({"ids": [5]}, "data.tokens_key=ids: s#0 has no token to learn"),
    ],
)
def test_bad_token_ids_give_one_line(record: dict, says: str, tokenizer_of: Any) -> None:
    with pytest.raises(ValueError, match=says):
        ids_of([record], tokenizer_of(plain(CHATML)))


def test_a_mask_of_another_length_and_one_of_nothing_are_refused(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of(plain(CHATML))
    with pytest.raises(ValueError, match="data.mask_key=mask: s#0 holds no list of 2 numbers 0 and 1"):
        ids_of([{"ids": [5, 6], "mask": [1]}], tokenizer, mask_key="mask")
    with pytest.raises(ValueError, match="has no token to learn"):
        ids_of([{"ids": [5, 6], "mask": [1, 0]}], tokenizer, mask_key="mask")


def test_overlong_records_are_refused_on_request(tokenizer_of: Any) -> None:
    with pytest.raises(ValueError, match="data.max_tokens=200: s#0 has 300 tokens; raise it, or set data.overlong to filter"):
        ids_of([{"ids": [5] * 300}], tokenizer_of(plain(CHATML)), overlong="error")


def test_an_empty_response_is_refused(tokenizer_of: Any) -> None:
    with pytest.raises(ValueError, match="data.response_key=answer: s#0 has an empty response"):
        build([{"prompt": "1", "answer": ""}], tokenizer_of(plain(CHATML)), messages_key=None)
