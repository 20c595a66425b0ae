"""NaN and infinity: no crash, no index out of range, and nothing reaches a row that does not attend to it."""

from __future__ import annotations

import pytest
import torch

import closecall
from closecall.policy import accepted
from compare import assert_form, kept_of
from drawing import PRESETS, Case, cases, over
from engines import ENGINES, FLOATS, Engine, compiled
from oracle import tiles

N, BLOCK, TILE, HEADS = 210, 16, 32, 2
DENSE = closecall.policy("dense", block=BLOCK, tile=TILE)
SPARSE = closecall.policy("quest", block=BLOCK, tile=TILE, budget=6, tile_factor=1)
POLICIES = {"dense": DENSE, "sparse": SPARSE}
NUMBERS = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def tensors(dtype: torch.dtype = torch.float32, dim: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, h, N, dim, generator=generator).to(dtype) for h in (HEADS, 1, 1)]


def sees(selection: closecall.Selection, key: int) -> torch.Tensor:
    """bool [H, N]: the rows that attend to the key."""
    found = torch.zeros(HEADS, N, dtype=torch.bool)
    for t in tiles(1, N, N, BLOCK, TILE):
        for h in range(HEADS):
            if key // BLOCK in kept_of(selection)[0, h, t.number]:
                found[h, [r for r in t.rows if r >= key]] = True
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


# FlexAttention multiplies masked weights of 0 with whatever V holds, so NaN in V spreads there (documented in flex.py).
masking = [e for e in ENGINES if e.backend != "flex"]


@pytest.mark.parametrize("engine", [e for e in masking if e.backend != "triton"], ids=str)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_value_reaches_the_rows_that_attend_to_it_in_its_channel_only(
    engine: Engine, dtype: torch.dtype, policy: str, number: str
) -> None:
    q, k, v = tensors(dtype)
    clean, clean_lse = engine.attention(q, k, v, POLICIES[policy], return_lse=True)
    selection = engine.select(q, k, POLICIES[policy])
    others = [d for d in range(40) if d != 7]
    for key in (0, 15, 16, 100, 127, 128, 160, 209):
        spoiled = v.clone()
        spoiled[0, 0, key, 7] = NUMBERS[number]
        out, lse = engine.attention(q, k, spoiled, POLICIES[policy], return_lse=True)
        hit = sees(selection, key)
        assert bool(hit.any())
        assert not bool(hit[:, :key].any())
        assert not bool(out[0, ..., 7][hit].isfinite().any())
        if number == "nan":
            assert bool(out[0, ..., 7][hit].isnan().all())
        assert torch.equal(out[0][~hit], clean[0][~hit])
        assert torch.equal(out[..., others], clean[..., others])
        assert torch.equal(lse, clean_lse)


@pytest.mark.parametrize("engine", masking, ids=str)
@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_value_in_decode_and_chunks(engine: Engine, dtype: torch.dtype, m: int) -> None:
    """Few rows may take another path than full tiles."""
    q, k, v = tensors(dtype)
    q = q[:, :, -m:]
    clean = engine.attention(q, k, v, DENSE)
    v[0, 0, N - 1] = torch.nan
    out = engine.attention(q, k, v, DENSE)
    assert torch.equal(out[:, :, :-1], clean[:, :, :-1])
    assert bool(out[:, :, -1].isnan().all())


@pytest.mark.parametrize("engine", [e for e in masking if e.backend != "triton"], ids=str)
@pytest.mark.parametrize("offset", [1, 5, 31])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_value_in_a_chunk_that_begins_between_blocks(engine: Engine, dtype: torch.dtype, offset: int) -> None:
    """Kernels add the values of several keys at once, hidden ones among them where rows begin at any position."""
    q, k, v = tensors(dtype)
    n = offset + 40
    q, k, v = q[:, :, offset:n], k[:, :, :n], v[:, :, :n]
    clean = engine.attention(q, k, v, DENSE)
    for row in range(40):
        spoiled = v.clone()
        spoiled[0, 0, offset + row] = torch.inf
        out = engine.attention(q, k, spoiled, DENSE)
        assert torch.equal(out[:, :, :row], clean[:, :, :row]), row
        assert not bool(out[:, :, row:].isfinite().any()), row


