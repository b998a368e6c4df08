"""Environments of a user's file: what they see and may return, ids by hand, and one line for each way in which they fail."""

from __future__ import annotations

import json
import re
from concurrent.futures import wait
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest

from megappo.config.environment_sections import EnvironmentConfig
from megappo.config.errors import ConfigError
from megappo.config.schema import DataConfig, RolloutConfig
from megappo.data.prompts import Prompt
from megappo.data.tokenizers import HuggingFaceTokenizer
from megappo.rollout.environment import Conversation, WorkersEnvironment, environment_of, with_environment
from megappo.rollout.generation import generate
from megappo.rollout.turn import Turn
from megappo.rollout.types import EnvironmentFault, KeptIds, Request, Response, SamplingParams, Segment
from megappo.trainer.prepare.data import load_environment
from tests.config.examples import train_config
from tests.data.tokenizer_files import TEMPLATE, write_hf_tokenizer
from tests.rollout.test_turns import Rule

PROMPT = Prompt("sums.jsonl#3", (1, 2), "5+6=", "11", {"prompt": "5+6=", "answer": "11", "hints": ["ten", "one"]})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_hf_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def prepared(folder: Path, tokenizer: HuggingFaceTokenizer, code: str, *, chat: bool = True, longest: int = 64, **keys: Any):
    """(configuration, environment) of the function `play` of a file with this code."""
    (folder / "mine.py").write_text(code)
    environment = EnvironmentConfig(**{"path": str(folder / "mine.py"), "function": "play", **keys})
    rollout = RolloutConfig(environment=environment, max_response_tokens=longest)
    data = DataConfig(train="t.jsonl", chat_template=chat, max_prompt_tokens=32)
    config = train_config(folder, []).model_copy(update={"rollout": rollout, "data": data})
    found = load_environment(config, tokenizer)
    assert found is not None
    return config, found


def ask(folder: Path, tokenizer: HuggingFaceTokenizer, code: str, texts: list[str], *, end: bool = True, **keys: Any) -> list[Any]:
    """Answers to the turns of one trajectory with these texts."""
    _, found = prepared(folder, tokenizer, code, **keys)
    environment, memo, answers = environment_of(found, tokenizer, ("!",)), {}, []
    with closing(environment) if isinstance(environment, WorkersEnvironment) else nullcontext():
        for index, text in enumerate(texts):
            ids = numpy.array([*tokenizer.encode(text), *([4] if end else [])], numpy.int32)
            turn = Turn(7, 0, index, ids, numpy.array([1, 2], numpy.int32), 99, PROMPT, memo)
            if not isinstance(environment, WorkersEnvironment):
                answers.append(environment(turn))
                continue
            asked = environment.start(turn)
            wait([asked.future])
            answers.append(asked.take().observation)
    return answers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_of_text_sees_the_conversation_and_its_own_state(tmp_path, tokenizer, workers):
    code = (
        "import json\n"
        "def play(turn, path):\n"
        "    seen = turn.state.setdefault('seen', [])\n"
        "    seen.append(turn.response)\n"
        "    fields = 'response messages index prompt answer record seed sample_id'.split()\n"
        "    with open(path, 'a') as file: file.write(json.dumps({k: getattr(turn, k) for k in fields} | {'all': seen}) + '\\n')\n"
        "    return None if turn.response == turn.answer else 'higher'\n"
    )
    log = tmp_path / "log.jsonl"
    first, last = ask(tmp_path, tokenizer, code, ["9", "11"], args={"path": str(log)}, workers=workers)
    assert tokenizer.decode_all(first) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n" and last is None
    one, two = map(json.loads, log.read_text().splitlines())
    question = {"role": "user", "content": "5+6="}
    assert one["messages"] == [question, {"role": "assistant", "content": "9"}] and one["all"] == ["9"]
    assert two["messages"][2:] == [{"role": "user", "content": "higher"}, {"role": "assistant", "content": "11"}]
    assert (two["index"], two["answer"], two["seed"], two["sample_id"]) == (1, "11", 99, "sums.jsonl#3 (sample 7)")
    assert two["record"]["hints"] == ["ten", "one"] and two["all"] == ["9", "11"]


