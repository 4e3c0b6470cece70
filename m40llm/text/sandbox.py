"""A Jinja2 environment for chat templates from files that nobody vouches for.

Jinja2's immutable sandbox keeps a template from the interpreter; this keeps it from time and memory as far as a process can
limit itself: steps of ``range``, sizes of strings that operators, joins, padding and captured blocks make, size of the
output, and a deadline that is looked at on every call, attribute, loop step and piece of output.

Filters, functions and settings are those of Hugging Face transformers (``utils/chat_template_utils.py``), which is the
oracle for the rendered text.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from m40llm.text.errors import ChatTemplateError

MAX_CHARS = 1 << 24
MAX_RANGE_STEPS = 1_000_000
MAX_SECONDS = 10.0
_PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))
_PADDING_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "round")
_WIDE = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # a field of 10,000 characters or more, or one whose width is an argument


class RaisedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; rendering is not affected."""

    tags = {"generation"}  # noqa: RUF012 (Jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _BoundedCode(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_strings((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _concat(parts: Iterable[str]) -> str:
    collected, size = [], 0
    for part in parts:
        size += len(part)
        if size > MAX_CHARS:
            raise ChatTemplateError(f"the chat template makes a text of more than {MAX_CHARS:,} characters")
        collected.append(part)
    return "".join(collected)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's chat template environment, within the limits of this module. Safe to share between threads."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _BoundedCode
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        # optimized=False: constant expressions are not evaluated while compiling, where no limit holds
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationBlock, loopcontrols]
        )
        self._run = threading.local()
        self.filters["tojson"] = _tojson
        self.filters["format"] = _checked_first(self.filters["format"], _refuse_wide)
        self.filters["replace"] = _bounded_replace
        self.filters["join"] = _bounded_join
        for name in _PADDING_FILTERS:
            self.filters[name] = _bounded_filter(self.filters[name])
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, range=self._range)
        del self.globals["lipsum"]

    def generate(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """``template`` rendered with ``variables``. Raises ChatTemplateError at a limit, and what the template raises."""
        self._run.deadline = time.monotonic() + MAX_SECONDS
        self._run.steps = MAX_RANGE_STEPS
        return _concat(self._checked(template.generate(variables)))

    def _checked(self, parts: Iterator[str]) -> Iterator[str]:
        for part in parts:
            self._check_time()
            yield part

    def _check_time(self) -> None:
        if time.monotonic() > getattr(self._run, "deadline", float("inf")):
            raise ChatTemplateError(f"the chat template takes more than {MAX_SECONDS:g} seconds")

    def _range(self, *bounds: int) -> Iterable[int]:
        steps = range(*bounds)
        self._run.steps -= min(len(steps), MAX_RANGE_STEPS + 1)
        if self._run.steps < 0:
            raise ChatTemplateError(f"the chat template loops over more than {MAX_RANGE_STEPS:,} numbers")
        return steps

    def join_strings(self, parts: Iterable[object]) -> str:
        self._check_time()
        return _concat(map(str, parts))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_time()
        if attribute in ("format", "format_map"):
            _refuse_wide(obj)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_time()
        if argument in ("format", "format_map"):
            _refuse_wide(obj)
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_time()
        name = getattr(obj, "__name__", "")
        if name in _PADDING_METHODS:
            _refuse_large(args)
        elif name in ("replace", "join") and isinstance(getattr(obj, "__self__", None), str):
            if name == "replace":
                return _bounded_replace(obj.__self__, *args, **kwargs)
            return _concat(_interleave(obj.__self__, *args))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._check_time()
        if operator in ("*", "+"):
            sizes = [len(side) if isinstance(side, (str, list, tuple)) else None for side in (left, right)]
            times = right if sizes[0] is not None else left
            size = sum(filter(None, sizes)) * (times if operator == "*" and isinstance(times, int) else 1)
            if size > MAX_CHARS:
                raise ChatTemplateError(f"the chat template makes a text of more than {MAX_CHARS:,} characters")
            if operator == "*":
                _refuse_large((left, right), 1 << 256)
        elif operator == "**":
            _refuse_large((left,), 1 << 64)
            _refuse_large((right,), 64)
        else:
            _refuse_wide(left)
        return super().call_binop(context, operator, left, right)


def _refuse_large(values: Iterable[Any], limit: int = 1 << 16) -> None:
    if any(isinstance(value, int) and abs(value) > limit for value in values):
        raise ChatTemplateError("the chat template computes with a number that is too large")


def _refuse_wide(form: Any) -> None:
    if isinstance(form, str) and _WIDE.search(form):
        raise ChatTemplateError("the chat template formats a field that is too wide")


def _checked_first(filter_: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        check(value)
        return filter_(value, *args, **kwargs)

    return checked


def _bounded_replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(value), str(old), str(new)
    if text.count(old) * len(new) + len(text) > MAX_CHARS:
        raise ChatTemplateError(f"the chat template makes a text of more than {MAX_CHARS:,} characters")
    return text.replace(old, new, -1 if count is None else count)


@jinja2.pass_environment
def _bounded_join(environment: jinja2.Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _concat(_interleave(str(d), map(str, value)))


def _interleave(separator: str, parts: Iterable[str]) -> Iterator[str]:
    for index, part in enumerate(parts):
        if index:
            yield separator
        yield part


def _bounded_filter(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _refuse_large((*args[1:], *kwargs.values()))
        return filter_(*args, **kwargs)

    bounded.__dict__.update(filter_.__dict__)  # Jinja2 marks here what a filter wants passed
    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None:
        _refuse_large((indent,), 64)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:256])
