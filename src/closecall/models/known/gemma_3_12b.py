"""google/gemma-3-12b-it."""

from __future__ import annotations

from ..entry import MODELING, Entry

ENTRY = Entry(
    name="gemma-3-12b", hub_id="google/gemma-3-12b-it", model_type="gemma3",
    layers=48, full_layers=8, q_heads=16, kv_heads=8, head_dim=256, qk_norm=True, trained_context=131_072,
    kinds=("full", "sliding"), window=1024,
    quirks=(
        "5 of 6 layers see a window of 1,024 keys and keep it, so sparse prefill can only save on 8 layers",
        "gated: accept the licence on the hub and run `hf auth login`",
        "loads with its vision tower; text alone never runs it",
        "softcap is in the code but off in this model (attn_logit_softcapping null)",
        "the template starts with the begin token: tokenise its text with add_special_tokens=False",
    ),
    sources=(
        "config.json of a fine-tune (cjvt/GaMS3-12B-Instruct-Lex)",
        "MaxText gemma3-12b.yml: heads",
        MODELING,
    ),
    unverified=("the template's begin token and its folding of the system turn into the first user turn",),
)  # fmt: skip