@pytest.mark.parametrize(
    "code, keys, end, expected",
    [
        ("'more'", {"chat": False}, True, "more"),
        ("{'role': 'system', 'content': 'so'}", {}, True, "\n<|im_start|>system\nso<|im_end|>\n<|im_start|>assistant\n"),
        # a stop string ended the turn: the template's end of an answer is given too
        ("'so'", {}, False, "<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"),
        ("'so!'", {"observation_tokens": 1, "chat": False}, True, "s"),
        ("[5, 6, 7]", {"interface": "ids", "observation_tokens": 2}, True, None),
    ],
)
def test_an_observation_becomes_the_ids_that_follow_a_turn(tmp_path, tokenizer, code, keys, end, expected):
    (found,) = ask(tmp_path, tokenizer, f"def play(turn): return {code}\n", ["9!x"], end=end, **keys)
    assert found == [5, 6] if expected is None else tokenizer.decode_all(found) == expected


def test_a_template_that_shows_earlier_answers_otherwise_is_followed(tmp_path):
    thinking = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    tokenizer = HuggingFaceTokenizer(write_hf_tokenizer(tmp_path, chat_template=thinking))
    ids = Conversation(tokenizer, chat_template=True).follow({"role": "user", "content": "so"}, ended=True)
    assert tokenizer.decode_all(ids) == "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n<think>\n"
    (tmp_path / "generation_config.json").write_text("{}")  # </s> alone ends a response, and the template writes none
    with pytest.raises(ValueError, match="ends no answer by one of the ids that end a response .2.; add its id to eos_token_id"):
        Conversation(HuggingFaceTokenizer(tmp_path), chat_template=True)


RAISED = [
    (
        "1 / 0",
        {},
        "mine.py: play raised ZeroDivisionError: division by zero (mine.py:1); turn 0 of sample sums.jsonl#3 (sample 7), '9'",
    ),
    ("exit()", {}, "raised SystemExit"),
    ("7", {}, "returned 7: no text, no message {role, content}, and not None, which ends the trajectory"),
    ("''", {}, "returned '': no text"),
    ("{'role': 'tool', 'content': 'x'}", {}, "returned {'role': 'tool', 'content': 'x'}: the chat template of"),
    ("[70000]", {"interface": "ids"}, "returned [70000]: no ids of the vocabulary (0 to "),
    ("'text'", {"interface": "ids"}, "no ids of the vocabulary"),
    ("[]", {"interface": "ids"}, "no ids of the vocabulary"),
]


@pytest.mark.parametrize("code, keys, said", RAISED)
def test_a_fault_names_file_line_turn_and_sample(tmp_path, tokenizer, code, keys, said):
    with pytest.raises(EnvironmentFault, match=re.escape(said)) as caught:
        ask(tmp_path, tokenizer, f"def play(turn): return {code}\n", ["9"], **keys)
    assert "\n" not in str(caught.value)


# of a function in a process
LOST = [
    ("1 / 0", "mine.py: play raised ZeroDivisionError: division by zero (mine.py:2); turn 0 of sample sums.jsonl#3 (sample 7)"),
    ("lambda: 1", "mine.py: play returned function, which cannot be sent to the rank: "),
    ("turn.state.update(x=lambda: 1)", "mine.py: play left a state, which cannot be sent to the rank: "),
    ("7", "returned 7: no text"),
]


@pytest.mark.parametrize("code, said", LOST)
def test_a_fault_in_a_process_names_file_line_turn_and_sample(tmp_path, tokenizer, code, said):
    with pytest.raises(EnvironmentFault, match=re.escape(said)) as caught:
        ask(tmp_path, tokenizer, f"import os\ndef play(turn): return {code}\n", ["9"], workers=1)
    assert "\n" not in str(caught.value)


def test_a_process_that_dies_ends_its_trajectory_alone(tmp_path, tokenizer, caplog):
    code = "import os\ndef play(turn): return os.kill(os.getpid(), 11) if turn.response == 'die' else 'more'\n"
    first, second = ask(tmp_path, tokenizer, code, ["die", "9"], workers=1)
    assert first is None and tokenizer.decode_all(second).count("more") == 1, "another process answers the next turn"
    said = "mine.py: play lost its process, which was ended by SIGSEGV; turn 0 of sample sums.jsonl#3 (sample 7), 'die'"
    assert f"{said}; its trajectory has no score (1 so far on this rank)" in caplog.text


