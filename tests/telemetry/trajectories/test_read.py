"""Reading: torn lines, and one clear line for everything else."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megappo.config.errors import ConfigError
from megappo.telemetry.trajectories.read import parse_steps, read_run
from tests.commands.trajectories.runs import record, write_run


def file_of(folder, step=1):
    return folder / "trajectories" / f"step_{step:06d}.jsonl"


def test_a_record_is_read_as_it_was_written(tmp_path):
    row = record(parts={"a": 0.5, "b": None}, value=[0.1, None, 0.3], response_mask=[1, 0, 1])
    (one,) = read_run(write_run(tmp_path, {7: [row]})).trajectories
    assert (one.step, one.sample, one.id, one.finish, one.length) == (7, 0, "train.jsonl#0", "stop", 2)
    assert one.tokens.tolist() == [5, 6, 2] and one.texts == ["w5 ", "w6 ", "</s>"] and one.special == {1, 2}
    assert one.parts["a"] == 0.5 and math.isnan(one.parts["b"])
    np.testing.assert_array_equal(one.fields["value"], [0.1, math.nan, 0.3])
    np.testing.assert_array_equal(one.fields["logprob"], [-1.0, math.nan, -3.0])  # not where the policy did not sample


def test_a_torn_last_line_is_left_out_and_told(tmp_path):
    write_run(tmp_path, {1: [record(), record(sample=1)]})
    with file_of(tmp_path).open("a") as file:
        file.write('{"step": 1, "format": 1, "respon')
    sampled = read_run(tmp_path)
    assert len(sampled.trajectories) == 2
    assert sampled.notes == ["step_000001.jsonl: the last line is cut off (being written, or copied too early); it is left out"]


def test_a_folder_of_files_alone_is_read_and_partial_files_are_not(tmp_path):
    write_run(tmp_path, {1: [record()], 20: [record()]})
    (tmp_path / "trajectories" / "step_000030.jsonl.partial").write_text("{")
    assert [one.step for one in read_run(tmp_path / "trajectories").trajectories] == [1, 20]
    assert [one.step for one in read_run(tmp_path, (2, None)).trajectories] == [20]


@pytest.mark.parametrize(
    "text, steps", [("10", (10, 10)), ("10..20", (10, 20)), ("10..", (10, None)), ("..20", (0, 20)), ("5..5", (5, 5))]
)
def test_ranges_of_steps(text, steps):
    assert parse_steps(text) == steps


def test_responses_that_go_on_are_left_out_and_counted(tmp_path):
    run = write_run(tmp_path, {1: [record(finish="window")], 2: [record(finish="window"), record(sample=1)]})
    found = read_run(run)
    assert [(one.step, one.sample) for one in found.trajectories] == [(2, 1)]
    assert found.notes == ["2 responses go on in a later step, without a score yet; they are left out"]
    with pytest.raises(ConfigError, match="all 1 responses go on in a later step; name later ones"):
        read_run(run, (1, 1))


@pytest.mark.parametrize("text", ["", "..", "a..b", "1-5", "-3", "1..2..3", "9" * 30])
def test_other_texts_are_no_range(text):
    with pytest.raises(ConfigError, match=r"write one step \(10\) or a range"):
        parse_steps(text)


def test_a_range_backwards_and_one_without_steps(tmp_path):
    with pytest.raises(ConfigError, match=r"write 5..20"):
        parse_steps("20..5")
    with pytest.raises(ConfigError, match="no trajectories of these steps, only of 1 to 3"):
        read_run(write_run(tmp_path, {1: [record()], 3: [record()]}), (7, 9))


def test_a_run_without_trajectories_names_the_key(tmp_path):
    for every, said in ((0, "trajectories_every=10 writes them"), (25, "is 25, and it has not come to that step")):
        (tmp_path / "config.yaml").write_text(f"telemetry:\n  tensorboard: true\n  trajectories_every: {every}\n")
        with pytest.raises(ConfigError, match=said):
            read_run(tmp_path)


def test_no_run_at_all(tmp_path):
    with pytest.raises(ConfigError, match="absent: No such file or directory; name the directory of a run"):
        read_run(tmp_path / "absent")
    with pytest.raises(ConfigError, match="has neither trajectories/ nor a config.yaml"):
        read_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        read_run(tmp_path / "file")


BROKEN = [
    ({"format": 3}, "format is 3, and this megappo reads 1"),
    ({"format": "x"}, "format is x, and this megappo reads 1"),
    ({"value": [0.1]}, "value has 1 entries for 3 tokens of the response"),
    ({"value": "x"}, "value: Input should be a valid list"),
    ({"value": [0.1, "0.2", 0.3]}, "value.1: Input should be a valid number"),
    ({"value": [0.1, 10**400, 0.3]}, "value.1: Input should be a valid number"),
    ({"response_mask": [1]}, "response_mask has 1 entries for 3 tokens"),
    ({"response_tokens": None}, "response_tokens: Input should be a valid list"),
    ({"response_tokens": [1, 2.5, 3]}, "response_tokens.1: Input should be a valid integer"),
    ({"response_tokens": [1, 2, 10**30]}, "response_tokens.2: Input should be less than"),
    ({"response_texts": ["a", "b"]}, "response_texts has 2 entries for 3 tokens"),
    ({"score": "high"}, "score: Input should be a valid number"),
    ({"score": 10**400}, "score: Input should be a valid number"),
    ({"parts": []}, "parts: Input should be a valid dictionary"),
    ({"id": 5}, "id: Input should be a valid string"),
    ({"finish": "never"}, "finish: Input should be 'stop', 'length' or 'window'"),
    ({"finish": ["stop"]}, "finish: Input should be 'stop', 'length' or 'window'"),
    ({"sample": None}, "sample: Input should be a valid integer"),
]


@pytest.mark.parametrize("changes, said", BROKEN, ids=[said[:30] for _, said in BROKEN])
def test_a_record_that_is_not_of_the_format_is_named(tmp_path, changes, said):
    write_run(tmp_path, {4: [record(), record()]})
    with file_of(tmp_path, 4).open("a") as file:
        file.write(json.dumps(record(**changes)) + "\n")
    with pytest.raises(ConfigError) as error:
        read_run(tmp_path)
    assert "step_000004.jsonl, line 3: " in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"[1, 2]\n", "line 1: not a JSON object"),
        (b"oops\n{}\n", "line 1: not JSON"),
        (b'{"prompt": "\xff"}\n', "not UTF-8 at byte 12"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (b'{"step": ' + b"9" * 5000 + b"}\n", "step_000001.jsonl"),
        (b"", "no whole record in step_000001.jsonl"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_other_files_are_refused_in_one_line(tmp_path, content, said):
    write_run(tmp_path, {1: []})
    file_of(tmp_path).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_run(tmp_path)
    assert said in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_half_of_a_surrogate_pair_is_read(tmp_path):
    row = record(response="\ud83d", response_texts=["\ud83d", "x", "y"])
    (one,) = read_run(write_run(tmp_path, {1: [row]})).trajectories
    assert one.response == "\ud83d" and one.texts == ["\ud83d", "x", "y"]


def test_a_run_on_recorded_trajectories_says_that_it_has_none(tmp_path):
    text = "critic:\n  warmup:\n    trajectories: {}\ntelemetry:\n  trajectories_every: 1\n"
    for value, said in (("runs/x", "samples none; name the run that recorded them"), ("null", "it has not come to that step")):
        (tmp_path / "config.yaml").write_text(text.format(value))
        with pytest.raises(ConfigError, match=said):
            read_run(tmp_path)
