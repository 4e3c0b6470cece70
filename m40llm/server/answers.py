"""One chat request's answers: what restricts them and how they are read. Resolved once, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from m40llm.config import SamplingParams
from m40llm.engine import Request
from m40llm.model import Model
from m40llm.sampling import Constraint, Grammar, GrammarCompiler, GrammarError, ThinkingConstraint
from m40llm.sampling.grammar import json_rule
from m40llm.server.errors import ApiError
from m40llm.server.output import MarkupOutput, OutputParser, PlainOutput
from m40llm.server.reasoning import ReasoningForm, ReasoningSplitter, Stage, reasoning_form
from m40llm.server.schema import ChatBody
from m40llm.server.tools import ToolCallParser, ToolError, ToolForm, ToolRequest, tool_form, tool_request

# Reasoning models put line breaks behind the closing marker, which belong to nothing.
_LEAD = "start: LEAD? answer\nLEAD: /[ \\n]{1,4}/\n"
_NO_LEAD = "start: answer\n"


class ModelMarkup:
    """What a model's template and vocabulary say about the markup of its answers; found once per model."""

    def __init__(self, model: Model) -> None:
        template = model.chat_template
        self.tools: ToolForm = tool_form(template.tool_source if template else None, model.tokenizer)
        self.reasoning: ReasoningForm | None = reasoning_form(template.source if template else None, model.tokenizer)
        self.grammars = GrammarCompiler(model.tokenizer, model.config.vocab_size)
        self.tokenizer = model.tokenizer


@dataclass(frozen=True)
class AnswerPlan:
    """Everything about a chat request's answers that is not sampling.

    `stage` is where the prompt leaves the reasoning; it is known when the prompt is rendered (`behind`).
    """

    markup: ModelMarkup
    tools: ToolRequest
    grammar: Grammar | None
    budget: int | None
    eager: bool
    stage: Stage = "before"

    def behind(self, prompt_ids: Sequence[int]) -> AnswerPlan:
        """The plan for answers to this prompt."""
        if self.markup.reasoning is None:
            return self
        tail = self.markup.tokenizer.decode(prompt_ids[-32:], special=True)
        return replace(self, stage=self.markup.reasoning.stage(tail))

    def request(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """One choice for the engine."""
        written = self.markup.tools.written if self.tools.parsed else frozenset()
        if self.markup.reasoning is not None:
            written |= self.markup.reasoning.written
        return Request(prompt_ids, params, self._constraint(), written)

    def _constraint(self) -> Constraint | None:
        then = None if self.grammar is None else self.grammar.start()
        form = self.markup.reasoning
        if form is None or self.stage == "closed" or (then is None and self.budget is None):
            return then
        inside = self.stage == "inside"
        return ThinkingConstraint(
            self.markup.tokenizer, form.opening, form.closing, inside=inside, budget=self.budget, then=then
        )

    def parser(self) -> OutputParser:
        """The reader of one choice's text."""
        splitter = None
        if self.markup.reasoning is not None and self.stage != "closed":
            splitter = ReasoningSplitter(self.markup.reasoning, inside=self.stage == "inside")
        calls = None
        if self.tools.parsed:
            form = self.markup.tools.exact if self.tools.strict else self.markup.tools
            limit = None if self.tools.parallel else 1
            calls = ToolCallParser(form, self.tools.allowed, eager=self.eager, limit=limit, forced=self.tools.forced)
        return PlainOutput() if splitter is None and calls is None else MarkupOutput(splitter, calls)


def plan_answers(markup: ModelMarkup, body: ChatBody) -> AnswerPlan:
    """Checks tools, response format and thinking budget, and compiles the grammar that they need.

    Raises:
        ApiError: 400 that names the field and the reason.
    """
    try:
        tools = tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    except ToolError as error:
        raise ApiError(400, str(error), param=error.param, code="invalid_value") from None
    budget = thinking_budget(body.reasoning_budget, body.thinking_budget)
    has_schema, schema = response_schema(body.response_format)
    rules = _rules(markup, tools, has_schema, schema)
    grammar = None
    if rules is not None:
        start = _NO_LEAD if markup.reasoning is None else _LEAD
        grammar = compiled(markup.grammars, start + rules, "tools" if tools.forced or not has_schema else _FORMAT)
    return AnswerPlan(markup, tools, grammar, budget, eager=bool(body.stream))


_FORMAT = "response_format"


def _rules(markup: ModelMarkup, tools: ToolRequest, has_schema: bool, schema: Any) -> str | None:
    """Lark rules for `answer`; None for an answer that is free."""
    try:
        if tools.forced:
            return "answer: calls\n" + markup.tools.grammar(tools.allowed, several=tools.parallel)
        if has_schema and tools.parsed:
            calls = markup.tools.grammar(tools.allowed, several=tools.parallel)
            return f"answer: calls | json\njson: {json_rule(schema)}\n{calls}"
        if has_schema:
            return f"answer: {json_rule(schema)}\n"
        if tools.parsed and (not tools.parallel or tools.strict):
            return markup.tools.lazy_grammar(tools.allowed, several=tools.parallel)
    except GrammarError as error:
        raise ApiError(400, str(error), param=_FORMAT if has_schema else "tools", code="invalid_schema") from None
    return None


def compiled(grammars: GrammarCompiler, lark: str, param: str) -> Grammar:
    """Raises ApiError: 400 for what cannot be compiled."""
    try:
        return grammars.compile(lark)
    except GrammarError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_schema") from None


def schema_grammar(grammars: GrammarCompiler, response_format: Mapping[str, Any] | None) -> Grammar | None:
    """The grammar of a `response_format`, None for free text. Raises as `response_schema` and `compiled`."""
    has_schema, schema = response_schema(response_format)
    if not has_schema:
        return None
    try:
        return compiled(grammars, f"start: {json_rule(schema)}", _FORMAT)
    except GrammarError as error:
        raise ApiError(400, str(error), param=_FORMAT, code="invalid_schema") from None


def response_schema(given: Mapping[str, Any] | None) -> tuple[bool, Any]:
    """(whether the answer must be JSON, its schema) of a `response_format`.

    Raises:
        ApiError: 400 for anything but OpenAI's text, json_object and json_schema.
    """
    kind = (given or {"type": "text"}).get("type")
    if kind == "text":
        return False, None
    assert given is not None
    if kind == "json_object":
        return True, given.get("schema", {"type": "object"})  # llama-server takes a schema here
    if kind != "json_schema":
        message = f"response_format.type is {kind!r:.40}; expected text, json_object or json_schema"
        raise ApiError(400, message, param=_FORMAT, code="invalid_value")
    named = given.get("json_schema")
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), (dict, bool)):
        message = 'response_format must be {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
        raise ApiError(400, message, param=_FORMAT, code="invalid_value")
    return True, named["schema"]


def thinking_budget(*given: int | None) -> int | None:
    """One budget of several names for it; -1 is none. Raises ApiError where they contradict each other."""
    values = {value for value in given if value is not None}
    if len(values) > 1:
        raise ApiError(400, "reasoning_budget and thinking_budget contradict each other", param="reasoning_budget")
    value = next(iter(values), -1)
    return None if value < 0 else value
