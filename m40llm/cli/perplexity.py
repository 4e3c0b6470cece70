"""`m40llm perplexity`: how well a model predicts a text."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from typing import Any

import click

from m40llm.cli.model_arg import model_argument
from m40llm.cli.options import json_flag, runtime_from, runtime_options
from m40llm.cli.score import LOGIT_ROWS

DEFAULT_WINDOW = 512


@click.command(
    name="perplexity",
    epilog="""\b
Examples:
  m40llm perplexity smollm2 wiki.test.raw
  m40llm perplexity smollm2 text.txt --ctx 1024 --json

The text is cut into windows of --ctx tokens (default 512) that do not overlap; in each, the second half is scored,
given the first: the way in which llama.cpp's figures are usually made. A text shorter than one window is one window.""",
)
@model_argument
@click.argument("textfile", metavar="TEXTFILE")
@partial(runtime_options, ctx_help=f"Tokens in a window (default: {DEFAULT_WINDOW}).")
@json_flag
def command(model: str, textfile: str, as_json: bool, **flags: Any) -> None:
    """Perplexity of MODEL on TEXTFILE (UTF-8; - is stdin), with its standard error."""
    options = runtime_from(flags)
    from m40llm.cli.errors import CliError
    from m40llm.cli.lines import read_text
    from m40llm.cli.loading import open_model
    from m40llm.cli.model_arg import resolve_model
    from m40llm.cli.progress import StageBar
    from m40llm.scoring import score

    text = read_text(textfile)
    window = options.ctx or DEFAULT_WINDOW
    options = dataclasses.replace(options, ctx=window)
    logprobs: list[float] = []
    with open_model(resolve_model(model), options, logit_rows=min(LOGIT_ROWS, options.token_budget)) as opened:
        ids = opened.tokenizer.encode(text, special=False)
        size = min(window, len(ids))
        if size < 2:
            raise CliError(f"{textfile}: too short: {len(ids)} tokens, at least 2 are needed")
        starts = range(0, len(ids) - size + 1, size)
        with StageBar("windows") as bar:
            for done, first in enumerate(starts):
                bar.update(done, len(starts))
                piece = ids[first : first + size]
                if opened.tokenizer.add_bos and opened.tokenizer.bos_id is not None:
                    piece[0] = opened.tokenizer.bos_id  # a model trained with BOS expects it at position 0
                # position p of the window is predicted from p tokens
                logprobs += [s.logprob for s in score(opened.session, piece, max(size // 2, 1), 0)]
    found = perplexity(logprobs)
    if as_json:
        click.echo(json.dumps({**found, "windows": len(starts), "window": size}))
        return
    click.echo(f"{found['perplexity']:.4f} ± {found['error']:.4f}  ({found['tokens']:,} tokens, {len(starts)} windows)")


def perplexity(logprobs: list[float]) -> dict[str, float]:
    """exp of the mean negative log-probability, and its standard error by the delta method (0 for a single token)."""
    n = len(logprobs)
    mean = -math.fsum(logprobs) / n
    variance = math.fsum((-value - mean) ** 2 for value in logprobs) / (n - 1) if n > 1 else 0.0
    value = math.exp(mean)
    return {"perplexity": value, "error": value * math.sqrt(variance / n), "mean_nll": mean, "tokens": n}
