"""Types for server addresses (https, or http to this machine) and for the names of the variables with their tokens.

Two URL parsers may disagree on user names, backslashes, blanks or numeric hosts. Such spellings are refused, so that the host that
is checked is the host that is asked.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from megappo.config.redaction import hide_secrets, is_secret_name

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9])?"
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:]+\])(?P<port>:[0-9]{{1,5}})?"
    r"(?:/[A-Za-z0-9._~/%+,:=-]*)?(?:\?[A-Za-z0-9._~/%+,:=&-]*)?"
)
_FORM = "write https://HOST[:PORT][/PATH], without user and password, or http://127.0.0.1:PORT[/PATH] for this machine"


def host_of(url: str) -> str:
    """Host of a checked URL in lower case; `::1` comes without brackets."""
    match = _URL.fullmatch(url)
    assert match is not None, "checked by the schema"
    return match["host"].strip("[]").lower()


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8 or ::1. Never true for a name, which may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_url(url: str) -> str:
    if hide_secrets(url) != url:  # the configuration is written to the run directory as it is
        raise PydanticCustomError(
            "url", "holds credentials, which the run would record; name their variable by remote.token_env", {}
        )
    match = _URL.fullmatch(url)
    if match is None or int((match["port"] or ":1")[1:]) not in range(1, 65536):
        raise PydanticCustomError("url", f"is no address of a server; {_FORM}", {})
    host = match["host"].strip("[]")
    if host.replace(".", "").isdigit() or ":" in host:  # 127.1 and 2130706433 are addresses to some parsers
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise PydanticCustomError("url", "{host} is no address of a machine", {"host": host}) from None
    if match["scheme"] == "http" and not is_loopback(host):
        fix = "is not encrypted: use https, or http to an address of this machine (http://127.0.0.1:PORT, http://[::1]:PORT)"
        raise PydanticCustomError("url", fix, {})
    return url


def _check_secret(name: str) -> str:
    if not is_secret_name(name):  # records hide environment values by name
        fix = "is no name by which records know a secret, and hide it; choose one with TOKEN, KEY or SECRET in it"
        raise PydanticCustomError("secret", fix, {})
    return name


ServerUrl = Annotated[str, AfterValidator(_check_url)]
# Name of an environment variable that holds a secret.
SecretVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_check_secret)]
