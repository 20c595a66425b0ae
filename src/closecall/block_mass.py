"""How much softmax weight a row can put on a key block, from summaries of the block alone.

Let a block hold n keys whose scaled products with a row are l_1..l_n, and call sum_j exp(l_j) its weight. Three facts
bound every l_j or the weight, each from a summary that does not depend on the row:

- box: l_j <= scale * sum_d max(q_d high_d, q_d low_d), Quest's score (Eq. 2);
- ball: l_j <= scale * (q . mean + |q| radius), by Cauchy-Schwarz;
- Bennett: among all numbers with mean m, none above m + b and variance at most s2, the mean of exp is largest for two
  values, so that weight <= n exp(m) [b^2 exp(-s2 / b) + s2 exp(b)] / (b^2 + s2). Here m = scale * q . mean is exact,
  b comes from the box or the ball, and s2 = scale^2 |q|^2 times the largest eigenvalue of the keys' covariance.

From below, weight >= n exp(m), by convexity.

All in float64, and rounded outwards: every inequality holds for the exact numbers, not only up to rounding. The slack
is counted from the number of operations and the size of what they act on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDOFF = 2.0**-53  # of float64
# More than a hundred roundings of the logarithms below, none of which exceeds 1200 in size.
HAIR = 2.0**-35
_CHUNK = 64  # blocks that are centred at once


@dataclass(frozen=True, eq=False)
class Keys:
    """The blocks of one sequence's keys for one key head; float64, `[n_blocks, D]` or `[n_blocks]`."""

    block: int
    size: Tensor  # how many keys
    high: Tensor
    low: Tensor
    mean: Tensor
    radius: Tensor  # no key is further from the mean
    variance: Tensor  # no direction has a larger one
    reach: Tensor  # norm of the largest magnitude per dimension: no |q| . |k| exceeds |q| times it

    def part(self, first: int, stop: int) -> Keys:
        """The blocks from `first` to before `stop`."""
        parts = (self.size, self.high, self.low, self.mean, self.radius, self.variance, self.reach)
        return Keys(self.block, *(x[first:stop] for x in parts))


@dataclass(frozen=True, eq=False)
class Values:
    """The blocks of one sequence's values; float64."""

    mean: Tensor  # [n_blocks, Dv]
    radius: Tensor  # [n_blocks]

    def part(self, first: int, stop: int) -> Values:
        """The blocks from `first` to before `stop`."""
        return Values(*(x[first:stop] for x in (self.mean, self.radius)))


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """x `[N, D]` as float64 `[n_blocks, block, D]`, a short last block filled with copies of its last key, and the
    number of real keys `[n_blocks]`."""
    missing = -x.shape[0] % block
    filled = torch.cat([x, x[-1:].expand(missing, -1)]).double().view(-1, block, x.shape[1])
    size = torch.full((filled.shape[0],), block, dtype=torch.float64, device=x.device)
    size[-1] -= missing
    return filled, size