@pytest.mark.parametrize(
    "code, keys, said",
    [
        ("def other(turn): pass\n", {}, "defines no play; its functions: other"),
        ("import no_such_module\n", {}, "cannot be imported: ModuleNotFoundError: No module named 'no_such_module' (mine.py:1)"),
        ("def play(): pass\n", {}, "mine.py: play() cannot be called with one turn: too many positional arguments"),
        ("def play(turn): pass\n", {"args": {"x": 1}}, "cannot be called with one turn and args x: got an unexpected keyword"),
        ("async def play(turn): pass\n", {}, "is a coroutine or a generator; an environment returns its observation"),
        ("class play: pass\n", {}, "play is a class, not a function"),
    ],
)
def test_code_that_cannot_be_used_is_one_line(tmp_path, tokenizer, code, keys, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        prepared(tmp_path, tokenizer, code, **keys)
    assert str(caught.value).startswith("rollout.environment.path = ") and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------------ trajectories


class Texts(Rule):
    """Engine whose every turn is this text and an end."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, text: str) -> None:
        super().__init__()
        self._tokens = numpy.array([*tokenizer.encode(text), 4], numpy.int32)

    def poll(self) -> list[Response]:
        request, *self.waiting = self.waiting
        tokens = self._tokens[: request.max_tokens]
        finish = "stop" if len(tokens) == len(self._tokens) else "length"
        kept = KeptIds(numpy.ones(len(tokens), numpy.int32), tokens)
        return [Response(request.number, (Segment(tokens, -numpy.ones(len(tokens), numpy.float32), 1),), finish, kept)]


def drawn(config, found, tokenizer, text: str) -> tuple[Response, list[Request]]:
    engine = Texts(tokenizer, text)
    requests = [Request(0, tokenizer.chat([{"role": "user", "content": "5+6="}]), 5, source=PROMPT)]
    sampling = SamplingParams(max_tokens=config.rollout.max_response_tokens, stop_token_ids=(4,))
    with closing(with_environment(engine, found, config, tokenizer)) as rollout:
        (response,) = generate(rollout, requests, sampling)
    return response, engine.asked


def test_a_trajectory_is_the_chat_that_the_template_would_write(tmp_path, tokenizer):
    config, found = prepared(tmp_path, tokenizer, "def play(turn): return 'no' if turn.index < 2 else None\n", max_turns=9)
    response, asked = drawn(config, found, tokenizer, "7")
    answer, no = {"role": "assistant", "content": "7"}, {"role": "user", "content": "no"}
    whole = tokenizer.conversation([{"role": "user", "content": "5+6="}, answer, no, answer, no, answer])
    assert [*asked[0].prompt, *response.tokens.tolist()] == whole[:-1], "but for the line behind the last end"
    assert tokenizer.decode_all(response.tokens[response.sampled].tolist()) == "7<|im_end|>" * 3
    assert response.finish == "stop"


@pytest.mark.parametrize("keys", [{}, {"workers": 1}, {"interface": "ids"}, {"interface": "ids", "workers": 1}])
def test_an_environment_says_that_it_has_no_verdict_and_why(tmp_path, tokenizer, keys):
    """In the rank and in a process, of text and of ids. A reason that names no metric is a fault of the code, with its line."""
    code = (
        "from megappo.rewards.base import NoVerdict\n"
        "def play(turn):\n"
        "    if turn.index == 1: raise NoVerdict({!r})\n"
        "    return [5] if {!r} else 'no'\n"
    )
    config, found = prepared(tmp_path, tokenizer, code.format("judge_down", keys.get("interface", "")), max_turns=4, **keys)
    response, asked = drawn(config, found, tokenizer, "7")
    played = response.played
    assert played is not None and played.no_verdict == "judge_down" and response.fault is None and not played.is_late
    assert len(asked) == played.turns == len(played.seconds) == 2 and response.finish == "stop"
    config, found = prepared(tmp_path, tokenizer, code.format("judge is down", keys.get("interface", "")), **keys)
    response, _ = drawn(config, found, tokenizer, "7")
    assert response.fault is not None and "raised ValueError: NoVerdict('judge is down')" in response.fault
    assert "(mine.py:3); turn 1 of sample" in response.fault


def test_a_fault_ends_its_trajectory_and_travels_with_the_response(tmp_path, tokenizer):
    config, found = prepared(tmp_path, tokenizer, "def play(turn): return 'no' if turn.index < 1 else 1 / 0\n")
    response, asked = drawn(config, found, tokenizer, "7")
    assert len(asked) == 2 and response.fault is not None and "ZeroDivisionError" in response.fault


def test_an_observation_without_room_ends_the_trajectory_cut(tmp_path, tokenizer):
    config, found = prepared(tmp_path, tokenizer, "def play(turn): return 'a long one' * 9\n", longest=40)
    response, asked = drawn(config, found, tokenizer, "7")
    assert len(asked) == 1 and response.finish == "length" and bool(response.sampled.all())


COMPACTED = [
    # prompt and summary, whose start is left out where they are longer than a prompt may be
    ({"ask": "Sum up."}, lambda prompt, turn, no, ids: [*prompt, *[*turn, *no][-(32 - len(prompt)) :]]),
    ({"keep_last": 6}, lambda prompt, turn, no, ids: [*prompt, *ids[-6:]]),
    ({"keep_first": 3, "keep_last": 6}, lambda prompt, turn, no, ids: [*ids[:3], *ids[-6:]]),
]


@pytest.mark.parametrize("keys, expected", COMPACTED)
def test_a_sequence_that_grows_too_long_goes_on_from_what_is_kept(tmp_path, tokenizer, keys, expected):
    code = "def play(turn): return 'no'\n"
    config, found = prepared(tmp_path, tokenizer, code, max_turns=4, compaction={"max_tokens": 50, **keys})
    response, asked = drawn(config, found, tokenizer, "7")
    prompt = list(asked[0].prompt)
    no = Conversation(tokenizer, True).follow({"role": "user", "content": "no"}, ended=True)
    context, following = response.contexts[0], [*(one.prompt for one in response.contexts[1:]), response.prompt][0]
    ids = [*context.prompt.tolist(), *(token for segment in context.segments for token in segment.tokens.tolist()), *no]
    assert following is not None and following.tolist() == expected(prompt, [*tokenizer.encode("7"), 4], no, ids)
    if "ask" in keys:
        assert tokenizer.decode_all(context.segments[-2].tokens.tolist()).startswith("\n<|im_start|>user\nSum up.<|im_end|>")
        assert context.segments[-1].logprobs is not None, "the summary is the policy's"


SLOW = """
import os, time
def play(turn):
    turn.state["pids"] = [*turn.state.get("pids", ()), os.getpid()]
    if turn.seed == 2 and turn.index == 1: time.sleep(600)
    time.sleep(0.2)
    return "no" if len(set(turn.state["pids"])) <= 2 else None
"""


def test_processes_answer_turns_of_several_samples_at_once_and_one_beyond_its_limit_is_ended(tmp_path, tokenizer, caplog):
    config, found = prepared(tmp_path, tokenizer, SLOW, max_turns=3, workers=2, timeout_s=3.0, join="each")
    prompt = tokenizer.chat([{"role": "user", "content": "5+6="}])
    sampling = SamplingParams(max_tokens=config.rollout.max_response_tokens, stop_token_ids=(4,))
    rollout = with_environment(Texts(tokenizer, "7"), found, config, tokenizer)
    responses = generate(rollout, [Request(i, prompt, seed=i, source=PROMPT) for i in range(4)], sampling)
    played = [one.played for one in responses]
    assert [one and (one.turns, one.is_late, one.reached_limit) for one in played] == [
        (3, False, True),
        (3, False, True),
        (2, True, False),
        (3, False, True),
    ]
    assert [one.finish for one in responses] == ["stop", "stop", "length", "stop"] and not any(one.fault for one in responses)
    assert [one and one.no_verdict for one in played] == ["", "", "undecided", ""]
    assert all(0.2 <= seconds for one in played if one for seconds in one.seconds)
    (line,) = [record.getMessage() for record in caplog.records if "no answer" in record.getMessage()]
    assert line == (
        "environment mine.py: play gave no answer within 3 s; turn 1 of sample sums.jsonl#3 (sample 2), '7'; "
        "its trajectory has no score (1 so far on this rank)"
    )
    rollout.close()
    children = {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
    assert not any(b"runtime/helper_process.py" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children), "nothing is left"
