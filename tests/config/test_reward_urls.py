"""Addresses of reward servers: only plain ones, https or this machine, on the list of hosts, without secrets."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from megappo.config.checks import check_config
from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.config.loading import explicit_keys, load_config
from megappo.config.schema import TrainConfig
from megappo.config.urls import ServerUrl, host_of, is_loopback
from tests.config.examples import TRAIN, train_config

URL = TypeAdapter(ServerUrl)

# url, its host
TAKEN = [
    ("https://rewards.example/score", "rewards.example"),
    ("https://Rewards.Example:8443/v1/score?model=rm-7b&set=a", "rewards.example"),
    ("https://rm_1.cluster.local", "rm_1.cluster.local"),
    ("https://10.0.0.7:9000/score", "10.0.0.7"),
    ("https://[2001:db8::1]/score", "2001:db8::1"),
    ("http://127.0.0.1:8000/score", "127.0.0.1"),
    ("http://127.8.9.10:8000", "127.8.9.10"),
    ("http://[::1]:8000/score", "::1"),
]
# Everything else; with http, everything that is no address of this machine, though it may look like one.
REFUSED = [
    "http://localhost:8000/score",
    "http://localhost.evil.com/",
    "http://127.0.0.1.evil.com/",
    "http://127.0.0.1@evil.com/",
    "http://evil.com#127.0.0.1/",
    "http://evil.com\\@127.0.0.1/",
    "http://127.0.0.1\\.evil.com/",
    "http://127.1/",
    "http://2130706433/",
    "http://0x7f.1/",
    "http://0x7f000001/",
    "http://017700000001/",
    "http://0.0.0.0:8000/",
    "http://[::]:8000/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[fe80::1%25lo]/",
    "http://169.254.169.254/latest/meta-data",
    "http://10.0.0.7/score",
    "http://rewards.example/score",
    "http://127.0.0.1:0/",
    "http://127.0.0.1:65536/",
    "http://127.0.0.1 .evil.com/",
    "http://127.0.0.1\n/",
    "http://127.0.0.1/\t",
    "http://\uff11\uff12\uff17.0.0.1/",
    "https://user@rewards.example/",
    "https://user:password@rewards.example/",
    "https://rewards.example/?api_key=abcdefgh",
    "https://rewards.example/#part",
    "https://rewards.example./score",
    "https://r\u00e9wards.example/",
    "https:///score",
    "https://",
    "//rewards.example/score",
    "ftp://rewards.example/score",
    "file:///etc/passwd",
    "HTTP://127.0.0.1/",
    "rewards.example/score",
    "",
]


def test_plain_addresses_are_taken() -> None:
    for url, host in TAKEN:
        assert URL.validate_python(url) == url and host_of(url) == host


def test_everything_else_is_refused() -> None:
    for url in REFUSED:
        with pytest.raises(ValidationError):
            pytest.fail(f"{url!r} is taken as {URL.validate_python(url)!r}")


@given(st.from_regex(r"https?://[0-9a-zA-Z.:@/\\\[\]#?%_-]{1,40}", fullmatch=True))
def test_two_other_parsers_see_the_host_that_was_checked(url: str) -> None:
    """The library that opens the connection, and Python's: a difference would be a way around the checks."""
    import httpx2

    try:
        URL.validate_python(url)
    except ValidationError:
        return
    host = host_of(url)
    assert httpx2.URL(url).host == host == urlsplit(url).hostname
    assert url.startswith("https://") or is_loopback(host)


def load(folder: Path, reward: str) -> TrainConfig:
    return train_config(folder, text=TRAIN + yaml.safe_dump({"reward": yaml.safe_load(reward)}))


# what stands under reward, what the line says
MISTAKES = [
    ("parts: [{name: rm, url: 'http://localhost:80'}]", ["reward.parts.0.url", "is not encrypted", "http://127.0.0.1:PORT"]),
    (
        "parts: [{name: rm, url: 'https://a:b@c.d/'}]",
        ["reward.parts.0.url", "(hidden)@c.d", "holds credentials", "remote.token_env"],
    ),
    ("parts: [{name: rm, url: nowhere}]", ['reward.parts.0.url = "nowhere"', "is no address of a server"]),
    ("parts: [{name: rm, url: 'https://a.b/', remote: {token_env: MINE}}]", ['remote.token_env = "MINE"', "TOKEN, KEY or SECRET"]),
    ("parts: [{name: rm, url: 'https://a.b/', remote: {token_env: 'A-KEY'}}]", ["remote.token_env", "must match"]),
    ("parts: [{name: rm, url: 'https://a.b/', remote: {batch: 1}}]", ["remote.batch = 1", "the keys are batch_size, concurrency"]),
    ("parts: [{name: rm, url: 'https://a.b/', remote: {batch_size: 0}}]", ["remote.batch_size = 0", "must be >= 1"]),
    ("parts: [{name: rm, url: 'https://a.b/', remote: {timeout_s: 0}}]", ["remote.timeout_s = 0", "must be > 0"]),
    ("parts: [{name: rm, url: 'https://a.b/', remote: {send: [all]}}]", ["remote.send", "must be one of", "'record'"]),
    ("parts: [{name: rm, url: 'https://a.b/', batch: true}]", ["reward.parts.0.batch", "a part with url has none", "set path or"]),
    ("parts: [{url: 'https://a.b/', path: x.py, function: f}]", ["path is set too; keep one of the two"]),
    (
        "parts: [{name: exact_match, remote: {batch_size: 3}}]",
        ['reward.parts.0.remote = {"batch_size": 3}', "or set url", "has none"],
    ),
    (
        "{parts: [{name: rm, url: 'https://a.b/s'}], allow_hosts: [b.a, c.d]}",
        ["reward.parts.0.url", "a.b is not in reward.allow_hosts (b.a, c.d)"],
    ),
    ("{parts: [{name: rm, url: 'https://a.b/s'}], allow_hosts: []}", ["a.b is not in reward.allow_hosts (empty)"]),
    ("{parts: [{name: rm, url: 'https://a.b.c/s'}], allow_hosts: [b.c]}", ["a.b.c is not in reward.allow_hosts"]),
]


@pytest.mark.parametrize("reward, says", MISTAKES)
def test_a_mistake_is_one_line_with_the_key(tmp_path: Path, reward: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config = load(tmp_path, reward)
        check_config(config, explicit_keys(config), 1, "cpu")
    assert "\n" not in str(caught.value) and all(text in str(caught.value) for text in says), caught.value


def test_a_host_of_the_list_and_this_machine_are_taken_and_the_dump_loads_again(tmp_path: Path) -> None:
    parts = "[{name: a, url: 'https://A.B/s', remote: {concurrency: 2}}, {name: b, url: 'http://127.0.0.1:1/'}]"
    config = load(tmp_path, f"{{parts: {parts}, allow_hosts: [a.b]}}")
    check_config(config, explicit_keys(config), 1, "cpu")
    dumped = yaml.safe_load(dump_yaml(config))
    assert dumped["reward"]["parts"][1] == {"name": "b", "weight": 1.0, "url": "http://127.0.0.1:1/"}
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config
