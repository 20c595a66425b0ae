"""Qwen/Qwen2.5-7B-Instruct-1M."""

from __future__ import annotations

from ..entry import MODELING, PAPER, Entry

ENTRY = Entry(
    name="qwen2.5-7b-1m", hub_id="Qwen/Qwen2.5-7B-Instruct-1M", model_type="qwen2",
    layers=28, full_layers=28, q_heads=28, kv_heads=4, head_dim=128, qk_norm=False, hidden=3584, intermediate=18_944,
    trained_context=262_144, in_paper=True,
    quirks=(
        "config.json claims 1,010,000 positions (the paper says trained at 1M), but past 262,144 it counts on dual "
        "chunk attention (dual_chunk_attention_config), which transformers does not implement",
    ),
    sources=(PAPER, "config.json (copy in AIFunOver/Qwen2.5-7B-Instruct-1M-openvino-8bit)", MODELING),
)  # fmt: skip
