"""What bad input gets: an error that says what was wrong and what to do, and the model as it was."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import closecall
import families
from closecall.hf import layers
from closecall.rules.per_head import PerHead
from families import tokens

SMALL = closecall.policy("router-on-quest", block=16, tile=16, budget=5, tile_factor=1, rho=1.4)
TINY: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def model() -> Iterator[Any]:
    found = families.model("llama")
    before = [(module, dict(module.__dict__)) for module in found.modules()]
    yield found
    for module, attributes in before:
        assert module.__dict__.keys() == attributes.keys()
        assert module.__dict__["_modules"] == attributes["_modules"]
        assert module.__dict__.get("config") is attributes.get("config")


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "meta-llama/Llama-3", None], ids=["module", "id", "None"])
def test_not_a_transformers_model(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a transformers PreTrainedModel, got (Linear|str|NoneType)"):
        closecall.attach(thing, SMALL)


def test_an_encoder() -> None:
    settings = transformers.BertConfig(**TINY, intermediate_size=32)
    bert = transformers.BertModel(settings).eval()
    with pytest.raises(ValueError, match=r"BertModel has no full causal attention layer.*2 bidirectional"):
        closecall.attach(bert, SMALL)
    assert bert.config is settings


def test_an_encoder_decoder() -> None:
    settings = transformers.T5Config(vocab_size=96, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    t5 = transformers.T5ForConditionalGeneration(settings).eval()
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration is an encoder-decoder model"):
        closecall.attach(t5, SMALL)


def test_a_model_without_attention() -> None:
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"MambaForCausalLM has no full causal attention layer"):
        closecall.attach(mamba, SMALL)


def test_code_that_fixes_its_attention() -> None:
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(
        ValueError, match=r"BloomForCausalLM has no full causal attention layer.*none that closecall knows"
    ):
        closecall.attach(bloom, SMALL)


def test_attention_that_needs_more_than_a_causal_mask() -> None:
    doge = families.build(transformers.DogeConfig(**families.BASE))
    with pytest.raises(ValueError, match=r"DogeForCausalLM has no full causal attention layer.*it has 3 other"):
        closecall.attach(doge, SMALL)


def test_a_layer_that_could_not_read_its_neighbours_masks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {0: ("other", "its code is its own")}
    monkeypatch.setattr(layers, "_kind", lambda module: kinds.get(module.layer_idx, ("full", "")))
    with pytest.raises(ValueError, match=r"layers.0.self_attn cannot run beside attached layers: its code is its own"):
        closecall.attach(model, SMALL)


def test_training_mode(model: Any) -> None:
    x = tokens(1, 50)
    with closecall.attach(model, SMALL):
        model.train()
        try:
            with pytest.raises(ValueError, match=r"call model.eval\(\)"):
                model(x)
        finally:
            model.eval()
        with torch.no_grad():
            model(x)


def test_a_call_that_needs_gradients(model: Any) -> None:
    x = tokens(1, 50)
    with closecall.attach(model, SMALL):
        embeds = model.get_input_embeddings()(x).requires_grad_()
        with pytest.raises(ValueError, match=r"torch.no_grad\(\), or detach it to train"):
            model(inputs_embeds=embeds)
        with torch.no_grad():
            model(inputs_embeds=embeds)
    model(inputs_embeds=embeds).logits.sum().backward()
    assert embeds.grad is not None


def test_attention_weights_are_not_to_be_had() -> None:
    model = families.build(families.config("llama"))  # a new one: transformers itself leaves hooks when asked for them
    with closecall.attach(model, SMALL), torch.no_grad(), pytest.raises(ValueError, match=r"output_attentions=True"):
        model(tokens(1, 50), output_attentions=True)


@pytest.mark.parametrize(
    ("name", "wanted", "says"),
    [
        ("llama", [0, 3], r"layer 3 does not exist; full-attention layers are \[0, 1, 2\]"),
        ("llama", [-1], r"layer -1 does not exist"),
        ("llama", [], r"layers is empty"),
        ("gemma3", [0], r"layer 0 is sliding; full-attention layers are \[1, 2\]"),
        ("qwen3_5", [0], r"layer 0 is linear"),
    ],
)
def test_layers_that_are_not_there(name: str, wanted: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        closecall.attach(families.model(name), SMALL, layers=wanted)
    closecall.attach(families.model(name), SMALL).detach()


def test_layers_of_numpy() -> None:
    with closecall.attach(families.model("llama"), SMALL, layers=np.arange(2)) as handle:
        assert str(handle).count("  sparse") == 2


@pytest.mark.parametrize("wanted", [0, "0", [1.0], (True,), torch.tensor([0, 1])])
def test_layers_of_another_type(wanted: Any) -> None:
    with pytest.raises(TypeError, match=r"layers must (be a list of layer numbers|hold whole numbers), .*got"):
        closecall.attach(families.model("llama"), SMALL, layers=wanted)


def test_a_budget_that_forced_blocks_use_up(model: Any) -> None:
    """Said before the first token, not when a chunk of a long prompt happens to start off the block grid."""
    policy = closecall.policy("topk", block=16, tile=64, budget=3)
    with pytest.raises(ValueError, match=r"tile budget 6 must exceed the 6 blocks .* use budget 4 or more"):
        closecall.attach(model, policy)
    closecall.attach(model, closecall.policy("topk", block=16, tile=64, budget=4)).detach()


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"decode": "fast"}, r"decode must be 'dense' or 'sparse', got 'fast'"),
        ({"min_context": -1}, r"min_context must be a whole number of keys, got -1"),
        ({"min_context": 0.5}, r"min_context must be a whole number of keys, got 0.5"),
    ],
)
def test_other_arguments(model: Any, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        closecall.attach(model, SMALL, **kwargs)


def test_a_policy_that_is_none(model: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'router-on-guest': did you mean 'router-on-quest'"):
        closecall.attach(model, "router-on-guest")
    with pytest.raises(TypeError, match=r"policy must be a closecall.Policy, .* got int"):
        closecall.attach(model, 33)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["4.57.1", "5.21.0.dev0", "unknown"])
def test_an_unsupported_transformers(model: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current = sys.modules["transformers"]  # it replaces its own module on first use
    monkeypatch.setattr(current, "__version__", version)
    with pytest.raises(ValueError, match=rf"needs transformers 5.22 or newer, not {version}: upgrade"):
        closecall.attach(model, SMALL)
    monkeypatch.setattr(current, "__version__", "5.22.0rc1")
    closecall.attach(model, SMALL).detach()


def test_importing_imports_no_transformers() -> None:
    code = "import closecall, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_policy_tuned_to_other_heads_is_refused_before_anything_runs(model: Any) -> None:
    rule = PerHead(tuple((6, 7, 8) for _ in range(model.config.num_hidden_layers)))
    policy = closecall.policy("auto")
    for made in (rule, dataclasses.replace(policy.rule, rule=rule)):
        with pytest.raises(
            ValueError, match=r"layers of 3 query heads, and those of \w+ have 4 query heads .*run `closec"
        ):
            closecall.attach(model, policy.replace(rule=made))


def test_a_policy_tuned_to_heads_of_another_size_is_refused_with_both_sizes(model: Any) -> None:
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    dim = model.config.hidden_size // heads
    sizes = {size: PerHead(((8,) * heads,) * layers, head_dim=size) for size in (0, dim, dim + 1)}
    with pytest.raises(
        ValueError, match=rf"{heads} query heads of dimension {dim + 1}, and .* of dimension {dim}: run"
    ):
        closecall.attach(model, closecall.policy("quest").replace(rule=sizes[dim + 1]))
    for same in (0, dim):  # nobody noted it, or it is the model's
        closecall.attach(model, closecall.policy("quest").replace(rule=sizes[same])).detach()
