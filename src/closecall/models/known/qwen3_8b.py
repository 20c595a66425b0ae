"""Qwen/Qwen3-8B."""

from __future__ import annotations

from ..entry import MODELING, Entry

ENTRY = Entry(
    name="qwen3-8b", hub_id="Qwen/Qwen3-8B", model_type="qwen3",
    layers=36, full_layers=36, q_heads=32, kv_heads=8, head_dim=128, qk_norm=True, trained_context=32_768,
    template_options=(("enable_thinking", False),),
    quirks=(
        "thinks by default: enable_thinking=False turns it off",
        "config.json says 40,960 positions: 32,768 of context and room for the answer; 131,072 with YaRN",
    ),
    sources=("config.json (copy in thejaminator/qwen-hook-layer-9)", "model card of Qwen3", MODELING),
)  # fmt: skip
