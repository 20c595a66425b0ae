"""Small calls of every shape, with several tiles and blocks that can be cut: what a loop over keys can still score."""

from __future__ import annotations

import itertools
import random

import torch

from drawing import Case


def call(seed: int, dtype: torch.dtype = torch.float64) -> Case:
    """One call. Its policy is the caller's business: only the grid in `overrides` counts."""
    r = random.Random(seed)
    block, tile = r.choice([1, 4, 4, 5, 8, 16]), r.choice([1, 4, 5, 8, 16, 24])
    heads, kv_heads = r.choice([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2)])
    style = r.choice(["whole", "left", "right", "packed"])
    batch = 1 if style == "packed" else r.choice([1, 2])
    k_len = r.randint(3 * block, 9 * block + 2 * tile)
    most_rows = 8 * tile
    q_len, lengths = k_len, []
    if style == "packed":
        k_len = q_len = min(k_len, 12 * tile)
        cuts = sorted(r.randint(0, k_len) for _ in range(r.choice([0, 1, 2])))
        lengths = [b - a for a, b in itertools.pairwise([0, *cuts, k_len])]
    else:
        q_len = min(r.choice([k_len, k_len, r.randint(1, k_len)]), most_rows)
    if style in ("left", "right"):
        lengths = [r.choice([k_len, r.randint(0, k_len), r.randint(k_len // 2, k_len)]) for _ in range(batch)]
    dim = r.choice([1, 3, 8, 16, 33])
    return Case(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, k_len=k_len, dim=dim, v_dim=1, dtype=dtype,
        sequences=style, lengths=lengths, preset="topk", numbers="normal", seed=seed,
        overrides={"block": block, "tile": tile, "sinks": r.choice([0, 1, 1, 2])}, scale=r.choice([None, 0.25, 1.0]),
        layouts=(r.choice(["plain", "bnhd", "inner"]), r.choice(["plain", "spaced"]), "plain"),
        poison=r.random() < 0.7,
    )  # fmt: skip
