"""Which blocks are kept: every backend against the brute force."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import closecall
import oracle
from closecall.geometry import plan
from closecall.policy import accepted
from compare import assert_selection, deciding_scores, kept_of
from drawing import Case, cases, over
from engines import Engine, compiled

CUTTING = ("topk", "quest", "router", "router-on-quest")


@compiled
@over(100, case=cases(numbers=("integers", "ties"), odd_blocks=False, presets=CUTTING))
def test_integers_are_selected_block_for_block(engine: Engine, case: Case) -> None:
    """Small integers score without rounding and tie often, so nothing excuses a difference."""
    q, k, _ = case.tensors()
    selection = engine.select(q, k, case.policy(), scale=case.scale, **case.arguments())
    assert_selection(case, q, k, selection)


@compiled
@over(50, case=cases())
def test_selection_matches_the_oracle_up_to_rounding(engine: Engine, case: Case) -> None:
    q, k, _ = case.tensors()
    selection = engine.select(q, k, case.policy(), scale=case.scale, **case.arguments())
    assert_selection(case, q, k, selection)


@over(25, case=cases(numbers=("integers", "ties"), odd_blocks=False, presets=CUTTING))
def test_rankings_are_what_rules_are_promised(engine: Engine, case: Case) -> None:
    """A rule of someone's own may read all of a ranking: exact scores and order, sentinels and -inf past the end."""
    q, k, _ = case.tensors()
    policy, geometry = (
        case.policy(),
        plan(case.batch, case.q_len, case.k_len, case.block, case.tile, **case.arguments()),
    )
    ranked = engine.rank(q, k, policy, geometry, case.used_scale)
    width = policy.rule.limit(geometry.n_blocks)
    assert ranked.order.dtype == torch.int32
    assert ranked.scores.dtype == torch.float32
    deciding = case.heads // case.group
    assert ranked.order.shape == ranked.scores.shape == (case.batch, deciding, geometry.n_tiles, width)
    order = torch.full(ranked.order.shape, geometry.n_blocks, dtype=torch.int32)
    scores = torch.full(ranked.scores.shape, -torch.inf)
    wide_q, wide_k = oracle.exact(q), oracle.exact(k)
    for t in case.tiles():
        assert int(ranked.visible[t.batch, t.number]) == len(t.visible)
        assert int(ranked.forced[t.batch, t.number]) == len(t.forced(case.sinks))
        for h, known in enumerate(deciding_scores(case, wide_q, wide_k, t, 0.0)):
            best = oracle.ranking(known)[:width]
            order[t.batch, h, t.number, : len(best)] = torch.tensor(best)
            scores[t.batch, h, t.number, : len(best)] = torch.tensor([known[b][0] for b in best])
    assert torch.equal(ranked.order, order)
    if case.aggregate == "max":
        assert torch.equal(ranked.scores, scores)
    else:  # a mean over rows is rounded once
        assert torch.allclose(ranked.scores, scores, rtol=2.0**-22, atol=0)


@over(20, case=cases(dtypes=(torch.float64,)))
def test_reference_in_float64_matches_to_its_last_digits(case: Case) -> None:
    q, k, _ = case.tensors()
    selection = Engine("reference").select(q, k, case.policy(), scale=case.scale, **case.arguments())
    assert_selection(case, q, k, selection)


def hand_made() -> tuple[torch.Tensor, torch.Tensor]:
    """One head, 8 blocks of 2 keys and one row per tile; block b's keys all equal (score of b)."""
    scores = torch.tensor([0.0, 3.0, 7.0, 3.0, 5.0, 1.0, 3.0, 0.0])
    k = scores.repeat_interleave(2)[None, None, :, None]
    return torch.ones(1, 1, 16, 1), k.contiguous()