@compiled
@pytest.mark.parametrize("key", [0, 15, 100, 127, 160, 209])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_key_of_nan_reaches_the_rows_that_attend_to_it(engine, dtype: torch.dtype, policy: str, key: int) -> None:
    q, k, v = tensors(dtype)
    k[0, 0, key, 3] = torch.nan
    selection = engine.select(q, k, POLICIES[policy])
    selection.check()
    hit = sees(selection, key)
    out, lse = engine.attend(q, k, v, selection, return_lse=True)
    assert torch.equal(out[0].isnan().all(-1), hit)
    assert torch.equal(out[0].isnan().any(-1), hit)
    assert torch.equal(lse[0].isnan(), hit)
    k[0, 0, key, 3] = 0.5  # with the same blocks, all other rows are as if nothing had happened
    assert torch.equal(engine.attend(q, k, v, selection)[0][~hit], out[0][~hit])


@compiled
@pytest.mark.parametrize("number", ["inf", "-inf"])
@pytest.mark.parametrize("aggregate", ["max", "softmax", "mass-max"])
@pytest.mark.parametrize("tile", [16, 32])  # of small tiles many are ranked at once
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_infinite_side_of_a_box(engine: Engine, dtype: torch.dtype, tile: int, aggregate: str, number: str) -> None:
    """A row meets one side of each coordinate. The other side does not count, however large it is."""
    q, k, _ = tensors(dtype, dim=64)
    k[0, 0, 37, 3] = NUMBERS[number]
    policy = closecall.policy("topk", scorer="quest", aggregate=aggregate, budget=3, block=16, tile=tile)
    assert bool((q[0, :, 64:, 3] > 0).any())
    assert bool((q[0, :, 64:, 3] < 0).any())
    reference = closecall.select(q, k, policy, backend="reference")
    assert kept_of(engine.select(q, k, policy)) == kept_of(reference)


@compiled
@pytest.mark.parametrize("number", ["inf", "-inf"])
@pytest.mark.parametrize("dim", [40, 64])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_infinite_key(engine: Engine, dtype: torch.dtype, policy: str, dim: int, number: str) -> None:
    """A row gets weight 0 for a key of logit -inf, which is an answer, and NaN for one of +inf."""
    q, k, v = tensors(dtype, dim)
    key = 130
    k[0, 0, key, 3] = NUMBERS[number]
    selection = engine.select(q, k, POLICIES[policy])
    selection.check()
    out, lse = engine.attend(q, k, v, selection, return_lse=True)
    up = sees(selection, key) & ((q[0, :, :, 3] > 0) == (number == "inf"))
    assert bool(up.any())
    assert torch.equal(out[0].isnan().all(-1), up)
    assert torch.equal(out[0].isnan().any(-1), up)
    assert bool(lse[0][~up].isfinite().all())


@compiled
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("aggregate", ["max", "softmax", "mass-max"])
def test_keys_beside_one_that_is_no_number_are_as_outlying_everywhere(
    engine: Engine, aggregate: str, m: int, number: str
) -> None:
    """Beside an infinity every key of the block is infinitely far from the mean: the earlier is more outlying."""
    q, k, _ = tensors()
    k[0, 0, 37, 3] = NUMBERS[number]
    policy = closecall.policy("topk", scorer="outliers", m=m, c=0.5, aggregate=aggregate, budget=3, block=16, tile=16)
    reference = closecall.select(q, k, policy, backend="reference")
    assert kept_of(engine.select(q, k, policy)) == kept_of(reference)


@compiled
@pytest.mark.parametrize("key", [3, 37, 130, 201])
@pytest.mark.parametrize("aggregate", ["mass", "mass-max"])
def test_a_forced_block_whose_mass_is_no_number_counts_for_nothing(engine: Engine, aggregate: str, key: int) -> None:
    q, k, _ = tensors()
    k[0, 0, key, 4] = torch.nan
    policy = closecall.policy("topk", scorer="quest", aggregate=aggregate, budget=5, tile_factor=1, block=16, tile=16)
    reference = closecall.select(q, k, policy, backend="reference")
    assert kept_of(engine.select(q, k, policy)) == kept_of(reference)


