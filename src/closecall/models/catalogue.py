"""The panel: models we know, what is special about each, and the policy we recommend for it.

A fact is listed under `unverified` when we could not check it against a published configuration, model card, or
transformers' own source.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ..policy import Policy, policy
from ..registry import unknown
from .smollm2 import LABEL

KINDS = ("full", "sliding", "linear", "softcap", "sinks")
Options = tuple[tuple[str, Any], ...]  # keyword arguments, hashable

# The paper's reversal (its section "Quality at 32K context"): Quest's K-max wins without QK-Norm, the K-mean with it.
WITHOUT_QK_NORM = "router-on-quest"
WITH_QK_NORM = "router"

PAPER = "the paper, section Setup (Models)"
SOURCE = "transformers 5.22, modeling source: QK-Norm, layer kinds"


@dataclass(frozen=True)
class Entry:
    """One model. Heads and head dim are those of its full-attention layers, the ones that go sparse."""

    name: str
    hub_id: str
    model_type: str
    layers: int
    full_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    trained_context: int
    kinds: tuple[str, ...] = ("full",)
    window: int | None = None
    in_paper: bool = False
    tokenizer_options: Options = ()
    template_options: Options = ()
    choice_prefill: str = ""
    overrides: Options = ()
    quirks: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("attention kind", kind, KINDS)
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.q_heads} query heads do not share {self.kv_heads} kv heads evenly")
        if not 0 < self.full_layers <= self.layers:
            raise ValueError(f"{self.name}: {self.full_layers} of {self.layers} layers cannot be full attention")

    @property
    def preset(self) -> str:
        return WITH_QK_NORM if self.qk_norm else WITHOUT_QK_NORM

    @property
    def evidence(self) -> str:
        """How we come to the recommendation."""
        if self.in_paper:
            return "measured in the paper on this model"
        norm = "has QK-Norm" if self.qk_norm else "has no QK-Norm"
        return f"inferred: it {norm}, and the paper's reversal goes by that; not measured on this model"

    def policy(self) -> Policy:
        """The recommended policy."""
        return policy(self.preset, **dict(self.overrides))

    def to_dict(self) -> dict[str, Any]:
        options = ("tokenizer_options", "template_options", "overrides")
        return (
            dataclasses.asdict(self)
            | {field: dict(getattr(self, field)) for field in options}
            | {"recommended": self.preset, "evidence": self.evidence, "policy": json.loads(self.policy().to_json())}
        )


PANEL: tuple[Entry, ...] = (
    Entry(
        name="qwen2.5-14b",
        hub_id="Qwen/Qwen2.5-14B-Instruct",
        model_type="qwen2",
        layers=48,
        full_layers=48,
        q_heads=40,
        kv_heads=8,
        head_dim=128,
        qk_norm=False,
        trained_context=32_768,
        in_paper=True,
        quirks=("the paper's headline model; its window rules out contexts past 32K without YaRN",),
        sources=(PAPER, "config.json (copy in jebish7/Qwen2.5-14B-Instruct)", SOURCE),
    ),
    Entry(
        name="qwen2.5-7b-1m",
        hub_id="Qwen/Qwen2.5-7B-Instruct-1M",
        model_type="qwen2",
        layers=28,
        full_layers=28,
        q_heads=28,
        kv_heads=4,
        head_dim=128,
        qk_norm=False,
        trained_context=262_144,
        in_paper=True,
        quirks=(
            "config.json claims 1,010,000 positions (the paper says trained at 1M), but past 262,144 it counts on dual "
            "chunk attention (dual_chunk_attention_config), which transformers does not implement",
        ),
        sources=(PAPER, "config.json (copy in AIFunOver/Qwen2.5-7B-Instruct-1M-openvino-8bit)", SOURCE),
    ),
    Entry(
        name="mistral-nemo",
        hub_id="mistralai/Mistral-Nemo-Instruct-2407",
        model_type="mistral",
        layers=40,
        full_layers=40,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        qk_norm=False,
        trained_context=131_072,
        in_paper=True,
        tokenizer_options=(("fix_mistral_regex", True),),
        quirks=(
            "its tokenizer splits words wrongly unless loaded with fix_mistral_regex=True: load_model does so",
            "head dim 128 is not hidden size / heads (5120 / 32 = 160)",
            "some copies of config.json claim 1,024,000 positions; it was trained at 128K",
        ),
        sources=(PAPER, "config.json (copies in riple-saanvi-lab/Saanvi-C0-12B, yuyouyu/Mistral-Nemo-BD-RP)", SOURCE),
    ),
    Entry(
        name="qwen3.6-35b",
        hub_id="Qwen/Qwen3.6-35B-A3B",
        model_type="qwen3_5_moe",
        layers=40,
        full_layers=10,
        q_heads=16,
        kv_heads=2,
        head_dim=256,
        qk_norm=True,
        trained_context=262_144,
        kinds=("full", "linear"),
        in_paper=True,
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
        sources=(PAPER, "model card (copy at mera.a-ai.ru/en/industrial/submits/181)", SOURCE),
        unverified=("model_type qwen3_5_moe: from its layout, config.json not seen",),
    ),
    Entry(
        name="llama-3.1-8b",
        hub_id="meta-llama/Llama-3.1-8B-Instruct",
        model_type="llama",
        layers=32,
        full_layers=32,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        qk_norm=False,
        trained_context=131_072,
        quirks=(
            "gated: accept the licence on the hub and run `hf auth login`",
            'the template writes "Today Date: 26 Jul 2024" unless given date_string',
            "no pad token: load_model pads with the end-of-sequence token",
        ),
        sources=("config.json (copy in NaniDAO/Meta-Llama-3.1-8B-Instruct-ablated)", "sgl-project/sglang#3296", SOURCE),
    ),
    Entry(
        name="gemma-3-12b",
        hub_id="google/gemma-3-12b-it",
        model_type="gemma3",
        layers=48,
        full_layers=8,
        q_heads=16,
        kv_heads=8,
        head_dim=256,
        qk_norm=True,
        trained_context=131_072,
        kinds=("full", "sliding"),
        window=1024,
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
            SOURCE,
        ),
        unverified=("the template's begin token and its folding of the system turn into the first user turn",),
    ),
    Entry(
        name="qwen3-8b",
        hub_id="Qwen/Qwen3-8B",
        model_type="qwen3",
        layers=36,
        full_layers=36,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        qk_norm=True,
        trained_context=32_768,
        template_options=(("enable_thinking", False),),
        quirks=(
            "thinks by default: enable_thinking=False turns it off",
            "config.json says 40,960 positions: 32,768 of context and room for the answer; 131,072 with YaRN",
        ),
        sources=("config.json (copy in thejaminator/qwen-hook-layer-9)", "model card of Qwen3", SOURCE),
    ),
    Entry(
        name="minimax-m2",
        hub_id="MiniMaxAI/MiniMax-M2",
        model_type="minimax_m2",
        layers=62,
        full_layers=62,
        q_heads=48,
        kv_heads=8,
        head_dim=128,
        qk_norm=True,
        trained_context=196_608,
        quirks=(
            "QK-Norm over all heads together, not per head as in the paper's Qwen3.6: the reversal may be weaker",
            "rotary embedding on 64 of 128 dims",
            "weights are stored in fp8 (230B parameters); config.json names remote code, but transformers has its own",
            "thinks between <think> tags in every turn",
        ),
        sources=("config.json (MiniMaxAI/MiniMax-M2)", SOURCE),
        unverified=("that thinking cannot be turned off in the template",),
    ),
    Entry(
        name="minimax-text-01",
        hub_id="MiniMaxAI/MiniMax-Text-01-hf",
        model_type="minimax",
        layers=80,
        full_layers=10,
        q_heads=64,
        kv_heads=8,
        head_dim=128,
        qk_norm=False,
        trained_context=1_000_000,
        kinds=("full", "linear"),
        quirks=(
            "7 of 8 layers are linear (lightning) attention; attaching leaves them alone",
            "rotary embedding on half of each head's dims",
            "config.json claims 10,240,000 positions; trained at 1M, extrapolated to 4M",
        ),
        sources=("config.json and model card (MiniMaxAI/MiniMax-Text-01)", SOURCE),
        unverified=("8 kv heads: from the published group size of 8", "that the -hf copy equals the original"),
    ),
    Entry(
        name="gpt-oss-20b",
        hub_id="openai/gpt-oss-20b",
        model_type="gpt_oss",
        layers=24,
        full_layers=12,
        q_heads=64,
        kv_heads=8,
        head_dim=64,
        qk_norm=False,
        trained_context=131_072,
        kinds=("full", "sliding", "sinks"),
        window=128,
        quirks=(
            "every other layer sees a window of 128 keys and keeps it",
            "a learned sink per head takes part in every softmax; SDPA cannot do that, so attention loads as eager",
            "YaRN from 4,096 to 131,072 positions; experts are stored in mxfp4",
            "answers in the harmony format: the answer is what follows the `final` channel",
            "the template writes today's date: the same question gives another prompt tomorrow",
        ),
        sources=("config.json (copy in EchoCog/gpt-oss-20b, docs)", "openai-harmony, format documentation", SOURCE),
        unverified=("that the hub template takes the date from the clock",),
    ),
    Entry(
        name="glm-4-9b",
        hub_id="zai-org/GLM-4-9B-0414",
        model_type="glm4",
        layers=40,
        full_layers=40,
        q_heads=32,
        kv_heads=2,
        head_dim=128,
        qk_norm=False,
        trained_context=32_768,
        quirks=(
            "16 query heads share a kv head: the most of the panel",
            "rotary embedding on half of each head's dims, interleaved",
            "prompts start with [gMASK]<sop>, which template and tokenizer both may add: use the template's text with "
            "add_special_tokens=False",
        ),
        sources=("config.json of a fine-tune (Glm4ForCausalLM)", "Xinference model list: context", SOURCE),
        unverified=("the hub id after THUDM became zai-org", "the [gMASK]<sop> prefix"),
    ),
    Entry(
        name="smollm2",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        model_type="llama",
        layers=30,
        full_layers=30,
        q_heads=9,
        kv_heads=3,
        head_dim=64,
        qk_norm=False,
        trained_context=8_192,
        overrides=(("budget", 8),),  # 33 blocks, 66 to a tile, would be half of all its context holds
        quirks=(
            f"here it is {LABEL}: `closecall get smollm2` fetches it; its hub id gives the original weights",
            "the template adds a system turn of its own when there is none",
            "the end-of-turn token is the pad token as well",
        ),
        sources=("config.json (HuggingFaceTB/SmolLM2-135M-Instruct)", "the GGUF file itself", SOURCE),
    ),
)


def names() -> tuple[str, ...]:
    return tuple(entry.name for entry in PANEL)


def find(name: str) -> Entry | None:
    """The entry of that panel name or hub id, if there is one. Case does not matter."""
    wanted = name.lower()
    return next((e for e in PANEL if wanted in (e.name, e.hub_id.lower())), None)


def get(name: str) -> Entry:
    found = find(name)
    if found is None:
        raise unknown("model", name, names())
    return found
