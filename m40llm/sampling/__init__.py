"""From logits to a token, from tokens to the end of the text."""

from m40llm.sampling.constraint import Constraint
from m40llm.sampling.errors import SamplingError
from m40llm.sampling.grammar import Grammar, GrammarCompiler, GrammarError
from m40llm.sampling.logprobs import TokenLogprobs, token_logprobs
from m40llm.sampling.sampler import Sampler
from m40llm.sampling.stop import StopChecker
from m40llm.sampling.thinking import ThinkingConstraint

__all__ = [
    "Constraint",
    "Grammar",
    "GrammarCompiler",
    "GrammarError",
    "Sampler",
    "SamplingError",
    "StopChecker",
    "ThinkingConstraint",
    "TokenLogprobs",
    "token_logprobs",
]