@compiled
@pytest.mark.parametrize("row", [0, 31, 32, 130, 209])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_query_row_of_nan_spoils_itself_only(engine, dtype: torch.dtype, policy: str, row: int) -> None:
    q, k, v = tensors(dtype)
    clean = engine.attend(q, k, v, engine.select(q, k, POLICIES[policy]))
    q[0, 1, row] = torch.nan
    selection = engine.select(q, k, POLICIES[policy])
    selection.check()
    out, lse = engine.attend(q, k, v, selection, return_lse=True)
    hit = torch.zeros(HEADS, N, dtype=torch.bool)
    hit[1, row] = True
    assert torch.equal(out[0].isnan().all(-1), hit)
    assert torch.equal(out[0].isnan().any(-1), hit)
    assert torch.equal(lse[0].isnan(), hit)
    assert torch.equal(out[0, 0], clean[0, 0])
    if policy == "dense":
        assert torch.equal(out[0][~hit], clean[0][~hit])


@compiled
def test_a_row_of_nan_leaves_its_tile_to_the_other_rows(engine: Engine) -> None:
    """As if the row repeated one of its neighbours, which changes no maximum."""
    q, k, _ = tensors()
    q[:, :, 200] = q[:, :, 201]
    expected = engine.select(q, k, SPARSE)
    q[:, :, 200] = torch.nan
    got = engine.select(q, k, SPARSE)
    assert kept_of(got) == kept_of(expected)
    assert same_bits(got.margin, expected.margin)


@compiled
def test_a_block_of_nan_keys_ranks_behind_every_number(engine: Engine) -> None:
    q, k, _ = tensors()
    for policy in (SPARSE, closecall.policy("topk", block=BLOCK, tile=TILE, budget=6, tile_factor=1)):
        spoiled = k.clone()
        spoiled[0, 0, 20] = torch.nan  # block 1
        kept = kept_of(engine.select(q, spoiled, policy))
        for t in tiles(1, N, N, BLOCK, TILE):
            for h in range(HEADS):
                free = len(t.visible) - 6
                assert (1 in kept[0, h, t.number]) == (free <= 0 or 1 in t.forced(1))


@over(20, case=cases(work=1500, cells=40))
def test_anything_anywhere_stays_in_range(engine: Engine, case: Case) -> None:
    """A tenth of all numbers NaN or infinite: selections stay well formed, counts as budgeted, margins in [0, 1]."""
    generator = torch.Generator().manual_seed(case.seed)
    q, k, v = (x.clone() for x in case.tensors())
    for x in (q, k, v):
        dice = torch.rand(x.shape, generator=generator)
        for share, number in ((0.03, torch.nan), (0.06, torch.inf), (0.1, -torch.inf)):
            x[(dice < share) & (dice >= share - 0.03)] = number
    selection = engine.select(q, k, case.policy(), scale=case.scale, **case.arguments())
    assert_form(selection, case)
    kept = kept_of(selection)
    for t in case.tiles():
        for h in range(case.heads):
            assert t.forced(case.sinks) <= set(kept[t.batch, h, t.number]) or case.preset == "dense"
            if case.preset != "dense":
                fired = bool(selection.triggered[t.batch, h, t.number])
                most = case.expanded_budget if fired else case.tile_budget
                assert len(kept[t.batch, h, t.number]) == min(len(t.visible), most)
    cut = ~selection.margin.isnan()
    assert bool(((selection.margin[cut] >= 0) & (selection.margin[cut] <= 1)).all())
    out = engine.attention(q, k, v, case.policy(), scale=case.scale, **case.arguments())
    assert out.shape == (case.batch, case.heads, case.q_len, case.v_dim)


@compiled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_but_nonsense(engine: Engine, number: str, preset: str) -> None:
    q, k, v = (torch.full_like(x, NUMBERS[number]) for x in tensors())
    policy = closecall.policy(preset, block=BLOCK, tile=TILE, **accepted(preset, {"budget": 6, "tile_factor": 1}))
    selection = engine.select(q, k, policy)
    selection.check()
    assert not bool(engine.attention(q, k, v, policy).isfinite().any())
