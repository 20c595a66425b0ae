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
    """Returns the model type of the text part, for a model that also takes images."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = f"{model_type}_text"
    return text if text in CONFIG_MAPPING else model_type


def _config(shape: Shape, **changes: Any) -> Any:
    from transformers import AutoConfig

    model_type = _text_type(entry(shape).model_type)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }
    if shape.intermediate:
        settings["intermediate_size"] = shape.intermediate
    if model_type == "mistral":
        settings["sliding_window"] = None  # the class's default is of an older model
    if shape.mixed:
        settings["layer_types"] = ["full_attention"]
    return AutoConfig.for_model(model_type, **(settings | changes))


def mixed_widths(shape: Shape) -> tuple[int, int, int]:
    """Returns the number and width of a layer's experts, and how many a token passes, the shared one included."""
    config = _config(shape)
    return int(config.num_experts), int(config.moe_intermediate_size), int(config.num_experts_per_tok) + 1


def _build(config: Any, context: int, dtype: str, place: torch.device) -> Any:
    from transformers import AutoModel

    config.max_position_embeddings = max(context, config.max_position_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModel.from_config(config, dtype=DTYPES[dtype])  # type: ignore[no-untyped-call]
    return model.to(place).eval().requires_grad_(False)


def whole(shape: Shape, context: int, dtype: str, place: torch.device) -> Any:
    """A model of one full-attention layer, nothing left out but the vocabulary."""
    return _build(_config(shape), context, dtype, place)


def linear(shape: Shape, context: int, dtype: str, place: torch.device) -> Any:
    """A model of one of a hybrid's other layers."""
    return _build(_config(shape, layer_types=["linear_attention"]), context, dtype, place)


def attention_only(shape: Shape, q_heads: int, kv_heads: int, context: int, dtype: str, place: torch.device) -> Any:
    """A layer of so many heads of the true head dim. What it does outside attention is narrow, and does not count."""
    hidden = NARROW * q_heads
    changes: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    changes["initializer_range"] = hidden**-0.5  # queries and keys then are standard normal numbers too
    if shape.mixed:
        changes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        changes |= {"shared_expert_intermediate_size": 16}
    else:
        changes["intermediate_size"] = 16
    return _build(_config(shape, **changes), context, dtype, place)


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
