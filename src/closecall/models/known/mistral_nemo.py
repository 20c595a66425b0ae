"""mistralai/Mistral-Nemo-Instruct-2407."""

from __future__ import annotations

from ..entry import MODELING, PAPER, Entry

ENTRY = Entry(
    name="mistral-nemo", hub_id="mistralai/Mistral-Nemo-Instruct-2407", model_type="mistral",
    layers=40, full_layers=40, q_heads=32, kv_heads=8, head_dim=128, qk_norm=False, hidden=5120, intermediate=14_336,
    trained_context=131_072, in_paper=True,
    tokenizer_options=(("fix_mistral_regex", True),),
    quirks=(
        "its tokenizer splits words wrongly unless loaded with fix_mistral_regex=True: load_model does so",
        "head dim 128 is not hidden size / heads (5120 / 32 = 160)",
        "some copies of config.json claim 1,024,000 positions; it was trained at 128K",
    ),
    sources=(PAPER, "config.json (copies in riple-saanvi-lab/Saanvi-C0-12B, yuyouyu/Mistral-Nemo-BD-RP)", MODELING),
)  # fmt: skip
