"""What becomes of generated text on its way into a chat message: plain content, or what a parser finds in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from m40llm.model import Model
from m40llm.server.schema import ChatBody


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


def parser_for(body: ChatBody, model: Model) -> OutputParser:
    """The parser that this request's answer needs."""
    return PlainOutput()
