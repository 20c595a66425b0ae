"""A float64 brute force of the operator, written from its definition and sharing no code with the package.

Everything is a plain loop over sequences, tiles and heads in NumPy. Each number comes with a bound on how far a correct
float32 implementation may be from it, derived from the data and the number of operations, never tuned by hand.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}


def exact(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def working_roundoff(dtype: torch.dtype) -> float:
    """Arithmetic is float32 whatever the input type (float64 for float64 inputs)."""
    return UNIT_ROUNDOFF[torch.float64 if dtype == torch.float64 else torch.float32]


# --- Where things lie ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    batch: int
    number: int  # along the T axis of a selection
    sequence: int
    rows: list[int]  # in the buffer
    positions: list[int]  # of the rows, among the sequence's own keys
    first_key: int  # of the sequence, in the buffer
    n_keys: int  # of the sequence
    block: int

    @functools.cached_property
    def visible(self) -> list[int]:
        return [b for b in range(-(-self.n_keys // self.block)) if b * self.block <= self.positions[-1]]

    def forced(self, sinks: int) -> set[int]:
        return {b for b in self.visible if b < sinks} | {p // self.block for p in self.positions}

    def keys(self, block: int) -> slice:
        """The real keys of a block, in the buffer."""
        start = block * self.block
        return slice(self.first_key + start, self.first_key + min(start + self.block, self.n_keys))


def tiles(batch, q_len, k_len, block, tile, key_padding=None, cu_seqlens=None) -> list[Tile]:
    """All tiles. Query row i sits at key k_len - q_len + i and is real if that key is."""
    owner = np.zeros((batch, k_len), dtype=int)  # the sequence each key belongs to, -1 for padding
    for b in range(batch):
        owner[b] = b
        if key_padding is not None:
            owner[b][~key_padding[b].numpy()] = -1
    if cu_seqlens is not None:
        for s, (start, stop) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
            owner[0, start:stop] = s
    listed = []
    for b in range(batch):
        number = 0
        for s in dict.fromkeys(owner[b].tolist()):
            if s < 0:
                continue
            keys = np.flatnonzero(owner[b] == s)
            rows = [int(j) - (k_len - q_len) for j in keys if j >= k_len - q_len]
            for at in range(0, len(rows), tile):
                part = rows[at : at + tile]
                positions = [r + (k_len - q_len) - int(keys[0]) for r in part]
                listed.append(Tile(b, number, s, part, positions, int(keys[0]), len(keys), block))
                number += 1
    return listed


# --- Selection -------------------------------------------------------------------------------------------------------


def block_scores(q, k, tile: Tile, head: int, scorer, aggregate: str, scale: float, sinks: int, u: float):
    """{block: (score, bound on its rounding error)} of the visible, unforced blocks. q and k are float64 arrays."""
    group = q.shape[1] // k.shape[1]
    rows = q[tile.batch, head, tile.rows]
    dim, n_rows = rows.shape[1], rows.shape[0]
    scores = {}
    for b in sorted(set(tile.visible) - tile.forced(sinks)):
        keys = k[tile.batch, head // group, tile.keys(b)]
        if scorer == "mean":
            per_row = rows @ keys.mean(0)
            size = np.abs(rows) @ np.abs(keys).mean(0)
            operations = len(keys) + dim + 4  # sum and division, product, scale
        elif scorer == "quest":
            per_row = np.maximum(rows * keys.max(0), rows * keys.min(0)).sum(1)
            size = np.maximum(np.abs(rows * keys.max(0)), np.abs(rows * keys.min(0))).sum(1)
            operations = dim + 6
        else:
            per_row, size, operations = scorer(rows, keys)
        if aggregate == "max":
            scores[b] = scale * per_row.max(), 1.01 * u * operations * scale * size.max()
        else:
            scores[b] = scale * per_row.mean(), 1.01 * u * (operations + n_rows) * scale * size.mean()
    return scores


def shared_scores(of_heads: list[dict[int, tuple[float, float]]]) -> dict[int, tuple[float, float]]:
    """{block: (score, bound)} of heads that decide together: the largest, which is no further off than the worst."""
    return {b: (max(s[b][0] for s in of_heads), max(s[b][1] for s in of_heads)) for b in of_heads[0]}


def ranking(scores: dict[int, tuple[float, float]]) -> list[int]:
    return sorted(scores, key=lambda b: (-scores[b][0], b))


def margin_of(scores: dict[int, tuple[float, float]], tile: Tile, tile_budget: int, sinks: int) -> tuple[float, float]:
    """The margin and a bound on its rounding error; NaN where nothing is cut."""
    if len(tile.visible) <= tile_budget:
        return math.nan, 0.0
    ranked = [scores[b][0] for b in ranking(scores)]
    error = 2 * max(e for _, e in scores.values())  # of a difference of two order statistics
    cut = tile_budget - len(tile.forced(sinks))
    above, whole = ranked[cut - 1] - ranked[cut], ranked[0] - ranked[cut]
    value = above / whole if whole else 0.0
    if error == 0:
        return value, 0.0
    if whole <= 2 * error:
        return value, 1.0  # the quotient of two rounding errors: anything in [0, 1]
    return value, (error + value * error) / (whole - error)


def how_many(q: float, total: int) -> int:
    """ceil(q * total) for q as the decimal that was typed."""
    return math.ceil(Fraction(str(q)) * total)


def triggered(kind: str, q: float, threshold: float, margins: np.ndarray) -> np.ndarray:
    """bool [H, T] for one sequence from its margins [H, T], NaN where a tile is not eligible."""
    fires = np.zeros(margins.shape, dtype=bool)
    eligible = [t for t in range(margins.shape[1]) if not np.isnan(margins[0, t])]
    heads = range(margins.shape[0])
    if kind == "absolute":
        return np.nan_to_num(margins, nan=np.inf) <= threshold
    if kind == "per-cell":
        cells = sorted(((h, t) for h in heads for t in eligible), key=lambda c: (margins[c], -c[0], -c[1]))
        for cell in cells[: how_many(q, len(cells))]:
            fires[cell] = True
        return fires
    # Exact sums, because equal means must tie.
    mean = {t: sum(Fraction(float(margins[h, t])) for h in heads) if kind == "quantile" else 0 for t in eligible}
    assert kind in ("quantile", "last")
    for t in sorted(eligible, key=lambda t: (mean[t], -t))[: how_many(q, len(eligible))]:
        fires[:, t] = True
    return fires


# --- Attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    out: np.ndarray
    lse: np.ndarray
    out_error: np.ndarray  # bounds on a correct implementation's distance from the two above
    lse_error: np.ndarray


def budget(sizes, p, v, out, lse, n_blocks: int, dim: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Bounds on the error of one tile's output `[rows, Dv]` and log-sum-exp `[rows]`, for exact inputs.

    sizes: scale * sum_d |q_d k_d| per (row, key); p: exact probabilities; v: values; out, lse: the exact results.

    With u the unit roundoff of the arithmetic:
    - a logit is a product of `dim` terms, scaled, shifted by the running maximum (at most the largest size) and put
      into an exponential that may work in base 2: its error is at most `delta_j = u ((dim + 8) size_j + 8 max size)`;
    - a probability exp(l_j + e_j) / sum_i exp(l_i + e_i) with |e| <= delta is off by a factor of at most
      `exp(delta_j + log sum_i p_i exp(delta_i))`;
    - each exponential, each of the n additions to numerator and denominator and each rescaling when a block raises the
      running maximum costs a few roundings relative to sum_j p_j |v_j|;
    - for bfloat16 the probabilities may be rounded to bfloat16 before they meet V;
    - the output is rounded to its type. Exponentials below float32's range may vanish.
    """
    u = working_roundoff(dtype)
    delta = u * ((dim + 8) * sizes + 8 * sizes.max(1, keepdims=True, initial=0.0))
    spread = np.log((p * np.exp(delta)).sum(1, keepdims=True), out=np.zeros((len(p), 1)), where=p.any(1)[:, None])
    n = (p > 0).sum(1, keepdims=True)
    roundings = u * (2 * n + 16 * n_blocks + 32) * 1.01
    relative = np.expm1(delta + spread) + roundings
    if dtype == torch.bfloat16:
        relative = relative + UNIT_ROUNDOFF[dtype] * 1.01
    vanishing = p.shape[1] * 2.0**-120 * np.abs(v).max(initial=0.0)
    error = (p * relative) @ np.abs(v) + vanishing
    error = error + UNIT_ROUNDOFF[dtype] * (np.abs(out) + error) + SMALLEST[dtype]
    seen = np.isfinite(lse)
    lse_error = (spread + roundings)[:, 0] + 4 * u * np.abs(np.where(seen, lse, 0.0))
    return error, np.where(seen, lse_error, 0.0)


