"""The plan of tiles and keys against the oracle's, which walks key by key."""

from __future__ import annotations

import pytest
import torch

from closecall.geometry import Geometry, from_segments, plan
from drawing import Case, cases, over


def made(case: Case) -> Geometry:
    return plan(case.batch, case.q_len, case.k_len, case.block, case.tile, **case.arguments())


@over(120, case=cases(cells=400))
def test_plan_matches_the_walk(case: Case) -> None:
    g, walked = made(case), case.tiles()
    assert (g.batch, g.q_len, g.k_len) == (case.batch, case.q_len, case.k_len)
    assert int(g.exists.sum()) == len(walked)
    ids: dict[int, tuple[int, int]] = {}
    for t in walked:
        at = (t.batch, t.number)
        assert int(g.row[at]) == t.rows[0]
        assert int(g.rows[at]) == len(t.rows)
        assert int(g.key[at]) == t.first_key
        assert int(g.pos[at]) == t.positions[0]
        assert int(g.end[at]) == t.positions[-1] + 1
        assert int(g.visible[at]) == len(t.visible)
        assert int(g.forced(case.sinks)[at]) == len(t.forced(case.sinks))
        mask = g.forced_mask(case.sinks)[at]
        assert mask.nonzero()[:, 0].tolist() == sorted(t.forced(case.sinks))
        # One id per sequence, over the whole batch.
        assert ids.setdefault(int(g.sequence[at]), (t.batch, t.sequence)) == (t.batch, t.sequence)
    assert len(ids) == len({(t.batch, t.sequence) for t in walked})
    missing = ~g.exists
    assert int(g.visible[missing].sum()) == int(g.forced(case.sinks)[missing].sum()) == 0
    assert bool((g.sequence[missing] == -1).all())


@over(50, case=cases(cells=400))
def test_no_tile_is_forced_to_more_than_the_policy_says(case: Case) -> None:
    most = int(made(case).forced(case.sinks).max())
    assert most <= case.policy().most_forced


def test_most_forced_is_reached() -> None:
    """A tile of 16 rows that starts off the block grid overlaps two blocks of 16."""
    from closecall import policy

    p = policy("topk", block=16, tile=16)
    assert p.most_forced == 3
    assert int(plan(1, 16, 100, 16, 16).forced(1).max()) == 3
    assert int(plan(1, 96, 96, 16, 16).forced(1).max()) == 2


@over(50, case=cases(cells=400))
def test_spans_hold_their_tiles(case: Case) -> None:
    g = made(case)
    walked = case.tiles()
    spans = g.spans()
    assert len(spans) == len({(t.batch, t.sequence) for t in walked})
    for b, tiles, rows, keys in spans:
        mine = [t for t in walked if t.batch == b and tiles.start <= t.number < tiles.stop]
        assert len({t.sequence for t in mine}) == 1
        assert (rows.start, rows.stop) == (mine[0].rows[0], mine[-1].rows[-1] + 1)
        assert (keys.start, keys.stop) == (mine[0].first_key, mine[0].first_key + mine[-1].positions[-1] + 1)


def test_whole_is_said_only_of_whole_buffers() -> None:
    assert plan(2, 10, 20, 4, 4).whole
    padding = torch.ones(2, 20, dtype=torch.bool)
    assert plan(2, 10, 20, 4, 4, key_padding=padding).whole
    padding[1, 0] = False
    assert not plan(2, 10, 20, 4, 4, key_padding=padding).whole
    assert plan(1, 20, 20, 4, 4, cu_seqlens=torch.tensor([0, 20])).whole
    assert not plan(1, 20, 20, 4, 4, cu_seqlens=torch.tensor([0, 5, 20])).whole


def same_plan(one: Geometry, other: Geometry) -> bool:
    tables = ("row", "rows", "key", "pos", "sequence")
    return one.n_blocks == other.n_blocks and all(torch.equal(getattr(one, t), getattr(other, t)) for t in tables)


@pytest.mark.parametrize("q_len", [1, 7, 40])
def test_segments_say_what_padding_says(q_len: int) -> None:
    real = torch.ones(3, 40, dtype=torch.bool)
    real[1, :13] = False
    real[2, 31:] = False
    assert same_plan(from_segments(q_len, 8, 8, real.int()), plan(3, q_len, 40, 8, 8, key_padding=real))


def test_segments_say_what_packing_says() -> None:
    bounds = torch.tensor([0, 11, 12, 40])
    ids = torch.repeat_interleave(torch.tensor([4, 2, 9]), bounds.diff())[None]  # any numbers: neighbours differ
    assert same_plan(from_segments(40, 8, 8, ids), plan(1, 40, 40, 8, 8, cu_seqlens=bounds))


def test_segments_can_pack_and_pad_at_once() -> None:
    ids = torch.tensor([[0] * 5 + [1] * 20 + [2] * 15, [1] * 30 + [0] * 10])
    found = from_segments(40, 8, 8, ids).spans()
    assert [(b, rows.start, rows.stop, keys.start, keys.stop) for b, _, rows, keys in found] == [
        (0, 5, 25, 5, 25),
        (0, 25, 40, 25, 40),
        (1, 0, 30, 0, 30),
    ]
