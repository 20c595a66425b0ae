"""Oracles: what a scorer would say that had read every key. They cost as much as the attention they are to save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .base import SCORERS, Chunk, Scorer, View


@SCORERS.register("true-max")
@dataclass(frozen=True)
class TrueMax(Scorer):
    """Oracle, for comparison only: the largest product of the row with any key of the block that it sees.

    What `quest` bounds from above. Its estimated mass takes every key to score so.
    """

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        more = math.log(view.block) if view.mass else 0.0
        for chunk in view.chunks(view.k.shape[0]):
            yield chunk, view.logits(chunk).amax(-1) + more


@SCORERS.register("true-mass")
@dataclass(frozen=True)
class TrueMass(Scorer):
    """Oracle, for comparison only: the log of the softmax mass of the block's keys, before the row is normalised.

    With `aggregate="mass"` blocks are ranked by the mass that the tile's rows really give them.
    """

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        for chunk in view.chunks(view.k.shape[0]):
            yield chunk, view.logits(chunk).logsumexp(-1)
