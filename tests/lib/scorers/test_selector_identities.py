"""Where two selectors must agree, and what no selector may depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import closecall
from closecall import SCORERS, Policy, Scorer
from closecall.backends import reference
from closecall.geometry import plan

OURS = sorted(n for n in SCORERS.names() if SCORERS[n].__module__.startswith("closecall."))
AGGREGATES = ("max", "mean", "mass", "mass-max")
TOPK = closecall.RULES["topk"](budget=4, tile_factor=1)
BLOCK, TILE = 8, 16
SMALL = {"outliers": {"m": 3}, "xattention": {"stride": 4}, "nsa": {"parts": 2}, "moba": {"gates": 3}}


def tensors(n: int = 150, heads: int = 4, kv_heads: int = 2, dim: int = 16, **kind: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, h, n, dim) for h in (heads, kv_heads))
    if kind.get("integers"):
        return [torch.randint(-3, 4, s, generator=generator).double() for s in shapes]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def scores(
    q: torch.Tensor, k: torch.Tensor, scorer: Scorer, aggregate: str = "max", tile: int = TILE, **where: Any
) -> torch.Tensor:
    policy = Policy(scorer, TOPK, BLOCK, tile, aggregate=aggregate)
    geometry = plan(q.shape[0], q.shape[2], k.shape[2], BLOCK, tile, **where)
    return reference.tile_scores(q, k, policy, geometry, 0.25)


def scorer(name: str, **given: Any) -> Scorer:
    return SCORERS[name](**SMALL.get(name, {}) | given)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scorer("box", c=0), scorer("mean")),
        (scorer("box", c=0.0), scorer("outliers", m=0)),
        (scorer("box", c=1), scorer("quest")),
        (scorer("outliers", m=0, c=0.3), scorer("box", c=0.3)),
    ],
    ids=str,
)
def test_the_ends_of_a_family(one: Scorer, other: Scorer, aggregate: str) -> None:
    """On small integers every score is exact, so equal means equal. (A share is an exponential, rounded alike.)"""
    q, k = tensors(152, integers=True)
    a, b = scores(q, k, one, aggregate), scores(q, k, other, aggregate)
    if aggregate in ("max", "mean"):
        assert torch.equal(a, b)
    else:
        assert torch.allclose(a, b, rtol=2.0**-44, atol=0)


def test_the_summaries_at_the_ends_of_the_box_are_those_of_mean_and_quest_to_the_bit() -> None:
    keys = torch.randn(100, 16, generator=torch.Generator().manual_seed(1))
    for c, high, low in ((0, *2 * scorer("mean").summarise(keys, 8)), (1, *scorer("quest").summarise(keys, 8))):
        assert all(map(torch.equal, scorer("box", c=c).summarise(keys, 8), (high, low)))


def test_groups_of_one_row_and_key_are_attention_itself() -> None:
    q, k = tensors()
    exact = scores(q, k, scorer("true-mass"), "mass")
    assert torch.allclose(scores(q, k, scorer("xattention", stride=1), "mean"), exact)


def test_true_mass_is_the_mass_that_attention_gives() -> None:
    q, k = tensors()
    n, group = q.shape[2], 2
    found = scores(q, k, scorer("true-mass"), "mass")
    logits = 0.25 * q @ k.repeat_interleave(group, 1).mT
    shares = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    for t in range(found.shape[2]):
        rows = shares[:, :, t * TILE : (t + 1) * TILE].mean(2)
        for b in range(min(found.shape[3], -(-min((t + 1) * TILE, n) // BLOCK))):
            assert torch.allclose(found[:, :, t, b], rows[..., b * BLOCK : (b + 1) * BLOCK].sum(-1))


@pytest.mark.parametrize("name", [n for n in OURS if not SCORERS[n].votes])
def test_forced_blocks_have_their_exact_mass(name: str) -> None:
    """With every block forced, whatever a scorer thinks of them, all that is left is the truth. (Votes know none.)"""
    q, k = tensors(60)
    policy = Policy(scorer(name), TOPK, BLOCK, TILE, sinks=100, aggregate="mass")
    truth = policy.replace(scorer=scorer("true-mass"))
    geometry = plan(1, 60, 60, BLOCK, TILE)
    found, exact = (reference.tile_scores(q, k, p, geometry, 0.25) for p in (policy, truth))
    assert torch.equal(found, exact)


def test_a_window_of_all_rows_sees_what_h2o_has_seen_at_the_end() -> None:
    q, k = tensors()
    every = scores(q, k, scorer("h2o"))[:, :, -1]
    assert torch.allclose(scores(q, k, scorer("snapkv", window=150))[:, :, -1], every)
    assert torch.equal(scores(q, k, scorer("snapkv", window=150)), scores(q, k, scorer("snapkv", window=9999)))
    assert torch.equal(scores(q, k, scorer("minference", window=150)), scores(q, k, scorer("minference", window=9999)))


def test_a_pooled_tile_of_one_row_is_that_row() -> None:
    q, k = tensors(40)
    for aggregate in AGGREGATES:
        one, other = (scores(q, k, scorer(n), aggregate, tile=1) for n in ("minference-block", "mean"))
        assert torch.allclose(one, other)


def test_quest_bounds_the_true_maximum_and_means_the_mass_from_below() -> None:
    q, k = tensors()
    free = ~plan(1, 150, 150, BLOCK, TILE).forced_mask(1)[:, None].expand(1, 4, -1, -1)
    top, quest = scores(q, k, scorer("true-max")), scores(q, k, scorer("quest"))
    assert bool((quest >= top - 2.0**-40)[free].all())
    rows, keys = q[0, 0], k[0, 0]
    whole = 18  # blocks without a short one
    exact = torch.stack([(0.25 * rows @ b.T).logsumexp(-1) for b in keys.split(8)[:whole]], -1)
    for name, given in (("mean", {}), ("outliers", {"m": 1}), ("outliers", {"m": 3})):
        it = scorer(name, **given)
        summary = tuple(s[:whole] for s in it.summarise(keys, 8))
        below = it.log_mass(rows, summary, 0.25, 8)
        assert bool((below <= exact + 2.0**-40).all())
        mean = scorer("mean")
        plain = mean.log_mass(rows, tuple(s[:whole] for s in mean.summarise(keys, 8)), 0.25, 8)
        assert bool((below > plain - 2.0**-40).all())
    all_but_one = SCORERS["outliers"](m=7)
    assert torch.allclose(
        all_but_one.log_mass(rows, tuple(s[:whole] for s in all_but_one.summarise(keys, 8)), 0.25, 8), exact
    )


def test_the_heads_of_a_group_share_nsa_importance() -> None:
    q, k = tensors(heads=6, kv_heads=2)
    found = scores(q, k, scorer("nsa"))
    assert torch.equal(found[:, 0], found[:, 2])
    assert torch.equal(found[:, 3], found[:, 5])
    assert not torch.equal(found[:, 0], found[:, 3])


def test_moba_puts_blocks_that_a_row_gates_first() -> None:
    q, k = tensors()
    found = scores(q, k, scorer("moba", gates=3), "max")
    means = torch.stack([b.mean(1) for b in k[0].split(BLOCK, 1)], 1)
    for h in range(4):
        for t in range(2, 9):
            first = t * TILE // BLOCK  # own blocks of the tile's first row; the second half of its rows sees one more
            gated = set()
            for i in range(t * TILE, (t + 1) * TILE):
                gated |= set((q[0, h, i] @ means[h // 2, : i // BLOCK].T).topk(2).indices.tolist())
            votes = found[0, h, t, :first]
            assert {b for b in range(first) if votes[b] > 1} == {b for b in gated if b < first}


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", OURS)
def test_a_sequence_gets_what_it_gets_alone(name: str, aggregate: str) -> None:
    """Packed, or padded on either side with poison."""
    lengths = (70, 150, 1)
    q, k = (x.float() for x in tensors(sum(lengths)))
    it = scorer(name)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = scores(q, k, it, aggregate, cu_seqlens=bounds)
    left = torch.full((3, 4, 160, 16), torch.nan), torch.full((3, 2, 160, 16), torch.nan)
    right = torch.full((3, 4, 160, 16), torch.nan), torch.full((3, 2, 160, 16), torch.nan)
    for i, n in enumerate(lengths):
        mine = slice(int(bounds[i]), int(bounds[i + 1]))
        for x, a, b in zip((q, k), left, right, strict=True):
            a[i, :, 160 - n :], b[i, :, :n] = x[0, :, mine], x[0, :, mine]
    real = torch.arange(160) < torch.tensor(lengths)[:, None]
    on_the_left, on_the_right = (
        scores(*left, it, aggregate, key_padding=real.flip(1)),
        scores(*right, it, aggregate, key_padding=real),
    )
    tile = 0
    for i in range(len(lengths)):
        mine = slice(int(bounds[i]), int(bounds[i + 1]))
        alone = scores(q[:, :, mine].contiguous(), k[:, :, mine].contiguous(), it, aggregate)[0]
        tiles, blocks = alone.shape[1:]
        assert torch.equal(packed[0, :, tile : tile + tiles, :blocks], alone)
        assert torch.equal(on_the_left[i, :, :tiles, :blocks], alone)
        assert torch.equal(on_the_right[i, :, :tiles, :blocks], alone)
        tile += tiles


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", [n for n in OURS if n not in ("h2o", "snapkv", "minference")])
def test_a_chunk_of_whole_tiles_ranks_like_the_whole(name: str, aggregate: str) -> None:
    """For all that look at no row but the tile's own."""
    q, k = tensors()
    start = 3 * TILE
    whole, part = scores(q, k, scorer(name), aggregate), scores(q[:, :, start:], k, scorer(name), aggregate)
    assert torch.allclose(part, whole[:, :, 3:])


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize(
    "name", ["mean", "quest", "box", "outliers", "minference-block", "moba", *("true-max", "true-mass")]
)
def test_a_block_of_nan_ranks_last_and_spoils_no_other(name: str, aggregate: str) -> None:
    q, k = tensors()
    clean = scores(q, k, scorer(name), aggregate)
    k[0, 0, 5 * BLOCK + 2] = torch.nan
    found = scores(q, k, scorer(name), aggregate)
    later = found[0, :2, 4:]  # tiles behind the block
    assert not bool(found.isnan().any())
    assert bool((later[..., 5:6] <= later[..., :8]).all())
    if aggregate in ("max", "mean") and name != "moba":  # else the others share what it leaves
        others = [b for b in range(found.shape[3]) if b != 5]
        assert torch.equal(found[..., others], clean[..., others])


