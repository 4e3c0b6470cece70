"""Chat messages to token ids: checked here, rendered by the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m40llm.model import Model
from m40llm.server.errors import ApiError
from m40llm.server.limits import PromptLimit
from m40llm.server.tools import ToolForm
from m40llm.text import rendered_ids

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


def checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates know them: `developer` is today's name of `system`.

    Raises:
        ApiError: 400 that names the message and what is wrong with it.
    """
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}", param="messages")
    content = message.get("content")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ApiError(400, f"{where}.tool_calls must be a list of objects", param="messages")
    if content is None and not (role == "assistant" and calls):
        raise ApiError(400, f"{where}.content is missing", param="messages")
    if content is not None and not isinstance(content, str):
        _check_parts(content, where)
    kept = {key: value for key, value in message.items() if value is not None}
    return {
        **kept,
        "role": "system" if role == "developer" else role,
        "content": content if content is not None else "",
    }


def _check_parts(content: Any, where: str) -> None:
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a string or a list of text parts", param="messages")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400,
                f'{where}.content[{i}] must be {{"type": "text", "text": "…"}}: this model reads text only',
                param="messages",
            )


def render(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    form: ToolForm | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that the model's template writes, or, where it knows no tools, what `form` makes of them.

    Raises:
        ApiError: the model has no template, a message or a variable cannot be.
        ChatTemplateError: the template refuses.
    """
    if model.chat_template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
    extra = dict(variables or {})
    if reserved := sorted(_RESERVED & extra.keys()):
        raise ApiError(400, f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs")
    prepared = checked(messages)
    shown = list(tools or ()) or None
    if form is not None:
        prepared, shown = form.prepare(prepared, tools or ())
    return model.chat_template.render(prepared, tools=shown, add_generation_prompt=add_generation_prompt, **extra)


def chat_ids(
    model: Model, messages: Sequence[Mapping[str, Any]], *, limit: PromptLimit | None = None, **options: Any
) -> list[int]:
    """Token ids of the rendered prompt; options and errors as `render`, and RequestError for what is over `limit`."""
    rendered = render(model, messages, **options)
    if limit is not None:
        limit.check(rendered)
    return rendered_ids(model.tokenizer, rendered)
