"""torch.compile keeps our attention in its graph as one node, and computes the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache
from transformers.masking_utils import create_causal_mask

import closecall
import families
from calls import LENGTH, PACKED, padded
from families import tokens

SMALL = closecall.policy("router-on-quest", block=16, tile=16, budget=5, tile_factor=1, rho=1.4)
OTHER = closecall.policy("topk", block=16, tile=16, budget=4, tile_factor=1)

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that runs graphs as they are and counts our op in them."""

    def __init__(self) -> None:
        self.ops: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        ours = torch.ops.closecall.attached.default
        self.ops.append(sum(node.target is ours for node in graph.graph.nodes))
        return graph.forward


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma2", "gpt_oss"])
def test_one_graph_and_the_same_logits(name: str) -> None:
    model, graphs, x = families.model(name), Graphs(), tokens(2, LENGTH)
    if name == "gpt_oss":  # experts in a loop would break the graph
        model = copy.deepcopy(model)
        model.set_experts_implementation("batched_mm")
    mask = padded(x, "left")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with closecall.attach(model, SMALL):
        plain = model(x, attention_mask=mask, use_cache=False).logits
        got = compiled(x, attention_mask=mask, use_cache=False).logits
    layers = 3 if name in ("llama", "qwen3") else 2
    assert graphs.ops == [layers]
    assert torch.equal(got, plain)


def test_packed_sequences() -> None:
    model, graphs, x = families.model("llama"), Graphs(), tokens(1, LENGTH)
    position = torch.cat([torch.arange(n) for n in PACKED])[None]
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with closecall.attach(model, SMALL):
        plain = model(x, position_ids=position, use_cache=False).logits
        got = compiled(x, position_ids=position, use_cache=False).logits
        whole = compiled(x, use_cache=False).logits
        assert torch.equal(whole, model(x, use_cache=False).logits)
    assert sum(graphs.ops) == 3 * len(graphs.ops)
    assert torch.equal(got, plain)


def test_tokens_that_look_ahead_keep_the_models_own_attention() -> None:
    model, graphs, x = families.model("llama"), Graphs(), tokens(1, 64)
    groups = torch.full_like(x, -1)
    groups[:, 10:30] = 0

    def run(m: Any) -> Tensor:
        embeds = m.model.embed_tokens(x)
        mask = create_causal_mask(m.config, embeds, None, None, block_sequence_ids=groups)
        return m(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits

    own = run(model)
    with closecall.attach(model, OTHER):
        got = torch.compile(run, backend=graphs, fullgraph=True)(model)
    assert graphs.ops == [0]
    assert torch.equal(got, own)


def test_a_static_cache() -> None:
    model, graphs, x = families.model("llama"), Graphs(), tokens(1, LENGTH)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)

    def run(m: Any) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + 30)
        return torch.cat([m(part, past_key_values=cache).logits for part in x.split([LENGTH - 3, 1, 1, 1], 1)], 1)

    with closecall.attach(model, SMALL, decode="sparse"):
        assert torch.equal(run(compiled), run(model))
    assert set(graphs.ops) == {3}


def test_attaching_and_detaching_reach_what_was_compiled() -> None:
    model, graphs, x = families.model("llama"), Graphs(), tokens(1, LENGTH)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    own = compiled(x, use_cache=False).logits
    for policy in (SMALL, OTHER):
        with closecall.attach(model, policy):
            got = compiled(x, use_cache=False).logits
            assert torch.equal(got, model(x, use_cache=False).logits)
            assert float((got - own).abs().max()) > 0.01
        assert torch.equal(compiled(x, use_cache=False).logits, own)
    assert {0, 3} == set(graphs.ops)


def test_functionalised_with_fake_tensors() -> None:
    """As inductor takes it: the op's fake implementation must tell the truth about shapes, strides and types."""
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 4, 70, 32, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
        k, v = torch.randn(2, 2, 90, 32, dtype=dtype), torch.randn(2, 2, 90, 24, dtype=dtype)
        segments = torch.ones(2, 90, dtype=torch.int32)
        segments[0, :11] = 0
        args = (q, k, v, segments, SMALL.to_json(), 0, 0.2, 0.0, "auto", "")
        torch.library.opcheck(torch.ops.closecall.attached.default, args, test_utils=("test_schema", "test_faketensor"))
    model, x = families.model("llama"), tokens(1, LENGTH)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with closecall.attach(model, SMALL):
        plain = model(x, use_cache=False).logits
        assert float((compiled(x, use_cache=False).logits - plain).abs().max()) < 1e-5 * float(plain.abs().max())
