"""The chat page at `/`: the files under static/, with a policy that lets the browser talk to this server and nobody else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from aiohttp import web
from aiohttp.web_exceptions import HTTPNotFound

INDEX: Final = "index.html"
ICON: Final = "icon.svg"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
# No inline script or style, nothing from elsewhere, no framing; trusted types: the scripts cannot parse HTML at all.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask each time; the ETag makes that a 304
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


def _load() -> dict[str, _File]:
    found: dict[str, _File] = {}
    for entry in files("m40llm.server").joinpath("static").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            body = entry.read_bytes()
            found[entry.name] = _File(body, _TYPES[suffix], hashlib.sha256(body).hexdigest()[:32])
    return found


def add_chat_page(app: web.Application) -> None:
    """Adds `GET /`, `/static/{name}` and `/favicon.ico` (HEAD too). The files are read now, once: 75 kB.

    Raises:
        FileNotFoundError: the installation lacks the page.
    """
    loaded = _load()
    if missing := [name for name in (INDEX, ICON) if name not in loaded]:
        raise FileNotFoundError(f"m40llm/server/static/{missing[0]} is missing; reinstall m40llm")
    fixed = {"/": INDEX, "/favicon.ico": ICON}  # browsers ask for the second one, whatever page of ours they show

    async def serve(request: web.Request) -> web.Response:
        file = loaded.get(request.match_info.get("name") or fixed[request.path])
        if file is None:
            raise HTTPNotFound()
        known = request.if_none_match or ()
        if any(tag.value in (file.etag, "*") for tag in known):
            response = web.Response(status=304, headers=_HEADERS)
        else:
            response = web.Response(body=file.body, headers={**_HEADERS, "Content-Type": file.content_type})
        response.etag = file.etag
        return response

    for path in fixed:
        app.router.add_get(path, serve)
    app.router.add_get("/static/{name}", serve)
