"""`m40llm serve`: one model behind an HTTP API."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from m40llm.cli.errors import CliError
from m40llm.cli.options import option, runtime_from, runtime_options

_KV_TYPES = click.Choice(["f16", "f32"])


@click.command(
    name="serve",
    epilog="""\b
Examples:
  m40llm serve smollm2
  m40llm serve qwen2.5-coder-1.5b --slots 8 --ctx-per-slot 8192 --host 0.0.0.0 --api-key-file keys.txt
  m40llm serve -m ./model.gguf -c 8192 -np 4 --port 8000

\b
  curl http://127.0.0.1:8080/generate -d '{"prompt": "What is the capital of France?", "max_tokens": 20}'

Routes: POST /generate, the OpenAI API under /v1 (chat/completions, completions, models), /health, /metrics, /props,
/slots, /tokenize, /detokenize, /apply-template, /v1/cache/*, /admin/flush; docs/server.md describes them.
SIGTERM finishes what runs, then exits 0.""",
)
@click.argument("model", metavar="[MODEL]", required=False)
@option("--model", "-m", "model_option", metavar="MODEL", help="The model, as MODEL.")
@option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@option("--port", type=int, default=8080, show_default=True, help="Port to listen on; 0: a free one, see the log.")
@option(
    "--slots", "-np", "--parallel", type=int, help="Sequences at once (default: what memory holds, at most 4 on a CPU)."
)
@option("--ctx-per-slot", type=int, help="Context of each slot in tokens (default: the model's, ≤ 4096).")
@option(
    "--ctx-size", "-c", type=int, help="Context of all slots together; without --slots: of each, as in llama-server."
)
@option(
    "--alias",
    "-a",
    "names",
    multiple=True,
    help="Name of the model in replies (default: its alias or file name); repeatable, or with commas.",
)
@option("--api-key", "keys", multiple=True, help="A key that clients must send; repeatable, or with commas.")
@option("--api-key-file", type=click.Path(path_type=Path, dir_okay=False), help="File with one key a line.")
@option("--chat-template", help="Chat template instead of the model's: chatml, a name of the file's, or Jinja2 source.")
@option("--chat-template-file", type=click.Path(path_type=Path, dir_okay=False), help="The same, from a file.")
@option("--cors-origin", default="*", show_default=True, help='Origin that browsers may call from; "" for none.')
@option("--max-queue", type=int, default=64, show_default=True, help="Requests that may wait for a slot; more get 429.")
@option("--cache-ram-mb", type=int, default=256, show_default=True, help="RAM for KV of past prompts, in MiB; 0: none.")
@option("--cache-disk-dir", type=click.Path(path_type=Path, file_okay=False), help="Folder for it, kept over restarts.")
@option("--cache-disk-mb", type=int, default=4096, show_default=True, help="Largest size of that folder, in MiB.")
@option("--max-body-mb", type=float, default=8.0, show_default=True, help="Largest request body.")
@option(
    "--idle-timeout", type=float, default=60.0, show_default=True, help="Seconds until an unread stream is given up."
)
@option(
    "--heartbeat-seconds", type=float, default=10.0, show_default=True, help="Idle time between comments in a stream."
)
@option("--drain-seconds", type=float, default=30.0, show_default=True, help="Time for running requests at SIGTERM.")
@option("--warmup/--no-warmup", default=True, help="Run a step of each kind before the first request (default: yes).")
@option("--exit-with-parent", is_flag=True, help="Stop when the process that started this one ends.")
@option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Log on stderr.")
@option("--cache-type-k", "-ctk", "kv_k", type=_KV_TYPES, hidden=True)  # llama-server's --kv-dtype, of K and of V
@option("--cache-type-v", "-ctv", "kv_v", type=_KV_TYPES, hidden=True)
@click.option("--jinja", is_flag=True, hidden=True)  # llama-server's switches for what is always on here
@click.option("--metrics", is_flag=True, hidden=True)
@runtime_options
def command(model: str | None, model_option: str | None, **flags: Any) -> None:
    """Serve MODEL over HTTP: POST /generate and the OpenAI API.

    Logs go to stderr. The address answers at once; GET /health is 503 until the model is loaded.
    """
    spec = model or model_option
    if spec is None:
        raise click.UsageError("name a model: m40llm serve MODEL (or -m MODEL)", click.get_current_context())
    if model and model_option and model != model_option:
        raise click.UsageError(f"two models, {model} and {model_option}; name one", click.get_current_context())
    keys = _keys(flags.pop("keys"), flags.pop("api_key_file"))
    _resolve_context(flags)
    _resolve_kv(flags)
    from m40llm.cli.model_arg import resolve_model
    from m40llm.config import ConfigError
    from m40llm.hub import registry
    from m40llm.server.settings import ServerOptions

    slots = flags.pop("slots")
    template = _template(flags.pop("chat_template"), flags.pop("chat_template_file"))
    runtime = runtime_from(flags)
    path = resolve_model(spec)
    try:
        cache = {name: flags[name] for name in ("cache_ram_mb", "cache_disk_dir", "cache_disk_mb")}
        runtime = replace(runtime, chat_template=template, **cache)
        options = ServerOptions(
            model_path=path,
            runtime=runtime,
            slots=slots,
            host=flags["host"],
            port=flags["port"],
            names=_split(flags["names"]) or ((spec,) if spec in registry() else ()),
            api_keys=keys,
            cors_origin=flags["cors_origin"],
            max_queue=flags["max_queue"],
            max_body_bytes=int(flags["max_body_mb"] * (1 << 20)),
            idle_timeout=flags["idle_timeout"],
            heartbeat=flags["heartbeat_seconds"],
            drain=flags["drain_seconds"],
            warm_up=flags["warmup"],
            exit_with_parent=flags["exit_with_parent"],
            log_format=flags["log_format"],
        )
    except ConfigError as err:
        raise click.UsageError(str(err), click.get_current_context()) from err
    from m40llm.server.lifecycle import run_server

    run_server(options)


def _resolve_context(flags: dict[str, Any]) -> None:
    """Three ways to say the size of a slot's context become `ctx`."""
    per_slot, total = flags.pop("ctx_per_slot"), flags.pop("ctx_size")
    if total is not None and total > 0:  # 0 is llama-server's "as the model says"
        total = total // (flags["slots"] or 1)
    given = {value for value in (per_slot, total or None, flags["ctx"]) if value is not None}
    if len(given) > 1:
        raise click.UsageError(
            "--ctx-per-slot, --ctx-size and --ctx contradict each other; give one", click.get_current_context()
        )
    flags["ctx"] = next(iter(given), None)


def _resolve_kv(flags: dict[str, Any]) -> None:
    """llama-server's types of K and V become `kv_dtype`, which is one for both."""
    given = {value for value in (flags.pop("kv_k"), flags.pop("kv_v")) if value is not None}
    if len(given) > 1:
        raise click.UsageError("K and V have one type here; give --kv-dtype", click.get_current_context())
    flags["kv_dtype"] = next(iter(given), flags["kv_dtype"])


def _template(given: str | None, file: Path | None) -> str | None:
    if given and file:
        raise click.UsageError("--chat-template and --chat-template-file: give one", click.get_current_context())
    return file.read_text(encoding="utf-8") if file else given


def _split(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def _keys(given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    keys = list(_split(given))
    if given and not keys:
        raise click.UsageError("--api-key is empty", click.get_current_context())
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        keys += [line for line in lines if line]
        if not any(lines):
            raise CliError(f"{file}: holds no key; write one a line, or leave --api-key-file out")
    return tuple(keys)
