"""Many families: nothing lost where the budget covers everything, the reference's result where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

import closecall
import families
from calls import CALLS, LENGTH
from closecall.hf import forward as attached
from closecall.hf import layers
from families import FAMILIES, Float64, assert_close, tokens

EVERYTHING = closecall.policy("topk", block=16, tile=16, budget=32)
SMALL = closecall.policy("router", block=16, tile=16, budget=5, tile_factor=1, rho=1.4)

pytestmark = pytest.mark.usefixtures("inference")


def check(name: str, call: str) -> None:
    with closecall.attach(families.model(name), EVERYTHING) as handle:
        got = CALLS[call](families.model(name), tokens(2, LENGTH))
        assert all(layer["calls"] for layer in handle.stats().values())
    assert_close(got, *families.expected(name, CALLS[call], LENGTH))


@pytest.mark.parametrize("call", ["left_padding", "right_padding", "generate"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_budget_that_covers_everything_equals_eager(name: str, call: str) -> None:
    check(name, call)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_budget_equals_the_reference_backend(name: str) -> None:
    def sparse(model: Any, backend: str) -> torch.Tensor:
        with closecall.attach(model, SMALL) as handle:
            handle.backend = backend
            return CALLS["left_padding"](model, tokens(2, LENGTH))

    model = families.model(name)
    got = sparse(model, "auto")
    with Float64():
        wanted = sparse(families.exact(name), "reference")
    assert_close(got, sparse(model, "reference"), wanted)
    dense = CALLS["left_padding"](model, tokens(2, LENGTH))
    assert float((got - dense).abs().max()) > 1e-3 * float(dense.abs().max())


KINDS = {
    "ministral": "sliding", "gemma2": "sliding", "gemma3": "sliding", "gemma4": "sliding", "gpt_oss": "sliding",
    "olmo3": "sliding", "cohere2": "sliding", "exaone4": "sliding", "granite_swa": "sliding",
    "qwen3_next": "linear", "qwen3_5": "linear",
    "qwen3_5_moe": "linear", "lfm2": "linear", "llama4": "chunked",
}  # fmt: skip
MIXED = {"minimax": ["full", "linear", "full"], "jamba": ["linear", "full", "linear"]}
QK_NORM = {
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "olmo2", "olmo3", "exaone4",
    "apertus", "hunyuan", "lfm2", "persimmon",
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_is_known_for_what_it_is(name: str) -> None:
    found = layers.find_layers(families.model(name))
    expected = MIXED.get(name, [KINDS.get(name, "full"), "full", "full"])
    assert [layer.kind for layer in found] == expected
    assert [layer.index for layer in found] == [0, 1, 2]
    assert {layer.qk_norm for layer in found if layer.kind == "full"} == {name in QK_NORM}


Given = tuple[Any, dict[str, Any]]


def without_padding(mask: Any, kwargs: dict[str, Any]) -> Given:
    return None, kwargs


def with_another_scale(mask: Any, kwargs: dict[str, Any]) -> Given:
    return mask, kwargs | {"scaling": kwargs["scaling"] * 1.01}


def with_the_usual_scale(mask: Any, kwargs: dict[str, Any]) -> Given:
    return mask, kwargs | {"scaling": None}


def without_softcap(mask: Any, kwargs: dict[str, Any]) -> Given:
    return mask, kwargs | {"softcap": None}


def without_sinks(mask: Any, kwargs: dict[str, Any]) -> Given:
    return mask, kwargs | {"s_aux": None}


def without_window(mask: Any, kwargs: dict[str, Any]) -> Given:
    return (mask if mask is None or mask.ndim == 2 else None), kwargs | {"sliding_window": None}


BROKEN: list[tuple[str, Callable[..., Given]]] = [
    *((name, without_padding) for name in FAMILIES),
    *((name, with_another_scale) for name in FAMILIES),
    *((name, with_the_usual_scale) for name in ("gemma2", "gemma3", "gemma4", "granite")),
    *((name, without_window) for name, kind in KINDS.items() if kind in ("sliding", "chunked")),
    ("gemma2", without_softcap),
    ("gpt_oss", without_sinks),
    ("granite_swa", without_sinks),
]


# Sorted, so that those of one family run in one process and compute what they compare with once.
@pytest.mark.parametrize(("name", "change"), sorted(BROKEN, key=lambda case: case[0]))
def test_a_lost_feature_is_caught(name: str, change: Callable[..., Given], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails when the feature is broken: else it would prove nothing."""

    def broken(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        mask, kwargs = change(mask, kwargs)
        return attached.forward(module, query, key, value, mask, **kwargs)

    for original in ("sdpa", "eager"):
        ours = attached.register(original)
        monkeypatch.setitem(AttentionInterface._global_mapping, ours, broken)
    if change is without_window:  # those layers are left alone; here they are not
        monkeypatch.setattr(layers, "_kind", lambda module: ("full", ""))
    with pytest.raises(AssertionError, match=r"logits are off by"):
        check(name, "left_padding")


def test_a_window_that_only_the_config_knows() -> None:
    model = families.build(families.config("mistral", sliding_window=24))
    with pytest.raises(ValueError, match=r"no full causal attention layer.*3 sliding"):
        closecall.attach(model, EVERYTHING)
