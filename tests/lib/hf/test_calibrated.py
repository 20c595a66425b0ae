"""Calibrated thresholds: a tile decides alone, so chunks, cached prefixes and decoding choose as one-shot prefill."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import closecall
import families
from closecall.certify.certificate import certify
from closecall.hf.op import Call
from closecall.policy import accepted
from closecall.ranking import Ranked
from closecall.rules.router import Router
from closecall.triggers.calibrated import Calibrated, mean_margin, threshold_at
from families import tokens

SMALL = {"block": 16, "tile": 16, "budget": 5, "tile_factor": 1, "rho": 1.4}
LENGTH = 208  # 13 tiles
CHUNKS = {"two": [96, 112], "uneven": [16, 64, 32, 96], "tiles": [16] * 13, "one": [LENGTH]}


def calibrated(*thresholds: Any, name: str = "router-on-quest", **changes: Any) -> closecall.Policy:
    return closecall.policy(name, trigger=Calibrated(thresholds), **SMALL | changes)


# -- the trigger ---------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 8), st.booleans())
def test_fires_at_most_the_threshold(seed: int, heads: int, n_tiles: int, per_head: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    margin = torch.randint(0, 5, (2, heads, n_tiles), generator=generator).float() / 4
    eligible = torch.rand(2, n_tiles, generator=generator) < 0.7
    margin = margin.masked_fill(~eligible[:, None], torch.nan)
    threshold = tuple(torch.rand(heads, generator=generator).tolist()) if per_head else 0.5
    sequence = torch.zeros(2, n_tiles, dtype=torch.int64)
    fired = Calibrated((threshold,)).fire(margin, eligible, sequence, 0.4)
    for b in range(2):
        for t in range(n_tiles):
            mine = margin[b, :, t].tolist()
            for h in range(heads):
                wanted = eligible[b, t] and (
                    mine[h] <= threshold[h] if isinstance(threshold, tuple) else math.fsum(mine) / heads <= threshold
                )
                assert bool(fired[b, h, t]) == bool(wanted)


def test_a_threshold_takes_its_share() -> None:
    values = torch.tensor([0.5, 0.1, 0.4, 0.2, 0.3])
    found = [threshold_at(values, q) for q in (0.01, 0.2, 0.21, 0.4, 1)]
    assert found == pytest.approx([0.15, 0.15, 0.25, 0.25, 1])
    assert threshold_at(torch.tensor([0.3, 0.1, 0.3, 0.3]), 0.5) == pytest.approx(0.3)  # a tie: all of them
    assert int((values.double() <= threshold_at(values, 0.4)).sum()) == 2
    with pytest.raises(ValueError, match="q above 0"):
        threshold_at(values, 0)


def test_the_mean_does_not_hang_on_the_order_of_heads() -> None:
    margin = torch.rand(1, 40, 500, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean_margin(margin), mean_margin(margin[:, torch.randperm(40)]))
    assert torch.allclose(mean_margin(margin), margin.double().mean(1), rtol=1e-12, atol=0)


def test_it_travels_as_json_and_says_what_it_is() -> None:
    for thresholds in ((0.1, 0.25), ((0.1, 0.2), (0.3, 0.4))):
        policy = calibrated(*thresholds)
        assert closecall.Policy.from_json(policy.to_json()) == policy
        assert hash(policy) == hash(closecall.Policy.from_json(policy.to_json()))
        assert "calibrated for 2 layers (0 to 1)" in str(policy)
    assert calibrated(0.1, 0.25).for_layer(1).rule.trigger == Calibrated((0.25,), (1,))
    plain = closecall.policy("router")
    assert plain.for_layer(7) is plain
    assert plain.rule.made_for() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "needs thresholds, one for each layer"),
        ({"thresholds": 0.3}, "needs thresholds"),
        ({"thresholds": (0.1, 1.5)}, r"layer 1 must be a number in \[0, 1\].*got 1.5"),
        ({"thresholds": ("0.1",)}, "layer 0 must be a number"),
        ({"thresholds": (0.1, (0.1, 0.2))}, "not both"),
        ({"thresholds": (0.1,), "layers": (1, 2)}, "one for each of the 1 thresholds"),
        ({"thresholds": (0.1, 0.2), "layers": (2, 2)}, "ascending layer numbers"),
    ],
)
def test_what_is_no_calibration(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Calibrated(**given)


def test_by_name_alone_it_says_where_thresholds_come_from() -> None:
    with pytest.raises(ValueError, match="closecall calibrate"):
        closecall.policy("router", trigger="calibrated")


def test_tensors_must_be_of_a_layer() -> None:
    q = torch.randn(1, 2, LENGTH, 16)
    with pytest.raises(ValueError, match=r"2 layers \(0 to 1\): say of which layer"):
        closecall.select(q, q, calibrated(0.1, 0.2))
    with pytest.raises(ValueError, match="this is layer 5"):
        calibrated(0.1, 0.2).for_layer(5)
    with pytest.raises(ValueError, match="calibrated for 3 heads, and there are 2"):
        closecall.select(q, q, calibrated((0.1, 0.2, 0.3)))


# -- tensors -------------------------------------------------------------------------------------------------------


def same(part: closecall.Selection, whole: closecall.Selection, first: int) -> None:
    """The tiles of a chunk, bit for bit, are the whole call's from number `first` on."""
    tiles = slice(first, first + part.counts.shape[2])
    width = part.kv_idx.shape[3]
    for name in ("counts", "triggered"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, :, tiles]), name
    assert torch.equal(part.margin.nan_to_num(nan=-1.0), whole.margin[:, :, tiles].nan_to_num(nan=-1.0))
    kept = torch.arange(width) < part.counts[..., None]
    theirs = whole.kv_idx[:, :, tiles, :width]
    assert torch.equal(part.kv_idx[kept], theirs[kept])


