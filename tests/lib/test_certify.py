"""Certificates against extended-precision truth: never below the mass that was dropped nor the error it caused."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import closecall
import oracle
from closecall.block_mass import distance_above, summarise_keys, summarise_values, weight_above, weight_below
from closecall.certify.certificate import Certificate, certify
from closecall.policy import Policy
from closecall.rules.certified import Certified
from compare import kept_of
from drawing import Case, cases, over
from engines import FLOATS, FUZZ, Engine, compiled
from test_rules import ranked

# Where long double is no longer than float64 the oracle's own roundings need room; on x86 this is 0.
OWN = 0.0 if np.finfo(np.longdouble).eps < 2.0**-60 else 2.0**-40
Kept = dict[tuple[int, int, int], list[int]]


def truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: Kept, plan: list[oracle.Tile], scale: float, softcap: float
) -> tuple[np.ndarray, np.ndarray]:
    """The softmax mass every row loses, and how far its output is from the dense one; long double."""
    wide_q, wide_k, wide_v = (oracle.exact(x).astype(np.longdouble) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    mass, error = (np.zeros(q.shape[:3], dtype=np.longdouble) for _ in range(2))
    for tile in plan:
        keys = np.arange(tile.positions[-1] + 1)
        sees = keys[None] <= np.array(tile.positions)[:, None]
        at = tile.first_key + keys
        for h in range(q.shape[1]):
            inside = np.isin(keys // tile.block, kept[tile.batch, h, tile.number])
            ks, vs = wide_k[tile.batch, h // group, at], wide_v[tile.batch, h // group, at]
            logits = np.longdouble(scale) * (wide_q[tile.batch, h, tile.rows] @ ks.T)
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            logits = np.where(sees, logits, -np.inf)
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            lost = np.minimum((p * ~inside).sum(1), 1)  # its own last rounding
            # Relative to the kept keys' own maximum: they may weigh next to nothing.
            top = np.where(inside, logits, -np.inf).max(1, keepdims=True)
            mine = np.exp(np.where(inside, logits, -np.inf) - np.where(np.isfinite(top), top, 0))
            total = mine.sum(1, keepdims=True)
            out = np.divide(mine @ vs, total, out=np.zeros((len(p), vs.shape[1]), np.longdouble), where=total > 0)
            mass[tile.batch, h, tile.rows] = lost
            error[tile.batch, h, tile.rows] = np.sqrt(((out - p @ vs) ** 2).sum(1))
    return mass, error


def assert_sound(found: Certificate, mass: np.ndarray, error: np.ndarray, values: torch.Tensor) -> None:
    bound, far = (oracle.exact(x).astype(np.longdouble) for x in (found.mass, found.error))
    assert (bound >= mass * (1 - OWN)).all(), f"mass below the truth by {(mass - bound).max():.3g}"
    # The difference of two outputs is only as exact as they are long.
    own = float(np.finfo(np.longdouble).eps) * 64 * float(values.nan_to_num().abs().max()) * values.shape[-1]
    assert (far >= error - own).all(), f"error below the truth by {(error - far).max():.3g}"
    assert (bound <= 1).all()
    assert not np.isnan(far).any()


def assert_exact_zeros(found: Certificate, kept: Kept, plan: list[oracle.Tile]) -> None:
    """0 where nothing a row sees was dropped, and only there; padded rows among them."""
    none = np.ones(found.mass.shape, dtype=bool)
    real = np.zeros(found.real.shape, dtype=bool)
    for tile in plan:
        real[tile.batch, tile.rows] = True
        for h in range(found.mass.shape[1]):
            dropped = set(tile.visible) - set(kept[tile.batch, h, tile.number])
            for row, position in zip(tile.rows, tile.positions, strict=True):
                none[tile.batch, h, row] = not any(b * tile.block <= position for b in dropped)
    assert ((found.mass.numpy() == 0) == none).all()
    assert (found.error.numpy()[none] == 0).all()
    assert (found.real.numpy() == real).all()


@over(24, case=cases(work=800, cells=30))
def test_never_below_the_truth_on_any_backend(engine: Engine, case: Case) -> None:
    q, k, v = case.tensors()
    kwargs = case.arguments()
    selection = engine.select(q, k, case.policy(), scale=case.scale, **kwargs)
    softcap = 5.0 if case.seed % 4 == 0 else 0.0
    with engine._forced():
        found = certify(q, k, v, selection, scale=case.scale, backend=engine.backend, softcap=softcap)
    plan, kept = case.tiles(), kept_of(selection)
    clean = [x.where(x.isfinite(), 0.0) for x in (q, k, v)]  # poison lies in padding only
    assert_sound(found, *truth(*clean, kept, plan, case.used_scale, softcap), v)
    assert_exact_zeros(found, kept, plan)


@dataclasses.dataclass(frozen=True)
class Hard:
    """A small call made to be hard: bounds that are met exactly, weights of any size, blocks dropped at random."""

    seed: int
    kind: str
    dtype: torch.dtype
    softcap: float

    def make(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, closecall.Selection, list[oracle.Tile], float]:
        rng = np.random.default_rng(self.seed)
        block, tile = int(rng.choice([1, 2, 5, 16])), int(rng.choice([1, 4, 16]))
        dim, v_dim = int(rng.choice([1, 2, 3, 8, 20])), int(rng.choice([1, 4]))
        n = int(rng.integers(1, 60))
        m = int(rng.choice([n, rng.integers(1, n + 1)]))
        kv = int(rng.choice([1, 2]))
        heads = kv * int(rng.choice([1, 3]))
        q, k = rng.standard_normal((1, heads, m, dim)), rng.standard_normal((1, kv, n, dim))
        v = rng.standard_normal((1, kv, n, v_dim))
        scale = float(rng.choice([0.05, 0.4, 3.0]))
        if self.kind == "equal":  # all keys of a block alike: box and mean are exact
            k = k[:, :, np.arange(n) // block * block]
        elif self.kind == "two values":  # one key of a block high, the others alike: Bennett's extreme case
            k = np.where((np.arange(n) % block == 0)[:, None], k, k[:, :, :1] * 0.5)
        elif self.kind == "parallel":  # keys along the row's own direction: the ball is exact
            k = q[:, :kv, :1] * rng.standard_normal((1, kv, n, 1))
        elif self.kind == "huge":
            q, scale = q * 300, 1.0
        elif self.kind == "tiny":
            q, k, v = q * 1e-3, k * 1e-30, v * 1e-30
        elif self.kind == "heavy":
            k, v = k / rng.random((1, kv, n, 1)) ** 2, v / rng.random((1, kv, n, 1)) ** 2
        elif self.kind == "far":  # values far from 0 and close together
            v = v * 1e-3 + 100
        elif self.kind == "zero":
            q = q * 0
        tensors = [torch.from_numpy(x.clip(-6e4, 6e4)).to(self.dtype) for x in (q, k, v)]  # float16 has no more
        plan = oracle.tiles(1, m, n, block, tile)
        n_blocks = -(-n // block)
        n_tiles = max(t.number for t in plan) + 1
        counts = torch.zeros(1, heads, n_tiles, dtype=torch.int32)
        index = torch.full((1, heads, n_tiles, n_blocks), n_blocks, dtype=torch.int32)
        share = rng.choice([0.1, 0.5, 0.9])
        for t in plan:
            for h in range(heads):
                kept = [b for b in t.visible if rng.random() < share] or t.visible[:1]
                counts[0, h, t.number] = len(kept)
                index[0, h, t.number, : len(kept)] = torch.tensor(kept)
        selection = closecall.Selection.from_blocks(index, counts, q_len=m, k_len=n, block=block, tile=tile)
        return (*tensors, selection, plan, scale)  # type: ignore[return-value]


KINDS = ["normal", "equal", "two values", "parallel", "huge", "tiny", "heavy", "far", "zero"]
HARD = st.builds(
    Hard,
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([*FLOATS, torch.float64]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
)


@settings(max_examples=20000 if FUZZ else 250)
@given(HARD)
def test_never_below_the_truth_where_bounds_are_met(case: Hard) -> None:
    q, k, v, selection, plan, scale = case.make()
    backend = "reference" if case.dtype == torch.float64 else "auto"
    found = certify(q, k, v, selection, scale=scale, softcap=case.softcap, backend=backend)
    kept = kept_of(selection)
    assert_sound(found, *truth(q, k, v, kept, plan, scale, case.softcap), v)
    assert_exact_zeros(found, kept, plan)


def block_weights(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """log sum exp of every row over one block, long double."""
    logits = np.longdouble(scale) * (q.astype(np.longdouble) @ k.astype(np.longdouble).T)
    top = logits.max(1)
    return top + np.log(np.exp(logits - top[:, None]).sum(1))


@settings(max_examples=5000 if FUZZ else 100)
@given(HARD)
def test_what_blocks_weigh_lies_between(case: Hard) -> None:
    q, k, v, selection, _, scale = case.make()
    rows, keys, values = oracle.exact(q)[0, 0], oracle.exact(k)[0, 0], oracle.exact(v)[0, 0]
    block = selection.block
    summary = summarise_keys(k[0, 0], block)
    seen = summary.size.expand(len(rows), -1)
    wide = torch.from_numpy(rows)
    high, low = weight_above(wide, summary, scale, seen).numpy(), weight_below(wide, summary, scale).numpy()
    far = distance_above(torch.from_numpy(values), summarise_values(v[0, 0], block)).numpy()
    for b in range(selection.n_blocks):
        part = slice(b * block, (b + 1) * block)
        weight = block_weights(rows, keys[part], scale)
        own = OWN * (1 + np.abs(weight))
        assert (low[:, b] <= weight + own).all()
        assert (high[:, b] >= weight - own).all()
        long = values.astype(np.longdouble)
        distance = np.sqrt(((long[:, None] - long[None, part]) ** 2).sum(-1)).max(1)
        assert (far[:, b] >= distance * (1 - OWN)).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.0, 1e-20, 1.0, 1e15]))
def test_the_variance_is_near_the_largest_eigenvalue(seed: int, n: int, dim: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    keys = size * rng.standard_normal((n, dim)) * rng.random(dim) ** 3
    block = int(rng.integers(1, n + 1))
    found = summarise_keys(torch.from_numpy(keys), block).variance.numpy()
    for b, variance in enumerate(found):
        part = keys[b * block : (b + 1) * block]
        true = np.linalg.eigvalsh(np.cov(part, rowvar=False, bias=True).reshape(dim, dim)).max()
        own = 1e-13 * (part**2).sum()  # of eigvalsh and of the mean
        assert true - own <= variance <= max(true, 0) * min(block, dim) ** (1 / 8) * (1 + 1e-9) + own


def test_each_inequality_earns_its_place() -> None:
    """In 64 dimensions, on average over rows and blocks: Bennett below the ball below Quest's box."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = (torch.randn(n, 64, generator=generator, dtype=torch.float64) for n in (32, 640))
    summary = summarise_keys(keys, 64)
    seen = summary.size.expand(32, -1)
    box = (rows.clamp(min=0) @ summary.high.T + rows.clamp(max=0) @ summary.low.T) / 8 + seen.log()
    ball = (rows @ summary.mean.T + rows.norm(dim=1)[:, None] * summary.radius) / 8 + seen.log()
    found = weight_above(rows, summary, 0.125, seen)
    truth_ = torch.tensor(
        np.stack([block_weights(rows.numpy(), b.numpy(), 0.125) for b in keys.split(64)], 1).astype(float)
    )
    assert truth_.mean() < found.mean() < ball.mean() < box.mean()
    assert bool((found <= ball.minimum(box) + 1e-9).all())


