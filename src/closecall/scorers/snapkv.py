"""SnapKV: blocks that the end of the prompt attends to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import SCORERS, Chunk, Scorer, View
from .parameters import check_whole


@SCORERS.register("snapkv")
@dataclass(frozen=True)
class SnapKV(Scorer):
    """The attention that a block's keys are given by the last `window` rows: an observation window that votes.

    Li et al.: "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, arXiv:2404.14469. There the votes
    decide which keys of the prompt stay in the cache for decoding, after pooling over neighbouring keys; here every
    tile ranks its blocks by them, and the block is the pool. So a tile's choice hangs on rows that come later, and a
    prefill in chunks, each with a window of its own, chooses otherwise than one in one piece. The votes are the same
    for all rows: the plain reductions give the same, and so do both that normalise.

    Costs `window` rows of attention. Stores nothing but a number per block.
    """

    votes: ClassVar[bool] = True
    window: int = 64

    def __post_init__(self) -> None:
        check_whole("window", self.window, 1, "rows at the end of the prompt")

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        votes = view.q.new_zeros((view.q.shape[0], view.n_blocks), dtype=torch.float64)
        for piece in view.last(self.window):
            votes[:, : piece.seen] += view.attention(piece).sum(-1).sum((1, 2), dtype=torch.float64)
        for chunk in view.chunks():
            shape = (-1, len(chunk.tiles), 1, -1)
            yield chunk, votes[:, None, None, : chunk.seen].to(chunk.rows.dtype).expand(shape)
