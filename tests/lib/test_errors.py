"""What bad input gets: an error before any kernel starts, with the argument, what it was, and what to do."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

import closecall
from closecall import Selection, checks
from closecall.backends import reference

POLICY = closecall.policy("topk", block=16, tile=16, budget=3)
BLOCKS = torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32)


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any) -> None:
        raise AssertionError("a kernel was started on bad input")

    for name in ("rank", "attend", "gather_kept"):
        monkeypatch.setattr(reference, name, started)


def tensors(**changes: Any) -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 4, 100, 32), "k": torch.zeros(2, 2, 200, 32), "v": torch.zeros(2, 2, 200, 24),
    } | changes  # fmt: skip


def attention(x: dict[str, Any], policy: Any = POLICY, **kwargs: Any) -> Any:
    return closecall.attention(x["q"], x["k"], x["v"], policy, backend="reference", **kwargs)


def select(x: dict[str, Any], policy: Any = POLICY, **kwargs: Any) -> Any:
    return closecall.select(x["q"], x["k"], policy, backend="reference", **kwargs)


def attend(x: dict[str, Any], selection: Any, **kwargs: Any) -> Any:
    return closecall.attend(x["q"], x["k"], x["v"], selection, backend="reference", **kwargs)


def says(error: pytest.ExceptionInfo[BaseException], *fragments: str) -> None:
    missing = [f for f in fragments if f not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


BAD_TENSORS = {
    "not a tensor": ({"q": [1.0]}, TypeError, ["q", "torch.Tensor", "list"]),
    "3-D": ({"k": torch.zeros(2, 200, 32)}, ValueError, ["k", "4-D", "[2, 200, 32]", "[batch, heads, length, dim]"]),
    "empty": ({"k": torch.zeros(2, 2, 0, 32)}, ValueError, ["k", "empty", "[2, 2, 0, 32]"]),
    "integers": (
        {"q": torch.zeros(2, 4, 100, 32, dtype=torch.int64)}, TypeError, ["q", "torch.int64", "float32", ".to()"],
    ),
    "mixed types": (
        {"k": torch.zeros(2, 2, 200, 32, dtype=torch.bfloat16)}, TypeError,
        ["k", "torch.bfloat16", "torch.float32", "one type"],
    ),
    "mixed devices": (
        {"k": torch.zeros(2, 2, 200, 32, device="meta")}, ValueError, ["k", "meta", "cpu", "one device"],
    ),
    "batch": ({"k": torch.zeros(3, 2, 200, 32)}, ValueError, ["k", "batch 3", "q has 2", "equal"]),
    "head dim": ({"k": torch.zeros(2, 2, 200, 33)}, ValueError, ["q has head dim 32", "k has 33", "equal"]),
    "heads": ({"k": torch.zeros(2, 3, 200, 32)}, ValueError, ["4 heads", "3 key heads", "multiple"]),
    "more key heads": ({"k": torch.zeros(2, 8, 200, 32)}, ValueError, ["4 heads", "8 key heads", "multiple"]),
    "M > N": ({"k": torch.zeros(2, 2, 99, 32)}, ValueError, ["q has 100 rows", "99 keys", "at most N"]),
    "gradients of q": ({"q": torch.zeros(2, 4, 100, 32, requires_grad=True)}, ValueError, ["q", "no_grad"]),
    "gradients of k": ({"k": torch.zeros(2, 2, 200, 32, requires_grad=True)}, ValueError, ["k", "no_grad"]),
}  # fmt: skip
BAD_VALUES = {
    "v heads": ({"v": torch.zeros(2, 4, 200, 24)}, ValueError, ["v has 4 heads", "k has 2", "equal"]),
    "v keys": ({"v": torch.zeros(2, 2, 199, 24)}, ValueError, ["199 keys", "200", "equal"]),
    "v type": ({"v": torch.zeros(2, 2, 200, 24, dtype=torch.float16)}, TypeError, ["v", "torch.float16", "one type"]),
    "v batch": ({"v": torch.zeros(1, 2, 200, 24)}, ValueError, ["v", "batch 1", "q has 2"]),
    "v device": ({"v": torch.zeros(2, 2, 200, 24, device="meta")}, ValueError, ["v", "meta", "one device"]),
    "v gradients": ({"v": torch.zeros(2, 2, 200, 24, requires_grad=True)}, ValueError, ["v", "no_grad"]),
    "v 2-D": ({"v": torch.zeros(200, 24)}, ValueError, ["v", "4-D", "[200, 24]"]),
    "v not a tensor": ({"v": None}, TypeError, ["v", "torch.Tensor", "NoneType"]),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_queries_and_keys(name: str) -> None:
    changes, kind, fragments = BAD_TENSORS[name]
    x = tensors(**changes)
    everything = closecall.select(torch.zeros(2, 4, 100, 1), torch.zeros(2, 2, 200, 1), "dense")
    for call in (lambda: select(x), lambda: attention(x), lambda: attend(x, everything)):
        with pytest.raises(kind) as error:
            call()
        says(error, *fragments)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name: str) -> None:
    changes, kind, fragments = BAD_VALUES[name]
    x = tensors(**changes)
    everything = closecall.select(torch.zeros(2, 4, 100, 1), torch.zeros(2, 2, 200, 1), "dense")
    for call in (lambda: attention(x), lambda: attend(x, everything)):
        with pytest.raises(kind) as error:
            call()
        says(error, *fragments)


def test_tensors_without_numbers() -> None:
    for call in (select, attention):
        with pytest.raises(ValueError, match=r"q, k.* are on the meta device and hold no numbers"):
            call({name: x.to("meta") for name, x in tensors().items()})


def test_gradients_are_fine_where_none_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = {name: t.requires_grad_() for name, t in tensors().items()}
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert not attention(x).requires_grad


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 10**400, "1", True, torch.tensor([1.0, 2.0])])
def test_bad_scale(scale: Any) -> None:
    for call in (select, attention):
        with pytest.raises((ValueError, TypeError)) as error:
            call(tensors(), scale=scale)
        says(error, "scale", "positive", repr(scale), "1/sqrt")


SWAPPED = r"looks like \[batch, length, heads, dim\], .*: transpose\(1, 2\) q, k and v"


def test_lengths_in_the_place_of_heads_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.zeros(1, 300, 8, 16)  # [B, N, H, D]: taken for 300 heads and 8 keys
    monkeypatch.undo()
    for call in (select, attention):
        with pytest.warns(UserWarning, match=SWAPPED) as said:
            call({"q": whole, "k": whole, "v": whole})
        assert said[0].filename == __file__
    monkeypatch.setattr(reference, "rank", None)
    grouped, token = torch.zeros(1, 300, 2, 16), torch.zeros(1, 1, 8, 16)
    for q, k in ((whole, grouped), (token, whole)):
        with pytest.raises(ValueError, match=SWAPPED):
            select({"q": q, "k": k})


def test_many_heads_and_few_keys_are_nothing_unusual() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.check_qk(torch.zeros(1, 128, 1, 16), torch.zeros(1, 128, 5, 16))
        checks.check_qk(torch.zeros(1, 256, 1, 16), torch.zeros(1, 8, 5, 16))
        checks.check_qk(torch.zeros(1, 256, 300, 16), torch.zeros(1, 256, 300, 16))


def test_bad_names() -> None:
    with pytest.raises(ValueError, match=r"unknown backend 'referense': did you mean 'reference'\?"):
        closecall.select(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), "dense", backend="referense")
    with pytest.raises(ValueError, match=r"unknown policy 'quset': did you mean 'quest'\?"):
        select(tensors(), "quset")
    with pytest.raises(TypeError, match=r"policy must be a closecall.Policy, a preset's name, .*, got int"):
        attention(tensors(), 7)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: closecall.policy(3), r"policy takes a name or text .*, got int"),
        (lambda: closecall.Policy.from_json(None), r"from_json takes JSON text, .*, got NoneType"),
        (lambda: closecall.Policy.load(None), r"load takes the path of a saved policy, got NoneType"),
        (lambda: closecall.load(None), r"load takes a model's name or a path, got NoneType"),
        (
            lambda: Selection.from_blocks([1], [1], q_len=1, k_len=1),
            r"kv_idx must be a torch.Tensor of whole numbers, got list",
        ),
        (lambda: Selection.from_blocks(*BLOCKS, q_len=1, k_len=1, block=0), r"block must be .* at least 1, got 0"),
    ],
)
def test_another_type_is_named(call: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        call()


@pytest.mark.parametrize("changes", [{"sinks": 10**30}, {"block": 10**30}, {"pool": 8, "unpooled": 2**31}])
def test_numbers_that_no_table_holds(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(sinks|block|unpooled) must be at most 2,147,483,647, got \d+"):
        closecall.policy("topk", **changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"name": ["mean"]}', "a scorer is written as an object with its name"),
        ('{"name": "mean"}, "aggregate": []', r"unknown aggregate \[\]"),
    ],
)
def test_a_wrong_type_in_a_policys_json(text: str, says: str) -> None:
    rule = '{"name": "topk", "budget": 3, "tile_factor": 2}'
    with pytest.raises(ValueError, match=says):
        closecall.Policy.from_json(f'{{"closecall_policy": 1, "rule": {rule}, "scorer": {text}}}')


@pytest.mark.parametrize(
    ("policy", "fragments"),
    [
        # Chunk starts at key 100, off the grid of 16: two own blocks and the sink.
        ({"budget": 3, "tile_factor": 1}, ["tile budget 3", "3 forced blocks", "use budget 4 or more"]),
        ({"budget": 1, "tile_factor": 2}, ["tile budget 2", "3 forced blocks", "use budget 2 or more"]),
        ({"budget": 4, "tile_factor": 1, "sinks": 2}, ["tile budget 4", "4 forced blocks", "use budget 5 or more"]),
        ({"budget": 5, "tile_factor": 1, "tile": 64}, ["tile budget 5", "6 forced blocks"]),
    ],
)
def test_a_tile_budget_that_forced_blocks_fill(policy: dict[str, Any], fragments: list[str]) -> None:
    made = closecall.policy("topk", **{"block": 16, "tile": 16} | policy)
    for call in (select, attention):
        with pytest.raises(ValueError, match="tile budget") as error:
            call(tensors(), made)
        says(error, *fragments)


BAD_PADDING = {
    "both": (
        {"key_padding": torch.ones(2, 200, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 200])}, ValueError,
        ["key_padding", "cu_seqlens", "exclude"],
    ),
    "not a tensor": ({"key_padding": [[True]]}, TypeError, ["key_padding", "list", "[2, 200]"]),
    "type": ({"key_padding": torch.ones(2, 200)}, ValueError, ["key_padding", "bool", "torch.float32"]),
    "shape": ({"key_padding": torch.ones(2, 100, dtype=torch.bool)}, ValueError, ["[2, 200]", "[2, 100]"]),
    "hole": (
        {"key_padding": torch.ones(2, 200).index_fill(1, torch.tensor(50), 0).bool()}, ValueError,
        ["key_padding[0]", "between real keys", "left or on the right"],
    ),
    "both sides of one row": (
        {"key_padding": torch.ones(2, 200).index_put((torch.tensor(1), torch.tensor(7)), torch.tensor(0.0)).bool()},
        ValueError, ["key_padding[1]", "between real keys"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PADDING)
def test_bad_padding(name: str) -> None:
    arguments, kind, fragments = BAD_PADDING[name]
    for call in (select, attention):
        with pytest.raises(kind) as error:
            call(tensors(), **arguments)
        says(error, *fragments)


@pytest.mark.parametrize(
    ("cu_seqlens", "kind", "fragments"),
    [
        ([0, 100], TypeError, ["cu_seqlens", "list", "torch"]),
        (torch.tensor([0.0, 100.0]), ValueError, ["cu_seqlens", "int32", "torch.float32"]),
        (torch.tensor([[0, 100]]), ValueError, ["cu_seqlens", "1-D", "[1, 2]"]),
        (torch.tensor([0]), ValueError, ["cu_seqlens", "two", "[1]"]),
        (torch.tensor([0, 99]), ValueError, ["cu_seqlens", "100", "[0, 99]"]),
        (torch.tensor([0, 101]), ValueError, ["cu_seqlens", "100", "[0, 101]"]),
        (torch.tensor([1, 100]), ValueError, ["cu_seqlens", "from 0", "[1, 100]"]),
        (torch.tensor([0, 60, 40, 100]), ValueError, ["cu_seqlens", "rise", "[0, 60, 40, 100]"]),
        (torch.tensor([0, -60, 100]), ValueError, ["cu_seqlens", "rise", "[0, -60, 100]"]),
    ],
)
def test_bad_packing(cu_seqlens: Any, kind: type[Exception], fragments: list[str]) -> None:
    x = {name: torch.zeros(1, 2, 100, 8) for name in "qkv"}
    for call in (select, attention):
        with pytest.raises(kind) as error:
            call(x, cu_seqlens=cu_seqlens)
        says(error, *fragments)


def test_packing_takes_whole_sequences_in_one_row() -> None:
    with pytest.raises(ValueError, match="cu_seqlens") as error:
        select(tensors(), cu_seqlens=torch.tensor([0, 200]))
    says(error, "B = 1", "M = N", "B = 2", "M = 100", "N = 200")


# --- Selections ------------------------------------------------------------------------------------------------------


def hand_made(**changes: Any) -> Selection:
    """Two tiles of 16 rows over the last 32 of 64 keys; each keeps the sink and its own block."""
    index = torch.tensor([[0, 2, 4, 4], [0, 3, 4, 4]], dtype=torch.int32).expand(1, 2, 2, 4)
    counts = torch.full((1, 2, 2), 2, dtype=torch.int32)
    arguments = {"kv_idx": index, "counts": counts, "q_len": 32, "k_len": 64, "block": 16, "tile": 16} | changes
    return Selection.from_blocks(arguments.pop("kv_idx"), arguments.pop("counts"), **arguments)


def small(**changes: Any) -> dict[str, torch.Tensor]:
    return {"q": torch.randn(1, 2, 32, 8), "k": torch.randn(1, 1, 64, 8), "v": torch.randn(1, 1, 64, 8)} | changes


def test_the_hand_made_selection_is_good_before_it_is_spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert attend(small(), hand_made()).shape == (1, 2, 32, 8)


def with_row(row: list[int], count: int, tile: int = 0) -> dict[str, torch.Tensor]:
    good = hand_made()
    index, counts = good.kv_idx.clone(), good.counts.clone()
    index[0, 1, tile], counts[0, 1, tile] = torch.tensor(row), count
    return {"kv_idx": index, "counts": counts}


BAD_SELECTIONS = {
    "past the end": (with_row([0, 99, 4, 4], 2), ["kv_idx[0, 1, 0, 1] = 99", "out of range", "0 to 2"]),
    "the sentinel": (with_row([0, 2, 4, 4], 3), ["kv_idx[0, 1, 0, 2] = 4", "out of range"]),
    "negative": (with_row([-1, 2, 4, 4], 2), ["kv_idx[0, 1, 0, 0] = -1", "out of range"]),
    "the future": (with_row([0, 3, 4, 4], 2), ["kv_idx[0, 1, 0, 1] = 3", "out of range", "0 to 2"]),
    "unsorted": (with_row([2, 0, 4, 4], 2), ["kv_idx[0, 1, 0, 0:2] = [2, 0]", "ascending", "sort"]),
    "duplicated": (with_row([0, 2, 2, 4], 3, 1), ["kv_idx[0, 1, 1, 1:3] = [2, 2]", "distinct"]),
    "more than there is room": (with_row([0, 1, 2, 3], 5, 1), ["counts[0, 1, 1] = 5", "4 blocks", "room for 4"]),
    "no list and not all": (
        {"kv_idx": hand_made().kv_idx[..., :1], "counts": torch.tensor([[[1, 1], [2, 1]]], dtype=torch.int32)},
        ["counts[0, 1, 0] = 2", "sees 3 blocks", "room for 1", "keeps all it sees"],
    ),
    "more than is visible": (with_row([0, 1, 2, 3], 4), ["counts[0, 1, 0] = 4", "sees 3 blocks"]),
    "negative count": (with_row([0, 1, 2, 3], -1), ["counts[0, 1, 0] = -1"]),
    "int64 indices": (
        {"kv_idx": hand_made().kv_idx.long()}, ["kv_idx", "int32", "torch.int64"],
    ),
    "float counts": ({"counts": hand_made().counts.float()}, ["counts", "int32", "torch.float32"]),
    "3-D": ({"kv_idx": hand_made().kv_idx[..., 0]}, ["kv_idx", "[B, H, T, width]", "[1, 2, 2]"]),
    "0-D": ({"kv_idx": torch.tensor(3)}, ["kv_idx", "[B, H, T, width]", "[]"]),
    "tiles": ({"kv_idx": hand_made().kv_idx[:, :, :1]}, ["kv_idx", "T = 2", "[1, 2, 1, 4]"]),
    "counts' shape": ({"counts": torch.ones(1, 2, 3, dtype=torch.int32)}, ["counts", "[1, 2, 2]", "[1, 2, 3]"]),
    "a huge count": (
        {"counts": torch.full((1, 2, 2), 2**32 + 1)}, ["counts[0, 0, 0] = 4294967297"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SELECTIONS)
def test_bad_selections(name: str) -> None:
    changes, fragments = BAD_SELECTIONS[name]
    with pytest.raises(ValueError, match="selection") as error:
        attend(small(), hand_made(**changes))
    says(error, *fragments)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"q": torch.randn(1, 2, 31, 8)}, ["M = 32", "M = 31", "select again"]),
        ({"k": torch.randn(1, 1, 65, 8), "v": torch.randn(1, 1, 65, 8)}, ["N = 64", "N = 65", "select again"]),
        ({name: torch.randn(2, 1, n, 8) for name, n in (("q", 32), ("k", 64), ("v", 64))}, ["B = 1", "B = 2"]),
        ({"q": torch.randn(1, 4, 32, 8)}, ["2 heads", "q has 4", "select again"]),
    ],
)
def test_a_selection_of_another_geometry(changes: dict[str, torch.Tensor], fragments: list[str]) -> None:
    with pytest.raises(ValueError, match="selection") as error:
        attend(small(**changes), hand_made())
    says(error, *fragments)


def test_a_selection_for_a_length_that_is_none() -> None:
    with pytest.raises(ValueError, match="q_len must be a whole number of at least 1, got 'a'"):
        hand_made(q_len="a")


def test_a_selection_on_another_device() -> None:
    with pytest.raises(ValueError, match="selection") as error:
        attend(small(), hand_made().to("meta"))
    says(error, "meta", "cpu", "selection.to()")


def test_something_that_is_no_selection() -> None:
    with pytest.raises(TypeError, match=r"selection must be a closecall\.Selection, got Tensor"):
        attend(small(), hand_made().kv_idx)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda g: {"row": g.row + 17},
        lambda g: {"row": g.row - 1},
        lambda g: {"rows": g.rows + 16},
        lambda g: {"rows": -g.rows},
        lambda g: {"key": g.key + 1},
        lambda g: {"key": g.key - 1},
        lambda g: {"pos": g.pos + 1},
        lambda g: {"pos": g.pos - 64},
        lambda g: {"pos": g.pos + 2**62},
        lambda g: {"row": g.row.to(torch.int32)},
        lambda g: {"row": g.row[:, :1]},
        lambda g: {"key": g.key.repeat(1, 2)[:, ::2]},
        lambda g: {"block": 0},
        lambda g: {"tile": 8},
        lambda g: {"n_blocks": 2},
    ],
)
def test_a_geometry_that_was_tampered_with(spoil: Any) -> None:
    """Native code trusts these tables, so nothing in them may point outside the tensors."""
    good = hand_made()
    bad = dataclasses.replace(good, geometry=dataclasses.replace(good.geometry, **spoil(good.geometry)))
    with pytest.raises(ValueError, match=r"selection\.geometry") as error:
        attend(small(), bad)
    says(error, "select")


@pytest.mark.parametrize("softcap", [-1.0, float("nan"), float("inf"), 10**400, None, "x", True, torch.tensor(3.0)])
def test_softcap(softcap: Any) -> None:
    with pytest.raises(ValueError, match=r"softcap must be a positive number, or 0 for none, got"):
        attention(tensors(), softcap=softcap)
