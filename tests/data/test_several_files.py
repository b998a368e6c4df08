"""A list of files: the prompts of one file that holds their records one after the other, whatever the kinds of the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.supervised import SftConfig
from megappo.data import rows, sources
from megappo.data.cache import Cache
from megappo.data.loader import PassRates, PromptLoader, weights_of
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import PromptSet
from megappo.data.sources import open_sources
from megappo.data.texts import DemonstrationRules, TextRules, demonstrations_of, texts_of
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from scripts.arithmetic import train_tokenizer
from tests.data.test_prompt_rows import PLAIN, RULES, records, write_jsonl, write_parquet

COUNT = 60
CUTS = (0, 7, 7, 31, COUNT)  # the second file is empty


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", 4)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def cut(folder: Path, kinds: str) -> tuple[str, list[str]]:
    """A file of all records, and files of parts of them: j .jsonl, p .parquet."""
    lines = [{**one, "weight": n % 3, "response": "1" * (1 + n % 3)} for n, one in enumerate(records(COUNT))]
    names = []
    for number, (kind, start, end) in enumerate(zip(kinds, CUTS, CUTS[1:])):
        write = write_jsonl if kind == "j" else write_parquet
        names.append(write(folder / f"{number}.{'jsonl' if kind == 'j' else 'parquet'}", lines[start:end]))
    return write_jsonl(folder / "all.jsonl", lines), names


def built(spec: str | list[str], tokenizer: Tokenizer, root: Path, rules: PromptRules = RULES) -> PromptSet:
    return prompts_of(open_sources(spec), tokenizer, rules, Cache(root))


def visits(prompts: PromptSet, cache: Cache, resume_at: int | None = None) -> list[tuple[str, str]]:
    """Texts and answers of two epochs of a shuffled, weighted loader with a curriculum, read anew in the middle if asked."""

    def loader() -> PromptLoader:
        rates = PassRates(len(prompts), 0.5, 0.1, 3)
        return PromptLoader(len(prompts), 5, True, 3, weights=weights_of(prompts, "weight", cache), pass_rates=rates)

    order, one = [], loader()
    for step in range(2 * len(prompts) // 5):
        if step == resume_at:
            state = one.state_dict()
            one = loader()
            one.load_state_dict(state)
        chosen = one.next_step()
        assert one.pass_rates is not None
        one.pass_rates.observe(chosen, [[index % 2] for index in chosen])
        order += chosen
    return [(prompts[index].text, prompts[index].answer) for index in order]


@pytest.mark.parametrize("kinds", ["jjjj", "jjpj", "pjpj", "jjjp"])
def test_files_have_the_prompts_and_the_order_of_their_concatenation(tmp_path: Path, char: Tokenizer, kinds: str) -> None:
    whole, parts = cut(tmp_path, kinds)
    one, several = (built(spec, char, tmp_path / "cache") for spec in (whole, parts))
    assert [(p.tokens, p.text, p.answer) for p in several.prompts] == [(p.tokens, p.text, p.answer) for p in one.prompts]
    assert several.identities() == one.identities() and several.num_overlong == one.num_overlong == COUNT // 5
    assert [p.record["meta"] for p in several.prompts] == [p.record["meta"] for p in one.prompts]
    cache = Cache(tmp_path / "cache")
    assert visits(several, cache) == visits(several, cache, resume_at=9) == visits(one, cache)


def test_a_prompt_is_named_by_its_own_file_and_line(tmp_path: Path, char: Tokenizer) -> None:
    _, parts = cut(tmp_path, "jjpj")
    prompts = built(parts, char, tmp_path / "cache").prompts
    places = [prompt.place for prompt in prompts]
    expected = [n for n in range(COUNT) if n % 5]
    names = [f"{parts[0]}#{n} (line {2 * n + 1})" for n in expected if n < 7]
    names += [f"{parts[2]}#{n - 7}" for n in expected if 7 <= n < 31]
    names += [f"{parts[3]}#{n - 31} (line {2 * (n - 31) + 1})" for n in expected if n >= 31]
    assert places == names


def test_a_bad_record_is_named_by_its_file_and_line(tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", records(30))
    second = write_jsonl(tmp_path / "b.jsonl", [*records(25), {"prompt": 1, "answer": "2"}])
    for alone in (10**9, 20):  # in this process, and in others
        monkeypatch.setattr(rows, "ALONE", alone)
        with pytest.raises(ValueError, match=r"b\.jsonl#25 \(line 51\) holds 1, not a string"):
            built([first, second], char, tmp_path / str(alone))
    (tmp_path / "c.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{\n')
    with pytest.raises(ValueError, match=r"c\.jsonl line 2 is not valid JSON"):
        built([first, str(tmp_path / "c.jsonl")], char, tmp_path / "cache")


def test_several_processes_make_the_rows_of_several_files(tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = cut(tmp_path, "jjpj")
    expected = [prompt.tokens for prompt in built(whole, char, tmp_path / "alone").prompts]
    monkeypatch.setattr(rows, "ALONE", 20)
    monkeypatch.setattr(rows, "usable_processes", lambda: 2)
    assert [prompt.tokens for prompt in built(parts, char, tmp_path / "several").prompts] == expected


def test_the_digest_is_of_every_file_and_of_their_order(tmp_path: Path, char: Tokenizer) -> None:
    _, parts = cut(tmp_path, "jjpj")

    def digest(*names: str) -> str:
        return built(list(names), char, tmp_path / "cache").source_sha256

    first = digest(*parts)
    assert first == digest(*parts) and first != digest(*reversed(parts)) and first != digest(*parts[:3])
    Path(parts[3]).write_text(Path(parts[3]).read_text().replace('"weight": 0', '"weight": 5', 1))
    assert digest(*parts) != first
    assert digest(parts[0]) == built(parts[0], char, tmp_path / "other").source_sha256, "a list of one is that file"


def test_demonstrations_and_texts_of_several_files_are_those_of_one(tmp_path: Path, char: Tokenizer) -> None:
    whole, parts = cut(tmp_path, "jjpj")
    cache = Cache(tmp_path / "cache")
    shown = [
        demonstrations_of(open_sources(spec), char, DemonstrationRules("prompt", "response", PLAIN, 9), cache)
        for spec in (whole, parts)
    ]
    first, second = ([one[index].tokens for index in range(len(one))] for one in shown)
    assert first == second
    assert shown[1][len(shown[1]) - 1].id == f"{parts[3]}#{COUNT - 31 - 1}"
    texts = [texts_of(open_sources(spec), char, TextRules("prompt", 4), cache) for spec in (whole, parts)]
    assert [row.tokens for row in texts[0].rows] == [row.tokens for row in texts[1].rows]


def test_a_limit_is_of_all_files(tmp_path: Path, char: Tokenizer) -> None:
    whole, parts = cut(tmp_path, "jjpj")
    rules = PromptRules("prompt", "answer", PLAIN, 6, limit=11)
    one, several = (built(spec, char, tmp_path / "cache", rules) for spec in (whole, parts))
    assert len(several) == 11 and several.num_records == one.num_records and several.identities() == one.identities()


SMALL = "policy: {model: m}\ndata: {train: [a.jsonl, b.parquet]}\n"


def test_a_configuration_takes_a_list_or_one_text(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(SMALL)
    config = load_config(file, ["data.eval=[c.jsonl, owner/name:main:test]", "evaluations.x.data=[d.jsonl]"])
    assert (config.data.train, config.data.eval) == (("a.jsonl", "b.parquet"), ("c.jsonl", "owner/name:main:test"))
    assert config.evaluations["x"].data == ("d.jsonl",)
    assert load_config(file, ["data.train=my [file] #1.jsonl"]).data.train == "my [file] #1.jsonl"
    assert load_config(file, cls=SftConfig).data.train == ("a.jsonl", "b.parquet")
    for value, fault in (
        ("[]", "data.train = []: must have at least 1 entry"),
        ("[a, 1]", "data.train.1 = 1: must be a string; put it in quotes if it looks like a number"),
        ('[a, "b\\n"]', 'data.train.1 = "b\\n": holds the character \\n; a path is one printable line'),
        ("[~/a.jsonl]", 'data.train.0 = "~/a.jsonl": holds ~, which only a shell replaces; write what it stands for'),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'command line: {fault}')}$"):
            load_config(file, [f"data.train={value}"])
    file.write_text("policy: {model: m}\ndata: {train: 5}\n")
    with pytest.raises(ConfigError, match=r"data\.train = 5: must be a string.*, or must be a list, for example \[a, b\]"):
        load_config(file)


def test_files_are_absolute_in_a_configuration_and_names_of_the_hub_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    Path("run.yaml").write_text(SMALL)
    config = load_config(
        "run.yaml", ["data.eval=a.jsonl", "algorithm.ptx={data: a.jsonl, coef: 1}", "evaluations.x.data=[a.jsonl, o/n]"]
    )
    assert config.algorithm.ptx is not None
    assert (config.data.train, config.data.eval) == ((str(tmp_path / "a.jsonl"), "b.parquet"), str(tmp_path / "a.jsonl"))
    assert config.algorithm.ptx.data == str(tmp_path / "a.jsonl")
    assert config.evaluations["x"].data == (str(tmp_path / "a.jsonl"), "o/n")


def test_the_recorded_configuration_of_a_run_means_the_same_files_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `eval RUN`, `generate RUN`, `export RUN` and `train --resume` read it."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "mine.py"):
        Path(name).touch()
    Path("tok").mkdir()
    Path("run.yaml").write_text(
        "policy: {model: tok}\n"
        "data: {train: [a.jsonl, o/n], eval: b.jsonl, tokenizer: tok}\n"
        "evaluations: {held: {data: b.jsonl, reward: {parts: [{path: mine.py, function: f}]}}}\n"
        "reward: {parts: [{path: mine.py, function: f}]}\n"
        "rollout: {environment: {path: mine.py, function: f, max_turns: 2}}\n"
    )
    first = load_config("run.yaml")
    (tmp_path / "elsewhere").mkdir()
    Path("elsewhere/recorded.yaml").write_text(dump_yaml(first))
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = load_config("recorded.yaml")
    assert again == first
    files = [*again.data.train[:1], again.data.eval, again.data.tokenizer, again.policy.model, again.evaluations["held"].data]
    assert again.rollout.environment is not None
    files += [again.reward.parts[0].path, again.rollout.environment.path]
    assert all(Path(str(file)).is_absolute() and Path(str(file)).exists() for file in files)
    assert again.data.train[1] == "o/n"
