"""Models that hold a language model among other things: only its attention changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import closecall
import families
from families import Float64, assert_close, tokens

EVERYTHING = closecall.policy("topk", block=16, tile=16, budget=32)
SMALL = closecall.policy("topk", block=16, tile=16, budget=4, tile_factor=1)

pytestmark = pytest.mark.usefixtures("inference")


def gemma3() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = families.config("gemma3").to_dict()
    settings = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return families.rescale(transformers.Gemma3ForConditionalGeneration(settings))


def qwen3_5(kind: str) -> Any:
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    text = families.config(kind).to_dict()
    settings = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    settings.text_config._experts_implementation = "eager"
    return families.rescale(getattr(transformers, f"{name}ForConditionalGeneration")(settings))


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "qwen3_5_moe"])
def test_text_goes_sparse_and_the_rest_is_left_alone(name: str) -> None:
    torch.manual_seed(0)
    model = gemma3() if name == "gemma3" else qwen3_5(name)
    eager = families.as_eager(model)
    exact = copy.deepcopy(eager).double()
    x = tokens(1, 100)
    configs = [(module, module.config) for module in model.modules() if hasattr(module, "config")]
    with closecall.attach(model, EVERYTHING) as handle:
        got = model(x).logits
        assert handle.layers[0].kind == "bidirectional"  # the vision tower
        assert [s["calls"] for s in handle.stats().values()] == [1, 1]
    with Float64():
        wanted = exact(x).logits
    assert_close(got, eager(x).logits, wanted)
    with closecall.attach(model, SMALL):
        assert float((model(x).logits - got).abs().max()) > 0.01
    assert all(module.config is before for module, before in configs)


def test_images_keep_the_models_own_attention() -> None:
    """Tokens of an image see each other, so the causal kernel must not have them."""
    torch.manual_seed(0)
    model = gemma3()
    eager = families.as_eager(model)
    exact = copy.deepcopy(eager).double()
    x = tokens(1, 100)
    image = torch.zeros_like(x)
    image[:, 30:34] = 1
    with closecall.attach(model, SMALL) as handle:
        got = model(x, token_type_ids=image).logits
        assert [s["calls"] for s in handle.stats().values()] == [0, 0]
    with Float64():
        wanted = exact(x, token_type_ids=image).logits
    assert_close(got, eager(x, token_type_ids=image).logits, wanted)