def attend(
    q, k, v, kept: dict[tuple[int, int, int], list[int]], plan: list[Tile], scale: float, softcap=0.0
) -> Expected:
    """Exact attention over `kept[batch, head, tile]` blocks, causal; rows that see nothing get 0 and -inf."""
    dtype, dim = q.dtype, q.shape[3]
    q, k, v = exact(q), exact(k), exact(v)
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    out, out_error = np.zeros((batch, heads, q_len, v.shape[3])), np.zeros((batch, heads, q_len, v.shape[3]))
    lse, lse_error = np.full((batch, heads, q_len), -np.inf), np.zeros((batch, heads, q_len))
    for tile in plan:
        for h in range(heads):
            chosen = kept[tile.batch, h, tile.number]
            keys = [j for b in chosen for j in range(tile.keys(b).start, tile.keys(b).stop)]
            keys = [j for j in keys if j - tile.first_key <= tile.positions[-1]]
            sees = np.array(keys, dtype=int)[None] - tile.first_key <= np.array(tile.positions)[:, None]
            rows = q[tile.batch, h, tile.rows]
            ks, vs = k[tile.batch, h // group, keys], v[tile.batch, h // group, keys]
            logits = np.where(sees, scale * (rows @ ks.T), -np.inf)
            sizes = np.where(sees, scale * (np.abs(rows) @ np.abs(ks).T), 0.0)
            if softcap:  # tanh never enlarges an error of its argument, and adds a few roundings of softcap * 1
                logits = np.where(sees, softcap * np.tanh(logits / softcap), -np.inf)
                sizes = sizes + 8 * softcap / (dim + 8)
            top = logits.max(1, keepdims=True, initial=-np.inf)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
            total = weights.sum(1, keepdims=True)
            p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
            o = p @ vs
            with np.errstate(divide="ignore"):
                sums = np.where(total > 0, top + np.log(total), -np.inf)[:, 0]
            out[tile.batch, h, tile.rows], lse[tile.batch, h, tile.rows] = o, sums
            out_error[tile.batch, h, tile.rows], lse_error[tile.batch, h, tile.rows] = budget(
                sizes, p, vs, o, sums, len(chosen), dim, dtype
            )
    return Expected(out, lse, out_error, lse_error)
