"""The specification in plain PyTorch: read it beside the paper. Slow, on any device, in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import Geometry
from ..policy import Policy
from ..ranking import Ranked
from ..scorers.base import Chunk, View, accumulator, of_rows, run_means
from ..scorers.reductions import Of, log_shares, shares
from ..selection import Selection, gather_kept
from ..summaries import Summaries
from . import empty_outputs

__all__ = ["attend", "gather_kept", "rank", "tile_scores", "why_not"]


def why_not(q: Tensor) -> str | None:
    return None


def tile_scores(
    q: Tensor, k: Tensor, policy: Policy, geometry: Geometry, scale: float, every_row: Tensor | None = None,
    looked_at: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`[B, H, T, n_blocks]` in float32, -inf for blocks a tile does not see (Steps 1 and 2, Eq. 1 to 3).

    Under a row-normalised aggregate the scores are estimated shares of softmax mass in [0, 1], exact for no block but
    the forced ones; over the blocks that a tile sees, those of `mass` add up to 1. Under `softmax` they
    are logs of shares. `every_row` is as in `rank`. What a tile does not look at is to it as if it did not see it:
    `looked_at`, bool `[B, H, T, n_blocks]`.

    Under `share="group"` they are `[B, Hkv, T, n_blocks]`: the largest of the scores that the heads of a KV head give.
    """
    assert policy.scorer is not None
    batch, heads, _, _ = q.shape
    group = heads // k.shape[1]  # query head h reads key head h // group
    mass = policy.reduction.of is Of.MASS
    if every_row is None:
        every_row = policy.every_row(geometry)
    scores = q.new_full((batch, heads, geometry.n_tiles, geometry.n_blocks), -torch.inf, dtype=accumulator(q.dtype))
    for b, tiles, rows, keys in geometry.spans():
        single = () if every_row is None else tuple(every_row[b, tiles].tolist())
        grid = (policy.block, policy.tile, policy.sinks, mass, policy.pool, single, policy.outlying)
        for shared in range(k.shape[1]):
            heads_here = slice(shared * group, (shared + 1) * group)
            view = View(q[b, heads_here, rows], k[b, shared, keys], scale, *grid)
            for chunk, row_scores in policy.scorer.scan(view):
                first = tiles.start + chunk.tiles.start
                at = slice(first, first + len(chunk.tiles))
                unseen = _unseen(view, chunk)
                if looked_at is not None:
                    unseen = unseen | ~looked_at[b, heads_here, at, : chunk.seen]
                per_tile = _reduced(view, chunk, row_scores, policy, unseen)
                per_tile = per_tile.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
                scores[b, heads_here, at, : chunk.seen] = per_tile.masked_fill(unseen, -torch.inf)
    return torch.unflatten(scores, 1, (-1, group)).amax(2) if policy.share == "group" else scores


def _unseen(view: View, chunk: Chunk) -> Tensor:
    """bool `[tiles, seen]`: blocks that begin behind the tile's last row."""
    block = torch.arange(chunk.seen, device=chunk.rows.device)
    return block * view.block > chunk.positions[:, -1:]


def _reduced(view: View, chunk: Chunk, row_scores: Tensor, policy: Policy, unseen: Tensor) -> Tensor:
    """Reduces the scorer's `[G, tiles, scored, seen]` to tile scores `[G, tiles, seen]`."""
    assert policy.scorer is not None
    unseen = unseen.unsqueeze(-2)  # the same for all rows
    if policy.reduction.of is Of.MASS:
        return _normalised(view, chunk, row_scores, policy, unseen)
    if policy.reduction.of is Of.SOFTMAX:
        masses = row_scores.log() if policy.scorer.votes else row_scores
        row_scores = log_shares(masses.masked_fill(unseen, -torch.inf))
    return policy.reduction(row_scores)


def _normalised(view: View, chunk: Chunk, row_scores: Tensor, policy: Policy, unseen: Tensor) -> Tensor:
    """Tile scores `[G, tiles, seen]` from log masses, or votes, `[G, tiles, scored, seen]`."""
    assert policy.scorer is not None
    reduce = policy.reduction
    if policy.scorer.votes:
        votes = row_scores.nan_to_num(nan=0.0).masked_fill(unseen, 0.0)
        total = votes.sum(-1, keepdim=True)
        return reduce(torch.where(total > 0, votes / total, 0.0))
    exact, blocks = _forced_masses(view, chunk)
    if (pool := view.pool_of(chunk.tiles.start)) > 1:
        means = _of_runs(exact, blocks, pool)
        exact = means if chunk.outlying is None else torch.cat([means, of_rows(exact, chunk.outlying)], -2)
    masses = torch.where(unseen, -torch.inf, row_scores.expand(-1, -1, chunk.scored.shape[2], -1))
    masses.scatter_(-1, blocks[:, None].expand_as(exact), exact)
    return reduce(shares(masses))


