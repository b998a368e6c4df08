"""Checks of `telemetry.trackers` before a run: packages and credentials. Imports no tracker."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from megappo.config.errors import problem
from megappo.config.run_sections import TelemetryConfig
from megappo.runtime.installed import missing_package
from megappo.telemetry.trackers.mlflow_run import URI

WANDB_SERVER = "https://api.wandb.ai"
_WITHOUT_ACCOUNT = ("offline", "dryrun", "disabled")  # values of WANDB_MODE


def tracker_problem(telemetry: TelemetryConfig) -> str | None:
    """Return the first reason, in one line, why a tracker could not work; None if all can. Makes no network request."""
    # Without a server MLflow writes a database into the run directory.
    needed = {"wandb": ["wandb"], "mlflow": ["mlflow", *([] if os.environ.get(URI) else ["sqlalchemy", "alembic"])]}
    for tracker in telemetry.trackers:
        for package in needed.get(tracker, ()):
            if (how := missing_package(package)) is not None:
                return problem("telemetry.trackers", list(telemetry.trackers), how)
    online = os.environ.get("WANDB_MODE") not in _WITHOUT_ACCOUNT
    if "wandb" in telemetry.trackers and online and not has_wandb_credentials():
        return problem(
            "telemetry.trackers",
            list(telemetry.trackers),
            f"no credentials of W&B for {_wandb_server()}; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline in the "
            "environment",
        )
    return None


def has_wandb_credentials() -> bool:
    """True if wandb would find a key without asking: in the environment, in .netrc, or in its settings."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _wandb_setting("api_key"):
        return True
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        try:
            if netrc.netrc(Path(place).expanduser()).authenticators(urlsplit(_wandb_server()).netloc):
                return True
        except (OSError, netrc.NetrcParseError):  # wandb passes over such a file too
            continue
    return False


def _wandb_server() -> str:
    return os.environ.get("WANDB_BASE_URL") or _wandb_setting("base_url") or WANDB_SERVER


def _wandb_setting(name: str) -> str | None:
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(Path(folder).expanduser() / "settings")
        return settings.get("default", name, fallback=None)
    except (OSError, configparser.Error):
        return None
