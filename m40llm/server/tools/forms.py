"""Which markup a model's tool calls have: decided once, from its template's source and its vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from m40llm.server.tools import hermes, llama3, mistral, qwen_xml
from m40llm.server.tools.body import Body
from m40llm.server.tools.spec import Tool
from m40llm.text import Tokenizer

Name = Literal["hermes", "qwen_xml", "llama3", "mistral", "generic"]


@dataclass(frozen=True)
class ToolForm:
    """The markup of one model.

    Attributes:
        name: the form; `generic` is Hermes' markup for a template that knows no tools (or in a way that m40llm does not
            know): the tools are then described in the system message.
        markers: texts that start a call, and control tokens that are never content.
        start: a marker that counts only as the very first thing of an answer, and is part of the call.
        control: id of each marker that is a control token, and so has no text unless asked for.
    """

    name: Name
    markers: tuple[str, ...]
    start: str = ""
    control: Mapping[str, int] = field(default_factory=dict)
    named: bool = False  # Mistral's newer form

    @property
    def exact(self) -> ToolForm:
        """This form without the ways of writing a call that the template does not teach."""
        if self.name in ("hermes", "generic"):
            return replace(self, markers=(hermes.OPENING,), start="")
        return self

    @property
    def written(self) -> frozenset[int]:
        """Control tokens that the detokenizer must write out for the parser."""
        return frozenset(self.control.values())

    def body(self, marker: str, tools: Mapping[str, Tool]) -> Body | None:
        """The reader of what follows `marker`; None for a marker that starts nothing."""
        if marker in (mistral.ARGUMENTS, mistral.CALL_ID):
            return None
        if self.name == "mistral":
            return mistral.MistralBody(tools)
        if self.name == "llama3" or marker == llama3.BRACE:
            return llama3.Llama3Body(tools)
        if self.name == "qwen_xml":
            return qwen_xml.QwenXmlBody(tools, in_function=marker == qwen_xml.FUNCTION)
        return hermes.HermesBody(tools, hermes.FENCE_END if marker == hermes.FENCE else hermes.CLOSING)

    def grammar(self, tools: Mapping[str, Tool], *, several: bool) -> str:
        """Lark rules that start at `calls`: the model's markup around arguments that satisfy each tool's schema.

        Raises:
            GrammarError: a schema that cannot be written as a rule.
        """
        offered = list(tools.values())
        if self.name == "mistral":
            return mistral.grammar(offered, self.control, named=self.named, several=several)
        if self.name == "llama3":
            return llama3.grammar(offered)
        if self.name == "qwen_xml":
            return qwen_xml.grammar(offered, several=several)
        return hermes.grammar(offered, several=several)

    def lazy_grammar(self, tools: Mapping[str, Tool], *, several: bool) -> str:
        """Lark rules that start at `answer`: free text, in which a call, once begun, is finished well-formed.

        Arguments satisfy the schemas of strict tools; those of the others are any object.

        Raises:
            GrammarError: a schema that cannot be written as a rule.
        """
        offered = [tool if tool.strict else replace(tool, parameters={"type": "object"}) for tool in tools.values()]
        if self.name == "llama3":
            tag = f"<[{self.control[llama3.PYTHON_TAG]}]> calls | " if llama3.PYTHON_TAG in self.control else ""
            return f"answer: calls | {tag}FREE\nFREE: /[ \\n]*[^{{ \\n](.|\\n)*/\n{llama3.grammar(offered)}"
        if self.name == "mistral":
            rest = mistral.rest_rule(offered, self.control, named=self.named, several=several)
        elif self.name == "qwen_xml":
            rest = qwen_xml.rest_rule(offered)
        else:
            rest = hermes.rest_rule(offered)
        opening = self.markers[0]
        free = "TEXT: /(.|\\n)*/\n"
        if opening in self.control:
            call = f"<[{self.control[opening]}]> rest"
            return f"answer: TEXT ({call}){'*' if several else '?'}\n{free}{rest}"
        head = f'head[lazy]: TEXT "{opening}"\n'
        return f"answer: {'(head rest)* TEXT' if several else 'head rest | TEXT'}\n{head}{free}{rest}"

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]] | None]:
        """(messages, tools) as the model's template takes them."""
        copies = [dict(message) for message in messages]
        if self.name == "generic":
            return _without_template(copies, tools), None
        if self.name == "mistral":
            copies = [_with_short_ids(message) for message in copies]
        return copies, list(tools) or None


