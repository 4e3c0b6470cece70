"""`m40llm chat`: a conversation. Every turn is one request; the KV of the turns before it is still there and reused."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from m40llm.cli.errors import CliError
from m40llm.cli.model_arg import model_argument
from m40llm.cli.options import runtime_from, runtime_options, sampling_from, sampling_options

if TYPE_CHECKING:
    from m40llm.cli.prompt import Message
    from m40llm.config import SamplingParams
    from m40llm.engine import Engine

HELP = """\
/reset         forget the conversation (the system message stays)
/system TEXT   set the system message and start over; without TEXT: show it
/help          this list
/exit          leave (so does Ctrl-D); Ctrl-C stops an answer"""


@dataclass
class Conversation:
    """What has been said so far; `system` leads every prompt."""

    system: str | None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]


@click.command(
    name="chat",
    epilog="""\b
Examples:
  m40llm chat smollm2
  m40llm chat qwen2.5-coder-1.5b --system "You are terse." --temperature 0.3
  printf 'Hello\\nWhat did I say first?\\n' | m40llm chat smollm2

In the conversation: /reset, /system TEXT, /help, /exit. Ctrl-C stops the answer, Ctrl-D ends.""",
)
@model_argument
@click.option("--system", help="System message.")
@sampling_options
@runtime_options
def command(model: str, system: str | None, **flags: Any) -> None:
    """Talk with MODEL in the terminal; it needs a model with a chat template.

    When stdin is not a terminal, every line of it is a message and stdout carries only the answers.
    """
    sampling = sampling_from(flags)
    options = runtime_from(flags)
    from m40llm.cli.loading import open_engine
    from m40llm.cli.model_arg import resolve_model

    with open_engine(resolve_model(model), options) as engine:
        if engine.model.chat_template is None:
            raise CliError(f"{model}: the model has no chat template: use m40llm generate")
        print(engine.model.description, file=sys.stderr)
        if sys.stdin.isatty():
            import readline  # noqa: F401  # gives input() line editing and history

            print("/help lists the commands", file=sys.stderr)
        _converse(engine, Conversation(system), sampling)


def _converse(engine: Engine, conversation: Conversation, sampling: SamplingParams) -> None:
    while True:
        try:
            line = _read_line()
        except KeyboardInterrupt:  # at the prompt it drops the line, as in a shell
            print(file=sys.stderr)
            continue
        if line is None:
            return
        if line.startswith("/"):
            if not _obey(line, conversation):
                return
        elif line:
            _answer(engine, conversation, line, sampling)


def _read_line() -> str | None:
    """The next line without surrounding blanks; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    prompt = "> "
    if not sys.stdout.isatty():  # stdout carries only answers
        sys.stderr.write(prompt)
        sys.stderr.flush()
        prompt = ""
    try:
        return input(prompt).strip()
    except EOFError:
        print(file=sys.stderr)
        return None


def _obey(line: str, conversation: Conversation) -> bool:
    """Runs a /command; False when it is time to leave."""
    name, _, text = line.partition(" ")
    text = text.strip()
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.turns.clear()
        print("forgotten", file=sys.stderr)
    elif name == "/system" and text:
        conversation.system = text
        conversation.turns.clear()
        print("system message set; the conversation starts over", file=sys.stderr)
    elif name == "/system":
        print(conversation.system or "no system message", file=sys.stderr)
    elif name == "/help":
        print(HELP, file=sys.stderr)
    else:
        print(f"unknown command {name}: /help lists them", file=sys.stderr)
    return True


def _answer(engine: Engine, conversation: Conversation, line: str, sampling: SamplingParams) -> None:
    """One turn. What was said stays in the conversation only if it could be answered."""
    from m40llm.cli.generate import follow
    from m40llm.cli.prompt import chat_ids
    from m40llm.engine import RequestError
    from m40llm.text import ChatTemplateError

    assert engine.model.chat_template is not None
    conversation.turns.append({"role": "user", "content": line})
    try:
        ids = chat_ids(engine.model.tokenizer, engine.model.chat_template, conversation.messages)
        generation = engine.submit(ids, sampling)
    except (RequestError, ChatTemplateError) as err:
        conversation.turns.pop()
        print(f"error: {err} (/reset starts over)", file=sys.stderr)
        return
    try:
        result = follow(generation, show=True)
    except KeyboardInterrupt:
        result = generation.result  # cancelled: what was said until then counts
    click.echo("")
    conversation.turns.append({"role": "assistant", "content": result.text})
