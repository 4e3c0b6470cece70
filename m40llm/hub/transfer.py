"""HTTP for model files: one GET at a time, resumed with Range requests, retried when the network fails.

Only the standard library: the files are few and large, so nothing is gained from connection pools. Certificates are
checked against the system's store (OpenSSL honours SSL_CERT_FILE and SSL_CERT_DIR itself) plus an optional extra file.
"""

from __future__ import annotations

import base64
import errno
import http.client
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, Any, TypeVar

from m40llm.hub.errors import HubError

CHUNK_BYTES = 1 << 18
MAX_PAGE_BYTES = 32 << 20  # an index page larger than this is not an index page
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_T = TypeVar("_T")


class _TransientError(Exception):
    """A failure that another attempt may not meet; never leaves this module."""


@dataclass(frozen=True)
class Page:
    """A small document: its final address after redirects, its media type and its bytes."""

    url: str
    content_type: str
    body: bytes


@dataclass(frozen=True)
class RemoteFile:
    """What a server says about a file before it is fetched: `headers` of the first response (before redirects to a
    content network) in lower case, and the size in bytes if stated."""

    headers: Mapping[str, str]
    size: int | None


class _RecordingRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, 308 included (Python 3.10 does not), and keeps the headers of the first response."""

    def __init__(self) -> None:
        self.first_headers: Message | None = None

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if self.first_headers is None:
            self.first_headers = headers
        if req.type == "https" and urllib.parse.urlsplit(newurl).scheme != "https":
            raise HubError(f"{_host(req.full_url)} redirects from https to {newurl!r}: refused")
        return super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


@dataclass
class HttpClient:
    """GET with retries. `attempts` in a row without a new byte end in HubError; waits double from `backoff_s` seconds.

    `on_retry` is told, in one line, before each wait.
    """

    ca_file: Path | None = None
    timeout_s: float = 30.0
    attempts: int = 5
    backoff_s: float = 0.5
    on_retry: Callable[[str], None] = lambda text: None
    _context: ssl.SSLContext | None = field(default=None, repr=False)

    def page(self, url: str, *, accept: str) -> Page:
        """The document at `url`. Raises HubError when it cannot be had or is over 32 MiB."""

        def once() -> Page:
            with self._open(url, {"Accept": accept}) as (response, _):
                body = response.read(MAX_PAGE_BYTES + 1)
                announced = response.headers.get("Content-Length", "")
                if announced.isdigit() and len(body) < min(int(announced), MAX_PAGE_BYTES):
                    raise _TransientError(f"connection cut at {len(body):,} of {announced} bytes")
                if len(body) > MAX_PAGE_BYTES:
                    raise HubError(f"{_shown(url)}: answer is over {MAX_PAGE_BYTES >> 20} MiB, not an index page")
                return Page(response.geturl(), response.headers.get_content_type(), body)

        return self._retried(url, once)

    def probe(self, url: str, *, headers: Mapping[str, str]) -> RemoteFile:
        """Size and headers of the file at `url`, by a GET of its first byte (some mirrors refuse HEAD)."""

        def once() -> RemoteFile:
            try:
                opened = self._open(url, {**headers, "Range": "bytes=0-0"})
            except _RangeRefusedError as err:
                raise HubError(f"{_shown(url)}: the file is empty") from err
            with opened as (response, first):
                merged = {key.lower(): value for key, value in response.headers.items()}
                if first is not None:
                    # a content network's own ETag must not stand in for the hub's
                    merged.pop("etag", None)
                    merged.update({key.lower(): value for key, value in first.items()})
                size = _total_size(response)
                return RemoteFile(merged, size)

        return self._retried(url, once)

    def download(
        self,
        url: str,
        part: Path,
        *,
        size: int | None,
        headers: Mapping[str, str] | None = None,
        on_bytes: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Fetch `url` into the file `part`, going on where an earlier attempt ended.

        `size` is the whole file's size in bytes if known; a server that sends more is refused before it fills the disk.
        The caller names `part` after the content (by hash), so that a resumed file is never a mixture.
        `on_bytes` gets the bytes that lie in `part` so far. Raises HubError.
        """
        failures = 0
        while True:
            have = part.stat().st_size if part.exists() else 0
            if size is not None and have > size:
                part.unlink()
                have = 0
            if size is not None and have == size:
                on_bytes(have)
                return
            try:
                self._receive(url, part, have, size, headers or {}, on_bytes)
                return
            except _TransientError as err:
                grew = part.exists() and part.stat().st_size > have
                failures = 1 if grew else failures + 1
                self._wait_or_give_up(url, failures, err)

    def _receive(
        self,
        url: str,
        part: Path,
        have: int,
        size: int | None,
        headers: Mapping[str, str],
        on_bytes: Callable[[int], None],
    ) -> None:
        wanted = {**headers, "Range": f"bytes={have}-"} if have else dict(headers)
        try:
            opened = self._open(url, wanted)
        except _RangeRefusedError as err:
            if err.total == have:  # all of it was there, only the size was not known
                return
            part.unlink(missing_ok=True)
            raise _TransientError("the server refuses to resume") from err
        with opened as (response, _):
            if response.status != 206:
                have = 0  # the server ignores Range: from the beginning
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                part.unlink(missing_ok=True)
                raise _TransientError("the server resumed at another place than asked")
            total = _total_size(response)
            if size is not None and total is not None and total != size:
                raise HubError(f"{_shown(url)}: the server offers {total:,} bytes, {size:,} were expected")
            limit = size if size is not None else total
            try:
                with part.open("ab" if have else "wb") as out:
                    have = _copy(response, out, have, limit, on_bytes)
            except OSError as err:
                raise disk_error(part, err) from err
            if limit is not None and have < limit:
                raise _TransientError(f"connection cut at {have:,} of {limit:,} bytes")
            if limit is not None and have > limit:
                part.unlink()
                raise HubError(f"{_shown(url)}: the server sent more than the {limit:,} bytes that it announced")

    def _open(self, url: str, headers: Mapping[str, str]) -> _Opened:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise HubError(f"cannot fetch {url!r}: only http and https addresses are supported")
        bare, authorization = _split_credentials(url)
        request = urllib.request.Request(bare, headers={"User-Agent": "m40llm", "Accept-Encoding": "identity"})
        for key, value in headers.items():
            # credentials are for this host, not for wherever it redirects to
            (request.add_unredirected_header if key == "Authorization" else request.add_header)(key, value)
        if authorization and "Authorization" not in headers:
            request.add_unredirected_header("Authorization", authorization)
        redirects = _RecordingRedirects()
        opener = urllib.request.build_opener(redirects, urllib.request.HTTPSHandler(context=self._ssl()))
        try:
            return _Opened(opener.open(request, timeout=self.timeout_s), redirects.first_headers)
        except urllib.error.HTTPError as err:
            with err:
                raise _status_error(bare, err) from err
        except urllib.error.URLError as err:
            raise _connection_error(bare, err.reason) from err
        except (OSError, http.client.HTTPException) as err:
            raise _connection_error(bare, err) from err
        except ValueError as err:  # a Location header that is no address
            raise HubError(f"{_shown(bare)}: {err}") from err

    def _ssl(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = ssl.create_default_context()
            if self.ca_file is not None:
                try:
                    self._context.load_verify_locations(self.ca_file)
                except OSError as err:
                    raise HubError(f"cannot read the certificates in {self.ca_file}: {err.strerror or err}") from err
        return self._context

    def _retried(self, url: str, once: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return once()
            except (_TransientError, http.client.HTTPException, OSError) as err:
                failures += 1
                self._wait_or_give_up(url, failures, err)

    def _wait_or_give_up(self, url: str, failures: int, err: Exception) -> None:
        if failures >= self.attempts:
            raise HubError(
                f"no answer from {_host(url)} after {failures} attempts ({err}): "
                "check the network and run the command again"
            ) from err
        delay = min(self.backoff_s * 2 ** (failures - 1), 8.0)
        self.on_retry(f"{_host(url)}: {err}; trying again in {delay:g} s")
        time.sleep(delay)


@dataclass
class _Opened:
    """An open response together with the first response's headers if there was a redirect."""

    response: HTTPResponse
    first_headers: Message | None

    def __enter__(self) -> tuple[HTTPResponse, Message | None]:
        return self.response, self.first_headers

    def __exit__(self, *exc: Any) -> None:
        self.response.close()


class _RangeRefusedError(Exception):
    """Status 416; `total` is the file's size if the server tells it."""

    def __init__(self, total: int | None) -> None:
        super().__init__("range refused")
        self.total = total


def _copy(response: HTTPResponse, out: IO[bytes], have: int, limit: int | None, on_bytes: Callable[[int], None]) -> int:
    """Append the body to `out`; returns the bytes in the file. Stops past `limit` so that no server fills the disk."""
    while True:
        try:
            chunk = response.read(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as err:
            out.flush()
            raise _TransientError(f"connection lost at {have:,} bytes: {_reason(err)}") from err
        if not chunk:
            return have
        out.write(chunk)
        have += len(chunk)
        on_bytes(have)
        if limit is not None and have > limit:
            return have


def disk_error(path: Path, err: OSError) -> HubError:
    """The HubError for a failed write to `path`."""
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubError(
            f"the disk under {path.parent} is full: free some space, "
            "or set M40LLM_MODELS_DIR to a folder on another disk"
        )
    return HubError(f"cannot write {path}: {err.strerror or err}")


def _status_error(url: str, err: urllib.error.HTTPError) -> Exception:
    if err.code == 416:
        total = err.headers.get("Content-Range", "").rpartition("/")[2]
        return _RangeRefusedError(int(total) if total.isdigit() else None)
    if err.code in _TRANSIENT_STATUS:
        return _TransientError(f"HTTP {err.code} {err.reason}")
    if err.code in (401, 403):
        return HubError(f"{_shown(url)}: HTTP {err.code}: access denied; a gated or private model needs HF_TOKEN")
    if err.code == 404:
        return HubError(f"{_shown(url)}: HTTP 404: no such file; check the name")
    return HubError(f"{_shown(url)}: HTTP {err.code} {err.reason}")


def _connection_error(url: str, reason: object) -> Exception:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return HubError(
            f"the certificate of {_host(url)} is not trusted ({reason.verify_message}): "
            "set SSL_CERT_FILE to your network's certificate bundle"
        )
    return _TransientError(_reason(reason))


def _reason(reason: object) -> str:
    if isinstance(reason, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(reason, TimeoutError):
        return "timed out"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__


def _total_size(response: HTTPResponse) -> int | None:
    """Size in bytes of the whole file, from Content-Range of a partial answer or Content-Length of a full one."""
    text = response.headers.get("Content-Length", "")
    if response.status == 206:
        text = response.headers.get("Content-Range", "").rpartition("/")[2]
    return int(text) if text.isdigit() else None


def _split_credentials(url: str) -> tuple[str, str | None]:
    """(`url` without user:password@, value of the Authorization header that they stand for)."""
    parts = urllib.parse.urlsplit(url)
    userinfo, at, netloc = parts.netloc.rpartition("@")
    if not at:
        return url, None
    plain = urllib.parse.unquote(userinfo).encode()
    return parts._replace(netloc=netloc).geturl(), "Basic " + base64.b64encode(plain).decode()


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc.rpartition("@")[2]


def _shown(url: str) -> str:
    """`url` as it may appear in a message: without credentials and query."""
    parts = urllib.parse.urlsplit(_split_credentials(url)[0])
    return f"{parts.scheme}://{parts.netloc}{parts.path}"
