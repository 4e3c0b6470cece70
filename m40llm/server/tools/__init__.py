"""Tool calls: found in a model's text while it streams, asked for in the prompt, forced by a grammar."""

from m40llm.server.tools.forms import ToolForm, tool_form
from m40llm.server.tools.parser import CallDelta, ContentDelta, Delta, ToolCallParser
from m40llm.server.tools.spec import Tool, ToolError, ToolRequest, tool_request

__all__ = [
    "CallDelta",
    "ContentDelta",
    "Delta",
    "Tool",
    "ToolCallParser",
    "ToolError",
    "ToolForm",
    "ToolRequest",
    "tool_form",
    "tool_request",
]
