"""Shapes: names, true dimensions, room in memory, and the arithmetic of what is multiplied."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from closecall.models import catalogue as panel
from closecall.models.entry import Shape
from closecall_lab.bench.profile import layer
from closecall_lab.bench.profile.parts import PARTS
from closecall_lab.bench.profile.policies import read
from closecall_lab.bench.profile.shape_run import LINEAR, REST, Factors, ShapeProfile, describe, factors_of, multiply
from closecall_lab.bench.profile.shapes import LayerPart, bytes_needed, layer_weights, measured, shape
from closecall_lab.bench.validate.device import Cpu

NAMES = ("qwen2.5-7b-1m", "qwen2.5-14b", "mistral-nemo", "qwen3.6-35b-a3b", "llama-3-8b")
WHOLE: dict[str, Any] = {"groups": None, "query_heads": None, "dense_heads": None, "rows": None}


@dataclass(frozen=True)
class Full(Cpu):
    """A machine with little memory left."""

    free: int

    def free_bytes(self) -> int:
        return self.free


def meta(found: Shape, kind: str = "full_attention") -> Any:
    """The layer without its numbers."""
    from transformers import AutoModel

    changes = {"layer_types": [kind]} if found.mixed else {}
    with torch.device("meta"):
        return AutoModel.from_config(layer._config(found, **changes))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_has_the_true_dimensions(name: str) -> None:
    true_shape = shape(name)
    entry = panel.get(true_shape.name)
    (one,) = meta(true_shape).layers
    gate = 2 if true_shape.mixed else 1  # Qwen3.6 makes a gate for attention's output beside the queries
    assert tuple(one.self_attn.q_proj.weight.shape) == (gate * entry.q_heads * entry.head_dim, true_shape.hidden)
    assert tuple(one.self_attn.k_proj.weight.shape) == (entry.kv_heads * entry.head_dim, true_shape.hidden)
    assert tuple(one.self_attn.o_proj.weight.shape) == (true_shape.hidden, entry.q_heads * entry.head_dim)
    if true_shape.mixed:
        assert tuple(one.mlp.experts.down_proj.shape) == (256, true_shape.hidden, 512)
        assert hasattr(meta(true_shape, "linear_attention").layers[0], "linear_attn")
    else:
        assert tuple(one.mlp.down_proj.weight.shape) == (true_shape.hidden, true_shape.intermediate)
    numbers = sum(p.numel() for p in one.parameters() if p.ndim > 1)
    if true_shape.mixed:
        assert 0.99 * numbers < layer_weights(true_shape) <= numbers  # without the shared expert and the router
    else:
        assert layer_weights(true_shape) == numbers


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_asked_for_without_a_mask_on_standard_normal_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask would be 17 GB at 128K; queries without spread would be no test for a top-k."""
    registry = pytest.importorskip("transformers").modeling_utils.ALL_ATTENTION_FUNCTIONS
    found, own, seen = shape(name), registry["sdpa"], []

    def spy(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **given: Any) -> Any:
        seen.append((q, k, mask))
        return own(module, q, k, v, mask, **given)

    monkeypatch.setitem(registry._local_mapping, "sdpa", spy)
    group = found.q_heads // found.kv_heads
    model = layer.attention_only(found, group, 1, 256, "fp32", torch.device("cpu"))
    with torch.no_grad():
        layer.prefill(model, layer.embeddings(model, 256))()
    ((q, k, mask),) = seen
    assert mask is None
    assert q.shape == (1, group, 256, found.head_dim)
    assert k.shape == (1, 1, 256, found.head_dim)
    # Variances of 256 * D numbers and more, of which at least 256 are independent, differ from 1 by sqrt(2 / 256).
    assert all(abs(float(x.var()) - 1) < 5 * (2 / 256) ** 0.5 for x in (q, k))


def test_an_unknown_shape_names_the_near_match() -> None:
    with pytest.raises(ValueError, match=re.escape("unknown shape 'llama-3-8': did you mean 'llama-3-8b'?")):
        shape("llama-3-8")


def test_what_is_measured(small: Shape) -> None:
    assert measured(small, **WHOLE, context=512) == LayerPart(6, 2, 6, 512)
    one = WHOLE | {"groups": 1, "rows": 128}
    assert measured(small, **one, context=512) == LayerPart(3, 1, 3, 128)
    assert measured(small, **(one | {"query_heads": 2, "dense_heads": 1}), context=100) == LayerPart(2, 1, 1, 100)
    for wrong, said in (
        ({"groups": 3}, "--head-groups 3: llama-3.1-8b has 2 key heads"),
        ({"groups": 2, "query_heads": 1}, "use it with --head-groups 1"),
        ({"groups": 1, "query_heads": 4}, "--query-heads 4: 3 query heads"),
        ({"groups": 1, "dense_heads": 4}, "--dense-heads 4: 3 query heads"),
        ({"dense_heads": 1}, "--dense-heads measures a part of a layer"),
    ):
        with pytest.raises(ValueError, match=said):
            measured(small, **(WHOLE | wrong), context=512)