def drawn(exactly: bool, seed: int) -> tuple[torch.Tensor, ...]:
    """Queries and keys; exactly: small numbers whose products and sums no order of additions rounds."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, h, LENGTH, 16) for h in (4, 2)]
    if exactly:
        return tuple(torch.randint(-3, 4, shape, generator=generator).float() for shape in shapes)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


# Our kernels add in one order whatever the call's shape. The reference's products are torch's, which need not.
@pytest.mark.parametrize(("backend", "exactly"), [("reference", True), ("cpu", True), ("cpu", False)])
@pytest.mark.parametrize("name", ["router", "router-on-quest"])
@settings(max_examples=12)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 12), min_size=0, max_size=4), st.booleans())
def test_any_chunks_of_whole_tiles_choose_as_one_call(
    name: str, backend: str, exactly: bool, seed: int, cuts: list[int], per_head: bool
) -> None:
    q, k = drawn(exactly, seed)
    policy = calibrated((0.1, 0.2, 0.3, 0.4) if per_head else 0.2, name=name)
    whole = closecall.select(q, k, policy, backend=backend)
    ends = [*sorted({16 * c for c in cuts}), LENGTH]
    for start, end in zip([0, *ends], ends, strict=False):
        part = closecall.select(q[:, :, start:end], k[:, :, :end], policy, backend=backend)
        same(part, whole, start // 16)


def test_the_quantile_does_not() -> None:
    q, k = drawn(False, 0)
    policy = closecall.policy("router", **SMALL)
    whole = closecall.select(q, k, policy)
    parts = [closecall.select(q[:, :, b - 16 : b], k[:, :, :b], policy).triggered for b in range(16, LENGTH + 1, 16)]
    assert int(torch.cat(parts, 2).sum()) == 8 * 4  # each tile is the least decided of its own
    assert int(whole.triggered.sum()) == 4 * 4


def test_a_chunk_that_ends_inside_a_tile_makes_other_tiles() -> None:
    """Off the grid, tiles hold other rows. What holds: each still decides by its own rows and the keys before them."""
    q, k = drawn(False, 0)
    policy = calibrated(0.2)
    chunk = closecall.select(q[:, :, 100:180], k[:, :, :180], policy)
    for t in range(5):
        start = 100 + 16 * t
        alone = closecall.select(q[:, :, start : start + 16], k[:, :, : start + 16], policy)
        same(alone, chunk, t)
    whole = closecall.select(q, k, policy)
    assert not torch.equal(chunk.margin[..., 0], whole.margin[..., 6])


def test_ranks_that_hold_half_of_the_heads_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(1, 4, 30, 9, generator=generator).sort(-1, descending=True).values
    order = torch.arange(9, dtype=torch.int32).expand(1, 4, 30, 9)
    numbers = (torch.full((1, 30), 11), torch.full((1, 30), 2), torch.zeros(1, 30, dtype=torch.int64))
    for trigger in (Calibrated((0.2,)), Calibrated(((0.1, 0.2, 0.3, 0.4),))):
        rule = Router(budget=5, tile_factor=1, trigger=trigger)
        whole = rule.decide(Ranked(order, scores, *numbers))
        parts = []
        for heads in (slice(0, 2), slice(2, 4)):
            gathered = (whole.margin, heads)
            mine = Ranked(order[:, heads], scores[:, heads], *numbers, all_heads=lambda _, g=gathered: g)
            parts.append(rule.decide(mine))
        assert torch.equal(torch.cat([p.counts for p in parts], 1), whole.counts)
        assert 0 < int(whole.triggered.sum()) < whole.triggered.numel()


# -- models --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(inference: None) -> Any:
    return families.model("llama")


def thresholds_of(model: Any, x: torch.Tensor, policy: closecall.Policy) -> tuple[float, ...]:
    """Each layer's 40% point."""
    seen: dict[int, torch.Tensor] = {}
    with closecall.attach(model, policy) as handle:
        handle.watch(lambda layer, selection: seen.update({layer: selection.margin}))
        model(x)
    return tuple(threshold_at(mean_margin(m)[~m.isnan().any(1)], 0.4) for _, m in sorted(seen.items()))


