"""Every scorer and reduction once more, from its definition: loops over rows, keys and blocks in float64 NumPy.

Shares no code with the package. `row_scores` gives what a scorer says of each row and visible block of a tile (one row
where it says the same of all), `tile_scores` what becomes of it.
"""

from __future__ import annotations

import copy
import math

import numpy as np

from oracle import Tile

VOTES = ("h2o", "snapkv", "minference", "moba", "nsa", "xattention")
ORACLES = ("true-max", "true-mass")
SUMMARIES = ("mean", "quest", "box", "outliers", "boxed outliers")
SHRUNK = 0.5  # c of "boxed outliers", whose m is drawn
PARAMETERS = {
    "box": "c", "outliers": "m", "boxed outliers": "m", "snapkv": "window", "minference": "window", "moba": "gates",
    "nsa": "parts", "xattention": "stride",
}  # fmt: skip


def softmax(x: np.ndarray) -> np.ndarray:
    """Of rows that may be all -inf, which get zeros."""
    top = x.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    total = e.sum(-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


class Sequence:
    """One sequence and one head: its keys, its rows in this call, and where they sit."""

    def __init__(self, q: np.ndarray, k: np.ndarray, plan: list[Tile], tile: Tile, head: int, scale: float) -> None:
        mine = [t for t in plan if (t.batch, t.sequence) == (tile.batch, tile.sequence)]
        group = q.shape[1] // k.shape[1]
        self.tile, self.scale, self.block = tile, scale, tile.block
        self.k = k[tile.batch, head // group, tile.first_key : tile.first_key + tile.n_keys]
        self.positions = [p for t in mine for p in t.positions]
        numbers = [r for t in mine for r in t.rows]
        self.rows = q[tile.batch, head, numbers]
        self.mine = q[tile.batch, head, tile.rows]
        self.sharing = [
            q[tile.batch, h, tile.rows] for h in range(q.shape[1]) if h // group == head // group
        ]  # fmt: skip

    def keys(self, b: int) -> np.ndarray:
        return self.k[b * self.block : (b + 1) * self.block]

    def logits(self, row: np.ndarray, position: int) -> np.ndarray:
        """Of all keys; -inf behind the row."""
        return np.where(np.arange(len(self.k)) <= position, self.scale * (self.k @ row), -np.inf)

    def per_block(self, of_keys: np.ndarray) -> np.ndarray:
        return np.array([of_keys[b * self.block : (b + 1) * self.block].sum() for b in self.tile.visible])


def summary_scores(name: str, s: Sequence, given: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores and estimated log masses."""
    scores, masses = [], []
    for b in s.tile.visible:
        keys = s.keys(b)
        mean, high, low = keys.mean(0), keys.max(0), keys.min(0)
        if name.endswith("outliers"):
            far = sorted(range(len(keys)), key=lambda j: (-((keys[j] - mean) ** 2).sum(), j))
            m = int(given)
            stored, rest = [keys[j] for j in far[:m]], np.array([keys[j] for j in far[m:] or far[-1:]])
            others = rest.mean(0)
            c = SHRUNK if name.startswith("boxed") else 0.0
            high, low = others + c * (rest.max(0) - others), others + c * (rest.min(0) - others)
            products = np.stack([np.maximum(s.mine * high, s.mine * low).sum(1), *(s.mine @ x for x in stored)])
            score = s.scale * products.max(0)
            mass = np.exp(s.scale * products[1:]).sum(0) + len(rest) * np.exp(s.scale * products[0])
            masses.append(np.log(mass))
        else:
            c = {"mean": 0.0, "quest": 1.0, "box": given}[name]
            high, low = mean + c * (high - mean), mean + c * (low - mean)
            score = s.scale * np.maximum(s.mine * high, s.mine * low).sum(1)
            masses.append(score + math.log(s.block))
        scores.append(score)
    return np.stack(scores, 1), np.stack(masses, 1)


def oracle_scores(name: str, s: Sequence) -> tuple[np.ndarray, np.ndarray]:
    scores = np.full((len(s.mine), len(s.tile.visible)), -np.inf)
    for i, (row, position) in enumerate(zip(s.mine, s.tile.positions, strict=True)):
        logits = s.logits(row, position)
        for b in s.tile.visible:
            there = logits[b * s.block : min((b + 1) * s.block, position + 1)]
            if len(there):
                scores[i, b] = there.max() if name == "true-max" else np.log(np.exp(there).sum())
    return scores, scores + (math.log(s.block) if name == "true-max" else 0.0)


def h2o(s: Sequence) -> np.ndarray:
    total = np.zeros(len(s.k))
    for row, position in zip(s.rows, s.positions, strict=True):
        if position <= s.tile.positions[-1]:
            total += softmax(s.logits(row, position))
    return s.per_block(total)[None]


def snapkv(s: Sequence, window: int) -> np.ndarray:
    total = np.zeros(len(s.k))
    for row, position in list(zip(s.rows, s.positions, strict=True))[-window:]:
        total += softmax(s.logits(row, position))
    return s.per_block(total)[None]


def minference(s: Sequence, window: int) -> np.ndarray:
    vertical, slash = np.zeros(len(s.k)), np.zeros(len(s.k))
    for row, position in list(zip(s.rows, s.positions, strict=True))[-window:]:
        for j, p in enumerate(softmax(s.logits(row, position))[: position + 1]):
            vertical[j] += p
            slash[position - j] += p
    found = []
    for i in s.tile.positions:
        lines = [vertical[j] + slash[i - j] if j <= i else 0.0 for j in range(len(s.k))]
        found.append(s.per_block(np.array(lines)))
    return np.stack(found)


def minference_block(s: Sequence) -> np.ndarray:
    pooled = s.mine.mean(0)
    return np.array([[s.scale * (pooled @ s.keys(b).mean(0)) for b in s.tile.visible]])


def moba(s: Sequence, gates: int) -> np.ndarray:
    scores = np.zeros((len(s.mine), len(s.tile.visible)))
    for i, (row, position) in enumerate(zip(s.mine, s.tile.positions, strict=True)):
        own = position // s.block
        products = np.array([s.scale * (row @ s.keys(b).mean(0)) for b in range(own)])
        scores[i, :own] = softmax(products) if own else 0.0
        for b in sorted(range(own), key=lambda b: -products[b])[: gates - 1]:
            scores[i, b] += 1
        scores[i, own] += 1
    return scores


def nsa(s: Sequence, parts: int) -> np.ndarray:
    step = s.block // parts
    starts = range(0, len(s.k) - 2 * step + 1, step)
    scores = np.zeros((len(s.mine), len(s.tile.visible)))
    for rows in s.sharing:
        for i, (row, position) in enumerate(zip(rows, s.tile.positions, strict=True)):
            ends = [a + 2 * step - 1 for a in starts]
            products = [
                s.scale * (row @ s.k[a : a + 2 * step].mean(0)) if e <= position else -np.inf
                for a, e in zip(starts, ends, strict=True)
            ]
            for a, p in zip(starts, softmax(np.array(products)), strict=True):
                for stretch in (a, a + step):
                    if stretch // s.block < scores.shape[1]:
                        scores[i, stretch // s.block] += p / 2
    return scores


def xattention(s: Sequence, stride: int) -> np.ndarray:
    n_rows, scores = len(s.mine), []
    for at in range(0, n_rows, stride):
        group = range(at, min(at + stride, n_rows))
        logits = []
        for begin in range(0, len(s.k), stride):
            meets = [
                (r, begin + stride - 1 - (r - at)) for r in group if begin + stride - 1 - (r - at) < len(s.k)
            ]  # fmt: skip
            seen = begin <= s.tile.positions[group[-1]] and meets
            logits.append(s.scale * np.mean([s.mine[r] @ s.k[j] for r, j in meets]) if seen else -np.inf)
        given = softmax(np.array(logits))
        votes = np.zeros(len(s.tile.visible))
        for c, p in enumerate(given):
            if c * stride // s.block < len(votes):
                votes[c * stride // s.block] += p
        scores.append(votes)
    return np.stack(scores)


def row_scores(name: str, given: float, s: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """`[rows, visible]`: scores, and estimated log masses (or votes once more)."""
    if name in SUMMARIES:
        return summary_scores(name, s, given)
    if name in ORACLES:
        return oracle_scores(name, s)
    if name == "minference-block":
        found = minference_block(s)
        return found, found + math.log(s.block)
    votes = {"h2o": lambda: h2o(s), "snapkv": lambda: snapkv(s, int(given)), "nsa": lambda: nsa(s, int(given)),
             "minference": lambda: minference(s, int(given)), "moba": lambda: moba(s, int(given)),
             "xattention": lambda: xattention(s, int(given))}[name]()  # fmt: skip
    return votes, votes


def forced_masses(s: Sequence, sinks: int) -> dict[int, np.ndarray]:
    """{forced block: the exact log mass of every row}; -inf where a row sees none of its keys."""
    exact = oracle_scores("true-mass", s)[0]
    return {b: exact[:, b] for b in s.tile.forced(sinks)}


def means(x: np.ndarray, pool: int) -> np.ndarray:
    """Of runs of `pool` rows, the last of which may be shorter."""
    return np.stack([x[i : i + pool].mean(0) for i in range(0, len(x), pool)])


def outlying(x: np.ndarray, count: int) -> list[int]:
    """The rows most distant from the mean, one by one; the first of those that are as distant but for 1/4096."""
    apart = ((x - x.mean(0)) ** 2).sum(1)
    found: list[int] = []
    for _ in range(min(count, len(x))):
        furthest = max(far for i, far in enumerate(apart) if i not in found)
        as_far = (i for i, far in enumerate(apart) if i not in found and far >= furthest * (1 - 1 / 4096))
        found.append(next(as_far))
    return found


def tile_scores(
    name: str, given: float, aggregate: str, s: Sequence, sinks: int, pool: int = 1, far: int = 0
) -> np.ndarray:
    """`[visible]`, by means of `pool` rows, and by the `far` outlying ones."""
    forced = forced_masses(s, sinks)
    if pool > 1:
        together = np.log(sum(np.exp(exact) for exact in forced.values()))
        shared = {b: means(np.exp(exact - together), pool) for b, exact in forced.items()}
        with np.errstate(divide="ignore"):
            runs = {b: means(together, pool) + np.log(share) for b, share in shared.items()}
        rows = outlying(s.mine, far)
        forced = {b: np.concatenate([run, forced[b][rows]]) for b, run in runs.items()}
        s = copy.copy(s)
        s.mine = np.concatenate([means(s.mine, pool), s.mine[rows]])
    scores, masses = row_scores(name, given, s)
    if aggregate in ("max", "mean"):
        return scores.max(0) if aggregate == "max" else scores.mean(0)
    if aggregate == "softmax":
        with np.errstate(divide="ignore"):
            return np.log(softmax(np.log(scores) if name in VOTES else scores)).max(0)
    if name in VOTES:
        total = masses.sum(1, keepdims=True)
        shares = np.divide(masses, total, out=np.zeros_like(masses), where=total > 0)
    else:
        masses = np.repeat(masses, len(s.mine), 0) if len(masses) == 1 else masses.copy()
        for b, exact in forced.items():
            masses[:, b] = exact
        shares = softmax(masses)
    return shares.max(0) if aggregate == "mass-max" else shares.mean(0)
