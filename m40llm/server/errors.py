"""Failures as OpenAI's error object: one place decides which exception is which status."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from aiohttp import web

from m40llm.config import ConfigError, SamplingParams
from m40llm.engine import EngineClosed, QueueFull, RequestError
from m40llm.generation import GenerationFailed
from m40llm.sampling import SamplingError
from m40llm.text import ChatTemplateError, TokenizerError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "unavailable_error"}
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_BAD_REQUEST = (RequestError, ConfigError, SamplingError, ChatTemplateError, TokenizerError)


class ApiError(Exception):
    """A reply other than 200: `message` names problem and remedy, `param` the field, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        return web.json_response(self.body(), status=self.status, headers=self.headers)


def api_error(error: BaseException, retry_after: float = 1.0) -> ApiError | None:
    """The reply that an exception deserves; None for one that nobody foresaw."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
        return ApiError(429, str(error), code="queue_full", headers=headers)
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, GenerationFailed):
        return ApiError(500, str(error), code="generation_failed")
    if isinstance(error, _BAD_REQUEST):
        return ApiError(400, str(error), param=_field_of(error), code=_code_of(error))
    if isinstance(error, web.HTTPException):
        return _from_http(error)
    return None


def _field_of(error: BaseException) -> str | None:
    # a ConfigError of SamplingParams begins with the field's name
    word = str(error).split(" ", 1)[0] if isinstance(error, (ConfigError, SamplingError)) else ""
    return word if word in _SAMPLING_FIELDS else None


def _code_of(error: BaseException) -> str:
    too_long = isinstance(error, RequestError) and "context" in str(error)
    return "context_length_exceeded" if too_long else "invalid_value"


def _from_http(error: web.HTTPException) -> ApiError:
    if error.status == 405:
        allow = error.headers.get("Allow", "")
        return ApiError(
            405, f"this path takes {', '.join(allow.split(','))}", code="method_not_allowed", headers={"Allow": allow}
        )
    if error.status == 404:
        return ApiError(404, "no such path; docs/server.md lists the routes", code="not_found")
    return ApiError(error.status, error.reason or "the request could not be read")
