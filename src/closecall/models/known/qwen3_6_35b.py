"""Qwen/Qwen3.6-35B-A3B."""

from __future__ import annotations

from ..entry import MODELING, PAPER, Entry

ENTRY = Entry(
    name="qwen3.6-35b", hub_id="Qwen/Qwen3.6-35B-A3B", model_type="qwen3_5_moe",
    layers=40, full_layers=10, q_heads=16, kv_heads=2, head_dim=256, qk_norm=True, hidden=2048, active_weights=3.0e9,
    trained_context=262_144, kinds=("full", "linear"), in_paper=True,
    template_options=(("enable_thinking", False),),
    choice_prefill="The correct answer is (",
    quirks=(
        "3 of 4 layers are linear attention (Gated DeltaNet); attaching leaves them alone",
        "rotary embedding on the first 64 of 256 dims; the output of attention is gated",
        "thinks by default: enable_thinking=False turns it off, and multiple choice starts the answer with "
        '"The correct answer is ("',
        "the paper says 128 experts and 128K context, the model card 256 experts and 262,144",
        "without flash-linear-attention and causal-conv1d its linear layers run on slow torch code",
    ),
    sources=(PAPER, "model card (copy at mera.a-ai.ru/en/industrial/submits/181)", MODELING),
    unverified=("model_type qwen3_5_moe: from its layout, config.json not seen",),
)  # fmt: skip
