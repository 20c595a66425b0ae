"""One decoder layer of a model's true dimensions, with random weights: transformers' own classes, from a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from closecall.info import DTYPES
from closecall.models.entry import Shape

from ...spine.inputs import SEED
from .shapes import entry

NARROW = 64  # hidden size, for each query head, of a layer whose attention alone is measured
VOCABULARY = 8  # inputs are embeddings, so that no token is ever looked up


def _text_type(model_type: str) -> str:
    """Of a model that also sees, the part that reads."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = f"{model_type}_text"
    return text if text in CONFIG_MAPPING else model_type


def _config(found: Shape, **changes: Any) -> Any:
    from transformers import AutoConfig

    model_type = _text_type(entry(found).model_type)
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": found.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": found.q_heads,
        "num_key_value_heads": found.kv_heads,
        "head_dim": found.head_dim,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }
    if found.intermediate:
        given["intermediate_size"] = found.intermediate
    if model_type == "mistral":
        given["sliding_window"] = None  # the class's default is of an older model
    if found.mixed:
        given["layer_types"] = ["full_attention"]
    return AutoConfig.for_model(model_type, **(given | changes))


def mixed_widths(found: Shape) -> tuple[int, int, int]:
    """Of a layer of experts: how many, the width of each, and how many a token passes, the shared one included."""
    config = _config(found)
    return int(config.num_experts), int(config.moe_intermediate_size), int(config.num_experts_per_tok) + 1


def _build(config: Any, context: int, dtype: str, place: torch.device) -> Any:
    from transformers import AutoModel

    config.max_position_embeddings = max(context, config.max_position_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModel.from_config(config, dtype=DTYPES[dtype])  # type: ignore[no-untyped-call]
    return model.to(place).eval().requires_grad_(False)


def whole(found: Shape, context: int, dtype: str, place: torch.device) -> Any:
    """A model of one full-attention layer, nothing left out but the vocabulary."""
    return _build(_config(found), context, dtype, place)


def linear(found: Shape, context: int, dtype: str, place: torch.device) -> Any:
    """A model of one of a hybrid's other layers."""
    return _build(_config(found, layer_types=["linear_attention"]), context, dtype, place)


def attention_only(found: Shape, q_heads: int, kv_heads: int, context: int, dtype: str, place: torch.device) -> Any:
    """A layer of so many heads of the true head dim. What it does outside attention is narrow, and does not count."""
    hidden = NARROW * q_heads
    changes: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    changes["initializer_range"] = hidden**-0.5  # queries and keys then are standard normal numbers too
    if found.mixed:
        changes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        changes |= {"shared_expert_intermediate_size": 16}
    else:
        changes["intermediate_size"] = 16
    return _build(_config(found, **changes), context, dtype, place)


def embeddings(model: Any, rows: int) -> Tensor:
    """A prompt of standard normal numbers."""
    generator = torch.Generator().manual_seed(SEED)
    made = torch.randn(1, rows, model.config.hidden_size, generator=generator)
    return made.to(model.dtype).to(model.device)


def prefill(model: Any, prompt: Tensor) -> Callable[[], object]:
    """The call that `generate` makes for a prompt, without the product with the vocabulary.

    transformers refuses a cache to a model that has no layer of full attention; a linear layer's state is no cost.
    """
    cached = model.config.layer_types != ["linear_attention"] if hasattr(model.config, "layer_types") else True
    return lambda: model(inputs_embeds=prompt, use_cache=cached)
