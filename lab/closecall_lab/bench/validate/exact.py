"""What is right, in float64, and how far from it a correct answer may be.

The bounds follow from the data and the number of operations, with `u` the unit roundoff of the device's float32 sums.
None is tuned: an answer outside its bound is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from closecall.backends import reference
from closecall.geometry import Geometry
from closecall.policy import Policy
from closecall.ranking import Ranked, margins
from closecall.rules.topk import TopK
from closecall.selection import Selection, each_head

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
# Half the distance between the smallest numbers of a type: what rounding a weight below the normal range costs.
LEAST_STEP = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}


@dataclass(frozen=True, eq=False)
class Scores:
    """Tile scores and bounds on their rounding errors, `[B, H, T, n_blocks]` in float64; margins `[B, H, T]`."""

    score: Tensor
    error: Tensor
    free: Tensor  # bool [B, 1, T, n_blocks]: visible and not forced
    margin: Tensor
    margin_error: Tensor


def scores(q: Tensor, k: Tensor, policy: Policy, geometry: Geometry, scale: float, u: float) -> Scores:
    """Exact tile scores and margins with their bounds, for rules that rank blocks. All tensors on the CPU."""
    assert policy.scorer is not None
    assert isinstance(policy.rule, TopK)
    wide_q, wide_k = q.double(), k.double()
    score = reference.tile_scores(wide_q, wide_k, policy, geometry, scale)
    # Of absolute values, both scorers give the sum of the sizes of the terms that they add up.
    size = reference.tile_scores(wide_q.abs(), wide_k.abs(), policy, geometry, scale)
    operations = q.shape[3] + (policy.block + 4 if policy.scorer.name == "mean" else 6)
    rows = geometry.rows.double()[:, None, :, None] if policy.aggregate == "mean" else 0
    error = 1.01 * u * (operations + rows) * size
    block = torch.arange(geometry.n_blocks)
    free = (block < geometry.visible[..., None]) & ~geometry.forced_mask(policy.sinks)
    free = free[:, None]
    ranked = reference.rank(wide_q, wide_k, policy, geometry, scale)
    margin, margin_error = _margin(ranked, error.masked_fill(~free, 0.0), policy.rule.tile_budget, u)
    group = q.shape[1] // score.shape[1]
    score, error, margin, margin_error = (each_head(x, group) for x in (score, error, margin, margin_error))
    return Scores(score, error, free, margin, margin_error)


def _margin(ranked: Ranked, error: Tensor, tile_budget: int, u: float) -> tuple[Tensor, Tensor]:
    """The margin is a quotient of differences of order statistics, each off by at most twice the largest error."""
    margin = margins(ranked, tile_budget)
    width = ranked.scores.shape[-1]
    cut = (tile_budget - ranked.forced).clamp(0, width - 1)[:, None, :, None].expand(*margin.shape, 1)
    whole = ranked.scores[..., 0] - ranked.scores.gather(-1, cut).squeeze(-1)
    off = 2 * error.amax(-1)
    bound = (off + margin * off) / (whole - off) + 4 * u
    return margin, torch.where(whole <= 2 * off, 1.0, bound)  # a quotient of two roundings is anything in [0, 1]


@dataclass(frozen=True, eq=False)
class Attended:
    """Output `[B, H, M, Dv]` and log-sum-exp `[B, H, M]` in float64, each with its bound."""

    out: Tensor
    lse: Tensor
    out_error: Tensor
    lse_error: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, softcap: float, u: float) -> Attended:
    """Attention over the kept blocks. All tensors on the CPU; bounds are for answers in q's type."""
    batch, heads, length, dim = q.shape
    shape = (batch, heads, length, v.shape[3])
    out, out_error = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    lse = torch.full(shape[:3], -torch.inf, dtype=torch.float64)
    lse_error = torch.zeros(shape[:3], dtype=torch.float64)
    kept, geometry = selection.kept_mask(), selection.geometry
    group = (k.shape[1], heads // k.shape[1])
    for b, t, rows, keys, pos in geometry.tiles():
        position = torch.arange(keys.stop - keys.start)
        causal = position <= torch.arange(pos, len(position))[:, None]
        sees = causal & kept[b, :, t][:, None, position // geometry.block]  # [H, rows, keys]
        mine = torch.unflatten(q[b, :, rows].double(), 0, group)
        ks, vs = k[b, :, None, keys].double(), v[b, :, None, keys].double()
        logits = scale * (mine @ ks.mT).flatten(0, 1)
        sizes = scale * (mine.abs() @ ks.abs().mT).flatten(0, 1)
        if softcap:  # tanh never enlarges an error of its argument, and adds a few roundings of softcap * 1
            logits = softcap * (logits / softcap).tanh()
            sizes = sizes + 8 * softcap / (dim + 8)
        logits, sizes = logits.masked_fill(~sees, -torch.inf), sizes.masked_fill(~sees, 0.0)
        sums = logits.logsumexp(-1)
        p = torch.where(sums.isneginf()[..., None], 0.0, (logits - sums[..., None]).exp())
        values = vs.expand(-1, group[1], -1, -1).flatten(0, 1)
        result = p @ values
        blocks = selection.counts[b, :, t].double()[:, None, None]
        error, lse_off = _bounds(sizes, p, values, sees, result, sums, blocks, dim, q.dtype, u)
        out[b, :, rows], lse[b, :, rows] = result, sums
        out_error[b, :, rows], lse_error[b, :, rows] = error, lse_off
    return Attended(out, lse, out_error, lse_error)


def _bounds(
    sizes: Tensor, p: Tensor, v: Tensor, sees: Tensor, out: Tensor, lse: Tensor, blocks: Tensor, dim: int,
    dtype: torch.dtype, u: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Bounds on the error of one tile's output `[H, rows, Dv]` and log-sum-exp `[H, rows]`, for exact inputs.

    sizes: scale * sum_d |q_d k_d| per (row, key); p: exact probabilities; out, lse: the exact results.

    - A logit is a product of `dim` terms, scaled, shifted by the running maximum (at most the largest size) and put
      into an exponential that may work in base 2: it is off by at most `delta_j = u ((dim + 8) size_j + 8 max size)`.
    - A probability exp(l_j + e_j) / sum_i exp(l_i + e_i) with |e| <= delta is then off by a factor of at most
      exp(delta_j + log sum_i p_i exp(delta_i)).
    - Each exponential, each addition to numerator and denominator and each rescaling when a block raises the running
      maximum costs a few roundings relative to sum_j p_j |v_j|.
    - A tensor core multiplies in the inputs' type: weights may be rounded to it before they meet V.
    - The output is rounded to its type. Exponentials below float32's range may vanish.
    """
    delta = u * ((dim + 8) * sizes + 8 * sizes.amax(-1, keepdim=True))
    spread = (p * delta.exp()).sum(-1, keepdim=True).clamp(min=1.0).log()
    roundings = 1.01 * u * (2 * (p > 0).sum(-1, keepdim=True) + 16 * blocks + 32)
    relative = (delta + spread).expm1() + roundings
    size = v.abs()
    vanishing = p.shape[-1] * 2.0**-120 * size.amax((-2, -1), keepdim=True)
    if dtype != torch.float32:
        relative = relative + 1.01 * UNIT_ROUNDOFF[dtype]
        vanishing = vanishing + LEAST_STEP[dtype] * (sees.double() @ size)
    error = (p * relative) @ size + vanishing
    error = error + UNIT_ROUNDOFF[dtype] * (out.abs() + error) + SMALLEST[dtype]
    seen = lse.isfinite()
    lse_error = (spread + roundings)[..., 0] + 4 * u * lse.where(seen, 0.0).abs()
    return error, lse_error.where(seen, 0.0)
