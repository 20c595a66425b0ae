"""Splits one prefill into parts: what selection spends on what, attention, and everything else in the model.

Times are taken from outside, at the calls into transformers' registry of attention functions and into the backend. When
nothing is watched, nothing is slower.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from closecall import backends
from closecall.geometry import Geometry, plan
from closecall.hf.layers import find_layers
from closecall.policy import Policy
from closecall.ranking import Ranked
from closecall.selection import Selection
from closecall.summaries import Summaries

SELECTION = ("summaries", "ranking", "rule", "indices")
ATTENTION = (*SELECTION, "attend", "around")  # all that happens inside the attention function
PARTS = (*ATTENTION, "rest", "linear layers")
MEANINGS = {
    "summaries": "pooling the keys of each block",
    "ranking": "scores and top-k, which the kernels do in one pass",
    "rule": "margins, the trigger, and how many blocks each tile keeps",
    "indices": "writing the kept blocks' indices",
    "attend": "attention itself",
    "around": "what our function does beyond that: geometry, layout of the output, statistics",
    "rest": "projections, MLP, norms and all else in layers of full attention",
    "linear layers": "whole layers without full attention",
}
Lap = dict[str, float]  # seconds by part
Function = Callable[..., Any]


class Clock(Protocol):
    def mark(self) -> Any:
        """A moment on the device."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments; may wait for the device to get there."""


class HostClock:
    """The monotonic clock: right where a call returns when its work is done."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class StreamClock:
    """Events on the GPU's stream: the host never waits between the parts."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class Watch:
    """Moments of one prefill, by what happened between them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._ranked: Any = None
        self.attached = False  # whether our function ran, and not the model's own

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self.clock.mark()
        yield
        self.add(name, begin, self.clock.mark())

    def add(self, name: str, begin: Any, end: Any) -> None:
        self._spans.setdefault(name, []).append((begin, end))

    def seconds(self, name: str) -> float:
        return sum(self.clock.seconds(*moments) for moments in self._spans.get(name, []))

    def parts(self) -> Lap:
        """Returns the parts of the span `wall`. They add up to it, less the time spent on timing summaries."""
        extra = self.seconds("extra")
        function = self.seconds("function") - extra
        lap = dict.fromkeys(PARTS, 0.0)
        if self.attached:
            rank = self.seconds("rank")
            lap["summaries"] = min(extra, rank)
            lap["ranking"] = rank - lap["summaries"]
            for name in ("rule", "indices", "attend"):
                lap[name] = self.seconds(name)
            lap["around"] = function - sum(lap.values())
        else:
            lap["attend"] = function
        lap["rest"] = self.seconds("wall") - extra - function
        return lap


class _Watched:
    """A backend that tells the watch when it does what."""

    def __init__(self, backend: backends.Backend, watch: Watch) -> None:
        self._backend = backend
        self._watch = watch
        watch.attached = True

    def why_not(self, q: Tensor) -> str | None:
        return self._backend.why_not(q)

    def rank(
        self, q: Tensor, k: Tensor, policy: Policy, geometry: Geometry, scale: float, summaries: Summaries | None = None
    ) -> Ranked:
        with self._watch.span("rank"):
            ranked = self._backend.rank(q, k, policy, geometry, scale)  # without: a part that is timed starts afresh
        # The kernels summarise keys and rank blocks in one call. Ranking for the last tile alone summarises all keys
        # and does next to nothing else. It is done apart, and no part of the wall.
        with self._watch.span("extra"):
            rows = min(policy.tile, q.shape[2])
            last = plan(q.shape[0], rows, k.shape[2], policy.block, policy.tile)
            self._backend.rank(q[:, :, -rows:], k, policy, last, scale)
        self._watch._ranked = self._watch.clock.mark()
        return ranked

    def gather_kept(self, ranked: Ranked, counts: Tensor, geometry: Geometry, sinks: int, width: int) -> Tensor:
        self._watch.add("rule", self._watch._ranked, self._watch.clock.mark())
        with self._watch.span("indices"):
            return self._backend.gather_kept(ranked, counts, geometry, sinks, width)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with self._watch.span("attend"):
            return self._backend.attend(q, k, v, selection, geometry, scale, softcap)


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


@contextmanager
def _watched_backends(watch: Watch) -> Iterator[None]:
    choose = backends.choose
    backends.choose = lambda name, q: _Watched(choose(name, q), watch)
    try:
        yield
    finally:
        backends.choose = choose


def split(model: Any, prefill: Callable[[], object], clock: Clock) -> Lap:
    """The parts of one call of `prefill`, which runs the model."""
    watch = Watch(clock)
    with (
        around_attention(model, lambda: watch.span("function")),
        _watched_backends(watch),
        torch.no_grad(),
        watch.span("wall"),
    ):
        prefill()
    return watch.parts()


def selection(lap: Lap) -> float:
    return sum(lap[name] for name in SELECTION)


def function(lap: Lap) -> float:
    """All that is spent inside the attention function."""
    return sum(lap[name] for name in ATTENTION)


def allowed(lap: Lap) -> float:
    """What a perfect integration would spend on attention: selecting and attending, nothing around it."""
    return function(lap) - lap["around"]


def elsewhere(lap: Lap) -> float:
    return lap["rest"] + lap["linear layers"]