@pytest.mark.parametrize("aggregate", ["max", "mass", "mass-max"])
@pytest.mark.parametrize("name", [n for n in OURS if n != "minference-block"])
def test_a_row_of_nan_leaves_its_tile_to_the_others(name: str, aggregate: str) -> None:
    q, k = tensors()
    clean = scores(q, k, scorer(name), aggregate)
    q[0, 1, 5 * TILE + 3] = torch.nan
    found = scores(q, k, scorer(name), aggregate)
    assert not bool(found.isnan().any())
    assert torch.equal(found[0, 2:], clean[0, 2:])
    before = found[0, :, :5]
    if name not in ("snapkv", "minference"):  # their window is what it is for all tiles
        assert torch.equal(before, clean[0, :, :5])
    free = found[0, 1, 5, 1:10]
    assert len(free.unique()) > 1 or name == "h2o"


@SCORERS.register("test-position")
@dataclass(frozen=True)
class Nearest(Scorer):
    """A scorer that needs no keys at all: near blocks first, by a number per tile."""

    def scan(self, view):
        for chunk in view.chunks():
            near = torch.arange(chunk.seen, dtype=chunk.rows.dtype)
            yield chunk, near.expand(chunk.rows.shape[0], len(chunk.tiles), 1, -1)


@pytest.mark.parametrize("aggregate", ["max", "mean", "mass"])
def test_a_new_scorer_that_scans_is_one_small_class(aggregate: str) -> None:
    q, k = (x.float() for x in tensors())
    policy = Policy(Nearest(), TOPK, BLOCK, TILE, aggregate=aggregate)
    selection = closecall.select(q, k, policy)
    for t in range(2, 9):
        assert selection.kv_idx[0, 0, t, :4].tolist() == [0, 2 * t - 1, 2 * t, 2 * t + 1]
    assert Policy.from_json(policy.to_json()) == policy
    assert policy.name == "topk-on-test-position"
