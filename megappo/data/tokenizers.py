"""Text to token ids and back: Hugging Face tokenizer directories and raw SentencePiece models behind one protocol.
Models, rollouts and losses see token ids only; a sampled response is never encoded again. This and `image_processor.py` alone
import transformers outside `models/`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Protocol

from megappo.data.pictures import IMAGE_BASE, MARKER
from megappo.data.template_args import read_by_template, write_defaults
from megappo.runtime.messages import first_line, parse_object

Message = Mapping[str, str]

# Files that may belong to a Hugging Face tokenizer, besides the vocabulary files that its class names.
_HF_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class Tokenizer(Protocol):
    """Interface of a tokenizer. Ids are 0..vocab_size-1."""

    path: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int
    """Ends a demonstration."""
    eos_ids: tuple[int, ...]
    """All ids that end a response, eos_id first; the model may name more (`load_tokenizer`)."""
    pad_id: int | None
    """None if the tokenizer has none; packed batches need none."""
    has_chat_template: bool
    chat_template_sha256: str | None
    """SHA-256 of the template's text, None without one."""
    fingerprint: str
    """SHA-256 of the names and bytes of its files."""

    def encode(self, text: str) -> list[int]:
        """Ids of a continuation, without special tokens."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of the start of a sequence, with the beginning-of-sequence id if this tokenizer adds one."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation ({role, content} each) up to the start of the answer. Raises ValueError without a chat template."""
        ...

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a whole conversation, whose last message is the assistant's. Raises ValueError without a chat template."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens. Ids beyond the vocabulary (models often pad theirs) become U+FFFD."""
        ...

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text with special tokens, otherwise as `decode`."""
        ...

    def pieces(self) -> list[str]:
        """Piece of every id, "" for an id without one; for comparisons of vocabularies."""
        ...

    def identity(self) -> dict[str, str]:
        """All that decides the ids of a text: the files, the packages that read them, and the day if the template writes it."""
        ...

    def save(self, directory: str | Path) -> None:
        """Copy the tokenizer's files, byte for byte."""
        ...


def load_tokenizer(path: str | Path, model: str | Path | None = None, template_args: Mapping[str, Any] | None = None) -> Tokenizer:
    """Open a `.model` file or a tokenizer directory. Raises ValueError with the path and the fix.
    A directory with tokenizer.json or tokenizer_config.json is Hugging Face's; one with only tokenizer.model is SentencePiece's.
    model: directory of the checkpoint that samples, whose ids end a response too, as those that stand beside the tokenizer.
    template_args: variables of the chat template."""
    return find_tokenizer(path, model, template_args)()


def find_tokenizer(
    path: str | Path,
    model: str | Path | None = None,
    template_args: Mapping[str, Any] | None = None,
    *,
    leave_out_unread: bool = False,
) -> Callable[[], Tokenizer]:
    """Return a reader of the tokenizer at `path`, after a look at its files' names only. Raises ValueError as `load_tokenizer`.
    leave_out_unread: variables that the template does not read are left out, not refused."""
    path, model = Path(path), None if model is None else Path(model)
    if not path.exists():
        raise ValueError(
            f"tokenizer {path} does not exist; set data.tokenizer to a tokenizer directory or a SentencePiece .model file"
        )
    if path.is_file():
        if path.suffix != ".model":
            raise ValueError(
                f"tokenizer {path} is a file but not a SentencePiece .model; for a Hugging Face tokenizer name its directory"
            )
        return partial(SentencePieceTokenizer, path, model)
    if (path / "tokenizer.json").exists() or (path / "tokenizer_config.json").exists():
        return partial(HuggingFaceTokenizer, path, model, template_args, leave_out_unread=leave_out_unread)
    if (path / "tokenizer.model").exists():
        return partial(SentencePieceTokenizer, path / "tokenizer.model", model)
    raise ValueError(f"{path} holds no tokenizer (tokenizer.json, tokenizer_config.json or tokenizer.model); set data.tokenizer")


