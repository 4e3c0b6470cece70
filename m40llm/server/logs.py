"""The server's log on stderr: text for people, JSON for machines. One line per request, and what happens to the server."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from m40llm.server.jobs import Job
from m40llm.server.settings import LogFormat

logger = logging.getLogger("m40llm.server")


def set_up(log_format: LogFormat) -> None:
    """Sends this package's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    for name in ("m40llm", "aiohttp", "asyncio"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(logging.INFO if name == "m40llm" else logging.WARNING)
        log.propagate = False


def event(message: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """One line: `message` and named values; with the traceback of `error`."""
    logger.log(level, message, extra={"fields": fields}, exc_info=error)


def request_ended(job: Job, finish_reason: str) -> None:
    """The line of one generation, with its reply's finish reason. Rates are tokens per second."""
    result = job.generation.outcome
    assert result is not None
    timings = result.timings
    event(
        "request",
        id=job.request_id,
        choice=job.index,
        route=job.route,
        slot=result.slot,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        generated_tokens=result.generated_tokens,
        queued_s=round(timings.queued_s, 4),
        prefill_tok_s=round(timings.prefill_tok_s, 1),
        decode_tok_s=round(timings.decode_tok_s, 1),
        finish_reason=finish_reason,
        cancelled=result.cancel_reason or False,
    )


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        words = [stamp, record.levelname.lower(), record.getMessage()]
        words += [f"{key}={_plain(value)}" for key, value in getattr(record, "fields", {}).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": round(record.created, 3), "level": record.levelname.lower(), "event": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)  # paths


def _plain(value: Any) -> str:
    text = str(value)
    quoted = not text.isprintable() or " " in text
    return json.dumps(text) if quoted else text
