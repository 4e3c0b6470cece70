"""From logits to a token, from tokens to the end of the text."""

from m40llm.sampling.errors import SamplingError
from m40llm.sampling.logprobs import TokenLogprobs, token_logprobs
from m40llm.sampling.sampler import Sampler
from m40llm.sampling.stop import StopChecker

__all__ = ["Sampler", "SamplingError", "StopChecker", "TokenLogprobs", "token_logprobs"]
