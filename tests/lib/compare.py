"""Holding what a backend returned against the oracle."""

from __future__ import annotations

import numpy as np
import torch

import closecall
import oracle
from drawing import Case


def kept_of(selection: closecall.Selection) -> dict[tuple[int, int, int], list[int]]:
    """{(batch row, head, tile): its kept blocks}, reading no further than the counts."""
    index, counts, width = selection.kv_idx.tolist(), selection.counts.tolist(), selection.kv_idx.shape[3]
    return {
        (b, h, t): index[b][h][t][:n] if n <= width else list(range(n))
        for b, heads in enumerate(counts)
        for h, tiles in enumerate(heads)
        for t, n in enumerate(tiles)
    }


def everything(plan: list[oracle.Tile], heads: int) -> dict[tuple[int, int, int], list[int]]:
    return {(t.batch, h, t.number): t.visible for t in plan for h in range(heads)}


def assert_form(selection: closecall.Selection, case: Case) -> None:
    """Types, shapes and sentinels as documented; nothing kept by tiles that do not exist."""
    plan = case.tiles()
    n_tiles = max([1, *(t.number + 1 for t in plan)])
    cells = (case.batch, case.heads, n_tiles)
    assert selection.kv_idx.dtype == selection.counts.dtype == torch.int32
    assert selection.margin.dtype == torch.float32 or case.dtype == torch.float64
    assert selection.triggered.dtype == torch.bool
    assert selection.kv_idx.shape[:3] == selection.counts.shape == selection.margin.shape == cells
    assert selection.triggered.shape == cells
    selection.check()
    longest = max((t.n_keys for t in plan), default=1)
    assert selection.n_blocks == -(-longest // case.block)
    past = torch.arange(selection.kv_idx.shape[3]) >= selection.counts[..., None]
    assert bool((selection.kv_idx[past] == selection.n_blocks).all())
    real = torch.zeros(cells, dtype=torch.bool)
    for t in plan:
        real[t.batch, :, t.number] = True
    assert bool((selection.counts[~real] == 0).all())
    assert bool((selection.counts[real] > 0).all())
    assert bool(selection.margin[~real].isnan().all())
    assert not bool(selection.triggered[~real].any())


def assert_triggers(case: Case, margins: np.ndarray, fired: np.ndarray, exact: bool) -> None:
    """One sequence's triggers [H, T], from the margins the backend reported."""
    kind = case.overrides.get("trigger", "quantile")
    q, threshold = case.overrides.get("q", 0.4), case.overrides.get("threshold", 0.05)
    if case.dtype != torch.float64:
        threshold = float(np.float32(threshold))  # rounded like the margin, so that 1/20 is at most 0.05
    eligible = ~np.isnan(margins[0])
    assert (np.isnan(margins) == ~eligible).all()  # eligibility is the tile's, the same for all heads
    if not case.preset.startswith("router"):
        assert not fired.any()
        return
    if kind == "random":
        assert (fired == fired[:1]).all()
        assert not fired[:, ~eligible].any()
        assert fired[0].sum() == oracle.how_many(q, int(eligible.sum()))
        return
    expected = oracle.triggered(kind, q, threshold, margins)
    if exact or kind in ("absolute", "last"):
        assert (fired == expected).all()
        return
    # Means that differ by less than the package's fixed point (2^-50 per head) may tie there.
    assert fired.sum() == expected.sum()
    mean = margins.mean(0, keepdims=True) if kind == "quantile" else margins
    mean = np.broadcast_to(mean, margins.shape)
    if expected.any():
        assert mean[fired].max() <= mean[expected].max() + 2.0**-48


def deciding_scores(
    case: Case, q: np.ndarray, k: np.ndarray, tile: oracle.Tile, u: float
) -> list[dict[int, tuple[float, float]]]:
    """{block: (score, bound)} of everyone who decides: of each head, or of the heads that share, the largest."""
    given = (case.scorer, case.aggregate, case.used_scale, case.sinks, u)
    heads = [oracle.block_scores(q, k, tile, h, *given) for h in range(case.heads)]
    return [oracle.shared_scores(heads[h : h + case.group]) for h in range(0, case.heads, case.group)]


def assert_selection(case: Case, q: torch.Tensor, k: torch.Tensor, selection: closecall.Selection) -> None:
    """Block for block where the scores are exact (integers); else up to swaps of blocks that rounding can swap."""
    assert_form(selection, case)
    plan, kept = case.tiles(), kept_of(selection)
    if case.preset == "dense":
        assert {c: b for c, b in kept.items() if b} == everything(plan, case.heads)
        return
    exact = case.numbers != "normal"
    u = oracle.working_roundoff(case.dtype)
    margin, fired = selection.margin.double().numpy(), selection.triggered.numpy()
    wide_q, wide_k = oracle.exact(q), oracle.exact(k)
    for tile in plan:
        forced = tile.forced(case.sinks)
        decided = deciding_scores(case, wide_q, wide_k, tile, u)
        for h in range(case.heads):
            cell = (tile.batch, h, tile.number)
            scores = decided[h // case.group]
            n = min(len(tile.visible), case.expanded_budget if fired[cell] else case.tile_budget)
            ranked = oracle.ranking(scores)
            best = ranked[: n - len(forced)]
            mine = kept[cell]
            assert len(mine) == n
            assert forced <= set(mine)
            if exact:
                assert mine == sorted(forced | set(best))
            else:
                dropped = set(scores) - set(mine)
                weakest = min((s + e for b, (s, e) in scores.items() if b in mine), default=np.inf)
                strongest = max((s - e for b, (s, e) in scores.items() if b in dropped), default=-np.inf)
                assert weakest >= strongest
            value, error = oracle.margin_of(scores, tile, case.tile_budget, case.sinks)
            if np.isnan(value):
                assert np.isnan(margin[cell])
            elif exact and (case.aggregate == "max" or len(tile.rows) & (len(tile.rows) - 1) == 0):
                # Exact differences, so the quotient is the correctly rounded one.
                assert margin[cell] == np.float32(value)
            else:
                assert 0 <= margin[cell] <= 1
                assert abs(margin[cell] - value) <= error + 4 * u
    for sequence in {(t.batch, t.sequence) for t in plan}:
        own = [t.number for t in plan if (t.batch, t.sequence) == sequence]
        for x in (margin, fired):
            shared = x[sequence[0]][:, own].reshape(-1, case.group, len(own))
            assert ((shared == shared[:, :1]) | (shared != shared)).all()
        deciding = slice(None, None, case.group)
        assert_triggers(case, margin[sequence[0]][deciding, own], fired[sequence[0]][deciding, own], exact)


def assert_attention(out: torch.Tensor, lse: torch.Tensor, expected: oracle.Expected) -> None:
    """Every element of every row, padded rows among them, within its own bound."""
    got, sums = oracle.exact(out), oracle.exact(lse)
    assert not np.isnan(got).any()
    assert not np.isnan(sums).any()
    excess = np.abs(got - expected.out) - expected.out_error
    assert excess.max() <= 0, f"output off by {excess.max():.3g} beyond its bound at {_where(excess)}"
    assert (np.isneginf(sums) == np.isneginf(expected.lse)).all()
    seen = np.isfinite(expected.lse)
    excess = np.abs(np.where(seen, sums, 0.0) - np.where(seen, expected.lse, 0.0)) - expected.lse_error
    assert excess.max() <= 0, f"lse off by {excess.max():.3g} beyond its bound at {_where(excess)}"


def _where(excess: np.ndarray) -> list[int]:
    return [int(i) for i in np.unravel_index(excess.argmax(), excess.shape)]


def check_box(sides: torch.Tensor, keys: torch.Tensor, block: int, c: float) -> None:
    """Asserts that `sides [2, blocks, D]`, the largest coordinates and the smallest, are those of the box of every
    `block` of `keys [N, D]`, drawn towards their mean to c of its width in float32 and rounded once to their type."""
    for side, pick in zip(sides.double(), (torch.amax, torch.amin), strict=True):
        for found, some in zip(side, keys.double().split(block), strict=True):
            mean, end = some.mean(0), pick(some, 0)
            off = (len(some) + 8) * 2.0**-24 * (some.abs().mean(0) + some.abs().amax(0))
            # Rounding keeps order: what was within `off` of the exact side is between its ends, rounded.
            low, high = ((mean + c * (end - mean) + off * s).to(keys.dtype).double() for s in (-1, 1))
            assert bool(((low <= found) & (found <= high)).all())
