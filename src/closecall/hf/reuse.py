"""Summaries of an attached layer's keys that outlive a call, and how it is known whose they are.

transformers does not tell an attention function which cache its keys come from, nor whether anybody changed them since.
So the cache is looked at before the layer adds to it: only if it still holds the very tensor that it held after the
layer's last call, not written to since, or a view of that tensor's first keys (the cache was cropped), are the earlier
keys known to be the same. Everything else starts over. Never wrong goes before fast.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from ..summaries import Summaries


def _appending_layer(cache: Any, index: Any) -> Any:
    """The cache's layer `index` if it puts new keys behind the earlier ones, as transformers' own do; else None."""
    from transformers.cache_utils import Cache, DynamicLayer

    if not isinstance(cache, Cache) or getattr(cache.update, "__func__", None) is not Cache.update:
        return None
    if getattr(cache, "offloading", False) or not isinstance(index, int) or not 0 <= index < len(cache.layers):
        return None
    layer: Any = cache.layers[index]
    update = getattr(layer, "update", None)  # linear attention has none
    return layer if getattr(update, "__func__", None) is DynamicLayer.update else None


class Reuse:
    """One attached layer's summaries, and the tensor of keys that they belong to."""

    def __init__(self) -> None:
        self.summaries = Summaries()
        self._keys: weakref.ref[Tensor] | None = None  # what the cache held after the last call,
        self._version = 0  # and how often it had been written to
        self._cache: weakref.ref[Any] | None = None  # of the call under way,
        self._earlier: int | None = None  # and how many keys it began with, all of them known
        self._thread: int | None = None  # whose call that is: another thread's call meanwhile goes without
        self._lock = threading.Lock()  # of `_thread`

    def __reduce__(self) -> tuple[type[Reuse], tuple[()]]:
        return Reuse, ()  # a copied model has not been called yet

    def drop(self) -> None:
        self.summaries.reset()
        self._keys = self._cache = None

    def give_up(self) -> None:
        """For a call that reads the keys in another way."""
        if self._thread == threading.get_ident():
            self.drop()
            self.done()

    def done(self) -> None:
        """After the call under way, with its summaries."""
        if self._thread == threading.get_ident():
            self._thread = None

    def _mine(self) -> bool:
        """Whether the call under way is this thread's. A call that never came to its end leaves its thread here."""
        me = threading.current_thread().ident  # so that `enumerate` knows a thread that Python did not start
        with self._lock:
            if self._thread != me and self._thread not in {thread.ident for thread in threading.enumerate()}:
                self._thread = me
            return self._thread == me

    def look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the layer adds to the cache. A forward pre-hook."""
        if torch.compiler.is_compiling() or not self._mine():
            return
        cache = kwargs.get("past_key_values")
        layer = _appending_layer(cache, getattr(module, "layer_idx", None))
        self._cache = None if cache is None else weakref.ref(cache)
        self._earlier = None if layer is None else self._known(getattr(layer, "keys", None))

    def _known(self, now: Any) -> int | None:
        """How many keys `now` holds, if they are the first ones of the last call's, unchanged."""
        last = None if self._keys is None else self._keys()
        if last is None or not isinstance(now, Tensor) or now.is_inference() or now._version != self._version:
            return None
        if now is last:
            return last.shape[2]
        same_place = now._base is last and now.data_ptr() == last.data_ptr() and now.stride() == last.stride()
        same_shape = now.shape[:2] + now.shape[3:] == last.shape[:2] + last.shape[3:]
        return now.shape[2] if same_place and same_shape and now.shape[2] <= last.shape[2] else None

    def take(self, index: Any, rows: int, keys: Tensor) -> Summaries | None:
        """For the call under way, whose keys the cache now holds: summaries to use and add to, until `done`."""
        if not self._mine():
            return None
        cache, earlier = None if self._cache is None else self._cache(), self._earlier
        self._cache = self._earlier = None
        layer = _appending_layer(cache, index)
        self._keys = None
        if layer is None or layer.keys is not keys or keys.shape[0] != 1 or keys.is_inference():
            self.summaries.reset()
            return None
        self._keys, self._version = weakref.ref(keys), keys._version
        if earlier is not None and earlier == keys.shape[2] - rows:
            self.summaries.crop(earlier)
            self.summaries.begin()
        else:
            self.summaries.reset()
        return self.summaries
