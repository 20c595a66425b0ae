"""One pipeline: what `select`, `attention` and attached models have in common, and the hook for tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import closecall
from closecall import api

GRID = {"block": 16, "tile": 16, "budget": 5, "tile_factor": 1}


def tensors(heads: int = 4, length: int = 200) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2, h, length, 32, generator=generator) for h in (heads, 2, 2))


def ranks_of(q: torch.Tensor, k: torch.Tensor, policy: closecall.Policy) -> Any:
    """As two tensor-parallel ranks would call: each with half of the heads, and with the margins of both."""
    margins = {}

    def keep(rank: int) -> Any:
        def all_heads(x: torch.Tensor) -> tuple[torch.Tensor, slice]:
            margins[rank] = x
            return x, slice(None)

        return all_heads

    def both(rank: int) -> Any:
        def all_heads(x: torch.Tensor) -> tuple[torch.Tensor, slice]:
            n = x.shape[1]
            return torch.cat([margins[0], margins[1]], 1), slice(n * rank, n * rank + n)

        return all_heads

    halves = [(q[:, 2 * r : 2 * r + 2], k[:, r : r + 1]) for r in (0, 1)]
    for rank, (mine, keys) in enumerate(halves):
        closecall.select(mine, keys, policy, all_heads=keep(rank))
    return halves, both


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("name", ["router-on-quest", "fill-on-mean"])
def test_ranks_that_see_each_others_heads_choose_as_one_process_does(name: str, share: str) -> None:
    q, k, v = tensors()
    policy = closecall.policy(name, share=share, **GRID)
    whole = closecall.select(q, k, policy)
    out = closecall.attention(q, k, v, policy)
    halves, both = ranks_of(q, k, policy)
    for rank, (mine, keys) in enumerate(halves):
        here = slice(2 * rank, 2 * rank + 2)
        part = closecall.select(mine, keys, policy, all_heads=both(rank))
        assert torch.equal(part.counts, whole.counts[:, here])
        assert torch.equal(part.kv_idx, whole.kv_idx[:, here])
        assert torch.equal(part.triggered, whole.triggered[:, here])
        values = v[:, rank : rank + 1]
        assert torch.equal(closecall.attention(mine, keys, values, policy, all_heads=both(rank)), out[:, here])
    alone = closecall.select(*halves[0], policy)
    assert not torch.equal(alone.counts, whole.counts[:, :2])  # the hook decides something here


def test_all_heads_must_be_a_function() -> None:
    q, k, _ = tensors()
    with pytest.raises(TypeError, match=r"all_heads must be a function .* got int"):
        closecall.select(q, k, "topk", all_heads=3)


@pytest.mark.parametrize("call", ["select", "attention"])
def test_a_call_looks_at_its_budget_once(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("covers_everything", "check_room"):
        real = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *a, real=real, name=name: (asked.append(name), real(*a))[1])
    q, k, v = tensors()
    policy = closecall.policy("topk", **GRID)
    closecall.select(q, k, policy) if call == "select" else closecall.attention(q, k, v, policy)
    assert sorted(asked) == ["check_room", "covers_everything"]


def test_below_dense_below_nothing_is_chosen() -> None:
    q, k, v = tensors()
    policy = closecall.policy("topk", **GRID)
    geometry = closecall.select(q, k, policy).geometry
    backend = closecall.backends.load("cpu")
    for below, sparse in ((200, True), (201, False)):
        planned = api.PlannedCall(q, k, policy, geometry, 0.2, backend, dense_below=below)
        result = planned.run(v)
        assert (result.kept is not None) == sparse
        expected = closecall.attention(
            q, k, v, policy if sparse else closecall.policy("dense", block=16, tile=16), scale=0.2
        )
        assert torch.equal(result.out, expected)


@pytest.mark.parametrize(
    ("name", "overrides", "remedy"),
    [
        ("topk", {"budget": 1}, "use budget 2 or more"),
        ("topk", {"budget": 2, "tile_factor": 1}, "use budget 3 or more"),
        ("topk", {"budget": 4, "tile_factor": 0.5}, "use budget 6 or more"),
        ("topk", {"budget": 1, "tile_factor": 2, "sinks": 4}, "use budget 3 or more"),
        ("even-on-mean", {"keep": 2.5}, "use keep 3 or more"),
        ("last-tile-on-mean", {"budget": 1}, "use budget 2 or more"),
    ],
)
def test_a_budget_without_room_names_one_that_has_it(name: str, overrides: dict[str, Any], remedy: str) -> None:
    q, k, v = tensors()
    policy = closecall.policy(name, block=16, tile=16, **overrides)
    with pytest.raises(ValueError, match=r"tile budget \d must exceed the \d forced blocks of tile \d") as error:
        closecall.attention(q, k, v, policy)
    assert str(error.value).endswith(remedy)
    changed = {key: int(remedy.split()[2]) for key in ("budget", "keep") if key in overrides}
    closecall.attention(q, k, v, closecall.policy(name, block=16, tile=16, **(overrides | changed)))
