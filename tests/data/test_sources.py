"""Records from every kind of source, and the one-line error of each bad one."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megappo.data.sources import read_records

RECORDS = [{"prompt": "a\u2028b", "answer": "1"}, {"prompt": [{"role": "user", "content": "é"}], "answer": "2"}]


def test_jsonl_is_split_at_line_feeds_only(tmp_path: Path) -> None:
    """U+2028 may stand unescaped in a JSON string, where str.splitlines would cut the record in two."""
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"prompt": "a\u2028b", "answer": "1"}\n\n{"prompt": [{"role": "user", "content": "é"}], "answer": "2"}\r\n', "utf-8"
    )
    assert read_records(str(file)) == RECORDS
    assert len(file.read_text("utf-8").splitlines()) == 4  # what splitting by str would see


def test_parquet_gives_the_same_records_with_nested_messages(tmp_path: Path) -> None:
    records = [{"prompt": [{"role": "user", "content": f"q{i}"}], "reward_model": {"ground_truth": str(i)}} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    assert read_records(str(tmp_path / "a.parquet")) == records


@pytest.mark.parametrize(
    "content, says",
    [
        (b'{"a": 1}\n{"a": \n', "line 2 is not valid JSON"),
        (b'{"a": 1}\n\n[1]\n', "line 3 is a JSON list, not an object"),
        (b'{"a": "\xff"}\n', "line 1 is not valid JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_records(str(file))
    assert f"{file} {says}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec, says",
    [
        ("missing.jsonl", "data file missing.jsonl does not exist"),
        ("missing.parquet", "data file missing.parquet does not exist"),
        ("bad.parquet", "cannot be read as parquet"),
        ("data.csv", "neither a .jsonl nor a .parquet file"),
        ("no/such/folder", "does not exist and is not the name of a Hugging Face dataset"),
        ("name:subset", "must be a .jsonl or .parquet file, a dataset `name`, or `name:subset:split`"),
        ("name:subset:", "must be a .jsonl or .parquet file"),
    ],
)
def test_a_bad_source_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("a,b\n")
    Path("bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError) as caught:
        read_records(spec)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_dataset_that_cannot_be_reached_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"cannot load the Hugging Face dataset someone/nothing:main:train: .*; for a local file"
    ) as caught:
        read_records("someone/nothing:main:train")
    assert "\n" not in str(caught.value)


def test_a_dataset_is_read_by_name_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is not reachable from tests: what is asked of the datasets library is checked, with a real in-memory Dataset."""
    import datasets

    asked = []

    def load_dataset(*args: object, **kwargs: object) -> datasets.Dataset:
        asked.append((*args, kwargs))
        return datasets.Dataset.from_list([{"question": "q", "answer": "#### 1"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for spec in ("gsm8k", "openai/gsm8k:main:test", "openai/gsm8k::test"):
        assert read_records(spec) == [{"question": "q", "answer": "#### 1"}]
    assert asked == [
        ("gsm8k", None, {"split": "train"}),
        ("openai/gsm8k", "main", {"split": "test"}),
        ("openai/gsm8k", None, {"split": "test"}),
    ]
