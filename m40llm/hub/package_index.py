"""Look-up of one wheel on a Python package index, through the simple API: JSON (PEP 691) or HTML (PEP 503)."""

from __future__ import annotations

import json
import re
import urllib.parse
from dataclasses import dataclass
from html.parser import HTMLParser

from m40llm.hub.errors import HubError
from m40llm.hub.transfer import HttpClient, Page

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class WheelFile:
    """A wheel on an index: absolute `url`, lower-case hex `sha256`, and `size` in bytes where the index states it."""

    filename: str
    url: str
    sha256: str
    size: int | None


def find_wheel(client: HttpClient, index_url: str, package: str, version: str) -> WheelFile:
    """The pure-Python wheel of `package` `version`. Raises HubError when the index has none or states no SHA-256."""
    page = client.page(f"{index_url.rstrip('/')}/{package}/", accept=_ACCEPT)
    files = _from_json(page) if page.content_type == _JSON else _from_html(page)
    stem = f"{package.replace('-', '_')}-{version}-".lower()
    for filename, href, sha256, size in files:
        if filename.lower().startswith(stem) and filename.endswith(".whl"):
            if not _SHA256.fullmatch(sha256):
                raise HubError(f"{index_url} states no SHA-256 for {filename}: use an index that does")
            return WheelFile(filename, urllib.parse.urljoin(page.url, href), sha256, size)
    raise HubError(f"{index_url} has no wheel of {package} {version}: use another index (PIP_INDEX_URL)")


_Listed = list[tuple[str, str, str, "int | None"]]  # filename, href, sha256 or "", size


def _from_json(page: Page) -> _Listed:
    try:
        return [
            (str(f["filename"]), str(f["url"]), str(f["hashes"].get("sha256", "")), _size(f.get("size")))
            for f in json.loads(page.body)["files"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise HubError(f"{page.url}: not a package index's answer ({err!r})") from err


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.hrefs += [value for key, value in attrs if key == "href" and value]


def _from_html(page: Page) -> _Listed:
    anchors = _Anchors()
    anchors.feed(page.body.decode("utf-8", errors="replace"))
    files: _Listed = []
    for href in anchors.hrefs:
        url, fragment = urllib.parse.urldefrag(href)
        filename = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
        key, _, value = fragment.partition("=")
        files.append((filename, url, value.lower() if key == "sha256" else "", None))
    return files
