"""`megappo serve-reward`, asked by the trainer's client: a function, a reward model against transformers, what is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from megappo.commands import cli
from megappo.commands.serve_reward import server as reward_server
from megappo.config.reward_sections import RemoteConfig
from megappo.rewards.base import RewardError, RewardInput
from megappo.rewards.remote import RemotePart
from megappo.rewards.server import Server
from megappo.runtime import installed
from tests.data.tokenizer_files import write_hf_tokenizer

ROOT = Path(__file__).parents[2]
TOKEN = "s3same-open-55aa"
CODE = """
from megappo.rewards.base import UnusableAnswer
def score(sample, scale=1.0):
    if sample.truncated: return None
    if sample.answer == "unreadable": raise UnusableAnswer("no")
    return {"score": scale * len(sample.response), "parts": {"words": len(sample.response.split())}}
def wrong(sample): return 1 / (len(sample.response) - 3)
def both(samples): return [len(samples)] * len(samples)
"""


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda one: None if one.name == "uvicorn" else "1")
    assert cli.main(["serve-reward", "--function", "reward.py:score"]) == 2
    assert capsys.readouterr().err == "megappo: serve-reward: uvicorn is not installed: pip install 'megappo[server]'\n"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "megappo", "serve-reward", "--port", "0", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "REWARD_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@contextmanager
def running(*arguments: str | Path) -> Iterator[str]:
    """Address of a server; at the end it must stop by SIGTERM with code 0."""
    process = subprocess.Popen(command(*arguments), env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def ask(url: str, samples: Sequence[RewardInput], token: str | None = None, **settings: Any) -> list[Any]:
    with closing(RemotePart(Server("rm", url, RemoteConfig(retry_budget_s=0.0, **settings), token))) as part:
        return [future.result(60) for future in part.start(samples)]


def finished(response: str, **fields: Any) -> RewardInput:
    given = {"prompt": "How many?", "answer": "4", "truncated": False, "num_tokens": 3, "record": {}, "sample_id": "t#0"}
    return RewardInput(**{**given, "response": response, **fields})


def test_a_function_is_served_as_a_configuration_takes_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    samples = [finished("a b"), finished("cut", truncated=True), finished("", answer="unreadable"), finished("abcd")]
    with running("--function", tmp_path / "mine.py:score", "--args", '{"scale": 0.5}', "--token-env", "REWARD_TOKEN") as url:
        expected = [{"score": 1.5, "parts": {"words": 2.0}}, None, None, {"score": 2.0, "parts": {"words": 1.0}}]
        assert ask(url, samples, TOKEN, batch_size=3) == expected
        for token in (None, "another", TOKEN + "x"):
            with pytest.raises(RewardError, match="answered 401 Unauthorized: .*the token is missing or wrong"):
                ask(url, samples, token)
        health = urllib.request.urlopen(url.removesuffix("score") + "health", timeout=30)
        assert health.status == 200 and health.read() == b'{"status":"ok"}'


@contextmanager
def serving(scorer: reward_server.Scorer, max_bytes: int = 2**20) -> Iterator[str]:
    """The same application in a thread of this process, which has torch already."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(reward_server.settings_of(reward_server.make_app(scorer, None, max_bytes)))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/score"
    finally:
        server.should_exit = True
        thread.join()


def function(folder: Path, name: str, **how: Any) -> reward_server.Function:
    (folder / "mine.py").write_text(CODE)
    return reward_server.Function(f"{folder}/mine.py:{name}", **{"batch": False, "args": {}, **how})


def test_what_is_no_request_and_what_fails_is_answered_with_the_reason(tmp_path: Path) -> None:
    with serving(function(tmp_path, "wrong"), 10000) as url:
        assert ask(url, [finished("abcd")]) == [1.0]
        with pytest.raises(RewardError, match=r"422 .*wrong raised ZeroDivisionError: .*\(mine.py:7\); sample t#0"):
            ask(url, [finished("abc")])
        with pytest.raises(RewardError, match="413 .*the request is larger than .* MiB.*lower remote.batch_size"):
            ask(url, [finished("a" * 20000)])
        with pytest.raises(RewardError, match=r"422 .*samples\[0\] is .*not an object with a response"):
            ask(url, [finished("abcd")], send=("id",))
        with pytest.raises(urllib.error.HTTPError, match="422"):
            urllib.request.urlopen(url, data=b"[]", timeout=30)
    with serving(function(tmp_path, "both", batch=True)) as url:
        assert ask(url, [finished("a"), finished("b")]) == [2.0, 2.0]


@pytest.mark.parametrize("template", (True, False))
def test_a_reward_model_scores_as_transformers_does(tmp_path: Path, template: bool) -> None:
    """One sequence at a time without padding is the oracle; the server pads, with an id that some of the texts end with."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    write_hf_tokenizer(tmp_path, **({} if template else {"chat_template": None}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=128, pad_token_id=0, **sizes)
    model = LlamaForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    samples = [finished(text) for text in ("46", "The answer is 46.", "", "Natalia sold clips to 48 of her friends!")]
    expected = []
    for sample in samples:
        if template:
            turns = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.response}]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer(sample.prompt + sample.response, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            expected.append(model(ids).logits[0, 0].item())
    with serving(reward_server.RewardModel(str(tmp_path), device="cpu", dtype="fp32", batch_tokens=60)) as url:
        assert ask(url, samples) == pytest.approx(expected, abs=1e-4)
        assert len({round(value, 3) for value in expected}) == 4, "the oracle tells them apart"
        with pytest.raises(RewardError, match="422 .*tokens; the reward model takes 1 to 128"):
            ask(url, [finished("word " * 200)])


REFUSED = [
    (["--function", "{}/mine.py:absent"], "defines no absent; its functions: score, wrong, both"),
    (["--function", "{}/mine.py"], "write FILE:FUNCTION"),
    (["--function", "{}/none.py:score"], "cannot be read: No such file"),
    (["--function", "{}/mine.py:score", "--args", '{{"x": 1}}'], "unexpected keyword argument 'x'"),
    (["--model", "{}"], "no config.json"),
    (["--function", "{}/mine.py:score", "--token-env", "UNSET_TOKEN"], "--token-env UNSET_TOKEN: the variable is not set"),
    (
        ["--function", "{}/mine.py:score", "--host", "192.0.2.1"],
        "is open to other machines: give --token-env, --certificate and --key",
    ),
    (["--function", "{}/mine.py:score", "--host", "127.0.0.1", "--port", "99999"], "port must be 0-65535"),
]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["serve-reward", "--port", "0", *arguments]) == 2
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.startswith("megappo: ") and not said.out
    return line


@pytest.mark.parametrize("arguments, says", REFUSED, ids=[says[:30] for _, says in REFUSED])
def test_a_server_that_cannot_score_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    assert says in refusal(capsys, *(argument.format(tmp_path) for argument in arguments))


@pytest.mark.parametrize("labels, head, says", [(2, True, "has 2 labels, and a reward model has 1"), (1, False, "lacks weights")])
def test_a_checkpoint_that_is_no_reward_model_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    labels: int,
    head: bool,
    says: str,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    write_hf_tokenizer(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    cls = LlamaForSequenceClassification if head else LlamaForCausalLM
    cls(LlamaConfig(num_labels=labels, pad_token_id=0, **sizes)).save_pretrained(tmp_path)
    assert says in refusal(capsys, "--model", str(tmp_path))