def test_the_worked_example(engine: Engine) -> None:
    """The last tile sees 8 blocks: 0 (sink) and 7 (own) are forced, the rest rank 2, 4, 1, 3, 6, 5."""
    q, k = hand_made()
    policy = closecall.policy("topk", budget=2, tile_factor=2.5, block=2, tile=2)
    selection = engine.select(q, k, policy, scale=1.0)
    assert kept_of(selection)[0, 0, 7] == [0, 1, 2, 4, 7]
    # c = 5 - 2 = 3: (s[2] - s[3]) / (s[0] - s[3]) = (3 - 3) / (7 - 3)
    assert selection.margin[0, 0, 7] == 0
    # Tile 6 sees blocks 0..6, 0 and 6 forced: ranked 7, 5, 3, 3, 1.
    assert kept_of(selection)[0, 0, 6] == [0, 1, 2, 4, 6]
    # Tile 5 sees 0..5: ranked 7, 5, 3, 3.
    assert selection.margin[0, 0, 5] == 0
    assert bool(selection.margin[0, 0, :5].isnan().all())
    assert selection.counts[0, 0].tolist() == [1, 2, 3, 4, 5, 5, 5, 5]
    wider = engine.select(q, k, closecall.policy("topk", budget=2, tile_factor=2, block=2, tile=2), scale=1.0)
    assert kept_of(wider)[0, 0, 7] == [0, 2, 4, 7]
    assert wider.margin[0, 0, 7] == (5 - 3) / (7 - 3)


def test_measured_properties(engine: Engine) -> None:
    q, k = hand_made()
    policy = closecall.policy("router", budget=5, tile_factor=1, block=2, tile=2, rho=1.2, q=0.4)
    selection = engine.select(q, k, policy, scale=1.0)
    # Eligible: tiles 5, 6 and 7, all of margin 0; ceil(0.4 * 3) = 2 of them, the later ones, keep 6 blocks.
    assert selection.triggered[0, 0].tolist() == [False] * 6 + [True, True]
    assert selection.counts[0, 0].tolist() == [1, 2, 3, 4, 5, 5, 6, 6]
    assert selection.effective_budget == (1 + 2 + 3 + 4 + 5 + 5 + 6 + 6) / 8
    assert selection.kept_fraction == 32 / 36
    assert selection.trigger_rate == 2 / 3
    assert "4.0" in str(selection)


def test_measured_properties_where_nothing_is_cut(engine: Engine) -> None:
    q, k = hand_made()
    selection = engine.select(q, k, "dense")
    assert selection.kept_fraction == 1
    assert math.isnan(selection.trigger_rate)
    empty = engine.select(q, k, "dense", key_padding=torch.zeros(1, 16, dtype=torch.bool))
    assert int(empty.counts.sum()) == 0
    assert math.isnan(empty.kept_fraction)
    assert math.isnan(empty.effective_budget)


def test_padded_tiles_do_not_count_in_the_measured_properties(engine: Engine) -> None:
    q, k = (torch.randn(2, 1, 64, 8) for _ in range(2))
    padding = torch.ones(2, 64, dtype=torch.bool)
    padding[1, 16:] = False
    selection = engine.select(q, k, closecall.policy("dense", block=16, tile=16), key_padding=padding)
    assert selection.effective_budget == (1 + 2 + 3 + 4 + 1) / 5
    assert selection.kept_fraction == 1


@compiled
@pytest.mark.parametrize("preset", ["dense", "topk", "quest", "router", "router-on-quest", "auto"])
def test_presets_by_name_take_the_defaults(engine: Engine, preset: str) -> None:
    """Two tiles that see 69 and 70 blocks: the default keeps 66, the router all of them in ceil(0.4 * 2) tiles, and
    `auto` all of them in the last tile, which the other pays for."""
    q, k = torch.randn(1, 2, 128, 8), torch.randn(1, 1, 70 * 64, 8)
    selection = engine.select(q, k, preset)
    assert (selection.block, selection.tile, selection.n_blocks) == (64, 64, 70)
    counts = selection.counts[0].tolist()
    assert counts[0] == counts[1]
    if preset == "dense":
        assert counts[0] == [69, 70]
    elif preset in ("topk", "quest"):
        assert counts[0] == [66, 66]
    elif preset == "auto":
        assert counts[0] == [62, 70]
    else:
        assert counts[0] in ([66, 70], [69, 66])


