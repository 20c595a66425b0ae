"""Rejected by the paper: one threshold for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..checks import is_number
from .base import TRIGGERS, Trigger


@TRIGGERS.register("absolute")
@dataclass(frozen=True)
class Absolute(Trigger):
    """Rejected by the paper: every cell whose margin is at most a fixed threshold, whatever the layer. Ignores q."""

    takes_share: ClassVar[bool] = False
    threshold: float = 0.05

    def __post_init__(self) -> None:
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1] like the margin it is compared with, got {self.threshold!r}")

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        return (margin <= self.threshold) & eligible[:, None]

    def describe(self, q: float) -> str:
        return f"every cell with margin at most {self.threshold:g}"
