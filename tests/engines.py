"""The backends this machine can run, each native instruction-set tier counted as one of its own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import closecall
from closecall import backends
from closecall.rules import Ranked

FUZZ = bool(os.environ.get("CLOSECALL_FUZZ"))
# Under AddressSanitizer everything is many times slower, and only our own code is of interest.
SANITIZED = bool(os.environ.get("CLOSECALL_SANITIZED"))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Engine:
    """The public functions on one backend and, for the native one, one tier."""

    backend: str
    tier: str | None = None

    def __str__(self) -> str:
        return f"{self.backend}-{self.tier}" if self.tier else self.backend

    @contextlib.contextmanager
    def _forced(self) -> Iterator[None]:
        before = os.environ.get("CLOSECALL_ISA")
        if self.tier:
            os.environ["CLOSECALL_ISA"] = self.tier
        try:
            yield
        finally:
            os.environ.pop("CLOSECALL_ISA", None)
            if before is not None:
                os.environ["CLOSECALL_ISA"] = before

    def select(self, *args: Any, **kwargs: Any) -> closecall.Selection:
        with self._forced():
            return closecall.select(*args, backend=self.backend, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        with self._forced():
            return closecall.attend(*args, backend=self.backend, **kwargs)

    def attention(self, *args: Any, **kwargs: Any) -> Any:
        with self._forced():
            return closecall.attention(*args, backend=self.backend, **kwargs)

    def rank(self, *args: Any) -> Ranked:
        """What the backend hands to rules."""
        with self._forced():
            return backends.load(self.backend).rank(*args)

    def examples(self, usual: int) -> int:
        """How many examples to draw where a fast backend draws `usual`."""
        many = usual * 10 if FUZZ else max(3, usual // 8) if SANITIZED else usual
        return max(3, many // 12) if self.backend == "flex" else many


def has_native() -> bool:
    return importlib.util.find_spec("closecall.backends._native") is not None


def available() -> list[Engine]:
    found = [Engine("reference")]
    if has_native():
        found += [Engine("cpu", tier) for tier in importlib.import_module("closecall.backends.cpu").tiers()]
    if importlib.util.find_spec("closecall.backends.flex") is not None:
        found.append(Engine("flex"))
    return found


ENGINES = available()
EXACTLY_REPEATABLE = [e for e in ENGINES if e.backend != "flex"]  # torch promises no bitwise repeatability for flex
