"""Text: tokenizer, streaming detokenizer, chat template."""

from m40llm.text.chat_prompt import rendered_ids
from m40llm.text.chat_template import ChatTemplate
from m40llm.text.detokenizer import StreamDetokenizer
from m40llm.text.errors import ChatTemplateError, TokenizerError
from m40llm.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "ChatTemplateError", "StreamDetokenizer", "Tokenizer", "TokenizerError", "rendered_ids"]
