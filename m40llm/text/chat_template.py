"""Chat templates: a conversation rendered to the prompt that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from m40llm.text.errors import ChatTemplateError, quote
from m40llm.text.sandbox import BoundedEnvironment, RaisedByTemplate

_KEY = "tokenizer.chat_template"
_MAX_SOURCE = 1 << 20
_TOOL_USE = "tool_use"
# Templates that any file may be run with, by llama-server's names. ChatML: OpenAI's, of 2023, which many models were tuned on.
_BUILT_IN = {
    "chatml": (
        "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
}
_PROBE = "\x02probe\x03"


class ChatTemplate:
    """A file's chat template, compiled.

    Args:
        source: Jinja2 source.
        tool_source: source used instead where tools are given, or None.
        variables: ``bos_token``, ``eos_token`` and the like.

    Raises:
        ChatTemplateError: a source does not compile.
    """

    def __init__(self, source: str, tool_source: str | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.tool_source = tool_source or source
        self._environment = BoundedEnvironment()
        self._template = self._compile(source)
        self._tool_template = self._compile(tool_source) if tool_source else self._template
        self._variables = dict(variables or {})

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], override: str | None = None) -> ChatTemplate | None:
        """The chat template in a GGUF file's metadata; None where the file has none.

        Args:
            metadata: key → value.
            override: Jinja2 source to use instead of the file's, or the name of one of the file's templates
                (``tokenizer.chat_template.NAME``; ``default`` is the unnamed one), or ``chatml``.

        Raises:
            ChatTemplateError: the template does not compile, is not a text, or no template has that name.
        """
        named = _named_sources(metadata)
        tool_source = named.get(_TOOL_USE)
        if override is None:
            source = named.get("default")
            if source is None:
                return None
        elif override in named or override in _BUILT_IN:
            source, tool_source = {**_BUILT_IN, **named}[override], None
        elif "{" in override:
            source, tool_source = override, None
        else:
            known = ", ".join(named) or "none"
            raise ChatTemplateError(
                f"no chat template is named {quote(override)} (the file's: {known}; always: {', '.join(_BUILT_IN)})"
            )
        return cls(source, tool_source, _token_texts(metadata))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt, as Hugging Face transformers renders it. It holds its own BOS where the template writes one.

        Args:
            messages: ``{"role", "content", …}`` in order. Arguments of tool calls may be a JSON string: the template gets the
                mapping. A content of text parts is joined by newlines for a template that expects a string.
            tools: JSON schemas of the functions that the model may call.
            documents: for templates that know them.
            add_generation_prompt: whether the prompt ends where the assistant's answer starts.
            kwargs: further variables of the template, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or goes over a limit (sandbox.py).
        """
        template = self._tool_template if tools is not None else self._template
        prepared = [_with_parsed_arguments(message) for message in messages]
        if any(_is_text_parts(message.get("content")) for message in prepared) and not self._takes_parts(template):
            prepared = [_with_joined_parts(message) for message in prepared]
        variables = {
            **self._variables,
            **kwargs,
            "messages": prepared,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._render(template, variables)

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > _MAX_SOURCE:
            raise ChatTemplateError(f"the chat template has {len(source):,} characters; {_MAX_SOURCE:,} are the limit")
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {quote(error, 200)}") from error

    def _render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            return self._environment.generate(template, variables)
        except ChatTemplateError:
            raise
        except RaisedByTemplate as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {quote(error, 200)}") from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template failed: {quote(error, 200)}") from error
        except Exception as error:  # a template may provoke any error of the operators and filters it uses
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {quote(error, 200)}") from error

    def _takes_parts(self, template: jinja2.Template) -> bool:
        """Whether the template writes out the text of text parts, and not their Python representation."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._render(template, {**self._variables, "messages": [message], "add_generation_prompt": True})
        except ChatTemplateError:
            return False
        return _PROBE in text and "'type'" not in text


def _named_sources(metadata: Mapping[str, Any]) -> dict[str, str]:
    sources = {}
    if _KEY in metadata:
        sources["default"] = metadata[_KEY]
    sources.update((key[len(_KEY) + 1 :], metadata[key]) for key in metadata if key.startswith(_KEY + "."))
    for name, source in sources.items():
        if not isinstance(source, str):
            raise ChatTemplateError(f"the file's chat template {quote(name)} is not a text; convert the file again")
    return sources


def _token_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token``, … as Hugging Face names them, for those that the file has."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    texts: dict[str, str] = {}
    for variable, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(tokens, list) and isinstance(index, int) and 0 <= index < len(tokens):
            texts[f"{variable}_token"] = tokens[index]
    return texts


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    copy = dict(message)
    calls = copy.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        copy["tool_calls"] = [_with_mapping(call) for call in calls]
    return copy


def _with_mapping(call: Any) -> Any:
    """A tool call whose arguments, if they are the JSON text of an object, are that object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}} if isinstance(parsed, dict) else call


def _is_text_parts(content: Any) -> bool:
    return isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) and "text" in part for part in content)


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not _is_text_parts(content):
        return message
    assert content is not None
    return {**message, "content": "\n".join(str(part["text"]) for part in content)}
