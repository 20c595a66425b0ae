"""The closed form of the paper's Appendix D: Lemma 1, Proposition 1 and the band refinement, with what they assume.

Three corrections, each of which the tests need:

- The two rules differ in at most min(n, T - n) tiles, n = ceil(q T). That share, not min(q, 1 - q), multiplies C_q:
  with few tiles ceil(q T) / T is well above q (one tile in three at q = 0.1).
- The band refinement is stated for eps-bar -> 0. With the rule that takes the smallest cutoff gaps as a stop between
  the router and the best rule, it holds for every eps-bar: the router differs from that rule in at most half the band,
  and that rule from the best one by at most eps-bar a tile.
- Tiles that violate (A1) or (A2) cost at most 1 each, so Delta_2 and beta may be quantiles instead of extremes: the
  violating share is added, and the bound still holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from .gaps import Tiles, check_tau, floors, gaps


def tail(gap: Tensor, tau: float) -> Tensor:
    """Returns the chance that two blocks `gap` apart stand in the wrong order (V-bar of the paper)."""
    chance: Tensor = torch.special.ndtr(-gap.double() / (math.sqrt(2) * tau))
    return chance


def chi(delta2: float, tau: float) -> float:
    """Lemma 1's sum over pairs away from the cut; infinite where there is no spacing floor."""
    if not delta2 >= 0:
        raise ValueError(f"delta2 must be at least 0, a spacing of scores, got {delta2!r}")
    ratio = delta2 / check_tau(tau)
    if ratio > 60:  # below 1e-390, which float64 writes as 0
        return 0.0
    a = ratio**2 / 4
    if a == 0:
        return math.inf
    if a < 1e-6:  # more terms than are worth adding: the integral of (m + 1) exp(-a m^2) plus its largest term
        return 1 / (2 * a) + math.sqrt(math.pi / a) / 2 + 1 + 1 / math.sqrt(2 * a)
    m = torch.arange(1, math.ceil(math.sqrt(750 / a)) + 1, dtype=torch.float64)  # the rest is below exp(-750)
    return float(((m + 1) * (-a * m * m).exp()).sum())


def eps_bar(delta2: float, tau: float, extra: int) -> float:
    """Bounds how far V* may be from V-bar, relatively; expansion adds `extra` = (rho - 1) k blocks."""
    x = chi(delta2, tau)
    reach = min(extra * delta2 / tau, 1e3)  # its square must not overflow, and exp(-250000) is 0 already
    return x + (1 + x) * math.exp(-(reach**2) / 4) if x < math.inf else math.inf


@dataclass(frozen=True, eq=False)
class Localisation:
    """Lemma 1 per tile: `low <= value <= high` for the errors of both cuts and for V*, where (A1) holds."""

    error: tuple[Tensor, Tensor]
    error_expanded: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    holds: Tensor  # bool [n]: the tile's spacings are at least delta2


def localise(tiles: Tiles, tau: float, delta2: float) -> Localisation:
    """Evaluates Lemma 1's inequalities for every tile, cut off at the trivial 0 and 1."""
    check_tau(tau)
    g = gaps(tiles)
    near, far = tail(g.cutoff, tau), tail(g.expansion, tau)
    zero, one = torch.zeros_like(near), torch.ones_like(near)
    holds = floors(tiles) >= delta2
    x = chi(delta2, tau)
    if x == math.inf:  # no spacing floor: only what needs none
        return Localisation((near, one), (zero, one), (zero, one), holds)
    eps = x + (1 + x) * (-((tiles.extra.double() * delta2 / tau).clamp(max=1e3) ** 2) / 4).exp()
    return Localisation(
        error=(near, (near * (1 + x)).clamp(max=1.0)),
        error_expanded=(zero, (far * (1 + x)).clamp(max=1.0)),
        value=(((1 - eps) * near).clamp(min=0.0), ((1 + eps) * near).clamp(max=1.0)),
        holds=holds,
    )


def triggered(q: float, total: int) -> int:
    """ceil(q * total), for q as the decimal that was typed."""
    if not 0 <= q <= 1:
        raise ValueError(f"q must be in [0, 1], the fraction of tiles to expand, got {q!r}")
    return math.ceil(Fraction(str(q)) * total)


