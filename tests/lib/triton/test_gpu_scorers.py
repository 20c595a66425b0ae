"""Boxes, outlying keys and row-normalised scores in the Triton kernels, under the interpreter, on shapes of its size.

What a tile thinks of a block is computed once more from its definition, in float64 and with a bound on how far float32
may be from it. It shares no code with the package.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from closecall import SCORERS, Policy
from closecall.backends import reference
from closecall.backends.triton import backend, launch, rank, tables
from closecall.backends.triton.variants import variants
from closecall.geometry import plan
from closecall.rules.router import Router
from closecall.rules.topk import TopK
from closecall.scorers.box import Box
from closecall.scorers.outliers import Outliers
from compare import check_box
from engines import FLOATS, FUZZ, Engine, pairs
from oracle import Tile, exact, tiles


class Patient(Engine):
    """Runs what it is given, however long the interpreter takes."""

    def _bearable(self, *_: Any) -> None:
        pass


U = 2.0**-24
ENGINE = Patient("triton")
REFERENCE = Engine("reference")
MASSES = ("mass", "mass-max")
ROW_NORMALISED = (*MASSES, "softmax")
AGGREGATES = ("max", "mean", *ROW_NORMALISED)
SCORED: dict[str, tuple[str, dict[str, Any]]] = {
    "mean": ("mean", {}), "quest": ("quest", {}), "box": ("box", {"c": 0.4}), "1 outlier": ("outliers", {"m": 1}),
    "3 outliers": ("outliers", {"m": 3}), "1 boxed outlier": ("outliers", {"m": 1, "c": 0.5}),
    "2 boxed outliers": ("outliers", {"m": 2, "c": 0.3}),
}  # fmt: skip
# Those that test_kernels.py does not hold against an oracle.
PAIRS = [
    (scored, aggregate)
    for scored in SCORED
    for aggregate in AGGREGATES
    if aggregate in ROW_NORMALISED or scored not in ("mean", "quest")
]


@dataclass(frozen=True)
class Call:
    """Which rows and keys there are, on which grid."""

    q_len: int
    k_len: int
    block: int
    tile: int
    heads: tuple[int, int] = (2, 1)
    dim: int = 24
    sinks: int = 1
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Padding is poison."""
        generator = torch.Generator().manual_seed(self.q_len + self.k_len)
        q = torch.randn(self.batch, self.heads[0], self.q_len, self.dim, generator=generator)
        k = torch.randn(self.batch, self.heads[1], self.k_len, self.dim, generator=generator)
        if "key_padding" in self.options:
            real = self.options["key_padding"]
            k[~real[:, None].expand(k.shape[:3])] = torch.nan
            q[~real[:, None, self.k_len - self.q_len :].expand(q.shape[:3])] = torch.nan
        return q.to(dtype), k.to(dtype)

    def geometry(self) -> Any:
        return plan(self.batch, self.q_len, self.k_len, self.block, self.tile, **self.options)

    def policy(self, scored: str, aggregate: str) -> Policy:
        """One that ranks every block."""
        name, given = SCORED[scored]
        rule = TopK(budget=self.k_len, tile_factor=1)
        return Policy(SCORERS[name](**given), rule, self.block, self.tile, self.sinks, aggregate)


CALLS = {
    "tails": Call(61, 61, 8, 40),  # a tile of two parts in float32, a short tile and a short block
    "chunked": Call(20, 75, 16, 16, (4, 2), sinks=0),
    "decode": Call(3, 70, 8, 16, (3, 1), dim=40, sinks=2),
    "padded": Call(16, 50, 8, 8, batch=2, options={"key_padding": torch.arange(50) >= torch.tensor([[0], [17]])}),
    "packed": Call(60, 60, 5, 15, (1, 1), options={"cu_seqlens": torch.tensor([0, 31, 38, 60])}),
}


# --- The definition --------------------------------------------------------------------------------------------------

Vector = tuple[np.ndarray, np.ndarray, float]  # its products with the rows, their errors, the keys it stands for


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return exact(torch.from_numpy(x).to(dtype))


