"""The select kernels against sorting: ties, infinities, short rows; and whole selections against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import closecall
from closecall.backends import reference
from closecall.backends.triton import backend, device, launch, rank, variants
from closecall.geometry import plan
from closecall.rules.base import RULES as RULES_KNOWN
from closecall.rules.last_tile import LastTile
from closecall.rules.router import Router
from closecall.rules.topk import TopK
from engines import Engine, pairs

ENGINE = Engine("triton")


def ascending(scores: torch.Tensor) -> torch.Tensor:
    """As scores.py writes them."""
    bits = torch.where(scores == 0, 0.0, scores).float().contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# Few numbers, so that ties abound; the two ends of float32; both zeros.
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, -2.5, 3e38, -3e38, 1e-40, torch.inf, -torch.inf])


@settings(max_examples=40, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=40), st.integers(0, 10), st.integers(1, 45), st.data())
def test_the_best_blocks_and_scores_at_ranks(
    numbers: list[float], hidden: int, width: int, data: st.DataObject
) -> None:
    n = len(numbers)
    scores = torch.tensor(numbers)
    bits = ascending(scores)
    bits[: min(hidden, n)] = rank.NEVER
    # Of heads that decide together, each block's largest counts, whoever says it.
    group = data.draw(st.sampled_from([1, 1, 3]))
    heads = bits.repeat(group, 1)
    for i in range(n * (group > 1)):
        heads[torch.arange(group) != i % group, i] = rank.NEVER if i % 2 or bits[i] == rank.NEVER else -(2**31) + 1
    order, best = (torch.full((1, 1, 1, width), 7, dtype=torch.int32) for _ in range(2))
    chunk = data.draw(st.sampled_from([16, launch.select_chunk(n)]))  # long rows are written in several
    sizes = launch.select_sizes(n, width, "sm_90") | {"CHUNK": chunk, "GROUP": group}
    step = data.draw(st.sampled_from([1, 3]))  # of a list, the blocks are those that it names
    listed = torch.arange(n, dtype=torch.int32) * step
    with ENGINE._forced(), device.running(torch.device("cpu")) as kernel:
        kernel.best_kernel[(1, 1, 1)](
            heads, listed, order, best, 1, 0, 0, 1, n, width, n * step, LISTED=step > 1, **sizes
        )
    expected, _ = rank.best(bits[None, None, None], min(width, n))
    there = expected[expected < n].sort().values
    assert order[0, 0, 0].tolist() == (step * there).tolist() + [n * step] * (width - len(there))
    sorted_first = rank.in_order(bits[None, None, None], min(width, n))
    assert torch.equal(sorted_first[0] * step, order[..., :n])
    assert torch.equal(sorted_first[1], best[..., :n])
    assert best[0, 0, 0].tolist() == bits[there.long()].tolist() + [rank.NEVER] * (width - len(there))
    ranked = scores[there.long()].sort(descending=True).values
    at = data.draw(st.integers(0, width - 1))
    with ENGINE._forced():
        got = backend._scores_at(best, torch.tensor([[[[0, at]]]]))[0, 0, 0]
    for score, i in zip(got.tolist(), (0, at), strict=True):
        assert score == (ranked[i] if i < len(ranked) else -torch.inf)


RULES = {
    "topk": TopK(budget=4),
    "router": Router(budget=3, q=0.4, rho=2),
    "router, fractions": Router(budget=4, q=0.5, rho=1.25),
    "last tile": LastTile(rule=TopK(budget=4), factor=1.5),
    "last tile, dense": LastTile(rule=Router(budget=3), factor="dense", pay=False),
}


# Ties under every rule, where all is exact; other numbers where thresholds and fractions decide.
@pytest.mark.parametrize(("rule", "numbers"), pairs(RULES, ["ties", "normal"], lambda i, j: j == 0 or i in (2, 3)))
def test_selections_are_the_references_block_for_block(rule: str, numbers: str) -> None:
    torch.manual_seed(len(rule))
    q, k = torch.randn(2, 2, 100, 16), torch.randn(2, 1, 230, 16)
    if numbers == "ties":  # whole numbers: exact on both sides, and many blocks score the same
        q, k = q.round().clamp(-1, 1), k.round().clamp(-1, 1)
    policy = closecall.policy("quest", budget=3, block=16, tile=32).replace(rule=RULES[rule])
    assert policy.rule.at_ranks
    padding = torch.arange(230) >= torch.tensor([[37], [0]])
    given: dict[str, Any] = {"key_padding": padding, "scale": 0.25}
    expected = closecall.select(q, k, policy, backend="reference", **given)
    with ENGINE._forced():
        got = closecall.select(q, k, policy, backend="triton", **given)
    if numbers == "ties":
        assert torch.equal(got.margin.nan_to_num(-1), expected.margin.nan_to_num(-1))
    assert torch.equal(got.triggered, expected.triggered)
    assert torch.equal(got.counts, expected.counts)
    assert torch.equal(got.kv_idx, expected.kv_idx)


@dataclass(frozen=True)
class Nosy(TopK):
    """A rule of one's own that reads the whole ranking."""

    def decide(self, ranked: Any) -> Any:
        assert (ranked.scores.diff(dim=-1)[ranked.order[..., 1:] < 10] <= 0).all()
        return super().decide(ranked)


def test_a_rule_that_wants_the_ranking_gets_it_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES_KNOWN._classes, "nosy", Nosy)
    monkeypatch.setattr(Nosy, "name", "nosy")
    assert not Nosy(budget=3).at_ranks
    assert not LastTile(rule=Nosy(budget=3)).at_ranks
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 32, 16), torch.randn(1, 1, 160, 16)
    policy = closecall.policy("quest", budget=3, block=16, tile=32).replace(rule=Nosy(budget=3))
    with ENGINE._forced():
        got = closecall.select(q, k, policy, backend="triton")
    assert torch.equal(got.kv_idx, closecall.select(q, k, policy, backend="reference").kv_idx)


def test_more_blocks_than_registers_hold_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_SPAN", 8)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 32, 16), torch.randn(1, 1, 160, 16)
    policy = closecall.policy("quest", budget=3, block=16, tile=32)
    geometry = plan(1, 32, 160, 16, 32)
    with ENGINE._forced():
        got = backend.rank(q, k, policy, geometry, 0.25)
    assert type(got) is not rank.Best
    assert torch.equal(got.order, reference.rank(q, k, policy, geometry, 0.25).order)


@pytest.mark.parametrize("arch", launch.ARCHS)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("scorer", [*variants.PLANES, *variants.MORE_PLANES])
def test_score_sizes_fit_the_device(arch: str, dim: int, scorer: str) -> None:
    told = launch.layout((variants.PLANES | variants.MORE_PLANES)[scorer], "bf16")
    for start in (launch.table("scores", arch, dim, dim, "bf16"), launch.Launch(128, 128, 8, 6)):
        sizes = launch.score_sizes(arch, dim, "bf16", told, start)
        planes = told["PLANES"] + told["VECTORS"] - 1
        assert sizes["ROWS"] >= 16
        assert sizes["KEYS"] >= 16
        assert 2 * launch.padded(dim) * planes * sizes["KEYS"] <= launch.SHARED[arch]
        assert sizes["SLICE"] == launch.padded(dim)


def test_nothing_but_padding() -> None:
    q = torch.randn(1, 1, 64, 16)
    policy = closecall.policy("quest", budget=3, block=16, tile=16)
    with ENGINE._forced():
        got = closecall.select(q, q, policy, backend="triton", key_padding=torch.zeros(1, 64, dtype=torch.bool))
    assert int(got.counts.sum()) == 0
