"""`m40llm generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from m40llm.cli.model_arg import model_argument
from m40llm.cli.options import json_flag, runtime_from, runtime_options, sampling_from, sampling_options

if TYPE_CHECKING:
    from m40llm.engine import Engine
    from m40llm.generation import Generation, GenerationResult


@click.command(
    name="generate",
    epilog="""\b
Examples:
  m40llm generate smollm2 "What is the capital of France?"
  m40llm generate smollm2 "Once upon a time" --raw --max-tokens 100 --seed 7
  m40llm generate qwen2.5-coder-1.5b - --system "Answer in one line." < question.txt
  m40llm generate ./model.gguf "2+2=" --greedy --json | jq -r .text

An instruct model gets the prompt through its chat template, as the user's first message; --raw continues the text as
it stands, which is also what happens to models without a template.""",
)
@model_argument
@click.argument("prompt")
@click.option("--system", help="System message for the chat template.")
@click.option("--raw", is_flag=True, help="No chat template: continue the prompt as plain text.")
@click.option("--profile", is_flag=True, help="Count and time every group of operations; a table on stderr at the end.")
@sampling_options
@runtime_options
@json_flag
def command(model: str, prompt: str, system: str | None, raw: bool, profile: bool, as_json: bool, **flags: Any) -> None:
    """Answer PROMPT with MODEL; PROMPT - reads stdin.

    The text is streamed to stdout; progress and a summary go to stderr.
    """
    sampling = sampling_from(flags)
    options = replace(runtime_from(flags), profile=profile)
    from m40llm.cli.lines import read_text
    from m40llm.cli.loading import CompileNotice, open_engine
    from m40llm.cli.model_arg import resolve_model
    from m40llm.cli.prompt import prompt_ids

    text = read_text("-") if prompt == "-" else prompt
    notice = CompileNotice()
    with open_engine(resolve_model(model), options, notice) as engine:
        ids = prompt_ids(engine.model.tokenizer, engine.model.chat_template, text, system=system, raw=raw)
        compiled_before = notice.kernels
        generation = engine.submit(ids, sampling)
        result = follow(generation, show=not as_json)
        if as_json:
            click.echo(json.dumps(as_object(engine, result), ensure_ascii=False))
        else:
            if not result.text.endswith("\n"):
                click.echo("")
            slow = " · slow this once: kernels were compiled meanwhile" if notice.kernels > compiled_before else ""
            print(summary(engine, result) + slow, file=sys.stderr)
        if profile and engine.model.profile is not None:
            from m40llm.cli.profile_table import profile_table

            print(profile_table(engine.model.profile), file=sys.stderr)


def follow(generation: Generation, *, show: bool) -> GenerationResult:
    """Waits for the end, with a bar during prefill, and writes the text to stdout as it comes if `show`.

    On Ctrl-C (or a closed stdout) the request is cancelled before the exception goes on.
    """
    from m40llm.cli.progress import StageBar
    from m40llm.generation import PrefillEvent

    try:
        with StageBar("reading the prompt") as bar:
            for event in generation:
                if isinstance(event, PrefillEvent):
                    if event.done < event.total:
                        bar.update(event.done, event.total)
                    continue
                bar.close()
                if show and event.text:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
    except BaseException:
        generation.cancel()
        raise
    return generation.result


def kv_mode(engine: Engine) -> str:
    """How keys and values are stored, for people and scripts."""
    return f"dense-{engine.model.session.kv_layout.dtype}"


def summary(engine: Engine, result: GenerationResult) -> str:
    """One line: tokens, speed, why it ended, device and KV mode."""
    timings = result.timings
    reused = f" ({result.cached_tokens} reused)" if result.cached_tokens else ""
    return (
        f"{result.prompt_tokens}{reused} + {result.generated_tokens} tokens · "
        f"prefill {timings.prefill_tok_s:,.0f} tok/s · decode {timings.decode_tok_s:,.1f} tok/s · "
        f"{result.finish_reason} · {engine.model.description}"
    )


def as_object(engine: Engine, result: GenerationResult) -> dict[str, Any]:
    """What --json prints. Times in seconds."""
    timings = result.timings
    profile = engine.model.profile
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": result.generated_tokens,
        "finish_reason": result.finish_reason,
        "device": engine.model.device,
        "kv_mode": kv_mode(engine),
        "seed": result.seed,
        "timings": {
            "load_s": engine.model.load_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
            "prefill_tok_s": timings.prefill_tok_s,
            "decode_tok_s": timings.decode_tok_s,
        },
        **({} if profile is None else {"profile": profile.as_dict()}),
    }
