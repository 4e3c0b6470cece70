"""The tools of a request, checked: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from m40llm.sampling.grammar import json_rule

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MAX_TOOLS = 128

Choice = Literal["none", "auto", "required", "named"]


class ToolError(ValueError):
    """Tools that cannot be offered; `param` is the request's field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments, `strict` that they must satisfy it."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class ToolRequest:
    """What may, must or cannot be called. `allowed`: the tools by name; `offered`: what the template is shown."""

    choice: Choice
    parallel: bool
    allowed: Mapping[str, Tool]
    offered: tuple[Mapping[str, Any], ...]

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice in ("required", "named")

    @property
    def strict(self) -> bool:
        """Whether some tool's arguments must satisfy their schema."""
        return any(tool.strict for tool in self.allowed.values())

    @property
    def parsed(self) -> bool:
        """Whether the answer is searched for calls."""
        return bool(self.allowed) and self.choice != "none"


def tool_request(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
) -> ToolRequest:
    """Checks the three fields together.

    Raises:
        ToolError: a tool is malformed, two have one name, or the choice names none of them.
    """
    tools = tools or ()
    if len(tools) > _MAX_TOOLS:
        raise ToolError(f"{len(tools)} tools are given; {_MAX_TOOLS} are the limit", "tools")
    known: dict[str, Tool] = {}
    for i, entry in enumerate(tools):
        tool = _tool(entry, f"tools[{i}]")
        if tool.name in known:
            raise ToolError(f"tools[{i}]: a tool named '{tool.name}' was given before", "tools")
        known[tool.name] = tool
    choice, name = _choice(tool_choice, known)
    allowed = {name: known[name]} if name is not None else known
    parallel = parallel_tool_calls is not False and name is None
    offered = () if choice == "none" else tuple(tools)
    return ToolRequest(choice, parallel, allowed, offered)


def _tool(entry: Any, where: str) -> Tool:
    if (
        not isinstance(entry, Mapping)
        or entry.get("type") != "function"
        or not isinstance(entry.get("function"), Mapping)
    ):
        raise ToolError(f'{where} must be {{"type": "function", "function": {{…}}}}', "tools")
    function = entry["function"]
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolError(f"{where}.function.name must be 1 to 64 of a-z, A-Z, 0-9, _ . -", "tools")
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise ToolError(f"{where}.function.description must be a string", "tools")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ToolError(f"{where}.function.parameters must be the JSON schema of an object", "tools")
    return Tool(name, parameters, function.get("strict") is True)


def _choice(given: Any, known: Mapping[str, Tool]) -> tuple[Choice, str | None]:
    if given is None:
        return ("auto" if known else "none"), None
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise ToolError(f"tool_choice is '{given:.40}'; expected none, auto, required or a function", "tool_choice")
        if given == "required" and not known:
            raise ToolError("tool_choice is 'required', but no tools are given", "tool_choice")
        return ("none" if not known else given), None  # type: ignore[return-value]
    function = given.get("function") if isinstance(given, Mapping) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ToolError('tool_choice must be a string or {"type": "function", "function": {"name": …}}', "tool_choice")
    if name not in known:
        raise ToolError(f"tool_choice names '{name:.64}', which is not among the tools", "tool_choice")
    return "named", name


def json_call_rule(tool: Tool, arguments_key: str) -> str:
    """Terms of a Lark rule: the object of a call to `tool`, as templates write it."""
    opening = json.dumps(f'{{"name": "{tool.name}", "{arguments_key}": ')
    return f'{opening} {json_rule(as_object(tool.parameters))} "}}"'


def as_object(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` for arguments, which are an object whether or not it says so."""
    return schema if "type" in schema or "$ref" in schema else {**schema, "type": "object"}


def text_rule(text: str, control: Mapping[str, int]) -> str:
    """A term of a Lark rule: `text` itself, or its token where it is a control token."""
    return f"<[{control[text]}]>" if text in control else json.dumps(text)
