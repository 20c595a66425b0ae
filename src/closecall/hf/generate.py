"""What `generate` knows and a layer does not: how long a prompt is that comes in chunks (`prefill_chunk_size`).

transformers cuts the prompt in a method of the model, `_prefill`, and calls the model for each chunk without a word
about the others. An attached model has that method of its own, which notes the prompt's length around the original. A
model without such a method runs as before: each chunk then counts as a prompt's end.
"""

from __future__ import annotations

import threading
import types
from typing import Any

from .forward import STATE, Settings

METHOD = "_prefill"


def _settings(model: Any) -> Settings | None:
    states = (module.__dict__.get(STATE) for module in model.modules())
    return next((state.settings for state in states if state is not None), None)


def _prefill(self: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], **options: Any) -> Any:
    original = getattr(type(self), METHOD)
    settings = _settings(self)
    if settings is None or generation_config.prefill_chunk_size is None or settings.prompt_len_here() is not None:
        return original(self, input_ids, generation_config, model_kwargs, **options)
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
    if mask is not None:  # of everything, what is cached already included
        length = int(mask.shape[1])
    else:
        length = int(input_ids.shape[1]) + (0 if cache is None else int(cache.get_seq_length()))
    me = threading.get_ident()
    settings.generating[me] = length
    try:
        return original(self, input_ids, generation_config, model_kwargs, **options)
    finally:
        del settings.generating[me]


def see_generate(model: Any) -> None:
    """From now on the model's layers know how long a prompt is that `generate` cuts into chunks."""
    if callable(getattr(type(model), METHOD, None)):
        object.__setattr__(model, METHOD, types.MethodType(_prefill, model))  # bound, so that a copy has its own


def see_generate_no_more(model: Any) -> None:
    model.__dict__.pop(METHOD, None)