@dataclass(frozen=True)
class RegretBound:
    """Proposition 1 for one set of tiles. `bound` is the sharpest of what was proved."""

    bound: float  # on the regret of the margin quantile
    branch: str  # the smallest of C_q's branches: "cap", "half" or "slope"; "none" where every tile or none is expanded
    c_q: float
    branches: dict[str, float]
    share: float  # of tiles in which two rules can differ
    band: float  # the bound by the band refinement
    band_mass: float  # m_q(beta): tiles whose cutoff gap lies in the band around gamma
    active_band_mass: float  # the same among tiles without a tie at the cut
    violating: float  # tiles for which (A1) or (A2) fails at this delta2 and beta, already in both bounds
    gamma: float
    beta: float
    delta2: float
    chi: float
    eps_bar: float
    tau: float
    q: float
    n_tiles: int

    @property
    def regime(self) -> str:
        """Says whether spacings dominate, so that the closed form is sharper than its caps, or noise does."""
        return "spacing-dominated" if self.eps_bar < 1 else "noise-dominated"


def spread_variation(spread: Tensor) -> float:
    """CV(r), the observable stand-in for beta."""
    r = spread.double()
    return float(r.std(correction=0) / r.mean()) if bool((r > 0).any()) else math.nan


def regret_bound(
    tiles: Tiles, tau: float, q: float, *, delta2: float | None = None, beta: float | None = None
) -> RegretBound:
    """Bounds the regret of expanding the ceil(q T) tiles of smallest margin, against the best choice of as many.

    `delta2` and `beta` default to what all tiles keep to: the smallest spacing away from the cut and the largest
    relative deviation of the spread from its mean. (A2) needs beta < 1; a larger one leaves the caps only.
    """
    check_tau(tau)
    tiles = Tiles(tiles.scores.double(), tiles.keep, tiles.expanded)
    g = gaps(tiles)
    total = len(tiles.keep)
    n = triggered(q, total)
    mean_spread = float(g.spread.mean())
    away = (g.spread / mean_spread - 1).abs() if mean_spread > 0 else torch.ones_like(g.spread)
    floor = floors(tiles)
    delta2 = float(floor.amin().clamp(max=1e300)) if delta2 is None else float(delta2)
    beta = float(away.max()) if beta is None else float(beta)
    if not beta >= 0:
        raise ValueError(f"beta must be at least 0, a relative deviation of the spread, got {beta!r}")
    violating = float(((floor < delta2) | (away > beta)).double().mean())
    x, eps = chi(delta2, tau), eps_bar(delta2, tau, int(tiles.extra.min()))
    share = min(n, total - n) / total

    gamma = float(g.margin.sort().values[n - 1]) * mean_spread if n else 0.0
    density = math.exp(-((gamma * (1 - beta) / tau) ** 2) / 4) / math.sqrt(2 * math.pi)
    slope = math.sqrt(2) * beta * gamma / tau * density if beta < 1 else math.inf
    branches = {"cap": 1.0, "half": (1 + eps) / 2, "slope": slope + eps}
    branch = min(branches, key=branches.__getitem__) if share else "none"
    c_q = min(branches.values()) if share else 0.0

    # The tiles that set beta lie on the band's very edge: a few roundings must not put them outside.
    edge = 2.0**-46 * gamma * (1 + beta)
    inside = (g.cutoff >= gamma * (1 - beta) - edge) & (g.cutoff <= gamma * (1 + beta) + edge) & (n > 0)
    active = g.cutoff > 0
    band_mass = float(inside.double().mean())
    # A violating tile may be misrouted from outside the band; its pair costs at most 1, which `violating` covers.
    band = share * eps + min(share, band_mass / 2) * branches["slope"] if beta < 1 and share else math.inf
    bound = min(share, min(share * c_q, band) + violating) if share else 0.0
    return RegretBound(
        bound=bound, branch=branch, c_q=c_q, branches=branches, share=share, band=band, band_mass=band_mass,
        active_band_mass=float(inside[active].double().mean()) if bool(active.any()) else math.nan, violating=violating,
        gamma=gamma, beta=beta, delta2=delta2, chi=x, eps_bar=eps, tau=tau, q=q, n_tiles=total,
    )  # fmt: skip