def rounded_box(rows: np.ndarray, keys: np.ndarray, dtype: torch.dtype, c: float) -> tuple[np.ndarray, np.ndarray]:
    """Products with the best corner of the keys' box, shrunk to c of its width and rounded to their type."""
    n, dim = keys.shape
    middle = keys.mean(0)
    off = U * (n + 2) * np.abs(keys).mean(0)
    if c:
        off = off + 8 * U * (np.abs(middle) + np.abs(keys).max(0))
    best, error = np.full(len(rows), 0.0), np.full(len(rows), 0.0)
    for end, mine in ((keys.max(0), np.maximum(rows, 0)), (keys.min(0), np.minimum(rows, 0))):
        side = middle + c * (end - middle)
        doubt = rounded(side + off, dtype) - rounded(side - off, dtype)
        best = best + mine @ rounded(side, dtype)
        error = error + np.abs(mine) @ (doubt + 2 * U * (dim + 8) * np.abs(rounded(side, dtype)))
    return best, error


def outliers_of(rows: np.ndarray, keys: np.ndarray, dtype: torch.dtype, m: int, c: float = 0.0) -> list[Vector]:
    n, dim = keys.shape
    roundings = U * (dim + 8)
    stored = [(rows @ x, roundings * np.abs(rows) @ np.abs(x), 1.0) for x in keys]
    if n <= m + 1:  # a short block, never ranked: all of its keys are stored, whichever comes first
        return stored
    mean, size = keys.mean(0), np.abs(keys).mean(0)
    apart = ((keys - mean) ** 2).sum(1)
    far = sorted(range(n), key=lambda j: (-apart[j], j))
    # The differences are off by that much of the keys' size, their squares' sum by twice that and D roundings.
    blur = 4 * U * ((n + 4) * (np.abs(keys - mean) * (np.abs(keys) + size)).sum(1).max() + dim * apart.max())
    assert apart[far[m - 1]] - apart[far[m]] > 2 * blur, "which keys are outlying must not depend on rounding"
    best, error = rounded_box(rows, keys[far[m:]], dtype, c)
    return [(best, error, n - m), *(stored[j] for j in far[:m])]


def vectors_of(rows: np.ndarray, keys: np.ndarray, scored: str, dtype: torch.dtype) -> list[Vector]:
    """Of one block. Errors count operations: n additions for a mean, D for a product, a few for what is between."""
    name, given = SCORED[scored]
    n, dim = keys.shape
    mean, size = keys.mean(0), np.abs(keys).mean(0)
    if name == "outliers":
        return outliers_of(rows, keys, dtype, **given)
    if name == "mean":
        return [(rows @ mean, U * (n + dim + 8) * (np.abs(rows) @ size), n)]
    return [(*rounded_box(rows, keys, dtype, given.get("c", 1.0)), n)]


