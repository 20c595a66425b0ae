"""Triggers on flat stored tiles are those the router uses on tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closecall.triggers.base import TRIGGERS
from closecall_lab.theory.triggers import Cells, fire


def stored(batch: int, heads: int, n_tiles: int, seed: int) -> tuple[torch.Tensor, Cells, torch.Tensor]:
    """Margins [B, H, T] with ties, where they come from, and the order in which they were stored."""
    generator = torch.Generator().manual_seed(seed)
    margin = torch.randint(0, 5, (batch, heads, n_tiles), generator=generator).float() / 4
    pool, head, tile = torch.meshgrid(*(torch.arange(n) for n in margin.shape), indexing="ij")
    order = torch.randperm(margin.numel(), generator=generator)
    return margin, Cells(*(x.flatten()[order] for x in (pool * 5 + 2, tile, head))), order


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**31), st.sampled_from([0, 0.3, 0.4, 1])
)
def test_as_the_router_fires(batch: int, heads: int, n_tiles: int, seed: int, q: float) -> None:
    margin, cells, order = stored(batch, heads, n_tiles, seed)
    flat = margin.flatten()[order]
    eligible, sequence = torch.ones(batch, n_tiles, dtype=torch.bool), torch.arange(batch)[:, None].expand(-1, n_tiles)
    for name in ("quantile", "per-cell", "last", "absolute"):
        theirs = TRIGGERS[name]().fire(margin, eligible, sequence.contiguous(), q).flatten()[order]
        assert torch.equal(fire(name, flat, flat, cells, q), theirs)
    random = fire("random", flat, flat, cells, q, seed=seed)
    assert torch.equal(random, fire("random", flat, flat, cells, q, seed=seed))
    last = fire("last", flat, flat, cells, q)
    for pool in cells.pool.unique():
        assert random[cells.pool == pool].sum() == last[cells.pool == pool].sum()
    for unit in cells.unit.unique():  # all heads alike
        assert random[cells.unit == unit].unique().numel() == 1
    assert torch.equal(fire("gap", torch.zeros_like(flat), flat, cells, q), fire("per-cell", flat, flat, cells, q))


def test_an_unknown_trigger_gets_a_near_match() -> None:
    margin, cells, _ = stored(1, 1, 3, 0)
    with pytest.raises(ValueError, match="did you mean 'quantile'"):
        fire("quantil", margin.flatten(), margin.flatten(), cells, 0.4)
