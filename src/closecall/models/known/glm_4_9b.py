"""zai-org/GLM-4-9B-0414."""

from __future__ import annotations

from ..entry import MODELING, Entry

ENTRY = Entry(
    name="glm-4-9b", hub_id="zai-org/GLM-4-9B-0414", model_type="glm4",
    layers=40, full_layers=40, q_heads=32, kv_heads=2, head_dim=128, qk_norm=False, trained_context=32_768,
    quirks=(
        "16 query heads share a kv head: the most of the panel",
        "rotary embedding on half of each head's dims, interleaved",
        "prompts start with [gMASK]<sop>, which template and tokenizer both may add: use the template's text with "
        "add_special_tokens=False",
    ),
    sources=("config.json of a fine-tune (Glm4ForCausalLM)", "Xinference model list: context", MODELING),
    unverified=("the hub id after THUDM became zai-org", "the [gMASK]<sop> prefix"),
)  # fmt: skip
