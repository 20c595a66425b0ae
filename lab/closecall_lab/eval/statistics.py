"""What the answers mean: intervals, paired recall, tests between policies, and where a router's lift comes from.

Everything takes answers of the same questions in the same order. Where several questions share a context they stand or
fall together, so intervals are drawn over contexts, not over questions. The arithmetic is scipy's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..spine.numbers import Estimate as Estimate

LEVEL = 0.95
RESAMPLES = 9999
MOST_SUMS = 1 << 16  # that flips of signs may add up to, for a test to be exact
ROUNDING = 1e-12  # a difference of scores that is no larger is none
Floats = NDArray[np.float64]


def _floats(values: ArrayLike, name: str) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not found.size:
        raise ValueError(f"{name} must be one row of at least one number, got shape {list(found.shape)}")
    return found


def _bools(values: ArrayLike, name: str) -> NDArray[np.bool_]:
    found = _floats(values, name)
    if not np.isin(found, (0, 1)).all():
        raise ValueError(f"{name} must say correct or not (0 or 1) for each question, got {found[:5].tolist()}...")
    return found.astype(bool)


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    first, second = _bools(a, "a"), _bools(b, "b")
    if len(first) != len(second):
        raise ValueError(f"paired answers must be of the same questions, got {len(first)} and {len(second)}")
    return first, second


def wilson(correct: ArrayLike) -> Estimate:
    """Accuracy with its Wilson interval.

    >>> print(wilson([1, 1, 1, 0]))
    0.75 [0.30, 0.95]
    """
    answers = _bools(correct, "correct")
    value, n = float(answers.mean()), len(answers)
    return Estimate(value, *_wilson(value, n), n)


def _wilson(value: float, n: int) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle, spread = value + z**2 / (2 * n), z * math.sqrt(value * (1 - value) / n + z**2 / (4 * n**2))
    low, high = ((middle + sign * spread) / (1 + z**2 / n) for sign in (-1, 1))
    return 0.0 if value == 0 else low, 1.0 if value == 1 else high


def share(correct: ArrayLike, clusters: Sequence[Hashable]) -> Estimate:
    """Accuracy with Wilson's interval, or with one over contexts where questions share them.

    Where all contexts score alike, a bootstrap has nothing to draw from: then Wilson's, with contexts counted, not
    questions.
    """
    answers = _bools(correct, "correct")
    sums, sizes = _by_cluster(answers.astype(np.float64), clusters)
    if len(sums) == len(answers):
        return wilson(answers)
    value = float(sums[0] / sizes[0])
    if (sums * sizes[0] == sums[0] * sizes).all() and (len(sums) > 1 or value in (0, 1)):
        return Estimate(value, *_wilson(value, len(sums)), len(answers))
    return clustered(answers, clusters)


def paired_recall(dense: ArrayLike, sparse: ArrayLike, clusters: Sequence[Hashable]) -> Estimate:
    """The share that a policy answers of the n_dc questions that dense answers correctly; NaN where n_dc, `n`, is 0."""
    reference, answers = _pair(dense, sparse)
    if not reference.any():
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    asked_of = [c for c, right in zip(clusters, reference, strict=True) if right]
    return share(answers[reference], asked_of)


def discordant(a: ArrayLike, b: ArrayLike) -> tuple[int, int]:
    """(questions only a answers, questions only b answers)."""
    first, second = _pair(a, b)
    return int((first & ~second).sum()), int((second & ~first).sum())


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p that two policies answer equally many, from the discordant counts.

    >>> mcnemar(3, 1)
    0.625
    """
    return _exact(wins, losses, "two-sided")


def sign_test(wins: int, losses: int) -> float:
    """Exact one-sided p that the first policy is not the better one, from the discordant counts.

    >>> sign_test(3, 1)
    0.3125
    """
    return _exact(wins, losses, "greater")


