"""meta-llama/Llama-3.1-8B-Instruct."""

from __future__ import annotations

from ..entry import MODELING, Entry

ENTRY = Entry(
    name="llama-3.1-8b", hub_id="meta-llama/Llama-3.1-8B-Instruct", model_type="llama",
    layers=32, full_layers=32, q_heads=32, kv_heads=8, head_dim=128, qk_norm=False, hidden=4096, intermediate=14_336,
    trained_context=131_072,
    quirks=(
        "gated: accept the licence on the hub and run `hf auth login`",
        'the template writes "Today Date: 26 Jul 2024" unless given date_string',
        "no pad token: load_model pads with the end-of-sequence token",
    ),
    sources=("config.json (copy in NaniDAO/Meta-Llama-3.1-8B-Instruct-ablated)", "sgl-project/sglang#3296", MODELING),
)  # fmt: skip
