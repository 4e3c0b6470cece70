"""What a request body may hold. Nothing is coerced, clamped or ignored: a field that cannot be honoured is a 400 that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from m40llm.config import SamplingParams
from m40llm.engine import Request
from m40llm.server.errors import ApiError
from m40llm.server.explain import explain

_MAX_STOPS, _MAX_STOP_CHARACTERS = 32, 4096

# Fields of OpenAI's API that steer nothing here: bookkeeping of the caller.
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
# llama-server's fields for what m40llm does not have, with the values that switch it off there.
_OFF: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 0),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "t_max_predict_ms": (0, -1),
    "cache_prompt": (True,),
    "id_slot": (-1,),
    "n_keep": (0, -1),
    "n_discard": (0,),
    "n_indent": (0,),
    "post_sampling_probs": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "return_tokens": (False,),
    "grammar": ("",),
    "json_schema": ({},),
    "samplers": ([],),
    "n_probs": (0,),
    "min_keep": (0,),
    "response_fields": ([],),
    "image_data": ([],),
    "reasoning_format": ("auto", "deepseek"),  # what is thought is always apart
    "lora": ([],),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
# They tune what is off, and so change nothing.
_TUNE_OFF = frozenset(
    ("xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau")
) | {"mirostat_eta", "dynatemp_exponent"}


class Body(BaseModel):
    """A JSON object: types are exact, unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in _OFF:
                if value is not None and not any(value == off and type(value) in _kin(off) for off in _OFF[name]):
                    raise ApiError(400, f"'{name}' is not supported; leave it out", param=name, code="unsupported")
            elif name not in _IGNORED and name not in _TUNE_OFF:
                kept[name] = value
        return kept


def _kin(value: Any) -> tuple[type, ...]:
    """Types that count as equal to `value`'s: 1 and 1.0 are, 1 and True are not."""
    return (int, float) if type(value) in (int, float) else (type(value),)


class SamplingBody(Body):
    """Fields that every route which generates understands; None is the default. Names are OpenAI's and llama-server's."""

    MAX_TOKENS_NAMES: ClassVar[tuple[str, ...]] = ("max_tokens", "n_predict")

    max_tokens: int | None = None
    n_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | list[Any] | None = Field(
        None, description='{"token id": bias} or [[token id, bias], …]'
    )
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    priority: Literal["interactive", "background"] | None = None
    cache_id: str | None = None
    prefix_cache_ids: list[str] | None = Field(None, max_length=64)

    def named(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with what the body says of cache entries. Raises ApiError when one name would be several answers'."""
        if self.cache_id is not None and len(requests) > 1:
            raise ApiError(400, "cache_id names one answer; ask for one, or leave it out", param="cache_id")
        ids = tuple(self.prefix_cache_ids or ())
        return [request._replace(cache_id=self.cache_id, prefix_cache_ids=ids) for request in requests]

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > _MAX_STOPS or any(len(s) > _MAX_STOP_CHARACTERS for s in stops):
            raise ValueError(f"at most {_MAX_STOPS} stop strings of {_MAX_STOP_CHARACTERS} characters")
        return stop

    def _max_tokens(self) -> int | None:
        given = {name: getattr(self, name) for name in self.MAX_TOKENS_NAMES if getattr(self, name) is not None}
        if len(set(given.values())) > 1:
            raise ApiError(400, f"{' and '.join(given)} contradict each other; give one", param=next(iter(given)))
        value = next(iter(given.values()), None)
        return None if value == -1 else value  # llama-server's -1: as much as the context holds

    def sampling(self, *, logprobs: int | None = None) -> SamplingParams:
        """The sampler's parameters; llama.cpp's defaults where nothing is said.

        Raises:
            ConfigError: a value out of range.
            ApiError: a value that has no meaning.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "ignore_eos")
        values = {name: getattr(self, name) for name in (*names, "presence_penalty", "frequency_penalty")}
        if isinstance(self.stop, str):
            values["stop"] = (self.stop,)
        elif self.stop is not None:
            values["stop"] = tuple(self.stop)
        return SamplingParams(
            max_tokens=self._max_tokens(),
            seed=None if self.seed == -1 else self.seed,
            logit_bias=_bias(self.logit_bias),
            logprobs=logprobs,
            **{name: value for name, value in values.items() if value is not None},
        )


def _bias(given: dict[str, Any] | list[Any] | None) -> tuple[tuple[int, float], ...]:
    """OpenAI's {"id": bias} or llama-server's [[id, bias], …], where a bias of false forbids the token."""
    if given is None:
        return ()
    pairs = list(given.items()) if isinstance(given, dict) else given
    found = []
    for pair in pairs:
        try:
            token, bias = pair
        except (TypeError, ValueError):
            raise ApiError(400, "logit_bias: each entry is [token id, bias]", param="logit_bias") from None
        if isinstance(token, str) and token.isdecimal() and len(token) < 10:
            token = int(token)
        if bias is False:
            bias = -1e9
        if type(token) is not int or type(bias) not in (int, float):
            raise ApiError(400, f"logit_bias: {pair!r:.80} is no token id with a number", param="logit_bias")
        try:
            found.append((token, float(bias)))
        except OverflowError:
            raise ApiError(400, f"logit_bias of token {token} is too large", param="logit_bias") from None
    return tuple(found)


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIBody(SamplingBody):
    """What chat and text completions share."""

    n: int | None = Field(None, ge=1, le=64)
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _options_belong_to_a_stream(self) -> OpenAIBody:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return self


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        if self.suffix:
            raise ApiError(400, "'suffix' is not supported; leave it out", param="suffix", code="unsupported")
        if self.best_of not in (None, self.choices):
            raise ApiError(400, "'best_of' other than n is not supported", param="best_of", code="unsupported")
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "'echo' with 'logprobs' is not supported; leave one out", param="echo")
        return self


class ChatBody(OpenAIBody):
    """`POST /v1/chat/completions`. Messages stay dictionaries: the template decides what it reads of them."""

    MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens", "n_predict")

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_budget: int | None = Field(None, ge=-1)
    thinking_budget: int | None = Field(None, ge=-1)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar may have to be compiled, which takes longer than reading the fields."""
        return bool(self.response_format or self.tools)

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class GenerateBody(SamplingBody):
    """`POST /generate`."""

    prompt: str
    prompt_format: Literal["auto", "raw"] = "auto"


class TemplateBody(Body):
    """`POST /apply-template`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


class TokenizeBody(Body):
    """`POST /tokenize`."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[int]


_B = TypeVar("_B", bound=Body)


async def read_body(request: web.Request, kind: type[_B]) -> _B:
    """The request's JSON as `kind`.

    Raises:
        ApiError: 400 with the reason; 413 over the body limit.
    """
    raw = await _bytes(request)
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, Mapping):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise explain(error, kind) from None


async def _bytes(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        limit = request.client_max_size / (1 << 20)
        message = f"the body is over the limit of {limit:g} MiB; send less, or raise --max-body-mb"
        raise ApiError(413, message, code="body_too_large") from None
    except web.RequestPayloadError as error:
        encoding = request.headers.get("Content-Encoding")
        if encoding is None:
            message = f"the body could not be read: {' '.join(str(error).split())[:200]}"
        else:
            message = f"the body is not {encoding:.40}, as Content-Encoding says; drop the header, or encode the body"
        raise ApiError(400, message, code="invalid_body") from None
