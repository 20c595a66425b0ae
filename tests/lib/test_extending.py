"""A new scorer or rule is one small registered class, and every backend takes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import closecall
import oracle
from closecall import RULES, SCORERS, TRIGGERS, Decision, Policy, Ranked, Rule, Scorer, Trigger
from closecall.backends import reference
from closecall.policy import as_policy
from closecall.scorers.base import Planes, blocks_of
from closecall.scorers.planes import PlaneScorer
from compare import assert_attention, kept_of
from engines import Engine, compiled


@SCORERS.register("test-last-key")
@dataclass(frozen=True)
class LastKey(Scorer):
    """A block is as good as its last key, times a weight."""

    weight: float = 1.0

    def summarise(self, keys: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
        return (torch.stack([self.weight * b[..., -1, :].float() for b in blocks_of(keys, block)], -2),)

    def row_scores(self, rows: torch.Tensor, summary: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return rows.float() @ summary[0].transpose(-1, -2)


@RULES.register("test-half")
@dataclass(frozen=True)
class Half(Rule):
    """Keeps the better half of the unforced blocks of every tile."""

    def limit(self, n_blocks: int) -> int:
        return n_blocks

    def decide(self, ranked: Ranked) -> Decision:
        shape = ranked.order.shape[:3]
        counts = (ranked.forced + (ranked.visible - ranked.forced) // 2)[:, None].expand(shape)
        return Decision(counts, torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.bool))

    def describe(self) -> str:
        return "the better half"


@RULES.register("test-capped")
@dataclass(frozen=True)
class Capped(Half):
    """A rule of its own kind that has a tile budget, and so must leave room for forced blocks."""

    tile_budget: int = 3


@TRIGGERS.register("test-first")
@dataclass(frozen=True)
class First(Trigger):
    """Expands the first eligible tile of the buffer."""

    def fire(self, margin, eligible, sequence, q):
        return (eligible & (eligible.cumsum(1) == 1))[:, None].expand_as(margin)

    def describe(self, q: float) -> str:
        return "the first tile"


def tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randint(-3, 4, (2, h, 200, 32), generator=generator).float() for h in (4, 2))
    return q, k, torch.randn(2, 2, 200, 16, generator=generator)


def last_key(rows: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    return rows @ keys[-1], np.abs(rows) @ np.abs(keys[-1]), 0


@compiled
@pytest.mark.parametrize("rule", ["topk", "test-half"])
def test_a_new_scorer_and_a_new_rule(engine: Engine, rule: str) -> None:
    q, k, v = tensors()
    made = RULES[rule](budget=5, tile_factor=1) if rule == "topk" else RULES[rule]()
    policy = Policy(scorer=LastKey(weight=2.0), rule=made, block=16, tile=16)
    padding = torch.arange(200) >= torch.tensor([[0], [33]])
    selection = engine.select(q, k, policy, scale=1.0, key_padding=padding)
    plan = oracle.tiles(2, 200, 200, 16, 16, key_padding=padding)
    for t in plan:
        forced = t.forced(1)
        for h in range(4):
            scores = oracle.block_scores(oracle.exact(q), oracle.exact(k), t, h, last_key, "max", 2.0, 1, 0.0)
            free = len(scores) // 2 if rule == "test-half" else min(len(scores), 5 - len(forced))
            assert kept_of(selection)[t.batch, h, t.number] == sorted(forced | set(oracle.ranking(scores)[:free]))
    out, lse = engine.attention(q, k, v, policy, scale=1.0, key_padding=padding, return_lse=True)
    assert_attention(out, lse, oracle.attend(q, k, v, kept_of(selection), plan, 1.0))


@compiled
@pytest.mark.parametrize("scorer", ["mean", "quest"])
def test_a_new_rule_on_the_scorers_that_have_native_code(engine: Engine, scorer: str) -> None:
    q, k, v = tensors()
    policy = Policy(scorer=SCORERS[scorer](), rule=Half(), block=16, tile=16)
    selection = engine.select(q, k, policy, scale=1.0)
    plan = oracle.tiles(2, 200, 200, 16, 16)
    for t in plan:
        for h in range(4):
            scores = oracle.block_scores(oracle.exact(q), oracle.exact(k), t, h, scorer, "max", 1.0, 1, 0.0)
            best = oracle.ranking(scores)[: len(scores) // 2]
            assert kept_of(selection)[t.batch, h, t.number] == sorted(t.forced(1) | set(best))
    out, lse = engine.attention(q, k, v, policy, scale=1.0, return_lse=True)
    assert_attention(out, lse, oracle.attend(q, k, v, kept_of(selection), plan, 1.0))


@SCORERS.register("test-wide-box")
@dataclass(frozen=True)
class WideBox(PlaneScorer):
    """All that a scorer says whose summaries kernels know: which planes they are."""

    outliers: int = 2

    @property
    def planes(self) -> Planes:
        return Planes(box=True, shrink=0.75, outliers=self.outliers)


@pytest.mark.parametrize("aggregate", ["max", "mass", "mass-max", "softmax"])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_new_scorer_of_known_planes_has_kernels(
    backend: str, aggregate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    q, k = (x[:1, :h, :96] for x, h in zip(tensors(), (2, 1), strict=False))
    policy = closecall.policy(
        "topk", scorer="test-wide-box", budget=4, tile_factor=1, block=16, tile=32, aggregate=aggregate
    )
    expected = closecall.select(q, k, policy, backend="reference")

    def asked(*args: object) -> None:
        raise AssertionError("the reference backend was asked")

    monkeypatch.setattr(reference, "rank", asked)
    assert torch.equal(Engine(backend).select(q, k, policy).kv_idx, expected.kv_idx)


def test_a_scorer_of_planes_cannot_score_in_a_way_that_kernels_do_not_know() -> None:
    with pytest.raises(TypeError, match=r"Odd defines row_scores, but kernels .*: derive it from closecall\.Scorer"):

        class Odd(SCORERS["quest"]):  # type: ignore[misc]
            def row_scores(self, rows, summary):
                return -super().row_scores(rows, summary)


@dataclass(frozen=True)
class Nothing:
    """Parts that define nothing."""

    @SCORERS.register("test-no-scorer")
    @dataclass(frozen=True)
    class OfScorer(Scorer):
        pass

    @SCORERS.register("test-no-planes")
    @dataclass(frozen=True)
    class OfPlanes(PlaneScorer):
        pass

    @RULES.register("test-no-rule")
    @dataclass(frozen=True)
    class OfRule(Rule):
        pass

    @RULES.register("test-no-decision")
    @dataclass(frozen=True)
    class OfDecision(Rule):
        def limit(self, n_blocks: int) -> int:
            return 4

    @TRIGGERS.register("test-no-trigger")
    @dataclass(frozen=True)
    class OfTrigger(Trigger):
        pass


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("topk:scorer=test-no-scorer", r"OfScorer must define summarise\(self, keys, block\), which returns a tuple"),
        ("test-no-rule-on-mean", r"OfRule must define limit\(self, n_blocks\), which returns the most blocks"),
        ("test-no-decision-on-mean", r"OfDecision must define decide\(self, ranked\), which returns a closecall.Deci"),
        ("router:trigger=test-no-trigger", r"OfTrigger must define fire\(self, margin, eligible, sequence, q\), which"),
    ],
)
def test_a_part_that_leaves_something_out_is_told_what(policy: str, message: str) -> None:
    q, k, _ = tensors()
    budget = "" if "test-no-" in policy.split(":")[0] else ",budget=5,tile_factor=1"
    text = policy + ("" if ":" in policy else ":") + budget + ",block=16,tile=16"
    assert str(as_policy(text))  # it has a description all the same
    with pytest.raises(NotImplementedError, match=message):
        closecall.select(q, k, text)


def test_planes_left_out() -> None:
    with pytest.raises(NotImplementedError, match="OfPlanes must define planes"):
        closecall.policy("topk", scorer="test-no-planes")


@compiled
def test_a_new_trigger(engine: Engine) -> None:
    q, k, _ = tensors()
    policy = closecall.policy("router", block=16, tile=16, budget=5, tile_factor=1, trigger="test-first")
    selection = engine.select(q, k, policy)
    assert selection.triggered.nonzero()[:, 2].unique().tolist() == [5]  # the first tile that sees more than 5 blocks
    assert selection.counts[0, 0].tolist() == [1, 2, 3, 4, 5, 6, *[5] * 7]


def test_new_parts_print_and_travel_as_json() -> None:
    policy = Policy(scorer=LastKey(weight=0.5), rule=Half())
    assert Policy.from_json(policy.to_json()) == policy
    assert policy.name == "test-half-on-test-last-key"
    assert "the better half" in str(policy)


def test_a_new_rule_with_a_budget_is_checked_against_the_forced_blocks() -> None:
    q, k, _ = tensors()
    policy = Policy(scorer=LastKey(), rule=Capped(), block=16, tile=32)
    with pytest.raises(ValueError, match="tile budget 3 must exceed the 3 forced blocks"):
        closecall.select(q, k, policy, backend="reference")