def _forced_masses(view: View, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Exact log masses `[G, tiles, rows, forced]`, causal inside the tile's own blocks, and which blocks they are."""
    wide, device = chunk.rows.dtype, chunk.rows.device
    last = chunk.positions[:, -1:] // view.block
    own = chunk.positions[:, :1] // view.block + torch.arange(view.most_own, device=device)
    sinks = torch.arange(view.sinks, device=device).expand(len(last), -1)
    blocks = torch.cat([sinks, own], 1).minimum(last)  # some twice, with the same mass
    place = (blocks[..., None] * view.block + torch.arange(view.block, device=device)).flatten(1)  # [tiles, keys]
    keys = view.k[place.clamp(max=view.k.shape[0] - 1)].to(wide)
    logits = view.scale * (chunk.rows.transpose(0, 1).flatten(1, 2) @ keys.mT)  # [tiles, G * rows, keys]
    logits = torch.unflatten(logits, 1, (chunk.rows.shape[0], -1)).transpose(0, 1)
    behind = place[:, None] > chunk.positions[..., None]  # [tiles, rows, keys]
    logits = torch.unflatten(logits.masked_fill(behind, -torch.inf), -1, (-1, view.block))
    return logits.logsumexp(-1), blocks


def _of_runs(exact: Tensor, blocks: Tensor, pool: int) -> Tensor:
    """Forced blocks' log masses `[G, tiles, runs, forced]` of means of rows, from those of the rows.

    A mean's score is the mean of its rows' scores where scores are products, and so is its forced blocks' log mass: the
    mean of what the rows' forced blocks hold together. It is shared out as the rows share theirs, on average.
    """
    twice = (blocks[:, :, None] == blocks[:, None]).tril(-1).any(-1)
    together = exact.masked_fill(twice[:, None], -torch.inf).logsumexp(-1, keepdim=True)
    shared = run_means((exact - together).exp(), pool)
    return run_means(together, pool) + shared.log()


def rank(
    q: Tensor,
    k: Tensor,
    policy: Policy,
    geometry: Geometry,
    scale: float,
    summaries: Summaries | None = None,
    every_row: Tensor | None = None,
) -> Ranked:
    """Ranks by sorting. `every_row` replaces the rule's own where its tiles are not the geometry's (paged calls)."""
    scores = tile_scores(q, k, policy, geometry, scale, every_row)
    width = policy.rule.limit(geometry.n_blocks)
    block = torch.arange(geometry.n_blocks, device=q.device)
    free = (block < geometry.visible.to(q.device)[..., None]) & ~geometry.forced_mask(policy.sinks).to(q.device)
    free = free[:, None].expand_as(scores)
    if policy.candidates:
        single = policy.every_row(geometry) if every_row is None else every_row
        best = _mask(_best(scores, free, policy.n_candidates(geometry.n_blocks))[0], geometry.n_blocks)
        free = free & (best if single is None else best | single.to(q.device)[:, None, :, None])
        looked_at = free | geometry.forced_mask(policy.sinks).to(q.device)[:, None]
        looked_at = looked_at.repeat_interleave(q.shape[1] // scores.shape[1], 1)
        scores = tile_scores(q, k, policy.replace(pool=1), geometry, scale, looked_at=looked_at)
    order, by_score = _best(scores, free, width)
    return Ranked(
        order=order.to(torch.int32),
        scores=by_score,
        visible=geometry.visible.to(q.device),
        forced=geometry.forced(policy.sinks).to(q.device),
        sequence=geometry.sequence.to(q.device),
    )


def _best(scores: Tensor, free: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best of the free blocks, `[..., width]`, and their scores; the sentinel and -inf past the end.

    Sorts in two stable passes: by score, ties to the lower index; then blocks that are not free to the end, so that
    even a free block of score -inf stands before them.
    """
    by_score, order = scores.sort(dim=-1, descending=True, stable=True)
    put_last = (~free).gather(-1, order).to(torch.int8).sort(dim=-1, stable=True)
    taken, out = put_last.indices[..., :width], put_last.values[..., :width].bool()
    sentinel = scores.shape[-1]
    return order.gather(-1, taken).masked_fill(out, sentinel), by_score.gather(-1, taken).masked_fill(out, -torch.inf)


def _mask(listed: Tensor, n_blocks: int) -> Tensor:
    """bool `[..., n_blocks]` from lists of blocks that may end in the sentinel."""
    mask = torch.zeros(*listed.shape[:-1], n_blocks + 1, dtype=torch.bool, device=listed.device)
    return mask.scatter_(-1, listed, True)[..., :n_blocks]


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    wide = accumulator(q.dtype)
    out, lse = empty_outputs(q, v)
    block = torch.arange(geometry.n_blocks + 1, device=q.device)  # one more column for the sentinel
    for b, t, rows, keys, pos in geometry.tiles():
        n = keys.stop - keys.start
        position = torch.arange(n, device=q.device)
        sees = position <= torch.arange(pos, n, device=q.device)[:, None]  # causal, aligned to the end: [rows, keys]
        for h in range(q.shape[1]):
            shared = h // (q.shape[1] // k.shape[1])
            if selection is None or bool(selection.unlisted[b, h, t]):
                mask = sees
            else:
                kept = selection.lists[b, h, t, : int(selection.counts[b, h, t])]
                mask = sees & torch.isin(block, kept)[position // geometry.block]
            logits = scale * (q[b, h, rows].to(wide) @ k[b, shared, keys].to(wide).T)
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            logits = logits.masked_fill(~mask, -torch.inf)
            top = logits.amax(-1, keepdim=True)
            weights = (logits - top.clamp(min=torch.finfo(wide).min)).exp()
            total = weights.sum(-1, keepdim=True)
            # A key that a row does not see must not reach it even as 0 * NaN.
            weighted = _masked_product(weights, v[b, shared, keys].to(wide), mask)
            out[b, h, rows] = torch.where(total == 0, 0.0, weighted / total).to(q.dtype)
            lse[b, h, rows] = torch.where(total == 0, -torch.inf, top + total.log())[:, 0].to(lse.dtype)
    return out, lse


def _masked_product(weights: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """weights @ values in which unseen values count for nothing, even where they are NaN or infinite."""
    finite = values.isfinite()
    product = weights @ values.where(finite, 0.0)
    for j in (~finite.all(-1)).nonzero()[:, 0].tolist():
        odd = values[j].where(~finite[j], 0.0)
        product += torch.where(mask[:, j, None], weights[:, j, None] * odd, 0.0)
    return product
