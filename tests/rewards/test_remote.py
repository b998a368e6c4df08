"""Rewards of a server, against a real one that fails in every way of RELIABILITY.md F16 and S8: late, lost and wrong answers are
tried again or end the run, and none is a score."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megappo.config.reward_sections import RemoteConfig
from megappo.rewards.base import RewardError, RewardInput
from megappo.rewards.remote import RemotePart
from megappo.rewards.server import Server
from megappo.rewards.verdict import verdict_of
from megappo.rewards.wire import answer_body, results_of, samples_of
from tests.rewards import faulty_server as faulty
from tests.rewards.faulty_server import Behaviour, FaultyServer, Handler, saying, serving
from tests.rewards.samples import sample

SAMPLES = [sample("x" * size, sample_id=f"t#{size}") for size in range(5)]
TOKEN = "s3same-open-7d1f"
# No test may wait for its own timeout on a machine that is busy: limits that must hold are 10 s, those that must strike are short.
QUICK = {"timeout_s": 10.0, "retry_budget_s": 10.0, "batch_size": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    with serving() as running:
        yield running


def part(server: FaultyServer, token: str | None = None, **settings: Any) -> RemotePart:
    return RemotePart(Server("rm", server.url_of_now, RemoteConfig(**{**QUICK, **settings}), token))


def results(
    server: FaultyServer, behaviours: Sequence[Behaviour], samples: Sequence[RewardInput] = SAMPLES, **settings: Any
) -> list:
    """Results of the samples by a server that answers the first requests so."""
    server.do(behaviours)
    with closing(part(server, **settings)) as remote:
        return [future.result(60) for future in remote.start(samples)]


def failure(server: FaultyServer, behaviours: Sequence[Behaviour], **settings: Any) -> str:
    with pytest.raises(RewardError) as caught:
        results(server, behaviours, **settings)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
    return str(caught.value)


def given_up(caplog: pytest.LogCaptureFixture, server: FaultyServer, behaviours: Sequence[Behaviour], **settings: Any) -> str:
    """What the log says, once, of a server that answers none of the samples within the budget."""
    found = results(server, behaviours, **settings)
    assert [none.reason for none in found] == ["unreachable"] * len(SAMPLES)
    (said,) = [record.getMessage() for record in caplog.records if "has no verdict" in record.getMessage()]
    assert "\n" not in said and len(said) < 800
    return said


# ---------------------------------------------------------------------------------------------------------------- requests


def test_samples_go_out_in_batches_and_come_back_in_order(server: FaultyServer) -> None:
    assert results(server, [], concurrency=1) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [[item["id"] for item in asked["samples"]] for _, asked in server.requests] == [["t#0", "t#1"], ["t#2", "t#3"], ["t#4"]]
    assert all(asked["version"] == 1 for _, asked in server.requests)
    assert results(server, [], [], concurrency=1) == [] and not server.requests, "a rank without a share asks nothing"


def test_rewards_of_tokens_come_over_the_wire_and_are_counted(server: FaultyServer) -> None:
    answer = json.dumps({"scores": [1, 2], "per_token": [[0.5, -1, 0], None]})
    found = results(server, [saying(answer)], [SAMPLES[0], SAMPLES[1]])
    assert found == [{"score": 1.0, "per_token": [0.5, -1.0, 0.0]}, 2.0]
    of_three = RewardInput("q", "r", "a", False, 3, {}, "t#0")
    verdict = verdict_of(found[0], "rm", of_three)
    assert verdict.per_token == (0.5, -1.0, 0.0) and verdict.parts == {"per_token": -0.5}
    with pytest.raises(RewardError, match="per_token with 3 rewards for 4 sampled tokens"):
        verdict_of(found[0], "rm", replace(of_three, num_tokens=4))


def test_a_sample_is_sent_the_fields_that_were_asked_for_and_its_record_only_then(server: FaultyServer) -> None:
    one = RewardInput("2+2=", "4", "four", True, 3, {"secret": "of the data"}, "t#0", "4</s>", (5, 6, 2), ("3", "4"))
    results(server, [], [one])
    assert server.requests[0][1]["samples"] == [
        {"id": "t#0", "prompt": "2+2=", "response": "4", "answer": "four", "truncated": True, "num_tokens": 3}
    ]
    assert "Authorization" not in server.requests[0][0]
    results(server, [], [one], send=("response", "record", "tokens", "full_response", "turns"))
    assert server.requests[0][1]["samples"] == [
        {"response": "4", "record": {"secret": "of the data"}, "tokens": [5, 6, 2], "full_response": "4</s>", "turns": ["3", "4"]}
    ]


def test_a_record_that_json_does_not_hold_is_named(server: FaultyServer) -> None:
    odd = RewardInput("q", "r", "a", False, 1, {"at": {1, 2}}, "t#7")
    with pytest.raises(RewardError, match="a record cannot be sent as JSON: .*set.* sample t#7"):
        results(server, [], [odd], send=("record",))
    half = RewardInput("q", "\ud800", "a", False, 1, {}, "t#8")
    assert results(server, [], [half]) == [1.0], "half of a surrogate pair has no bytes in UTF-8, and an escape in JSON"


def test_requests_are_under_way_together(server: FaultyServer) -> None:
    barrier = threading.Barrier(3)

    def meet(handler: Handler) -> None:
        barrier.wait(30)
        faulty.fine(handler)

    assert results(server, [meet] * 3, concurrency=3) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_samples_that_come_one_by_one_go_out_at_once_or_together(server: FaultyServer) -> None:
    """The first does not wait for a full batch; those that come while it is under way share the next request."""
    held, free = threading.Event(), threading.Event()

    def hold(handler: Handler) -> None:
        held.set()
        assert free.wait(30)
        faulty.fine(handler)

    server.do([hold])
    with closing(part(server, concurrency=1, batch_size=4)) as remote:
        futures = list(remote.start(SAMPLES[:1]))
        assert held.wait(30)
        for one in SAMPLES[1:]:
            futures += remote.start([one])
        free.set()
        assert [future.result(30) for future in futures] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [len(asked["samples"]) for _, asked in server.requests] == [1, 4]


def test_results_are_numbers_undecided_or_with_parts(server: FaultyServer) -> None:
    answer = {"scores": [1, None], "parts": {"fluency": [0.5, None], "length": [2, 3]}, "version": 1}
    found = results(server, [saying(json.dumps(answer))], SAMPLES[:2])
    assert found == [{"score": 1.0, "parts": {"fluency": 0.5, "length": 2.0}}, None]


def test_the_random_numbers_of_the_run_are_left_alone(server: FaultyServer) -> None:
    state = random.getstate()
    results(server, [saying("", 503)])
    assert random.getstate() == state


# ----------------------------------------------------------------------------------------------------- faults that may pass

PASSING: list[tuple[Behaviour, dict[str, Any]]] = [
    (saying("overloaded", 500), {}),
    (saying("", 503), {}),
    (saying("", 408), {}),
    (saying("slowly", 429, Retry_After="1"), {}),
    (saying("", 503, Retry_After="Mon, 23 Nov 2020 00:00:00 GMT"), {}),
    (saying("", 503, Retry_After="soon"), {}),
    (faulty.closing, {}),
    (faulty.closing_in_the_middle, {}),
    (faulty.speaking_no_http, {}),
    (faulty.late(30), {"timeout_s": 1.0}),
    (faulty.dripping_body, {"timeout_s": 1.0}),
    (faulty.dripping_headers, {"timeout_s": 1.0}),
]


@pytest.mark.parametrize("fault, settings", PASSING)
def test_a_passing_fault_costs_a_retry_and_no_score(server: FaultyServer, fault: Behaviour, settings: dict) -> None:
    assert results(server, [fault], concurrency=1, **settings) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(server.requests) >= 4, "three batches, and one of them twice (or more: a busy machine may be late by itself)"


def test_retry_after_is_a_least_wait(server: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    results(server, [saying("", 429, Retry_After="1")], SAMPLES[:1])
    assert time.monotonic() - start >= 1.0
    said = given_up(caplog, server, [saying("", 429, Retry_After="100")] * 3)
    assert "it asks to wait 100 s, and 10 s of remote.retry_budget_s are left" in said


def test_retries_are_counted_and_told_once(server: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    server.do([saying("CUDA out of\n memory", 500)] * 4)
    with closing(part(server)) as remote, caplog.at_level(logging.INFO):
        assert [future.result(60) for future in remote.start(SAMPLES)] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert remote.num_retries == 4
    told = [record.getMessage() for record in caplog.records if record.name.startswith("megappo")]
    assert told == [
        f"reward rm: {server.url_of_now}: answered 500 Internal Server Error: CUDA out of memory; trying again for up to 10 s",
        "reward rm: 4 requests were sent again, then all was scored",
    ]


# fault, settings, what the error says
LASTING: list[tuple[Behaviour, dict[str, Any], str]] = [
    (saying("no memory", 500), {}, "answered 500 Internal Server Error: no memory"),
    (faulty.closing, {}, "Server disconnected"),
    (faulty.late(60), {"timeout_s": 0.5}, "no whole answer within 0.5 s"),
    (faulty.dripping_body, {"timeout_s": 0.5}, "no whole answer within 0.5 s"),
    (faulty.dripping_headers, {"timeout_s": 0.5}, "no whole answer within 0.5 s"),
]


@pytest.mark.parametrize("fault, settings, says", LASTING)
def test_a_lasting_fault_leaves_no_verdict_at_the_budget(
    server: FaultyServer, caplog: pytest.LogCaptureFixture, fault: Behaviour, settings: dict, says: str
) -> None:
    start = time.monotonic()
    said = given_up(caplog, server, [fault] * 100, retry_budget_s=1.0, **settings)
    assert 1.0 <= time.monotonic() - start < 1.0 + 5.0
    assert f"reward rm: {server.url_of_now} after " in said and " tries in " in said and says in said
    assert "; 2 samples, the first: sample t#" in said or "; sample t#4, response 'xxxx'" in said
    assert len(server.requests) >= 3


def test_a_server_that_is_down_costs_one_budget_for_all_that_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Those that come later are worth a budget of their own: the server may be back."""
    with serving() as gone:
        remote = part(gone, retry_budget_s=1.0, batch_size=1, concurrency=1)
    with closing(remote):
        for _ in range(2):
            start = time.monotonic()
            assert [getattr(future.result(60), "reason", "") for future in remote.start(SAMPLES)] == ["unreachable"] * len(SAMPLES)
            assert 1.0 <= time.monotonic() - start < len(SAMPLES) * 1.0, "one after the other they take 5 s"
    said = [record.getMessage() for record in caplog.records if "has no verdict" in record.getMessage()]
    assert len(said) == 2 and re.search(r"after \d+ tries in \d\.\d s: ConnectError: Connection refused; ", said[0])