def log_shares(bests: dict[int, tuple[np.ndarray, np.ndarray]], free: list[int]) -> dict[int, tuple[float, float]]:
    """The largest over rows of a row's log softmax over all blocks there are, from its scores and their errors."""
    logits, off = (np.stack([pair[i] for pair in bests.values()], 1) for i in (0, 1))
    delta = off + 16 * U * np.abs(logits).max(1, keepdims=True)  # shifted by the largest, in base 2
    top = logits.max(1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    spread = np.log((np.exp(logits - lse) * np.exp(delta)).sum(1, keepdims=True))
    error = delta + spread + U * (18 * len(bests) + 32) + 4 * U * np.abs(lse)
    place = list(bests)
    columns = {b: place.index(b) for b in free}
    return {b: (float((logits - lse)[:, i].max()), float(error[:, i].max())) for b, i in columns.items()}


def tile_scores(
    q: torch.Tensor, k: torch.Tensor, tile: Tile, head: int, call: Call, scored: str, aggregate: str, scale: float
) -> dict[int, tuple[float, float]]:
    """{block: (score, bound on its error)} of the blocks that may be ranked."""
    group = call.heads[0] // call.heads[1]
    rows = exact(q)[tile.batch, head, tile.rows]
    keys = exact(k)[tile.batch, head // group]
    free = sorted(set(tile.visible) - tile.forced(call.sinks))
    wanted = tile.visible if aggregate == "softmax" else free
    vectors = {b: vectors_of(rows, keys[tile.keys(b)], scored, q.dtype) for b in wanted}
    logits = {b: [(scale * p, 1.01 * scale * e + 4 * U * np.abs(scale * p), w) for p, e, w in vs]
              for b, vs in vectors.items()}  # fmt: skip
    bests = {b: (np.max([x for x, _, _ in vs], 0), np.max([e for _, e, _ in vs], 0)) for b, vs in logits.items()}
    if aggregate == "softmax":
        return log_shares(bests, free)
    if aggregate in ("max", "mean"):
        found = {}
        for b, (best, off) in bests.items():
            if aggregate == "max":
                found[b] = float(best.max()), float(off.max())
            else:
                found[b] = float(best.mean()), float(off.mean() + U * (len(rows) + 4) * np.abs(best).mean())
        return found
    # All that a row's masses are made of: [rows] logits, errors and weights.
    terms = [(b, *v) for b, vs in logits.items() for v in vs]
    for b in tile.forced(call.sinks):
        for j in range(tile.keys(b).start, tile.keys(b).stop):
            sees = np.array(tile.positions) >= j - tile.first_key
            product, size = scale * (rows @ keys[j]), scale * (np.abs(rows) @ np.abs(keys[j]))
            terms.append((-1, np.where(sees, product, -np.inf), U * (call.dim + 8) * size, 1.0))
    owner = np.array([b for b, _, _, _ in terms])
    logs = np.stack([x + math.log(w) for _, x, _, w in terms], 1)
    # Logits are shifted by the largest, taken in base 2, and the forced ones' sum goes through a logarithm and back.
    largest = np.abs(np.where(np.isfinite(logs), logs, 0.0)).max(1, keepdims=True)
    delta = np.stack([e for _, _, e, _ in terms], 1) + 16 * U * (largest + math.log(len(terms) + 1))
    p = np.exp(logs - logs.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    spread = np.log((p * np.exp(delta)).sum(1, keepdims=True))
    relative = np.expm1(delta + spread) + 1.01 * U * (2 * len(terms) + 16 * len(tile.visible) + 32)
    found = {}
    for b in free:
        mine = owner == b
        share, off = p[:, mine].sum(1), (p * relative)[:, mine].sum(1) + 2.0**-120
        if aggregate == "mass-max":
            found[b] = float(share.max()), float(off.max())
        else:
            found[b] = float(share.mean()), float(off.mean() + U * (len(rows) + 4) * share.mean())
    return found


# --- Against it ------------------------------------------------------------------------------------------------------


def shapes_of(scored: str, aggregate: str) -> list[str]:
    """One shape for each pair, another from pair to pair; of `mean` and `quest`, which have fewer pairs, some have two.

    So every scorer and every reduction meets every shape. The interpreter takes its time: `make fuzz` runs all.
    """
    s, a = list(SCORED).index(scored), AGGREGATES.index(aggregate)
    turns = {(s + a) % 5} | ({(s + a - 2) % 5} if scored in ("mean", "quest") and aggregate in MASSES else set())
    return [shape for i, shape in enumerate(CALLS) if FUZZ or i in turns]


DRAWN = [(*pair, shape) for pair in PAIRS for shape in shapes_of(*pair)]


def test_every_scorer_and_every_reduction_meets_every_shape() -> None:
    for part in (0, 1):
        assert {(case[part], case[2]) for case in DRAWN} == {(p[part], shape) for p in PAIRS for shape in CALLS}


@pytest.mark.parametrize(("scored", "aggregate", "shape"), DRAWN)
def test_scores_and_ranking_by_definition(
    monkeypatch: pytest.MonkeyPatch, scored: str, aggregate: str, shape: str
) -> None:
    monkeypatch.setattr(reference, "rank", None)  # the kernels do it themselves
    dtype = FLOATS[(PAIRS.index((scored, aggregate)) + list(CALLS).index(shape)) % 3]
    check_by_definition(CALLS[shape], scored, aggregate, dtype)


@pytest.mark.parametrize("aggregate", ["mass", "softmax"])
@pytest.mark.parametrize("scored", ["mean", "box", "3 outliers", "1 boxed outlier"])
def test_rows_that_do_not_fit_into_registers_are_added_up_in_slices(scored: str, aggregate: str) -> None:
    check_by_definition(Call(20, 75, 16, 16, dim=48), scored, aggregate, torch.float32)


def check_by_definition(call: Call, scored: str, aggregate: str, dtype: torch.dtype) -> None:
    q, k = call.tensors(dtype)
    scale = call.dim**-0.5
    ranked = ENGINE.rank(q, k, call.policy(scored, aggregate), call.geometry(), scale)
    width = ranked.order.shape[3]
    for tile in tiles(call.batch, call.q_len, call.k_len, call.block, call.tile, **call.options):
        for head in range(call.heads[0]):
            expected = tile_scores(q, k, tile, head, call, scored, aggregate, scale)
            order = ranked.order[tile.batch, head, tile.number].tolist()
            scores = ranked.scores[tile.batch, head, tile.number].tolist()
            assert sorted(order[: len(expected)]) == sorted(expected)
            assert order[len(expected) :] == [call.geometry().n_blocks] * (width - len(expected))
            assert scores[len(expected) :] == [-math.inf] * (width - len(expected))
            for block, score in zip(order, scores[: len(expected)], strict=False):
                value, error = expected[block]
                assert abs(score - value) <= error, f"block {block}: {score} is not {value} +- {error:.3g}"
            sure = [(expected[b][0] - expected[b][1], expected[b][0] + expected[b][1]) for b in order[: len(expected)]]
            best_after = -math.inf  # no block that is surely better stands behind
            for low, high in reversed(sure):
                assert high >= best_after
                best_after = max(best_after, low)


def test_the_bounds_tell_right_from_wrong() -> None:
    """They are small beside what tells neighbours in the ranking apart."""
    for scored, aggregate in PAIRS:
        call = CALLS["chunked"]
        q, k = call.tensors(torch.float32)
        tile = tiles(1, call.q_len, call.k_len, call.block, call.tile)[0]
        found = sorted(tile_scores(q, k, tile, 0, call, scored, aggregate, 0.2).values())
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(found)]
        assert float(np.median(gaps)) > 100 * max(e for _, e in found)


# --- Summaries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    pairs(
        [
            (16, 0, 0.0), (16, 1, 0.0), (16, 9, 0.0), (64, 3, 0.0), (4, 2, 0.0),
            (16, 0, 0.5), (16, 1, 0.5), (16, 9, 0.25), (64, 3, 1.0), (8, 2, 0.75),
        ],
        FLOATS,
        lambda i, j: i % 3 == j,
    ),
)  # fmt: skip
def test_outlying_keys_are_the_references_where_many_are_as_distant(
    sizes: tuple[int, int, float], dtype: torch.dtype
) -> None:
    """Small whole numbers, blocks of a power of two and boxes shrunk by one: all is exact but the others' mean, which
    is rounded once. Ties go to the earlier key. The last block has one key, or two, and repeats what it has."""
    block, m, c = sizes
    generator = torch.Generator().manual_seed(block + m)
    k = torch.randint(-2, 3, (1, 2, 2 * block + min(2, max(1, m)), 5), generator=generator).to(dtype)
    scorer = Outliers(m=m, c=c)
    policy = Policy(scorer, TopK(), block, block, 1, "max")
    here = tables.tables(plan(1, k.shape[2], k.shape[2], block, block), k.device)
    with ENGINE._forced():
        found, told = backend._summarise(k, policy.scorer.planes, here, block)
    assert (told["VECTORS"], told["PLANES"], found.dtype) == (m + 1, 2 if c else 1, dtype)
    expected = torch.stack(scorer.summarise(k, block), -3)  # [B, Hkv, planes, blocks, D]
    assert torch.equal(found[..., :5].float(), expected[0])
    assert not bool(found[..., 5:].any())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("c", [0.0, 0.25, 0.75, 1.0])
