"""`torch.compile` of functions that call the operator: the same numbers as without, and `attention` in one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import closecall

POLICY = closecall.policy("router-on-quest", budget=5, tile_factor=1, block=16, tile=16)
TIGHT = closecall.policy("quest", budget=4, tile_factor=1, block=16, tile=16)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(length: int = 200) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, h, length, 32, generator=generator) for h in (4, 2, 2))


def equal(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    compiled = torch.compile(function, backend="aot_eager", **options)
    expected, got = function(*args), compiled(*args)
    for a, b in zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]:
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", [POLICY, "quest", "auto:budget=2,block=16,tile=16"], ids=str)
def test_attention_is_one_node_of_a_whole_graph(policy: Any) -> None:
    equal(lambda q, k, v: closecall.attention(2 * q, k, v, policy) + 1, *tensors(), fullgraph=True)


def test_with_every_argument_that_a_graph_can_hold() -> None:
    padding = torch.arange(200) >= torch.tensor([[0], [33]])

    def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor) -> Any:
        return closecall.attention(
            q, k, v, POLICY, scale=0.3, backend="cpu", key_padding=real, softcap=20.0, return_lse=True
        )

    equal(padded, *tensors(), padding, fullgraph=True)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return closecall.attention(q[:1], k[:1], v[:1], POLICY, cu_seqlens=bounds).sin()

    equal(packed, *tensors(), torch.tensor([0, 90, 200]), fullgraph=True)


def test_another_policy_or_length_is_not_answered_with_the_last_one() -> None:
    def called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, policy: closecall.Policy) -> torch.Tensor:
        return closecall.attention(q, k, v, policy)

    compiled = torch.compile(called, backend="aot_eager", fullgraph=True)
    for policy in (POLICY, TIGHT, POLICY):
        for length in (200, 190, 300):
            x = tensors(length)
            assert torch.equal(compiled(*x, policy), called(*x, policy))
    x = tensors()
    assert not torch.equal(called(*x, POLICY), called(*x, TIGHT))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # Dynamo says where it broke the graph
def test_select_and_attend_break_the_graph_and_nothing_else() -> None:
    def called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        selection = closecall.select(q.cos(), k, POLICY)
        out, lse = closecall.attend(q.cos(), k, v, selection, return_lse=True)
        return out + 1, lse, selection.counts

    equal(called, *tensors())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_summaries_and_all_heads_break_the_graph() -> None:
    kept = [closecall.Summaries(), closecall.Summaries()]

    def called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out = closecall.attention(q.cos(), k, v, TIGHT, summaries=kept.pop())
        return closecall.attention(q + out, k, v, POLICY, all_heads=lambda x: (x, slice(None)))

    equal(called, *tensors())
    assert not kept


def test_bad_input_gets_the_same_error() -> None:
    q, k, v = tensors()
    compiled = torch.compile(lambda q, k, v: closecall.attention(q, k, v, POLICY), backend="aot_eager")
    with pytest.raises(Exception, match="they must be equal"):
        compiled(q, k[..., :16], v)


def test_the_operator_says_the_truth_about_itself() -> None:
    args = (*tensors(), POLICY.to_json(), None, "auto", None, None, 0.0)
    torch.library.opcheck(torch.ops.closecall.attention.default, args, test_utils=("test_schema", "test_faketensor"))
