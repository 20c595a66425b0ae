"""The native scorers and reductions against the reference, on calls of every shape, type and instruction-set tier."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from small_calls import call
from test_selector_scores import AGGREGATES, bound, made, scored

import closecall
import oracle
from closecall.backends import reference
from closecall.geometry import plan
from drawing import Case, over
from engines import ENGINES, FLOATS, Engine

NATIVE = [e for e in ENGINES if e.backend == "cpu"]
PAIRS = [(name, a) for name in ("mean", "quest", "box", "outliers", "boxed outliers") for a in AGGREGATES]
NAMED = {name: closecall.SCORERS[name]() for name in ("mean", "quest", "box", "outliers")}
NAMED["boxed outliers"] = closecall.SCORERS["outliers"](m=1, c=0.5)
# What the kernels' power of two may add: its polynomial of degree 4, which bfloat16 products use, is off by 3e-6.
EXPONENTIAL = 4e-6


def ranked_scores(engine: Engine, case: Case, policy: closecall.Policy) -> torch.Tensor:
    """`[B, H, T, n_blocks]`: the scores that the backend ranked, NaN for blocks it did not (forced, not visible)."""
    q, k, _ = case.tensors()
    geometry = plan(case.batch, case.q_len, case.k_len, case.block, case.tile, **case.arguments())
    every = policy.replace(rule=closecall.RULES["topk"](budget=geometry.n_blocks))
    ranked = engine.rank(q, k, every, geometry, case.used_scale)
    found = torch.full((*ranked.order.shape[:3], geometry.n_blocks + 1), torch.nan)
    return found.scatter_(-1, ranked.order.long(), ranked.scores)[..., :-1]


def check_ranked_scores(engine: Engine, case: Case, policy: closecall.Policy) -> None:
    """Native scores are the reference's within their rounding; ranked are the visible blocks that are not forced."""
    q, k, _ = case.tensors()
    found, expected = ranked_scores(engine, case, policy), scored(case, policy, q, k)
    ranked = ~found.isnan()
    always, relative = bound(case, oracle.exact(q), oracle.exact(k), 2.0**-24)
    off = (found - expected)[ranked].abs()
    assert bool((off <= 2 * always + (2 * relative + EXPONENTIAL) * expected[ranked].abs() + EXPONENTIAL).all())
    geometry = plan(case.batch, case.q_len, case.k_len, case.block, case.tile, **case.arguments())
    block = torch.arange(geometry.n_blocks)
    free = (block < geometry.visible[..., None]) & ~geometry.forced_mask(case.sinks)
    assert torch.equal(ranked, free[:, None].expand_as(ranked))


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize(("name", "aggregate"), PAIRS)
def test_the_scores_of_the_reference(engine: Engine, name: str, aggregate: str) -> None:
    @over(5, seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(FLOATS))
    def check(seed: int, dtype: torch.dtype) -> None:
        case = call(seed, dtype)
        policy, _ = made(name, aggregate, case)
        check_ranked_scores(engine, case, policy)

    check()


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("c", [0, 0.5])
@pytest.mark.parametrize("m", [0, 1, 2, 5])
def test_equally_distant_keys_are_settled_as_in_the_reference(engine: Engine, m: int, c: float) -> None:
    """Integers in blocks of 16: means and distances are exact, and many distances equal."""
    generator = torch.Generator().manual_seed(m)
    k = torch.randint(-1, 2, (1, 1, 208, 4), generator=generator).float()
    q = torch.randint(-2, 3, (1, 2, 208, 4), generator=generator).float()
    policy = closecall.Policy(
        closecall.SCORERS["outliers"](m=m, c=c), closecall.RULES["topk"](budget=13, tile_factor=1), block=16, tile=16
    )
    geometry = plan(1, 208, 208, 16, 16)
    mine = engine.rank(q, k, policy, geometry, 1.0)
    theirs = reference.rank(q, k, policy, geometry, 1.0)
    if m == 0 and c == 0:  # a mean of 16 integers and its products are exact; of 15 they are rounded
        assert torch.equal(mine.order, theirs.order)
    torch.testing.assert_close(mine.scores, theirs.scores, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("aggregate", ["max", "mass", "mass-max", "softmax"])
@pytest.mark.parametrize("name", [*NAMED])
def test_rows_that_are_not_numbers_have_no_say(engine: Engine, name: str, aggregate: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 300, 16, generator=generator) for heads in (2, 1))
    policy = closecall.policy("topk", scorer=NAMED[name], budget=4, aggregate=aggregate)
    q[0, :, 270] = torch.nan
    geometry = plan(1, 300, 300, 64, 64)
    found = engine.rank(q, k, policy, geometry, 0.25)
    assert bool((found.order >= 0).all())
    assert bool((found.order <= geometry.n_blocks).all())
    torch.testing.assert_close(found.scores, reference.rank(q, k, policy, geometry, 0.25).scores)


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("aggregate", ["max", "mass", "mass-max", "softmax"])
@pytest.mark.parametrize("name", [*NAMED])
def test_a_block_with_a_key_that_is_no_number_ranks_last_and_silences_no_row(
    engine: Engine, name: str, aggregate: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 2, 16, 8, generator=generator), torch.randn(1, 1, 96, 8, generator=generator)
    k[0, 0, 35, 5] = torch.nan
    grid = {"block": 16, "tile": 16, "tile_factor": 1}
    policy = closecall.policy("topk", scorer=NAMED[name], budget=6, aggregate=aggregate, **grid)
    geometry = plan(1, 16, 96, 16, 16)
    found, expected = (e.rank(q, k, policy, geometry, 0.3) for e in (engine, Engine("reference")))
    assert torch.equal(found.order, expected.order)
    torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("aggregate", ["mass", "mass-max", "softmax"])
def test_infinite_scores_share_what_there_is(engine: Engine, aggregate: str) -> None:
    """Two of six blocks have an infinite score for some row, and are kept whatever the others score."""
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 1, 16, 8, generator=generator), torch.randn(1, 1, 96, 8, generator=generator)
    k[0, 0, [20, 50], 3] = torch.inf
    policy = closecall.policy("quest", budget=4, tile_factor=1, block=16, tile=16, aggregate=aggregate)
    geometry = plan(1, 16, 96, 16, 16)
    found, expected = (e.rank(q, k, policy, geometry, 0.3) for e in (engine, Engine("reference")))
    assert set(found.order[0, 0, 0, :2].tolist()) == {1, 3}
    assert torch.equal(found.order[..., :2], expected.order[..., :2])
    if aggregate != "softmax":  # where the others' scores are as small as numbers get, not to be told apart
        torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.parametrize("c", [0, 1])
def test_a_whole_number_for_a_share_is_a_share(c: int) -> None:
    generator = torch.Generator().manual_seed(c)
    q, k = (torch.randn(1, 1, 300, 16, generator=generator) for _ in range(2))
    for scorer in ("box", "outliers"):
        policy = closecall.policy("topk", scorer=scorer, c=c, budget=6, tile_factor=1, block=16, tile=16)
        mine, theirs = (closecall.select(q, k, policy, backend=b) for b in ("cpu", "reference"))
        assert torch.equal(mine.kv_idx, theirs.kv_idx)
