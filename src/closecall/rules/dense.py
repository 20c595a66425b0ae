"""Every visible block: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import RULES, Rule


@RULES.register("dense")
@dataclass(frozen=True)
class Dense(Rule):
    """Keeps every visible block."""

    needs_scores: ClassVar[bool] = False

    def limit(self, n_blocks: int) -> int:
        return n_blocks

    def describe(self) -> str:
        return "every visible block"
