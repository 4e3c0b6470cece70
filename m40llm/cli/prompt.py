"""From what the user typed to token ids: through the model's chat template, or as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from m40llm.cli.errors import CliError

if TYPE_CHECKING:
    from m40llm.text import ChatTemplate, Tokenizer

Message = dict[str, str]


def raw_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` as it stands, with BOS where the model wants it; control tokens in it are recognised."""
    return tokenizer.encode(text)


def chat_ids(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The conversation as the model's template writes it, up to where the assistant speaks, with BOS once if wanted."""
    from m40llm.text import rendered_ids  # not at the top: commands without a model start without it

    return rendered_ids(tokenizer, template.render(messages, add_generation_prompt=True))


def prompt_ids(
    tokenizer: Tokenizer, template: ChatTemplate | None, text: str, *, system: str | None, raw: bool
) -> list[int]:
    """Ids of a single prompt: through the template if the model has one and `raw` does not forbid it.

    Raises CliError for a system text that nothing can carry.
    """
    if raw or template is None:
        if system is not None:
            reason = "--raw leaves it out" if raw else "this model has none"
            raise CliError(f"--system needs the chat template, and {reason}: put the text into the prompt")
        return raw_ids(tokenizer, text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return chat_ids(tokenizer, template, [*messages, {"role": "user", "content": text}])