def test_a_box_is_rounded_once_to_the_keys_type(c: float, dtype: torch.dtype) -> None:
    k = torch.randn(1, 1, 37, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    here = tables.tables(plan(1, 37, 37, 16, 16), k.device)
    with ENGINE._forced():
        sides, told = backend._summarise(k, Box(c=c).planes, here, 16)
    assert (told["PLANES"], sides.dtype) == (2, dtype)
    check_box(sides[0, :, :, :16], k[0, 0], 16, c)


@pytest.mark.parametrize("c", [0.0, 1.0])
def test_one_block_of_a_thousand_keys_needs_many_steps(c: float) -> None:
    """The most distant keys lie in different steps, and one of two as distant in a later one; so do those that the
    others' box is made of."""
    k = torch.zeros(1, 1, 1024, 4)
    for place, size in ((1000, 5.0), (3, -4.0), (700, 4.0), (40, 3.0), (900, -2.0)):
        k[0, 0, place] = size
    policy = Policy(Outliers(m=3, c=c), TopK(), 1024, 64, 1, "max")
    here = tables.tables(plan(1, 1024, 1024, 1024, 64), k.device)
    k = k - 2.0**-7 * k.sum(2, keepdim=True) / 8  # so that the mean is 0 and -4 is as distant as 4
    with ENGINE._forced():
        found, _ = backend._summarise(k, policy.scorer.planes, here, 1024)
    assert torch.equal(found[0, -3:, 0, 0], k[0, 0, [1000, 3, 700], 0])
    if c:
        assert torch.equal(found[0, :2, 0, 0], k[0, 0, [40, 900], 0])


# --- What is no number -----------------------------------------------------------------------------------------------


def ranked_by(engine: Engine, scored: str, aggregate: str, q: torch.Tensor, k: torch.Tensor) -> dict[int, float]:
    """{block: score} of the last tile."""
    call = Call(q.shape[2], k.shape[2], 16, 16)
    found = engine.rank(q, k, call.policy(scored, aggregate), call.geometry(), 0.2)
    return dict(zip(found.order[0, 0, -1].tolist(), found.scores[0, 0, -1].tolist(), strict=True))


@pytest.mark.parametrize(
    ("scored", "aggregate"),
    pairs(["quest", "box", "3 outliers", "1 boxed outlier"], AGGREGATES, lambda i, j: (i + j) % 2 == 0),
)
def test_a_block_with_a_key_that_is_no_number_ranks_last_and_changes_no_other(scored: str, aggregate: str) -> None:
    q, k = Call(16, 96, 16, 16, (1, 1)).tensors(torch.float32)
    k[0, 0, 35, 5] = torch.nan  # block 2
    mine, theirs = (ranked_by(engine, scored, aggregate, q, k) for engine in (ENGINE, REFERENCE))
    assert mine[2] == theirs[2] == (0.0 if aggregate in MASSES else -math.inf)
    assert list(mine) == list(theirs)
    assert list(mine)[3] == 2  # of the four that may be ranked
    for block in (1, 3, 4):
        assert mine[block] == pytest.approx(theirs[block], rel=1e-4)


@pytest.mark.parametrize("aggregate", ROW_NORMALISED)
def test_a_row_that_is_no_number_has_no_share(aggregate: str) -> None:
    q, k = Call(16, 96, 16, 16, (1, 1)).tensors(torch.float32)
    q[0, 0, 4] = torch.nan
    mine, theirs = (ranked_by(engine, "1 outlier", aggregate, q, k) for engine in (ENGINE, REFERENCE))
    assert list(mine) == list(theirs)
    assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-4)


