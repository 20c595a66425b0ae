"""A prompt of 32K tokens and 30 layers that no model has read: as large as the real thing, and as hard to pack."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from closecall.geometry import plan
from closecall_lab.explain import codes, look
from closecall_lab.explain.gather import Gathered
from closecall_lab.explain.page import Explanation
from closecall_lab.explain.prompt import Prompt

TOKENS, HEADS, LAYERS = 32768, 12, 30
WORD = "river "


def big_page(like: Gathered) -> Explanation:
    """One layer, made of chance, and again with smaller losses: scores are noise, masses small but for a few."""
    chance = np.random.default_rng(0)
    g = plan(1, TOKENS, TOKENS, 64, 64)
    cells = codes.Cells(g.visible[0].numpy(), g.n_blocks, look.pool_of(g))
    n, shape = int(g.visible.sum()), (HEADS, g.n_tiles)
    rank = chance.random((HEADS, n))
    kept = rank < 0.12
    coarse = codes.packed(chance.integers(0, 64, (HEADS, int(cells.coarse_seen.sum()))).astype(np.uint8))
    first = look.Looked(
        layer=0,
        kept=codes.packed(codes.kept_bits(kept)),
        scores=codes.packed(codes.score_codes(0.12 - rank, kept)),
        masses=codes.packed(codes.mass_codes(rank**12 / 10)),
        coarse=dict.fromkeys(("kept", "scores", "masses", "lost"), coarse),
        margin=chance.random(shape), cut_margin=chance.random(shape), triggered=chance.random(shape) < 0.4,
        counts=chance.integers(1, 66, shape), lost=chance.random(shape), lost_most=chance.random(shape),
        keepers=chance.integers(0, 500, shape), block_mass=chance.random(shape), bound=chance.random(HEADS),
        asked=np.zeros((1, 0, HEADS), dtype=bool), calls=look.Calls(),
    )  # fmt: skip
    layers = [dataclasses.replace(first, layer=i, lost=first.lost * (1 - i / 40)) for i in range(LAYERS)]
    mean = {name: chance.random(n) for name in ("kept", "scores", "masses", "lost")}
    run = dataclasses.replace(like.runs[0], layers=layers, calls=look.Calls(), mean=mean)
    starts = tuple(range(0, len(WORD) * TOKENS + 1, len(WORD)))
    prompt = Prompt(WORD * TOKENS, (1,) * TOKENS, starts, tuple(itertools.pairwise(starts)))
    return Explanation(
        dataclasses.replace(
            like, prompt=prompt, geometry=g, cells=cells, runs=[run], asking=(g.n_tiles - 1,), answer=()
        )
    )
