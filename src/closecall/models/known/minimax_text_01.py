"""MiniMaxAI/MiniMax-Text-01-hf."""

from __future__ import annotations

from ..entry import MODELING, Entry

ENTRY = Entry(
    name="minimax-text-01", hub_id="MiniMaxAI/MiniMax-Text-01-hf", model_type="minimax",
    layers=80, full_layers=10, q_heads=64, kv_heads=8, head_dim=128, qk_norm=False, trained_context=1_000_000,
    kinds=("full", "linear"),
    quirks=(
        "7 of 8 layers are linear (lightning) attention; attaching leaves them alone",
        "rotary embedding on half of each head's dims",
        "config.json claims 10,240,000 positions; trained at 1M, extrapolated to 4M",
    ),
    sources=("config.json and model card (MiniMaxAI/MiniMax-Text-01)", MODELING),
    unverified=("8 kv heads: from the published group size of 8", "that the -hf copy equals the original"),
)  # fmt: skip
