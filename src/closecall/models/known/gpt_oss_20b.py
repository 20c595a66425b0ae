"""openai/gpt-oss-20b."""

from __future__ import annotations

from ..entry import MODELING, Entry

ENTRY = Entry(
    name="gpt-oss-20b", hub_id="openai/gpt-oss-20b", model_type="gpt_oss",
    layers=24, full_layers=12, q_heads=64, kv_heads=8, head_dim=64, qk_norm=False, trained_context=131_072,
    kinds=("full", "sliding", "sinks"), window=128,
    quirks=(
        "every other layer sees a window of 128 keys and keeps it",
        "a learned sink per head takes part in every softmax; SDPA cannot do that, so attention loads as eager",
        "YaRN from 4,096 to 131,072 positions; experts are stored in mxfp4",
        "answers in the harmony format: the answer is what follows the `final` channel",
        "the template writes today's date: the same question gives another prompt tomorrow",
    ),
    sources=("config.json (copy in EchoCog/gpt-oss-20b, docs)", "openai-harmony, format documentation", MODELING),
    unverified=("that the hub template takes the date from the clock",),
)  # fmt: skip
