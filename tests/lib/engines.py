"""The backends this machine can run, each native instruction-set tier counted as one of its own.

Triton's kernels run under its interpreter, which takes milliseconds for every step of every program: tests of larger
calls are `compiled` ones, and drawn cases that are too large are drawn again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import hypothesis
import pytest
import torch

import closecall
from closecall import backends
from closecall.ranking import Ranked

FUZZ = bool(os.environ.get("CLOSECALL_FUZZ"))
# Under AddressSanitizer everything is many times slower, and only our own code is of interest.
SANITIZED = bool(os.environ.get("CLOSECALL_SANITIZED"))
SLOWER = {"flex": 8, "triton": 40}
# Steps of the interpreter: about 5 ms each. Drawn cases may have more, because most of them do and few are drawn.
INTERPRETED_STEPS, DRAWN_STEPS = 100, 200
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
A, B = TypeVar("A"), TypeVar("B")


@dataclass(frozen=True)
class Engine:
    """The public functions on one backend and, for the native one, one tier."""

    backend: str
    tier: str | None = None

    def __str__(self) -> str:
        return f"{self.backend}-{self.tier}" if self.tier else self.backend

    @contextlib.contextmanager
    def _forced(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if self.tier:
                patch.setenv("CLOSECALL_ISA", self.tier)
            if self.backend == "triton":
                patch.setenv("TRITON_INTERPRET", "1")
            yield

    def _bearable(self, q: Any, k: Any, grid: Any) -> None:
        """Refuses what the interpreter would need more than about a second for; draws again what was drawn."""
        if self.backend != "triton" or not all(isinstance(x, torch.Tensor) and x.ndim == 4 for x in (q, k)):
            return
        block, tile = (grid.block, grid.tile) if hasattr(grid, "block") else (64, 64)
        tiles = q.shape[0] * q.shape[1] * math.ceil(q.shape[2] / tile)
        steps = tiles * (4 + math.ceil(k.shape[2] / block) / (2 if q.shape[2] == k.shape[2] else 1))
        is_drawn = hypothesis.currently_in_test_context()
        most = DRAWN_STEPS if is_drawn else INTERPRETED_STEPS
        if steps <= most and max(x.untyped_storage().nbytes() for x in (q, k)) < 2**28:
            return
        if is_drawn:
            hypothesis.reject()
        pytest.fail(f"about {steps:.0f} steps are too many for Triton's interpreter: mark the test as compiled")

    def select(self, *args: Any, **kwargs: Any) -> closecall.Selection:
        self._bearable(*args[:3])
        with self._forced():
            return closecall.select(*args, backend=self.backend, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        self._bearable(*args[:2], args[3])
        with self._forced():
            return closecall.attend(*args, backend=self.backend, **kwargs)

    def attention(self, *args: Any, **kwargs: Any) -> Any:
        self._bearable(*args[:2], args[3])
        with self._forced():
            return closecall.attention(*args, backend=self.backend, **kwargs)

    def rank(self, *args: Any) -> Ranked:
        """What the backend hands to rules that read the whole ranking."""
        self._bearable(*args[:3])
        with self._forced(), pytest.MonkeyPatch.context() as patch:
            if self.backend == "triton":  # as if no row of scores were short enough to go unsorted
                patch.setattr("closecall.backends.triton.launch.MOST_SPAN", 0)
            return backends.load(self.backend).rank(*args)

    def examples(self, usual: int) -> int:
        """How many examples to draw where a fast backend draws `usual`."""
        many = usual * 25 if FUZZ else max(3, usual // 8) if SANITIZED else usual
        return max(2, many // SLOWER[self.backend]) if self.backend in SLOWER else many


def pairs(first: Iterable[A], second: Iterable[B], chosen: Callable[[int, int], bool]) -> list[tuple[A, B]]:
    """Of every two values those whose places are `chosen`; under `make fuzz` all of them.

    For parametrised tests that are slow and whose two values have little to do with each other: each value is
    met, not each with each.
    """
    ours, theirs = list(first), list(second)
    found = [(a, b) for i, a in enumerate(ours) for j, b in enumerate(theirs) if FUZZ or chosen(i, j)]
    assert all(any(a is x for x, _ in found) for a in ours)
    assert all(any(b is y for _, y in found) for b in theirs)
    return found


def has_native() -> bool:
    return importlib.util.find_spec("closecall.backends._native") is not None


def available() -> list[Engine]:
    engines = [Engine("reference")]
    if has_native():
        engines += [Engine("cpu", tier) for tier in importlib.import_module("closecall.backends.cpu").tiers()]
    if importlib.util.find_spec("closecall.backends.flex") is not None:
        engines.append(Engine("flex"))
    if importlib.util.find_spec("triton") is not None and not SANITIZED:
        engines.append(Engine("triton"))
    return engines


ENGINES = available()
# For calls that are too large for Triton's interpreter. Its own tests, of its size, are in tests/lib/triton.
compiled = pytest.mark.parametrize("engine", [e for e in ENGINES if e.backend != "triton"], ids=str)
EXACTLY_REPEATABLE = [e for e in ENGINES if e.backend != "flex"]  # torch promises no bitwise repeatability for flex
