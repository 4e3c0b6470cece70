"""The forward pass of a llama or qwen2 model over one packed step: a flat loop, one line per op."""

from __future__ import annotations

from m40llm.config import ModelConfig
from m40llm.ops.protocol import KVCache, Ops, Workspace
from m40llm.plan import StepShape
from m40llm.weights import ModelWeights


def forward(config: ModelConfig, weights: ModelWeights, ws: Workspace, kv: KVCache, shape: StepShape, ops: Ops) -> None:
    """Leaves logits (R, V) and greedy ids (R,) of the plan in `ws.plan` in the workspace, and its K and V in `kv`.

    What varies between two steps of one shape (ids, positions, slots, lengths) is read by the kernels from `ws.plan`,
    so the calls made here can be recorded once and replayed.
    """
    x = ws.x[: shape.rows]  # (T, D)
    h = ws.h[: shape.rows]  # (T, D)
    q = ws.q[: shape.rows]  # (T, H*HD)
    k = ws.k[: shape.rows]  # (T, KH*HD)
    v = ws.v[: shape.rows]  # (T, KH*HD)
    attn = ws.attn[: shape.rows]  # (T, H*HD)
    act = ws.act[: shape.rows]  # (T, F)

    ops.embed(weights.token_embd, ws.plan["token_ids"][: shape.rows], x)
    for i, w in enumerate(weights.layers):
        qkv = (w.attn_q, w.attn_k, w.attn_v)
        ops.rmsnorm(x, w.attn_norm, config.rms_eps, h, readers=qkv)
        ops.qkv(h, qkv, (w.attn_q_bias, w.attn_k_bias, w.attn_v_bias), q, k, v)
        ops.rope_append(q, k, v, weights.rope, config, kv, i, ws)
        ops.attention(q, kv, i, shape, config, ws, attn, readers=(w.attn_output,))
        ops.project(attn, w.attn_output, x, add=True)
        ops.rmsnorm(x, w.ffn_norm, config.rms_eps, h, readers=(w.ffn_gate, w.ffn_up))
        ops.gate_up_swiglu(h, w.ffn_gate, w.ffn_up, act, readers=(w.ffn_down,))
        ops.project(act, w.ffn_down, x, add=True)
    if shape.logit_rows:
        ops.logits(x, weights.output_norm, config.rms_eps, weights.output, ws, shape)
