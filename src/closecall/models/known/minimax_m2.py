"""MiniMaxAI/MiniMax-M2."""

from __future__ import annotations

from ..entry import MODELING, Entry

ENTRY = Entry(
    name="minimax-m2", hub_id="MiniMaxAI/MiniMax-M2", model_type="minimax_m2",
    layers=62, full_layers=62, q_heads=48, kv_heads=8, head_dim=128, qk_norm=True, trained_context=196_608,
    quirks=(
        "QK-Norm over all heads together, not per head as in the paper's Qwen3.6: the reversal may be weaker",
        "rotary embedding on 64 of 128 dims",
        "weights are stored in fp8 (230B parameters); config.json names remote code, but transformers has its own",
        "thinks between <think> tags in every turn",
    ),
    sources=("config.json (MiniMaxAI/MiniMax-M2)", MODELING),
    unverified=("that thinking cannot be turned off in the template",),
)  # fmt: skip
