"""Both tokenizers against the libraries they wrap, and the one-line errors of unusable ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megappo.data.tokenizers import Tokenizer, load_tokenizer
from scripts.arithmetic import train_tokenizer
from tests.data.tokenizer_files import SPECIAL, TEXTS, write_hf_tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "What is 12 + 34?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Zwei € und \U0001f600 <|im_end|>"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "  c\n\n"}],
]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_hf_tokenizer(tmp_path_factory.mktemp("hf")))


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


def train_unigram(path: Path, **options: object) -> Path:
    """A SentencePiece model with its defaults: dummy prefix, normalisation."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 5), model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2, **options
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_gives_the_ids_of_apply_chat_template(hf: Tokenizer, messages: list) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(hf.path))
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert hf.chat(messages) == expected
    assert hf.chat(messages) != oracle.apply_chat_template(messages, add_generation_prompt=False, return_dict=True)["input_ids"]


def test_special_ids_are_those_of_the_files(hf: Tokenizer, char: Tokenizer) -> None:
    assert (hf.pad_id, hf.bos_id, hf.eos_id, hf.eos_ids) == (0, 1, 2, (2, 4))
    assert (char.pad_id, char.bos_id, char.eos_id, char.eos_ids) == (0, 1, 2, (2,))
    assert (hf.has_chat_template, char.has_chat_template) == (True, False)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, {}, (2,)),
        (None, {"eos_token_id": 7}, (2, 7)),
        (None, {"eos_token_id": [7, 2, 9]}, (2, 7, 9)),
        (None, {"text_config": {"eos_token_id": [7]}}, (2, 7)),
        ({"eos_token_id": 8}, {"eos_token_id": [7, 9]}, (2, 8)),
        ({"eos_token_id": [8, 5]}, {"eos_token_id": 7}, (2, 8, 5)),
        ({"temperature": 0.5}, {"eos_token_id": [7]}, (2, 7)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (2,)),
    ],
)
def test_ids_of_the_model_end_a_response_too(tmp_path: Path, generation: dict | None, config: dict, ids: tuple[int, ...]) -> None:
    """Beside its own files, and as that of another model: generation settings, else the configuration, as transformers has it."""
    from transformers import GenerationConfig

    tokenizer, model = train_tokenizer(tmp_path / "t"), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    found = load_tokenizer(tokenizer, model).eos_ids
    assert found == ids and load_tokenizer(tokenizer).eos_ids == (2,)
    if generation is None or generation.get("eos_token_id"):
        library = GenerationConfig.from_model_config(config) if generation is None else GenerationConfig.from_pretrained(model)
        theirs = library.eos_token_id
        assert set(found) == {2, *(theirs if isinstance(theirs, list) else [] if theirs is None else [theirs])}
    write_hf_tokenizer(model)
    (model / "generation_config.json").unlink()
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    assert set(load_tokenizer(model).eos_ids) == set(ids)