def test_samples_that_a_server_cannot_take_cost_the_others_nothing(server: FaultyServer) -> None:
    def sometimes(handler: Handler) -> None:
        if "t#1" in str(server.requests[-1][1]):
            return handler.answer(500, b"that one")
        return faulty.fine(handler)

    found = results(server, [sometimes] * 50, retry_budget_s=1.0, batch_size=1, concurrency=1)
    assert [getattr(one, "reason", one) for one in found] == [0.0, "unreachable", 2.0, 3.0, 4.0]


def test_a_server_that_fails_now_and_then_is_two_lines_and_not_one_for_each_request(
    server: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    found = results(server, [saying("", 500), faulty.fine] * 2, retry_budget_s=0.0, batch_size=1, concurrency=1)
    assert [getattr(one, "reason", one) for one in found] == ["unreachable", 1.0, "unreachable", 3.0, 4.0]
    first, last = [record.getMessage() for record in caplog.records]
    assert "what it does not answer has no verdict" in first and last == "reward rm: 2 requests in all were not answered"


def test_no_budget_is_one_try(server: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    said = given_up(caplog, server, [saying("", 500)] * 9, retry_budget_s=0.0, concurrency=1)
    assert " after " not in said and len(server.requests) == 3


def test_one_failure_is_that_of_all_that_wait_and_the_part_can_be_asked_again(server: FaultyServer) -> None:
    """Nobody waits for a request under way when another has failed, nor for its budget."""
    free = threading.Event()

    def hold(handler: Handler) -> None:
        free.wait(60)

    server.do([hold, saying("", 404)])
    with closing(part(server, timeout_s=60.0, retry_budget_s=60.0, concurrency=2)) as remote:
        futures = remote.start(SAMPLES)
        assert wait(futures, 30).not_done == set()
        assert {str(future.exception()) for future in futures} == {str(futures[0].exception())}
        free.set()
        assert [future.result(30) for future in remote.start(SAMPLES)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_part_closes_with_requests_under_way(server: FaultyServer) -> None:
    free = threading.Event()

    def hold(handler: Handler) -> None:
        free.wait(60)

    server.do([hold] * 2)
    remote = part(server, timeout_s=60.0)
    futures = remote.start(SAMPLES)
    start = time.monotonic()
    remote.close()
    remote.close()
    assert time.monotonic() - start < 10
    assert all("closed before" in str(future.exception(1)) for future in futures)
    free.set()


# -------------------------------------------------------------------------------------------------- faults that do not pass

# answer, what the error says
REFUSED: list[tuple[Behaviour, str]] = [
    (
        saying("", 302, Location="http://169.254.169.254/latest/meta-data/"),
        "a redirect to http://169.254.169.254/latest/meta-data/;",
    ),
    (saying("", 307), "a redirect to nowhere"),
    (saying("bad", 400), "answered 400 Bad Request: bad"),
    (saying("", 401), "answered 401 Unauthorized; check remote.token_env"),
    (saying("", 404), "answered 404 Not Found"),
    (saying("", 413), "lower remote.batch_size"),
    (saying("", 204), "answered 204 No Content"),
    (saying("red\x1b[31m\r\nalert", 400), "answered 400 Bad Request: red[31m alert"),
    (faulty.streaming_gigabyte, "answered with more than 1 MiB"),
    (faulty.announcing_gigabyte, "answered with more than 1 MiB"),
    (faulty.gzip_bomb, "answered with Content-Encoding gzip"),
    (saying("<html>log in</html>"), 'the answer is no JSON: "<html>log in</html>"'),
    (saying(b"\xff\xfe\x00"), "the answer is no JSON"),
    (saying(""), "the answer is no JSON"),
    (saying("[" * 100000), "the answer is no JSON"),
    (saying('{"scores": [1, NaN]}'), "the answer holds NaN"),
    (saying('{"scores": [-Infinity, 1]}'), "the answer holds -Infinity"),
    (saying('{"scores": [1e999, 1]}'), "the answer has Infinity as scores[0], not a finite number"),
    (saying('{"scores": [1e39, 1]}'), "not a finite number"),  # more than fp32 holds
    (saying('{"scores": [1, ' + "9" * 5000 + "]}"), "the answer is no JSON"),
    (saying('{"scores": [1, ' + "9" * 400 + "]}"), "the answer has a very large integer as scores[1]"),
    (saying('{"scores": ["1", 1]}'), 'the answer has "1" as scores[0]'),
    (saying('{"scores": [true, 1]}'), "the answer has true as scores[0]"),
    (saying('{"scores": [1]}'), "the answer has 1 values in scores for 2 samples"),
    (saying('{"scores": [1, 2, 3]}'), "the answer has 3 values in scores for 2 samples"),
    (saying('{"scores": {"0": 1}}'), "not {"),
    (saying("[1, 2]"), "the answer is [1, 2], not {"),
    (saying('{"score": [1, 2]}'), "not {"),
    (saying('{"scores": [1, 2], "part": {}}'), 'the answer holds "part" beside scores'),
    (saying('{"scores": [1, 2], "parts": {"a": [1]}}'), "the answer has 1 values in parts.a for 2 samples"),
    (saying('{"scores": [1, 2], "per_token": [[1]]}'), "the answer has 1 values in per_token for 2 samples"),
    (saying('{"scores": [1, 2], "per_token": [null, 3]}'), "the answer has 3 as per_token[1], not a list of numbers"),
    (saying('{"scores": [1, 2], "per_token": [null, [1, true]]}'), "the answer has true in per_token[1], not a finite number"),
    (saying('{"scores": [1, 2], "version": 2}'), "the answer is of version 2"),
]


@pytest.mark.parametrize("answer, says", REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_a_wrong_answer_ends_the_run_at_once(server: FaultyServer, answer: Behaviour, says: str) -> None:
    said = failure(server, [answer] * 100, concurrency=1)
    assert f"reward rm: {server.url_of_now}: " in said and says in said and "sample t#" in said
    assert len(server.requests) == 1
    assert said.isprintable()


def test_the_sample_with_the_wrong_score_is_named(server: FaultyServer) -> None:
    # One request at a time: of several wrong answers, the first to arrive is told.
    said = failure(server, [saying('{"scores": [1, "x"]}')], concurrency=1)
    assert said.endswith("not a finite number; sample t#1, response 'x'")


def test_a_redirect_is_not_followed_even_to_the_same_host(server: FaultyServer) -> None:
    with serving() as other:
        failure(server, [saying("", 307, Location=other.url)])
        assert not other.requests
    failure(server, [saying("", 308, Location="/elsewhere")], concurrency=1)
    assert len(server.requests) == 1


def test_the_cap_is_of_bytes_and_has_room_for_a_score_of_every_token(server: FaultyServer) -> None:
    large = '{"scores": [' + " " * (2**20 + 4096) + "1, 2]}"
    assert "more than 1 MiB" in failure(server, [saying(large)])
    number = -2.2250738585072014e-308  # of the most digits that JSON writes
    each = [[number] * 40_000] * 2
    body = json.dumps({"scores": [1, 2], "per_token": each})
    assert len(body) > 3 * 2**19
    found = results(server, [saying(body)], [replace(one, num_tokens=40_000) for one in SAMPLES[:2]])
    assert [(one["score"], one["per_token"]) for one in found] == [(1.0, each[0]), (2.0, each[1])]


# ------------------------------------------------------------------------------------------------- secrets, proxies, TLS


def test_the_token_is_sent_and_said_nowhere(server: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    def echo(handler: Handler) -> None:
        handler.answer(500 if len(server.requests) < 2 else 400, f"no: {handler.headers['Authorization'].split()[1]}".encode())

    server.do([echo] * 2)
    with closing(part(server, TOKEN)) as remote, caplog.at_level(logging.DEBUG):
        with pytest.raises(RewardError) as caught:
            remote.start(SAMPLES[:1])[0].result(60)
        shown = f"{remote!r} {remote.server!r} {vars(remote)} {caught.value!r}"
    assert server.requests[0][0]["Authorization"] == f"Bearer {TOKEN}"
    assert "answered 400 Bad Request: no: (hidden)" in shown
    assert TOKEN not in shown and TOKEN not in caplog.text


def test_nothing_of_the_environment_comes_between(server: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a proxy, which would catch 127.0.0.1 too, nor netrc's password; and no cookie is kept."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))

    def biscuit(handler: Handler) -> None:
        handler.answer(200, json.dumps({"scores": handler.scores}).encode(), Set_Cookie="session=1; Path=/")

    assert results(server, [biscuit] * 3, concurrency=1) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(server.requests) == 3
    assert not any({"Authorization", "Cookie"} & headers.keys() for headers, _ in server.requests)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Self-signed certificates: of 127.0.0.1, and of another machine."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("certificates")
    made = {}
    for name, subject in {"here": "IP:127.0.0.1", "elsewhere": "DNS:rewards.example"}.items():
        made[name] = (folder / f"{name}.pem", folder / f"{name}.key")
        command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName={subject}".split()
        subprocess.run([*command, "-out", made[name][0], "-keyout", made[name][1]], check=True, capture_output=True)
    return made


def test_a_certificate_is_verified(certificates: dict[str, tuple[Path, Path]]) -> None:
    here, elsewhere = certificates["here"], certificates["elsewhere"]
    with serving(here) as server:
        assert results(server, [], ca_file=str(here[0])) == [0.0, 1.0, 2.0, 3.0, 4.0]
        start = time.monotonic()
        said = failure(server, [])
        assert "its certificate is not valid here" in said and "set remote.ca_file" in said and not server.requests
        assert "https://127.0.0.1" in said and time.monotonic() - start < 9, "at once, not after the budget"
        with pytest.raises(ValueError, match="cannot be read as certificates: No such file"):
            part(server, ca_file="/no/such.pem")
    with serving(elsewhere) as server:
        said = failure(server, [], ca_file=str(elsewhere[0]))
        assert "its certificate is not valid here" in said and "IP address mismatch" in said and not server.requests


# -------------------------------------------------------------------------------------------------------- the server's side


def test_both_sides_read_each_other() -> None:
    body = b'{"version": 1, "samples": [{"id": "a#1", "response": "r", "tokens": [1, 2], "truncated": true, "turns": ["r", "s"]}]}'
    assert samples_of(body) == [RewardInput("", "r", "", True, 0, {}, "a#1", "", (1, 2), ("r", "s"))]
    given = [{"score": 1, "parts": {"a": 2}}, None, 0.5, {"score": 0, "per_token": (1, 0.5)}]
    answer = json.dumps(answer_body(given)).encode()
    assert results_of(answer, 4) == [{"score": 1.0, "parts": {"a": 2.0}}, None, 0.5, {"score": 0.0, "per_token": [1.0, 0.5]}]
    assert "per_token" not in answer_body(given[:3]), "a server without it answers as before"


@pytest.mark.parametrize(
    "body, says",
    [
        (b"{}", "the request is not"),
        (b"x", "the request is no JSON"),
        (b'{"samples": []}', "version null"),
        (b'{"version": 1, "samples": [1]}', "samples[0] is 1"),
        (b'{"version": 1, "samples": [{"response": "r", "propmt": 1}]}', 'the unknown field "propmt"'),
        (b'{"version": 1, "samples": [{"response": "r", "num_tokens": "1"}]}', 'num_tokens = "1", not a int'),
        (b'{"version": 1, "samples": [{"response": "r", "turns": ["a", 1]}]}', "turns[1] = 1, not a str"),
    ],
)
def test_a_wrong_request_is_refused_with_its_place(body: bytes, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        samples_of(body)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "result",
    [
        float("nan"),
        "1",
        {"score": 1, "per_token": 1},
        {"score": 1, "per_token": [float("nan")]},
        {"score": 1, "weight": 2},
        {"score": float("inf")},
        {"score": 1, "parts": {"a": "b"}},
    ],
)
def test_a_server_does_not_send_what_is_no_score(result: Any) -> None:
    with pytest.raises(ValueError, match="returned"):
        answer_body([result])