def _exact(wins: int, losses: int, alternative: str) -> float:
    from scipy.stats import binomtest  # type: ignore[import-untyped]

    if wins < 0 or losses < 0:
        raise ValueError(f"discordant counts cannot be negative, got {wins} and {losses}")
    return float(binomtest(wins, wins + losses, alternative=alternative).pvalue) if wins + losses else 1.0


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction over a family of tests, in the same order."""
    order = np.argsort(p)
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(np.asarray(p)[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    return [float(x) for x in corrected]


def clustered(values: ArrayLike, clusters: Sequence[Hashable], *, seed: int = 0) -> Estimate:
    """The mean with a percentile bootstrap interval, contexts drawn whole; NaN bounds with fewer than two contexts."""
    found = _floats(values, "values")
    sums, sizes = _by_cluster(found, clusters)
    low, high = _bootstrap(sums, sizes, seed)
    return Estimate(float(sums.sum() / sizes.sum()), low, high, len(found))


def _by_cluster(values: Floats, clusters: Sequence[Hashable]) -> tuple[Floats, Floats]:
    """Sum and size of every cluster."""
    if len(clusters) != len(values):
        raise ValueError(f"every value needs its cluster, got {len(values)} values and {len(clusters)} clusters")
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(c, len(numbers)) for c in clusters]
    sums = np.bincount(index, weights=values).astype(np.float64)
    return sums, np.bincount(index).astype(np.float64)


def _bootstrap(sums: Floats, sizes: Floats, seed: int) -> tuple[float, float]:
    from scipy.stats import bootstrap

    if len(sums) < 2:
        return float("nan"), float("nan")

    def mean(s: Floats, n: Floats, axis: int) -> Any:
        return s.sum(axis) / n.sum(axis)

    drawn = bootstrap(
        (sums, sizes), mean, paired=True, vectorized=True, n_resamples=RESAMPLES, batch=1000,
        confidence_level=LEVEL, method="percentile", rng=np.random.default_rng(seed),
    )  # fmt: skip
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def cluster_test(a: ArrayLike, b: ArrayLike, clusters: Sequence[Hashable]) -> float:
    """Two-sided p that two policies score alike, by exchanging their scores on whole contexts (sign flips).

    Unlike McNemar's it does not take questions that share a context for independent.
    """
    first, second = _floats(a, "a"), _floats(b, "b")
    if len(first) != len(second):
        raise ValueError(f"paired scores must be of the same questions, got {len(first)} and {len(second)}")
    return sign_flips(_by_cluster(first - second, clusters)[0])


def sign_flips(differences: ArrayLike) -> float:
    """Two-sided p that the differences, one for each context, are as likely the other way round.

    Exact where flips add up to no more than `MOST_SUMS` different sums: up to 16 contexts whatever they score, and any
    number where they differ by whole questions. Sampled beyond that.
    """
    difference = _floats(differences, "differences")
    difference = difference[np.abs(difference) > ROUNDING]  # a flip changes nothing elsewhere
    if len(difference) < 2:  # one context alone: flipped or not, it is as extreme
        return 1.0
    difference = difference / np.abs(difference).max()
    sums: Floats = np.zeros(1)  # what the flips so far may add up to
    share: Floats = np.ones(1)  # how likely each is
    for one in difference:
        found = np.concatenate([sums + one, sums - one])
        _, first, place = np.unique(found.round(9), return_index=True, return_inverse=True)
        sums, share = found[first], np.bincount(place, weights=np.concatenate([share, share]) / 2).astype(np.float64)
        if len(sums) > MOST_SUMS:
            return _sampled_flips(difference)
    return min(1.0, float(share[np.abs(sums) > abs(difference.sum()) - 1e-8].sum()))


def _sampled_flips(difference: Floats) -> float:
    from scipy.stats import permutation_test

    def total(d: Floats, axis: int) -> Any:
        return d.sum(axis)

    return float(
        permutation_test(
            (difference,), total, permutation_type="samples", vectorized=True, n_resamples=RESAMPLES,
            batch=1000, alternative="two-sided", rng=np.random.default_rng(0),
        ).pvalue
    )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Policy a against policy b: the difference of scores, the discordant questions, and the tests."""

    a: str
    b: str
    difference: Estimate
    wins: int
    losses: int
    mcnemar: float
    sign: float
    cluster: float
    mcnemar_holm: float = float("nan")
    sign_holm: float = float("nan")
    cluster_holm: float = float("nan")


def compare(
    answers: dict[str, ArrayLike],
    pairs: Sequence[tuple[str, str]],
    clusters: Sequence[Hashable],
    *,
    scores: dict[str, ArrayLike] | None = None,
) -> list[Comparison]:
    """All `pairs` of policies as one family: p-values raw and Holm-corrected over it.

    `answers` are correct or not; `scores`, where a task gives shares of a point, carry the difference.
    """
    comparisons = []
    for a, b in pairs:
        wins, losses = discordant(answers[a], answers[b])
        x, y = (_floats((scores or answers)[name], name) for name in (a, b))
        difference = clustered(x - y, clusters)
        tests = mcnemar(wins, losses), sign_test(wins, losses), cluster_test(x, y, clusters)
        comparisons.append(Comparison(a, b, difference, wins, losses, *tests))
    corrected = zip(
        *(holm([getattr(c, test) for c in comparisons]) for test in ("mcnemar", "sign", "cluster")), strict=True
    )
    return [
        dataclasses.replace(c, mcnemar_holm=m, sign_holm=s, cluster_holm=k)
        for c, (m, s, k) in zip(comparisons, corrected, strict=True)
    ]


@dataclass(frozen=True)
class Decomposition:
    """A router's lift over top-k at the same budget: what any policy gets for the extra blocks, and what choosing
    the tiles adds. `lift = budget + selectivity`, exactly."""

    lift: Estimate
    budget: Estimate
    selectivity: Estimate


def decompose(router: ArrayLike, topk: ArrayLike, matched: ArrayLike, clusters: Sequence[Hashable]) -> Decomposition:
    """Splits a router's lift over plain top-k at its budget by a control that keeps as much as the router did."""
    r, t, m = _floats(router, "router"), _floats(topk, "topk"), _floats(matched, "matched")
    if not len(r) == len(t) == len(m):
        raise ValueError(f"scores must be of the same questions, got {len(r)}, {len(t)} and {len(m)}")
    return Decomposition(*(clustered(x, clusters) for x in (r - t, m - t, r - m)))
