"""Quest's box around the block's keys (the paper's Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import SCORERS, Scorer, box_scores, per_block


@SCORERS.register("quest")
@dataclass(frozen=True)
class Quest(Scorer):
    """Eq. 2: the largest product any key inside the block's coordinate-wise box could have with the row.

    Its estimated mass is an upper bound. Tang et al.: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM
    Inference", 2024, arXiv:2406.10774. There each decoding step chooses, here each tile of rows.
    """

    @property
    def vectors_per_block(self) -> int:
        return 2

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        return per_block(keys, block, lambda b: b.amax(-2)), per_block(keys, block, lambda b: b.amin(-2))

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        high, low = summary
        return box_scores(rows, high, low)