def test_a_selection_knows_whether_it_was_written_into() -> None:
    q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    for name in ("dense", "topk"):
        selection = closecall.select(q, k, closecall.policy(name, **accepted(name, {"budget": 2})))
        assert selection.untouched
        assert not dataclasses.replace(selection).untouched  # its parts may be anybody's
        assert not selection.to("cpu").untouched
    for part in (selection.kv_idx, selection.counts):
        before = part.clone()
        part[..., 0] = 1
        assert not selection.untouched
        part.copy_(before)
        assert not selection.untouched
    by_hand = closecall.Selection.from_blocks(selection.kv_idx, selection.counts, q_len=300, k_len=300)
    assert not by_hand.untouched
    with torch.inference_mode():
        assert not closecall.select(q, k, closecall.policy("topk", budget=2)).untouched


def test_the_kept_mask_reads_no_further_than_the_counts() -> None:
    index = torch.tensor([[0, 2, 1], [1, 4, 4]], dtype=torch.int32).view(1, 2, 1, 3)
    counts = torch.tensor([[[2], [1]]], dtype=torch.int32)
    selection = closecall.Selection.from_blocks(index, counts, q_len=4, k_len=16, block=4, tile=4)
    assert selection.kept_mask()[0, :, 0].tolist() == [[True, False, True, False], [False, True, False, False]]
    assert selection.kept_mask((0, slice(1, 2), 0)).tolist() == [[False, True, False, False]]


def test_it_says_what_was_triggered_where_there_was_something_to_trigger() -> None:
    q, k = torch.randn(1, 1, 600, 8), torch.randn(1, 1, 600, 8)
    assert str(closecall.select(q, k, "dense")).endswith("kept 100.0%, nothing was cut")
    router = closecall.select(q, k, closecall.policy("router", budget=3))  # of tiles 6 to 9, ceil(0.4 * 4)
    assert str(router).endswith("triggered 50.0%")


@pytest.mark.parametrize("rows", [96, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_that_reads_everything_needs_no_list(engine: Engine, rows: int, dtype: torch.dtype) -> None:
    """Its count goes beyond the width of `lists`, which hold its first blocks; every reader takes that for all."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(1, h, n, 16, generator=generator).to(dtype) for h, n in ((2, rows), (1, 168), (1, 168)))
    policy = closecall.policy(
        "last-tile-on-quest", budget=5, tile_factor=1, factor="dense", pay=False, block=16, tile=32
    )
    kept = engine.select(q, k, policy)
    assert kept.lists.shape[3] == 10  # twice the tile budget
    assert kept.unlisted[0].tolist() == [[*[False] * (len(kept.counts[0, 0]) - 1), True]] * 2
    assert kept.counts[0, :, -1].tolist() == [11, 11]
    assert kept.lists[0, :, -1].tolist() == [list(range(10))] * 2
    assert bool(kept.kept_mask()[0, :, -1].all())
    wide = torch.full((*kept.counts.shape, 11), 11, dtype=torch.int32)
    for cell, blocks in kept_of(kept).items():
        wide[cell][: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    listed = closecall.Selection.from_blocks(wide, kept.counts, q_len=rows, k_len=168, block=16, tile=32)
    expected = closecall.attend(q.double(), k.double(), v.double(), listed, backend="reference", return_lse=True)
    for got, right in zip(engine.attend(q, k, v, kept, return_lse=True), expected, strict=True):
        assert torch.allclose(got.double(), right, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(closecall.certify(q, k, v, kept).mass, closecall.certify(q, k, v, listed).mass)
    before = engine.attend(q, k, v, kept)
    assert kept.untouched
    assert torch.equal(kept.kv_idx, wide)  # who asks gets every block, and so do kernels from then on
    assert kept.untouched
    assert not kept.unlisted.any()
    assert torch.equal(engine.attend(q, k, v, kept), before)
    kept.kv_idx[0, 0, -1, 10] = 99
    with pytest.raises(ValueError, match="is out of range"):
        engine.attend(q, k, v, kept)
