"""What becomes of generated text on its way into a chat message: plain content, or what a parser finds in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from m40llm.server.reasoning import Kind, ReasoningSplitter
from m40llm.server.tools import ContentDelta, ToolCallParser
from m40llm.server.tools import Delta as ToolDelta


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of text adds to the message. `tool_calls` are OpenAI's delta objects."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls)


class OutputParser(Protocol):
    """Reads one answer as it comes. Text that may still turn out to be markup is held back until `flush`."""

    def push(self, text: str) -> Delta: ...

    def flush(self) -> Delta: ...

    @property
    def called_tools(self) -> bool:
        """Whether the answer called a tool, so that its finish reason is `tool_calls`."""
        ...


class PlainOutput:
    """All text is content."""

    called_tools = False

    def push(self, text: str) -> Delta:
        return Delta(content=text)

    def flush(self) -> Delta:
        return Delta()


class MarkupOutput:
    """Reasoning apart from content, and calls out of the content; either reader may be None."""

    def __init__(self, splitter: ReasoningSplitter | None, calls: ToolCallParser | None) -> None:
        self._splitter = splitter
        self._calls = calls

    @property
    def called_tools(self) -> bool:
        return self._calls is not None and self._calls.complete > 0

    def push(self, text: str) -> Delta:
        return self._delta(self._splitter.push(text) if self._splitter else [("content", text)])

    def flush(self) -> Delta:
        delta = self._delta(self._splitter.finish() if self._splitter else [])
        if self._calls is None:
            return delta
        rest = _delta("", self._calls.finish())
        return Delta(delta.content + rest.content, delta.reasoning, [*delta.tool_calls, *rest.tool_calls])

    def _delta(self, parts: Sequence[tuple[Kind, str]]) -> Delta:
        reasoning = "".join(text for kind, text in parts if kind == "reasoning")
        content = "".join(text for kind, text in parts if kind == "content")
        if self._calls is None:
            return Delta(content, reasoning)
        return _delta(reasoning, self._calls.push(content))


def _delta(reasoning: str, found: Sequence[ToolDelta]) -> Delta:
    content = "".join(delta.text for delta in found if isinstance(delta, ContentDelta))
    calls: list[dict[str, Any]] = []
    for delta in found:
        if isinstance(delta, ContentDelta):
            continue
        if delta.name is None:
            calls.append({"index": delta.index, "function": {"arguments": delta.arguments}})
        else:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls.append({"index": delta.index, "id": delta.id, "type": "function", "function": function})
    return Delta(content, reasoning, calls)
