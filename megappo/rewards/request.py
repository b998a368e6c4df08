"""One request to a reward server: one deadline for all of it, a cap on the bytes of its answer, and nothing followed.
Redirects, cookies, netrc and the environment's proxies are not used; answers are never decompressed. httpx2 is imported lazily."""

from __future__ import annotations

import asyncio
import email.utils
import errno
import os
import ssl
import time
from typing import TYPE_CHECKING

from megappo.config.redaction import HIDDEN, hide_secrets
from megappo.config.reward_sections import RemoteConfig

if TYPE_CHECKING:
    import httpx2

MIB = 2**20
# Idle seconds after which a connection is not used again: uvicorn closes its own after 5, and a request may meet that moment.
KEEP_ALIVE_S = 4.0
_TRANSIENT = frozenset({408, 429})  # besides 5xx
_EXCERPT_BYTES, _EXCERPT_CHARACTERS = 4096, 200


class Refused(Exception):
    """An answer that another try would not change: a redirect, 4xx, too large, not in the protocol. The text says which."""


class TryAgain(Exception):
    """A fault that may pass. after_s: seconds that the server asks to wait at least (Retry-After)."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s


def make_client(url: str, settings: RemoteConfig, token: str | None) -> httpx2.AsyncClient:
    """Make the client of one server. Raises ValueError, one line, for a `ca_file` that cannot be read."""
    import httpx2

    verify: ssl.SSLContext | bool = True
    if settings.ca_file is not None:
        try:
            verify = ssl.create_default_context(cafile=settings.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"cannot be read as certificates: {error.strerror or error}") from None
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return httpx2.AsyncClient(
        headers=headers,
        verify=verify,
        trust_env=False,  # a proxy of the environment would get requests to 127.0.0.1 too, and netrc's password every host
        follow_redirects=False,
        timeout=None,  # `post` has one deadline for everything: per read, a byte a second goes on for ever
        limits=httpx2.Limits(max_connections=settings.concurrency, keepalive_expiry=KEEP_ALIVE_S),
    )


async def post(client: httpx2.AsyncClient, url: str, body: bytes, timeout_s: float, max_bytes: int) -> bytes:
    """Return the body of the answer to one POST. Raises TryAgain or Refused."""
    import httpx2

    try:
        async with asyncio.timeout(timeout_s), client.stream("POST", url, content=body) as response:
            client.cookies.clear()  # each request stands alone
            if response.status_code != 200:
                await _refuse_status(response, client.headers.get("Authorization", "").removeprefix("Bearer "))
            return await _body_of(response, max_bytes)
    except TimeoutError:
        raise TryAgain(f"no whole answer within {timeout_s:.3g} s") from None
    except (httpx2.HTTPError, OSError) as error:
        if (certificate := _in_chain(error, ssl.SSLCertVerificationError)) is not None:
            raise Refused(f"its certificate is not valid here: {certificate}; set remote.ca_file to the authority's") from error
        raise TryAgain(_described(error)) from error


async def _body_of(response: httpx2.Response, max_bytes: int) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):  # 1 MiB of gzip is 1 GiB of text
        raise Refused(
            f"answered with Content-Encoding {_printable(encoding)}, though asked for none; compressed answers are not read"
        )
    too_large = f"answered with more than {max_bytes / MIB:.3g} MiB, more than scores of these samples and their tokens take"
    announced = response.headers.get("Content-Length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise Refused(too_large)
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise Refused(too_large)
    return bytes(body)


async def _refuse_status(response: httpx2.Response, token: str) -> None:
    status = f"answered {response.status_code} {_printable(response.reason_phrase)}".rstrip()
    if 300 <= response.status_code < 400:
        target = _printable(response.headers.get("Location", "nowhere"))
        raise Refused(f"{status}, a redirect to {target}; redirects are not followed: set url to the final address")
    said = await _excerpt(response, token)
    if response.status_code in _TRANSIENT or response.status_code >= 500:
        raise TryAgain(f"{status}{said}", _seconds(response.headers.get("Retry-After")))
    hint = "; check remote.token_env" if response.status_code in (401, 403) else ""
    hint = "; lower remote.batch_size" if response.status_code == 413 else hint
    raise Refused(f"{status}{said}{hint}")


async def _excerpt(response: httpx2.Response, token: str) -> str:
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) >= _EXCERPT_BYTES:
            break
    text = body[:_EXCERPT_BYTES].decode("utf-8", "replace")
    if token:
        # Some servers repeat the token.
        text = text.replace(token, HIDDEN)
    text = _printable(text)
    return f": {text}" if text else ""


def _printable(text: str) -> str:
    # A server's text goes into logs and to a terminal: one line, without control characters and secrets.
    line = "".join(character for character in " ".join(text.split()) if character.isprintable())
    return hide_secrets(line)[:_EXCERPT_CHARACTERS]


def _seconds(retry_after: str | None) -> float:
    """Seconds of a Retry-After: a number, or a date; 0 without one."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _described(error: Exception) -> str:
    # Kind and first cause, as in `ConnectError: Connection refused`: the library's own text says little.
    cause = _in_chain(error, OSError, innermost=True)
    number = cause.errno if isinstance(cause, OSError) else None
    text = os.strerror(number) if number is not None and number in errno.errorcode else str(cause or error)
    return f"{type(error).__name__}: {_printable(text)}".rstrip(": ")


def _in_chain(error: BaseException, kind: type[BaseException], *, innermost: bool = False) -> BaseException | None:
    found, link = None, error
    while link is not None and (found is None or innermost):
        if isinstance(link, kind):
            found = link
        if isinstance(link, BaseExceptionGroup):  # of one connection attempt per address
            link = link.exceptions[0]
        else:
            link = link.__cause__ or link.__context__
    return found