def tool_form(source: str | None, tokenizer: Tokenizer) -> ToolForm:
    """The form of a template's source (None: the model has no template)."""
    source = source or ""
    markers: tuple[str, ...]
    if mistral.OPENING in source:
        named = mistral.ARGUMENTS in source
        markers = (mistral.OPENING, mistral.ARGUMENTS, mistral.CALL_ID) if named else (mistral.OPENING,)
        return ToolForm("mistral", markers, control=_control(markers, tokenizer), named=named)
    if qwen_xml.FUNCTION in source and qwen_xml.OPENING in source:
        markers = (qwen_xml.OPENING, qwen_xml.FUNCTION)
        return ToolForm("qwen_xml", markers, control=_control(markers, tokenizer))
    loose = (hermes.OPENING, hermes.FENCE)
    control = _control((hermes.OPENING, hermes.CLOSING), tokenizer)
    plain = source.replace("\\", "").replace("'", '"')
    if hermes.OPENING in source and '"name"' in plain and "arguments" in source:
        return ToolForm("hermes", loose, llama3.BRACE, control=control)
    if llama3.PYTHON_TAG in source or ("ipython" in source and '"parameters"' in plain):
        markers = (llama3.PYTHON_TAG,)
        return ToolForm("llama3", markers, llama3.BRACE, control=_control(markers, tokenizer))
    return ToolForm("generic", loose, llama3.BRACE, control=control)


def _control(texts: Sequence[str], tokenizer: Tokenizer) -> dict[str, int]:
    found = {}
    for text in texts:
        ids = tokenizer.encode(text, bos=False)
        if len(ids) == 1 and tokenizer.is_control(ids[0]):
            found[text] = ids[0]
    return found


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Mistral's templates refuse call ids that are not nine letters or digits."""
    if isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    if isinstance(message.get("tool_calls"), (list, tuple)):
        message["tool_calls"] = [
            {**call, "id": _short_id(str(call.get("id", "")))} if isinstance(call, Mapping) else call
            for call in message["tool_calls"]
        ]
    return message


def _short_id(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _without_template(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools, calls and results as plain messages, for a template that has no words for them."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if out and out[-1].get("role") == "user" and "_results" in out[-1]:
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text, "_results": True})
        elif message.get("tool_calls"):
            said = _text(message.get("content"))
            parts = ([said] if said else []) + [_written_call(call) for call in message["tool_calls"]]
            out.append({"role": message.get("role", "assistant"), "content": "\n".join(parts)})
        else:
            out.append(message)
    for message in out:
        message.pop("_results", None)
    if tools:
        described = _description(tools)
        if out and out[0].get("role") == "system":
            out[0] = {**out[0], "content": f"{_text(out[0].get('content'))}\n\n{described}".strip()}
        else:
            out.insert(0, {"role": "system", "content": described})
    return out


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{listed}\n\n"
        "To call one, answer with its name and arguments as JSON, each call in tags of its own:\n"
        f'{hermes.OPENING}\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n{hermes.CLOSING}'
    )


def _written_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    name, arguments = (
        ("", {}) if not isinstance(function, Mapping) else (function.get("name"), function.get("arguments"))
    )
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return f'{hermes.OPENING}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{hermes.CLOSING}'


def _text(content: Any) -> str:
    if isinstance(content, (list, tuple)):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
