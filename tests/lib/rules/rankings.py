"""Rankings made by hand, and the pooled rules as plain Python: sort all slots, take the best."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from fractions import Fraction

import torch

from closecall.ranking import Ranked

Cell = tuple[int, int, int]


@dataclass(frozen=True)
class Drawn:
    """A batch of packed or padded sequences with scores that tie often."""

    ranked: Ranked
    scores: dict[Cell, list[float]]  # of the free blocks of every cell, best first
    sequences: dict[int, list[tuple[int, int]]]  # batch row and tile, in order

    @property
    def heads(self) -> int:
        return int(self.ranked.scores.shape[1])


def drawn(seed: int, values: list[float], *, most_visible: int = 14) -> Drawn:
    r = random.Random(seed)
    batch, heads, n_tiles = r.randint(1, 3), r.randint(1, 3), r.randint(1, 9)
    visible, forced = (torch.zeros(batch, n_tiles, dtype=torch.int64) for _ in range(2))
    sequence = torch.full((batch, n_tiles), -1)
    sequences: dict[int, list[tuple[int, int]]] = {}
    for b in range(batch):
        t = 0
        while t < n_tiles and r.random() < 0.9:
            number, length, start = len(sequences), r.randint(1, n_tiles - t), r.randint(1, most_visible)
            for i in range(length):
                sequence[b, t] = number
                visible[b, t] = min(start + i, most_visible)
                forced[b, t] = r.randint(1, min(3, int(visible[b, t])))
                sequences.setdefault(number, []).append((b, t))
                t += 1
    ranked = torch.full((batch, heads, n_tiles, most_visible), -math.inf)
    scores: dict[Cell, list[float]] = {}
    for cells in sequences.values():
        for b, t in cells:
            for h in range(heads):
                n = int(visible[b, t] - forced[b, t])
                scores[b, h, t] = sorted((r.choice(values) for _ in range(n)), reverse=True)
                ranked[b, h, t, :n] = torch.tensor(scores[b, h, t])
    order = torch.zeros(ranked.shape, dtype=torch.int32)
    return Drawn(Ranked(order, ranked, visible, forced, sequence), scores, sequences)


def greedy(
    wanted: dict[Cell, list[float] | list[Fraction]], low: dict[Cell, int], high: dict[Cell, int], total: int
) -> dict[Cell, int]:
    """Slots of each cell of one pool: floors first, then the most wanted of all others, ties as documented."""
    got = dict(low)
    others = [
        (-wanted[cell][slot], slot, -cell[2], cell[1], cell) for cell in wanted for slot in range(low[cell], high[cell])
    ]
    for *_, cell in sorted(others)[: total - sum(low.values())]:
        got[cell] += 1
    return got


def bounds(case: Drawn, cell: Cell, tile_budget: int, least: int, most: int) -> tuple[int, int, int]:
    """Low, high and uniform top-k's number of free blocks."""
    b, _, t = cell
    visible, forced = int(case.ranked.visible[b, t]), int(case.ranked.forced[b, t])
    if visible <= tile_budget:
        return visible - forced, visible - forced, visible - forced
    return max(least - forced, 0), min(most, visible) - forced, tile_budget - forced


def pools(case: Drawn, kind: str) -> list[list[Cell]]:
    listed = []
    for places in case.sequences.values():
        cells = [(b, h, t) for b, t in places for h in range(case.heads)]
        if kind == "layer":
            listed.append(cells)
        else:
            listed += [[c for c in cells if (c[0], c[2]) == place] for place in places]
    return listed
