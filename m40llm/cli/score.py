"""`m40llm score`: log-probabilities of given tokens, for comparing a model with another implementation of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from m40llm.cli.model_arg import model_argument
from m40llm.cli.options import runtime_from, runtime_options

LOGIT_ROWS = 64  # rows of logits per step: 64 × 152k × 4 bytes is 39 MB


@click.command(
    name="score",
    epilog="""\b
Examples:
  m40llm score smollm2 --file in.jsonl --top 8 > out.jsonl
  m40llm score smollm2 --file - --kv-dtype f32 < in.jsonl

in.jsonl holds one {"ids": […], "start": P} a line. For each comes out
  {"logprobs": […], "top": [[[id, logprob], …], …]}
for every position from P on (P ≥ 1), given all ids before it; natural logarithms.""",
)
@model_argument
@click.option("--file", "path", metavar="IN.jsonl", required=True, help="JSON lines with ids and start; - is stdin.")
@click.option("--top", type=click.IntRange(0, 1000), default=8, show_default=True, help="Best tokens to list.")
@runtime_options
def command(model: str, path: str, top: int, **flags: Any) -> None:
    """Log-probabilities of token ids under MODEL; one JSON line out for each line in.

    --ctx defaults to the longest line.
    """
    options = runtime_from(flags)
    from m40llm.cli.errors import CliError
    from m40llm.cli.lines import read_objects, token_ids
    from m40llm.cli.loading import open_model
    from m40llm.cli.model_arg import resolve_model
    from m40llm.scoring import score

    requests: list[tuple[str, list[int], int]] = []
    for where, line in read_objects(path, "ids", "start"):
        if type(line["start"]) is not int:
            raise CliError(f"{where}: 'start' must be an integer")
        requests.append((where, token_ids(line["ids"], where), line["start"]))
    if not requests:
        raise CliError(f"{path}: no lines")
    if options.ctx is None:
        longest = max(len(ids) for _, ids, _ in requests)
        options = dataclasses.replace(options, ctx=max(longest, 1))
    with open_model(resolve_model(model), options, logit_rows=min(LOGIT_ROWS, options.token_budget)) as opened:
        vocab_size = opened.config.vocab_size
        for where, ids, start in requests:
            if max(ids, default=0) >= vocab_size:
                raise CliError(f"{where}: token id {max(ids)} is outside the vocabulary of {vocab_size}")
            try:
                scored = list(score(opened.session, ids, start, top))
            except ValueError as err:
                raise CliError(f"{where}: {err}") from err
            found = {"logprobs": [s.logprob for s in scored], "top": [[list(pair) for pair in s.top] for s in scored]}
            click.echo(json.dumps(found))
