"""Qwen/Qwen2.5-14B-Instruct."""

from __future__ import annotations

from ..entry import MODELING, PAPER, Entry

ENTRY = Entry(
    name="qwen2.5-14b", hub_id="Qwen/Qwen2.5-14B-Instruct", model_type="qwen2",
    layers=48, full_layers=48, q_heads=40, kv_heads=8, head_dim=128, qk_norm=False, hidden=5120, intermediate=13_824,
    trained_context=32_768, in_paper=True,
    quirks=("the paper's headline model; its window rules out contexts past 32K without YaRN",),
    sources=(PAPER, "config.json (copy in jebish7/Qwen2.5-14B-Instruct)", MODELING),
)  # fmt: skip
