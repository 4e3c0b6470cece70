"""pydantic's findings in words that a caller can use: what was given, and what the field takes."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from m40llm.server.errors import ApiError

_NEAR = 0.8  # of a name that is worth guessing
_WORDS: dict[Any, tuple[str, str]] = {  # of one, of several
    str: ("a string", "strings"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    list: ("a list", "lists"),
    dict: ("an object", "objects"),
    Any: ("anything", "anything"),
}


def explain(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The 400 for the first field that `kind` does not take as it is."""
    every = error.errors(include_url=False)
    field = _field(every[0])
    # a union is tried type by type: the attempt that came furthest says most
    found = max((each for each in every if _field(each) == field), key=lambda each: len(each["loc"]))
    problem, given = found["type"], found.get("input")
    model, where = kind, ""
    for i, part in enumerate(found["loc"], 1):
        is_name = problem in ("extra_forbidden", "missing") and i == len(found["loc"])
        if isinstance(part, int):
            where += f"[{part}]"
        elif not where or is_name or part in model.model_fields:  # else it is a union's name of an attempt
            where += f".{part}" if where else part
            model = _nested(model, part) or model
    where, field = where[:120], field and field[:80]
    if problem == "extra_forbidden":
        near = difflib.get_close_matches(where.rpartition(".")[2], model.model_fields, 1, _NEAR)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return ApiError(400, f"unknown field '{where}'{hint}", param=field, code="unknown_field")
    if problem == "missing":
        return ApiError(400, f"'{where}' is missing", param=field, code="missing_field")
    limits = found.get("ctx", {})
    if problem == "value_error":
        message = f"{where}: {limits['error']}"
    elif problem in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {limits['ge']}" if "ge" in limits else f"at most {limits['le']}"
        message = f"{where} is {_shown(given)}; expected {bound}"
    elif problem == "too_short":
        message = f"{where} is empty; give at least one"
    elif problem == "too_long":
        message = f"{where} has {limits['actual_length']} entries; {limits['max_length']} are the limit"
    else:
        inside = where != field and model is kind
        message = f"{where} is {_shown(given)}; {f'{field} must be' if inside else 'expected'} {_taken(kind, where)}"
    return ApiError(400, message, param=field, code="invalid_value")


def _field(found: Mapping[str, Any]) -> str | None:
    return str(found["loc"][0]) if found["loc"] else None


def _nested(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = model.model_fields.get(name)
    parts = () if field is None else (field.annotation, *get_args(field.annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None)


def _taken(kind: type[BaseModel], where: str) -> str:
    """What the field at `where` takes: what its description says, else its type in words."""
    name, _, rest = where.partition("[")[0].partition(".")
    inner = _nested(kind, name)
    if inner is not None and rest:
        return _taken(inner, rest)
    field = kind.model_fields[name]
    return field.description or _in_words(field.annotation, 0)


def _in_words(annotation: Any, several: int) -> str:
    """A type in words; `several` 1 for a list's elements."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _joined([_in_words(part, several) for part in arguments if part is not type(None)])
    if origin is Literal:
        return _joined([f"'{value}'" for value in arguments])
    if origin is list and arguments[0] is not Any:
        return f"{_WORDS[list][several]} of {_in_words(arguments[0], 1)}"
    return _WORDS.get(origin or annotation, _WORDS[dict])[several]


def _joined(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[:41] if isinstance(value, str) else value)
    return text if len(text) <= 42 else f"{text[:40]}…"
