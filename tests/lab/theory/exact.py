"""Identification errors without sampling: integrals over the best dropped block's relevance, in float64."""

from __future__ import annotations

import math

import numpy as np
import torch


def _density(x: np.ndarray, s: float, tau: float) -> np.ndarray:
    return np.exp(-(((x - s) / tau) ** 2) / 2) / (tau * math.sqrt(2 * math.pi))


def _below(x: np.ndarray, s: float, tau: float) -> np.ndarray:
    return torch.special.ndtr(torch.from_numpy((x - s) / tau)).numpy()


def _fewer(chances: list[np.ndarray], k: int) -> np.ndarray:
    """The chance that fewer than k of independent events happen, per grid point."""
    counts = np.zeros((len(chances) + 1, *chances[0].shape))
    counts[0] = 1.0
    for p in chances:
        counts[1:] = counts[1:] * (1 - p) + counts[:-1] * p
        counts[0] *= 1 - p
    return counts[:k].sum(0)


def missed(scores: list[float], kept: int, k: int, tau: float) -> float:
    """The chance that the first `kept` blocks do not hold the true best k: that the best of the others is beaten by
    fewer than k of them. The trapezoidal rule on a smooth integrand that vanishes at both ends: exact to rounding."""
    inside, outside = scores[:kept], scores[kept:]
    if not outside:
        return 0.0
    x = np.linspace(min(scores) - 9 * tau, max(scores) + 9 * tau, 6001)
    below = [_below(x, s, tau) for s in outside]
    best = np.zeros_like(x)
    for j, s in enumerate(outside):
        others = np.prod([b for i, b in enumerate(below) if i != j], axis=0) if len(below) > 1 else 1.0
        best += _density(x, s, tau) * others
    return float((best * _fewer([1 - _below(x, s, tau) for s in inside], k)).sum() * (x[1] - x[0]))


def errors(scores: list[float], keep: int, expanded: int, tau: float) -> tuple[float, float]:
    """Of the plain and of the expanded cut."""
    return missed(scores, keep, keep, tau), missed(scores, min(expanded, len(scores)), keep, tau)
