"""A way into the attention function of a model, whether closecall is attached to it or not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from closecall.hf.layers import find_layers

Function = Callable[..., Any]


def _names(module: Any) -> dict[str, Any]:
    """What a module's code sees: models may bring an attention registry and an eager function of their own."""
    names: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return names


def _wrapped(function: Function | None, watched: frozenset[int], around: Callable[[], Any]) -> Function:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = function or _names(module)["eager_attention_forward"]
        if id(module) not in watched:
            return chosen(module, *args, **kwargs)
        with around():
            return chosen(module, *args, **kwargs)

    return functools.wraps(function)(call) if function else call


@contextmanager
def around_attention(model: Any, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enters `around()` for every call of the attention function of the layers that `attach` would take over: full
    attention and no other, whether the model is attached or not.

    While the block runs, transformers' registry holds wrapped functions under the names the model uses.
    """
    full = [layer.module for layer in find_layers(model) if layer.kind == "full"]
    watched = frozenset(map(id, full))
    before: dict[tuple[int, str], tuple[Any, Function | None]] = {}
    try:
        for module in full:
            name = module.config._attn_implementation or "eager"
            registry = _names(module)["ALL_ATTENTION_FUNCTIONS"]
            if (id(registry), name) not in before:
                before[id(registry), name] = (registry, registry._local_mapping.get(name))
                registry[name] = _wrapped(registry.get(name), watched, around)
        yield
    finally:
        for (_, name), (registry, function) in before.items():
            if function is None:
                del registry[name]
            else:
                registry[name] = function