class HuggingFaceTokenizer:
    """Tokenizer directory of transformers' AutoTokenizer. template_args: variables of its chat template in every conversation.
    ValueError if it is unreadable or has its own code (`auto_map`), or if its template does not read one of the variables, unless
    those are left out."""

    def __init__(
        self,
        directory: Path,
        sampled: Path | None = None,
        template_args: Mapping[str, Any] | None = None,
        *,
        leave_out_unread: bool = False,
    ) -> None:
        from transformers import AutoTokenizer  # here: it takes seconds, and SentencePiece models do not need it

        config = _read_json(directory / "tokenizer_config.json")
        _read_json(directory / "tokenizer.json")
        if "auto_map" in config:
            raise ValueError(
                f"{directory / 'tokenizer_config.json'} asks to run its own code (auto_map); megappo does not: remove the key "
                "if the tokenizer works without it"
            )
        try:
            # local_files_only: a directory that lacks a file must not be looked up on a hub.
            tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise ValueError(f"transformers cannot read the tokenizer in {directory}: {first_line(error)}") from error
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"{directory / 'tokenizer_config.json'} names no eos_token: set it to the token that ends a response, "
                'for example "eos_token": "</s>"'
            )
        self._tokenizer = tokenizer
        self.path = directory
        self.vocab_size = len(tokenizer)
        self.bos_id = tokenizer.bos_token_id
        self.pad_id = tokenizer.pad_token_id
        self.eos_id = tokenizer.eos_token_id
        self.eos_ids = _eos_ids(self.eos_id, directory, sampled)
        template = tokenizer.chat_template  # a text, or several by name
        self.has_chat_template = template is not None
        variables = template_args if self.has_chat_template else None
        self._template_args = read_by_template(variables or {}, tokenizer, directory, leave_out_unread=leave_out_unread)
        shown = [template, self._template_args] if self._template_args else template
        self.chat_template_sha256 = hashlib.sha256(repr(shown).encode()).hexdigest() if self.has_chat_template else None
        starts_with = tokenizer("")["input_ids"][:1]
        # Only the leading id: a tokenizer set to append eos to every text must not end the prompt before the response starts.
        self._prefix = list(starts_with) if self.bos_id is not None and starts_with == [self.bos_id] else []
        names = {*_HF_FILES, *tokenizer.vocab_files_names.values()}
        files = [directory / name for name in names if (directory / name).is_file()]
        files += directory.glob("additional_chat_templates/*.jinja")
        self._files = {file.relative_to(directory).as_posix(): file for file in files}
        self.fingerprint = _fingerprint(self._files)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_prompt(self, text: str) -> list[int]:
        return self._prefix + self.encode(text)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        return self._render(messages, for_answer=True)

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        return self._render(messages, for_answer=False)

    def text_of(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, for_answer: bool = False
    ) -> str:
        """Text of messages in the chat template, with the beginning of an answer if `for_answer`. Raises ValueError as `chat`."""
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=for_answer)

    def marked(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> tuple[list[int], list[int]] | None:
        """Return (ids, 1 for each that the template's generation markers enclose, else 0); None if it has no such markers."""
        if not self.has_chat_template or not re.search(r"\{%-?\s*generation\s*-?%\}", str(self._tokenizer.chat_template)):
            return None
        found = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), list(found["assistant_masks"])

    def encode_cut(self, text: str, borders: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return (ids of a text with all its special tokens, number of ids before each border). borders: ascending characters. The
        text is encoded as a whole if no token crosses a border; else each part on its own, as a policy continues a prompt."""
        if self._tokenizer.is_fast:
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            begins, ends = zip(*found["offset_mapping"])
            cuts = [bisect_left(begins, border) for border in borders]
            if all(cut == 0 or ends[cut - 1] <= border for cut, border in zip(cuts, borders)):
                return list(found["input_ids"]), cuts
        ids, cuts, begin = [], [], 0
        for border in borders:
            ids += self.encode(text[begin:border])
            cuts.append(len(ids))
            begin = border
        return ids + (self.encode(text[begin:]) if begin < len(text) else []), cuts

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, **how: Any) -> Any:
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise _no_chat_template(self.path)
        copies = [dict(message) for message in messages]
        given = {} if tools is None else {"tools": list(tools)}
        try:
            return self._tokenizer.apply_chat_template(copies, **given, **how, **self._template_args)
        except (TemplateError, TypeError) as error:  # TypeError: the template computes with a key that has another type there
            raise ValueError(f"the chat template of {self.path} refuses the messages: {first_line(error)}") from error

    def _render(self, messages: Sequence[Message], for_answer: bool) -> list[int]:
        return list(self._apply(messages, None, add_generation_prompt=for_answer, return_dict=False))

    def decode(self, ids: Sequence[int]) -> str:
        return self._text(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        return self._text(ids, skip_special_tokens=False)

    def _text(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        def known(run: list[int]) -> str:
            text = self._tokenizer.decode(run, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
            assert isinstance(text, str)  # a list only for a batch
            return text

        return _decode(ids, self.vocab_size, known)

    def pieces(self) -> list[str]:
        found = [""] * self.vocab_size
        for piece, number in self._tokenizer.get_vocab().items():
            if number < len(found):
                found[number] = piece
        return found

    def identity(self) -> dict[str, str]:
        day = {"day": str(date.today())} if "strftime_now" in repr(self._tokenizer.chat_template) else {}
        # The same files make another tokenizer beside another config.json: transformers takes its class from there.
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        made = f"{type(self._tokenizer).__qualname__} {'' if backend is None else backend.to_str()}"
        loaded = hashlib.sha256(made.encode("utf-8", "surrogatepass")).hexdigest()
        versions = _versions("transformers", "tokenizers", "sentencepiece", "jinja2")
        variables = {"template_args": json.dumps(self._template_args, sort_keys=True)} if self._template_args else {}
        return {"files": self.fingerprint, "loaded": loaded, **versions, **variables, **day}

    def save(self, directory: str | Path) -> None:
        _copy(self._files, Path(directory))
        if self._template_args:
            write_defaults(self._template_args, self._tokenizer, Path(directory))


class SentencePieceTokenizer:
    """Raw SentencePiece model. A prompt starts with bos if the model defines that piece; there is no chat template."""

    has_chat_template = False
    chat_template_sha256: str | None = None

    def __init__(self, model: Path, sampled: Path | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor = SentencePieceProcessor(model_file=str(model))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{model} is not a SentencePiece model: {first_line(error)}") from error
        if self._processor.eos_id() < 0:
            raise ValueError(f"{model} has no end-of-sequence piece: train it with eos_id >= 0 (spm_train --eos_id=2)")
        self.path = model
        self.vocab_size = self._processor.vocab_size()
        self.bos_id = _optional(self._processor.bos_id())
        self.pad_id = _optional(self._processor.pad_id())
        self.eos_id = self._processor.eos_id()
        self.eos_ids = _eos_ids(self.eos_id, model.parent, sampled)
        # Written as tokenizer.model under any name of the file: `load_tokenizer` recognises a directory by it.
        more = model.parent / "generation_config.json"
        self._files = {"tokenizer.model": model, **({more.name: more} if more.is_file() else {})}
        self.fingerprint = _fingerprint(self._files)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        prefix = [] if self.bos_id is None else [self.bos_id]
        return prefix + self.encode(text)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        raise _no_chat_template(self.path)

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        raise _no_chat_template(self.path)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(ids, self.vocab_size, self._processor.decode)  # drops control pieces by itself

    def decode_all(self, ids: Sequence[int]) -> str:
        inside = self._processor.is_control
        runs = groupby(ids, key=lambda i: 0 <= i < self.vocab_size and inside(i))
        pieces = ("".join(map(self._processor.id_to_piece, run)) if control else self.decode(list(run)) for control, run in runs)
        return "".join(pieces)

    def pieces(self) -> list[str]:
        return [self._processor.id_to_piece(number) for number in range(self.vocab_size)]

    def identity(self) -> dict[str, str]:
        return {"files": self.fingerprint, **_versions("sentencepiece")}

    def save(self, directory: str | Path) -> None:
        _copy(self._files, Path(directory))


def _decode(ids: Sequence[int], vocab_size: int, known: Callable[[list[int]], str]) -> str:
    """Decode runs of ids in the vocabulary by `known`, the features of an image to `MARKER`, and every other id to U+FFFD."""

    def text_of(kind: bool | int, run: list[int]) -> str:
        return known(run) if kind is True else MARKER if kind else "\ufffd" * len(run)

    runs = groupby(ids, key=lambda i: 0 <= i < vocab_size or (i if i >= IMAGE_BASE else 0))
    return "".join(text_of(kind, list(run)) for kind, run in runs)


def _eos_ids(eos_id: int, *directories: Path | None) -> tuple[int, ...]:
    # Chat models often end a turn with another id than the tokenizer's eos_token.
    more = (_eos_ids_of_model(directory) for directory in directories if directory is not None)
    return tuple(dict.fromkeys([eos_id, *chain.from_iterable(more)]))


def _eos_ids_of_model(directory: Path) -> list[int]:
    """Ids that end a response of the checkpoint in `directory`, as transformers and vLLM find them: in its generation settings,
    else in its configuration. Raises ValueError with the file."""
    config = _read_json(directory / "config.json")
    text = config.get("text_config")
    for name, settings in (
        ("generation_config.json", _read_json(directory / "generation_config.json")),
        ("config.json", config),
        ("config.json", text if isinstance(text, Mapping) else {}),
    ):
        ids = eos_ids_of(settings)
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise ValueError(f"{directory / name}: eos_token_id = {ids!r}: must be an id, a list of ids or null")
        if ids:
            return ids
    return []


def eos_ids_of(settings: Mapping[str, Any]) -> list[int]:
    """Ids of the `eos_token_id` of generation settings or a model's configuration, which have one, a list or none."""
    ids = settings.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _read_json(file: Path) -> dict[str, Any]:
    """Object in this JSON file; {} if there is no file. Raises ValueError if it holds something else."""
    return parse_object(file.read_bytes(), str(file)) if file.exists() else {}


def _fingerprint(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        # Name and length delimit the files, so that bytes moved from one to the next change the digest.
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _versions(*names: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in names}


def _copy(files: Mapping[str, Path], directory: Path) -> None:
    for name, file in files.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _no_chat_template(path: Path) -> ValueError:
    return ValueError(f"the tokenizer {path} has no chat template: set data.chat_template=false")


def _optional(token_id: int) -> int | None:
    return None if token_id < 0 else token_id  # SentencePiece's -1: not defined