def test_multiplication_is_exact() -> None:
    attention = dict.fromkeys(PARTS, 0.0) | {"summaries": 2.0, "ranking": 3.0, "rule": 5.0, "indices": 7.0}
    attention |= {"attend": 11.0, "around": 13.0, "rest": 1e9}  # what the narrow layer did besides does not count
    scaled = Factors(query=14, key=4, rows=64, full=10, linear=30).scaled(attention, rest=17.0, linear=19.0)
    assert scaled == {
        "summaries": 2 * 4 * 10, "ranking": 3 * 14 * 10, "rule": 5 * 14 * 10, "indices": 7 * 14 * 10,
        "attend": 11 * 14 * 10, "around": 13 * 14 * 10, "rest": 17 * 64 * 10, "linear layers": 19 * 64 * 30,
    }  # fmt: skip


def test_rounds_are_multiplied_one_by_one(small: Shape) -> None:
    def lap(attend: float, rest: float) -> dict[str, float]:
        return dict.fromkeys(PARTS, 0.0) | {"attend": attend, "rest": rest}

    laps = {
        "unattached": [lap(1, 0), lap(2, 0)], "topk@3": [lap(3, 0), lap(4, 0)], REST: [lap(9, 10), lap(9, 20)],
        LINEAR: [lap(0, 100), lap(0, 200)],
    }  # fmt: skip
    part = LayerPart(q_heads=3, kv_heads=1, dense_heads=1, rows=128)
    factors = {name: factors_of(small, part, 512, name) for name in ("unattached", "topk@3")}
    assert factors["unattached"] == Factors(query=6, key=2, rows=4, full=3, linear=0)
    assert factors["topk@3"] == Factors(query=2, key=2, rows=4, full=3, linear=0)
    multiplied = multiply(laps, factors)
    assert [x["attend"] for x in multiplied["unattached"]] == [1 * 6 * 3, 2 * 6 * 3]
    assert [x["attend"] for x in multiplied["topk@3"]] == [3 * 2 * 3, 4 * 2 * 3]
    assert [x["rest"] for x in multiplied["topk@3"]] == [10 * 4 * 3, 20 * 4 * 3]
    assert [x["linear layers"] for x in multiplied["topk@3"]] == [0, 0]  # it has no such layers


def test_a_whole_layer_is_multiplied_by_layers_alone(small: Shape) -> None:
    part = measured(small, **WHOLE, context=512)
    for name in ("unattached", "dense", "topk@3"):
        assert factors_of(small, part, 512, name) == Factors(1, 1, 1, 3, 0)
    assert describe(small, part, 512)[0] == "Measured: one whole layer, all heads and all rows, in one piece."


def test_it_says_what_was_measured_and_what_was_multiplied(hybrid: Shape) -> None:
    said = " ".join(describe(hybrid, LayerPart(1, 1, 2, 128), 1024))
    assert "of policies, on 1 of 4 query heads on 1 of 2 key heads at the full context; times 4" in said
    assert "(summaries of keys times 2)" in said
    assert "our dense kernel, on 2 of 4 query heads on one key head at the full context; times 2." in said
    assert "on 128 rows; times context / rows" in said
    assert "1 of full attention, and 3 linear ones" in said
    assert "Left out: embedding" in said


def test_too_little_memory_is_refused_before_anything_is_made(small: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_build", lambda *_: pytest.fail("something was allocated"))
    part = LayerPart(6, 2, 6, 512)
    needed = bytes_needed(small, 512, "fp32", part)
    settings: dict[str, Any] = {
        "shape": small, "dtypes": ("fp32",), "policies": read("topk", (3,)), "threads": (1,), "rounds": 1,
        "part": lambda _: part, "name": "profile",
    }  # fmt: skip
    ShapeProfile(contexts=(512,), device=Full(needed), **settings)
    with pytest.raises(ValueError, match=f"needs about {needed:,} bytes of memory and {needed - 1:,} are there"):
        ShapeProfile(contexts=(512,), device=Full(needed - 1), **settings)


def test_what_memory_holds(small: Shape) -> None:
    whole, rows = LayerPart(6, 2, 6, 4096), LayerPart(3, 1, 3, 64)
    assert bytes_needed(small, 4096, "bf16", whole) * 2 == bytes_needed(small, 4096, "fp32", whole)
    assert bytes_needed(small, 4096, "fp32", rows) < bytes_needed(small, 4096, "fp32", whole)
    weights = 4 * layer_weights(small)
    attention = bytes_needed(small, 4096, "fp32", LayerPart(3, 1, 3, rows=0))
    assert attention >= 4 * 4096 * 16 * (2 * 3 + 2 * 1)  # queries, output, keys and values at least
    assert bytes_needed(small, 4096, "fp32", rows) == weights + attention


def test_policies_by_the_names_of_the_store() -> None:
    policies = read("router-on-quest:q=0.3,topk", (4, 8))
    assert [v.name for v in policies] == [
        "dense", "router-on-quest:q=0.3@4", "router-on-quest:q=0.3@8", "topk@4", "topk@8",
    ]  # fmt: skip
    assert policies[1].policy.rule.tile_budget == 8  # type: ignore[attr-defined]
    assert [v.name for v in read("topk", (4,), dense=False)] == ["topk@4"]
    with pytest.raises(ValueError, match="did you mean 'router'"):
        read("ruoter", (4,))
    with pytest.raises(ValueError, match="profile its router instead"):
        read("router/matched", (4,))
    with pytest.raises(ValueError, match="names nothing"):
        read(",", (4,))