def test_rows_that_see_no_number_among_forced_keys_have_no_say() -> None:
    """The last key of all: only the last row sees it."""
    q, k = Call(16, 96, 16, 16, (1, 1)).tensors(torch.float32)
    k[0, 0, 95] = torch.nan
    found = ranked_by(ENGINE, "mean", "mass", q, k)
    # A mean over sixteen rows of which one is silent: the other rows' as if they were alone, times 15 / 16.
    call = Call(15, 95, 16, 16, (1, 1))
    alone = ENGINE.rank(q[:, :, :15], k[:, :, :95], call.policy("mean", "mass"), call.geometry(), 0.2)
    for block, score in zip(alone.order[0, 0, -1].tolist()[:4], alone.scores[0, 0, -1].tolist(), strict=False):
        assert found[block] == pytest.approx(score * 15 / 16, rel=1e-5)


@pytest.mark.parametrize("scored", SCORED)
@pytest.mark.parametrize("key", [7, 95])
def test_under_softmax_a_forced_block_that_is_no_number_is_not_there(scored: str, key: int) -> None:
    """A sink, or the tile's own block, which only its last row sees whole: all rows do without it."""
    q, k = Call(16, 96, 16, 16, (1, 1)).tensors(torch.float32)
    k[0, 0, key, 3] = torch.nan
    mine, theirs = (ranked_by(engine, scored, "softmax", q, k) for engine in (ENGINE, REFERENCE))
    assert list(mine) == list(theirs)
    assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-4)
    assert all(math.isfinite(mine[block]) for block in (1, 2, 3, 4))


