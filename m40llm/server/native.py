"""Routes that describe the server and its text: health, models, props, slots, metrics, tokens. Names are llama-server's."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from aiohttp import web

from m40llm.config import SamplingParams
from m40llm.server import messages
from m40llm.server.errors import ApiError
from m40llm.server.schema import DetokenizeBody, TemplateBody, TokenizeBody, read_body
from m40llm.server.state import state_of


async def health(request: web.Request) -> web.Response:
    """200 {"status": "ok"} once requests are taken; 503 before, and at shutdown."""
    state = state_of(request)
    if state.engine is None and not state.draining:
        return web.json_response({"status": "loading model"}, status=503)
    state.ready()
    return web.json_response({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    found = state_of(request).metrics
    return web.Response(body=found.render(), headers={"Content-Type": found.content_type})


async def models(request: web.Request) -> web.Response:
    """OpenAI's list, of the one model that is loaded."""
    return web.json_response({"object": "list", "data": [_model(request)]})


async def model(request: web.Request) -> web.Response:
    """OpenAI's description of one model."""
    found = _model(request)
    name = request.match_info["model"]
    if name not in (found["id"], found["meta"]["name"], *state_of(request).options.names):
        raise ApiError(404, f"no model {name!r:.80} here; this server runs {found['id']}", code="model_not_found")
    return web.json_response(found)


def _model(request: web.Request) -> dict[str, Any]:
    state = state_of(request)
    engine = state.ready()
    config = engine.model.config
    return {
        "id": state.model_id,
        "object": "model",
        "created": int(state.options.model_path.stat().st_mtime) if state.options.model_path.exists() else 0,
        "owned_by": "m40llm",
        "meta": {
            "name": config.name,
            "architecture": config.arch,
            "n_vocab": config.vocab_size,
            "n_ctx": engine.context,
            "n_ctx_train": config.context_length,
            "n_embd": config.d_model,
        },
    }


async def props(request: web.Request) -> web.Response:
    """What the server runs, and with which defaults."""
    state = state_of(request)
    engine = state.ready()
    loaded = engine.model
    tokenizer = loaded.tokenizer
    defaults = SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
    params = {name: getattr(defaults, name) for name in (*names, "presence_penalty", "frequency_penalty")}
    return web.json_response(
        {
            "default_generation_settings": {"n_ctx": engine.context, "params": params},
            "total_slots": loaded.session.kv_layout.n_slots,
            "model_alias": state.model_id,
            "model_path": str(state.options.model_path),
            "modalities": {"vision": False, "audio": False},
            "chat_template": loaded.chat_template.source if loaded.chat_template else "",
            "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
            "eos_token": "" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
            "build_info": f"m40llm {version('m40llm')}",
            "device": loaded.device,
            "description": loaded.description,
        }
    )


async def slots(request: web.Request) -> web.Response:
    """What each slot does now."""
    engine = state_of(request).ready()
    return web.json_response(
        [
            {
                "id": slot.slot,
                "n_ctx": engine.context,
                "is_processing": slot.state != "idle",
                "state": slot.state,
                "n_past": slot.tokens,
                "n_prompt_tokens": slot.prompt_tokens,
                "n_decoded": slot.generated_tokens,
                "priority": "background" if slot.background else "interactive",
            }
            for slot in engine.stats().slots
        ]
    )


async def tokenize(request: web.Request) -> web.Response:
    """{content, add_special, parse_special, with_pieces} → {"tokens": […]}."""
    state = state_of(request)
    tokenizer = state.ready().model.tokenizer
    body = await read_body(request, TokenizeBody)
    bos = body.add_special and tokenizer.add_bos and tokenizer.bos_id is not None
    size = len(body.content)
    ids = await state.off_loop(size, tokenizer.encode, body.content, special=body.parse_special, bos=bos)
    if not body.with_pieces:
        return web.json_response({"tokens": ids})
    return web.json_response({"tokens": [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in ids]})


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a token that is no text by itself."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: web.Request) -> web.Response:
    """{tokens} → {"content": text}."""
    state = state_of(request)
    tokenizer = state.ready().model.tokenizer
    body = await read_body(request, DetokenizeBody)
    text = await state.off_loop(len(body.tokens), tokenizer.decode, body.tokens, special=True)
    return web.json_response({"content": text})


async def apply_template(request: web.Request) -> web.Response:
    """{messages, …} → {"prompt": text}, as a chat completion would see it."""
    state = state_of(request)
    engine = state.ready()
    body = await read_body(request, TemplateBody)
    prompt = await state.off_loop(
        request.content_length or 0,
        messages.render,
        engine.model,
        body.messages,
        form=state.markup.tools,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    return web.json_response({"prompt": prompt})