def _centred(filled: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The means of the real keys, and the keys less them, 0 for the copies that fill a short block."""
    real = torch.arange(filled.shape[1], device=filled.device) < size[:, None]
    mean = filled.where(real[..., None], 0.0).sum(1) / size[:, None]
    return mean, (filled - mean[:, None]).where(real[..., None], 0.0)


def _largest_eigenvalue(away: Tensor, size: Tensor) -> Tensor:
    """At least the largest eigenvalue of each block's covariance, from its centred keys `[n, block, D]`.

    (sum of eigenvalues^8)^(1/8), by squaring twice the smaller one of the covariance and the Gram matrix, which share
    their eigenvalues. Centring around a rounded mean can only add to them.
    """
    block, dim = away.shape[1:]
    pairs = away @ away.mT if block <= dim else away.mT @ away
    side = pairs.shape[-1]
    trace = pairs.diagonal(dim1=-2, dim2=-1).sum(-1)
    unit = pairs / trace.where(trace > 0, 1.0)[:, None, None]
    square = unit @ unit
    top = torch.linalg.matrix_norm(square @ square) ** 0.25
    rounding = float(4 * side**3 + side * (dim + block + 16)) * ROUNDOFF
    found: Tensor = trace * top.clamp(max=1.0) / size * (1 + rounding)
    return found


def summarise_keys(keys: Tensor, block: int) -> Keys:
    """From keys `[N, D]` of any float type."""
    found: list[tuple[Tensor, ...]] = []
    up = 1 + (keys.shape[1] + 8) * ROUNDOFF
    for part in torch.split(keys, _CHUNK * block):
        filled, size = _blocks(part, block)
        high, low = filled.amax(1), filled.amin(1)
        mean, away = _centred(filled, size)
        radius = torch.linalg.vector_norm(away, dim=-1).amax(1) * up
        reach = torch.linalg.vector_norm(high.abs().maximum(low.abs()), dim=-1) * up
        found.append((size, high, low, mean, radius, _largest_eigenvalue(away, size), reach))
    return Keys(block, *(torch.cat(x) for x in zip(*found, strict=True)))


def summarise_values(values: Tensor, block: int) -> Values:
    """From values `[N, Dv]` of any float type."""
    found: list[tuple[Tensor, ...]] = []
    up = 1 + (values.shape[1] + 8) * ROUNDOFF
    for part in torch.split(values, _CHUNK * block):
        filled, size = _blocks(part, block)
        mean, away = _centred(filled, size)
        found.append((mean, torch.linalg.vector_norm(away, dim=-1).amax(1) * up))
    return Values(*(torch.cat(x) for x in zip(*found, strict=True)))


def norms(rows: Tensor) -> Tensor:
    """At least the 2-norms of float64 rows `[..., D]`."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return length * (1 + (rows.shape[-1] + 8) * ROUNDOFF)


def longest_so_far(x: Tensor) -> Tensor:
    """float64 `[N]`: at least the norms of the vectors of `[N, D]` up to each; a NaN or an infinity stays."""
    found, longest = [], x.new_zeros((), dtype=torch.float64)
    for part in torch.split(x, 4096):  # torch would make float64 of all vectors at once
        length: Tensor = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64)
        length = (length * (1 + (x.shape[-1] + 8) * ROUNDOFF)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        found.append(length.cummax(0).values.clamp(min=longest))
        longest = found[-1][-1]
    return torch.cat(found)


def _slack(size: Tensor, dim: int, block: int) -> Tensor:
    """Bounds what all the sums of products below lose, sums over `block` keys among them. `size`: |q| . |k|."""
    return 4 * (dim + block + 16) * ROUNDOFF * size


def weight_above(rows: Tensor, keys: Keys, scale: float, seen: Tensor, softcap: float = 0.0) -> Tensor:
    """Log-weights `[R, n_blocks]` that no block exceeds, for float64 rows `[R, D]`.

    seen: `[R, n_blocks]`, how many keys of each block the row sees, the first ones; none is -inf. A NaN where a key or
    the row is not finite.
    """
    length = norms(rows)[:, None]
    size = scale * length * keys.reach
    slack = _slack(size, rows.shape[1], keys.block)
    box = scale * (rows.clamp(min=0) @ keys.high.mT + rows.clamp(max=0) @ keys.low.mT)
    middle = scale * (rows @ keys.mean.mT)
    top = box.minimum(middle + scale * length * keys.radius) + slack
    if softcap:  # rises with its argument, so it keeps the bound on every key; it does not keep the mean
        mean_exp = softcap * (top / softcap).tanh() + 16 * ROUNDOFF * softcap
    else:
        b = (top - middle + slack).clamp(min=0)
        s2 = (scale * length).square() * keys.variance * (1 + 16 * ROUNDOFF)
        s2 = s2.clamp(min=1e-280)  # so that its logarithm exists; a larger variance only raises the bound
        both = (b.square() + s2).log()
        bennett = torch.logaddexp(2 * b.log() - s2 / b, s2.log() + b) - both + middle + slack
        # The mean is that of the whole block, and squares must not overflow.
        holds = (seen == keys.size) & (b < 1e100)
        mean_exp = top.minimum(torch.where(holds, bennett, top))
    # A minimum with a NaN is the NaN, but a comparison hides it.
    known = top.isfinite() & middle.isfinite()
    return torch.where(seen > 0, torch.where(known, mean_exp + seen.log() + HAIR, torch.nan), -torch.inf)


def weight_below(rows: Tensor, keys: Keys, scale: float) -> Tensor:
    """Log-weights `[R, n_blocks]` that every block reaches for a row that sees all its keys."""
    slack = _slack(scale * norms(rows)[:, None] * keys.reach, rows.shape[1], keys.block)
    return scale * (rows @ keys.mean.mT) - slack + keys.size.log() - HAIR


def distance_above(points: Tensor, values: Values) -> Tensor:
    """Distances `[R, n_blocks]` that no value of the block exceeds, from float64 points `[R, Dv]`."""
    longest = norms(points)[:, None] + norms(values.mean)
    square = longest.square() * (2 * points.shape[1] + 16) * ROUNDOFF
    square = square + points.square().sum(-1)[:, None] + values.mean.square().sum(-1) - 2 * points @ values.mean.mT
    return (square.clamp(min=0).sqrt() + values.radius) * (1 + 16 * ROUNDOFF)


def share_above(dropped: Tensor, kept: Tensor, n_terms: int) -> Tensor:
    """exp(dropped) / (exp(dropped) + exp(kept)) in float32, rounded upwards; `dropped` is at least, `kept` at most the
    log of a weight that was summed from `n_terms` terms. Exactly 0 where nothing was dropped."""
    sizes = dropped.abs().nan_to_num(posinf=0.0) + kept.abs().nan_to_num(posinf=0.0)
    excess = dropped - kept + (8 * sizes + 4 * n_terms + 32) * ROUNDOFF
    share = up(excess.sigmoid()).clamp(max=1.0)
    return share.masked_fill(dropped == -torch.inf, 0.0)


def up(x: Tensor) -> Tensor:
    """float32 numbers that exceed float64 ones by at least a quarter of a float32 rounding."""
    narrow = x.float()
    return narrow.nextafter(torch.full_like(narrow, torch.inf))


@dataclass(frozen=True)
class Arithmetic:
    """How far a backend's results may be from exact ones: what every backend is tested to keep to.

    A logit is a product of D terms, scaled, shifted by the running maximum and put into an exponential, in float32 (in
    float64 for float64 inputs): it is off by at most `u (D + 16) |q| . |k|`. Each exponential, addition and rescaling
    costs a few roundings relative to the sum. For bfloat16 the probabilities may be rounded before they meet V.
    """

    dtype: torch.dtype
    dim: int
    softcap: float

    @property
    def roundoff(self) -> float:
        return ROUNDOFF if self.dtype == torch.float64 else 2.0**-24

    def logit_error(self, size: Tensor) -> Tensor:
        """`size`: at least scale * |q| . |k| of every kept key."""
        return self.roundoff * (self.dim + 16) * (size + 8 * self.softcap / (self.dim + 8))

    def _relative(self, n_keys: int, n_blocks: Tensor) -> Tensor:
        return 1.01 * self.roundoff * (2 * n_keys + 16 * n_blocks + 32) + n_keys * 2.0**-120

    def lse_error(self, size: Tensor, n_keys: int, n_blocks: Tensor, lse: Tensor) -> Tensor:
        """Of a log-sum-exp over at most `n_keys` keys of `n_blocks` blocks."""
        known = lse.abs().nan_to_num(posinf=0.0)
        return self.logit_error(size) + self._relative(n_keys, n_blocks) + 4 * self.roundoff * known

    def out_error(self, size: Tensor, n_keys: int, n_blocks: Tensor, out: Tensor, longest: Tensor) -> Tensor:
        """2-norm of an output's error; `longest`: at least the norm of every kept value."""
        relative = torch.expm1(2 * self.logit_error(size)) + self._relative(n_keys, n_blocks)
        if self.dtype == torch.bfloat16:
            relative = relative + 1.01 * 2.0**-8
        stored = torch.finfo(self.dtype)
        error = relative * longest
        return error + stored.eps * (norms(out) + error) + math.sqrt(out.shape[-1]) * stored.smallest_normal