@pytest.mark.parametrize("scored", ["mean", "quest", "1 outlier", "1 boxed outlier"])
@pytest.mark.parametrize("size", [torch.nan, 1e20, -1e20])
def test_softmax_of_a_row_that_knows_nothing_or_is_infinitely_sure(scored: str, size: float) -> None:
    """Products with the keys of block 2 are infinite; those with others are as nothing beside them. As the reference's,
    to the bit: all are differences of float32's largest number and what is lost beside it, or infinite."""
    q, k = Call(1, 96, 16, 16, (1, 1)).tensors(torch.float32)
    q[..., 0] = size
    k[..., 0] = 0.0
    k[0, 0, 32:48, 0] = 1e20
    mine, theirs = (ranked_by(engine, scored, "softmax", q, k) for engine in (ENGINE, REFERENCE))
    assert list(mine) == list(theirs)
    if size > 0:
        largest = torch.finfo(torch.float32).max
        assert mine == theirs
        assert [mine[block] for block in (1, 2, 3, 4)] == [-largest, 0.0, -largest, -largest]
    elif size < 0:
        assert mine[2] == -math.inf
        assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-4)
    else:
        assert list(mine.values()) == [-math.inf] * len(mine)


# --- The rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["mass", "softmax"])
def test_shares_in_chunks_of_heads_and_tiles(monkeypatch: pytest.MonkeyPatch, aggregate: str) -> None:
    """One tile at a time, and one head."""
    call = Call(32, 64, 16, 16, (2, 2), batch=2)
    q, k = call.tensors(torch.float32)
    policy = call.policy("1 outlier", aggregate)
    whole = ENGINE.rank(q, k, policy, call.geometry(), 0.2)
    for size in (1, 8 * 2 * 4 * 2):
        monkeypatch.setattr(rank, "SCORE_BYTES", size)
        parts = ENGINE.rank(q, k, policy, call.geometry(), 0.2)
        assert torch.equal(parts.order, whole.order)
        assert torch.equal(parts.scores, whole.scores)


def test_softmax_attends_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forced blocks' exact mass is not wanted, so the keys are read for their summaries alone."""
    call = CALLS["chunked"]
    q, k = call.tensors(torch.float32)
    monkeypatch.setattr(backend, "attend", None)
    ENGINE.rank(q, k, call.policy("1 boxed outlier", "softmax"), call.geometry(), 0.2)
    with pytest.raises(TypeError, match="not callable"):
        ENGINE.rank(q, k, call.policy("1 boxed outlier", "mass"), call.geometry(), 0.2)


@pytest.mark.parametrize(
    ("scored", "aggregate"),
    [
        ("3 outliers", "max"), ("1 outlier", "mass"), ("box", "mass-max"), ("1 boxed outlier", "softmax"),
        ("quest", "softmax"), ("2 boxed outliers", "mass-max"),
    ],
)  # fmt: skip
def test_one_selection_through_the_front_door(scored: str, aggregate: str) -> None:
    q, k = Call(32, 96, 8, 16).tensors(torch.float32)
    name, given = SCORED[scored]
    rule = Router(budget=6, tile_factor=1)
    policy = Policy(SCORERS[name](**given), rule, 8, 16, 1, aggregate)
    mine, theirs = (e.select(q, k, policy) for e in (ENGINE, REFERENCE))
    assert torch.equal(mine.kv_idx, theirs.kv_idx)
    assert torch.equal(mine.triggered, theirs.triggered)


def test_a_scorer_without_a_kernel_is_ranked_by_the_reference() -> None:
    call = Call(32, 64, 16, 16)
    q, k = call.tensors(torch.float32)
    policy = Policy(SCORERS["snapkv"](), TopK(budget=3, tile_factor=1), 16, 16, 1, "mass")
    mine, theirs = (e.rank(q, k, policy, call.geometry(), 0.2) for e in (ENGINE, REFERENCE))
    assert torch.equal(mine.order, theirs.order)


@pytest.mark.parametrize(("dim", "dtype"), [(64, "bf16"), (64, "fp32"), (128, "fp16"), (128, "bf16"), (128, "fp32")])
def test_softmax_and_boxed_outliers_are_among_the_compiled_variants(dim: int, dtype: str) -> None:
    kinds = ["summaries boxed-outliers-1", "scores boxed-outliers-1", "scores boxed-outliers-1 mass"]
    kinds += ["sums boxed-outliers-1"]
    kinds += [f"{kernel} {s} softmax" for kernel in ("scores", "sums") for s in ("quest", "boxed-outliers-1")]
    for arch in launch.ARCHS:
        names = {variant.name for variant in variants(arch)}
        assert {f"{kind} D{dim} {dtype}" for kind in kinds} <= names
