"""Trackers that could not work are refused before a model is built, in one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megappo.config.redaction import redacted_values
from megappo.config.run_sections import TelemetryConfig
from megappo.telemetry.metrics import Distribution
from megappo.trainer.prepare import checks
from megappo.trainer.prepare.checks import tracker_problem
from tests.test_dependencies import PACKAGE


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every package, and no account."""
    monkeypatch.setattr(checks, "missing_package", lambda name: None)
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_BASE_URL",
        "WANDB_CONFIG_DIR",
        "MLFLOW_TRACKING_URI",
        "NETRC",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def said(*trackers: str) -> str | None:
    text = tracker_problem(TelemetryConfig.model_validate({"trackers": trackers}))
    assert text is None or "\n" not in text
    return text


@pytest.mark.parametrize("mode", ["offline", "dryrun", "disabled"])
def test_what_needs_no_account_passes(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    assert said() is None and said("tensorboard") is None and said("mlflow") is None and said("wandb") is not None
    monkeypatch.setenv("WANDB_MODE", mode)
    assert said("tensorboard", "wandb", "mlflow") is None


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(checks, "missing_package", lambda name: f"{name} is not installed: pip install {name}")
    monkeypatch.setenv("WANDB_MODE", mode)
    assert said("tensorboard") is None
    assert said("wandb") == 'telemetry.trackers = ["wandb"]: wandb is not installed: pip install wandb'
    assert "mlflow is not installed: pip install mlflow" in (said("mlflow") or "")


def test_mlflow_without_a_server_needs_its_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "missing_package", lambda name: "sqlalchemy is not installed" if name == "sqlalchemy" else None)
    assert "sqlalchemy is not installed" in (said("mlflow") or "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert said("mlflow") is None


def test_online_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("tensorboard", "wandb") == (
        'telemetry.trackers = ["tensorboard", "wandb"]: no credentials of W&B for https://api.wandb.ai; run `wandb login`, '
        "or set WANDB_API_KEY or WANDB_MODE=offline in the environment"
    )
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    assert said("wandb") is None


@pytest.mark.parametrize("name", [".netrc", "_netrc", "elsewhere"])
def test_the_key_of_a_login_counts_for_its_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("machine api.wandb.ai\n  login user\n  password s3cret\n")
    file.chmod(0o600)
    if name == "elsewhere":
        assert said("wandb") is not None
        monkeypatch.setenv("NETRC", str(file))
    assert said("wandb") is None
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8443")
    assert "no credentials of W&B for https://wandb.example:8443" in (said("wandb") or "")
    file.write_text("machine wandb.example:8443\n  login user\n  password s3cret\n")
    assert said("wandb") is None
    file.write_text("machine\nnonsense {")
    assert said("wandb") is not None


def test_the_settings_of_a_login_count(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = https://ours.example\n")
    assert "for https://ours.example;" in (said("wandb") or "")
    (folder / "settings").write_text("[default]\napi_key = 0%s3cret\n")
    assert said("wandb") is None
    (folder / "settings").write_text("no section")
    assert said("wandb") is not None


def test_a_run_is_refused_before_its_model_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    from megappo.commands.cli import main

    monkeypatch.setattr(checks, "missing_package", lambda name: f"{name} is not installed: pip install {name}")
    config = tmp_path / "run.yaml"
    config.write_text("policy: {model: absent}\ndata: {train: absent.jsonl}\nrollout: {engine: megatron}\n")
    assert main(["train", str(config), "telemetry.trackers=[wandb]"]) == 2
    assert "pip install wandb" in capsys.readouterr().err


def test_values_that_are_secret_by_name_or_form_are_hidden() -> None:
    token = "hf_" + "a" * 34
    data = {
        "data": {"prompt_key": "question", "train": "https://me:pass@host/x"},
        "reward": {"parts": [{"args": {"token": "abc", "HF_PASS": "abc", "limit": 3, "list": [token], "eos_token": "</s>"}}]},
        "run": {"seed": 1, "name": None},
    }
    hidden = redacted_values(data)
    assert hidden["data"] == {"prompt_key": "question", "train": "https://(hidden)@host/x"}
    assert hidden["reward"]["parts"][0]["args"] == {
        "token": "(hidden)",
        "HF_PASS": "(hidden)",
        "limit": 3,
        "list": ["(hidden)"],
        "eos_token": "</s>",
    }
    assert hidden["run"] == data["run"]


@pytest.mark.slow
def test_no_library_is_imported_before_a_tracker_starts() -> None:
    code = "import sys, megappo.telemetry.runlog; print({'wandb', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_guide_lists_every_histogram_and_says_what_a_refused_run_says() -> None:
    page = (PACKAGE.parent / "docs" / "telemetry.md").read_text()
    assert all(f"| `{one.value}` | {one.meaning} |" in page for one in Distribution)
    assert str(said("tensorboard", "wandb", "mlflow")) in page