def choices(
    model: Any, policy: closecall.Policy, x: torch.Tensor, sizes: list[int], **options: Any
) -> dict[int, list[tuple[int, int, closecall.Selection]]]:
    """By layer: (first row, rows, selection) of a prefill in chunks on one growing cache."""
    found: dict[int, list[tuple[int, int, closecall.Selection]]] = {}
    cache, at = DynamicCache(config=model.config), 0
    with closecall.attach(model, policy, **options) as handle:

        def see(layer: int, selection: closecall.Selection) -> None:
            found.setdefault(layer, []).append((at, selection.geometry.q_len, selection))

        handle.watch(see)
        for piece in x.split(sizes, 1):
            model(piece, past_key_values=cache, use_cache=True)
            at += piece.shape[1]
    return found


@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
def test_chunked_prefill_and_a_cached_prefix_choose_as_one_shot(model: Any, sizes: list[int]) -> None:
    """In float32 the model's own products may round differently by chunk; the choices are the same to the last bit."""
    x = tokens(1, LENGTH)
    base = closecall.policy("router-on-quest", **SMALL)
    policy = calibrated(*thresholds_of(model, x, base))
    whole = choices(model, policy, x, [LENGTH])
    assert sorted(whole) == [0, 1, 2]
    parts = choices(model, policy, x, sizes)
    for layer, [(_, _, one)] in whole.items():
        assert 0 < int(one.triggered.sum()) < int((~one.margin.isnan()).sum())
        covered = 0
        for first, _, part in parts[layer]:
            tiles = slice(first // 16, first // 16 + part.counts.shape[2])
            covered += part.counts.shape[2]
            for name in ("counts", "triggered"):
                assert torch.equal(getattr(part, name), getattr(one, name)[:, :, tiles])
            kept = torch.arange(part.kv_idx.shape[3]) < part.counts[..., None]
            assert torch.equal(part.kv_idx[kept], one.kv_idx[:, :, tiles, : part.kv_idx.shape[3]][kept])
        # A first chunk within the budget keeps everything and makes no selection.
        assert covered + sum(n for n in _leading(sizes, 5 * 16)) // 16 == 13


def _leading(sizes: list[int], most: int) -> list[int]:
    found, total = [], 0
    for n in sizes:
        total += n
        if total > most:
            break
        found.append(n)
    return found


def test_decoding_chooses_as_one_shot_where_a_tile_is_a_row(model: Any) -> None:
    """A decoded row is a tile of its own: with tiles of one row, that is the one-shot grid."""
    x = tokens(1, 120)
    changes = {"tile": 1}
    base = closecall.policy("router-on-quest", **SMALL | changes)
    policy = calibrated(*thresholds_of(model, x, base), **changes)
    whole = choices(model, policy, x, [120])
    steps = choices(model, policy, x, [100, *[1] * 20], decode="sparse")
    for layer, [(_, _, one)] in whole.items():
        for first, rows, part in steps[layer]:
            assert torch.equal(part.triggered, one.triggered[:, :, first : first + rows])
            assert torch.equal(part.counts, one.counts[:, :, first : first + rows])
            kept = torch.arange(part.kv_idx.shape[3]) < part.counts[..., None]
            mine = one.kv_idx[:, :, first : first + rows, : part.kv_idx.shape[3]]
            assert torch.equal(part.kv_idx[kept], mine[kept])
        assert sum(rows for _, rows, _ in steps[layer]) == 120
        assert any(bool(part.triggered.any()) for first, _, part in steps[layer] if first >= 100)


def test_every_layer_takes_its_own_threshold_compiled_or_not(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(1, LENGTH)
    policy = calibrated(0.0, 1.0, 0.3)
    with closecall.attach(model, policy) as handle:
        plain = model(x, use_cache=False).logits
        rates = [handle.stats()[i]["trigger_rate"] for i in range(3)]
        assert rates[0] == 0
        assert rates[1] == 1
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # our op, as a compiled graph calls it
        compiled = model(x, use_cache=False).logits
        monkeypatch.undo()
        assert handle.stats()[0]["calls"] == 1
    assert torch.equal(compiled, plain)
    with closecall.attach(model, closecall.policy("router-on-quest", **SMALL)):
        assert not torch.equal(model(x, use_cache=False).logits, plain)


def test_another_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"fitted to 2 layers \(0 to 1\), and the full attention of Llama.* 3 lay"):
        closecall.attach(model, calibrated(0.1, 0.2))
    heads = calibrated(*[(0.1, 0.2)] * 3)
    with closecall.attach(model, heads), pytest.raises(ValueError, match="2 heads, and there are 4: calibrate"):
        model(tokens(1, LENGTH))
    part = closecall.attach(model, calibrated(0.1, 0.2, 0.3), layers=[1])
    part.detach()


def test_layers_of_other_kinds_have_no_threshold(inference: None) -> None:
    hybrid = families.model("gemma3")  # its first layer keeps its window
    trigger = Calibrated((1.0, 0.0), (1, 2))
    with closecall.attach(hybrid, closecall.policy("router-on-quest", trigger=trigger, **SMALL)) as handle:
        hybrid(tokens(1, LENGTH))
        assert [handle.stats()[i]["trigger_rate"] for i in (1, 2)] == [1, 0]


# -- certified rows, and the tap they are measured through -----------------------------------------------------------


def test_the_certified_share_is_that_of_certify(model: Any) -> None:
    x = tokens(2, 150)
    mask = torch.ones_like(x)
    mask[0, :41] = 0
    policy = closecall.policy("quest", **accepted("quest", SMALL))
    calls: list[tuple[int, Call]] = []
    with closecall.attach(model, policy) as handle:
        handle.tap(lambda layer, call: calls.append((layer, call)))
        model(x, attention_mask=mask)
        assert all(math.isnan(s["certified"]) for s in handle.stats().values())
    for eps in (0.9, 0.5):
        with closecall.attach(model, policy) as handle:
            handle.certify(eps, tiles=None)
            model(x, attention_mask=mask)
            handle.certify(None)
            model(x[:, :100], attention_mask=mask[:, :100])  # not counted
        for layer, call in calls:
            assert call.kept is not None
            found = certify(*call.seen[:3], call.kept, scale=call.scale, softcap=call.softcap)
            assert handle.stats()[layer]["certified"] == pytest.approx(found.certified(eps), abs=1e-9)
            assert 0 < found.certified(eps) < 1
    with closecall.attach(model, "dense") as handle, pytest.raises(ValueError, match=r"eps must be in \[0, 1\]"):
        handle.certify(1.5)


def test_the_tap_sees_dense_calls_too(model: Any) -> None:
    calls: list[tuple[int, Call]] = []
    with closecall.attach(model, "dense") as handle:
        handle.tap(lambda layer, call: calls.append((layer, call)))
        model(tokens(1, 40), use_cache=False)
        handle.tap(None)
        model(tokens(1, 40), use_cache=False)
    assert [layer for layer, _ in calls] == [0, 1, 2]
    assert all(call.kept is None and call.seen.q.shape == (1, 4, 40, 16) for _, call in calls)
    assert calls[0][1].scale == pytest.approx(0.25)
