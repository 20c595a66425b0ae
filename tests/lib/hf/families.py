"""Tiny random models of many families, and what their logits may be off by.

Every model has a few layers of a few heads of 16 or 32 dimensions, and weights scaled up until attention is far from
uniform: with the usual initialisation all keys weigh nearly the same, and a lost softcap or a wrong scale would hide in
the rounding.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

VOCAB = 96
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# All experts are used: which ones a router picks would turn rounding into a jump.
MOE: dict[str, Any] = {
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
WINDOW = 24
SLIDING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

# Name: (config class, what differs from BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", MOE),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "qwen3_next": ("Qwen3NextConfig", MOE | DELTA),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", MOE | DELTA),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", MOE),
    "ministral": ("MinistralConfig", SLIDING),
    "ministral3": ("Ministral3Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", SLIDING | {"attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3TextConfig", SLIDING | {"query_pre_attn_scalar": 24}),
    "gemma4": (
        "Gemma4TextConfig",
        SLIDING | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 32},
    ),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "glm": ("GlmConfig", {}),
    "glm4": ("Glm4Config", {}),
    "glm4_moe": ("Glm4MoeConfig", MOE | {"n_routed_experts": 2, "n_group": 1, "topk_group": 1}),
    "minimax": (
        "MiniMaxConfig",
        # transformers sizes MiniMax's masks by its first layer: a linear one makes its own eager attention fail.
        MOE | {"layer_types": ["full_attention", "linear_attention", "full_attention"], "block_size": 32},
    ),
    "gpt_oss": ("GptOssConfig", SLIDING | MOE),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", SLIDING),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2}),
    "granite_swa": ("GraniteSWAConfig", SLIDING),
    "smollm3": ("SmolLM3Config", {}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", SLIDING),
    "deepseek_v3": (
        "DeepseekV3Config",
        MOE
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "n_routed_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "exaone4": ("Exaone4Config", SLIDING | {"sliding_window_pattern": 2}),
    "ernie4_5": ("Ernie4_5Config", {}),
    "helium": ("HeliumConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "seed_oss": ("SeedOssConfig", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "full_attention"]}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "gpt2": ("GPT2Config", {}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "persimmon": ("PersimmonConfig", {}),
    "jetmoe": ("JetMoeConfig", {"num_key_value_heads": 4, "kv_channels": 16, "num_experts_per_tok": 1}),
    "jamba": (
        "JambaConfig",
        MOE
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
        | {"use_mamba_kernels": False},
    ),
    "arcee": ("ArceeConfig", {}),
    "hunyuan": ("HunYuanDenseV1Config", {}),
    "apertus": ("ApertusConfig", {}),
    "llama4": (
        "Llama4TextConfig",
        MOE
        | {
            "layer_types": ["chunked_attention", "full_attention", "full_attention"],
            "attention_chunk_size": 32,
            "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 0, 0],
        },
    ),
}


def config(name: str, **changes: Any) -> Any:
    kind, differs = FAMILIES[name]
    return getattr(transformers, kind)(**BASE | differs | changes)


def build(settings: Any, seed: int = 0) -> Any:
    """A model in evaluation mode whose attention matters."""
    torch.manual_seed(seed)
    settings._experts_implementation = "eager"  # the others have no float64
    return rescale(transformers.AutoModelForCausalLM.from_config(settings))


def rescale(model: Any) -> Any:
    """Draws all weights again, larger; ready for inference."""
    model.eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:  # projections and embeddings: unit-sized outputs for unit-sized inputs
            fan_in = weight.shape[-1] if "embed" not in name else 1
            torch.nn.init.normal_(weight, std=fan_in**-0.5)
        elif "norm" not in name:  # biases, sinks
            torch.nn.init.normal_(weight, std=0.5)
        if any(part in name for part in ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")):
            weight.mul_(3.0)
    return model


@functools.cache
def model(name: str) -> Any:
    """One model per family for the whole session: tests leave it as they found it."""
    return build(config(name))


@functools.cache
def eager(name: str) -> Any:
    """The same model with its own eager attention."""
    return as_eager(model(name))


@functools.cache
def exact(name: str) -> Any:
    """The same model with its own eager attention in float64. Run it under `Float64`."""
    return as_eager(model(name)).double()


class Float64(TorchFunctionMode):
    """Models ask for float32 in norms, softmax and routers, whatever their own type; here they get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every step of a model comes by here: nothing is called that need not be.
        func = Tensor.double if func is Tensor.float else func
        given = [torch.float64 if x is torch.float32 else x for x in args]
        if not kwargs:
            return func(*given)
        return func(*given, **{key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()})


def as_eager(original: Any) -> Any:
    copied = copy.deepcopy(original)
    copied.set_attn_implementation("eager")
    return copied


@functools.cache
def expected(name: str, call: Callable[[Any, Tensor], Tensor], length: int) -> tuple[Tensor, Tensor]:
    """What the model's own attention gives, in its own precision and in float64."""
    x = tokens(2, length)
    with torch.no_grad():
        rounded = call(eager(name), x)
        with Float64():
            return rounded, call(exact(name), x)


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, rounded: Tensor, wanted: Tensor) -> None:
    """`got` is no further from `wanted`, computed in float64, than rounding alone explains.

    `rounded` is the same computation by another route in the precision of `got`: how far it is off is what this model
    makes of that precision's rounding. Two routes round differently, hence the factor; both may be nearly exact by
    luck, hence a few units in the last place of the largest value.
    """
    assert bool(got.isfinite().all())
    got, rounded, wanted = got.double(), rounded.double(), wanted.double()
    eps = torch.finfo(torch.float32).eps
    allowed = 4 * float((rounded - wanted).abs().max()) + 16 * eps * float(wanted.abs().max())
    off = float((got - wanted).abs().max())
    assert off <= allowed, f"logits are off by {off:.3g}, rounding explains {allowed:.3g}"