def test_an_eos_id_that_is_none_is_refused_with_its_file(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "t")
    (tmp_path / "config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ValueError, match="config.json: eos_token_id = ..</s>..: must be an id, a list of ids or null"):
        load_tokenizer(tokenizer, tmp_path)


def test_a_prompt_starts_with_bos_and_never_ends_with_eos(hf: Tokenizer, char: Tokenizer) -> None:
    """The Hugging Face tokenizer here is set to add eos to every text, which would end a prompt before its response."""
    for tokenizer, text in ((hf, "What is 12?"), (char, "12+34=")):
        assert tokenizer.encode_prompt(text) == [1, *tokenizer.encode(text)]
        assert 2 not in tokenizer.encode(text)


@pytest.mark.parametrize("text", [*TEXTS, " leading and  double  spaces ", "naïve € \U0001f600\n\ttab", ""])
def test_hugging_face_text_survives_encoding_and_decoding(hf: Tokenizer, text: str) -> None:
    assert hf.decode(hf.encode(text)) == text


def test_decoding_leaves_out_special_tokens_and_marks_unknown_ids(hf: Tokenizer, char: Tokenizer) -> None:
    for tokenizer, text in ((hf, "What is 12?"), (char, "12+34=46")):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
        assert tokenizer.decode([*ids, tokenizer.vocab_size + 3, *ids, 10**6]) == f"{text}\ufffd{text}\ufffd"
        assert tokenizer.decode([]) == tokenizer.decode_all([]) == ""


def test_all_text_has_the_special_tokens_in_their_places(hf: Tokenizer, char: Tokenizer) -> None:
    for tokenizer, text, end in ((hf, "What is 12?", "</s>"), (char, "12+34=46", "</s>")):
        ids = [*tokenizer.encode(text), tokenizer.eos_id, tokenizer.vocab_size + 3]
        assert tokenizer.decode_all(ids) == f"{text}{end}\ufffd"


def test_sentencepiece_defaults_agree_with_the_library(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    path = train_unigram(tmp_path / "any_name.model")
    tokenizer, oracle = load_tokenizer(path), SentencePieceProcessor(model_file=str(path))
    assert tokenizer.encode(TEXTS[0]) == oracle.encode(TEXTS[0])
    assert tokenizer.decode(tokenizer.encode_prompt(TEXTS[0])) == TEXTS[0]
    tokenizer.save(tmp_path / "export")
    assert load_tokenizer(tmp_path / "export").fingerprint == tokenizer.fingerprint  # whatever the file was called
    assert tokenizer.pad_id is None  # spm_train's default has no pad; packed batches need none


@pytest.mark.parametrize("which", ["hf", "char"])
def test_a_saved_tokenizer_is_the_same_tokenizer(request: pytest.FixtureRequest, tmp_path: Path, which: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(which)
    tokenizer.save(tmp_path / "export")
    again = load_tokenizer(tmp_path / "export")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode_prompt("12+34=") == tokenizer.encode_prompt("12+34=")
    assert again.eos_ids == tokenizer.eos_ids


def test_the_fingerprint_notices_every_changed_file(tmp_path: Path) -> None:
    directory = write_hf_tokenizer(tmp_path / "t")
    seen = {load_tokenizer(directory).fingerprint}
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    seen.add(load_tokenizer(directory).fingerprint)
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    seen.add(load_tokenizer(directory).fingerprint)
    assert len(seen) == 3
    assert load_tokenizer(directory).fingerprint in seen


def test_a_directory_with_only_tokenizer_json_is_refused_for_its_missing_eos(tmp_path: Path) -> None:
    directory = write_hf_tokenizer(tmp_path / "t")
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="names no eos_token"):
        load_tokenizer(directory)


def remove_eos(directory: Path) -> Path:
    return write_hf_tokenizer(directory, eos_token=None)


def add_auto_map(directory: Path) -> Path:
    return write_hf_tokenizer(directory, auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})


def break_json(directory: Path) -> Path:
    write_hf_tokenizer(directory)
    (directory / "tokenizer.json").write_text('{"model": ')
    return directory


def break_content(directory: Path) -> Path:
    write_hf_tokenizer(directory)
    (directory / "tokenizer.json").write_text('["model"]')
    return directory


def empty_directory(directory: Path) -> Path:
    directory.mkdir()
    return directory


def text_file(directory: Path) -> Path:
    directory.mkdir()
    (directory / "tokenizer.txt").write_text("a")
    return directory / "tokenizer.txt"


def broken_model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "x.model").write_bytes(b"no protobuf")
    return directory / "x.model"


def model_without_eos(directory: Path) -> Path:
    directory.mkdir()
    return train_unigram(directory / "x.model", eos_id=-1)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda d: d, ["does not exist", "data.tokenizer"]),
        (empty_directory, ["holds no tokenizer", "data.tokenizer"]),
        (text_file, ["not a SentencePiece .model"]),
        (broken_model, ["is not a SentencePiece model"]),
        (model_without_eos, ["has no end-of-sequence piece", "--eos_id=2"]),
        (remove_eos, ["tokenizer_config.json", "names no eos_token"]),
        (add_auto_map, ["tokenizer_config.json", "auto_map"]),
        (break_json, ["tokenizer.json is not valid JSON"]),
        (break_content, ["JSON list, not an object"]),
    ],
)
def test_an_unusable_tokenizer_gives_one_line_with_path_and_fix(tmp_path: Path, make, says: list[str]) -> None:
    path = make(tmp_path / "tok")
    with pytest.raises(ValueError) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)
    for text in [str(path), *says]:
        assert text in str(caught.value)


def test_a_tokenizer_without_pad_is_accepted(tmp_path: Path) -> None:
    assert load_tokenizer(write_hf_tokenizer(tmp_path / "t", pad_token=None)).pad_id is None


def test_chat_without_a_template_names_the_key_to_set(tmp_path: Path, char: Tokenizer) -> None:
    for tokenizer in (char, load_tokenizer(write_hf_tokenizer(tmp_path / "t", chat_template=None))):
        with pytest.raises(ValueError, match="has no chat template: set data.chat_template=false"):
            tokenizer.chat([{"role": "user", "content": "1"}])


def test_a_template_that_refuses_the_messages_is_a_user_error(hf: Tokenizer) -> None:
    with pytest.raises(ValueError, match="refuses the messages: no tools here"):
        hf.chat([{"role": "tool", "content": "1"}])


def test_the_helper_tokenizer_is_what_its_docstring_says(hf: Tokenizer) -> None:
    files = json.loads((hf.path / "tokenizer.json").read_text())
    assert [t["content"] for t in files["added_tokens"]] == SPECIAL