def test_bounds_that_are_met_are_tight() -> None:
    """Where all keys of a block are alike, the certificate is the truth up to what float32 attention may be off."""
    case = Hard(5, "equal", torch.float32, 0.0)
    q, k, v, selection, plan, scale = case.make()
    mass, _ = truth(q, k, v, kept_of(selection), plan, scale, 0.0)
    found = certify(q, k, v, selection, scale=scale).mass.numpy()
    whole = mass > 0
    assert whole.any()
    assert (found[whole] <= mass[whole] * (1 + 1e-4)).all()


def test_a_row_that_keeps_nothing_loses_everything() -> None:
    q = torch.randn(1, 1, 8, 4)
    index, counts = torch.full((1, 1, 1, 2), 2, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32)
    index[0, 0, 0, 0] = 1  # the first four rows see block 0 only
    selection = closecall.Selection.from_blocks(index, counts, q_len=8, k_len=8, block=4, tile=8)
    found = certify(q, q, q, selection)
    assert found.mass[0, 0, :4].tolist() == [1.0] * 4
    mass, error = truth(q, q, q, {(0, 0, 0): [1]}, oracle.tiles(1, 8, 8, 4, 8), 0.5, 0.0)
    assert_sound(found, mass, error, q)


def test_works_on_one_tile_and_key_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest arrays are as long as the rows that share a tile and a key head, whatever the number of rows."""
    sizes = []

    def spy(rows: torch.Tensor, *args: object) -> torch.Tensor:
        sizes.append(len(rows))
        return weight_above(rows, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules["closecall.certify.certificate"], "weight_above", spy)
    q, k, v = flat()
    certify(q, k, v, closecall.select(q, k, closecall.policy("quest", budget=3, block=16, tile=16)))
    assert max(sizes) == 16 * 2
    assert sum(sizes) == 4 * (640 - 6 * 16)  # tiles that keep all they see are not looked at


@pytest.mark.parametrize("at_once", [1, 300])
def test_rows_in_parts_are_certified_as_together(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = flat()
    selection = closecall.select(q, k, closecall.policy("quest", budget=3, block=16, tile=16))
    whole = certify(q, k, v, selection)
    monkeypatch.setattr(sys.modules["closecall.certify.certificate"], "AT_ONCE", at_once)
    parts = certify(q, k, v, selection)
    torch.testing.assert_close(parts.mass, whole.mass)
    torch.testing.assert_close(parts.error, whole.error)


def test_aggregates() -> None:
    mass, error = torch.tensor([[[0.0, 0.5, 0.2]]]), torch.tensor([[[0.0, 7.0, 3.0]]])
    found = Certificate(mass, error, torch.tensor([[True, False, True]]))  # the padded row does not count
    assert found.max_mass == pytest.approx(0.2)
    assert found.mean_mass == pytest.approx(0.1)
    assert (found.max_error, found.mean_error) == (3.0, 1.5)
    assert (found.certified(0.0), found.certified(0.1), found.certified(0.3)) == (0.5, 0.5, 1.0)
    assert "50.0% at 0.1" in str(found)
    nobody = Certificate(mass, error, torch.zeros(1, 3, dtype=torch.bool))
    assert all(math.isnan(x) for x in (nobody.max_mass, nobody.mean_error, nobody.certified(0.5)))
    with pytest.raises(ValueError, match=r"eps must be in \[0, 1\].*got 3"):
        found.certified(3)
    with pytest.raises(ValueError, match=r"eps must be in \[0, 1\].*got 'a'"):
        found.certified("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_not_a_number_certifies_nothing(bad: float, where: str, kept: bool) -> None:
    q, k, v = (torch.randn(1, 1, 64, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    index = torch.tensor([[0, 1, 3] if kept else [0, 2, 3]], dtype=torch.int32).view(1, 1, 1, 3)
    q = q[:, :, 48:]
    selection = closecall.Selection.from_blocks(index, torch.full((1, 1, 1), 3), q_len=16, k_len=64, block=16, tile=16)
    clean = certify(q, k, v, selection)
    at = {"q": 5, "k": 20, "v": 20}[where]  # key 20 lies in block 1
    {"q": q, "k": k, "v": v}[where][0, 0, at, 3] = bad
    found = certify(q, k, v, selection)
    hit = [5] if where == "q" else list(range(16))
    assert bool((found.error[0, 0, hit] == math.inf).all())
    if where == "v":
        assert torch.equal(found.mass, clean.mass)
    else:
        assert bool((found.mass[0, 0, hit] == 1).all())
    others = [i for i in range(16) if i not in hit]
    assert torch.equal(found.mass[0, 0, others], clean.mass[0, 0, others])
    assert torch.equal(found.error[0, 0, others], clean.error[0, 0, others])


def test_arguments_are_those_of_attend() -> None:
    q = torch.randn(1, 2, 32, 8)
    selection = closecall.select(q, q, "dense")
    with pytest.raises(ValueError, match="M = 32"):
        certify(q[:, :, :16], q, q, selection)
    with pytest.raises(TypeError, match="selection must be"):
        certify(q, q, q, "dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown backend"):
        certify(q, q, q, selection, backend="cup")


# --- The rule ---------------------------------------------------------------------------------------------------------


def certified(case: Case, eps: float, max_budget: int) -> Policy:
    scorer = closecall.SCORERS[case.scorer or "quest"]()
    rule = Certified(eps, max_budget)
    return Policy(scorer, rule, block=case.block, tile=case.tile, sinks=case.sinks, aggregate=case.aggregate)


@over(16, case=cases(numbers=("normal", "integers", "ties"), work=800, cells=30))
def test_a_tile_that_stops_has_lost_at_most_eps(engine: Engine, case: Case) -> None:
    q, k, v = case.tensors()
    kwargs = case.arguments()
    r = np.random.default_rng(case.seed)
    eps = float(r.choice([0.01, 0.3, 0.7]))
    most = 2 + case.sinks + (case.tile + case.block - 2) // case.block + int(r.integers(0, 6))
    scale = case.used_scale * float(r.choice([1.0, 0.02]))  # flat scores certify, sharp ones mostly do not
    policy = certified(case, eps, most)
    selection = engine.select(q, k, policy, scale=scale, **kwargs)
    selection.check()
    with engine._forced():
        found = certify(q, k, v, selection, scale=scale, backend=engine.backend)
    plan, kept = case.tiles(), kept_of(selection)
    clean = [x.where(x.isfinite(), 0.0) for x in (q, k, v)]
    mass, _ = truth(*clean, kept, plan, scale, 0.0)
    u = oracle.working_roundoff(case.dtype)
    for tile in plan:
        forced = tile.forced(case.sinks)
        for h in range(case.heads):
            mine = kept[tile.batch, h, tile.number]
            assert len(mine) <= most
            assert forced <= set(mine)
            # A prefix of the ranking, up to blocks that rounding can swap.
            scores = oracle.block_scores(
                oracle.exact(q), oracle.exact(k), tile, h, case.scorer or "quest", case.aggregate, scale, case.sinks, u
            )
            weakest = min((s + e for b, (s, e) in scores.items() if b in mine), default=np.inf)
            strongest = max((s - e for b, (s, e) in scores.items() if b not in mine), default=-np.inf)
            assert weakest >= strongest
            margin = float(selection.margin[tile.batch, h, tile.number])
            assert math.isnan(margin) == (len(mine) == len(tile.visible))
            if len(mine) < min(most, len(tile.visible)):
                assert bool((mass[tile.batch, h, tile.rows] <= eps).all())
                assert bool((found.mass[tile.batch, h, tile.rows] <= eps).all())
    assert not bool(selection.triggered.any())


def flat(n: int = 640) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, h, n, 16, generator=generator) * 0.05 for h in (4, 2, 2))


def make(eps: float, most: int) -> Policy:
    return Policy(closecall.SCORERS["quest"](), Certified(eps, most), block=16, tile=16)


def test_a_smaller_eps_keeps_more_and_the_budget_ends_it() -> None:
    q, k, _ = flat()
    counts = [closecall.select(q, k, make(eps, 40)).counts for eps in (0.9, 0.5, 0.1)]
    assert bool((counts[0] <= counts[1]).all())
    assert bool((counts[1] <= counts[2]).all())
    # Flat scores: a share eps of the visible blocks may go, and the bound is nearly that.
    last = [int(c[0, 0, -1]) for c in counts]
    assert last == [pytest.approx(40 * keep, abs=2) for keep in (0.1, 0.5, 0.9)]
    assert bool((closecall.select(q, k, make(0.1, 12)).counts <= 12).all())
    assert int(closecall.select(q, k, make(0.1, 12)).counts.max()) == 12


@compiled
def test_with_every_call_that_takes_a_policy(engine: Engine) -> None:
    q, k, v = flat(200)
    selection = engine.select(q, k, make(0.5, 10))
    assert torch.equal(engine.attention(q, k, v, make(0.5, 10)), engine.attend(q, k, v, selection))


def test_the_rule_prints_travels_and_refuses() -> None:
    policy = make(0.25, 50)
    assert Policy.from_json(policy.to_json()) == policy
    assert "0.25 of its mass, 50 at most" in str(policy)
    for eps in (0, 1, -0.5, math.nan, "0.1", True):
        with pytest.raises(ValueError, match=r"eps must be in \(0, 1\)"):
            Certified(eps, 50)  # type: ignore[arg-type]
    for most in (0, 2.5, True):
        with pytest.raises(ValueError, match="max_budget must be a whole number"):
            Certified(0.1, most)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_budget 3 must exceed the 3 blocks.*use at least 4"):
        make(0.1, 3)
    with pytest.raises(ValueError, match="needs a scorer"):
        Policy(None, Certified())
    with pytest.raises(ValueError, match=r"through closecall\.select"):
        Certified().decide(ranked([1.0, 0.0], 3, 1))
