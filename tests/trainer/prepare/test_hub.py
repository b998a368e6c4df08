"""Names of the Hugging Face hub as models: downloaded once from a hub that the tests serve on this machine, by its real client."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megappo.commands.cli import main
from megappo.config.loading import load_config
from megappo.config.schema import TrainConfig
from megappo.trainer.prepare.hub import commit_of, local_overrides, with_local_models
from tests.commands.plan.checkpoints import write_checkpoint, write_run

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "lab/tiny"


class Hub(ThreadingHTTPServer):
    """One repository, `lab/tiny`, with the files below `folder`; asked: requests, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        super().__init__(("127.0.0.1", 0), Answer)

    def files(self) -> dict[str, bytes]:
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        files = self.server.files()
        if path in (f"/api/models/{NAME}/revision/main", f"/api/models/{NAME}/revision/{COMMIT}"):
            self.reply(json.dumps({"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}).encode())
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            entries = [{"type": "file", "path": name, "size": len(data), "oid": digest(data)} for name, data in files.items()]
            self.reply(json.dumps(entries).encode())
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/") and (name := path.split("/", 5)[5]) in files:
            self.reply(files[name], {"ETag": f'"{digest(files[name])}"', "X-Repo-Commit": COMMIT})
        else:
            code = (
                "GatedRepo"
                if "gated" in path
                else "RevisionNotFound"
                if path.startswith(f"/api/models/{NAME}/")
                else "RepoNotFound"
            )
            self.reply(b"", {"X-Error-Code": code}, status=403 if code == "GatedRepo" else 404)

    do_HEAD = do_GET

    def reply(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = write_checkpoint(tmp_path_factory.mktemp("hub"))
    for name in ("pytorch_model.bin", "modeling_tiny.py", "original/consolidated.safetensors", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not wanted")
    with Hub(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def environment(folder: Path, hub: Hub | None, *, offline: bool = False) -> dict[str, str]:
    """hub: None is a machine without a connection."""
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}" if hub is not None else "http://127.0.0.1:9"
    return {**os.environ, "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": str(int(offline))}


def plan(folder: Path, *overrides: str, variables: dict[str, str]) -> str:
    command = [sys.executable, "-m", "megappo", "plan", str(folder / "run.yaml"), *overrides]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(names: list[str], variables: dict[str, str]) -> list[str]:
    """Lines with which `names` are refused, asked for by one process."""
    code = """
import sys
from megappo.config.errors import ConfigError
from megappo.trainer.prepare.hub import local_model
for name in sys.argv[1:]:
    try:
        print(local_model("policy.model", name))
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, *names], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_name_of_the_hub_is_downloaded_once_and_then_works_without_it(hub: Hub, tmp_path: Path, capsys) -> None:
    write_run(tmp_path)
    hub.asked.clear()
    first = plan(tmp_path, f"policy.model={NAME}", variables=environment(tmp_path, hub))
    fetched = {line.rsplit("/", 1)[1] for line in hub.asked if line.startswith("GET /lab/tiny/resolve/")}
    assert {"config.json", "model.safetensors", "tokenizer.model"} <= fetched
    assert not fetched & {"pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", "README.md"}
    (snapshot,) = (tmp_path / "hf").rglob("snapshots/*")
    assert snapshot.name == COMMIT and not list(snapshot.rglob("*.py"))
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert capsys.readouterr().out.replace(str(tmp_path / "model"), str(snapshot)) == first
    hub.asked.clear()
    assert (
        refused([NAME], environment(tmp_path, hub)) == refused([NAME], environment(tmp_path, None, offline=True)) == [str(snapshot)]
    )
    assert not [line for line in hub.asked if "/resolve/" in line]


def test_a_model_that_the_hub_does_not_give_is_one_line(hub: Hub, tmp_path: Path) -> None:
    cases = {
        f"{NAME}@{'f' * 40}": f"lab/tiny has no revision {'f' * 40}",
        "lab/absent": "no such directory, and no model of that name on the Hugging Face hub (a private one needs HF_TOKEN)",
        "lab/gated": "accept the terms of lab/gated on the hub, then `hf auth login` or set HF_TOKEN",
    }
    lines = refused([*cases], environment(tmp_path, hub))
    assert lines == [f'policy.model = "{name}": {says}' for name, says in cases.items()]


@pytest.mark.parametrize(("offline", "says"), [(True, "HF_HUB_OFFLINE allows alone"), (False, "not downloaded from the")])
def test_without_a_connection_the_line_says_how_to_get_the_model(tmp_path: Path, offline: bool, says: str) -> None:
    (line,) = refused([NAME], environment(tmp_path, None, offline=offline))
    assert 'policy.model = "lab/tiny"' in line and says in line and "`hf download lab/tiny`" in line


def test_directories_and_paths_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of two words below a directory that exists is a directory that is missing, and no question to a hub."""
    monkeypatch.setattr("megappo.trainer.prepare.hub._download", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/absent", "absent", "/abs/olute", "../up/there", "a/b/c"):
        config = load_config(run, [f"policy.model={path}"])
        assert with_local_models(config) is config


def test_the_other_processes_of_a_run_are_told_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"/hf cache/models--lab--tiny/snapshots/{COMMIT}"
    monkeypatch.setattr("megappo.trainer.prepare.hub._download", lambda key, name, shapes_only: place)
    run = write_run(tmp_path)
    written = load_config(run, ["policy.model=lab/tiny", "data.tokenizer=lab/words@v1"])
    resolved = with_local_models(written)
    overrides = local_overrides(written, resolved)
    assert overrides == [f'policy.model="{place}"', f'data.tokenizer="{place}"']
    assert load_config(run, overrides) == resolved and isinstance(resolved, TrainConfig)
    assert resolved.critic.model is None, "null still means policy.model"
    assert commit_of(resolved.policy.model) == COMMIT and commit_of(str(tmp_path)) is None


RANK = """
import os, sys
import torch.distributed as dist
from megappo.config.errors import ConfigError
from megappo.commands.cli import main
from megappo.config.loading import load_config
from megappo.trainer.prepare.hub import with_local_models
from megappo.trainer.preflight import local_models_of_ranks
dist.init_process_group("gloo")
rank, (path, *names) = dist.get_rank(), sys.argv[1:]
for name in names:
    resolve = with_local_models if name.startswith("alone:") else local_models_of_ranks
    try:
        found = resolve(load_config(path, [f"policy.model={name.removeprefix('alone:')}"])).policy.model
    except ConfigError as error:
        found = str(error)
    dist.barrier()
    print(found, flush=True)
dist.destroy_process_group()
"""


def resolved_by_ranks(folder: Path, hub: Hub, *names: str, shared: bool = True) -> list[list[str]]:
    """What each of two ranks makes of every name. shared: one cache for both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        variables = environment(folder if shared else folder / rank, hub)
        variables |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", RANK, str(folder / "run.yaml"), *names]
        ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return said


def questions(hub: Hub) -> int:
    return sum(line.startswith("GET /api/") and line.endswith("/revision/main") for line in hub.asked)


@pytest.mark.slow
def test_one_rank_asks_the_hub_and_the_others_learn_the_outcome(hub: Hub, tmp_path: Path) -> None:
    write_run(tmp_path)
    hub.asked.clear()
    first, second = resolved_by_ranks(tmp_path, hub, NAME, "lab/absent")
    assert first == second and commit_of(first[0]) == COMMIT
    assert first[1].startswith('policy.model = "lab/absent": no such directory')
    fetched = [line for line in hub.asked if line.startswith("GET /lab/tiny/resolve/")]
    assert questions(hub) == 2, "one for each name"
    assert len(fetched) == len(set(fetched)), "no file is downloaded twice into one cache"


@pytest.mark.slow
def test_ranks_with_a_cache_of_their_own_download_the_commit_of_rank_0(hub: Hub, tmp_path: Path) -> None:
    write_run(tmp_path)
    hub.asked.clear()
    (first, _), (second, _) = resolved_by_ranks(tmp_path, hub, NAME, f"alone:{NAME}", shared=False)
    assert first != second and commit_of(first) == commit_of(second) == COMMIT
    # The name is asked for once, the files of the commit by both. Then, as the negative control, by each rank for itself.
    assert questions(hub) == 1 + 2
