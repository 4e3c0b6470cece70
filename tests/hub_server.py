"""A file server on 127.0.0.1 that behaves as badly as the real network: cuts, refusals, redirects, wrong bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


@dataclass
class Resource:
    """What a path answers. `cuts`: after how many bytes each of the first responses breaks off; `failures`: statuses
    that the first requests get; `redirect`: where to go instead."""

    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    redirect: str = ""
    ranges: bool = True
    delay: threading.Event | None = None  # answer only once this is set


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    path: str
    range: str | None
    authorization: str | None


class FileServer:
    """Context manager; `url` is its base address, `files` maps paths to resources, `seen` lists the requests."""

    def __init__(self) -> None:
        self.files: dict[str, Resource] = {}
        self.seen: list[Seen] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.seen.append(Seen(self.path, self.headers["Range"], self.headers["Authorization"]))
                self.close_connection = True
                resource = outer.files.get(self.path)
                if resource is None:
                    return self._empty(404)
                if resource.failures:
                    return self._empty(resource.failures.pop(0))
                if resource.redirect:
                    return self._empty(302, {"Location": resource.redirect, **resource.headers})
                if resource.delay is not None:
                    resource.delay.wait(20)
                self._send(resource)

            def _send(self, resource: Resource) -> None:
                body, status, extra = resource.body, 200, dict(resource.headers)
                wanted = self.headers["Range"]
                if wanted and resource.ranges:
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, stop = int(first), int(last) + 1 if last else len(body)
                    if start >= len(body):
                        return self._empty(416, {"Content-Range": f"bytes */{len(body)}"})
                    extra["Content-Range"] = f"bytes {start}-{min(stop, len(body)) - 1}/{len(body)}"
                    body, status = body[start:stop], 206
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **extra}.items():
                    self.send_header(key, value)
                self.end_headers()
                # the probe's single byte is never cut
                cut = resource.cuts.pop(0) if resource.cuts and len(body) > 1 else len(body)
                self.wfile.write(body[:cut])

            def _empty(self, status: int, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in {"Content-Length": "0", **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FileServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
