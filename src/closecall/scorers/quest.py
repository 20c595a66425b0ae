"""Quest's box around the block's keys (the paper's Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

from .base import SCORERS, Planes
from .planes import PlaneScorer


@SCORERS.register("quest")
@dataclass(frozen=True)
class Quest(PlaneScorer):
    """Eq. 2: the largest product any key inside the block's coordinate-wise box could have with the row.

    Its estimated mass is an upper bound. Tang et al.: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM
    Inference", 2024, arXiv:2406.10774. There each decoding step chooses, here each tile of rows.
    """

    @property
    def planes(self) -> Planes:
        return Planes(box=True)
